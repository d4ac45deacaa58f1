"""ranks: behind the split of space each rank has whole samples; numbers stay the serial run's."""

from __future__ import annotations

from copy import deepcopy
from itertools import product
from math import prod

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from headway.graph.ranges import balanced_ranges
from headway.parallel.spatial import SplitTensor, gather
from headway.parallel.spatial.spatial_context import by_samples, leave_spatial_split
from support.ranks import ranks
from support.spatial import Sent, context, largest_difference
from support.spatial_cases import CASES, Apply, compare_all, nothing_differs


class Behind(nn.Module):
    """A module that meets whole samples."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        if isinstance(x, SplitTensor):
            x = leave_spatial_split(x)
            assert by_samples(x)
        return self.module(x)


def of(samples, cases):
    """Behind the switch, with another number of samples."""
    wanted = {name: case for name, case in cases.items() if name != "shapes" or samples == 2}
    return {
        name: (Behind(module), (samples, *shape[1:])) for name, (module, shape) in wanted.items()
    }


OF_SAMPLES = {
    "bicubic": (Apply(lambda x: F.interpolate(x[..., 0], (7, 9), mode="bicubic")), (2, 2, 5, 6, 4)),
    "adaptive to 3": (nn.AdaptiveAvgPool3d(3), (2, 2, 5, 6, 4)),
    "layer norm": (nn.LayerNorm((5, 6, 4)), (2, 2, 5, 6, 4)),
    "softmax of space": (Apply(lambda x: x.flatten(2).softmax(-1)), (2, 2, 5, 6, 4)),
    "batch norm 1-D": (
        Apply(lambda x, norm: norm(x.flatten(1)), nn.BatchNorm1d(240)), (3, 2, 5, 6, 4)),
    "no rule": (
        Apply(lambda x: torch.einsum("ncdhw,nedhw->nce", x, x).sort(1)[0].cumsum(0)),
        (2, 3, 5, 6, 4)),
    "between samples": (Apply(lambda x: x - x.flip(0) * x.std() + x[0]), (3, 2, 5, 6, 4)),
    "products": (
        Apply(lambda x, a: x.mean((2, 3, 4)) @ a.weight, nn.Linear(3, 4, bias=False)),
        (3, 4, 5, 6, 4)),
    "attention": (
        Apply(lambda x, a: a(*[x.flatten(2).transpose(1, 2)] * 3)[0],
              nn.MultiheadAttention(4, 2, batch_first=True)), (2, 4, 3, 2, 4)),
}  # fmt: skip


@pytest.mark.slow
@ranks(4, timeout=120, check=nothing_differs)
def test_operators_on_few_samples(world):
    """One to three samples for four ranks: some have none."""
    found = compare_all(of(3, OF_SAMPLES), [(2, 2, 1)], head="samples")
    for samples in (1, 3):
        cases = of(samples, CASES)
        found |= compare_all(cases, [(2, 2, 1)], min_width=0, head="samples")
    return found


@pytest.mark.slow
@ranks(3, timeout=120, check=nothing_differs)
def test_operators_on_uneven_shares(world):
    cases = of(2, {"shapes": CASES["shapes"]}) | of(5, CASES) | of(5, OF_SAMPLES)
    return compare_all(cases, [(1, 3, 1)], min_width=0)


WIDTH = 8


def block(entering, leaving):
    return nn.Sequential(
        nn.Conv3d(entering, leaving, 3, padding=1, bias=False),
        nn.BatchNorm3d(leaving),
        nn.LeakyReLU(0.3),
    )


def classes(scores, x):
    """Weighted, some left out: every rank divides by what counts on all of them."""
    labels = torch.arange(len(scores)) % 3
    weights = torch.tensor([0.5, 2.0, 1.5], dtype=torch.float64)
    return F.cross_entropy(scores, labels, weights, ignore_index=1, label_smoothing=0.1)


def targets(y, x):
    wanted = torch.linspace(-1, 1, y.numel(), dtype=torch.float64)
    return F.mse_loss(y, wanted.view(tuple(y.shape)))


def voxels(y, x):
    """Labels lie in parts of space."""
    return F.cross_entropy(y, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())


class Cosmo(nn.Module):
    """Normalisation and dropout on both sides of the switch."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(block(2, 4), nn.AvgPool3d(3, 2, 1), block(4, 6), nn.MaxPool3d(2))
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(48, 10), nn.BatchNorm1d(10), nn.LeakyReLU(0.3),
            nn.Dropout(0.5), nn.LayerNorm(10), nn.Linear(10, 3),
        )  # fmt: skip

    def forward(self, x):
        return 1.2 * torch.tanh(self.head(self.body(x)))


