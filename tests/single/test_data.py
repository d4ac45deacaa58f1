"""single: sources and the loader in one process, and with worker processes of its own."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import time
from multiprocessing import resource_sharer

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from headway.data import (
    ArraySource,
    Cursor,
    DatasetSource,
    Loader,
    MemmapSource,
    RankBatch,
    SeededSource,
    Source,
    TensorSource,
    as_source,
)
from headway.errors import DataError
from headway.plans import BatchSplit
from support.commands import command, warm_variables

START = Cursor(seed=5)


class Numbers(Dataset):
    """Sample i is the number i; counts its reads."""

    def __init__(self, length):
        self.length = length
        self.reads = []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.reads.append(index)
        return torch.tensor(index)


class Abandoned(Numbers):
    """In its worker, somebody comes for a tensor and dies before he has it, as a killed rank."""

    def __getitem__(self, index):
        if index == 4:
            sharer = resource_sharer._resource_sharer
            while sharer._address is None:  # the first tensor is not under way yet
                time.sleep(0.001)
            for _ in range(5):
                with socket.socket(socket.AF_UNIX) as rank:
                    rank.connect(sharer._address)
            # Served after all of them.
            os.close(resource_sharer.DupFd(0).detach())
        return torch.tensor(index)


class Together(Numbers):
    """Also reads many at once."""

    def __getitems__(self, indices):
        self.reads.append(list(indices))
        return [torch.tensor(index) for index in indices]


class Augmented(Dataset):
    """Sample i is i and one draw from each generator; even samples draw nothing if `some`."""

    def __init__(self, length, *, some=False):
        self.length = length
        self.some = some

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if self.some and index % 2 == 0:
            return torch.full((4,), index, dtype=torch.float64)
        drawn = [torch.rand(()).item(), np.random.randn(), random.random()]
        return torch.tensor([index, *drawn], dtype=torch.float64)


class Broken(Numbers):
    """Sample 13 raises."""

    def __getitem__(self, index):
        if index == 13:
            raise KeyError("no such picture: cat.jpg")
        return super().__getitem__(index)


class Slow(Numbers):
    """Every sample from number `first` on takes its time."""

    def __init__(self, length, seconds, first=0):
        super().__init__(length)
        self.seconds, self.first = seconds, first

    def __getitem__(self, index):
        if index >= self.first:
            time.sleep(self.seconds)
        return torch.tensor(index)


class Stream(IterableDataset):
    """Has no numbered samples."""

    def __iter__(self):
        return iter(())


def loader(examples, batch, *, rank=0, ranks=1, microbatch=None, cursor=START, **options):
    split = BatchSplit(samples=batch, microbatch=microbatch)
    source = as_source(examples)
    return Loader(source, split, rank=rank, ranks=ranks, cursor=cursor, **options)


def drain(examples, batch, **options):
    with loader(examples, batch, **options) as batches:
        return list(batches)


def by_place(batches: list[RankBatch]) -> dict[tuple[int, int], Tensor]:
    """(epoch, position) -> sample; each at most once."""
    found: dict[tuple[int, int], Tensor] = {}
    for batch in batches:
        for micro in batch.micros:
            for position, sample in zip(micro.positions, micro.data, strict=True):
                place = (batch.start.epoch, position)
                assert place not in found
                found[place] = sample
    return found


def equal(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[place], other[place]) for place in one)


SHAPES = {
    "length": st.integers(1, 60),
    "batch": st.integers(1, 60),
    "ranks": st.integers(1, 7),
    "microbatch": st.none() | st.integers(1, 9),
}


class TestLaw:
    @settings(max_examples=60)
    @given(**SHAPES, drop_last=st.booleans(), seed=st.integers(0, 2**64))
    def test_ranks_together_read_exactly_the_batch(
        self, length, batch, ranks, microbatch, drop_last, seed
    ):
        assume(batch <= length)
        options = {"cursor": Cursor(seed), "epochs": 2, "drop_last": drop_last}
        serial = drain(Numbers(length), batch, **options)
        each = [
            drain(Numbers(length), batch, rank=r, ranks=ranks, microbatch=microbatch, **options)
            for r in range(ranks)
        ]
        used = length - length % batch if drop_last else length
        assert sum(b.samples for b in serial) == 2 * used
        for whole, *parts in zip(serial, *each, strict=True):
            assert {p.samples for p in parts} == {whole.samples}
            assert {p.start for p in parts} == {whole.start}
            assert {p.after for p in parts} == {whole.after}
            places = [place for p in parts for m in p.micros for place in m.positions]
            first = whole.start.position
            assert places == list(range(first, first + whole.samples))
            samples = torch.cat([m.data for p in parts for m in p.micros])
            assert torch.equal(samples, torch.cat([m.data for m in whole.micros]))
            assert microbatch is None or all(
                len(m.positions) <= microbatch for p in parts for m in p.micros
            )
        for epoch in range(2):
            seen = [int(s) for (e, _), s in by_place(serial).items() if e == epoch]
            assert len(set(seen)) == used
            assert drop_last or sorted(seen) == list(range(length))

    @settings(max_examples=40)
    @given(**SHAPES, drop_last=st.booleans(), resume=st.integers(0, 30))
    def test_resuming_at_any_cursor_goes_on_identically(
        self, length, batch, ranks, microbatch, drop_last, resume
    ):
        assume(batch <= length)
        rank = ranks - 1
        options = {"rank": rank, "ranks": ranks, "microbatch": microbatch, "drop_last": drop_last}
        whole = drain(Augmented(length), batch, epochs=3, **options)
        resume %= len(whole)
        rest = drain(Augmented(length), batch, epochs=3, cursor=whole[resume].start, **options)
        assert [b.start for b in rest] == [b.start for b in whole[resume:]]
        assert [b.after for b in rest] == [b.after for b in whole[resume:]]
        assert equal(by_place(rest), by_place(whole[resume:]))

    def test_a_batch_may_change_its_size_between_runs(self):
        first = drain(Numbers(50), 8, epochs=1)[:3]
        rest = drain(Numbers(50), 32, epochs=1, cursor=first[-1].after)
        seen = {**by_place(first), **by_place(rest)}
        assert sorted(int(s) for s in seen.values()) == list(range(50))
        skipped = drain(Numbers(50), 32, epochs=2, drop_last=True, cursor=first[-1].after)
        assert [b.start for b in skipped] == [Cursor(5, 1, 0)]

    def test_a_rank_of_a_ragged_batch_may_have_nothing(self):
        last = drain(Numbers(9), 8, rank=3, ranks=4, epochs=1)[-1]
        assert last == RankBatch(
            micros=(), samples=1, start=Cursor(5, 0, 8), after=Cursor(5, 1, 0), passes=1
        )

    def test_order_follows_seed_and_epoch_and_shuffle(self):
        epochs = by_place(drain(Numbers(40), 8, epochs=2))
        orders = [[int(s) for (e, _), s in epochs.items() if e == epoch] for epoch in range(2)]
        assert orders[0] != orders[1]
        other = by_place(drain(Numbers(40), 8, epochs=1, cursor=Cursor(6)))
        assert orders[0] != [int(s) for s in other.values()]
        plain = by_place(drain(Numbers(40), 8, epochs=1, shuffle=False))
        assert [int(s) for s in plain.values()] == list(range(40))

    def test_endless_and_every_iteration_begins_at_the_cursor(self):
        batches = loader(Numbers(10), 4)
        first, second = iter(batches), iter(batches)
        begun = [next(first) for _ in range(7)]
        assert begun[-1].start == Cursor(5, 2, 0)
        assert next(second).start == START
        with pytest.raises(RuntimeError, match="iterated anew"):
            next(first)
        batches.close()
        with pytest.raises(RuntimeError, match="closed"):
            next(second)


class TestRandomSamples:
    @pytest.mark.parametrize("some", [False, True])
    @pytest.mark.parametrize("wrap", [as_source, lambda d: as_source(Subset(d, range(len(d))))])
    def test_no_split_changes_them(self, some, wrap):
        whole = by_place(drain(wrap(Augmented(31, some=some)), 8, epochs=2))
        assert len({tuple(s.tolist()) for s in whole.values()}) == (62 - 16 if some else 62)
        for ranks in (2, 3, 8):
            for microbatch in (None, 1, 3):
                options = {"ranks": ranks, "microbatch": microbatch, "epochs": 2}
                parts: dict = {}
                for rank in range(ranks):
                    source = wrap(Augmented(31, some=some))
                    parts |= by_place(drain(source, 8, rank=rank, **options))
                assert equal(parts, whole)

    def test_seeds_change_them(self):
        one, other = (by_place(drain(Augmented(16), 8, epochs=1, cursor=Cursor(s))) for s in (1, 2))
        drawn = [{tuple(s[1:].tolist()) for s in found.values()} for found in (one, other)]
        assert not drawn[0] & drawn[1]

    @pytest.mark.parametrize("workers", [0, 2])
    @pytest.mark.parametrize("dataset", [Numbers(24), Augmented(24)])
    def test_the_generators_of_the_process_stay(self, dataset, workers):
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)
        np.random.randn()  # leaves one number of a pair behind
        before = torch.get_rng_state(), str(np.random.get_state()[2:]), random.getstate()
        place = np.random.get_state()[1].copy()
        drain(dataset, 8, epochs=2, workers=workers)
        after = torch.get_rng_state(), str(np.random.get_state()[2:]), random.getstate()
        assert torch.equal(before[0], after[0])
        assert before[1:] == after[1:]
        assert np.array_equal(place, np.random.get_state()[1])

    def test_a_quiet_data_set_is_read_once_and_together(self):
        dataset = Numbers(20)
        drain(dataset, 8, epochs=1)
        assert sorted(dataset.reads) == list(range(20))
        dataset = Together(20)
        batches = drain(dataset, 8, epochs=1)
        assert dataset.reads == [b.micros[0].data.tolist() for b in batches]

    def test_a_source_may_take_seeds(self):
        class Noise:
            def __len__(self):
                return 10

            def read(self, indices):
                raise AssertionError

            def read_seeded(self, indices, seeds):
                return torch.tensor([hash((i, s)) for i, s in zip(indices, seeds, strict=True)])

        assert isinstance(Noise(), SeededSource)
        whole = by_place(drain(Noise(), 4, epochs=1))
        assert equal(whole, by_place(drain(Noise(), 4, epochs=1, microbatch=1)))


class TestWorkers:
    @pytest.mark.parametrize("dataset", [Numbers(37), Augmented(37, some=True)])
    def test_they_give_the_same_batches(self, dataset):
        options = {"rank": 1, "ranks": 2, "microbatch": 3, "epochs": 2}
        serial = drain(dataset, 8, **options)
        ahead = drain(dataset, 8, workers=2, **options)
        assert [(b.start, b.after, b.samples) for b in ahead] == [
            (b.start, b.after, b.samples) for b in serial
        ]
        assert [[m.positions for m in b.micros] for b in ahead] == [
            [m.positions for m in b.micros] for b in serial
        ]
        assert equal(by_place(ahead), by_place(serial))

    def test_they_read_mapped_files(self, tmp_path):
        path = tmp_path / "tokens.bin"
        np.arange(1000, dtype="<u2").tofile(path)
        source = MemmapSource(path, window=7, dtype="uint16")
        serial, ahead = (drain(source, 8, epochs=1, workers=workers) for workers in (0, 1))
        for one, other in zip(serial, ahead, strict=True):
            assert torch.equal(one.micros[0].data[0], other.micros[0].data[0])
            assert torch.equal(one.micros[0].data[1], other.micros[0].data[1])

    def test_none_remains_when_the_consumer_stops(self):
        batches = loader(Numbers(100), 8, workers=2)
        next(iter_ := iter(batches))
        assert len(multiprocessing.active_children()) == 2
        batches.close()
        batches.close()
        assert multiprocessing.active_children() == []
        with pytest.raises(RuntimeError, match="closed"):
            next(iter_)
        for _ in batches:
            break
        assert multiprocessing.active_children() == []

    def test_none_remains_when_the_consumer_raises(self):
        def train():
            with loader(Numbers(100), 8, workers=2) as batches:
                for _ in batches:
                    raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            train()
        assert multiprocessing.active_children() == []

    def test_none_remains_when_a_wait_is_interrupted(self):
        class Interrupted(Exception):
            pass

        def interrupt(*_):
            raise Interrupted

        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            with (
                pytest.raises(Interrupted) as interrupted,
                loader(Slow(100, 1.0), 8, workers=1) as batches,
            ):
                next(iter(batches))
            assert multiprocessing.active_children() == []
            # `interrupted` holds the frames of the wait: torch's iterator must not live on in them.
            names = [type(thing).__name__ for thing in gc.get_objects()]
            assert "_MultiProcessingDataLoaderIter" not in names
            assert interrupted.type is Interrupted
        finally:
            signal.signal(signal.SIGALRM, before)

    def test_a_hanging_data_set_does_not_hold_up_the_end(self):
        batches = loader(Slow(100, 60.0, first=16), 8, workers=2, shuffle=False)
        next(iter_ := iter(batches))
        start = time.monotonic()
        batches.close()
        assert time.monotonic() - start < 5
        assert multiprocessing.active_children() == []
        with pytest.raises(RuntimeError, match="closed"):
            next(iter_)

    def test_their_errors_arrive_whole(self):
        with pytest.raises(DataError) as caught:
            drain(Broken(64), 8, workers=2, epochs=1)
        assert caught.value.what == "sample 13 cannot be read"
        assert "in __getitem__" in str(caught.value.__cause__)
        assert multiprocessing.active_children() == []

    def test_a_killed_one_is_an_error(self):
        def train():
            with loader(Slow(1000, 0.02), 8, workers=2) as batches:
                for number, _ in enumerate(batches):
                    if number == 1:
                        os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)

        # torch's own handler may raise between two reads; then it is the executor's to explain.
        with pytest.raises((DataError, RuntimeError), match=r"died|killed"):
            train()
        assert multiprocessing.active_children() == []

    @pytest.mark.skipif(sys.platform != "linux", reason="elsewhere tensors travel by files")
    def test_a_rank_that_is_killed_on_the_way_to_a_tensor_makes_them_print_nothing(self, capfd):
        drain(Abandoned(8), 2, epochs=1, workers=1, shuffle=False)
        assert capfd.readouterr().err == ""

    def test_signals_for_the_rank_leave_them(self):
        with loader(Numbers(1000), 8, workers=2) as batches:
            waiting = iter(batches)
            next(waiting)
            for child in multiprocessing.active_children():
                os.kill(child.pid, signal.SIGTERM)
                os.kill(child.pid, signal.SIGINT)
            time.sleep(0.2)
            assert len([next(waiting) for _ in range(30)]) == 30
            assert len(multiprocessing.active_children()) == 2

    @pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "sys.exit(0)", "1 / 0"])
    def test_they_end_with_their_rank(self, tmp_path, end):
        script = f"""
