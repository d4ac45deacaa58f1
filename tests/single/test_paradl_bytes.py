"""single: bytes recorded on a fake group are ParaDL's formulas: data, filter, channel, spatial.

The splits are written by hand with plain collectives; a ring sends 2 (p - 1) / p of what it sums
and (p - 1) / p of what it gathers.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import conv2d
from torch.nn.grad import conv2d_input, conv2d_weight

from headway.planner.guidelines.layer_parallelism import ROWS, ParadlJob, ParadlLayer
from support.collective_recorder import CollectiveRecorder
from support.fake_world import fake_world

BATCH, SIDE = 8, 16
CHANNELS = ((8, 32), (32, 16), (16, 32))
"""Inputs and outputs of three convolutions of 3 x 3, without biases."""
WEIGHTS = [torch.randn(o, i, 3, 3) for i, o in CHANNELS]


def job(*, latency, per_byte):
    area = SIDE * SIDE
    layers = [
        ParadlLayer(
            forward=0.0, backward=0.0, update=0.0, x=i * area, y=o * area, w=9 * i * o,
            filters=o, channels=i, points=area, halo_x=2 * SIDE * i,
            halo_dy=2 * SIDE * o if number else 0,  # nobody needs the gradient of the data
        )
        for number, (i, o) in enumerate(CHANNELS)
    ]  # fmt: skip
    return ParadlJob(
        layers=layers, samples=BATCH, batch=BATCH, latency=latency, seconds_per_byte=per_byte
    )


def summed(tensor):
    dist.all_reduce(tensor)
    return tensor


def gathered(part, dim):
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts, dim)


def own(tensor, dim):
    return tensor.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def data():
    x = torch.randn(BATCH // dist.get_world_size(), CHANNELS[0][0], SIDE, SIDE)
    summed(torch.cat([gradient.flatten() for gradient in backward_serially(x)]))


def backward_serially(x):
    entered = [x]
    for weight in WEIGHTS:
        entered.append(conv2d(entered[-1], weight, padding=1))
    gradient, found = torch.ones_like(entered[-1]), []
    for x, weight in zip(entered[-2::-1], WEIGHTS[::-1], strict=True):
        found.append(conv2d_weight(x, weight.shape, gradient, padding=1))
        gradient = conv2d_input(x.shape, weight, gradient, padding=1)
    return found


def filter_():
    """Each rank makes some channels of every output, which are gathered for the next layer; the
    last output stays in parts."""
    entered, made = [torch.randn(BATCH, CHANNELS[0][0], SIDE, SIDE)], None
    for number, weight in enumerate(WEIGHTS):
        made = conv2d(entered[-1], own(weight, 0), padding=1)
        if number < len(WEIGHTS) - 1:
            entered.append(gathered(made, 1))
    gradient = torch.ones_like(made)
    for number in reversed(range(len(WEIGHTS))):
        x, weight = entered[number], own(WEIGHTS[number], 0)
        conv2d_weight(x, weight.shape, gradient, padding=1)
        if number:
            gradient = own(summed(conv2d_input(x.shape, weight, gradient, padding=1)), 1)


def channel():
    """Each rank has some channels of every input; outputs are summed. The first layer, whose data
    has few channels, is not split, as in the paper."""
    x = torch.randn(BATCH, CHANNELS[0][0], SIDE, SIDE)
    whole, entered = conv2d(x, WEIGHTS[0], padding=1), [x]
    for weight in WEIGHTS[1:]:
        entered.append(own(whole, 1))
        whole = summed(conv2d(entered[-1], own(weight, 1), padding=1))
    gradient = torch.ones_like(whole)
    for number in reversed(range(1, len(WEIGHTS))):
        x, weight = entered[number], own(WEIGHTS[number], 1)
        conv2d_weight(x, weight.shape, gradient, padding=1)
        gradient = gathered(conv2d_input(x.shape, weight, gradient, padding=1), 1)


def with_halo(part):
    """One row from each neighbour; this rank has two."""
    rank = dist.get_rank()
    rows = [torch.empty_like(part[:, :, :1]) for _ in range(2)]
    ways = ((rank - 1, rows[0], part[:, :, :1]), (rank + 1, rows[1], part[:, :, -1:]))
    for neighbour, row, mine in ways:
        dist.isend(mine.contiguous(), neighbour)
        dist.irecv(row, neighbour)
    return torch.cat([rows[0], part, rows[1]], 2)


def spatial():
    """Each rank has some rows of every map; weights are whole, their gradients summed over all."""
    entered = [torch.randn(BATCH, CHANNELS[0][0], SIDE // dist.get_world_size(), SIDE)]
    for weight in WEIGHTS:
        entered.append(conv2d(with_halo(entered[-1]), weight, padding=(0, 1)))
    gradient, found = torch.ones_like(entered[-1]), []
    for number in reversed(range(len(WEIGHTS))):
        x, weight = entered[number], WEIGHTS[number]
        found.append(conv2d_weight(x, weight.shape, gradient, padding=1).flatten())
        if number:
            turned = weight.transpose(0, 1).flip(2, 3)
            gradient = conv2d(with_halo(gradient), turned, padding=(0, 1))
    summed(torch.cat(found))


def ring_bytes(seen):
    """What this rank sends."""
    shares = {"all_reduce": 2, "all_gather": 1}
    return sum(
        one.bytes * shares[one.kind] * (one.ranks - 1) / one.ranks
        if one.kind in shares
        else one.bytes * (one.kind == "send")
        for one in seen
    )


def ring_steps(seen):
    shares = {"all_reduce": 2, "all_gather": 1}
    return sum(shares[one.kind] * (one.ranks - 1) for one in seen)


@pytest.mark.parametrize("how", [data, filter_, channel, spatial])
@pytest.mark.parametrize("ranks", [4, 8])
def test_bytes(how, ranks):
    with fake_world(ranks, rank=1), CollectiveRecorder() as recorder:
        how()
    row = ROWS[how.__name__.rstrip("_")](job(latency=0.0, per_byte=1.0), ranks)
    assert ring_bytes(recorder.seen) == row.communication
    if how is not spatial:  # two messages of a halo travel at the same time
        steps = ROWS[how.__name__.rstrip("_")](job(latency=1.0, per_byte=0.0), ranks)
        assert ring_steps(recorder.seen) == steps.communication
