"""Pipelines that sleep: executed against simulated times, and headway's executor against torch's.

    python benchmarks/pipelines.py sleep [repeats]
    python benchmarks/pipelines.py overhead [repeats]
    python benchmarks/pipelines.py unequal [repeats]

Four ranks on the loopback. `sleep`: a rank's whole share of the model takes 20 ms forward and 40 ms
backward (input and weight gradient 20 ms each), spent asleep, so that four ranks do not fight for
two cores; every schedule, in turn, the best of the repeats, beside what the simulator says. Torch's
own 1F1B, interleaved and zero-bubble schedules run in the same processes on the same stages.
`overhead`: stages that do next to nothing; what is left is the cost of an action. `unequal`: one
stage takes 1.5 times as long (80 ms forward, or 120): tables that the planner has searched against
1F1B and interleaved, on the same model cut as each needs it.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

import emulated
from headway.parallel import Pipeline, PipelineCallbacks, PipelineRanks, StageGradientSync, cut
from headway.planner.schedule_search.tables import search_schedule
from headway.schedule.generators.registry import make_schedule
from headway.schedule.lowering import lower
from headway.schedule.pipeline_schedule import PipelineSchedule
from headway.schedule.stage_costs import StageCosts
from headway.schedule.stats import measure_schedule
from headway.schedule.timing import time_schedule

RANKS, UNIT, WIDTH = 4, 0.02, 16
SLOW = (1.0, 1.5, 1.0, 1.0)
CASES = [
    ("gpipe", 4), ("1f1b", 4), ("chimera", 4), ("zbv", 4),
    ("gpipe", 8), ("1f1b", 8), ("interleaved", 8), ("zb-h1", 8), ("interleaved-zero-bubble", 8),
    ("zbv", 8), ("dualpipe-v", 8), ("chimera", 8), ("chimera-doubling", 8),
    ("doubling, kept", 8), ("breadth-first", 8), ("gems", 8), ("dualpipe", 8),
    ("chimera-halving", 4), ("chimera-split", 8), ("pipedream", 8), ("pipedream-2bw", 8),
]  # fmt: skip
PAIRS = (  # what, against what, how much less time is wanted
    ("chimera 4", "torch 1f1b 4", 0.20),
    ("doubling, kept 8", "torch 1f1b 8", 0.15),
    ("doubling, kept 8", "1f1b 8", 0.15),
    ("zb-h1 8", "torch 1f1b 8", 0.0),
    ("zbv 8", "torch zbv 8", 0.0),
    ("interleaved 8", "torch interleaved 8", 0.0),
)


class Inward(torch.autograd.Function):
    """Sleeps in forward, and where the gradient of the input is made."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ahead: float, back: float) -> Tensor:
        ctx.back = back
        time.sleep(ahead)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.back)
        return grad, None, None


class Weighing(torch.autograd.Function):
    """Sleeps where the gradient of the weight is made."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, back: float) -> Tensor:
        ctx.back = back
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.back)
        return grad, None


class Asleep(nn.Module):
    """A stage: `x * w`; the first one has an input gradient, too, that of its own factor."""

    def __init__(self, seconds: float, *, first: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.factor = nn.Parameter(torch.ones(WIDTH)) if first else None
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        if self.factor is not None:
            x = x * self.factor
        x = Inward.apply(x, self.seconds, self.seconds)
        return x * Weighing.apply(self.weight, self.seconds)


def build(times: Sequence[float]) -> nn.Sequential:
    """Stages with these seconds of a forward."""
    return nn.Sequential(*[Asleep(t, first=number == 0) for number, t in enumerate(times)])


def even(stages: int, seconds: float) -> list[float]:
    """A rank's share takes `seconds` forward; more stages than ranks have as much less each."""
    return [seconds * RANKS / stages] * stages


def schedule_of(name: str, count: int) -> PipelineSchedule:
    """Of a name; doubling also without recomputation, as 1F1B runs beside it."""
    if name == "doubling, kept":
        return replace(schedule_of("chimera-doubling", count), recompute=())
    return make_schedule(name, stages=RANKS, microbatches=count)


def costs_of(schedule: PipelineSchedule, overhead: float = 0.0) -> StageCosts:
    """In seconds; the first stage's gradient of its input is that of a weight."""
    part = UNIT * RANKS / schedule.stages
    rest = [part] * (schedule.stages - 1)
    return StageCosts.of(
        schedule.stages,
        ranks=RANKS,
        forward=[part, *rest],
        input_grad=[0.0, *rest],
        weight_grad=[2 * part, *rest],
        overhead=overhead,
    )


