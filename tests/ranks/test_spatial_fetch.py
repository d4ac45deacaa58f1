"""ranks: the fetch itself, what it sends, losses, and where a split ends."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from headway.graph.ranges import balanced_ranges
from headway.parallel.spatial import SpatialAxis, SpatialContext, SplitTensor, gather
from headway.parallel.spatial.halo_exchange import RangeExchange, fetch_box
from support.ranks import ranks
from support.spatial import Sent, context


@ranks(4)
def test_fetch_and_its_adjoint(world):
    """Uneven shares, ranges over several neighbours, an empty one, padding on both sides."""
    axis = SpatialAxis.of(world.group)
    have = balanced_ranges(10, 4)  # 3, 3, 2, 2
    want = ((-2, 7), (0, 10), (0, 0), (1, 13))
    whole = torch.arange(20.0, dtype=torch.float64).view(2, 10) + 1
    mine, wish = have[world.rank], want[world.rank]
    part = whole[:, slice(*mine)].clone().requires_grad_()
    found = fetch_box(part, [RangeExchange(1, axis, tuple(have), tuple(want))])
    padded = torch.cat([torch.zeros(2, 2), whole, torch.zeros(2, 3)], 1)
    assert torch.equal(found, padded[:, wish[0] + 2 : wish[1] + 2])
    (found * (world.rank + 1)).sum().backward()
    counts = [sum(r + 1 for r in range(4) if want[r][0] <= i < want[r][1]) for i in range(*mine)]
    assert torch.equal(part.grad, torch.tensor(counts, dtype=torch.float64).expand(2, -1))


@ranks(4)
def test_a_halo_is_half_a_kernel_of_slabs_on_each_cut_side(world):
    meshes = {mesh: context(mesh) for mesh in ((4, 1, 1), (2, 2, 1))}
    with pytest.MonkeyPatch.context() as monkey:
        sent = Sent(monkey)
        for kernel in (1, 3, 5):
            half = kernel // 2
            conv = nn.Conv3d(3, 2, kernel, padding=half)
            for mesh, here in meshes.items():
                x = here.split(torch.randn(2, 3, 16, 12, 10))
                x = x.like(x.local.clone().requires_grad_())
                y = conv(x)
                if mesh == (4, 1, 1):
                    sides = 1 if world.rank in (0, 3) else 2
                    expected = sides * half * 2 * 3 * 12 * 10
                else:  # depth first with the own height, then height with the fetched depth
                    expected = 2 * 3 * 10 * half * (6 + (8 + half))
                assert sent.taken() == expected, (kernel, mesh)
                y.local.sum().backward()
                assert sent.taken() == expected, (kernel, mesh)
        pool = nn.MaxPool3d(2)(meshes[4, 1, 1].split(torch.randn(1, 1, 16, 4, 4)))
        assert pool.shape == (1, 1, 8, 2, 2)
        assert sent.taken() == 0


@ranks(4)
def test_a_split_ends_at_its_least_width(world):
    """T3.4: where the result would be narrower it is whole, on every rank; gradients agree."""
    for least, whole_at in ((1, 2), (2, 4), (3, 8)):
        here = context((1, 4, 1), min_width=least)
        x = torch.randn(1, 2, 16, 16, 16, dtype=torch.float64)
        split, serial = here.split(x), x.clone().requires_grad_()
        split = split.like(split.local.clone().requires_grad_())
        y, z, width = split, serial, 16
        while isinstance(y, SplitTensor):
            y, z, width = F.avg_pool3d(y, 3, 2, 1), F.avg_pool3d(z, 3, 2, 1), width // 2
        assert width == whole_at
        assert torch.allclose(y, z, rtol=0, atol=1e-14)
        ((y**2).sum() / here.copies).backward()
        (z**2).sum().backward()
        grad = gather(split.like(split.local.grad))
        assert torch.allclose(grad, serial.grad, rtol=0, atol=1e-14)


LOSSES = {
    "cross entropy": lambda s, t, _: F.cross_entropy(s, t),
    "ignored": lambda s, t, _: F.cross_entropy(s, t, ignore_index=1),
    "weighted": lambda s, t, w: F.cross_entropy(s, t, weight=w, label_smoothing=0.2),
    "weighted, ignored, sum": lambda s, t, w: F.cross_entropy(s, t, w, reduction="sum",
                                                              ignore_index=2),
    "of each": lambda s, t, _: (F.cross_entropy(s, t, reduction="none") ** 2).mean(),
    "probabilities": lambda s, t, w: F.cross_entropy(s, F.softmax(s.detach() * 2, 1), w),
    "nll": lambda s, t, w: F.nll_loss(F.log_softmax(s, 1), t, w),
    "mse": lambda s, t, _: F.mse_loss(s[:, 0], t.to(s.dtype)),
    "bce": lambda s, t, w: F.binary_cross_entropy_with_logits(
        s, F.one_hot(t, 3).permute(0, 4, 1, 2, 3).to(s.dtype), pos_weight=w.view(3, 1, 1, 1)),
    "huber, sum": lambda s, t, _: F.huber_loss(s[:, 1], t.to(s.dtype), reduction="sum"),
    "dice": lambda s, t, _: ((F.softmax(s, 1)[:, 1] * (t == 1)).sum((1, 2, 3))
                             / F.softmax(s, 1)[:, 1].sum((1, 2, 3))).mean(),
}  # fmt: skip


@ranks(4)
def test_losses_of_voxels(world):
    here = context((2, 2, 1))
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 3, 5, 6, 4, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 3, (2, 5, 6, 4), generator=generator)
    weights = torch.tensor([0.5, 2.0, 1.5], dtype=torch.float64)
    for name, loss in LOSSES.items():
        serial = scores.clone().requires_grad_()
        expected = loss(serial, labels, weights)
        expected.backward()
        for target in (here.split(labels), labels):
            part = here.split(scores)
            part = part.like(part.local.clone().requires_grad_())
            found = loss(part, target, weights)
            assert abs((found - expected).item()) < 1e-12, name
            (found / here.copies).backward()
            grad = gather(part.like(part.local.grad))
            assert torch.allclose(grad, serial.grad, rtol=0, atol=1e-12), name
            if name == "dice":
                break
        if "cross" in name:
            part = here.split(labels)
            assert abs((loss(scores, part, weights) - expected).item()) < 1e-12, name


@ranks(2)
def test_autocast_and_mixed_operands(world):
    """Lower precision where torch has it; a whole tensor beside a split one gives its part."""
    here = context((2, 1, 1))
    x = torch.randn(1, 4, 8, 6, 6)
    model = nn.Sequential(nn.Conv3d(4, 4, 3, padding=1), nn.ReLU(), nn.ConvTranspose3d(4, 2, 2, 2))
    code = torch.randn(4, 8, 6, 6, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = gather(model(here.split(x) + code))
        expected = model(x + code.detach())
    assert y.dtype == expected.dtype == torch.bfloat16
    assert torch.allclose(y, expected, atol=0.05)
    y.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    own = code.grad.narrow(1, 4 * world.rank, 4)
    assert own.abs().sum() > 0
    assert code.grad.abs().sum() == own.abs().sum()


@ranks(2)
def test_sharded_parameters_see_split_activations(world):
    """FSDP2 hangs its hooks on the parts, and averages over ranks: that is the division by 2."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Conv3d(2, 2, 3, padding=1) for _ in range(3))).double()
    serial = deepcopy(model)
    mesh = init_device_mesh("cpu", (2,))
    here = SpatialContext.of({-2: mesh.get_group()})
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    x = torch.randn(1, 2, 6, 6, 6, dtype=torch.float64)
    (serial(x) ** 2).sum().backward()
    (model(here.split(x)) ** 2).sum().backward()
    for one, other in zip(model.parameters(), serial.parameters(), strict=True):
        assert torch.allclose(one.grad.full_tensor(), other.grad, rtol=0, atol=1e-12)


@ranks(2)
def test_checkpointed_activations(world):
    """Recomputed in backward, halos and all."""
    torch.manual_seed(0)
    here = context((2, 1, 1))
    model = nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.Tanh(), nn.BatchNorm3d(2)).double()
    serial = deepcopy(model)
    x = torch.randn(2, 1, 6, 6, 6, dtype=torch.float64)
    (serial(x) ** 3).sum().backward()
    y = checkpoint(model, here.split(x), use_reentrant=False)
    ((y**3).sum() / 2).backward()
    for one, other in zip(model.parameters(), serial.parameters(), strict=True):
        dist.all_reduce(one.grad)
        assert torch.allclose(one.grad, other.grad, rtol=0, atol=1e-12)
