"""ranks: `headway.horovod.elastic`: failures, commits, samplers, against runs without failure."""

from __future__ import annotations

import os
import threading
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import headway.horovod as hvd
from headway.horovod import basics, mpi_ops
from headway.run.distributed.launch_env import LaunchEnv
from support.ranks import ranks

STEPS = 6


def step_of(model, optimizer, number, rank):
    optimizer.zero_grad()
    chosen = torch.Generator().manual_seed(10 * number + rank)
    model(torch.randn(3, 4, generator=chosen, dtype=torch.float64)).square().mean().backward()
    optimizer.step()


def fresh():
    torch.manual_seed(0)
    model = nn.Linear(4, 2).double()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, hvd.DistributedOptimizer(inner, model.named_parameters())


@ranks(2)
def test_training_after_failures_is_training_without(world):
    """Rank 1 fails in a step and rank 0 with it; then the ranks are told that hosts change."""
    hvd.init()
    model, optimizer = fresh()
    for number in range(STEPS):
        step_of(model, optimizer, number, hvd.rank())
    expected = [parameter.detach().clone() for parameter in model.parameters()]

    model, optimizer = fresh()
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0, notes=[], nothing=None)
    calls, resets = [], []
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])

    @hvd.elastic.run
    def train(state, last):
        calls.append(state.step)
        while state.step < last:
            if len(calls) == 1 and state.step == 3:
                if hvd.rank() == 1:
                    raise hvd.HorovodInternalError("planted")
                state.notes.append("not committed")
            step_of(state.model, state.optimizer, state.step, hvd.rank())
            state.step += 1
            if len(calls) == 2 and state.step == 5 and hvd.rank() == 1:
                state.on_hosts_updated(0, 0)
            if state.step % 2 == 0 or state.step == 5:
                state.commit()
        return "done"

    assert train(state, STEPS) == "done"
    assert calls == [0, 2, 5]
    assert resets == [2, 2]
    assert (state.notes, state.nothing) == ([], None)
    for one, other in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)

    @hvd.elastic.run
    def wrong(state):
        hvd.alltoall(torch.ones(3))  # another attempt would end alike

    with pytest.raises(ValueError, match="cannot be divided"):
        wrong(state)
    hvd.shutdown()


@ranks(2)
def test_states_are_kept_and_those_of_rank_0(world, tmp_path):
    hvd.init()
    me = hvd.rank()
    model, optimizer = fresh()
    with torch.no_grad():
        model.weight.add_(me)
    sampler = hvd.elastic.ElasticSampler(range(8), shuffle=False)
    file = world.directory / "commit"
    arguments = {"sampler": sampler, "batch": me, "listed": [me]}
    state = hvd.elastic.TorchState(model, optimizer, commit_file=file, **arguments)
    sampler.record_batch(0, 1)
    state.sync()
    assert (state.batch, state.listed, sampler.processed_num) == (0, [0], 2)
    weight = hvd.allgather(model.weight.detach())
    assert weight[:2].equal(weight[2:])
    state.batch = 5
    state.commit()
    state.batch = 6
    state.listed.append(9)
    with torch.no_grad():
        model.weight.zero_()
    state.restore()
    assert (state.batch, state.listed) == (5, [0])
    assert model.weight.equal(weight[:2])
    other = nn.Linear(4, 2).double()
    state.model = other  # the state's model is another one from now on
    kept = other.weight.detach().clone()
    with torch.no_grad():
        other.weight.zero_()
    state.restore()
    assert other.weight.equal(kept)
    # A process that was started anew begins with the file.
    model, optimizer = fresh()
    sampler = hvd.elastic.ElasticSampler(range(8), shuffle=False)
    again = hvd.elastic.TorchState(
        model, optimizer, commit_file=file, sampler=sampler, batch=0, listed=[]
    )
    again.sync()
    assert (again.batch, again.listed, again.sampler.processed_num) == (5, [0], 2)
    assert model.weight.equal(weight[:2])
    plain = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, number=me)
    plain.sync()
    assert plain.number == 0
    # A second way by the names of Horovod's module: they are the same.
    for name in set(mpi_ops.__all__):
        assert getattr(mpi_ops, name) is getattr(hvd, name)
    hvd.shutdown()


class Counter(hvd.elastic.State):
    """A state of one's own: a number that is kept elsewhere."""

    def __init__(self, value):
        super().__init__(hvd.broadcast_object, hvd.rank)  # as Horovod's State wants them
        self.value = self.kept = value

    def save(self):
        self.kept = self.value

    def restore(self):
        self.value = self.kept

    def sync(self):
        self.value = self.kept = self._bcast_object(self.value, 0)


