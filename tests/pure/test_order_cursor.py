"""pure: the order of an epoch is a permutation of (seed, epoch); cursors cut it into batches."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.data.order import Cursor, SampleOrder, sample_seeds, take
from headway.errors import DataError
from support.patience import patient

SEEDS = st.integers(0, 2**64)


@pytest.mark.parametrize("seed", [0, 1, 2**40])
def test_order_is_a_permutation_of_every_small_length(seed):
    for length in range(1, 200):
        places = SampleOrder(length, seed).indices(seed % 3, 0, length)
        assert places.dtype == np.int64
        assert np.array_equal(np.sort(places), np.arange(length)), length


@given(
    length=st.integers(1, 5000),
    seed=SEEDS,
    epoch=st.integers(0, 10**6),
    cut=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_random_access_equals_a_slice_of_the_whole(length, seed, epoch, cut):
    start, stop = sorted(round(part * length) for part in cut)
    order = SampleOrder(length, seed)
    whole = order.indices(epoch, 0, length)
    assert np.array_equal(order.indices(epoch, start, stop), whole[start:stop])
    assert np.array_equal(np.sort(whole), np.arange(length))


@given(length=st.integers(50, 10**15), seed=SEEDS, epoch=st.integers(0, 1000))
def test_order_differs_between_epochs_and_seeds(length, seed, epoch):
    first = SampleOrder(length, seed).indices(epoch, 0, 50)
    assert not np.array_equal(first, SampleOrder(length, seed).indices(epoch + 1, 0, 50))
    assert not np.array_equal(first, SampleOrder(length, seed + 1).indices(epoch, 0, 50))
    assert len(set(first.tolist())) == 50
    assert 0 <= first.min() <= first.max() < length


def test_order_stays_what_it_was():
    """Runs resume under newer versions of headway and numpy: these numbers must never change."""
    assert SampleOrder(10, 7).indices(0, 0, 10).tolist() == [8, 0, 4, 1, 5, 7, 6, 2, 9, 3]
    assert SampleOrder(10**12, 7).indices(3, 5, 8).tolist() == [
        139428570955,
        761236759239,
        709622442675,
    ]
    assert sample_seeds(7, 3, 5, 7) == [16524160788958318722, 17795468748915106380]


def test_all_orders_of_five_samples_are_equally_likely():
    rounds, ways = 20, 120
    counts = Counter(
        tuple(SampleOrder(5, seed).indices(seed % 5, 0, 5).tolist())
        for seed in range(rounds * ways)
    )
    squares = sum((counts[way] - rounds) ** 2 / rounds for way in permutations(range(5)))
    # Chi-squared with 119 degrees of freedom: 5 standard deviations above its mean.
    assert squares < 119 + 5 * (2 * 119) ** 0.5


def test_even_and_odd_permutations_are_reached():
    """On a grid of 3 x 3 every round is an even permutation; hence the even number of rows."""
    signs = set()
    for seed in range(20):
        order = SampleOrder(9, seed).indices(0, 0, 9)
        signs.add(round(np.linalg.det(np.eye(9)[order])))
    assert signs == {-1, 1}


def test_order_mixes():
    length, trials = 10007, 60
    places = np.arange(length)
    figures = []
    for seed in range(trials):
        order = SampleOrder(length, seed).indices(1, 0, length)
        figures.append(
            [
                np.corrcoef(order[:-1], order[1:])[0, 1] * length**0.5,
                np.corrcoef(places, order)[0, 1] * length**0.5,
                np.corrcoef(order[:-101], order[101:])[0, 1] * length**0.5,
                np.sum(np.abs(np.diff(order)) == 1) - 2,
                np.sum(order == places) - 1,
            ]
        )
    # Each is about normal (0, 1) or Poisson about 0 for a random permutation: means within 5 sigma.
    assert np.abs(np.mean(figures, axis=0) * trials**0.5 / [1, 1, 1, 2**0.5, 1]).max() < 5
    assert np.std(figures, axis=0).max() < 2


def test_order_unshuffled_and_its_limits():
    order = SampleOrder(9, 3, shuffle=False)
    assert order.indices(4, 2, 6).tolist() == [2, 3, 4, 5]
    assert SampleOrder(9, 3).indices(0, 4, 4).tolist() == []
    for start, stop in [(-1, 2), (3, 2), (0, 10)]:
        with pytest.raises(IndexError, match="epoch of 9 samples"):
            order.indices(0, start, stop)


@given(seed=SEEDS, epoch=st.integers(0, 100), start=st.integers(0, 10**12))
def test_sample_seeds_belong_to_places(seed, epoch, start):
    seeds = sample_seeds(seed, epoch, start, start + 20)
    assert seeds[5:9] == sample_seeds(seed, epoch, start + 5, start + 9)
    assert len(set(seeds)) == 20
    assert all(0 <= value < 2**64 for value in seeds)
    assert not set(seeds) & set(sample_seeds(seed, epoch + 1, start, start + 20))


@given(
    length=st.integers(1, 300),
    batch=st.integers(1, 300),
    drop_last=st.booleans(),
    epochs=st.integers(1, 3),
)
def test_batches_tile_every_epoch(length, batch, drop_last, epochs):
    if batch > length and drop_last:
        return
    cursor, places = Cursor(seed=1), []
    while cursor.epoch < epochs:
        count, after = take(cursor, length, batch, drop_last)
        assert 1 <= count <= batch
        places += [(cursor.epoch, cursor.position + place) for place in range(count)]
        assert (after.epoch, after.position) > (cursor.epoch, cursor.position)
        assert after.seed == 1
        cursor = after
    used = length - length % batch if drop_last else length
    assert places == [(epoch, place) for epoch in range(epochs) for place in range(used)]
    assert cursor.position == 0


def test_take_leaves_out_a_rest_that_a_larger_batch_finds():
    assert take(Cursor(3, 1, 90), 100, 32, drop_last=True) == (0, Cursor(3, 2, 0))
    assert take(Cursor(3, 1, 90), 100, 32) == (10, Cursor(3, 2, 0))
    assert take(Cursor(3, 1, 64), 100, 32, drop_last=True) == (32, Cursor(3, 2, 0))
    assert take(Cursor(3, 1, 64), 100, 32) == (32, Cursor(3, 1, 96))


def test_take_refuses_a_cursor_of_other_data():
    with pytest.raises(DataError, match="outside its data") as caught:
        take(Cursor(0, 2, 100), 100, 10)
    assert caught.value.where == "epoch 2, position 100"
    assert "100 samples" in caught.value.why


def test_cursor_travels_as_plain_data():
    cursor = Cursor(2**63, 4, 17)
    assert cursor.to_dict() == {"seed": 2**63, "epoch": 4, "position": 17}
    assert Cursor.from_dict(cursor.to_dict()) == cursor


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"seed": 0, "epoch": 1},
        {"seed": 0, "epoch": 1, "position": -1},
        {"seed": 0, "epoch": 1, "position": 2.0},
        {"seed": 0, "epoch": True, "position": 2},
        {"seed": 0, "epoch": 1, "position": 2, "rank": 0},
    ],
)
def test_cursor_refuses_other_data(facts):
    with pytest.raises(DataError, match="not a cursor"):
        Cursor.from_dict(facts)


def test_order_and_cursor_do_not_import_torch():
    code = (
        "import sys; from headway.data import Cursor, SampleOrder; sys.exit('torch' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], timeout=patient(60), check=False).returncode
        == 0
    )
