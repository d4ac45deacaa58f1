"""One rank of `headway cluster measure`: device, links, and the overhead of a step.

The overhead is measured by running the executor on models of a few numbers, by plans that differ in
one thing each: trained tensors, micro-batches, stages. These steps take what any step takes beside
its kernels: collating batches, the step reduction, hooks, waits for ranks that woke up late.
The cost model fits its terms to them. Every rank takes the same steps in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from headway.capture.benchmark.kernels import measure_kernels
from headway.capture.benchmark.links import (
    measure_exchanges,
    measure_overlap,
    slowest_of,
)
from headway.capture.benchmark.timer import ROUNDS_SECONDS, Slowest, Visit, slowest_of_one
from headway.channel.facts import gather_facts
from headway.channel.gloo_listeners import drop_later_connections
from headway.channel.process_memory import keep_freed_memory
from headway.cluster.local_machine import cores_in_use
from headway.cluster.measurement import IdleStep, LinkReadings, RankReadings
from headway.data import RankBatch
from headway.plans import PipelinePlan, Plan, data_parallel, pipelined
from headway.run.distributed.launch_env import LaunchEnv
from headway.run.distributed.world import World
from headway.run.executor import Executor

_WIDTH, _SAMPLES = 4, 2
"""Elements of a tensor; samples of a micro-batch."""
_DATA = ((1, 1), (49, 1), (1, 8))
"""Trained tensors and micro-batches of steps without a pipeline."""
_PIPES = (2, 8)
"""Micro-batches of those with one, of two stages."""
_STEPS, _COLD = 12, 2
"""Of one visit; the first ones do not count."""


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(_WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class _Samples(Dataset[Tensor]):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(_WIDTH)


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    value: Tensor = model(batch).mean()
    return value


@contextmanager
def idle_steps(world: World) -> Iterator[dict[IdleStep, Visit]]:
    """Steps to be timed, by what they consist of; collective.

    Args:
        world: All its ranks take part. Of an odd number there are no pipelines.
    """
    # The host issues kernels of other devices ahead: a step's overhead does not show there.
    if world.device.type != "cpu":
        yield {}
        return
    made = [_made(world, *which) for which in _which(world.ranks)]
    try:
        yield {step: partial(_visit, run, batches) for step, run, batches in made}
    finally:
        for _, run, _ in made:
            run.strategy.close()


def _which(ranks: int) -> Iterator[tuple[IdleStep, Plan]]:
    for tensors, microbatches in _DATA:
        batch = _SAMPLES * microbatches * ranks
        plan = data_parallel(batch, processes=ranks, microbatch=_SAMPLES)
        yield IdleStep(tensors=tensors, microbatches=microbatches, samples=_SAMPLES), plan
    if ranks % 2:
        return
    for microbatches in _PIPES:
        pipeline = PipelinePlan(schedule="1f1b", microbatches=microbatches)
        batch = _SAMPLES * microbatches * ranks // 2
        plan = pipelined(batch, processes=ranks, stages=2, pipeline=pipeline)
        yield IdleStep(tensors=2, microbatches=microbatches, samples=_SAMPLES, stages=2), plan


def _made(
    world: World, step: IdleStep, plan: Plan
) -> tuple[IdleStep, Executor, Iterator[RankBatch]]:
    model = nn.Sequential(*(_Scale() for _ in range(step.tensors)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    run = Executor(model, optimizer, loss=_loss, plan=plan, world=world)
    return step, run, iter(run.batches(_Samples(), epochs=None))


def _visit(run: Executor, batches: Iterator[RankBatch]) -> tuple[float]:
    """The usual seconds of a step, with its batch."""
    found = []
    for _ in range(_STEPS):
        start = time.perf_counter()
        run.step(next(batches))
        found.append(time.perf_counter() - start)
    return (median(found[_COLD:]),)


T = TypeVar("T")


def measure(
    place: LaunchEnv, device: str, timeout_seconds: float, seconds: float = ROUNDS_SECONDS
) -> list[RankReadings]:
    """Measure as one rank of the world found at `place`; collective.

    Returns:
        The readings of all ranks, in order of rank, on every rank.
    """
    joined = World.join(place, device=device, timeout_seconds=timeout_seconds)
    with joined as world, world.explained("measuring"):
        return measure_in(world, seconds)


def measure_in(world: World, seconds: float = ROUNDS_SECONDS) -> list[RankReadings]:
    """The same in a world that has been joined already; collective."""
    # First, before this job itself makes the cores busy.
    busy = cores_in_use()
    names = _gathered(world, world.place.node)
    mine = [rank for rank, name in enumerate(names) if name == world.place.node]
    world.barrier("measuring")
    by_node = [[r for r, n in enumerate(names) if n == name] for name in dict.fromkeys(names)]
    slowest = _slowest(world, by_node)
    keep_freed_memory()  # as training does
    with idle_steps(world) as idle:
        kernels = measure_kernels(world.device, len(mine), slowest, seconds, idle)
    inside = between = None
    if world.ranks > 1:
        kernels = replace(
            kernels,
            overlap=measure_overlap(_world_group(), world.device),
        )
        inside = _among(world, by_node)
        between = _among(world, [[ranks[0] for ranks in by_node]])
    own = RankReadings(
        node=world.place.node,
        kernels=kernels,
        inside=inside,
        between=between,
        busy=busy,
        threads=torch.get_num_threads(),
    )
    return _gathered(world, own)


def _slowest(world: World, by_node: list[list[int]]) -> Slowest:
    """Of the ranks of this one's node; collective."""
    found = slowest_of_one
    # Every rank makes the groups of all nodes, because `new_group` is collective over the world.
    for ranks in by_node:
        with drop_later_connections():
            group = dist.new_group(ranks) if len(ranks) > 1 else None
        if isinstance(group, dist.ProcessGroup) and world.rank in ranks:
            found = partial(slowest_of, group=group, device=world.device)
    return found


def _among(world: World, groups: list[list[int]]) -> LinkReadings | None:
    """Of the group with this rank in it; None: there is none of at least two ranks."""
    found = None
    for ranks in groups:
        with drop_later_connections():
            group = dist.new_group(ranks) if len(ranks) > 1 else None
        if isinstance(group, dist.ProcessGroup) and world.rank in ranks:
            found = measure_exchanges(group, world.device)
    world.barrier("measuring")
    return found


def _world_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _gathered(world: World, value: T) -> list[T]:
    if world.ranks == 1:
        return [value]
    return gather_facts(value, world.side_group)
