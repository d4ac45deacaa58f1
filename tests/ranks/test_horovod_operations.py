"""ranks: every operation of `headway.horovod` gives what one process computes from all tensors."""

from __future__ import annotations

import gc
import itertools
import json
import os
import random
import signal
import sys
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.distributed as dist

import headway.horovod as hvd
from support.leaks import gloo_threads
from support.ranks import ranks

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@contextmanager
def session(**arguments):
    hvd.init(**arguments)
    try:
        yield
    finally:
        hvd.shutdown()


@pytest.mark.skipif(sys.platform != "linux", reason="threads have names in /proc on Linux only")
@ranks(2)
def test_a_session_that_has_ended_leaves_no_thread_of_gloo(world):
    """It could drop a tensor while the interpreter ends, which ends the process with SIGABRT."""
    gc.collect()
    gc.disable()
    before = gloo_threads()
    with session(process_sets=[hvd.ProcessSet([0])]):
        hvd.allreduce(torch.ones(4), name="x")
        hvd.broadcast(torch.ones(4), 1)
        hvd.allgather(torch.ones(2 + hvd.rank(), 3))
        hvd.alltoall(torch.arange(4.0))
        hvd.broadcast_object({"a": 1})
        assert gloo_threads() > before
    assert gloo_threads() == before


def of(rank, shape, dtype=torch.float64, seed=0):
    """A tensor of a rank that every rank can compute; small whole numbers are exact in any type."""
    chosen = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype == torch.float64:
        return torch.randn(shape, generator=chosen, dtype=dtype)
    return torch.randint(0, 5, shape, generator=chosen).to(dtype)


def close(found, expected, rtol=1e-12):
    torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol)


REDUCTIONS = {
    hvd.Sum: lambda stack: stack.sum(0),
    hvd.Min: lambda stack: stack.amin(0),
    hvd.Max: lambda stack: stack.amax(0),
    hvd.Product: lambda stack: stack.prod(0),
    hvd.Average: lambda stack: stack.double().mean(0),
}


@ranks(3)
def test_allreduce(world):
    """Every reduction, type and number of dimensions, in place and not, together and alone."""
    with session():
        me, n = hvd.rank(), hvd.size()
        assert (me, n) == (world.rank, world.size)
        for op, dtype in itertools.product(REDUCTIONS, INTEGERS + FLOATS):
            for shape in ((), (0,), (5,), (2, 3, 4)):
                every = torch.stack([of(rank, shape, dtype, 1) for rank in range(n)])
                wide = every.double() if dtype in FLOATS else every.long()
                expected = REDUCTIONS[op](wide).to(dtype)
                own = every[me].clone()
                rtol = {torch.bfloat16: 1e-2, torch.float16: 2e-3}.get(dtype, 1e-6)
                close(hvd.allreduce(own, op=op), expected, rtol)
                close(own, every[me])
                if op == hvd.Sum:
                    assert hvd.allreduce_(own, op=op) is own
                    close(own, expected)
        truth = torch.tensor([me == 0, False, True])
        assert hvd.allreduce(truth, op=hvd.Sum).tolist() == [True, False, True]
        assert hvd.allreduce(truth, op=hvd.Min).tolist() == [False, False, True]
        complex_ = torch.complex(of(me, (3,)), of(me, (3,), seed=2))
        summed = hvd.allreduce(complex_, op=hvd.Sum)
        close(summed.imag, sum(of(rank, (3,), seed=2) for rank in range(n)))
        views_of_complex_tensors(me, n)
        with pytest.raises(ValueError, match="expanded tensor"):
            hvd.broadcast_(torch.ones(1).expand(3), 0)
        # Not contiguous, in place.
        wide = of(me, (4, 6), seed=3)
        view = wide.t()[::2]
        hvd.allreduce_(view, op=hvd.Sum)
        close(view, sum(of(rank, (4, 6), seed=3) for rank in range(n)).t()[::2])
        close(wide.t()[1::2], of(me, (4, 6), seed=3).t()[1::2])
        # Groups, of several types at once.
        tensors = [of(me, (3,)), of(me, (2, 2), torch.int32), of(me, ())]
        found = hvd.grouped_allreduce(tensors, op=hvd.Sum)
        handle = hvd.grouped_allreduce_async_(tensors, op=hvd.Sum, name="group")
        for one, other in zip(found, hvd.synchronize(handle), strict=True):
            assert one.equal(other)
        close(found[2], sum(of(rank, ()) for rank in range(n)))
        assert isinstance(hvd.synchronize(handle), tuple)
        assert isinstance(hvd.grouped_allgather([of(me, (2,))]), tuple)
        assert all(a is b for a, b in zip(tensors, hvd.synchronize(handle), strict=True))
        with pytest.warns(DeprecationWarning, match="op"):
            close(hvd.allreduce(of(me, (3,)), average=False), found[0])
        with pytest.raises(ValueError, match="supersedes"):
            hvd.allreduce(of(me, (3,)), average=False, op=hvd.Sum)
        half = hvd.allreduce(of(me, (3,)), op=hvd.Sum, compression=hvd.Compression.fp16)
        assert half.dtype == torch.float64
        close(half, found[0], 5e-3)
        for dtype in (torch.int32, torch.float16, torch.float64):
            values = of(me, (8,), dtype, 4)
            work = torch.float32 if dtype == torch.float16 else torch.float64
            scaled = [(of(r, (8,), dtype, 4).to(work) * 1.7).to(dtype) for r in range(n)]
            expected = (torch.stack(scaled).sum(0).to(work) * 0.3).to(dtype)
            close(
                hvd.allreduce(values, op=hvd.Sum, prescale_factor=1.7, postscale_factor=0.3),
                expected,
            )


