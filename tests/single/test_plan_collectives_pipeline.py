"""single: messages and sums of a pipeline, rank by rank, are those that the plan lists."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn

from headway import Executor, criterion
from headway.capture import capture
from headway.cluster.presets import of_preset
from headway.collective.collective_calls import CommunicatingStage
from headway.cost.machines import machine_of
from headway.graph.model_graph import TensorSpec
from headway.graph.operator_fusion import fuse_light_operators
from headway.parallel.pipeline.runtime.p2p import StageConnection, TensorFormat
from headway.planner.estimate.operators import PlanningWorkload
from headway.planner.search.branch_and_bound import PlanSearch
from headway.planner.search.plan_conversion import point_of
from headway.planner.search.request import PlanRequest
from headway.planner.traffic.estimate import collectives_of
from headway.planner.traffic.executor import collectives_of_plan, parts_of
from headway.plans import pipelined
from headway.plans.pipeline import PipelinePlan
from headway.run.strategy.step_context import StepReduction
from support.call_volumes import call_volumes
from support.collective_recorder import CollectiveRecorder, collective_differences
from support.fake_world import fake_world
from support.sampling import sampled
from support.tiny_models import CLASSES, FEATURES, Points

LOSS = criterion(nn.CrossEntropyLoss())
WIDTH = 12


class Unknown(Exception):
    """The other end has not announced it yet."""


@pytest.fixture
def announced(monkeypatch):
    """What ranks say of their messages before the first ones, by tag; they play one by one."""
    said: dict[int, object] = {}

    def hear(self, tag):
        if tag not in said:
            raise Unknown
        return said[tag]

    def announce(self, thing, tag):
        said.setdefault(tag, thing)
        return []

    def empty(self, device):
        return torch.zeros(self.shape, dtype=self.dtype, device=device)

    monkeypatch.setattr(StageConnection, "announce", announce)
    monkeypatch.setattr(StageConnection, "hear", hear)
    monkeypatch.setattr(TensorFormat, "empty", empty)
    monkeypatch.setattr(StepReduction, "read", lambda self: (1.0, 1.0, 0))
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", lambda *_, **__: None)
    return said


def chain(depth=8, *, tied=False):
    layers = [nn.Linear(FEATURES, WIDTH)]
    layers += [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(depth - 2)]
    if tied:
        layers[depth - 2][0].weight = layers[1][0].weight
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


def spec_of(tensor):
    return TensorSpec(shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))


def step_of(plan, rank, *, model, clip=None):
    """What the executor does on a rank in its second step; and its stages."""
    model = model()
    with fake_world(plan.ranks, rank=rank) as world:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = Executor(model, optimizer, loss=LOSS, plan=plan, world=world, clip=clip)
        for batch in run.batches(Points(plan.batch.samples * 2)):
            with CollectiveRecorder() as recorder:
                run.step(batch)
        return recorder, run.pipeline.stages


def recorded(plan, ranks, **options):
    """By rank; a rank is tried again when the one that it hears from has spoken."""
    found, waiting = {}, list(ranks)
    while waiting:
        rank = waiting.pop(0)
        try:
            found[rank] = step_of(plan, rank, **options)
        except Unknown:
            waiting.append(rank)
    return found


def parts_by_stages(stages, samples):
    """From what the executor has cut: one tensor of `samples` rows crosses each border."""
    message = [(samples * WIDTH * 4, True)]
    return [
        CommunicatingStage(
            parameters={n: spec_of(p) for n, p in stage.parameters.items() if p.requires_grad},
            sends={target: message for given in stage.gives for target in given.targets},
        )
        for stage in stages
    ]


SCHEDULES = ("1f1b", "gpipe", "interleaved", "chimera", "zbv")


def planned(stages, copies=1, *, parts=8, per=2, **options):
    pipe = PipelinePlan(microbatches=parts, **options)
    processes = stages * copies
    return pipelined(parts * per * copies, processes=processes, stages=stages, pipeline=pipe)


@pytest.mark.parametrize(("schedule", "copies"), sampled([*product(SCHEDULES, [1, 4, 512])], 3))
def test_every_rank_of_a_pipeline(announced, schedule, copies):
    """Two ranks, one, four and 512 copies of the pipeline: up to 1,024 ranks."""
    plan = planned(2, copies, schedule=schedule)
    found = recorded(plan, plan.mesh.peers(plan.ranks - 1, "pipe"), model=chain)
    for rank, (recorder, stages) in found.items():
        calls = collectives_of_plan(plan, parts_by_stages(stages, 2), rank=rank)
        assert list(collective_differences(calls, recorder.seen)) == []
        kinds = {(call.kind, call.axis) for call in calls}
        assert {("send", "pipe"), ("receive", "pipe"), ("all_reduce", "world")} <= kinds


@pytest.mark.parametrize("sync", ["post", "eager"])
def test_tied_weights_and_a_clipped_norm(announced, sync):
    """A parameter of two stages is summed over the holders of both."""
    plan = planned(4, 2, schedule="1f1b", sync=sync)
    for rank, (recorder, stages) in recorded(
        plan, range(4), model=partial(chain, tied=True), clip=1.0
    ).items():
        assert stages.shared
        calls = collectives_of_plan(plan, parts_by_stages(stages, 2), rank=rank, clip=True)
        assert list(collective_differences(calls, recorder.seen)) == []


@pytest.mark.parametrize("copies", [1, 4])
def test_the_stages_of_the_captured_model(announced, copies):
    """What the search prices for a plan of a pipeline is what its ranks do, beside flags."""
    plan = planned(2, copies, schedule="1f1b", cut=("4",))
    with torch.device("meta"):
        graph = capture(
            chain(), (torch.empty(2, FEATURES), torch.empty(2, dtype=torch.long)), loss=LOSS
        )
    machine = machine_of(of_preset("dgx-a100", nodes=1))
    work = PlanningWorkload(graph=fuse_light_operators(graph), samples=2)
    search = PlanSearch(
        PlanRequest(work=work, machine=machine, devices=(plan.ranks,), batch=plan.batch.samples)
    )
    point = point_of(plan, search)
    parts = parts_of(search, point)
    priced = collectives_of(search, point)
    found = recorded(plan, range(2), model=chain)
    for rank, (recorder, _) in found.items():
        calls = collectives_of_plan(plan, parts, rank=rank)
        assert list(collective_differences(calls, recorder.seen)) == []
        plain = [replace(c, bytes=c.bytes - c.beside) for c in calls if c.axis != "world"]
        assert call_volumes(plain) == call_volumes(priced[rank])
