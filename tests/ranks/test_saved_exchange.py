"""ranks: what compressors keep back goes through a checkpoint, for any number of ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from headway.collective.nodes import Nodes
from headway.comm.compress.state import STATE_PREFIX, collect_state, distribute_state
from headway.comm.lanes.routes import RoutePool
from headway.comm.tuning.autotuning import AdaptiveExchange
from headway.plans import ExchangePlan
from support.ranks import run_ranks

SHAPES = {"weight": (40, 60), "other": (64, 32), "bias": (64,)}
PAIRS = Nodes(((0, 1), (2, 3)))


def parameters() -> dict[str, nn.Parameter]:
    return {n: nn.Parameter(torch.zeros(s, dtype=torch.float64)) for n, s in SHAPES.items()}


def gradient(name: str, rank: int, step: int) -> Tensor:
    draw = torch.Generator().manual_seed(1000 * step + 10 * rank + len(name))
    return torch.randn(SHAPES[name], generator=draw, dtype=torch.float64)


def some_steps(world, exchange, nodes, first, count, saved=None):
    """Sums that came back, and what is to be saved."""
    mine = parameters()
    made = AdaptiveExchange(mine, exchange, RoutePool(nodes))
    if saved is not None:
        made.restore(distribute_state(saved, world.size))
    total = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for step in range(first, first + count):
        made.begin()
        made.now.arm()
        sum((p * gradient(n, world.rank, step)).sum() for n, p in mine.items()).backward()
        made.now.send()
        made.now.receive()
        made.now.settle()
        for name, parameter in mine.items():
            total[name] += parameter.grad
    state = collect_state(made.state(), mine)
    made.close()
    return total, state


CHOICES = ["topk:0.05", "mstopk:0.05", "adaptive:0.05", "sign", "randomk:0.1", "powersgd:1"]


@pytest.mark.parametrize("compress", [*CHOICES, "hierarchical"])
def test_sent_and_kept_back_are_the_gradients_across_a_change_of_ranks(compress):
    """4 ranks, a checkpoint, then 2 ranks."""
    if compress == "hierarchical":
        exchange = ExchangePlan(compress="topk:0.05", collective="hierarchical", bucket="10 KiB")
        nodes, later = PAIRS, Nodes(((0,), (1,)))
    else:
        exchange, nodes, later = ExchangePlan(compress=compress, bucket="10 KiB"), None, None
    first = run_ranks(4, some_steps, exchange, nodes, 0, 5)
    sent, saved = first[0]
    assert any(key.startswith(STATE_PREFIX) for key in saved)
    for _, other in first[1:]:
        assert other.keys() == saved.keys()
        assert all(torch.equal(saved[key], other[key]) for key in saved)
    (more, rest), *_ = run_ranks(2, some_steps, exchange, later, 5, 5, saved)
    for name, shape in SHAPES.items():
        whole = sum(
            gradient(name, rank, step) for step in range(10) for rank in range(4 if step < 5 else 2)
        )
        kept = torch.zeros(shape, dtype=torch.float64)
        for what in ("residual", "server"):
            if f"{STATE_PREFIX}{name}/{what}" in rest:
                kept += rest[f"{STATE_PREFIX}{name}/{what}"].reshape(shape)
        torch.testing.assert_close(sent[name] + more[name] + kept, whole, rtol=1e-9, atol=1e-9)
        if name != "bias" and compress != "powersgd:1":
            assert float(kept.abs().max()) > 0.1  # else nothing was kept back, and nothing tested