def views_of_complex_tensors(me, n):
    """A conjugated view, and a negated one, are not the bytes that they are made of."""
    every = [torch.complex(of(rank, (3,)), of(rank, (3,), seed=2)).conj() for rank in range(n)]
    close(hvd.allgather(every[me]), torch.cat(every))
    close(hvd.allreduce(every[me], op=hvd.Sum), sum(every))
    rows = torch.cat([each[me : me + 1] for each in every])
    close(hvd.alltoall(every[me]), rows)
    close(hvd.reducescatter(every[me], op=hvd.Sum), rows.sum(0, keepdim=True))
    last = [each[:1].imag for each in every]
    assert last[me].is_neg()
    close(hvd.allgather(last[me]), torch.cat(last))
    for call, expected in (
        (lambda own: hvd.allreduce_(own, op=hvd.Sum), sum(every)),
        (lambda own: hvd.broadcast_(own, 1), every[1]),
    ):
        own = every[me].conj().clone().conj()
        assert own.is_conj()
        close(call(own), expected)


@ranks(3)
def test_every_form_of_an_operation(world):
    """Asynchronous, in place and in groups, of all ranks and of some: the values of one process."""
    with session(process_sets=[hvd.ProcessSet([0, 2])]):
        for chosen in (hvd.global_process_set, hvd.process_set_by_id(1)):
            if not chosen.included():
                continue
            members, place = chosen.ranks, chosen.rank()
            facts = {"process_set": chosen}
            for shape, dtype in itertools.product(
                ((6,), (6, 2), (6, 2, 3)), (torch.int64, torch.float32, torch.float64)
            ):
                pairs = [[of(rank, shape, dtype, seed) for seed in (1, 2)] for rank in members]
                totals = [sum(both) for both in zip(*pairs, strict=True)]
                whole = [torch.cat(both) for both in zip(*pairs, strict=True)]
                rows = len(totals[0]) // len(members)
                parts = [total.split(rows)[place] for total in totals]
                gathers = {**facts, "name": f"{shape}{dtype}"}
                reductions = {**gathers, "op": hvd.Sum}

                def own(pairs=pairs, place=place):
                    return [tensor.clone() for tensor in pairs[place]]

                def check(found, expected, given=None, dtype=dtype):
                    if not isinstance(found, torch.Tensor | list | tuple):
                        assert hvd.poll(found) in (True, False)
                        found = hvd.synchronize(found)
                    if isinstance(expected, torch.Tensor):
                        found, expected = [found], [expected]
                    for one, other in zip(found, expected, strict=True):
                        close(one, other, 1e-6 if dtype == torch.float32 else 1e-12)
                    for one, held in zip(found, given or [], strict=False):
                        assert one is held

                for function in (hvd.allreduce, hvd.allreduce_async):
                    check(function(own()[0], **reductions), totals[0])
                for function in (hvd.allreduce_, hvd.allreduce_async_):
                    given = own()
                    check(function(given[0], **reductions), totals[0], given)
                for function in (hvd.grouped_allreduce, hvd.grouped_allreduce_async):
                    check(function(own(), **reductions), totals)
                for function in (hvd.grouped_allreduce_, hvd.grouped_allreduce_async_):
                    given = own()
                    check(function(given, **reductions), totals, given)
                for function in (hvd.allgather, hvd.allgather_async):
                    check(function(own()[0], **gathers), whole[0])
                for function in (hvd.grouped_allgather, hvd.grouped_allgather_async):
                    check(function(own(), **gathers), whole)
                for function in (hvd.reducescatter, hvd.reducescatter_async):
                    check(function(own()[0], **reductions), parts[0])
                for function in (hvd.grouped_reducescatter, hvd.grouped_reducescatter_async):
                    check(function(own(), **reductions), parts)
                for root in members:
                    sent = pairs[members.index(root)][0]
                    for function in (hvd.broadcast, hvd.broadcast_async):
                        check(function(own()[0], root, **gathers), sent)
                    for function in (hvd.broadcast_, hvd.broadcast_async_):
                        given = own()
                        check(function(given[0], root, **gathers), sent, given)
                received = torch.cat([pair[0].split(rows)[place] for pair in pairs])
                check(hvd.alltoall(own()[0], **gathers), received)
                counts = torch.full((len(members),), rows, dtype=torch.int32)
                check(hvd.alltoall_async(own()[0], counts, **gathers), [received, counts])
                check(hvd.alltoall(own()[0], counts.tolist(), **gathers), [received, counts])


