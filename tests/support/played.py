"""What the executor starts on ranks that are played one by one, each in a fake world of its own."""

from __future__ import annotations

from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist

from headway import Executor
from headway.parallel.pipeline.runtime.p2p import StageConnection, TensorFormat
from headway.run.strategy import parameters, strategy
from headway.run.strategy.step_context import StepReduction
from support.collective_recorder import CollectiveRecorder
from support.fake_world import fake_world


class Unknown(Exception):
    """The other end has not announced it yet."""


@contextmanager
def playing():
    """Ranks hear what others have announced in an earlier world; numbers of others are zeros."""
    said: dict[tuple[int, int, int], bytes] = {}

    def hear(self, tag):
        key = tag, self._peer, dist.get_rank()
        if key not in said:
            raise Unknown
        return self.read(said[key])

    def announce(self, thing, tag):
        said.setdefault((tag, dist.get_rank(), self._peer), self.written(thing))
        return []

    def empty(self, device):
        return torch.zeros(self.shape, dtype=self.dtype, device=device)

    def alone(rank, look, exchanging):
        return look()

    with (
        patch.object(StageConnection, "announce", announce),
        patch.object(StageConnection, "hear", hear),
        patch.object(TensorFormat, "empty", empty),
        patch.object(StepReduction, "read", lambda self: (1.0, 1.0, 0)),
        patch.object(strategy.math, "isfinite", lambda value: True),  # norms of zeros and of noise
        patch.object(dist, "broadcast_object_list", lambda *_, **__: None),
        patch.object(parameters, "broadcast_from_rank0", alone),
        patch.object(strategy, "broadcast_from_rank0", alone),
    ):
        yield


def step_of(plan, rank, model, data, loss, clip=None):
    """What was recorded in a rank's second step."""
    with fake_world(plan.ranks, rank=rank) as world:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = Executor(model, optimizer, loss=loss, plan=plan, world=world, clip=clip)
        for batch in run.batches(data):
            with CollectiveRecorder() as recorder:
                run.step(batch)
            if run.steps_done == 2:
                break
        return recorder


def played(plan, ranks, build, data, loss, clip=None):
    """By rank what `step_of` returns; a rank is tried again when those it hears have spoken."""
    found, waiting = {}, list(ranks)
    with playing():
        while waiting:
            rank = waiting.pop(0)
            try:
                found[rank] = step_of(plan, rank, build(), data, loss, clip)
            except Unknown:
                waiting.append(rank)
    return found
