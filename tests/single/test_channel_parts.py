"""single: the parts of channels: regions, blocks, waits, refusals, where tensors are placed."""

from __future__ import annotations

import dataclasses
import mmap
import os
import platform
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from headway.capture import capture
from headway.channel import Channel, boundary_tensors, shared_memory, wait_any
from headway.channel.region import (
    DTYPES,
    METADATA_WORDS,
    CopyTarget,
    MemoryRegion,
    RegionLayout,
    RepeatedSource,
    TensorMetadata,
    copy_tensor,
)
from headway.channel.transport import Doorbell, DoorbellPipe, WaitBackoff, wait_for_word
from headway.errors import MissingExtra, PeerLost, PlanError, RunError, Stalled, UsageError
from headway.graph.stage_boundaries import cut_points


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), tuple(range(1, 9))], ids=str)
def test_a_block_gives_back_the_form(shape, dtype):
    form = TensorMetadata(shape, dtype)
    block = form.block(key=2**63)
    assert len(block) == METADATA_WORDS
    assert TensorMetadata.of(block) == form
    assert (block[2], block[3]) == (torch.empty(shape, dtype=dtype).nbytes, 2**63)
    region = MemoryRegion(
        mmap.mmap(-1, RegionLayout(2, form.nbytes).size), RegionLayout(2, form.nbytes)
    )
    view = form.view(region.slot(1))
    assert (view.shape, view.dtype) == (torch.Size(shape), dtype)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((1,) * 9, torch.float32), ((2,), torch.quint8)], ids=str
)
def test_what_no_block_can_say_is_refused(shape, dtype):
    with pytest.raises(RunError, match=f"{len(shape)} dimensions of {dtype} in a channel"):
        TensorMetadata(shape, dtype).block()


