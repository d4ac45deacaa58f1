"""ranks: linear layers, norms, embedding and cross-entropy on grids equal whole ones, counted."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from headway.parallel.tensor import (
    CuboidAxes,
    ProcessGrid,
    column_parallel_linear,
    cuboid_linear,
    row_parallel_linear,
    split_cross_entropy,
    split_norm,
    summa_linear,
)
from headway.parallel.tensor.functional import (
    NormOptions,
    SplitClasses,
    vocabulary_parallel_embedding,
)
from headway.parallel.tensor.grid import local_slice
from headway.plans.tensor_layout import MatrixParts, TensorGrid
from support.linear_layout import LinearLayout
from support.ranks import run_ranks

SAMPLES, LENGTH, K, N = 8, 3, 8, 16
M = SAMPLES * LENGTH
FOUR = {
    "classic": TensorGrid.classic(4),
    "2-D": TensorGrid.summa(2),
    "(4, 1, 1)": TensorGrid.cuboid(4, 1, 1),
    "(1, 4, 1)": TensorGrid.cuboid(1, 4, 1),
    "(1, 2, 2)": TensorGrid.cuboid(1, 2, 2),
    "(2, 1, 2)": TensorGrid.cuboid(2, 1, 2),
}
EIGHT = {
    "2.5-D": TensorGrid.summa(2, depth=2),
    "(2, 2, 2)": TensorGrid.cuboid(2, 2, 2),
    "(1, 2, 4)": TensorGrid.cuboid(1, 2, 4),
    "(4, 1, 2)": TensorGrid.cuboid(4, 1, 2),
}


def close(found, expected):
    """To 1e-12 of the largest number."""
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= 1e-12 * max(1.0, float(expected.abs().max()))


def numbers(*shape, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw, dtype=torch.float64)


def cut(grid, x, rows, columns):
    """This rank's part of an activation or of a weight."""
    return local_slice(local_slice(x, grid, rows, 0), grid, columns, x.ndim - 1).clone()


def layer(grid, x, w, b, layout, **settings):
    match grid.plan.form:
        case "classic" if layout.x.columns:
            return row_parallel_linear(x, w, b, grid)
        case "classic":
            return column_parallel_linear(x, w, b, grid)
        case "summa":
            return summa_linear(x, w, b, grid)
        case "cuboid":
            turn = CuboidAxes(grid, layout.x.rows[1], layout.x.columns, **settings)
            return cuboid_linear(x, w, b, turn)


def one_linear(grid, start, seed, settings):
    """Output, gradients, shares and counted elements of a layer."""
    x, w, b = numbers(SAMPLES, LENGTH, K, seed=seed), numbers(N, K, seed=seed + 1), numbers(N)
    g = numbers(SAMPLES, LENGTH, N, seed=seed + 2)
    leaves = [t.requires_grad_() for t in (x, w, b)]
    functional.linear(x, w, b).backward(g)
    layout = LinearLayout(grid=grid.plan, x=start, m=M, k=K, n=N)
    parts = [
        cut(grid, x.detach(), layout.x.rows, layout.x.columns),
        cut(grid, w.detach(), layout.weight.rows, layout.weight.columns),
        local_slice(b.detach(), grid, layout.bias, 0).clone(),
    ]
    assert layout.shares["x"] == parts[0].numel()
    assert layout.shares["w"] == parts[1].numel()
    own = [t.requires_grad_() for t in parts]
    grid.received.clear()
    y = layer(grid, *own, layout, **settings)
    close(
        y.detach(), cut(grid, functional.linear(x, w, b).detach(), layout.y.rows, layout.y.columns)
    )
    assert layout.shares["y"] == y.numel()
    assert grid.count == sum(layout.forward.values())
    grid.received.clear()
    y.backward(cut(grid, g, layout.y.rows, layout.y.columns))
    expected = layout.backward(keep=settings.get("keep", True), bias=True)
    assert grid.count == sum(expected.values())
    close(own[0].grad, cut(grid, leaves[0].grad, layout.x.rows, layout.x.columns))
    close(own[1].grad, cut(grid, leaves[1].grad, layout.weight.rows, layout.weight.columns))
    close(own[2].grad, local_slice(leaves[2].grad, grid, layout.bias, 0))


