"""ranks: the interpreter carries out every generator's programs as torch's own collectives do."""

from __future__ import annotations

import gc
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

from headway.collective.generators import (
    chain,
    direct,
    halving_doubling,
    hierarchical,
    ring,
    servers,
    star,
    trees,
)
from headway.collective.nodes import Nodes
from headway.collective.program.program import CollectiveTask
from headway.comm.backend.interpreter import (
    FIRST_TAG,
    Interpreter,
    RankOperations,
    ReceiveBufferPool,
    supports_reduction,
)
from headway.errors import HeadwayError, PeerLost, Stalled
from support.ranks import ranks, run_ranks
from support.sampling import sampled

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTS = (torch.int64, torch.int32, torch.uint8, torch.int8)
CLOSE = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 2e-2, torch.float16: 2e-3}
OPS = {
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
    "avg": dist.ReduceOp.AVG,
}
SIZES = (1, 2, 3, 5, 64, 1001)


def two_trees(collective, **options):
    """A star with a third and a chain with the rest of the elements; chains from all ranks where
    every rank has a part."""
    n = collective.ranks
    if collective.op in ("all_gather", "reduce_scatter"):
        lines = [[(first + step) % n for step in range(n)] for first in range(n)]
        return trees(collective, [(chain(line), 1.0) for line in lines], **options)
    root = collective.root or 0
    along = [(root + step) % n for step in range(n)]
    return trees(collective, [(star(n, root), 1.0), (chain(along), 2.0)], **options)


def makers(n):
    """Every generator; with and without chunks."""
    found = {
        "direct": direct,
        "ring": ring,
        "ring in chunks": partial(ring, chunk=7),
        "halving-doubling": halving_doubling,
        "trees": partial(two_trees, chunk=16),
        "servers": partial(servers, ranks=(0, n - 1)),
    }
    if n == 4:
        found["hierarchical"] = partial(hierarchical, nodes=Nodes(((0, 1), (2, 3))))
    return found


def numbers(size, dtype, rank):
    """Small numbers of either sign that differ from rank to rank, and no zero."""
    base = torch.arange(size) * 7 % 5 + 1 + rank
    return (base * (1 if rank % 2 else -1)).to(dtype) if dtype.is_signed else base.to(dtype)


def interpreter(world, name="", **options):
    """With a Gloo group of its own; another name for another one in the same test."""
    gloo = dist.ProcessGroupGloo(
        dist.PrefixStore(f"programs {name}/", world.group.get_group_store()),
        world.rank,
        world.size,
        timeout=timedelta(seconds=20),
    )
    return Interpreter(
        gloo, rank=world.rank, ranks=range(world.size), timeout_seconds=20, **options
    )


def run(machine, world, program, out, given=None, op="sum"):
    machine.start(
        RankOperations.of(program, world.rank), out=out, given=given, reduction=op
    ).finish()
    return out


def own_way(op, whole, size, root):
    """What torch does: the buffers "in" and "out" of the collective, "out" as it must end."""
    reduce_op, n = OPS[op[1]], size
    if op[0] == "all_reduce":
        expected = whole.clone()
        dist.all_reduce(expected, reduce_op)
        return None, whole.clone(), expected
    if op[0] == "broadcast":
        expected = whole.clone()
        dist.broadcast(expected, root)
        return None, whole.clone(), expected
    if op[0] == "reduce":
        expected = whole.clone()
        dist.all_reduce(expected, reduce_op)
        return None, whole.clone(), expected if dist.get_rank() == root else whole.clone()
    if op[0] == "all_gather":
        parts = [torch.empty_like(whole) for _ in range(n)]
        dist.all_gather(parts, whole)
        return whole, whole.new_zeros(n * whole.numel()), torch.cat(parts)
    every = whole.repeat(n) + torch.arange(n).repeat_interleave(whole.numel()).to(whole.dtype)
    if op[0] == "all_to_all":
        expected = torch.empty_like(every)
        dist.all_to_all_single(expected, every)
        return every, torch.zeros_like(every), expected
    summed = every.clone()
    dist.all_reduce(summed, reduce_op)
    expected = summed.chunk(n)[dist.get_rank()].clone()
    return every, torch.zeros_like(expected), expected


def same(found, expected):
    if not found.dtype.is_floating_point:
        return torch.equal(found, expected)
    close = CLOSE[found.dtype]
    scale = expected.abs().max().clamp(min=1e-30)
    return bool(((found - expected).abs().max() / scale) <= close)


def compare(world, cases):
    """Runs all cases; the names of those that differ from torch's own."""
    machine, wrong = interpreter(world), []
    for name, make, op, dtype, size in cases:
        root = world.size - 1
        whole = numbers(size, dtype, world.rank)
        given, out, expected = own_way(op, whole, world.size, root)
        total = (out if given is None or given.numel() < out.numel() else given).numel()
        rooted = {"root": root} if op[0] in ("broadcast", "reduce") else {}
        task = CollectiveTask.of(op[0], world.size, total, **rooted)
        program = make(task)
        found = run(machine, world, program, out, given, op[1])
        if not same(found, expected):
            wrong.append((name, op, dtype, size))
    return wrong


def cases(n):
    """Every generator and operation on odd sizes; every dtype and reduction on one program."""
    plain = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all")
    for name, make in makers(n).items():
        for op in plain:
            if op == "all_to_all" and name != "direct":
                continue
            try:
                make(CollectiveTask.of(op, n, n))
            except HeadwayError:
                continue  # this generator does not make it
            for size in SIZES:
                yield name, make, (op, "sum"), torch.float32, size
    for dtype in FLOATS + INTS:
        for op in OPS:
            if supports_reduction(dtype, op):
                yield "direct", direct, ("reduce_scatter", op), dtype, 33
                yield "ring", ring, ("all_reduce", op), dtype, 33