class Residual(nn.Module):
    """As ResNets end; between, channels weighted by what a mean over space says."""

    def __init__(self):
        super().__init__()
        self.one, self.two = block(2, 4), block(4, 4)
        self.squeeze = nn.Sequential(
            nn.AdaptiveAvgPool3d(1), nn.Conv3d(4, 2, 1), nn.ReLU(), nn.Conv3d(2, 4, 1), nn.Sigmoid()
        )
        self.pool, self.head = nn.AdaptiveAvgPool3d(1), nn.Linear(4, 3)

    def forward(self, x):
        x = self.one(x)
        y = self.two(x)
        return self.head(self.pool(F.relu(x + y * self.squeeze(y))).flatten(1))


class UNet(nn.Module):
    """At its bottom too narrow for a split; what is skipped is not."""

    def __init__(self):
        super().__init__()
        self.down, self.bottom = block(2, 4), nn.Sequential(block(4, 6), nn.Dropout3d(0.3))
        self.deep = nn.Sequential(
            nn.MaxPool3d(2), nn.GroupNorm(2, 6), nn.ConvTranspose3d(6, 6, 2, 2)
        )
        self.up, self.last = nn.ConvTranspose3d(6, 4, 2, 2), nn.Conv3d(8, 3, 1)

    def forward(self, x):
        kept = self.down(x)
        y = self.bottom(F.max_pool3d(kept, 2))
        y = y + self.deep(y)
        return self.last(torch.cat([self.up(y), kept], 1))


class Decoder(nn.Module):
    """Down to a vector, and up again: nothing is skipped."""

    def __init__(self):
        super().__init__()
        self.down = nn.Conv3d(2, 2, 4, 4)
        self.code, self.back = nn.Linear(16, 5), nn.Linear(5, 24)
        self.up, self.last = nn.ConvTranspose3d(3, 4, 2, 2), nn.Conv3d(4, 3, 3, padding=1)

    def forward(self, x):
        y = self.back(torch.tanh(self.code(self.down(x).flatten(1)))).view(-1, 3, 2, 2, 2)
        return self.last(F.interpolate(self.up(y), scale_factor=2, mode="trilinear"))


MODELS = {
    "cosmo": (Cosmo, targets, 1),
    "classes": (Cosmo, classes, 1),
    "residual": (Residual, classes, 1),
    "u-net": (UNet, voxels, 4),
    "decoder": (Decoder, voxels, 2),
}


def outcome(model, loss, grad):
    found = {name: p.grad for name, p in model.named_parameters()}
    buffers = {name: b.double() for name, b in model.named_buffers()}
    return {"loss": loss.detach(), "input": grad, **found, **buffers}


def compare(meshes, names, numbers, heads):
    """What differs from the serial run; the first ranks of the world are the mesh."""
    torch.manual_seed(3)
    worst, made = {}, {}
    for mesh in meshes:
        members = list(range(prod(mesh)))
        made[mesh] = context(mesh), dist.new_group(members)
    for name, number in product(names, numbers):
        build, loss_of, least = MODELS[name]
        model = build().double()
        x = torch.randn(number, 2, WIDTH, WIDTH, WIDTH, dtype=torch.float64)
        expected = serial(deepcopy(model), loss_of, x)
        for (mesh, (here, group)), head in product(made.items(), heads):
            if here is None:
                continue
            object.__setattr__(here, "head", head)
            object.__setattr__(here, "min_width", least)
            try:
                found = split(deepcopy(model), loss_of, here.split(x), group)
            except Exception as error:
                raise AssertionError(f"{name} of {number} on {mesh}, {head}: {error}") from error
            worst[name, number, mesh, head] = largest_difference(expected, found)
    return {key: value for key, value in worst.items() if not value[0] <= 1e-12}