def norms(grid):
    rows, columns = grid.plan.resident.rows, grid.plan.resident.columns
    x, w, b = numbers(SAMPLES, LENGTH, K), numbers(K, seed=1), numbers(K, seed=2)
    x = 3 * x + 100
    g = numbers(SAMPLES, LENGTH, K, seed=3)
    for centred in (True, False):
        whole = [t.clone().requires_grad_() for t in (x, w, b)]
        own = [
            cut(grid, x, rows, columns).requires_grad_(),
            local_slice(w, grid, columns, 0).clone().requires_grad_(),
            local_slice(b, grid, columns, 0).clone().requires_grad_(),
        ]
        if centred:
            y = functional.layer_norm(whole[0], (K,), whole[1], whole[2], 1e-5)
        else:
            y = functional.rms_norm(whole[0], (K,), whole[1], 1e-5)
        found = split_norm(
            own[0],
            own[1],
            own[2] if centred else None,
            NormOptions(grid, rows, columns, 1e-5, centred),
        )
        close(found.detach(), cut(grid, y.detach(), rows, columns))
        y.backward(g)
        found.backward(cut(grid, g, rows, columns))
        close(own[0].grad, cut(grid, whole[0].grad, rows, columns))
        for mine, all_of_it in zip(own[1:], whole[1:], strict=True):
            if all_of_it.grad is not None:
                close(mine.grad, local_slice(all_of_it.grad, grid, columns, 0))


def losses(grid, axis):
    logits, target = 5 * numbers(M, N), torch.arange(M) % N
    target[3] = -100
    g = numbers(M, seed=4)
    for smoothing in (0.0, 0.1):
        whole = logits.clone().requires_grad_()
        own = local_slice(logits, grid, axis, 1).clone().requires_grad_()
        expected = functional.cross_entropy(
            whole, target, reduction="none", label_smoothing=smoothing
        )
        found = split_cross_entropy(own, target, SplitClasses(grid, axis, smoothing))
        close(found.detach(), expected.detach())
        expected.backward(g)
        found.backward(g)
        close(own.grad, local_slice(whole.grad, grid, axis, 1))
    with pytest.raises(IndexError, match="target 16 is not among 16"):
        split_cross_entropy(own, torch.full((M,), N), SplitClasses(grid, axis))


def tables(grid, axis):
    weight, index = numbers(N, K), torch.arange(M).reshape(SAMPLES, LENGTH) * 5 % N
    whole = weight.clone().requires_grad_()
    own = local_slice(weight, grid, axis, 0).clone().requires_grad_()
    y = vocabulary_parallel_embedding(index, own, grid, axis, padding=5)
    found = grid.all_reduce_over(y.detach().clone(), axis)
    expected = functional.embedding(index, whole, padding_idx=5)
    assert torch.equal(found, expected.detach())
    g = numbers(SAMPLES, LENGTH, K, seed=3)
    y.backward(g)
    expected.backward(g)
    assert torch.equal(own.grad, local_slice(whole.grad, grid, axis, 0))
    with pytest.raises(IndexError, match="word -15 is not among 16"):
        vocabulary_parallel_embedding(-index, own, grid, axis, None)


def on_grids(world, plans):
    for plan in plans.values():
        grid = ProcessGrid.of(plan)
        starts = [plan.resident]
        if plan.form != "summa":
            starts.append(plan.after(plan.resident))
        cuboid = plan.form == "cuboid"
        more = [{}, {"keep": False}, {"chunks": 2}] if cuboid else [{}]
        for seed, start in enumerate(starts):
            for settings in more:
                one_linear(grid, start, seed, settings)
        if plan.form == "classic":
            losses(grid, "j")
            tables(grid, "j")
        else:
            norms(grid)
        if grid.size("j") > 1 and plan.form == "cuboid":
            losses(grid, "j")
            tables(grid, "ji")


def test_four_ranks():
    run_ranks(4, on_grids, FOUR, timeout=60)


def test_eight_ranks():
    run_ranks(8, on_grids, EIGHT, timeout=60)


@pytest.mark.parametrize("plan", [*FOUR.values(), *EIGHT.values()], ids=str)
def test_what_the_formulas_say(plan):
    """The numbers of the papers: 1/p of weights, 1/q^2 and 1/q^3 of all."""
    layout = LinearLayout(grid=plan, x=plan.resident, m=M, k=K, n=N)
    p, received = plan.ranks, sum(layout.forward.values())
    match plan.form:
        case "classic":
            assert layout.shares == {"x": M * K, "w": K * N // p, "y": M * N // p}
            turned = LinearLayout(grid=plan, x=layout.y, m=M, k=N, n=K)
            assert sum(turned.forward.values()) == 2 * (p - 1) * M * K // p
            assert turned.y == MatrixParts("", "")
        case "cuboid":
            q_i, q_j, q_l = (plan.size(axis) for axis in "ijl")
            assert layout.shares == {"x": M * K // p, "w": K * N // p, "y": M * N // p}
            parts = (q_j - 1) * M * K + (q_i - 1) * K * N + (q_l - 1) * M * N
            assert received == parts / p
        case "summa":
            q, d = plan.size("i"), plan.size("d")
            shares = {"x": M * K // (d * q * q), "w": K * N // q**2, "y": M * N // (d * q * q)}
            assert layout.shares == shares
            assert received == (q - 1) / q**2 * (M * K / d + K * N)