@pytest.mark.parametrize("n", sampled([2, 3, 4], 1))
def test_programs_do_what_torch_does(n):
    for wrong in run_ranks(n, compare_all, timeout=60):
        assert wrong == []


def compare_all(world):
    found = list(cases(world.size))
    assert len(found) > 100
    return compare(world, found)


@ranks(3)
def test_dtypes_that_gloo_refuses(world):
    machine = interpreter(world)
    summed = torch.full((5,), 1000 * world.rank, dtype=torch.int16)
    run(machine, world, ring(CollectiveTask.of("all_reduce", 3, 5)), summed)
    assert summed.tolist() == [3000] * 5
    for dtype in (torch.int16, torch.float8_e4m3fn, torch.bool, torch.complex64):
        own = torch.full((3,), world.rank).to(dtype)
        whole = torch.empty(9, dtype=dtype)
        run(machine, world, direct(CollectiveTask.of("all_gather", 3, 9)), whole, own)
        expected = torch.cat([torch.full((3,), r).to(dtype) for r in range(3)])
        assert torch.equal(whole.view(torch.uint8), expected.view(torch.uint8)), dtype
    assert not supports_reduction(torch.float8_e4m3fn, "sum")
    assert not supports_reduction(torch.int64, "avg")
    assert not supports_reduction(torch.complex64, "max")


@ranks(2)
def test_programs_overlap_and_striped_messages_arrive_whole(world):
    """Ten programs under way at once, finished in the opposite order; two tags for each message."""
    for stripes in (1, 2, 3):
        machine = interpreter(world, str(stripes), stripes=stripes)
        role = RankOperations.of(
            direct(CollectiveTask.of("reduce_scatter", 2, 120_002)), world.rank
        )
        given = [torch.arange(120_002.0) * (k + 1) + world.rank for k in range(10)]
        outs = [torch.empty(60_001) for _ in given]
        started = [machine.start(role, out=o, given=g) for o, g in zip(outs, given, strict=True)]
        for running in reversed(started):
            running.finish()
        first = world.rank * 60_001
        for k, out in enumerate(outs):
            expected = (torch.arange(120_002.0) * (k + 1))[first : first + 60_001] * 2 + 1
            assert torch.equal(out, expected), (stripes, k)


@ranks(2)
def test_nothing_is_allocated_after_the_first_step(world):
    machine = interpreter(world)
    role = RankOperations.of(direct(CollectiveTask.of("reduce_scatter", 2, 2000)), world.rank)
    out, given = torch.empty(1000), torch.ones(2000)
    for _ in range(3):
        machine.start(role, out=out, given=given).finish()
    assert machine.scratch.num_bytes == 4000
    held = machine.scratch.take(4000)
    machine.scratch.give(held)
    machine.start(role, out=out, given=given).finish()
    assert machine.scratch.take(1).data_ptr() == held.data_ptr()


def test_scratch_lets_go_of_what_is_too_small():
    scratch = ReceiveBufferPool()
    small, large = scratch.take(10), scratch.take(30)
    scratch.give(small)
    scratch.give(large)
    assert scratch.take(20) is large
    assert scratch.take(20).numel() == 20  # instead of the small one
    assert scratch.num_bytes == 0


@ranks(2)
def test_tags_begin_again_before_they_end(world):
    machine = interpreter(world, stripes=3)
    assert machine.tags(0) == range(FIRST_TAG, FIRST_TAG + 3)
    assert (
        max(tag for n in range(FIRST_TAG - 5, FIRST_TAG + 5) for tag in machine.tags(n)) < 1 << 31
    )
    machine._used_tags = FIRST_TAG // 3 - 1  # the next two programs lie on both sides of the end
    role = RankOperations.of(direct(CollectiveTask.of("all_gather", 2, 4)), world.rank)
    for _ in range(3):
        whole = torch.empty(4)
        machine.start(role, out=whole, given=torch.full((2,), float(world.rank))).finish()
        assert whole.tolist() == [0, 0, 1, 1]


@ranks(3)
def test_who_does_not_come_is_named(world):
    machine = interpreter(world)
    role = RankOperations.of(direct(CollectiveTask.of("all_gather", 3, 300)), world.rank)
    if world.rank != 2:
        running = machine.start(role, out=torch.empty(300), given=torch.ones(100))
        began = time.monotonic()
        with pytest.raises(Stalled, match="rank 2 did not come") as caught:
            running.finish(0.5)
        assert time.monotonic() - began < 10
        assert "400 bytes" in str(caught.value)
        assert f"rank {world.rank}: all_gather (direct)" in str(caught.value)
    dist.barrier()


def lose(world):
    machine = interpreter(world)
    role = RankOperations.of(direct(CollectiveTask.of("reduce_scatter", 2, 200)), world.rank)
    run(machine, world, direct(CollectiveTask.of("all_reduce", 2, 3)), torch.ones(3))
    if world.rank == 1:
        import os
        import signal

        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLost, match="the connection to rank 1 broke"):
        machine.start(role, out=torch.empty(100), given=torch.ones(200)).finish()
    assert machine.scratch.num_bytes == 0  # a late message could still be written there
    gc.collect()


def test_who_is_lost_is_named():
    run_ranks(2, lose, mortal={1})
