"""ranks: Adasum equals its tree in one process, and has the properties it is chosen for."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from headway.collective.nodes import Nodes
from headway.comm.algorithms import adasum
from headway.comm.algorithms.adasum import (
    Adasum,
    Float64Workspace,
    adasum_coefficients,
    dot_and_norms,
)
from headway.comm.algorithms.method import FusedBuffer, GradientSlice, complete
from headway.comm.lanes.routes import make_route
from support.adasum_tree import adasum_tree
from support.ranks import ranks, run_ranks

SIZES = (130, 1, 0, 700, 3, 166)
"""Layers that lie across halves, of one element, and of none."""


def pieces(sizes=SIZES) -> tuple[GradientSlice, ...]:
    found, start = [], 0
    for number, size in enumerate(sizes):
        found.append(GradientSlice(f"layer{number}", start, start + size, (size,)))
        start += size
    return (*found,)


def vector(rank: int, seed: int = 0, sizes=SIZES) -> Tensor:
    """Gradients that partly agree, layers of different magnitude; rank 1 has no third layer."""
    common = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(seed)).double()
    own = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(rank + 99)).double()
    values = common + (1 + rank) * own
    for number, piece in enumerate(pieces(sizes)):
        values[piece.start : piece.stop] *= 10.0 ** (2 * number - 4)
        if rank == 1 and number == 3:
            values[piece.start : piece.stop] = 0
    return values


def bucket(values: Tensor, flags: list[float], sizes=SIZES, number: int = 0) -> FusedBuffer:
    flat = torch.cat((values, torch.tensor(flags, dtype=values.dtype)))
    return FusedBuffer(flat, pieces(sizes), number)


def error(found: Tensor, expected: Tensor, sizes=SIZES) -> float:
    """The largest relative error of a layer."""
    return max(
        ((found[p.start : p.stop] - expected[p.start : p.stop]).norm() / norm).item()
        for p in pieces(sizes)
        if (norm := expected[p.start : p.stop].norm()) > 0
    )


def flags_of(world) -> list[float]:
    """Nobody used the second parameter; the last rank alone used the first."""
    return [float(world.rank == world.size - 1), 0.0, 1.0, 0.0, float(world.rank == 0), 1.0]


def over_ranks(world, dtype, group_bytes: int, nodes: Nodes | None = None):
    adasum.GROUP_BYTES = group_bytes
    method = Adasum(hierarchical=nodes is not None)
    route = make_route(None, nodes or Nodes.one(world.size), hierarchical=nodes is not None)
    for number in (0, 4):  # twice: the second time with memory that was used before
        fused = bucket(vector(world.rank, number).to(dtype), flags_of(world), number=number)
        complete(method, fused, route)
    return fused.gradients, fused.flags


def in_groups(world):
    """A group for each layer, a few groups, one group."""
    return [over_ranks(world, torch.float64, size) for size in (1, 6000, 10**9)]


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 8])
def test_adasum_equals_the_tree(size):
    results = run_ranks(size, in_groups)
    expected = adasum_tree([vector(rank, 4) for rank in range(size)], pieces())
    for runs in results:
        for place, (found, flags) in enumerate(runs):
            assert torch.equal(found, results[0][place][0])
            assert error(found, expected) < 1e-12
            assert (flags > 0).tolist() == [True, False, True, False, True, True]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-7), (torch.bfloat16, 2e-2)])
def test_adasum_in_other_types(dtype, bound):
    results = run_ranks(4, over_ranks, dtype, 1000)
    given = [vector(rank, 4).to(dtype).double() for rank in range(4)]
    expected = adasum_tree(given, pieces())
    assert error(results[3][0].double(), expected) < bound
    assert (results[3][1] > 0).tolist() == [True, False, True, False, True, True]


@pytest.mark.parametrize(
    "nodes",
    [
        Nodes(((0, 1), (2, 3))),
        Nodes(((0, 3), (1, 2))),
        Nodes(((0, 1), (2, 3), (4, 5))),
        Nodes(((0, 1, 2, 3),)),
        Nodes(((0,), (1,), (2,))),
    ],
    ids=str,
)
def test_mean_inside_nodes_and_adasum_across(nodes):
    results = run_ranks(nodes.ranks, over_ranks, torch.float64, 1000, nodes)
    means = [
        torch.stack([vector(rank, 4) for rank in members]).mean(0) for members in nodes.members
    ]
    expected = adasum_tree(means, pieces())
    for found, flags in results:
        assert torch.equal(found, results[0][0])
        assert error(found, expected) < 1e-12
        assert (flags > 0).tolist() == [True, False, True, False, True, True]


def with_stages(world) -> Tensor:
    adasum.DIRECT = 2
    return over_ranks(world, torch.float64, 1000)[0]


def test_dot_products_of_many_ranks_are_summed_in_stages():
    results = run_ranks(8, with_stages)
    assert all(torch.equal(found, results[0]) for found in results)
    expected = adasum_tree([vector(rank, 4) for rank in range(8)], pieces())
    assert error(results[0], expected) < 1e-12


# ---- the rule --------------------------------------------------------------------------------

WHOLE = (GradientSlice("all", 0, 64, (64,)),)


def pair(cosine: float, first: float = 1.0, second: float = 1.0) -> tuple[Tensor, Tensor]:
    """Vectors with a given angle and lengths."""
    basis = torch.linalg.qr(torch.randn(64, 2, generator=torch.Generator().manual_seed(3)).double())
    one, other = basis.Q.T
    return first * one, second * (cosine * one + math.sqrt(1 - cosine**2) * other)


def test_orthogonal_adds_parallel_averages_zero_is_neutral():
    a, b = pair(0.0, 3, 5)
    assert torch.allclose(adasum_tree([a, b], WHOLE), a + b, rtol=1e-12)
    scales = torch.tensor([1.0, 2.0, 3.0, 6.0, 0.5, 4.0, 7.0, 9.0], dtype=torch.float64)
    found = adasum_tree([scale * a for scale in scales], WHOLE)
    assert torch.allclose(found, scales.mean() * a, rtol=1e-12)
    assert torch.allclose(adasum_tree([a, a], WHOLE), a, rtol=1e-12)
    zero = torch.zeros_like(a)
    assert torch.equal(adasum_tree([zero, b], WHOLE), b)
    assert torch.equal(adasum_tree([a, zero], WHOLE), a)
    assert torch.equal(adasum_tree([zero, zero], WHOLE), zero)
    tiny = a * 1e-90
    assert torch.equal(adasum_tree([tiny, b], WHOLE), tiny + b)


def test_symmetric_and_scale_equivariant_but_not_associative():
    a, b = pair(0.6, 2, 5)
    c, d = pair(-0.3, 4, 1)
    assert torch.allclose(adasum_tree([a, b], WHOLE), adasum_tree([b, a], WHOLE), rtol=1e-12)
    one = adasum_tree([a, b, c, d], WHOLE)
    assert torch.allclose(one, adasum_tree([c, d, a, b], WHOLE), rtol=1e-12)
    scaled = adasum_tree([1e6 * v for v in (a, b, c, d)], WHOLE)
    assert torch.allclose(scaled, 1e6 * one, rtol=1e-12)
    assert not torch.allclose(one, adasum_tree([a, c, b, d], WHOLE), rtol=1e-3)


@pytest.mark.parametrize("cosine", [-1.0, -0.7, 0.0, 0.2, 0.9, 1.0])
@pytest.mark.parametrize(("first", "second"), [(1, 1), (3, 0.2), (1e-3, 1e3)])
def test_the_length_of_the_result_in_closed_form(cosine, first, second):
    """|A|^2 = (|a|^2 + |b|^2)(1 - 3 c^2 / 4) + |a| |b| c^3 / 2."""
    a, b = pair(cosine, first, second)
    found = (adasum_tree([a, b], WHOLE).norm() ** 2).item()
    formula = (first**2 + second**2) * (1 - 0.75 * cosine**2) + first * second * cosine**3 / 2
    assert found == pytest.approx(formula, rel=1e-9)
    assert found <= (first**2 + second**2) * (1 + 1e-12)


def test_ten_million_elements_of_mixed_magnitude():
    """In float32 the small ones would be lost behind the large ones."""
    size = 10**7
    left = torch.full((size,), 1e-4)
    left[::1000] = 100.0
    right = left.clone()
    right[1::2] = -1e-4
    found = dot_and_norms(left, right, Float64Workspace(left.device))
    large, small = float(left[0]) ** 2 * (size // 1000), float(left[1]) ** 2
    norm = large + small * (size - size // 1000)
    dot = large + small * (size // 2 - size // 1000) - small * (size // 2)
    assert found == pytest.approx((dot, norm, norm), rel=1e-12)


def test_factors_of_zero_are_one():
    assert adasum_coefficients(0.0, 0.0, 4.0) == (1.0, 1.0)
    assert adasum_coefficients(1.0, 2.0, 4.0) == (0.75, 0.875)
    assert adasum_coefficients(1.0, 1e-160, 4.0) == (1.0, 0.875)


# ---- on the wire -------------------------------------------------------------------------------


def sent_bytes(world) -> int:
    route = make_route(None, Nodes.one(world.size))
    real, count = dist.isend, 0

    def counting(tensor, **where):
        nonlocal count
        count += tensor.numel() * tensor.element_size()
        return real(tensor, **where)

    dist.isend = counting
    try:
        sizes = [4096] * 25
        values = torch.randn(sum(sizes))
        complete(Adasum(), bucket(values, [1.0] * 25, sizes), route)
    finally:
        dist.isend = real
    return count


@pytest.mark.parametrize("size", [2, 4, 8])
def test_bytes_on_the_wire(size):
    """2 d (n - 1) / n elements, and three doubles a layer to each rank of the block a level."""
    levels = size.bit_length() - 1
    halves = 2 * 25 * 4096 * 4 * (size - 1) / size
    sums = 24 * 25 * sum(2**level - 1 for level in range(1, levels + 1))
    flags = 8 * 25 * (size - 1)
    assert run_ranks(size, sent_bytes) == [pytest.approx(halves + sums + flags, rel=1e-9)] * size
    assert (sums + flags) / halves < 0.03


@ranks(4)
def test_two_buckets_under_way_at_the_same_time_do_not_mix(world):
    from headway.comm.algorithms.method import wait

    route = make_route(None, Nodes.one(world.size))
    buckets = [bucket(vector(world.rank, n), [1.0] * 6, number=n) for n in (0, 1)]
    running = [Adasum().rounds(fused, route) for fused in buckets]
    waits = [next(rounds) for rounds in running]
    for _ in range(99):
        for place, rounds in enumerate(running):
            if waits[place] is not None:
                wait(waits[place])
                waits[place] = next(rounds, None)
    for number, fused in enumerate(buckets):
        expected = adasum_tree([vector(rank, number) for rank in range(4)], pieces())
        assert error(fused.gradients, expected) < 1e-12


# ---- in training -------------------------------------------------------------------------------


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(16, 6, generator=torch.Generator().manual_seed(100 * step + rank)).double()
    return inputs, inputs.sin().sum(1, keepdim=True)


def local_step(net: nn.Module, optimizer, rank: int, step: int) -> None:
    inputs, targets = batch(rank, step)
    optimizer.zero_grad()
    (net(inputs) - targets).square().mean().backward()
    optimizer.step()


def flat(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def load(net: nn.Module, values: Tensor) -> None:
    nn.utils.vector_to_parameters(values, net.parameters())


def combining_optimiser(world) -> Tensor:
    """20 steps with Adam: each rank its own step, then Adasum of the steps."""
    route, net = make_route(None, Nodes.one(world.size)), model()
    optimizer, method = torch.optim.Adam(net.parameters(), lr=0.01), Adasum()
    sizes = [p.numel() for p in net.parameters()]
    for step in range(20):
        start = flat(net)
        local_step(net, optimizer, world.rank, step)
        fused = bucket(flat(net) - start, [1.0] * 4, sizes)
        complete(method, fused, route)
        load(net, start + fused.gradients)
    return flat(net)


def emulated(size: int) -> Tensor:
    nets = [model() for _ in range(size)]
    optimizers = [torch.optim.Adam(net.parameters(), lr=0.01) for net in nets]
    layers = pieces([p.numel() for p in nets[0].parameters()])
    for step in range(20):
        start = flat(nets[0])
        for rank, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            local_step(net, optimizer, rank, step)
        updates = adasum_tree([flat(net) - start for net in nets], layers)
        for net in nets:
            load(net, start + updates)
    return flat(nets[0])


@pytest.mark.parametrize("size", [3, 4])
def test_adasum_of_adams_steps_equals_one_process(size):
    results = run_ranks(size, combining_optimiser)
    expected = emulated(size)
    assert (expected - flat(model())).norm() > 0.1
    for found in results:
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-8)


def steps_to_solve(world, mean: bool) -> int:
    """Least squares; each of two ranks sees its own half of the unknowns: orthogonal gradients."""
    route = make_route(None, Nodes.one(2))
    truth, weight = torch.arange(1.0, 9.0), torch.zeros(8)
    mine = slice(4 * world.rank, 4 * world.rank + 4)
    for step in range(1, 500):
        gradient = torch.zeros(8)
        gradient[mine] = weight[mine] - truth[mine]
        fused = bucket(gradient, [1.0], [8])
        complete(Adasum(), fused, route)
        if mean:
            dist.all_reduce(gradient, group=route.group)
            fused.gradients.copy_(gradient / 2)
        weight -= 0.1 * fused.gradients
        if (weight - truth).norm() < 1e-2 * truth.norm():
            return step
    return 500


def test_with_orthogonal_data_adasum_needs_at_most_0_6_times_the_steps_of_the_mean():
    steps, mean_steps = (
        run_ranks(2, steps_to_solve, False)[0],
        run_ranks(2, steps_to_solve, True)[0],
    )
    assert steps <= 0.6 * mean_steps
