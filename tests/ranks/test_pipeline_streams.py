"""ranks: pipelines that hand values over in shared memory equal the serial run, and let it go."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from headway.channel import open_stream
from headway.errors import PeerLost, Stalled
from headway.parallel import cut, open_shared_memory_streams
from headway.schedule.generators.registry import SCHEDULES, make_schedule
from headway.schedule.lowering import lower
from support.pipelines import (
    assert_equal,
    chain,
    make_pipeline,
    points,
    run_pipelined,
    run_serially,
    team_of,
)
from support.ranks import ranks, run_ranks
from support.tiny_models import CLASSES, FEATURES, cross_entropy

RANKS, COUNT, PATIENCE = 4, 8, 20.0
FLUSHED = [name for name in SCHEDULES if not name.startswith("pipedream")]
only_linux = pytest.mark.skipif(sys.platform != "linux", reason="shared memory needs Linux")
pytestmark = only_linux


def model():
    torch.manual_seed(0)
    return chain(depth=9).double()


def team_with(world, schedule, together=lambda a, b: True):
    return open_shared_memory_streams(team_of(world), schedule, together, timeout=PATIENCE)


class Counted:
    """Bytes of point-to-point messages that go over the group."""

    def __init__(self, monkeypatch):
        self.tensors = 0
        plain = dist.isend

        def counted(tensor, *args, **kwargs):
            self.tensors += 1
            return plain(tensor, *args, **kwargs)

        monkeypatch.setattr(dist, "isend", counted)


def all_schedules(world):
    """Every schedule, in memory: results, and messages of a second step over the group."""
    found = {}
    data = points(COUNT, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        for name in FLUSHED:
            count = COUNT // 2 if name == "chimera-halving" else COUNT
            schedule = lower(
                make_schedule(name, stages=RANKS, microbatches=count), sync="eager-opt"
            )
            team = team_with(world, schedule)
            found[name] = run_pipelined(
                world, model(), cross_entropy, data, schedule, team=team, step=lambda _: None
            )
            pipeline = make_pipeline(
                world, model(), cross_entropy, data, schedule, team=team, step=lambda _: None
            )
            pipeline.run(data)
            sent = Counted(patch)
            pipeline.run(data)
            assert sent.tensors == 0, name
            patch.undo()
            dist.barrier(world.group)
    return found


@pytest.mark.slow
def test_every_schedule_equals_the_serial_run_and_sends_nothing_over_the_group():
    expected = run_serially(model(), cross_entropy, points(COUNT, dtype=torch.float64))
    found = run_ranks(RANKS, all_schedules)
    for name in FLUSHED:
        assert_equal(expected, [of_rank[name] for of_rank in found], 1e-12)


class Careless(nn.Module):
    """Changes in place what enters it, and keeps all that ever did."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)
        self.kept: list[torch.Tensor] = []

    def forward(self, x):
        self.kept.append(x.mul_(2.0).detach())
        return self.layer(x)


def careless(world, shared):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(FEATURES, FEATURES), nn.Identity(), Careless(), Careless()
    ).double()
    data = points(6, dtype=torch.float64)
    net.append(nn.Linear(FEATURES, CLASSES).double())
    if not shared:
        return run_serially(net, cross_entropy, data), [m.kept for m in (net[2], net[3])]
    schedule = lower(make_schedule("zb-h1", stages=2, microbatches=6))
    stages = cut(net, cross_entropy, data[0], at=["2"])
    for part in (net[2], net[3]):
        part.kept.clear()  # of the cut
    found = run_pipelined(
        world, net, cross_entropy, data, schedule, stages=stages, team=team_with(world, schedule)
    )
    return found, [[t.clone() for t in m.kept] for m in (net[2], net[3])]