import multiprocessing, os, sys, torch
from headway.data import Cursor, Loader, TensorSource
from headway.plans import BatchSplit
source = TensorSource(torch.arange(1000))
loader = Loader(source, BatchSplit(samples=8), rank=0, ranks=1, cursor=Cursor(0), workers=2)
batches = iter(loader)
next(batches)
print(*(child.pid for child in multiprocessing.active_children()), flush=True)
{end}
"""
        words = ("python", "-c", script)
        done = command(*words, cwd=tmp_path, timeout=60, variables=warm_variables())
        pids = [int(word) for word in done.out.split()]
        assert len(pids) == 2, done.err
        deadline = time.monotonic() + 2
        while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not any(alive(pid) for pid in pids)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


class TestErrors:
    def test_no_samples(self):
        with pytest.raises(DataError, match="empty"):
            loader(Numbers(0), 1)

    @pytest.mark.parametrize("drop_last", [False, True])
    def test_less_than_one_batch(self, drop_last):
        with pytest.raises(DataError, match="smaller than one batch") as caught:
            loader(Numbers(40), 64, drop_last=drop_last)
        assert "40 samples" in caught.value.why
        assert "64" in caught.value.why
        assert "at most 40" in caught.value.fix

    def test_a_cursor_of_other_data(self):
        with pytest.raises(DataError, match="outside its data"):
            loader(Numbers(40), 8, cursor=Cursor(0, 0, 48))

    @pytest.mark.parametrize("kind", [Broken, Subset])
    def test_a_data_set_that_raises(self, kind):
        dataset = Broken(20) if kind is Broken else Subset(Broken(20), range(20))
        with pytest.raises(DataError) as caught:
            drain(dataset, 8, epochs=1)
        assert caught.value.what == "sample 13 cannot be read"
        assert caught.value.where == kind.__name__
        assert caught.value.why == "KeyError: 'no such picture: cat.jpg'"
        assert isinstance(caught.value.__cause__, KeyError)
        assert multiprocessing.active_children() == []

    def test_a_data_set_that_raises_only_together(self):
        class Odd(Numbers):
            def __getitems__(self, indices):
                return [torch.tensor(0)]

        with pytest.raises(DataError, match=r"samples .*\.\.\. \(8\) cannot be read together"):
            drain(Odd(20), 8, epochs=1)
        with pytest.raises(DataError, match="gave 1 of 2 samples"):
            DatasetSource(Odd(20)).read([1, 2])

    def test_samples_that_do_not_fit_together(self):
        class Ragged(Numbers):
            def __getitem__(self, index):
                return torch.zeros(index)

        with pytest.raises(DataError, match="do not fit into one batch") as caught:
            drain(Ragged(20), 4, epochs=1)
        assert "equal size" in caught.value.why
        with pytest.raises(DataError, match="do not fit"):
            DatasetSource(Ragged(20)).read([1, 2])

    def test_a_source_that_raises(self):
        class Unlucky:
            def __len__(self):
                return 10

            def read(self, indices):
                raise OSError("link down")

        with pytest.raises(DataError, match="4 samples from number") as caught:
            drain(Unlucky(), 4)
        assert caught.value.why == "OSError: link down"

    @pytest.mark.parametrize("examples", ["tokens.bin", {"a": 1}, 3, Stream()])
    def test_what_is_no_data_set(self, examples):
        with pytest.raises(DataError, match="data set"):
            as_source(examples)


class TestMemmapSource:
    @pytest.mark.parametrize("dtype", ["uint8", "uint16", ">u2", "int32", "int64"])
    def test_windows(self, tmp_path, dtype):
        path = tmp_path / "tokens.bin"
        tokens = np.random.default_rng(0).integers(0, 120, 101).astype(dtype)
        tokens.tofile(path)
        source = MemmapSource(path, window=10, dtype=dtype)
        assert isinstance(source, Source)
        assert len(source) == 10
        inputs, target = source.read([9, 0, 9])
        assert inputs.dtype == target.dtype == torch.int64
        assert inputs.is_contiguous()
        assert target.is_contiguous()
        for row, index in enumerate([9, 0, 9]):
            window = torch.from_numpy(tokens.astype(np.int64)[index * 10 : index * 10 + 11])
            assert torch.equal(inputs[row], window[:-1])
            assert torch.equal(target[row], window[1:])

    def test_length_counts_whole_windows_with_their_target(self, tmp_path):
        path = tmp_path / "tokens.bin"
        for tokens, samples in [(11, 1), (20, 1), (21, 2), (30, 2), (31, 3)]:
            path.write_bytes(bytes(tokens))
            assert len(MemmapSource(path, window=10)) == samples

    def test_header(self, tmp_path):
        path = tmp_path / "tokens.bin"
        path.write_bytes(b"head" + bytes(range(9)))
        inputs, _ = MemmapSource(path, window=4, offset=4).read([1])
        assert inputs.tolist() == [[4, 5, 6, 7]]

    def test_its_pickle_does_not_hold_the_file(self, tmp_path):
        path = tmp_path / "tokens.bin"
        path.write_bytes(bytes(10**6))
        source = MemmapSource(path, window=4)
        source.read([0])
        pickled = pickle.dumps(source)
        assert len(pickled) < 1000
        assert torch.equal(pickle.loads(pickled).read([3])[0], source.read([3])[0])

    def test_files_that_are_no_use(self, tmp_path):
        path = tmp_path / "tokens.bin"
        for content, options, what in [
            (None, {}, "cannot be read"),
            (bytes(0), {}, "less than one sample"),
            (bytes(10), {}, "less than one sample"),
            (bytes(101), {"dtype": "uint16"}, "not a whole number of uint16 tokens"),
            (bytes(101), {"dtype": "float32"}, "tokens of type float32"),
            (bytes(101), {"window": 0}, "window of 0 tokens"),
        ]:
            if content is not None:
                path.write_bytes(content)
            with pytest.raises(DataError, match=what) as caught:
                MemmapSource(path, **{"window": 10, **options})
            assert caught.value.where == str(path)

    @pytest.mark.parametrize("workers", [0, 1])
    @pytest.mark.parametrize("damage", ["vanished", "cut"])
    def test_a_file_lost_during_the_run(self, tmp_path, damage, workers):
        path = tmp_path / "tokens.bin"
        path.write_bytes(bytes(200_000))
        with loader(MemmapSource(path, window=10), 8, workers=workers) as batches:
            waiting = iter(batches)
            next(waiting)
            # A worker that has read ahead waits; cut in the moment of reading, it would be killed.
            time.sleep(0.5 * workers)
            if damage == "vanished":
                path.unlink()
            else:
                os.truncate(path, 4096)
            with pytest.raises(DataError, match=r"cannot be read|cut short") as caught:
                list(itertools.islice(waiting, 100))
        assert caught.value.where == str(path)
        assert damage == "vanished" or "200000" in caught.value.why

    def test_reading_is_cheap(self, tmp_path):
        """Far above what it takes (0.1 ms): catches a return to reading sample by sample."""
        path = tmp_path / "tokens.bin"
        path.write_bytes(bytes(10**6))
        waiting = iter(loader(MemmapSource(path, window=128), 32))
        next(waiting)
        seconds = []
        for _ in range(200):
            start = time.perf_counter()
            next(waiting)
            seconds.append(time.perf_counter() - start)
        assert sorted(seconds)[20] < 1e-3


class TestArrays:
    def test_rows_of_files(self, tmp_path):
        images = np.random.default_rng(0).random((12, 3, 4)).astype(">f4")
        labels = np.arange(12)
        np.save(tmp_path / "images.npy", images)
        np.save(tmp_path / "labels.npy", labels)
        both = ArraySource(tmp_path / "images.npy", tmp_path / "labels.npy")
        assert len(both) == 12
        rows, numbers = pickle.loads(pickle.dumps(both)).read([3, 11])
        assert torch.equal(rows, torch.from_numpy(images[[3, 11]].astype(np.float32)))
        assert numbers.tolist() == [3, 11]
        one = ArraySource(tmp_path / "labels.npy").read([7])
        assert one.tolist() == [7]

    def test_files_that_are_no_use(self, tmp_path):
        good, bad = tmp_path / "good.npy", tmp_path / "bad.npy"
        np.save(good, np.arange(12))
        with pytest.raises(DataError, match="cannot be read"):
            ArraySource(good, bad)
        for content, what in [
            (np.arange(11), "unequal length"),
            (np.array(["a", "b"]), "rows of type <U1"),
            (np.array(3), "a single number"),
        ]:
            np.save(bad, content)
            with pytest.raises(DataError, match=what):
                ArraySource(good, bad)
        bad.write_bytes(good.read_bytes()[:-1])
        with pytest.raises(DataError, match=r"not a sound \.npy file"):
            ArraySource(bad)
        bad.write_bytes(b"")
        with pytest.raises(DataError, match=r"not a sound \.npy file"):
            ArraySource(bad)
        with pytest.raises(DataError, match="no files"):
            ArraySource()

    def test_a_file_cut_during_the_run(self, tmp_path):
        path = tmp_path / "rows.npy"
        np.save(path, np.zeros((1000, 1000)))
        source = ArraySource(path)
        source.read([0])
        os.truncate(path, 4096)
        with pytest.raises(DataError, match="cut short"):
            source.read([999])

    def test_tensors_as_torch_reads_them(self):
        dataset = TensorDataset(torch.rand(10, 3), torch.arange(10))
        source = as_source(dataset)
        assert isinstance(source, TensorSource)
        expected = next(iter(DataLoader(dataset, batch_size=4)))
        assert type(source.read([0, 1, 2, 3])) is type(expected)
        pairs = zip(source.read([0, 1, 2, 3]), expected, strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)

    def test_tensors_of_unequal_length(self):
        with pytest.raises(DataError, match="unequal length"):
            TensorSource(torch.zeros(3), torch.zeros(4))
        with pytest.raises(DataError, match="no tensors"):
            TensorSource()

    def test_as_source_and_own_collate(self):
        source = DatasetSource(Numbers(10), collate=lambda samples: {"sum": sum(samples)})
        assert as_source(source) is source
        assert source.read([2, 3]) == {"sum": torch.tensor(5)}
        assert isinstance(as_source([1, 2, 3]), DatasetSource)
