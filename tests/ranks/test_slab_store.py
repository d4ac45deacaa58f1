"""ranks: slabs are read from disk once and exchanged thereafter, bit for bit as read directly."""

from __future__ import annotations

import os
import signal
from collections import Counter
from itertools import islice
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from headway.data import Cursor, Hdf5Slabs, NpySlabs, SampleOrder, SlabCut, SlabSource, SlabStore
from headway.data.slabs import slab_store as store_module
from headway.errors import DataError, PeerLost, Stalled
from headway.parallel.spatial import SpatialContext, gather
from headway.plans import BatchSplit, data_parallel
from headway.run.distributed.world import World
from headway.run.executor import Executor
from support.ranks import ranks, run_ranks
from support.serial import largest_error, numbers, train_serially
from support.tiny_models import cross_entropy

SAMPLES, SHAPE, BATCH, EPOCHS, SEED = 11, (2, 7, 5, 4), 4, 3, 3
"""Batches of 4, 4 and a ragged 3; a depth of 7 does not divide by 2."""


def cubes():
    return np.arange(SAMPLES * np.prod(SHAPE), dtype=np.int16).reshape(SAMPLES, *SHAPE)


def files(folder):
    """Inputs and targets in HDF5, one file per sample; labels in one .npy."""
    data = cubes()
    for number, sample in enumerate(data):
        with h5py.File(folder / f"{number}.hdf5", "w") as file:
            file["full"], file["unitPar"] = sample, np.full(4, number, np.float32)
    np.save(folder / "labels.npy", data[:, 0] % 3)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return files(tmp_path_factory.mktemp("slabs"))


class Counted(SlabSource):
    """Notes which samples were read."""

    def load(self, sample):
        self.loads.append(sample)
        return super().load(sample)


def source_of(folder, cut):
    paths = [folder / f"{number}.hdf5" for number in range(SAMPLES)]
    readers = Hdf5Slabs(paths, "full"), NpySlabs(folder / "labels.npy"), Hdf5Slabs(paths, "unitPar")
    # The store moves int16; what is delivered is float.
    source = Counted(*readers, cut=cut, finish=lambda parts: (parts[0].float(), *parts[1:]))
    source.loads = []
    return source


class Messages:
    """Stands for torch.distributed in the store, and notes what passes."""

    def __init__(self):
        self.sent, self.posted, self.gathered, self.sizes = [], [], 0, set()

    def __getattr__(self, name):
        return getattr(dist, name)

    def isend(self, tensor, group, group_dst, tag):
        self.sent.append((dist.get_global_rank(group, group_dst), tag))
        self.sizes.add(tensor.numel())
        return dist.isend(tensor, group=group, group_dst=group_dst, tag=tag)

    def irecv(self, tensor, group, group_src, tag):
        self.posted.append((dist.get_global_rank(group, group_src), tag))
        return dist.irecv(tensor, group=group, group_src=group_src, tag=tag)

    def all_gather(self, *arguments, **options):
        self.gathered += 1
        return dist.all_gather(*arguments, **options)


def group_of(world, parts):
    """The ranks of this rank's offset; collective."""
    groups = [dist.new_group(list(range(o, world.size, parts))) for o in range(parts)]
    return groups[world.rank % parts]


def places_of(world, parts, start, count):
    """Places of a batch that this rank consumes, by the rule of the paper."""
    partitions, offset = world.size // parts, world.rank % parts
    return [start + i for i in range(count) if i % partitions * parts + offset == world.rank]


def check_batch(world, cut, batch, cursor):
    """A batch is what direct reading gives; returns the number of its samples on this rank."""
    places = [place for micro in batch.micros for place in micro.positions]
    assert places == places_of(world, cut.parts, batch.start.position, batch.samples)
    assert len(batch.micros) <= batch.passes
    box = tuple(slice(*held) for held in cut.ranges(SHAPE))
    order = SampleOrder(SAMPLES, cursor.seed)
    for micro in batch.micros:
        x, labels, target = micro.data
        for row, place in enumerate(micro.positions):
            (index,) = order.indices(batch.start.epoch, place, place + 1)
            whole = cubes()[index]
            assert np.array_equal(x[row], whole[box].astype(np.float32))
            assert np.array_equal(labels[row], (whole[0] % 3)[box[1:]])
            assert target[row].tolist() == [index] * 4
    return len(places)


