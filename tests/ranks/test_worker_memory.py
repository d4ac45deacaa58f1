"""ranks: what workers hold at their peak, beside what `headway plan --inexact` says of them."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import headway
from headway.capture import capture
from headway.cluster.presets import of_preset
from headway.cost.machines import machine_of
from headway.cost.memory import OPTIMISER_MEMORY
from headway.graph.operator_fusion import fuse_light_operators
from headway.planner.estimate.operators import PlanningWorkload
from headway.planner.guidelines.inexact import inexact_plan
from headway.planner.search.request import PlanRequest
from headway.plans import Synchrony, data_parallel
from headway.run.distributed.world import World
from support.ranks import run_ranks
from support.sampling import sampled

RANKS, SIDE, LAYERS = 3, 1280, 10
FREE = {"kind": "asynchronous"}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "colocated": (FREE, "sgd"),
    "single": ({**FREE, "topology": "single"}, "adam"),
    "local": ({"merge": "mean", "local_steps": 2}, "adam"),
    "diloco": (
        {
            "merge": "mean", "local_steps": 2, "state": "keep", "outer": "nesterov",
            "outer_rate": 0.7, "outer_momentum": 0.9,
        },
        "sgd",
    ),
    "d-psgd": ({"merge": "neighbour"}, "sgd"),
}  # fmt: skip


def model() -> nn.Module:
    inner = [nn.Linear(SIDE, SIDE) for _ in range(LAYERS)]
    return nn.Sequential(nn.Linear(8, SIDE), *inner, nn.Linear(SIDE, 1))


def mean_square(net: nn.Module, batch: Any) -> torch.Tensor:
    return net(batch[0]).square().mean()


def resident() -> tuple[int, int, int]:
    """Bytes of this process: at its peak, now, and now of memory that is shared."""
    text = Path("/proc/self/status").read_text()
    peak, now, shared = (
        1024 * int(re.search(rf"{key}:\s+(\d+) kB", text)[1])  # type: ignore[index]
        for key in ("VmHWM", "VmRSS", "RssShmem")
    )
    return peak, now, shared


def peak_here(_: object, words: dict[str, Any], rule: str) -> float:
    # Large tensors are given back at once: what is resident is what lives.
    ctypes.CDLL(None).mallopt(-3, 1 << 16)
    world = World.adopt()
    net = model()
    own = sum(p.nbytes for p in net.parameters())
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    made = kinds[rule](net.parameters(), lr=1e-3, foreach=True)
    plan = data_parallel(2 * RANKS, processes=RANKS, synchrony=Synchrony(**words))
    _, before, _ = resident()
    Path("/proc/self/clear_refs").write_text("5")  # the peak anew
    run = headway.Executor(net, made, loss=mean_square, plan=plan, world=world)
    for batch in run.batches(TensorDataset(torch.randn(64, 8)), epochs=None):
        run.step(batch)
        if run.steps_done == 4:
            break
    peak, _, shared = resident()
    run.finish()
    # What channels share between processes lies in the host's memory.
    return peak - shared - before + own


@pytest.mark.parametrize("name", sampled(list(CASES), 2))
def test_the_fullest_worker_holds_what_the_row_says(name: str) -> None:
    words, rule = CASES[name]
    graph = fuse_light_operators(
        capture(model(), [torch.zeros(2, 8, device="meta")], loss=mean_square)
    )
    cluster = of_preset("dgx-a100", nodes=1)
    question = PlanRequest(
        work=PlanningWorkload(graph=graph, samples=2, optimiser=OPTIMISER_MEMORY[rule]),
        machine=machine_of(cluster),
        devices=(RANKS,),
        batch=2 * RANKS,
    )
    said = inexact_plan(question, cluster, name, Synchrony(**words))
    assert said.plan is not None, said.lacks
    found = max(run_ranks(RANKS, peak_here, words, rule, timeout=120))
    print(name, said.bytes / graph.parameter_bytes, found / graph.parameter_bytes)
    # Which messages are there at the same time is a matter of chance, and of what else the machine
    # does: the row counts all that may be.
    assert 0.93 <= said.bytes / found <= 1.35