@pytest.mark.parametrize("slots", [1, 2, 5])
@pytest.mark.parametrize("nbytes", [0, 1, mmap.PAGESIZE, mmap.PAGESIZE + 1])
def test_nothing_overlaps_in_a_region(slots, nbytes):
    layout = RegionLayout(slots, nbytes)
    words = [layout.closed, layout.token]
    for slot in range(slots):
        words += range(layout.flag(slot), layout.flag(slot) + 2 + METADATA_WORDS)
        words.append(layout.credit(slot))
        lines = {layout.flag(slot) // 16, layout.credit(slot) // 16, layout.closed // 16}
        assert len(lines) == 3, "writers share a line"
    assert len(set(words)) == len(words)
    assert max(words) * 8 + 8 <= layout.header
    ends = [layout.offset(slot) + nbytes for slot in range(slots)]
    assert all(a <= layout.offset(s) for s, a in enumerate([layout.header, *ends[:-1]]))
    assert ends[-1] <= layout.size


def test_a_wait_spins_then_yields_then_sleeps_and_ends(monkeypatch):
    clock, slept, longer = [0.0], [], [0.0]
    monkeypatch.setattr("headway.channel.transport.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("headway.channel.transport.time.sleep", slept.append)

    def give_away():
        slept.append(0)
        clock[0] += longer[0]

    monkeypatch.setattr("headway.channel.transport.os.sched_yield", give_away)
    pauses = WaitBackoff(1.0, lambda: None, lambda s: Stalled(f"late after {s:g} s"))
    for clock[0] in (0.0, 0.0004, 0.0008, 0.002, 0.5, 1.0):
        pauses.pause()
    assert slept == [0, 0, 0.0001, 0.00025, 0.001, 0.001]
    clock[0] = 1.01
    with pytest.raises(Stalled, match="late after 1 s"):
        pauses.pause()
    clock[0], longer[0] = 2.0, 0.0001  # others want the core
    pauses = WaitBackoff(1.0, lambda: None, Stalled, lambda: slept.append("rung"))
    for _ in range(3):
        pauses.pause()
    assert slept[-3:] == [0, "rung", "rung"]


def test_whoever_sleeps_says_so_and_is_woken(monkeypatch):
    monkeypatch.setattr("headway.channel.transport._LONGEST", 30.0)
    memory = [memoryview(bytearray(16)).cast("Q") for _ in range(2)]
    pipes = [DoorbellPipe(), DoorbellPipe()]
    a, b = (
        Doorbell(pipes[n], os.getpid(), pipes[1 - n].write, memory[n], memory[1 - n], 0)
        for n in range(2)
    )
    thread = threading.Thread(target=a.sleep, args=(1, 5))
    thread.start()
    while not memory[1][0]:
        time.sleep(0.001)
    memory[0][1] = 5
    b.ring()
    thread.join(10)
    assert not thread.is_alive()
    assert memory[1][0] == 0
    a.sleep(1, 5)  # it has come: returns at once
    for pipe in pipes:
        pipe.close()


def test_what_had_been_stored_before_the_end_counts():
    """The other end stores and dies between the look at the word and the look at the process."""
    words = memoryview(bytearray(16)).cast("Q")

    def check():
        words[1] = 3
        raise PeerLost("gone")

    wait_for_word(words, 1, 3, lambda: WaitBackoff(5, check, lambda s: Stalled("late")))
    with pytest.raises(PeerLost, match="gone"):
        wait_for_word(words, 1, 4, lambda: WaitBackoff(5, check, lambda s: Stalled("late")))


def test_a_tensor_that_comes_again_is_copied_as_it_lies_now():
    """Also when it has been moved, turned or exchanged meanwhile."""
    targets, again = [CopyTarget(torch.zeros(4, 4)) for _ in range(2)], RepeatedSource()
    source, short = torch.arange(16.0).view(4, 4), 0
    changes = [
        lambda: None, lambda: source.add_(1), lambda: source.t_(), lambda: source.add_(1),
        lambda: source.t_(), lambda: source.set_(torch.arange(16.0).view(4, 4)),
        lambda: source.mul_(2), lambda: source.set_(torch.ones(4, 8)[:, ::2]), lambda: None,
    ]  # fmt: skip
    for number, change in enumerate([*changes, *changes]):
        change()
        target = targets[number % 2]
        target.tensor.fill_(-1)
        if again.copy(source, target):
            short += 1
        else:
            copy_tensor(source, target.tensor, target.address, target.nbytes)
        assert torch.equal(target.tensor, source), number
    assert short >= 5
    other = source.clone()
    assert not again.copy(other, targets[0])
    assert again.copy(other, targets[0])
    del other
    assert not again.copy(source, targets[0])


@pytest.mark.skipif(
    bool(shared_memory.unavailable_reason()), reason=shared_memory.unavailable_reason()
)
def test_memory_has_no_name_and_cannot_shrink():
    number, map_ = shared_memory.create_memory(8192)
    with pytest.raises(PermissionError):
        map_.resize(4096)
    again = shared_memory.map_peer_memory(__import__("os").getpid(), number, 8192)
    map_[5000] = 7
    assert again[5000] == 7


def test_other_processors_are_refused_by_name(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert "aarch64" in shared_memory.unavailable_reason()
    monkeypatch.delattr("os.memfd_create", raising=False)
    assert "Linux 5.3" in shared_memory.unavailable_reason()


def test_a_channel_needs_somebody_to_meet():
    with pytest.raises(UsageError, match="a channel without a process group"):
        Channel(1, shape=(2,))
    with pytest.raises(UsageError, match="a channel of rank 0 to itself"):
        Channel(0, shape=(2,), store=dist.HashStore(), rank=0)
    with pytest.raises(UsageError, match="a channel of 0 slots"):
        Channel(1, shape=(2,), slots=0)
    with pytest.raises(UsageError, match="a dynamic channel without credits"):
        Channel(1, credit=False)
    with pytest.raises(UsageError, match="any of no channels"):
        wait_any([])


def test_without_mpi4py_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "mpi4py", None)
    with pytest.raises(MissingExtra, match=r"headway\[mpi\]"):
        Channel(1, shape=(2,), provider="mpi")


# -- placement -----------------------------------------------------------------------------------


class Stages(nn.Module):
    """Three layers; the first result skips one, and a view of the second goes on."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x):
        first = torch.tanh(self.a(x))
        second = torch.tanh(self.b(first)).transpose(0, 1)
        return self.c(second.transpose(0, 1)[:, :8]) + first


@pytest.fixture(scope="module")
def graphs():
    return [capture(Stages(), torch.empty(size, 8)) for size in (4, 6)]


def stage_starts(graph):
    """Before the second and the third linear layer."""
    linear = [place for place, o in enumerate(graph.operators) if o.kind == "linear"]
    assert len(linear) == 3, [o.kind for o in graph.operators]
    return linear[1:]


def between(placement, source, target):
    """The tensors that go from one stage to another."""
    return [t for t in placement.tensors if (t.source, t.target) == (source, target)]


def test_what_crosses_is_static_where_the_captures_agree(graphs):
    graph, other = graphs
    starts = stage_starts(graph)
    placement = boundary_tensors(graph, starts)
    assert [(t.source, t.target) for t in placement.tensors] == [(0, 1), (0, 2), (1, 2)]
    assert {t.protocol for t in placement.tensors} == {"static"}
    changing = boundary_tensors(graph, starts, other)
    assert {t.protocol for t in changing.tensors} == {"dynamic"}
    assert between(changing, 0, 1)[0].shape == (None, 8)


def test_the_place_of_allocation_is_the_operator_that_makes_the_memory(graphs):
    graph = graphs[0]
    placement = boundary_tensors(graph, stage_starts(graph))
    skipped, view = between(placement, 0, 2)[0], between(placement, 1, 2)[0]
    assert skipped.site == graph.operators[graph.producers[skipped.tensor]].name
    makers = [o for o in graph.operators if o.kind == "tanh"]
    assert view.site == makers[1].name, "the views lie in what tanh has made"
    assert all(tensor.site for tensor in placement.tensors)


def test_it_says_what_every_cut_of_the_graph_says(graphs):
    """One cut: what crosses is what `cut_points` has found, without what is only passed through."""
    graph = graphs[0]
    for cut in cut_points(graph, most=9):
        crossing = {t.tensor for t in boundary_tensors(graph, [cut.place]).tensors}
        assert crossing == set(cut.tensors) - set(graph.outputs)


def test_cuts_and_captures_that_cannot_be_are_all_named(graphs):
    graph, other = graphs
    shorter = dataclasses.replace(other, operators=other.operators[:-1])
    with pytest.raises(PlanError) as caught:
        boundary_tensors(graph, [3, 2], other, shorter)
    assert len(caught.value.problems) == 2
    assert "capture 3 is not of the same model" in caught.value.problems[1]
