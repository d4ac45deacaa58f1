"""single: what one worker of several does, where the others are not there or are dead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from headway import Executor, criterion
from headway.plans import Synchrony, data_parallel
from headway.run.synchrony.free_run import FreeRun
from headway.synchrony.actors import Address
from headway.synchrony.history import Handled, Undone
from headway.synchrony.merging import Model
from support.collective_recorder import CollectiveRecorder, RecordedCollective
from support.fake_world import fake_world
from support.tiny_models import CLASSES, FEATURES, Points

LOSS = criterion(nn.CrossEntropyLoss())
WIDE = 2_200_000


def made(world: Any, model: nn.Module, synchrony: Synchrony) -> Executor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = data_parallel(4, processes=2, synchrony=synchrony)
    return Executor(model, optimizer, loss=LOSS, plan=plan, world=world)


def test_a_model_travels_in_one_operation_and_a_step_between_meetings_in_none() -> None:
    """However large: several operations at a time keep a slow link busy for longer than one."""
    model = nn.Linear(FEATURES, CLASSES)
    model.spare = nn.Parameter(torch.zeros(WIDE))
    seen: list[list[RecordedCollective]] = []
    with fake_world(2) as world:
        run = made(world, model, Synchrony(merge="mean", local_steps=2, state="keep"))
        for batch in run.batches(Points(16)):
            with CollectiveRecorder() as recorder:
                run.step(batch)
            seen.append(recorder.seen)
    size = 4.0 * sum(p.numel() for p in model.parameters())
    vote = RecordedCollective("all_reduce", 2, 4.0)
    meeting = [RecordedCollective("all_reduce", 2, size), vote]
    assert seen[1:] == [meeting, [], meeting]


def test_weight_for_a_dead_worker_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the mean of all models forgets the worker that has sent it, by and by."""
    torch.manual_seed(0)
    alone, model = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)
    alone.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    gossip = Synchrony(merge="push_sum", kind="asynchronous", probability=1.0)
    monkeypatch.setattr(FreeRun, "_connect", lambda run: None)
    with fake_world(2) as world:
        run = made(world, model, gossip)
        free = run.strategy.rounds
        assert isinstance(free, FreeRun)
        free.gone.add(1)
        own = Address("model", 0)
        holder = free._parts.holders[own]
        assert isinstance(holder, Model)
        weight = holder.weight
        for batch in run.batches(Points(16)):
            inputs, labels = batch.micros[0].data
            optimizer.zero_grad()
            nn.functional.cross_entropy(alone(inputs), labels).backward()
            optimizer.step()
            run.step(batch)
            torch.testing.assert_close(list(model.parameters()), list(alone.parameters()))
            assert holder.weight == weight
        free.close()
        free._thread.join(5)
    entries = list(free.history.entries(own))
    sent = sum(isinstance(entry, Undone) for entry in entries)
    assert sent >= 3
    assert sum(entry == Handled(0) for entry in entries) >= 2 * sent