def mean(model: Any, data: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(data[0]), data[1])


def batch(count: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.ones(2, WIDTH), torch.zeros(2, WIDTH)) for _ in range(count)]


def own(name: str, count: int, seconds: float) -> Callable[[], None]:
    """A step by headway's executor."""
    schedule = schedule_of(name, count)
    return carried_out(schedule, even(schedule.stages, seconds))


def carried_out(plain: PipelineSchedule, times: Sequence[float]) -> Callable[[], None]:
    """A step of a table, over stages with these seconds of a forward."""
    schedule, count = lower(plain, sync="eager-opt"), plain.num_microbatches
    stages = cut(build(times), mean, batch(1)[0], stages=schedule.stages)
    team = PipelineRanks(rank=dist.get_rank(), ranks=tuple(range(RANKS)))
    sums = StageGradientSync(stages, schedule, team)
    calls = PipelineCallbacks(loss=mean, sync=sums, step=lambda _: None)
    pipeline = Pipeline(stages, schedule, team, calls)
    data = batch(count)
    return lambda: pipeline.run(data) and None


def torchs(kind: str, count: int, seconds: float) -> Callable[[], None]:
    """A step by torch's."""
    rank, device = dist.get_rank(), torch.device("cpu")
    several = 1 if kind == "1f1b" else 2
    model = build(even(RANKS * several, seconds))
    numbers = [rank] if several == 1 else [rank, rank + RANKS]
    if kind == "zbv":
        numbers = [rank, 2 * RANKS - 1 - rank]
    stages = [PipelineStage(model[n], n, RANKS * several, device) for n in numbers]
    options = {"n_microbatches": count, "loss_fn": nn.functional.mse_loss}
    if kind == "1f1b":
        schedule: Any = Schedule1F1B(stages[0], **options)
    else:
        classes = {"interleaved": ScheduleInterleaved1F1B, "zbv": ScheduleZBVZeroBubble}
        schedule = classes[kind](stages, **options)
    x, y = torch.ones(2 * count, WIDTH), torch.zeros(2 * count, WIDTH)
    last = RANKS * several - 1 in numbers

    def step() -> None:
        target = {"target": y, "losses": []} if last else {}
        schedule.step(*((x,) if 0 in numbers else ()), **target)

    return step