@ranks(2)
def test_inference_mode(world):
    """Metrics are often averaged in it; tensors are made in it or before, and read afterwards."""
    with session():
        me = hvd.rank()
        before = [of(me, (3,)), of(me, (2, 2))]
        sums = [of(0, shape) + of(1, shape) for shape in ((3,), (2, 2))]
        with torch.inference_mode():
            inside = [tensor.clone() for tensor in before]
            assert inside[0].is_inference()
            for tensors in (before, inside):
                close(hvd.allreduce(tensors[0], op=hvd.Sum), sums[0])
                close(
                    hvd.allreduce(tensors[0].float(), compression=hvd.Compression.fp16, op=hvd.Sum),
                    sums[0].float(),
                    1e-2,
                )
                for found, expected in zip(hvd.grouped_allreduce(tensors), sums, strict=True):
                    close(found, expected / 2)
                close(hvd.allgather(tensors[0]), torch.cat([of(0, (3,)), of(1, (3,))]))
                close(hvd.broadcast(tensors[1], 1), of(1, (2, 2)))
                rows = [of(rank, (2, 2))[me] for rank in range(2)]
                close(hvd.alltoall(tensors[1]), torch.stack(rows))
                close(hvd.reducescatter(tensors[1], op=hvd.Sum), sums[1][me : me + 1])
            own = inside[1].t()
            assert hvd.allreduce_(own, op=hvd.Sum) is own
            close(inside[1], sums[1])
            close(hvd.broadcast_(inside[0], 1), of(1, (3,)))
            close(
                hvd.allreduce(torch.tensor([me], dtype=torch.int16), op=hvd.Sum),
                torch.tensor([1], dtype=torch.int16),
            )
            close(hvd.allreduce(inside[0], op=hvd.Adasum), of(1, (3,)))
            assert hvd.broadcast_object({"me": me}, 1) == {"me": 1}
            assert hvd.allgather_object(me) == [0, 1]
        # Outside again: what is kept from one operation to the next is of no mode.
        together = [hvd.allreduce_async(tensor, op=hvd.Sum) for tensor in before]
        for handle, expected in zip(together, sums, strict=True):
            close(hvd.synchronize(handle), expected)
        leaf = of(me, (3,)).requires_grad_()
        hvd.allreduce(leaf * 2, op=hvd.Sum).square().sum().backward()
        close(leaf.grad, 16 * sums[0])


