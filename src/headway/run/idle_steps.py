"""What a step of the executor takes in which next to nothing is computed.

The executor that trains takes steps of models of a few numbers, by plans that differ by one thing
each: trained tensors, micro-batches, stages. They take what any step takes beside its kernels:
batches put together, the tally, hooks, waits for ranks that woke late. `cost.host` makes terms of
them. Invariant: every rank takes the same steps, in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from headway.capture.rounds import Visit
from headway.cluster.readings import IdleStep
from headway.data import RankBatch
from headway.plan import Pipeline, Plan, data_parallel, pipelined
from headway.run.executor import Executor
from headway.run.world import World

_WIDTH, _SAMPLES = 4, 2
"""Numbers of a tensor; samples of a micro-batch."""
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
    """Steps to be timed, and what each of them is; inside only; collective.

    Where kernels do not run on the host, it issues them ahead, and there are none.

    Args:
        world: All its ranks take part. Of an odd number there are no pipelines.
    """
    if world.device.type != "cpu":
        yield {}
        return
    made = [_made(world, *which) for which in _which(world.ranks)]
    try:
        yield {step: partial(_visit, run, batches) for step, run, batches in made}
    finally:
        for _, run, _ in made:
            run.gradients.close()


def _which(ranks: int) -> Iterator[tuple[IdleStep, Plan]]:
    for tensors, microbatches in _DATA:
        batch = _SAMPLES * microbatches * ranks
        plan = data_parallel(batch, processes=ranks, microbatch=_SAMPLES)
        yield IdleStep(tensors=tensors, microbatches=microbatches, samples=_SAMPLES), plan
    if ranks % 2:
        return
    for microbatches in _PIPES:
        pipeline = Pipeline(schedule="1f1b", microbatches=microbatches)
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