def run_store(world, folder, sizes, monkey, *, cursor=None, group=None, **options):
    """All batches of three epochs, checked; what was read and sent on this rank."""
    cut = SlabCut(sizes, world.rank % SlabCut(sizes).parts)
    cursor = cursor or Cursor(SEED)
    source, messages = source_of(folder, cut), Messages()
    monkey.setattr(store_module, "dist", messages)
    store = SlabStore(
        source, BatchSplit(samples=BATCH, microbatch=1), group=group or group_of(world, cut.parts),
        cursor=cursor, epochs=EPOCHS, **options,
    )  # fmt: skip
    used, ahead, most = 0, [], 0
    for batch in store:
        used += check_batch(world, cut, batch, cursor)
        ahead.append(len(messages.posted))
        most = max(most, len(store._held))
    return SimpleNamespace(
        offset=cut.offset, loads=source.loads, sent=messages.sent, posted=messages.posted,
        gathered=messages.gathered, used=used, ahead=ahead, held=most, sizes=messages.sizes,
        nbytes=source.nbytes, store=store,
    )  # fmt: skip


def plain(found):
    del found.store
    return found


def once(results, parts):
    """T3.5 of the specification."""
    loads = Counter((r.offset, sample) for r in results for sample in r.loads)
    assert loads == {(o, s): 1 for o in range(parts) for s in range(SAMPLES)}
    for rank, found in enumerate(results):
        assert {peer % parts for peer, _ in found.sent + found.posted} <= {rank % parts}
        assert found.sizes == {found.nbytes}
        assert found.gathered == 1
    assert sum(len(r.sent) for r in results) == sum(len(r.posted) for r in results) > 0
    assert sum(r.used for r in results) == EPOCHS * SAMPLES * parts


@ranks(4, check=lambda results: once(results, 2))
def test_each_slab_is_read_once_in_three_epochs(world, folder):
    with pytest.MonkeyPatch.context() as monkey:
        return plain(run_store(world, folder, (2, 1, 1), monkey))


@ranks(8, check=lambda results: once(results, 4))
def test_samples_cut_in_depth_and_height(world, folder):
    with pytest.MonkeyPatch.context() as monkey:
        return plain(run_store(world, folder, (2, 2, 1), monkey))


def steps_of_the_run():
    """The samples of each batch of three epochs, in order of their positions."""
    for epoch in range(EPOCHS):
        for first in range(0, SAMPLES, BATCH):
            last = min(first + BATCH, SAMPLES)
            yield SampleOrder(SAMPLES, SEED).indices(epoch, first, last).tolist()


def expected_messages(partition, partitions):
    """By step, what a partition receives, if every slab stays with who read it first."""
    owner, steps = {}, []
    for samples in steps_of_the_run():
        moves = [
            (i % partitions, owner.setdefault(s, i % partitions)) for i, s in enumerate(samples)
        ]
        steps.append(sum(to == partition != home for to, home in moves))
    return steps


@ranks(2)
def test_the_messages_of_a_step_start_before_the_step_before_computes(world, folder):
    """Posted when batch t is given out: all messages up to those of step t + 1."""
    with pytest.MonkeyPatch.context() as monkey:
        found = run_store(world, folder, (), monkey)
    steps = expected_messages(world.rank, 2)
    assert sum(steps) > 4
    assert found.ahead == [sum(steps[: number + 2]) for number in range(len(steps))]


def resumed(results):
    """From the second batch of an epoch on: the rest of it, then what is left."""
    loads = Counter((r.offset, sample) for r in results for sample in r.loads)
    assert set(loads.values()) == {1}
    assert len(loads) == 2 * SAMPLES
    assert all(r.gathered == 1 for r in results)
    assert sum(r.used for r in results) == 2 * (2 * SAMPLES - BATCH)


