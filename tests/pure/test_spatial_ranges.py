"""pure: ranges of windows against counting by hand, element by element."""

from __future__ import annotations

from itertools import product

import pytest

from headway.graph.ranges import (
    SlidingWindow,
    TransposedWindow,
    balanced_ranges,
    box_transfers,
    range_exchange,
    range_intersection,
    range_length,
)


@pytest.mark.parametrize(("extent", "parts"), list(product(range(12), range(1, 6))))
def test_shares_are_balanced_and_cover_everything(extent, parts):
    shares = balanced_ranges(extent, parts)
    assert [i for share in shares for i in range(*share)] == list(range(extent))
    sizes = [range_length(share) for share in shares]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


WINDOWS = [
    SlidingWindow(kernel, stride, before, after, dilation)
    for kernel, stride, before, after, dilation in product(
        (1, 2, 3, 5), (1, 2, 3), (0, 1, 2), (0, 1, 2), (1, 2)
    )
]


def places(window, output):
    first = output * window.stride - window.before
    return {first + window.dilation * entry for entry in range(window.kernel)}


@pytest.mark.parametrize("extent", [5, 8, 13])
def test_a_window_wants_the_span_of_its_places(extent):
    for window in WINDOWS:
        padded = range(-window.before, extent + window.after)
        by_hand = [o for o in range(40) if places(window, o) <= set(padded)]
        if extent + window.before + window.after < window.span:
            continue
        assert window.outputs(extent) == len(by_hand), window
        for share in balanced_ranges(len(by_hand), 3):
            touched = {place for output in range(*share) for place in places(window, output)}
            start, stop = window.wanted(share)
            assert (start, stop - 1) == (min(touched), max(touched)) if touched else stop == 0


@pytest.mark.parametrize("extent", [6, 9])
def test_the_inner_outputs_want_nothing_from_elsewhere(extent):
    for window in WINDOWS:
        outputs = window.outputs(extent)
        for have, share in zip(
            balanced_ranges(extent, 2), balanced_ranges(outputs, 2), strict=True
        ):
            start, stop = window.inside(have, extent, share)
            for output in range(*share):
                first, last = window.wanted((output, output + 1))
                alone = all(have[0] <= i < have[1] for i in range(first, last) if 0 <= i < extent)
                assert (start <= output < stop) == alone, (window, output)


@pytest.mark.parametrize("extent", [1, 5, 8])
def test_a_spread_wants_all_inputs_that_reach_its_outputs(extent):
    for kernel, stride, padding, dilation, extra in product(
        (1, 2, 3, 4), (1, 2, 3), (0, 1), (1, 2), (0, 1)
    ):
        if extra >= max(stride, dilation):
            continue
        spread = TransposedWindow(kernel, stride, padding, dilation, extra)
        outputs = spread.outputs(extent)
        if outputs < 1:
            continue
        for share in balanced_ranges(outputs, 3):
            reaching = [
                i for i in range(extent)
                if any(
                    share[0] <= i * stride - padding + dilation * entry < share[1]
                    for entry in range(kernel)
                )
            ]  # fmt: skip
            wanted = range(*spread.wanted(share, extent))
            assert set(reaching) <= set(wanted)
            if dilation == 1 and reaching:
                assert (wanted[0], wanted[-1]) == (reaching[0], reaching[-1])
            if len(wanted):
                first, last = spread.reached((wanted[0], wanted[-1] + 1))
                assert first == wanted[0] * stride - padding
                assert last == wanted[-1] * stride - padding + spread.span


def halo_size(rank, have, want):
    """Elements per line along the dimension that a rank receives."""
    return sum(stop - start for _, (start, stop) in range_exchange(rank, have, want)[1])


def test_every_wanted_element_is_received_once_or_owned():
    have = balanced_ranges(11, 4)
    want = tuple(SlidingWindow(7, 2, 3, 3).wanted(share) for share in balanced_ranges(6, 4))
    for rank in range(4):
        sends, receives = range_exchange(rank, have, want)
        got = [i for _, part in receives for i in range(*part)]
        own = range_intersection(have[rank], want[rank])
        assert sorted([*got, *range(*own)]) == list(range(*range_intersection(want[rank], (0, 11))))
        for peer, part in sends:
            assert (rank, part) in range_exchange(peer, have, want)[1]
    assert halo_size(1, have, want) == 6  # wants (1, 10), owns (3, 6): 2 before and 4 behind


def test_a_same_window_of_stride_one_receives_half_a_kernel_from_each_side():
    for kernel, parts in product((3, 5, 7), (2, 4)):
        shares = balanced_ranges(32, parts)
        want = [
            SlidingWindow(kernel, 1, kernel // 2, kernel // 2).wanted(share) for share in shares
        ]
        sides = [s[0] > 0 for s in shares], [s[1] < 32 for s in shares]
        for rank in range(parts):
            assert halo_size(rank, shares, want) == (sides[0][rank] + sides[1][rank]) * (
                kernel // 2
            )


def grid(shape, parts, kept=()):
    """By rank of a row-major grid, its box; along the dimensions of `kept` every rank has all."""
    shares = [
        balanced_ranges(e, 1 if d in kept else p)
        for d, (e, p) in enumerate(zip(shape, parts, strict=False))
    ]
    places = product(*map(range, parts))
    return tuple(
        tuple(share[0 if d in kept else n] for d, (share, n) in enumerate(zip(shares, place)))  # noqa: B905
        for place in places
    )


@pytest.mark.parametrize("kept", [(), (1,), (0, 2)])
@pytest.mark.parametrize("samples", [1, 3, 7])
def test_every_entry_of_a_wanted_box_comes_once_from_one_that_has_it(samples, kept):
    shape, parts = (samples, 5, 4), (1, 2, 3)
    slabs, whole = grid(shape, parts, kept), ((0, 5), (0, 4))
    shares = tuple((own, *whole) for own in balanced_ranges(samples, 6))
    for have, want in ((slabs, shares), (shares, slabs), (slabs, (((0, samples), *whole),) * 6)):
        for rank, wish in enumerate(want):
            found = [(sender, box) for sender, to, box in box_transfers(have, want) if to == rank]
            entries = [entry for _, box in found for entry in product(*(range(*r) for r in box))]
            assert sorted(entries) == list(product(*(range(*r) for r in wish)))
            for sender, box in found:
                assert all(
                    range_intersection(b, h) == b for b, h in zip(box, have[sender], strict=True)
                )
                assert sender == rank or have[rank] != have[sender]