@ranks(3)
def test_order_does_not_matter_and_many_travel_together(world):
    """Each rank begins 60 operations in an order of its own, some sleeping in between."""
    with session():
        me, n = hvd.rank(), hvd.size()
        for turn in range(3):
            order = list(range(60))
            random.Random(10 * turn + me).shuffle(order)
            handles = {}
            for number in order:
                name, values = f"t{number}", of(me, (number,), seed=number)
                if number % 10 == 3:
                    handles[number] = hvd.broadcast_async(values, number % n, name=name)
                elif number % 10 == 4:
                    handles[number] = hvd.allgather_async(values[: me + 1], name=name)
                else:
                    handles[number] = hvd.allreduce_async(values, name=name, op=hvd.Sum)
            random.Random(me).shuffle(order)
            for number in order:
                every = [of(rank, (number,), seed=number) for rank in range(n)]
                expected = sum(every)
                if number % 10 == 3:
                    expected = every[number % n]
                elif number % 10 == 4:
                    expected = torch.cat([each[: rank + 1] for rank, each in enumerate(every)])
                close(hvd.synchronize(handles[number]), expected)
                assert hvd.poll(handles[number])


@ranks(3)
def test_other_operations(world):
    with session():
        me, n = hvd.rank(), hvd.size()
        for dtype in (*INTEGERS, *FLOATS, torch.bool):
            for rows in ((2, 2, 2), (0, 3, 1), (0, 0, 0), (4, 0, 0)):
                every = [of(rank, (rows[rank], 3), dtype, 5) for rank in range(n)]
                assert hvd.allgather(every[me]).equal(torch.cat(every))
            for shape, root in (((), 0), ((0, 2), 1), ((4, 3), 2)):
                given = of(me, shape, dtype, 6)
                assert hvd.broadcast(given, root).equal(of(root, shape, dtype, 6))
                assert given.equal(of(me, shape, dtype, 6))
                assert hvd.broadcast_(given, root) is given
                assert given.equal(of(root, shape, dtype, 6))
            every = [of(rank, (6, 2), dtype, 7) for rank in range(n)]
            equal = torch.cat([each[2 * me : 2 * me + 2] for each in every])
            assert hvd.alltoall(every[me]).equal(equal)
            rows, counts = hvd.synchronize(hvd.alltoall_async(every[me]))
            assert rows.equal(equal)
            assert counts.tolist() == [2, 2, 2]
            splits = [[1, 0, 2], [0, 3, 3], [0, 0, 0]]
            starts = [np.cumsum([0, *row]) for row in splits]
            wanted = [each[s[me] : s[me + 1]] for each, s in zip(every, starts, strict=True)]
            got, counts = hvd.alltoall(every[me], splits=torch.tensor(splits[me]).int())
            assert got.equal(torch.cat(wanted))
            assert counts.dtype == torch.int32
            assert counts.tolist() == [row[me] for row in splits]
            if dtype != torch.bool:
                for rows in (6, 7, 2, 0):
                    every = [of(rank, (rows, 2), dtype, 8) for rank in range(n)]
                    sizes = [rows // n + (rank < rows % n) for rank in range(n)]
                    mine = slice(sum(sizes[:me]), sum(sizes[: me + 1]))
                    for op in (hvd.Sum, hvd.Average):
                        kind = torch.int64 if dtype in INTEGERS and op == hvd.Sum else torch.float64
                        expected = torch.stack(every).to(kind).sum(0)[mine]
                        if op == hvd.Average:
                            expected = expected / n
                        found = hvd.reducescatter(every[me], op=op)
                        close(found, expected.to(dtype), 1e-2 if dtype == torch.bfloat16 else 2e-3)
        pair = [of(me, (me + 1, 2)), of(me, (2,), torch.int32)]
        one, two = hvd.grouped_allgather(pair)
        assert (one.shape, two.shape) == ((6, 2), (6,))
        one, two = hvd.grouped_reducescatter([of(me, (3, 2)), of(me, (4,))], op=hvd.Sum)
        close(one[0], sum(of(rank, (3, 2)) for rank in range(n))[me])
        scaled = hvd.reducescatter(
            of(me, (3, 2)), op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0
        )
        close(scaled, 6 * one)
        hvd.barrier()
        rows = torch.tensor([[me, 2, 2], [0, 1, 1]])
        sparse = torch.sparse_coo_tensor(rows, of(me, (3,)), (4, 3), check_invariants=True)
        handle = hvd.sparse_allreduce_async(sparse, name="sparse", op=hvd.Average)
        expected = sum(
            torch.sparse_coo_tensor(
                torch.tensor([[rank, 2, 2], [0, 1, 1]]),
                of(rank, (3,)),
                (4, 3),
                check_invariants=True,
            ).to_dense()
            for rank in range(n)
        )
        close(hvd.synchronize(handle).to_dense(), expected / n)
        assert hvd.allgather_object({"rank": me}) == [{"rank": rank} for rank in range(n)]
        assert hvd.broadcast_object([me, "x"], root_rank=2) == [2, "x"]
        assert hvd.broadcast_object_fn(root_rank=1)(me) == 1


@ranks(2)
def test_gradients(world):
    """Of an average the average, of a sum the sum; of gather and broadcast the average."""
    with session():
        me, n = hvd.rank(), hvd.size()

        def gradient(function, shape, seed=0):
            """Of the sum of the outputs, each times a weight of this rank."""
            given = of(me, shape, seed=seed).requires_grad_()
            out = function(given)
            out.backward(of(me, out.shape, seed=9))
            return given.grad

        def weights(shape):
            return [of(rank, shape, seed=9) for rank in range(n)]

        w = weights((3, 2))
        close(gradient(lambda x: hvd.allreduce(x, op=hvd.Sum), (3, 2)), sum(w))
        close(gradient(hvd.allreduce, (3, 2)), sum(w) / n)
        scaled = gradient(lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=3.0), (3, 2))
        close(scaled, 3 * sum(w))
        grouped = gradient(lambda x: hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum)[1], (3, 2))
        close(grouped, 2 * sum(w))
        close(gradient(lambda x: hvd.broadcast(x, 1), (3, 2)), sum(w) / n * (me == 1))
        w = weights((3, 2))
        mean = sum(w) / n
        close(gradient(hvd.allgather, (1 + me, 2)), mean[:1] if me == 0 else mean[1:])
        w = weights((4, 2))
        back = torch.cat([w[rank][2 * me : 2 * me + 2] for rank in range(n)])
        close(gradient(hvd.alltoall, (4, 2)), back)
        # Rank 0 sends 1 and 2 rows, rank 1 sends 3 and 0; one row of each goes to nobody.
        rows = [[1, 2], [3, 0]]
        kept = lambda x: hvd.alltoall(x, splits=torch.tensor(rows[me]))[0]  # noqa: E731
        found = gradient(kept, (4, 2))
        w = [of(0, (4, 2), seed=9), of(1, (2, 2), seed=9)]
        expected = torch.cat((w[0][:1], w[1][:2]) if me == 0 else (w[0][1:4],))
        close(found, torch.cat((expected, torch.zeros(1, 2, dtype=torch.float64))))
        w = weights((2, 2))
        close(gradient(hvd.reducescatter, (4, 2)), torch.cat(w))
        summed = gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum), (4, 2))
        close(summed, n * torch.cat(w))


