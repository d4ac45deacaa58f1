"""ranks: schedules without a flush equal a serial run that uses the same old weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from headway.parallel import cut
from headway.schedule.generators.registry import make_schedule
from headway.schedule.lowering import lower
from headway.schedule.pipeline_schedule import ActionKind
from support.pipelines import chain, make_pipeline, points
from support.ranks import run_ranks
from support.tiny_models import cross_entropy

RANKS, COUNT, RATE = 3, 9, 0.3
WAYS = ({}, {"recompute": (0, 1, 2)}, {"recompute": (0, 1), "blockwise": True})


def model():
    torch.manual_seed(0)
    return chain(depth=6).double()


def data():
    return points(COUNT, dtype=torch.float64)


def table(name):
    return make_schedule(name, stages=RANKS, microbatches=COUNT)


def steps_of(schedule, stage):
    """For each step of a stage the micro-batches whose gradients it uses."""
    found, waiting = [], []
    for action in schedule.order[stage]:
        if action.kind == ActionKind.BACKWARD:
            waiting.append(action.microbatch)
        elif action.kind == ActionKind.STEP:
            found.append(waiting)
            waiting = []
    return found


def delayed(name):
    """The parameters after all steps, computed micro-batch by micro-batch from the versions."""
    schedule, whole = table(name), model()
    stages = cut(whole, cross_entropy, data()[0], stages=RANKS)
    versions = {
        a.microbatch: {} for row in schedule.order for a in row if a.kind == ActionKind.FORWARD
    }
    for row in schedule.order:
        for action in row:
            if action.kind == ActionKind.FORWARD:
                versions[action.microbatch][action.stage] = action.version
    steps = [steps_of(schedule, stage) for stage in range(RANKS)]
    history = [[{n: p.detach().clone() for n, p in s.parameters.items()}] for s in stages]
    gradients = [{} for _ in range(RANKS)]
    for m in range(COUNT):
        for s, stage in enumerate(stages):
            for n, p in stage.parameters.items():
                p.data = history[s][versions[m][s]][n].clone()
        whole.zero_grad()
        (cross_entropy(whole, data()[m]) / COUNT).backward()
        for s, stage in enumerate(stages):
            gradients[s][m] = {n: p.grad for n, p in stage.parameters.items()}
            if len(steps[s]) >= len(history[s]) and steps[s][len(history[s]) - 1][-1] == m:
                total = {
                    n: sum(gradients[s][i][n] for i in steps[s][len(history[s]) - 1])
                    for n in stage.parameters
                }
                history[s].append({n: v - RATE * total[n] for n, v in history[s][-1].items()})
    return [h[-1] for h in history], [len(h) for h in history], versions


def pipelined(world, name, how):
    whole = model()
    optimizer = torch.optim.SGD(whole.parameters(), lr=RATE)

    def step(stage):
        optimizer.step()
        optimizer.zero_grad()

    schedule = lower(replace(table(name), **how))
    pipeline = make_pipeline(world, whole, cross_entropy, data(), schedule, step=step)
    storages = peak_versions(pipeline, world.rank)
    pipeline.run(data())
    held = pipeline.stages[world.rank].parameters
    left = pipeline._training._versions["d0", world.rank]._kept
    assert not left, "versions are kept that nothing will use"
    return {n: p.detach().clone() for n, p in held.items()}, max(storages)


def every_way(world, name):
    return [pipelined(world, name, how) for how in WAYS]


def peak_versions(pipeline, rank):
    """How many copies of the weights there were, noted whenever a step is made."""
    versions = pipeline._training._versions["d0", rank]
    seen = [1]
    begin = versions.begin_step

    def counted(version):
        begin(version)
        seen.append(len(versions._kept) + 1)

    versions.begin_step = counted
    pipeline._training._do = pipeline._training._bind()
    return seen


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
def test_equal_to_the_delayed_serial_run(name):
    expected, lengths, versions = delayed(name)
    assert min(lengths) > 2
    assert any(len(set(of_stage.values())) > 1 for of_stage in versions.values()) or "2bw" in name
    found = run_ranks(RANKS, every_way, name)
    for stage, ways in enumerate(found):
        for (parameters, copies), how in zip(ways, WAYS, strict=True):
            assert parameters.keys() == expected[stage].keys()
            for n, value in parameters.items():
                assert torch.allclose(value, expected[stage][n], rtol=0, atol=1e-12), (n, how)
            assert copies == (RANKS - stage if name == "pipedream" else 2), (stage, copies)


def test_the_two_are_not_the_same_and_not_serial():
    """The reference can tell old weights from new ones."""
    plain = model()
    for m in range(COUNT):
        plain.zero_grad()
        (cross_entropy(plain, data()[m]) / COUNT).backward()
        for p in plain.parameters():
            p.data -= RATE * p.grad
    weights = {name: delayed(name)[0][0]["0.weight"] for name in ("pipedream", "pipedream-2bw")}
    first = next(m for m in plain.modules() if isinstance(m, nn.Linear)).weight
    assert (weights["pipedream"] - first).abs().max() > 1e-6
    assert (weights["pipedream"] - weights["pipedream-2bw"]).abs().max() > 1e-6
