"""ranks: every choice of the plan's exchange through the executor: exact ones equal the serial run,
inexact ones keep all ranks alike and still learn."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from headway.collective.nodes import Nodes
from headway.plans import ExchangePart, ExchangePlan, data_parallel
from headway.run.distributed import process_groups
from headway.run.distributed.world import World
from headway.run.executor import Executor
from support.ranks import run_ranks
from support.sampling import sampled
from support.serial import Numbers, largest_error, numbers, train_serially
from support.tiny_models import ALL, cross_entropy

SEED, STEPS = 3, 8
PAIRS = Nodes(((0, 1), (2, 3)))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def split(
    world: Any, case: str, exchange: ExchangePlan, nodes: Nodes | None = None
) -> list[Numbers]:
    build, data = ALL[case]
    torch.manual_seed(SEED)
    model = build().double()
    made = adamw(model)
    plan = data_parallel(12, processes=world.size, precision="float64", exchange=exchange)
    if nodes is not None:
        process_groups.find_nodes = lambda _: nodes
    run = Executor(model, made, loss=cross_entropy, plan=plan, seed=SEED, world=World.adopt())
    history = []
    for _, part in zip(range(STEPS), run.batches(data(), epochs=None), strict=False):
        value = run.step(part)
        run.flush()
        history.append(numbers(model, made, value))
    run.strategy.close()
    return history


EXACT = {
    "fitted buckets": ExchangePlan(bucket="auto"),
    "hierarchical": ExchangePlan(collective="hierarchical", bucket="200"),
    "hierarchical, priority": ExchangePlan(collective="hierarchical", priority=True, chunk="100"),
    "three in flight": ExchangePlan(priority=True, credit=3),
    "parts": ExchangePlan(
        bucket="300", parts=(ExchangePart(parameters="*.bias", compress="none"),)
    ),
}


@pytest.mark.parametrize(("case", "choice"), sampled([*product(["unused", "tied"], EXACT)], 5))
def test_exact_choices_equal_the_serial_run(case, choice):
    build, data = ALL[case]
    expected = train_serially(build, data(), cross_entropy, adamw, batch=12, steps=STEPS, seed=SEED)
    assert EXACT[choice].exact
    for history in run_ranks(4, split, case, EXACT[choice], PAIRS):
        for a, b in zip(expected, history, strict=True):
            common = {name: value for name, value in a.items() if "gradient" not in name}
            error, name = largest_error(common, {key: b[key] for key in common})
            assert error < 1e-12, name


INEXACT = {
    **{
        text: ExchangePlan(compress=text, bucket="1 KiB")
        for text in (
            "fp16", "bf16", "int8", "sign", "topk:0.1", "mstopk:0.1", "adaptive:0.1",
            "randomk:0.2", "powersgd:2",
        )
    },
    "fp16, priority": ExchangePlan(compress="fp16", priority=True, chunk="100"),
    "powersgd, priority": ExchangePlan(compress="powersgd:1", priority=True),
    "HiTopKComm": ExchangePlan(compress="mstopk:0.1", collective="hierarchical"),
    "HiTopKComm, priority": ExchangePlan(
        compress="topk:0.1", collective="hierarchical", priority=True
    ),
    "hierarchical fp16": ExchangePlan(compress="fp16", collective="hierarchical"),
    "adasum": ExchangePlan(reduce="adasum"),
    "adasum of updates": ExchangePlan(reduce="adasum", values="updates"),
    "hierarchical adasum": ExchangePlan(reduce="adasum", collective="hierarchical"),
    "sum": ExchangePlan(reduce="sum", bucket="200"),
    "mixed": ExchangePlan(
        compress="topk:0.1", parts=(ExchangePart(parameters="*.bias", compress="none"),)
    ),
}  # fmt: skip


@pytest.mark.parametrize("choice", sampled([*INEXACT], 7))
def test_inexact_choices_keep_the_ranks_alike_and_learn(choice):
    """Unused parameters stay as they are, whatever the compressor sends for them."""
    (first, *others) = run_ranks(4, split, "unused", INEXACT[choice], PAIRS)
    start, end = first[0], first[-1]
    for other in others:
        for name, value in end.items():
            if name.startswith("parameter "):
                assert torch.equal(other[-1][name], value), name
    assert float(end["loss"]) < float(start["loss"])
    changed = [
        name
        for name, value in end.items()
        if name.startswith("parameter ") and not torch.equal(value, start[name])
    ]
    unused = [name for name in start if name.startswith("parameter ") and name not in changed]
    assert unused == UNUSED


UNUSED = [f"parameter {name}.{kind}" for name in ("spare", "frozen") for kind in ("weight", "bias")]