@ranks(2)
def test_adasum(world):
    """A(a, b) = (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b, of each tensor by itself."""
    with session():
        me = hvd.rank()

        def combined(a, b):
            dot = (a * b).sum()
            return (1 - dot / (2 * a.square().sum())) * a + (1 - dot / (2 * b.square().sum())) * b

        handles = [
            hvd.allreduce_async(of(me, (size,), seed=size), name=f"{size}", op=hvd.Adasum)
            for size in (1, 7, 64)
        ]
        for size, handle in zip((1, 7, 64), handles, strict=True):
            one, other = of(0, (size,), seed=size), of(1, (size,), seed=size)
            close(hvd.synchronize(handle), combined(one, other))
        for dtype, rtol in ((torch.float32, 1e-5), (torch.float16, 5e-3)):
            pair = [of(rank, (9,), seed=3).to(dtype).double() for rank in range(2)]
            found = hvd.allreduce(pair[me].to(dtype), op=hvd.Adasum)
            close(found.double(), combined(*pair), rtol)
        grouped = hvd.grouped_allreduce(
            [of(me, (7,), seed=7), torch.zeros(2).double()], op=hvd.Adasum
        )
        close(grouped[0], combined(of(0, (7,), seed=7), of(1, (7,), seed=7)))
        assert not grouped[1].any()
        with pytest.raises(ValueError, match="floating"):
            hvd.allreduce(torch.ones(3).int(), op=hvd.Adasum)


