"""pure: the grid of ranks against its definition, for all factorisations of a world."""

from __future__ import annotations

import itertools
import math

import pytest

from headway.plans import Axis, Mesh


def factorisations(size, length):
    """Every way to write `size` as an ordered product of `length` factors."""
    if length == 1:
        return [(size,)]
    return [
        (first, *rest)
        for first in range(1, size + 1)
        if size % first == 0
        for rest in factorisations(size // first, length - 1)
    ]


def mesh(*sizes):
    names = ["data", "pipe", "tensor"][: len(sizes)]
    return Mesh(axes=tuple(Axis(name=n, size=s) for n, s in zip(names, sizes, strict=True)))


GRIDS = [sizes for length in (1, 2, 3) for sizes in factorisations(12, length)]


@pytest.mark.parametrize("sizes", GRIDS, ids=str)
def test_coordinates_count_in_row_major_order(sizes):
    grid = mesh(*sizes)
    assert grid.size == math.prod(sizes) == 12
    places = [tuple(grid.coordinate(rank).values()) for rank in range(12)]
    assert places == list(itertools.product(*(range(size) for size in sizes)))
    assert list(grid.coordinate(0)) == list(grid.names)


@pytest.mark.parametrize("sizes", GRIDS, ids=str)
def test_peers_of_each_axis_partition_the_ranks(sizes):
    grid = mesh(*sizes)
    for axis in grid.axes:
        groups = {grid.peers(rank, axis.name) for rank in range(12)}
        assert sorted(rank for group in groups for rank in group) == list(range(12))
        for group in groups:
            assert [grid.coordinate(r)[axis.name] for r in group] == list(range(axis.size))
            others = [{**grid.coordinate(r), axis.name: None} for r in group]
            assert all(other == others[0] for other in others)


def test_the_degree_of_an_absent_axis_is_one():
    grid = mesh(4, 3)
    assert (grid.degree("data"), grid.degree("pipe"), grid.degree("tensor")) == (4, 3, 1)
    assert grid.peers(5, "tensor") == (5,)


@pytest.mark.parametrize("rank", [-1, 12])
def test_a_rank_outside_is_an_error(rank):
    with pytest.raises(ValueError, match=f"rank {rank} is not on a mesh of 12 ranks"):
        mesh(3, 4).coordinate(rank)