def test_what_a_stage_changes_and_keeps_stays_as_it_is():
    """A room that is lent is never written to, however long the model holds on to it."""
    expected, kept = careless(None, shared=False)
    found = run_ranks(2, careless, True)
    assert_equal(expected, [of_rank for of_rank, _ in found], 1e-12)
    for mine, theirs in zip(kept, found[1][1], strict=True):
        assert len(mine) == len(theirs) == 6
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def steady(world):
    """Rooms after two steps and after six; one step is ragged, one is an evaluation."""
    data = points(COUNT, dtype=torch.float64)
    schedule = lower(make_schedule("1f1b", stages=2, microbatches=COUNT))
    team = team_with(world, schedule)
    pipeline = make_pipeline(world, model(), cross_entropy, data, schedule, team=team)
    (stream,) = team.streams.values()
    rooms = []
    for step in range(6):
        pipeline.run([(x[: 2 + step % 2], y[: 2 + step % 2]) for x, y in data])
        pipeline.evaluate(data[:3])
        rooms.append(len(stream._arena._rooms))
    dist.barrier(world.group)
    lent = sum(stream._arena._ended[r.number] != r.loans for r in stream._arena._rooms)
    memory = Path("/proc/self/maps").read_text().count("headway channel")
    dist.barrier(world.group)
    del pipeline, team, stream
    gc.collect()
    return rooms, lent, memory, Path("/proc/self/maps").read_text().count("headway channel")


def test_rooms_are_used_again_and_nothing_stays():
    for rooms, lent, before, after in run_ranks(2, steady):
        assert rooms[-1] <= COUNT + 3  # as many as can be under way; 66 messages went
        assert lent <= 2  # the newest message of the training row and of the other one
        assert before > 0 == after


def interrupted(world, how):
    data = points(4, dtype=torch.float64)
    schedule = lower(make_schedule("1f1b", stages=2, microbatches=4))
    team = team_with(world, schedule)
    pipeline = make_pipeline(world, model(), cross_entropy, data, schedule, team=team)
    pipeline.run(data)
    team.streams[1 - world.rank]._channel._wire.seconds = 1.0
    dist.barrier(world.group)
    if world.rank == 1:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier(world.group)
        return None
    try:
        pipeline.run(data)
    except (PeerLost, Stalled) as error:
        if how == "sleeps":
            dist.barrier(world.group)
        return type(error).__name__, str(error)
    return None


def test_a_rank_that_dies_and_one_that_does_not_come_are_named_with_the_cell():
    (kind, text), _ = run_ranks(2, interrupted, "dies", mortal=(1,), timeout=PATIENCE)
    assert kind == "PeerLost"
    assert "another rank vanished while rank 0 of the pipeline stands at d0.s0.RECV" in text
    assert "rank 1 vanished" in text
    (kind, text), _ = run_ranks(2, interrupted, "sleeps", timeout=PATIENCE)
    assert kind == "Stalled"
    assert "rank 0 of the pipeline stands at d0.s0.RECV" in text


@ranks(2)
def test_ranks_of_two_machines_use_the_group(world):
    schedule = lower(make_schedule("1f1b", stages=2, microbatches=4))
    assert not team_with(world, schedule, lambda a, b: False).streams
    assert list(team_with(world, schedule).streams) == [1 - world.rank]


@ranks(2)
def test_messages_of_many_tags_sizes_and_kinds(world):
    """In another order than they were put; empty ones and lazy ones; one is kept for ever."""
    stream = open_stream(1 - world.rank, ahead=64, timeout=PATIENCE)
    assert stream is not None
    draw = torch.Generator().manual_seed(3)
    kept = []
    for turn in range(20):
        sizes = [int(torch.randint(0, 3000, (), generator=draw)) for _ in range(12)]
        messages = {
            tag: [
                torch.arange(size, dtype=torch.float64) + tag + turn,
                torch.full((tag, 2), turn, dtype=torch.uint8),
                torch.full((3,), complex(tag, turn)).conj(),
            ]
            for tag, size in enumerate(sizes)
        }
        for tag, tensors in messages.items():
            stream.put(tag, tensors)
        for tag in sorted(messages, key=lambda tag: (7 * tag) % 12):
            forms = [(t.shape, t.dtype) for t in messages[tag]]
            came = stream.take(tag, forms)
            assert all(torch.equal(a, b) for a, b in zip(came, messages[tag], strict=True))
            assert all(t.data_ptr() % 64 == 0 and not t._is_view() for t in came if t.numel())
            if tag == turn % 12:
                kept.append((came[0], came[0].clone()))
        del came
    assert all(torch.equal(a, b) for a, b in kept)
    assert len(stream._arena._rooms) < 64
    stream.put(99, [torch.empty(0)])
    assert stream.take(99, [((0,), torch.float32)])[0].shape == (0,)
    dist.barrier(world.group)
    stream.close()
    assert all(torch.equal(a, b) for a, b in kept)  # their memory stays