@ranks(3)
def test_process_sets(world):
    with session(process_sets=[hvd.ProcessSet([2, 0])]):
        me = hvd.rank()
        assert hvd.get_process_set_ids_and_ranks() == {0: [0, 1, 2], 1: [0, 2]}
        first = hvd.process_set_by_id(1)
        second = hvd.add_process_set([1, 2])
        assert (first.process_set_id, second.process_set_id) == (1, 2)
        assert (first.ranks, first.size(), first.included()) == ([0, 2], 2, me != 1)
        assert hvd.global_process_set.size() == 3
        with pytest.raises(ValueError, match="already"):
            hvd.add_process_set(hvd.ProcessSet([2, 1]))
        with pytest.raises(ValueError, match="0 to 2"):
            hvd.add_process_set([1, 3])
        for chosen in (first, second):
            if not chosen.included():
                with pytest.raises(ValueError, match="does not belong"):
                    hvd.allreduce(torch.ones(2), process_set=chosen)
                with pytest.raises(ValueError, match="not part of"):
                    chosen.rank()
                continue
            place, members = chosen.rank(), chosen.ranks
            close(hvd.allreduce(of(me, (4,)), process_set=chosen), sum(map(FOUR, members)) / 2)
            found = hvd.allgather(of(me, (place + 1,)), process_set=chosen)
            expected = [of(rank, (number + 1,)) for number, rank in enumerate(members)]
            close(found, torch.cat(expected))
            close(hvd.broadcast(of(me, (4,)), 2, process_set=chosen), of(2, (4,)))
            with pytest.raises(hvd.HorovodInternalError, match="root"):
                hvd.broadcast(of(me, (4,)), 3 - sum(members) + 0, process_set=chosen)
            found = hvd.alltoall(of(me, (4,)), process_set=chosen)
            two = slice(2 * place, 2 * place + 2)
            close(found, torch.cat([of(rank, (4,))[two] for rank in members]))
            found = hvd.reducescatter(of(me, (4,)), process_set=chosen, op=hvd.Sum)
            close(found, sum(of(rank, (4,))[two] for rank in members))
            hvd.barrier(process_set=chosen)
            assert hvd.allgather_object(me, process_set=chosen) == members
            assert hvd.broadcast_object(me, 2, process_set=chosen) == 2
        # Names that are made up go on as before on ranks that belong to other sets.
        close(hvd.allreduce(of(me, (4,)), op=hvd.Sum), sum(map(FOUR, range(3))))
        assert hvd.remove_process_set(second)
        assert not hvd.remove_process_set(second)
        assert not hvd.remove_process_set(hvd.global_process_set)
        assert second.process_set_id is None
        assert (second.size(), second.rank(), second.included()) == (None, None, None)
        with pytest.raises(ValueError, match="not registered"):
            hvd.allreduce(torch.ones(1), process_set=second)
        third = hvd.add_process_set(rank for rank in (2, 1))
        assert (third.process_set_id, third.ranks) == (3, [1, 2])
        for wrong in (3, "12", [1.5], None):
            with pytest.raises(ValueError, match="list of ranks"):
                hvd.ProcessSet(wrong)
    with pytest.raises(ValueError, match=r"hvd\.init"):
        hvd.size()


