"""ranks: DDP with compressed gradients through its communication hook."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from headway.comm.exchange.ddp_hook import register_comm_hook
from support.compressor_states import spread_states
from support.ranks import ranks

WIDTH = 48


class Net(nn.Module):
    """Six matrices with vectors, a convolution among them; several buckets at 8 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 6)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        hidden = self.conv(x[:, :, None, None].expand(-1, 4, 6, 6))[:, :, 0, 0]
        hidden = nn.functional.pad(hidden, (0, WIDTH - 8)) + x[:, :1]
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.head(hidden)


def data(rank, step, dtype=torch.float32):
    draw = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(16, 4, generator=draw, dtype=torch.float64).to(dtype)
    return x, x[:, :3].argmax(1)


def make(dtype=torch.float32, memory_format=torch.contiguous_format, **options):
    torch.manual_seed(0)
    model = Net().to(dtype).to(memory_format=memory_format)
    # 8 KiB a bucket: one matrix each, so that there are many.
    return DistributedDataParallel(model, bucket_cap_mb=8 / 1024, **options)


def train(model, world, steps, first=0, lr=0.05):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    dtype = next(model.parameters()).dtype
    losses = []
    for step in range(first, first + steps):
        x, y = data(world.rank, step, dtype)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def same_everywhere(model, world):
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    rows = [torch.empty_like(flat) for _ in range(world.size)]
    dist.all_gather(rows, flat, group=world.group)
    assert all(torch.equal(row, flat) for row in rows)
    assert flat.isfinite().all()
    return flat


@ranks(3)
def test_without_compression_the_hook_is_bitwise_ddp(world):
    for options in ({}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}):
        plain, hooked = make(**options), make(**options)
        with register_comm_hook(hooked, "none"):
            train(plain, world, 6)
            train(hooked, world, 6)
        assert torch.equal(same_everywhere(plain, world), same_everywhere(hooked, world))


@ranks(2)
def test_fp16_equals_the_fp16_hook_of_torch_to_rounding(world):
    theirs, ours = make(), make()
    theirs.register_comm_hook(None, default_hooks.fp16_compress_hook)
    with register_comm_hook(ours, "fp16"):
        for model in (theirs, ours):
            x, y = data(world.rank, 0)
            nn.functional.cross_entropy(model(x), y).backward()
    for theirs_p, ours_p in zip(theirs.parameters(), ours.parameters(), strict=True):
        # Two roundings of 2^-11 each, and the smallest numbers of fp16.
        torch.testing.assert_close(ours_p.grad, theirs_p.grad, rtol=2e-3, atol=2e-7)


@pytest.mark.slow
@ranks(2, timeout=60)
def test_every_compressor_trains_with_many_buckets(world):
    plain = make()
    dense = train(plain, world, 40)
    assert dense[-1] < 0.6 * dense[0]
    for text in ("powersgd:2", "topk:0.05", "mstopk:0.05", "adaptive:0.05", "randomk:0.2",
                 "sign", "int8", "bf16"):  # fmt: skip
        model = make()
        with register_comm_hook(model, text, seed=1) as state:
            losses = train(model, world, 40)
            assert len(state._known) > 5
        same_everywhere(model, world)
        assert losses[-1] < 0.75 * losses[0], f"{text}: {losses}"


@ranks(2)
def test_residuals_follow_their_parameters_into_ddps_new_buckets(world):
    """Sum of sent + residual = sum of gradients, though buckets are cut anew after step 1."""
    model = make(torch.float64)
    parameters = dict(model.module.named_parameters())
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    sent = {name: torch.zeros_like(p) for name, p in parameters.items()}
    cuts = set()
    with register_comm_hook(model, "topk:0.02") as state:
        for step in range(8):
            x, y = data(world.rank, step, torch.float64)
            model.zero_grad()
            own = torch.autograd.grad(
                nn.functional.cross_entropy(model.module(x), y), parameters.values()
            )
            for name, gradient in zip(parameters, own, strict=True):
                dist.all_reduce(gradient, group=world.group)
                total[name] += gradient / world.size
            nn.functional.cross_entropy(model(x), y).backward()
            cuts.add(tuple(state._known))
            for name, parameter in parameters.items():
                sent[name] += parameter.grad
        left = state.state_dict()
    assert len(cuts) > 1, "DDP has not cut its buckets anew; the test proves nothing"
    for name in parameters:
        if f"{name}/residual" in left:
            # Of an unusual memory order the residual has that order; these all are contiguous.
            residual = left[f"{name}/residual"].view(parameters[name].shape).clone()
            dist.all_reduce(residual, group=world.group)
            assert residual.abs().max() > 0
            sent[name] += residual
        torch.testing.assert_close(sent[name], total[name], rtol=1e-11, atol=1e-13)


@ranks(2)
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(world):
    for text in ("powersgd:1", "topk:0.05", "int8"):
        straight, resumed = make(), make()
        with register_comm_hook(straight, text, seed=4):
            train(straight, world, 8)
        with register_comm_hook(resumed, text, seed=4) as state:
            train(resumed, world, 4)
            saved = copy.deepcopy((resumed.module.state_dict(), state.state_dict()))
        again = make()
        again.module.load_state_dict(saved[0])
        with register_comm_hook(again, text, seed=4) as state:
            state.load_state_dict(saved[1])
            train(again, world, 4, first=4)
        if text == "int8":  # its blocks begin elsewhere until DDP has cut its buckets anew
            same_everywhere(again, world)
            continue
        assert torch.equal(same_everywhere(straight, world), same_everywhere(again, world)), text
        assert len(spread_states([saved[1]], 2)) == 2


@ranks(2)
def test_accumulation_and_memory_formats(world):
    """no_sync sends nothing; a channels-last weight is taken in its memory order."""
    model = make(memory_format=torch.channels_last)
    assert not model.module.conv.weight.is_contiguous()
    with register_comm_hook(model, "powersgd:1") as state:
        x, y = data(world.rank, 0)
        with model.no_sync():
            nn.functional.cross_entropy(model(x), y).backward()
        assert state.state_dict() == {}
        for _ in range(3):
            model.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
        assert len(state.state_dict()) > 5
        shapes = {k: tuple(v.shape) for k, v in state.state_dict().items()}
    assert shapes["layers.0.weight/residual"] == (WIDTH, WIDTH)
    assert shapes["conv.weight/residual"] == (8, 6, 6, 4)


@ranks(2)
def test_what_goes_wrong_in_the_hook_reaches_the_training_thread(world):
    model = make()
    with register_comm_hook(model, "topk:0.05"):
        x, y = data(world.rank, 0)
        with pytest.raises(Exception, match="is NaN"):
            (nn.functional.cross_entropy(model(x), y) * math.nan).backward()


@ranks(1)
def test_an_unknown_compressor_is_refused_by_name(world):
    with pytest.raises(ValueError, match=r"'powersdg' is no compressor"):
        register_comm_hook(make(), "powersdg:2")
