"""single: budgets of the adaptive compressor, state by name, and which class a text makes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.collective.compression import COMPRESSORS
from headway.comm.algorithms.method import AllReduce, GradientSlice
from headway.comm.compress.compressor import UncompressedPart, make_bucket_layout
from headway.comm.compress.factory import make_method
from headway.comm.compress.sparsification import (
    LARGEST_SHARE,
    SMALLEST_SHARE,
    adapt_budget,
    allocate_budget,
)
from headway.plans import parse_compression
from support.compressor_states import merge_states, spread_states


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_budgets_are_whole_fit_and_add_up(data):
    sizes = data.draw(st.lists(st.integers(1, 500), min_size=1, max_size=9))
    weight = st.floats(1e-3, 1e3)
    wanted = data.draw(st.lists(weight, min_size=len(sizes), max_size=len(sizes)))
    total = data.draw(st.integers(len(sizes), sum(sizes)))
    counts = allocate_budget(wanted, sizes, total)
    assert sum(counts) == total
    assert all(1 <= count <= size for count, size in zip(counts, sizes, strict=True))


def test_budgets_are_in_proportion_where_there_is_room():
    assert allocate_budget([3, 1], [1000, 1000], 402) == [301, 101]
    assert allocate_budget([3, 1], [200, 1000], 402) == [200, 202]


def test_shares_move_until_the_smallest_sent_values_are_equal():
    """A layer 10 times larger has 10 times larger values; its share grows to the limit."""
    shares = [1.0, 1.0]
    for _ in range(20):
        shares = adapt_budget(shares, [100, 100], [10.0, 1.0])
        assert all(SMALLEST_SHARE <= share <= LARGEST_SHARE for share in shares)
    assert shares[0] > 6 * shares[1]
    assert adapt_budget([1.0, 1.0], [5, 50], [2.0, 2.0]) == pytest.approx([1.0, 1.0])
    # A layer that had nothing more to send gives up half of its share.
    assert adapt_budget([1.0, 1.0], [50, 50], [0.0, 2.0])[0] == pytest.approx(2 / 3)
    assert adapt_budget([0.5, 1.5], [5, 5], [0.0, math.nan]) == [0.5, 1.5]


def test_every_element_is_compressed_or_dense_and_none_both():
    pieces = (
        GradientSlice("a", 0, 6, (2, 3)),
        GradientSlice("b", 6, 10, (4,)),
        GradientSlice("c", 10, 13, (3,)),
        GradientSlice("d", 13, 22, (3, 3)),
    )
    layout = make_bucket_layout(pieces, 26, lambda shape: len(shape) > 1, align=8)
    assert [p.name for p in layout.sources] == ["a", "d"]
    assert [(p.start, p.stop) for p in layout.packed] == [(0, 6), (8, 17)]
    assert layout.size == 24
    assert layout.dense == ((6, 13), (22, 26))
    buffer = torch.arange(26.0)
    dense = UncompressedPart(layout.dense)
    summed = dense.collect(buffer)
    assert summed.tolist() == [*range(6, 13), *range(22, 26)]
    dense.spread(summed + 100, buffer)
    assert buffer.tolist() == [*range(6), *range(106, 113), *range(13, 22), *range(122, 126)]
    one = UncompressedPart(((22, 26),))
    view = one.collect(buffer)
    view.add_(1)
    one.spread(view, buffer)
    assert buffer[22:].tolist() == [123, 124, 125, 126]
    one.spread(torch.zeros(4), buffer)
    assert buffer[22:].tolist() == [0, 0, 0, 0]


def test_states_of_lost_ranks_are_added_to_those_who_stay():
    def state(number):
        return {
            "a/residual": torch.full((2, 2), float(number)),
            "a/server": torch.full((2, 2), 10.0 * number),
            "a/q": torch.full((3,), 100.0 + number),
            "a/step": torch.tensor(7),
        }

    states = [state(number) for number in range(5)]
    fewer = spread_states(states, 2)
    assert [float(one["a/residual"][0, 0]) for one in fewer] == [0 + 2 + 4, 1 + 3]
    assert [float(one["a/server"][0, 0]) for one in fewer] == [60.0, 40.0]
    assert all(int(one["a/step"]) == 7 for one in fewer)
    more = spread_states(states[:1], 3)
    assert [sorted(one) for one in more] == [
        ["a/q", "a/residual", "a/server", "a/step"], ["a/q", "a/step"], ["a/q", "a/step"]
    ]  # fmt: skip
    assert float(states[0]["a/residual"].sum()) == 0  # the originals are untouched
    assert float(merge_states(states)["a/q"][0]) == 100.0


def test_every_compressor_of_the_plan_has_its_class():
    for name, facts in COMPRESSORS.items():
        amount = {"none": "", "density": ":0.01", "rank": ":2"}[facts.amount_kind]
        method = make_method(parse_compression(name + amount), seed=0)
        assert method.elementwise is facts.elementwise
        if name != "none":
            assert isinstance(method.compression, facts)
    assert isinstance(make_method(parse_compression("none"), seed=0), AllReduce)
