"""ranks: programs that only know torch.distributed run on the backend "headway" as on Gloo."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import headway
from headway.collective.generators import halving_doubling, ring
from headway.comm.backend import process_group
from headway.comm.backend.interpreter import FIRST_TAG
from headway.errors import PeerLost, Stalled, UsageError
from support.leaks import alive_threads, gloo_threads
from support.ranks import ranks, run_ranks

SUM = dist.ReduceOp.SUM
NEW = hasattr(dist, "all_gather_single")  # from torch 2.13 on, where the old names warn
all_gather_single = dist.all_gather_single if NEW else dist.all_gather_into_tensor
reduce_scatter_single = dist.reduce_scatter_single if NEW else dist.reduce_scatter_tensor
functional_gather = functional.all_gather_single if NEW else functional.all_gather_tensor
functional_scatter = functional.reduce_scatter_single if NEW else functional.reduce_scatter_tensor


def enter(world, *, timeout=20.0, **options):
    """The default group of this world becomes one of the backend; a Gloo group to compare with."""
    dist.destroy_process_group()
    headway.register_backend(**options)
    dist.init_process_group(
        "headway",
        init_method=f"file://{world.directory}/rendezvous",
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=timeout),
    )
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=20))


def used(group=None):
    """Tags of programs that a group has used: how to see that it did not hand all on to Gloo."""
    return (group or dist.group.WORLD)._interpreter._used_tags


def both(call, *tensors, gloo):
    """What a call makes of copies of the tensors, on the backend and on Gloo."""
    results = []
    for group in (None, gloo):
        copies = [t.clone() for t in tensors]
        call(*copies, group)
        results.append(copies)
    return results


def check_equal(call, *tensors, gloo):
    ours, theirs = both(call, *tensors, gloo=gloo)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6, equal_nan=True)


def filled(shape, rank, dtype=torch.float32):
    size = int(torch.Size(shape).numel())
    return ((torch.arange(size) * 13 % 11 + rank) / 1.0).to(dtype).reshape(shape)


@ranks(3)
def test_calls_with_one_tensor(world):
    gloo, n, rank = enter(world), 3, world.rank
    for dtype in (torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool):
        for size in (0, 1, 2, 5, 1000):
            own, whole = filled((size,), rank, dtype), filled((n * size,), rank, dtype)
            check_equal(
                lambda o, i, g: all_gather_single(o, i, group=g),
                torch.zeros(n * size, dtype=dtype),
                own,
                gloo=gloo,
            )
            check_equal(
                lambda o, i, g: dist.all_to_all_single(o, i, group=g),
                torch.zeros_like(whole),
                whole,
                gloo=gloo,
            )
            for op in (SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
                if dtype == torch.bool and op is not dist.ReduceOp.MAX:
                    continue
                check_equal(
                    lambda o, i, g, op=op: reduce_scatter_single(o, i, op, group=g),
                    torch.zeros(size, dtype=dtype),
                    whole,
                    gloo=gloo,
                )
    before = used()
    averaged = torch.zeros(2)
    reduce_scatter_single(averaged, filled((6,), rank), dist.ReduceOp.AVG)
    assert averaged.tolist() == [filled((6,), 1)[2 * rank + k].item() for k in range(2)]
    assert used() == before + 1


@ranks(3)
def test_what_is_not_flat_not_contiguous_not_detached_or_shared(world):
    gloo, n, rank = enter(world), 3, world.rank
    matrix = torch.zeros(n * 2, 5)
    all_gather_single(matrix, filled((2, 5), rank))
    assert torch.equal(matrix, torch.cat([filled((2, 5), r) for r in range(n)]))
    transposed = torch.zeros(5, n * 2).t()
    all_gather_single(transposed, filled((5, 2), rank).t())
    assert torch.equal(transposed, torch.cat([filled((5, 2), r).t() for r in range(n)]))
    weight = nn.Parameter(filled((4,), rank))
    whole = torch.zeros(n * 4)
    all_gather_single(whole, weight)
    assert torch.equal(whole, torch.cat([filled((4,), r) for r in range(n)]))
    # As FSDP2 does: the share is a part of the whole.
    shared = torch.zeros(n * 4)
    own = shared[4 * rank : 4 * rank + 4]
    own.copy_(filled((4,), rank))
    all_gather_single(shared, own)
    assert torch.equal(shared, whole)
    summed = filled((n * 4,), rank)
    reduce_scatter_single(summed[4 * rank : 4 * rank + 4], summed)
    expected = sum(filled((n * 4,), r) for r in range(n))
    assert torch.equal(summed[4 * rank : 4 * rank + 4], expected[4 * rank : 4 * rank + 4])
    with pytest.raises((RuntimeError, ValueError)):
        all_gather_single(torch.zeros(7), torch.zeros(2))
    dist.barrier(group=gloo)


@ranks(3)
def test_calls_with_lists_and_uneven_parts(world):
    gloo, n, rank = enter(world), 3, world.rank
    parts = [torch.zeros(2, 3) for _ in range(n)]
    dist.all_gather(parts, filled((2, 3), rank))
    assert all(torch.equal(part, filled((2, 3), r)) for r, part in enumerate(parts))
    out = torch.zeros(2, 3)
    dist.reduce_scatter(out, [filled((2, 3), rank) * (k + 1) for k in range(n)])
    assert torch.equal(out, sum(filled((2, 3), r) for r in range(n)) * (rank + 1))
    # Row i, column j: what rank i has for rank j.
    counts = torch.tensor([[0, 2, 1], [3, 0, 0], [1, 4, 2]])
    sent, received = counts[rank].tolist(), counts[:, rank].tolist()
    check_equal(
        lambda o, i, g: dist.all_to_all_single(o, i, received, sent, group=g),
        torch.zeros(sum(received), 2),
        filled((sum(sent), 2), rank),
        gloo=gloo,
    )
    outs = [torch.zeros(count, 2) for count in received]
    dist.all_to_all(outs, [torch.full((count, 2), 10.0 * rank + k) for k, count in enumerate(sent)])
    assert all(torch.all(out == 10.0 * r + rank) for r, out in enumerate(outs))
    assert used() == 4
    # Everything else is Gloo's own.
    one = filled((4,), rank)
    for call in (
        lambda t, g: dist.all_reduce(t, group=g),
        lambda t, g: dist.broadcast(t, 2, group=g),
        lambda t, g: dist.reduce(t, 1, group=g),
        lambda t, g: dist.scatter(t, [t * 0 + k for k in range(n)] if rank == 0 else None, group=g),
        lambda t, g: dist.gather(t, [t * 0 for _ in range(n)] if rank == 0 else None, group=g),
    ):
        check_equal(call, one, gloo=gloo)
    assert used() == 4


@ranks(2)
def test_works_and_futures(world):
    enter(world)
    rank = world.rank

    def start():
        out = torch.zeros(2)
        given = filled((4,), rank)
        return out, reduce_scatter_single(out, given, async_op=True)

    expected = (filled((4,), 0) + filled((4,), 1))[2 * rank : 2 * rank + 2]
    for finish in (
        lambda work: work.wait(),
        lambda work: work.wait(timedelta(seconds=5)),
        lambda work: work.get_future().wait(),
        poll,
        lambda work: (work.wait(), work.wait()),
        lambda work: work.synchronize(),
    ):
        out, work = start()
        assert work.exception() is None
        finish(work)
        assert torch.equal(out, expected)
        assert work.is_completed()
        assert work.is_success()
        assert work.result() == [out]
        assert work.get_future().wait() == [out]
    out, work = start()
    del work  # nobody waits
    gc.collect()
    dropped = out
    # Many at once, waited for in another order on each rank; one future's callback.
    started = [start() for _ in range(20)]
    called = started[0][1].get_future().then(lambda done: done.value()[0].sum().item())
    for _, work in reversed(started) if rank else started:
        work.wait()
    assert all(torch.equal(out, expected) for out, _ in started)
    assert called.wait() == expected.sum().item()
    until = time.monotonic() + 20
    while not torch.equal(dropped, expected):
        assert time.monotonic() < until
    dist.destroy_process_group()  # ends the thread that finished what nobody waited for


def poll(work):
    until = time.monotonic() + 20
    while not work.is_completed():
        assert time.monotonic() < until
        time.sleep(0.001)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have names in /proc on Linux only")
@ranks(2)
def test_a_destroyed_group_leaves_no_thread_of_gloo(world):
    """It could drop a tensor while the interpreter ends, which ends the process with SIGABRT."""
    gc.collect()
    gc.disable()
    before = gloo_threads()
    enter(world)
    for tensor in (torch.ones(4), torch.ones(1 << 16)):
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0)
        all_gather_single(torch.empty(2 * tensor.numel()), tensor)
        reduce_scatter_single(torch.empty(tensor.numel() // 2), tensor)
        dist.all_reduce(tensor, async_op=True).get_future().wait()
    assert gloo_threads() > before
    dist.destroy_process_group()
    assert gloo_threads() == before


@ranks(2)
def test_what_nobody_waits_for_moves_all_the_same(world):
    """More than the kernel keeps: rank 0 computes while rank 1 needs what it sends."""
    gloo, rank = enter(world), world.rank
    whole, own = torch.zeros(2, 6 * 2**20), torch.full((6 * 2**20,), 1.0 + rank)
    work = all_gather_single(whole.view(-1), own, async_op=True)
    if rank:
        work.wait()
        dist.send(torch.ones(1), 0, group=gloo)
    else:
        dist.recv(torch.zeros(1), 1, group=gloo)
        work.wait()
    assert whole[:, ::4096].sum(1).tolist() == [1536.0, 3072.0]
    dist.destroy_process_group()


@ranks(2)
def test_a_wait_of_its_own_length_ends_in_time_whoever_moves_the_program(world):
    gloo = enter(world)
    if world.rank == 0:
        work = all_gather_single(torch.zeros(40), torch.zeros(20), async_op=True)
        future = work.get_future()
        time.sleep(0.3)  # the finisher's thread has taken it
        began = time.monotonic()
        with pytest.raises(Stalled, match="rank 1 did not come"):
            work.wait(timedelta(seconds=0.3))
        assert time.monotonic() - began < 5
    dist.barrier(group=gloo)
    if world.rank:
        future = all_gather_single(torch.zeros(40), torch.zeros(20), async_op=True).get_future()
    future.wait()
    dist.destroy_process_group()


@ranks(3)
def test_gloos_connections_do_where_one_rank_says_so(world):
    connections = "gloo" if world.rank == 1 else "own"
    gloo = enter(world, connections=connections)
    assert dist.group.WORLD._links is None
    check_equal(
        lambda o, i, g: reduce_scatter_single(o, i, group=g),
        torch.zeros(5), filled((15,), world.rank), gloo=gloo,
    )  # fmt: skip
    assert used() == 1


@ranks(2)
def test_several_calls_at_once(world):
    enter(world)
    rank = world.rank
    ones = [filled((k + 1,), rank) for k in range(4)]
    outs = [torch.zeros(2 * (k + 1)) for k in range(4)]
    with dist._coalescing_manager(async_ops=True) as many:
        for out, one in zip(outs, ones, strict=True):
            all_gather_single(out, one)
    many.wait()
    assert all(
        torch.equal(out, torch.cat([filled((k + 1,), r) for r in range(2)]))
        for k, out in enumerate(outs)
    )
    shares = [torch.zeros(k + 1) for k in range(4)]
    with dist._coalescing_manager() as _:
        for share, out in zip(shares, outs, strict=True):
            reduce_scatter_single(share, out)
    for share, out in zip(shares, outs, strict=True):
        assert torch.equal(share, 2 * out.chunk(2)[rank])
    with dist._coalescing_manager() as _:
        for one in ones:
            dist.all_reduce(one)
    assert torch.equal(ones[3], filled((4,), 0) + filled((4,), 1))
    other, sent, got = 1 - rank, torch.full((3,), float(rank)), torch.zeros(3)
    operations = [dist.P2POp(dist.irecv, got, other), dist.P2POp(dist.isend, sent, other)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert got.tolist() == [other] * 3
    if rank:
        dist.send(sent, 0, tag=7)
        dist.send(sent, 0)
    else:
        dist.recv(got, 1, tag=7)
        assert dist.recv(got) == 1
    with pytest.raises(UsageError, match=f"tag {FIRST_TAG} of a message is too large"):
        dist.send(sent, other, tag=FIRST_TAG)
    everybody = [None, None]
    dist.all_gather_object(everybody, {"rank": rank})
    assert everybody == [{"rank": 0}, {"rank": 1}]
    words = [("hello" if rank == 0 else None)]
    dist.broadcast_object_list(words, 0)
    assert words == ["hello"]
    dist.barrier()


@ranks(4)
def test_groups_meshes_and_calls_that_enter_through_cpp(world):
    gloo, rank = enter(world), world.rank
    assert dist.get_backend() == "headway"
    assert dist.group.WORLD.name() == "headway"
    pair = dist.new_group([0, 2] if rank % 2 == 0 else [1, 3], use_local_synchronization=True)
    assert dist.get_backend(pair) == "headway"
    whole = torch.zeros(2)
    all_gather_single(whole, torch.full((1,), float(rank)), group=pair)
    assert whole.tolist() == [rank % 2, rank % 2 + 2]
    assert used(pair) == 1
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    reduce_scatter_single(torch.zeros(1), torch.ones(2), group=mesh["rows"].get_group())
    # Functional collectives: their works are kept by C++, and the tensors wait by themselves.
    for group, n in ((dist.group.WORLD, 4), (mesh["columns"].get_group(), 2)):
        before = used(group)
        gathered = functional_gather(filled((3,), rank), 0, group)
        scattered = functional_scatter(torch.ones(2 * n), "sum", 0, group)
        swapped = functional.all_to_all_single(torch.full((n,), float(rank)), None, None, group)
        summed = functional.all_reduce(torch.ones(3), "sum", group)
        gc.collect()
        members = dist.get_process_group_ranks(group)
        assert torch.equal(gathered + 0, torch.cat([filled((3,), r) for r in members]))
        assert (scattered + 0).tolist() == [n, n]
        assert (swapped + 0).tolist() == members
        assert (summed + 0).tolist() == [n] * 3
        assert used(group) > before
    tensor = filled((8, 6), 0)
    split = distribute_tensor(tensor, mesh, [Shard(0), Shard(1)])
    assert torch.equal(split.full_tensor(), tensor)
    moved = split.redistribute(mesh, [Replicate(), Shard(0)])
    assert torch.equal(moved.full_tensor(), tensor)
    dist.barrier(group=gloo)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(6, 6, dtype=torch.float64) for _ in range(3)])
        self.tied = self.layers[0].weight

    def forward(self, x):
        return (torch.tanh(self.layers(x)) @ self.tied).sum()


def train(wrap, rank, group):
    """Parameters after four steps of two micro-batches, with clipping."""
    torch.manual_seed(0)
    model = wrap(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(4):
        optimizer.zero_grad()
        for part in range(2):
            torch.manual_seed(1000 * step + 10 * part + rank)
            model(torch.randn(5, 6, dtype=torch.float64)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [
        p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()
    ]


@ranks(2, timeout=60)
def test_training_is_as_on_gloo(world):
    gloo = enter(world)
    for kind in ("ddp", "fsdp2"):
        found = []
        for group in (dist.group.WORLD, gloo):
            if kind == "ddp":
                found.append(train(lambda m, g=group: DistributedDataParallel(m, process_group=g),
                                   world.rank, group))  # fmt: skip
                continue
            mesh = init_device_mesh("cpu", (2,))
            if group is gloo:
                mesh = dist.DeviceMesh.from_group(gloo, "cpu")

            def shard(model, mesh=mesh):
                for layer in model.layers[1:]:
                    fully_shard(layer, mesh=mesh)
                return fully_shard(model, mesh=mesh)

            found.append(train(shard, world.rank, group))
        for ours, theirs in zip(*found, strict=True):
            assert ((ours - theirs).abs() / theirs.abs().clamp(min=1e-3)).max() < 1e-12, kind


@ranks(2)
def test_several_groups_from_several_threads(world):
    enter(world)
    groups = [dist.new_group(timeout=timedelta(seconds=20)) for _ in range(4)]
    wrong = []

    def work(number):
        group = groups[number]
        for size in range(1, 60):
            out = torch.zeros(size)
            reduce_scatter_single(out, torch.full((2 * size,), 1.0 + number), group=group)
            whole = torch.zeros(2 * size)
            all_gather_single(whole, out, group=group)
            if not torch.equal(whole, torch.full((2 * size,), 2.0 + 2 * number)):
                wrong.append((number, size))

    order = range(4) if world.rank else reversed(range(4))  # another order on each rank
    threads = [threading.Thread(target=work, args=(number,)) for number in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def prefer(task, members, element_bytes):
    """Another program for every operation; the default for the rest."""
    assert len(members) == task.ranks
    assert element_bytes in (4, 8)
    if task.op == "all_reduce":
        return halving_doubling(task)
    return ring(task, chunk=64) if task.op in ("broadcast", "reduce_scatter") else None


@ranks(4)
def test_chosen_programs(world):
    gloo, n = enter(world, choose=prefer), 4
    for size in (1, 3, 1000):
        before = used()
        check_equal(
            lambda t, g: dist.all_reduce(t, group=g), filled((size,), world.rank), gloo=gloo
        )
        check_equal(
            lambda t, g: dist.broadcast(t, 3, group=g), filled((size,), world.rank), gloo=gloo
        )
        assert used() > before
    # Several rounds, started together: the finisher's thread drives what nobody waits for.
    outs = [torch.zeros(100) for _ in range(5)]
    works = [reduce_scatter_single(o, torch.ones(400) * k, async_op=True)
             for k, o in enumerate(outs)]  # fmt: skip
    total = filled((50,), world.rank)
    dist.all_reduce(total)  # in between, while the others are on their way
    if world.rank % 2:
        works.reverse()
    for work in works:
        work.wait()
    assert [out[99].item() for out in outs] == [0, 4, 8, 12, 16]
    assert torch.equal(total, sum(filled((50,), r) for r in range(n)))
    model = DistributedDataParallel(nn.Linear(3, 2))
    model(torch.ones(1, 3) * (world.rank + 1)).sum().backward()
    assert torch.equal(model.module.weight.grad, torch.full((2, 3), 2.5))
    dist.destroy_process_group()


@ranks(3)
def test_large_groups_go_in_rings(world):
    """What more than eight ranks do, with the borders moved down to three."""
    process_group._DIRECT_RANKS, process_group._SMALL_SHARE = 2, 400
    gloo = enter(world)
    for size in (100, 101, 1000):
        role = dist.group.WORLD._role("all_gather", 3 * size, 4)
        assert role.name == ("all_gather (direct)" if size == 100 else "all_gather (ring)")
        check_equal(
            lambda o, i, g: all_gather_single(o, i, group=g),
            torch.zeros(3 * size), filled((size,), world.rank), gloo=gloo,
        )  # fmt: skip
        check_equal(
            lambda o, i, g: reduce_scatter_single(o, i, group=g, async_op=True).wait(),
            torch.zeros(size), filled((3 * size,), world.rank), gloo=gloo,
        )  # fmt: skip
    dist.destroy_process_group()


@ranks(3)
def test_who_does_not_come_is_named(world):
    gloo = enter(world, timeout=1.0)
    if world.rank != 1:
        for again in range(2):  # a broken group says so, and does not hang
            began = time.monotonic()
            with pytest.raises((Stalled, PeerLost), match=r"rank [012]") as caught:
                all_gather_single(torch.zeros(30), torch.zeros(10))
            assert time.monotonic() - began < 8
            if not again:
                assert "all_gather (direct): rank 1 did not come" in str(caught.value)
    dist.barrier(group=gloo)


def be_lost(world):
    enter(world)
    dist.barrier()
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    work = all_gather_single(torch.zeros(20), torch.zeros(10), async_op=True)
    future = work.get_future()
    with pytest.raises(PeerLost, match="rank 1 broke"):
        work.wait()
    with pytest.raises(PeerLost, match="rank 1 broke"):
        work.wait()
    with pytest.raises(Exception, match="rank 1 broke"):
        future.wait()
    assert isinstance(work.exception(), PeerLost)
    assert not work.is_success()
    dist.destroy_process_group()


def test_who_is_lost_is_named():
    run_ranks(2, be_lost, mortal={1})


@ranks(2)
def test_nothing_stays_behind(world):
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    enter(world)
    dist.barrier()
    threads = None
    for number in range(6):
        group = dist.new_group(timeout=timedelta(seconds=20))
        out = torch.zeros(2)
        reduce_scatter_single(out, torch.ones(4), group=group, async_op=True).get_future().wait()
        dist.destroy_process_group(group)
        del group
        gc.collect()
        if number == 2:
            threads, files = sorted(alive_threads()), descriptors()
    assert sorted(alive_threads()) == threads
    assert "thread headway-finisher" not in threads
    assert descriptors() <= files


def test_it_is_one_public_name():
    assert "register_backend" in headway.__all__