@ranks(4, check=resumed)
def test_a_run_goes_on_in_the_middle_of_an_epoch(world, folder):
    with pytest.MonkeyPatch.context() as monkey:
        return plain(run_store(world, folder, (2, 1, 1), monkey, cursor=Cursor(SEED, 1, BATCH)))


# -- less memory than data ----------------------------------------------------------------------


def expected_reads(room):
    """Of two ranks that let the least recently used slab go: lists, the oldest in front."""
    held, reads = ([], []), 0
    for samples in steps_of_the_run():
        for i, sample in enumerate(samples):
            mine = next((h for h in held if sample in h), None)
            if mine is None:
                mine, reads = held[i % 2], reads + 1
            else:
                mine.remove(sample)
            mine.append(sample)
            del mine[: max(len(mine) - room, 0)]
    return reads


@ranks(2)
def test_what_does_not_fit_is_read_again(world, folder):
    """Room for 3 or 5 of 11 slabs on each rank, or for none."""
    nbytes = source_of(folder, SlabCut()).nbytes
    reads = {}
    for keep, room in (("first", 3), ("recent", 3), ("recent", 5), ("recent", 0)):
        with pytest.MonkeyPatch.context() as monkey:
            memory = room * nbytes + nbytes // 2
            found = run_store(world, folder, (), monkey, memory=memory, keep=keep)
        assert found.held == room
        assert found.gathered == 1
        total = torch.tensor([len(found.loads), len(found.sent)])
        dist.all_reduce(total)
        reads[keep, room], sent = total.tolist()
        assert sent or (keep, room) in (("recent", 3), ("recent", 0))
        if keep == "recent":
            assert reads[keep, room] == expected_reads(room)
    # "first": 6 of 11 are found in each later epoch, whatever the order.
    assert reads["first", 3] == EPOCHS * SAMPLES - (EPOCHS - 1) * 6
    assert reads["first", 3] < reads["recent", 3] < reads["recent", 0] == EPOCHS * SAMPLES


# -- with the rest of headway --------------------------------------------------------------------


@ranks(2)
def test_an_iteration_is_given_up_and_begun_anew(world, folder):
    with pytest.MonkeyPatch.context() as monkey:
        found = run_store(world, folder, (), monkey)
        assert len(list(found.store)) == 9  # filled, from the cursor again
        total = torch.tensor([len(found.loads)])
        dist.all_reduce(total)
        assert total == SAMPLES
        assert len(list(islice(iter(found.store), 4))) == 4
        for batch in found.store:
            check_batch(world, SlabCut(), batch, Cursor(SEED))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(280, 6), nn.Dropout(0.3), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x):
        return self.body(x.flatten(1) / 3000)


class Numbered(SlabSource):
    """Pairs (input, class)."""

    def batch(self, slabs):
        x, labels, _ = super().batch(slabs)
        return x.double(), labels[:, 0, 0, 0].long()


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


def numbered(folder):
    return Numbered(*source_of(folder, None).readers)


@ranks(2)
def test_training_on_a_store_equals_the_serial_run(world, folder):
    """With dropout, whose random numbers belong to places of the epoch; a ragged batch in each."""
    torch.manual_seed(SEED)
    model = Net().double()
    optimizer = adam(model)
    plan = data_parallel(BATCH, processes=2, microbatch=1, precision="float64")
    run = Executor(model, optimizer, loss=cross_entropy, plan=plan, seed=SEED, world=World.adopt())
    store = SlabStore(
        numbered(folder), plan.batch, group=group_of(world, 1), cursor=Cursor(SEED), epochs=2
    )
    history = [numbers(model, optimizer, run.step(batch)) for batch in store]
    serial = train_serially(
        Net, numbered(folder), cross_entropy, adam, batch=BATCH, steps=6, seed=SEED
    )
    for a, b in zip(serial, history, strict=True):
        error, name = largest_error(a, b)
        assert error < 1e-12, f"{name} differs by {error:.1e}"