def timed(step: Callable[[], object]) -> float:
    """Seconds of the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    step()
    took = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def body(world: Any, repeats: int, seconds: float, cases: list[Any]) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    steps = {f"{name} {count}": own(name, count, seconds) for name, count in cases}
    rivals = [("1f1b", 4), ("1f1b", 8), ("interleaved", 8), ("zbv", 8)]
    steps |= {f"torch {kind} {count}": torchs(kind, count, seconds) for kind, count in rivals}
    for step in steps.values():
        timed(step)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            times[name].append(timed(step))
    return times


def report_sleep(repeats: int) -> None:
    times = emulated.run(nodes=1, per_node=RANKS, rate=None, body=body,
                         arguments=(repeats, UNIT, CASES))[0]  # fmt: skip
    print(f"4 ranks asleep, 20/40 ms, best of {repeats}, load {os.getloadavg()[0]:.1f}")
    first = schedule_of("gpipe", 4)
    rest = min(times["gpipe 4"]) - time_schedule(first, costs_of(first)).makespan
    overhead = rest / (2 * (4 + RANKS - 1))  # the forwards and backwards of its critical path
    print(f"an action costs {overhead * 1e3:.2f} ms beyond its sleep (from gpipe N=4 alone)")
    for name, count in CASES:
        schedule = schedule_of(name, count)
        ideal = time_schedule(schedule, costs_of(schedule)).makespan
        priced = time_schedule(_bare(schedule), costs_of(schedule, overhead)).makespan
        best = min(times[f"{name} {count}"])
        print(
            f"  {name:24} N={count}: {best * 1e3:6.1f} ms; simulated {ideal * 1e3:6.1f}: "
            f"{best / ideal - 1:+.1%}; with that cost {priced * 1e3:6.1f}: {best / priced - 1:+.1%}"
        )
    for kind in [key for key in times if key.startswith("torch")]:
        print(f"  {kind:24}      {min(times[kind]) * 1e3:6.1f} ms")
    for what, rival, wanted in PAIRS:
        ratios = [a / b for a, b in zip(times[what], times[rival], strict=True)]
        best = min(times[what]) / min(times[rival])
        print(
            f"  {what} / {rival}: {statistics.median(ratios):.3f}, best / best {best:.3f} "
            f"(wanted at most {1 - wanted:.2f})"
        )


def _bare(schedule: PipelineSchedule) -> PipelineSchedule:
    """Compute alone: messages have no cost of their own here."""
    return replace(schedule, order=schedule.compute)


def report_overhead(repeats: int) -> None:
    cases = [("1f1b", 4), ("1f1b", 8), ("interleaved", 8), ("zbv", 8), ("chimera", 8)]
    times = emulated.run(nodes=1, per_node=RANKS, rate=None, body=body,
                         arguments=(repeats, 0.0, cases))[0]  # fmt: skip
    print(f"4 ranks, empty stages, {repeats} repeats, load {os.getloadavg()[0]:.1f}")
    actions = {"1f1b": 2, "interleaved": 4, "zbv": 6, "chimera": 2}
    for key, values in times.items():
        name, count = key.removeprefix("torch ").split()
        number = actions[name] * int(count)
        print(
            f"  {key:24} {statistics.median(values) * 1e3:6.2f} ms a step, "
            f"{statistics.median(values) / number * 1e6:5.0f} us for each of a rank's "
            f"{number} forwards and backwards (best {min(values) / number * 1e6:.0f})"
        )
    for key in ("1f1b 4", "1f1b 8", "interleaved 8", "zbv 8"):
        ratios = [a / b for a, b in zip(times[key], times[f"torch {key}"], strict=True)]
        print(f"  {key} / torch: {statistics.median(ratios):.2f} (wanted at most 1)")


def slow_tables() -> dict[str, tuple[PipelineSchedule, float, float]]:
    """Tables for a slow stage 1, with their simulated makespan and memory in shares."""
    costs = StageCosts.of(RANKS, forward=SLOW)
    found = {}
    for name in ("1f1b", "interleaved"):
        schedule = schedule_of(name, 8)
        seen = measure_schedule(schedule, stretched(schedule.stages))
        found[name] = schedule, seen.makespan, max(seen.peak_activations)
    for placements in (("v", "loop"), ("w",), ("both-directions",)):
        one = search_schedule(RANKS, 8, costs, most_activations=RANKS, placements=placements)
        seen = measure_schedule(one.schedule, one.costs)
        found["searched " + "/".join(placements)] = (
            one.schedule,
            seen.makespan,
            max(seen.peak_activations),
        )
    return found


def stretched(stages: int) -> StageCosts:
    """The slow model in more stages."""
    part = stages // RANKS
    times = [t / part for t in SLOW for _ in range(part)]
    return replace(
        StageCosts.of(stages, ranks=RANKS, forward=times),
        activation=(1 / part,) * stages,
    )


def slow_body(world: Any, repeats: int) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    steps = {}
    for name, (schedule, _, _) in slow_tables().items():
        times = [4 * UNIT * t for t in stretched(schedule.stages).forward]
        steps[name] = carried_out(schedule, times)
    for step in steps.values():
        timed(step)
    return {name: [timed(step) for _ in range(repeats)] for name, step in steps.items()}


def report_unequal(repeats: int) -> None:
    times = emulated.run(nodes=1, per_node=RANKS, rate=None, body=slow_body,
                         arguments=(repeats,))[0]  # fmt: skip
    tables = slow_tables()
    print(f"4 ranks, 8 micro-batches, stage 1 1.5x as slow, load {os.getloadavg()[0]:.1f}")
    for name, (_, simulated, memory) in tables.items():
        best = min(times[name])
        against = [
            f"{rival}: simulated {1 - simulated / tables[rival][1]:+.1%}, "
            f"carried out {1 - best / min(times[rival]):+.1%}"
            for rival in ("1f1b", "interleaved")
        ]
        print(
            f"  {name:26} {best:.3f} s, simulated {simulated * 4 * UNIT:.3f}, at most {memory:g} "
            f"activations; less time than {'; than '.join(against)}"
        )


if __name__ == "__main__":
    repeats = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    if sys.argv[1:2] == ["overhead"]:
        report_overhead(repeats or 30)
    elif sys.argv[1:2] == ["unequal"]:
        report_unequal(repeats or 3)
    else:
        report_sleep(repeats or 7)