def serial(model, loss_of, x):
    x = x.clone().requires_grad_()
    torch.manual_seed(4)
    loss = loss_of(model(x), x)
    loss.backward()
    return outcome(model, loss, x.grad)


def split(model, loss_of, x, group):
    x = x.like(x.local.clone().requires_grad_())
    torch.manual_seed(4)
    loss = loss_of(model(x), x)
    (loss / x.context.copies).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)
    return outcome(model, loss, gather(x.like(x.local.grad)))


MESHES = [
    (2, 1, 1), (1, 3, 1), (1, 1, 4), (2, 1, 2), (5, 1, 1), (1, 6, 1), (3, 1, 2), (1, 1, 7),
    (8, 1, 1), (2, 4, 1), (2, 2, 2),
]  # fmt: skip
"""Every number of ranks up to 8, in all ways to write it as a product, along other dimensions."""


@pytest.mark.slow
@ranks(4, timeout=120, check=nothing_differs)
def test_models_with_every_head(world):
    meshes = [(4, 1, 1), (2, 1, 2)]
    found = compare(meshes, ["cosmo", "classes"], [3, 6], ["auto", "samples", "gathered"])
    return found | compare(
        meshes, ["residual", "u-net", "decoder"], [1, 3], ["auto", "samples", "gathered"]
    )


@pytest.mark.slow
@ranks(8, timeout=120, check=nothing_differs)
def test_models_on_every_number_of_ranks_up_to_eight(world):
    return compare(MESHES, ["u-net"], [3], ["auto"]) | compare(MESHES, ["cosmo"], [4], ["auto"])


@ranks(4)
def test_what_the_switches_send(world):
    """Of V elements a rank sends N_r / N of its V / p less its own; there and back alike."""
    features, extents = 3, (4, 6, 2)
    with pytest.MonkeyPatch.context() as monkey:
        sent = Sent(monkey)
        for mesh, number in product([(4, 1, 1), (2, 2, 1)], [2, 4, 7]):
            here = context(mesh)
            x = here.split(torch.randn(number, features, *extents))
            x = x.like(x.local.clone().requires_grad_())
            line = features * prod(extents)
            owned = [stop - start for start, stop in balanced_ranges(number, 4)]
            mine = owned[world.rank]
            slab = features * x.local[0, 0].numel()

            y = leave_spatial_split(x)
            assert y.local.shape == (mine, features, *extents)
            assert sent.taken() == (number - mine) * slab
            again = y + x  # back to where the other one lies
            assert sent.taken() == mine * (line - slab)
            again.local.sum().backward()
            assert sent.taken() == mine * (line - slab) + (number - mine) * slab

            x.mean((2, 3, 4)).local.sum().backward()  # collected, and given back
            assert sent.taken() == (number - mine) * features + 3 * mine * features
            gathered = context(mesh, head="gathered").split(torch.randn(number, features, *extents))
            leave_spatial_split(gathered)
            assert sent.taken() == 3 * number * slab


@ranks(4)
def test_samples_meet_what_several_ranks_hold(world):
    """A line is split over the width's ranks only: two of the four have the same half."""
    here = context((2, 2))
    torch.manual_seed(1)
    line, whole = torch.randn(6, dtype=torch.float64), torch.randn(5, 4, 6, dtype=torch.float64)
    x, rows = (
        part.like(part.local.clone().requires_grad_())
        for part in (here.split(line), here.split(whole))
    )
    y = leave_spatial_split(rows)
    assert by_samples(y)
    assert torch.equal(gather(y), whole)
    z = (y + whole) * x
    assert z.splits.keys() == {2}
    (gather(z).sum() / 4).backward()
    found = torch.zeros(6, dtype=torch.float64)
    found[slice(*x.splits[0].own)] = x.local.grad
    dist.all_reduce(found, group=world.group)
    assert torch.allclose(found, 2 * whole.sum((0, 1)), rtol=0, atol=1e-12)
    grad = gather(rows.like(rows.local.grad))
    assert torch.allclose(grad, line.expand(5, 4, 6), rtol=0, atol=1e-12)