@ranks(4)
def test_slabs_are_adopted_as_parts_of_a_sample(world, folder):
    """Two samples in halves of their depth: a convolution over the border is that of the whole."""
    pair = [dist.new_group([p, p + 1]) for p in (0, 2)][world.rank // 2]
    context = SpatialContext.of({-3: pair})
    source = source_of(folder, SlabCut((2, 1, 1), world.rank % 2))
    torch.manual_seed(1)
    model = nn.Conv3d(2, 3, 3, padding=1).double()
    store = SlabStore(
        source, BatchSplit(samples=2), group=group_of(world, 2), cursor=Cursor(SEED), epochs=1
    )
    for batch in store:
        for micro in batch.micros:
            indices = SampleOrder(SAMPLES, SEED).indices(0, *_ends(micro.positions))
            shape = source.shapes(len(indices))[0]
            x = context.adopt(micro.data[0].double(), shape)
            whole = model(torch.from_numpy(cubes()[indices]).double())
            assert (gather(model(x)) - whole).abs().max() < 1e-12 * whole.abs().max()


def _ends(places):
    assert len(places) == 1
    return places[0], places[0] + 1


# -- what goes wrong -----------------------------------------------------------------------------


@ranks(2)
def test_ranks_that_were_given_different_things(world, folder):
    mine, group = world.rank, group_of(world, 1)
    given = {"source": source_of(folder, None), "split": BatchSplit(samples=BATCH)}
    wrong = {
        "cursor": {"cursor": Cursor(SEED, 0, 4 * mine)},
        "slab": {"source": source_of(folder, SlabCut((2, 1, 1), mine))},
        "split": {"split": BatchSplit(samples=4 + mine)},
        "keep": {"keep": ["recent", "first"][mine]},
    }
    for name, options in wrong.items():
        with pytest.raises(DataError, match=f"differ in {name}\n"):
            SlabStore(**{**given, "group": group, "cursor": Cursor(SEED), **options})
    for text, options in {
        "uneven shares": {"split": BatchSplit(samples=4, shares=(3, 1))},
        "smaller than one batch": {"split": BatchSplit(samples=12)},
        "outside its data": {"cursor": Cursor(SEED, 0, 11)},
        "memory of the slab store": {"memory": "much"},
    }.items():
        with pytest.raises(DataError, match=text):
            SlabStore(**{**given, "group": group, "cursor": Cursor(SEED), **options})


def trouble(world, folder, what):
    """Rank 1 stops in the second epoch, before the steps that rank 0 goes on with."""
    store = SlabStore(
        source_of(folder, None), BatchSplit(samples=BATCH), group=group_of(world, 1),
        cursor=Cursor(SEED), timeout=0.5,
    )  # fmt: skip
    batches = iter(store)
    for _ in range(4):
        next(batches)
    if world.rank == 1:
        if what == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
        return None
    with pytest.raises((PeerLost, Stalled)) as caught:
        list(islice(batches, 10))
    if what == "stops":
        dist.barrier()
    assert not store._flight
    with pytest.raises(DataError, match="cannot go on"):
        next(iter(store))
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [("dies", "PeerLost", "rank 1 vanished"), ("stops", "Stalled", "rank 1 does not come")],
)
def test_a_rank_that_is_gone_is_named(folder, what, kind, text):
    found, nothing = run_ranks(2, trouble, folder, what, mortal=(1,) if what == "dies" else ())
    assert nothing is None
    assert found[0] == kind
    assert text in found[1]
    assert "the slab of sample" in found[1]


@ranks(2)
def test_a_damaged_file_is_named_on_the_rank_that_reads_it(world):
    if world.rank == 0:
        files(world.directory)
    dist.barrier()
    source, group = source_of(world.directory, None), group_of(world, 1)
    dist.barrier()
    (bad,) = SampleOrder(SAMPLES, SEED).indices(0, 1, 2)  # place 1: of rank 1
    path = world.directory / f"{bad}.hdf5"
    if world.rank == 0:
        path.write_bytes(path.read_bytes()[:1000])
    dist.barrier()
    store = SlabStore(source, BatchSplit(samples=2), group=group, cursor=Cursor(SEED), epochs=1)
    batches = iter(store)
    if world.rank == 0:
        next(batches)
    else:
        with pytest.raises(DataError, match=f"{bad}.hdf5: not a sound HDF5 file"):
            next(batches)
