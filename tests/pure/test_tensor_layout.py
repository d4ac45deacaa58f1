"""pure: where the parts of split layers lie, what they cost, which degrees are legal."""

from __future__ import annotations

import itertools
import math

import pytest

from headway.errors import PlanError
from headway.plans.tensor_layout import (
    AxisDivisor,
    MatrixParts,
    TensorGrid,
    check_divisibility,
    divisors,
)
from support.linear_layout import LinearLayout, elements_exchanged, optimal_data_groups


def test_two_layers_turn_a_cuboid_back():
    grid = TensorGrid.cuboid(2, 3, 5)
    assert grid.resident == MatrixParts("ij", "l")
    assert grid.after(grid.resident) == MatrixParts("il", "j")
    assert grid.after(MatrixParts("il", "j")) == grid.resident
    with pytest.raises(ValueError, match="no layout of cuboid"):
        grid.after(MatrixParts("j", "i"))


def test_parts_of_every_form_are_whole_fractions():
    for grid, x, w in [
        (TensorGrid.classic(4), 1, 4),
        (TensorGrid.summa(4), 16, 16),
        (TensorGrid.summa(2, depth=3), 12, 4),
        (TensorGrid.cuboid(2, 2, 2), 8, 8),
        (TensorGrid.cuboid(1, 2, 4), 8, 8),
    ]:
        layout = LinearLayout(grid=grid, x=grid.resident, m=48, k=64, n=96)
        assert layout.shares["x"] * x == 48 * 64
        assert layout.shares["w"] * w == 64 * 96


def test_a_cube_moves_less_than_megatron():
    """M = K = N at p = 8: 3/8 N^2 a layer against 7/8 N^2, the mean of an MLP's two layers."""
    n = 64
    cube = TensorGrid.cuboid(2, 2, 2)
    square = LinearLayout(grid=cube, x=cube.resident, m=n, k=n, n=n)
    assert sum(square.forward.values()) == 3 * n * n // 8
    line = TensorGrid.classic(8)
    pair = [
        LinearLayout(grid=line, x=x, m=n, k=n, n=n)
        for x in (MatrixParts("", ""), MatrixParts("", "j"))
    ]
    assert sum(sum(layer.forward.values()) for layer in pair) / 2 == 7 * n * n / 8


def test_gathering_again_costs_what_the_gathers_cost():
    grid = TensorGrid.cuboid(2, 3, 4)
    layout = LinearLayout(grid=grid, x=grid.resident, m=48, k=24, n=24)
    kept, again = (sum(layout.backward(keep=keep).values()) for keep in (True, False))
    assert kept == sum(layout.forward.values())
    assert again - kept == layout.forward["x"] + layout.forward["w"]
    assert layout.workspace == {"x": layout.shares["x"] * 3, "w": layout.shares["w"] * 2}


def test_groups_are_where_the_closed_form_says():
    """G* = sqrt(P m / N), to one divisor: the least of a convex function of G lies beside it."""
    for ranks, rows, outputs in itertools.product((4, 12, 64, 720), (3, 64, 4096), (10, 512, 9000)):
        legal = divisors(ranks)
        brute = min(legal, key=lambda g: (elements_exchanged(g, ranks, rows, outputs), g))
        assert optimal_data_groups(ranks, rows, outputs) == brute
        ideal = min(max(math.sqrt(ranks * rows / outputs), 1), ranks)
        near = sum(legal[i] <= ideal for i in range(len(legal))) - 1
        assert abs(legal.index(brute) - near) <= 1
        assert (
            elements_exchanged(1, ranks, rows, outputs)
            < elements_exchanged(ranks, ranks, rows, outputs)
        ) == (rows < outputs)


def test_a_cuboid_of_groups_emits_what_the_cost_counts():
    """(G, P/G, 1) is G data groups of P/G ranks: test_tensor_primitives counts it at work."""
    for groups in divisors(24):
        grid = TensorGrid.cuboid(groups, 24 // groups, 1)
        layout = LinearLayout(grid=grid, x=grid.resident, m=48, k=8, n=72)
        emitted = sum(layout.forward.values()) + sum(layout.backward().values())
        assert emitted == pytest.approx(8 * elements_exchanged(groups, 24, 48, 72), rel=1e-12)


def test_all_sizes_that_do_not_fit_are_named_with_the_legal_degrees():
    grid = TensorGrid.cuboid(2, 3, 1)
    fits, heads, words = (
        AxisDivisor("i", 8, "samples"),
        AxisDivisor("j", 8, "heads"),
        AxisDivisor("ji", 50, "words"),
    )
    check_divisibility(grid, [fits])
    with pytest.raises(PlanError) as caught:
        check_divisibility(grid, [fits, heads, words, heads])
    assert caught.value.problems == (
        "heads: 8 over j = 3; legal degrees: 1, 2, 4, 8",
        "words: 50 over j = 3 x i = 2; legal degrees: 1, 2, 5, 10, 25, 50",
    )
    assert "j of 1" in caught.value.fix