def FOUR(rank):
    return of(rank, (4,))


@ranks(3)
def test_join(world):
    """Ranks with less data take part with zeros; the last to come is known to all."""
    with session():
        me, n = hvd.rank(), hvd.size()
        for turn in range(2):
            for step in range(2 * me + 1):
                there = [rank for rank in range(n) if 2 * rank + 1 > step]
                found = hvd.allreduce(of(me, (5,), seed=step), op=hvd.Sum)
                close(found, sum(of(rank, (5,), seed=step) for rank in there))
                found = hvd.grouped_allreduce(
                    [of(me, (2,), torch.int64), of(me, (3,)), torch.ones(1).double()], name="g"
                )
                close(found[1], sum(of(rank, (3,)) for rank in there) / n)
                assert found[0].equal(sum(of(r, (2,), torch.int64) for r in there) // n)
                if len(there) == 1:
                    with pytest.raises(hvd.HorovodInternalError, match=r"ranks 0, 1 have joined"):
                        hvd.allgather(torch.ones(1))
                    with pytest.raises(hvd.HorovodInternalError, match="joined"):
                        hvd.broadcast(torch.ones(1), 0)
            assert hvd.join() == 2, turn
            close(hvd.allreduce(of(me, (5,)), op=hvd.Sum), sum(of(rank, (5,)) for rank in range(n)))


@ranks(3)
def test_errors_reach_all_ranks(world):
    """Ranks that disagree all get the same error, and go on afterwards."""
    with session():
        me = hvd.rank()
        odd = me == 1

        def refused(match, function, kind=hvd.HorovodInternalError):
            with pytest.raises(kind, match=match):
                function()
            close(hvd.allreduce(torch.ones(2, dtype=torch.float64)), torch.ones(2).double())

        two, three = torch.ones(2), torch.ones(3)
        refused("shapes differ: rank 0 has", lambda: hvd.allreduce(three if odd else two))
        refused("dimensions", lambda: hvd.allreduce(two.view(1, 2) if odd else two))
        refused("types differ", lambda: hvd.allreduce(two.int() if odd else two))
        refused("reductions differ", lambda: hvd.allreduce(two, op=hvd.Max if odd else hvd.Sum))
        refused("scale factors", lambda: hvd.allreduce(two, prescale_factor=1.0 + odd))
        refused(
            "numbers of tensors", lambda: hvd.grouped_allreduce([two] * (2 + odd), name="grouped")
        )
        refused("roots differ", lambda: hvd.broadcast(two, int(odd)))
        refused("none of the ranks", lambda: hvd.broadcast(two, 7))
        refused("shapes differ", lambda: hvd.broadcast(three if odd else two, 0))
        refused("shapes differ", lambda: hvd.allgather(torch.ones(2, 2 + odd)))
        refused("types differ", lambda: hvd.allgather(two.double() if odd else two))
        # What is wrong in itself can be caught as either.
        for kind in (ValueError, hvd.HorovodInternalError):
            for gather in (hvd.allgather, hvd.reducescatter, hvd.alltoall):
                refused("no rows", lambda gather=gather: gather(torch.ones(())), kind)
            refused("op is", lambda: hvd.allreduce(two, op=17), kind)
            refused("cannot MAX", lambda: hvd.reducescatter(three, op=hvd.Max), kind)
            refused("cannot be divided", lambda: hvd.alltoall(torch.ones(4)), kind)
            refused(
                "rank 1: the splits are 6 rows",
                lambda: hvd.alltoall(three, splits=torch.tensor([1 + odd] * 3)),
                kind,
            )
            for splits in (torch.ones(3), torch.ones(2).int(), torch.ones(4).int()):
                refused("splits", lambda splits=splits: hvd.alltoall(three, splits), kind)
            refused("supersedes", lambda: hvd.allreduce(two, average=True, op=hvd.Sum), kind)
            refused("not registered", lambda: hvd.barrier(hvd.ProcessSet([0])), kind)
            refused("sparse", lambda: hvd.allreduce(torch.eye(2).to_sparse()), kind)
            refused("sparse", lambda: hvd.sparse_allreduce_async(two, "s", hvd.Sum), kind)
        refused("shapes differ", lambda: hvd.reducescatter(three if odd else two))
        if me == 2:  # so that the first is under way until the others have tried the second
            dist.barrier(world.group)
        handle = hvd.allreduce_async(two, name="same")
        if me < 2:
            for kind in (ValueError, hvd.HorovodInternalError):
                with pytest.raises(kind, match="same name"):
                    hvd.allreduce_async(two, name="same")
            dist.barrier(world.group)
        close(hvd.synchronize(handle), two)
        with pytest.raises(NotImplementedError, match="power of two"):
            hvd.allreduce(two, op=hvd.Adasum)


@ranks(3)
def test_who_is_missing_is_named(world):
    """By a warning, by an error after a while, and at once where a rank has left."""
    os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"] = "0.2"
    os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = "0.6"
    with session():
        me = hvd.rank()
        if me != 1:
            with pytest.raises(hvd.HorovodInternalError, match=r"for rank 1; ranks 0, 2 asked"):
                hvd.allreduce(torch.ones(2), name="late")
        dist.barrier()
        if me == 1:  # is told when it comes
            with pytest.raises(hvd.HorovodInternalError, match="for rank 1"):
                hvd.allreduce(torch.ones(2), name="late")
        dist.barrier()
        close(hvd.allreduce(torch.ones(2), name="late"), torch.ones(2))
        dist.barrier()
        if me == 2:
            return
        with pytest.raises(hvd.HorovodInternalError, match=r"rank [02] has shut Horovod down"):
            hvd.allreduce(torch.ones(2))


@ranks(2)
def test_a_stopped_coordinator_is_named(world):
    """Rank 0, which alone sees who is missing, is stopped; rank 1 must not wait for it for ever."""
    os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = "0.6"
    with session():
        (coordinator, _) = hvd.allgather_object(os.getpid())
        if hvd.rank() == 0:
            os.kill(coordinator, signal.SIGSTOP)
            return
        try:
            for wait in (hvd.join, lambda: hvd.allreduce(torch.ones(2))):
                with pytest.raises(hvd.HorovodInternalError, match="rank 0 has not answered"):
                    wait()
        finally:
            os.kill(coordinator, signal.SIGCONT)


@ranks(3, mortal={2})
def test_a_dead_rank_is_named(world):
    with session():
        hvd.barrier()
        if hvd.rank() == 2:
            os.kill(os.getpid(), 9)
        with pytest.raises(hvd.HorovodInternalError, match="rank 2 is lost"):
            hvd.allreduce(torch.ones(2))


@ranks(2)
def test_places_timeline_and_variables(world):
    """Without torch.distributed, by Horovod's variables; twice in one process."""
    dist.destroy_process_group()
    os.environ |= {
        "HOROVOD_RANK": str(world.rank),
        "HOROVOD_SIZE": "2",
        "HOROVOD_LOCAL_RANK": str(world.rank),
        "HOROVOD_LOCAL_SIZE": "2",
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(world.directory),
        "HOROVOD_TIMELINE": "DYNAMIC",
    }
    os.chdir(world.directory)
    trace = world.directory / "trace.json"
    for turn in range(2):
        with session(process_sets="dynamic"):
            hvd.init()  # does nothing
            assert hvd.is_initialized()
            assert (hvd.rank(), hvd.local_rank(), hvd.cross_rank()) == (world.rank, world.rank, 0)
            assert (hvd.size(), hvd.local_size(), hvd.cross_size()) == (2, 2, 1)
            assert hvd.is_homogeneous()
            hvd.start_timeline(str(trace), mark_cycles=True)
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name=f"turn{turn}").item() == 2
            hvd.stop_timeline()
            hvd.barrier()
            names = [event["name"] for event in json.loads(trace.read_text())]
            assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE", "CYCLE_START"} <= set(names)
        assert not hvd.is_initialized()
    assert not (world.directory / "DYNAMIC").exists()