@ranks(2)
def test_a_state_and_a_reset_of_ones_own(world):
    """After a change of hosts that leaves the state alone nothing is sent; `run_fn` meets anew."""
    hvd.elastic.init()
    me = hvd.rank()
    state, resets = Counter(10 * me), []

    def meet():
        resets.append(state.value)
        hvd.elastic.shutdown()
        assert not hvd.is_initialized()
        hvd.elastic.init()

    def train(state, last, *, added=0):
        while state.value < last:
            state.value += 1
            if state.value == 2:
                state.commit()
            if not resets and state.value == 3:
                raise hvd.HorovodInternalError
            if len(resets) == 1 and state.value == 4:
                state.value += me
                raise hvd.HostsUpdatedInterrupt(skip_sync=True)
        return state.value + added

    assert hvd.elastic.run_fn(train, meet)(state, 7, added=100) == 107
    assert resets == [2, 4 + me]
    hvd.shutdown()


@ranks(3)
def test_samplers_go_on_with_what_is_left(world):
    """Three ranks process a part of an epoch; two of them, or one, the rest: each sample once."""
    hvd.init()
    for shuffle in (False, True):
        sampler = hvd.elastic.ElasticSampler(range(20), shuffle=shuffle, seed=3)
        done = list(sampler)[:4]
        assert len(sampler) == 7
        sampler.record_batch(0, 2)
        sampler.record_batch(1, 2)
        assert sampler.state_dict() == {"epoch": 0, "processed_num": 12}
        every = [*chain(*hvd.allgather_object(done))]
        sampler.reset()
        rest = [*chain(*hvd.allgather_object(list(sampler)))]
        assert set(every) | set(rest) == set(range(20))
        assert len(rest) == 9  # 8 are left, one of them twice
        assert not set(every) & set(rest)
        sampler.set_epoch(1)
        assert len(sampler) == 7
        assert sampler.processed_num == 0
    state = sampler.state_dict() | {"processed_num": 12}
    hvd.shutdown()
    sampler.load_state_dict(state)
    assert sorted(sampler) == sorted(sampler.remaining_indices)
    assert len(sampler) == 8


def test_one_process_without_a_launcher(monkeypatch):
    """Each operation of one rank gives what it was given."""
    for name in [name for name in os.environ if name in ("RANK", "WORLD_SIZE")]:
        monkeypatch.delenv(name)
    hvd.init()
    try:
        assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.cross_size()) == (0, 1, 0, 1)
        given = torch.arange(6.0, requires_grad=True)
        for found in (
            *(hvd.allreduce(given), hvd.allgather(given), hvd.broadcast(given, 0)),
            *(hvd.alltoall(given), hvd.reducescatter(given)),
            *(hvd.grouped_allreduce([given])[0], hvd.grouped_allgather([given])[0]),
            *(hvd.grouped_reducescatter([given])[0], hvd.alltoall(given, splits=[6])[0]),
            hvd.allreduce(given, op=hvd.Adasum),
        ):
            assert found.equal(given)
            (grad,) = torch.autograd.grad(found.sum(), given)
            assert grad.equal(torch.ones(6))
        assert hvd.allgather_object("a") == ["a"]
        assert hvd.broadcast_object("a", 0) == "a"
        assert hvd.join() == 0
        hvd.barrier()
        model, optimizer = fresh()
        start = model.weight.detach().clone()
        hvd.broadcast_parameters(model.state_dict(), 0)
        hvd.broadcast_optimizer_state(optimizer, 0, model)
        step_of(model, optimizer, 0, 0)
        assert not model.weight.equal(start)
        # What this build has.
        built = hvd.gloo_built(), hvd.gloo_enabled(), hvd.is_homogeneous()
        assert built == (True, True, True)
        others = hvd.mpi_built, hvd.mpi_enabled, hvd.nccl_built, hvd.ddl_built, hvd.ccl_built
        assert not any(other() for other in (*others, hvd.cuda_built, hvd.rocm_built))
        assert hvd.mpi_threads_supported() is False
        assert hvd.get_process_set_ids_and_ranks() == {0: [0]}
    finally:
        hvd.shutdown()
    with pytest.raises(ValueError, match="not been initialized"):
        hvd.rank()


@pytest.mark.parametrize("losses", [0, 5])
def test_meetings_that_fail_are_repeated_while_ranks_are_lost(monkeypatch, losses):
    """Of those without a loss, which nothing explains, the third one is the last."""
    over, worlds = threading.Event(), []

    def next_world():
        worlds.append(over.is_set())
        over.clear()
        return None, None

    def meet(*_, **__):
        if len(worlds) <= losses:
            over.set()
        raise OSError("planted")

    place = LaunchEnv(rank=0, ranks=2)
    session = basics.Session()
    session.member = SimpleNamespace(next_world=next_world, place=lambda _: place, over=over)
    monkeypatch.setattr(basics.ElasticWorkerEnv, "here", lambda: object())
    monkeypatch.setattr(basics, "meet", meet)
    monkeypatch.setattr(basics, "_NOTICE_SECONDS", 0.0)
    with pytest.raises(OSError, match="planted"):
        session.start([])
    assert len(worlds) == losses + 3
