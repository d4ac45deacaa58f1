"""single: files of which a rank reads its slab: readers, boxes, the source, and who owns what."""

from __future__ import annotations

import itertools
import pickle
import resource
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from headway.data import (
    Cursor,
    Hdf5Slabs,
    Loader,
    NpySlabs,
    SlabCut,
    SlabSource,
    Source,
    ZarrSlabs,
    as_source,
    slabs_in,
)
from headway.data.slabs import slab_source as readers_module
from headway.data.slabs.ownership import SlabOwnership
from headway.errors import DataError, MissingExtra
from headway.parallel.spatial import SpatialAxis, SpatialContext
from headway.plans import BatchSplit
from headway.run.step.memory import share_of_memory
from support.commands import command

SHAPE = (2, 7, 5, 4)
SAMPLES = 6


def cubes(dtype="int16"):
    """Whole samples, every number different."""
    return np.arange(SAMPLES * np.prod(SHAPE)).astype(dtype).reshape(SAMPLES, *SHAPE)


def h5_files(folder, data, dataset="full", **options):
    paths = [folder / f"{number}.hdf5" for number in range(len(data))]
    for path, sample in zip(paths, data, strict=True):
        with h5py.File(path, "w") as file:
            file.create_dataset(dataset, data=sample, **options)
            file.create_dataset("nested/unitPar", data=sample.reshape(-1)[:4].astype(np.float32))
    return paths


def h5_rows(folder, data):
    path = folder / "all.hdf5"
    with h5py.File(path, "w") as file:
        file.create_dataset("full", data=data, chunks=(1, 1, 3, 5, 4), compression="gzip")
    return path


def npy_files(folder, data):
    paths = [folder / f"{number}.npy" for number in range(len(data))]
    for path, sample in zip(paths, data, strict=True):
        np.save(path, sample)
    return paths


def npy_rows(folder, data):
    np.save(folder / "all.npy", data)
    return folder / "all.npy"


MAKE = {
    "hdf5 files": lambda folder, data: Hdf5Slabs(h5_files(folder, data), "full"),
    "hdf5 rows": lambda folder, data: Hdf5Slabs(h5_rows(folder, data), "full"),
    "npy files": lambda folder, data: NpySlabs(npy_files(folder, data)),
    "npy rows": lambda folder, data: NpySlabs(npy_rows(folder, data)),
}


@pytest.fixture(params=MAKE)
def make(request, tmp_path):
    return lambda data: MAKE[request.param](tmp_path, data)


# -- boxes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(), (3,), (2, 1, 1), (2, 2, 1), (1, 3, 2), (9, 1, 1)])
def test_the_boxes_of_all_offsets_tile_the_sample(sizes):
    seen = np.zeros(SHAPE, int)
    for offset in range(SlabCut(sizes).parts):
        seen[tuple(slice(*held) for held in SlabCut(sizes, offset).ranges(SHAPE))] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize("sizes", [(2, 1, 1), (2, 2, 1), (3, 2, 2), (1, 1, 4)])
def test_the_boxes_are_what_spatial_parallelism_owns(sizes):
    """Offsets count row by row, as the ranks of a plan's space axis do."""
    for offset, place in enumerate(itertools.product(*map(range, sizes))):
        axes = {dim - 3: SpatialAxis(None, sizes[dim], place[dim]) for dim in range(3)}
        context = SpatialContext(axes=axes)
        cut = SlabCut(sizes, offset)
        assert ((0, 8), *cut.ranges(SHAPE)) == context.ranges((8, *SHAPE))
        assert ((0, 8), *cut.ranges(SHAPE[1:])) == context.ranges((8, *SHAPE[1:]))


def test_what_has_fewer_dimensions_stays_whole():
    assert SlabCut((2, 2, 1), 3).ranges((4,)) == ((0, 4),)
    assert SlabCut((2, 2, 1), 3).ranges((4, 4)) == ((0, 4), (0, 4))


@pytest.mark.parametrize("wrong", [((2, 1, 1), 2), ((2,), -1), ((0, 1), 0)])
def test_a_part_that_does_not_exist(wrong):
    with pytest.raises(DataError, match="no part"):
        SlabCut(*wrong)


# -- parts -----------------------------------------------------------------------------------------


def test_a_part_of_a_source_says_how_large_the_whole_is(make):
    source = SlabSource(make(cubes()), finish=lambda parts: {"x": parts[0].float()}, memory="1 MiB")
    part = source.parted(SlabCut((2, 1, 2), 3))
    batch = part.read([4, 1])
    assert batch.extents == SHAPE[1:]
    whole = torch.from_numpy(cubes()[[4, 1]]).float()
    assert torch.equal(batch.data["x"], whole[:, :, 4:, :, 2:])
    assert torch.equal(source.read([4, 1])["x"], whole)
    assert (part.memory, part.slabs_read, source.slabs_read) == ("1 MiB", 2, 2)
    assert part.bytes_read == 2 * 2 * 3 * 5 * 2 * 2  # samples, channels, D, H, W, bytes


def test_a_source_that_cannot_be_cut(tmp_path):
    full = NpySlabs(npy_rows(tmp_path, cubes()))
    with pytest.raises(DataError, match="cut already"):
        SlabSource(full, cut=SlabCut((2, 1, 1), 1)).parted(SlabCut((2, 1, 1), 0))
    np.save(tmp_path / "coarse.npy", np.zeros((SAMPLES, 3, 2, 2)))
    coarse = NpySlabs(tmp_path / "coarse.npy")
    with pytest.raises(DataError, match="of one extent"):
        SlabSource(full, coarse).parted(SlabCut((2, 1, 1), 0))
    with pytest.raises(DataError, match="of one extent"):
        SlabSource(full).parted(SlabCut((1, 1, 1, 1, 2), 0))


def test_a_rank_may_fill_half_of_its_share_of_the_machine_and_of_its_limit(monkeypatch):
    whole = share_of_memory(1)
    assert 2**28 < whole < 2**50
    assert share_of_memory(4) == pytest.approx(whole / 4, abs=2)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2**20, 2**30))
    assert share_of_memory(4) == 2**19


def test_the_arrays_of_a_folder(tmp_path):
    h5_files(tmp_path, cubes())
    for name in ("full", "nested/unitPar"):
        (reader,) = slabs_in(tmp_path, name)
        assert len(reader) == SAMPLES
    np.save(tmp_path / "full.npy", cubes()[:3])
    assert len(slabs_in(tmp_path, "full")[0]) == 3
    with pytest.raises(DataError, match=r"unitPar\.npy"):
        slabs_in(tmp_path, "full", "unitPar")


# -- readers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int16", "float32", ">i2", "uint8"])
def test_a_reader_gives_the_numbers_of_the_box(make, dtype):
    data = cubes(dtype)
    reader = make(data)
    assert (len(reader), reader.shape) == (SAMPLES, SHAPE)
    assert reader.dtype == np.dtype(dtype).newbyteorder("=")
    boxes = [SlabCut((3, 2, 1), offset).ranges(SHAPE) for offset in range(6)]
    boxes.append(((0, 2), (4, 4), (0, 5), (0, 4)))  # of a rank that owns nothing
    for sample, box in itertools.product((0, 3, SAMPLES - 1), boxes):
        found = reader.read(sample, box)
        assert np.array_equal(found, data[(sample, *(slice(*held) for held in box))])
        assert found.dtype == reader.dtype
        assert found.flags.owndata or found.base.flags.owndata
        assert found.flags.writeable


def test_a_reader_crosses_a_process_border(make):
    reader = pickle.loads(pickle.dumps(make(cubes())))
    assert np.array_equal(reader.read(1, [(0, n) for n in SHAPE]), cubes()[1])


@pytest.mark.parametrize("sample", [-1, SAMPLES])
def test_a_sample_that_does_not_exist(make, sample):
    with pytest.raises(DataError, match=rf"of sample {sample}\n.*6 samples of shape \(2, 7, 5, 4"):
        make(cubes()).read(sample, [(0, n) for n in SHAPE])


@pytest.mark.parametrize("box", [[(0, 2), (0, 8), (0, 5), (0, 4)], [(0, 2)], [(-1, 1)] * 4])
def test_a_box_that_reaches_beyond_is_no_shorter_box(make, box):
    with pytest.raises(DataError, match="no box"):
        make(cubes()).read(0, box)


def test_hdf5_takes_only_the_bytes_of_the_slab_from_the_system(tmp_path):
    """Counted by the kernel: all that the process has read, with the headers of the file."""
    shape = (2, 64, 32, 32)
    paths = h5_files(tmp_path, np.ones((1, *shape), np.int16))
    reader = Hdf5Slabs(paths, "full")
    counts = []
    for parts in (1, 4, 16):
        before = taken()
        reader.read(0, SlabCut((parts, 1, 1), parts - 1).ranges(shape))
        counts.append(taken() - before)
    whole = 2 * np.prod(shape)
    headers = 4096
    for count, parts in zip(counts, (1, 4, 16), strict=True):
        assert whole // parts <= count <= whole // parts + headers


def taken():
    """Bytes that this process has read with system calls."""
    path = Path("/proc/self/io")
    if not path.exists():
        pytest.skip("no /proc/self/io")
    return int(path.read_text().split()[1])


def test_npy_takes_only_the_slab_out_of_the_map(tmp_path, monkeypatch):
    asked = []

    class Noted:
        def __init__(self, array):
            self.array, self.shape, self.dtype = array, array.shape, array.dtype

        def __getitem__(self, box):
            asked.append(self.array[box].nbytes)
            return self.array[box]

    whole = readers_module.open_npy
    reader = NpySlabs(npy_files(tmp_path, cubes()))
    monkeypatch.setattr(readers_module, "open_npy", lambda path: Noted(whole(path)))
    reader.read(2, SlabCut((7, 1, 1), 3).ranges(SHAPE))
    assert asked == [2 * np.prod(SHAPE) // 7]


# -- files that are not what they should be ------------------------------------------------------


def said(action, *texts):
    """The error of an action has these texts."""
    with pytest.raises(DataError) as caught:
        action()
    for text in texts:
        assert text in str(caught.value), str(caught.value)


BOX = [(0, n) for n in SHAPE]


def test_a_missing_data_set_is_named_with_those_that_are_there(tmp_path):
    paths = h5_files(tmp_path, cubes())
    said(lambda: Hdf5Slabs(paths, "fall"), str(paths[0]), "'fall'", "'full', 'nested/unitPar'")
    said(lambda: Hdf5Slabs(paths, "nested"), str(paths[0]), "'nested'", "no array")


def test_a_later_file_without_the_data_set(tmp_path):
    paths = h5_files(tmp_path, cubes())
    reader = Hdf5Slabs(paths, "full")
    with h5py.File(paths[4], "w") as file:
        file["other"] = [1]
    assert np.array_equal(reader.read(3, BOX), cubes()[3])
    said(lambda: reader.read(4, BOX), str(paths[4]), "no data set 'full'", "'other'")


@pytest.mark.parametrize("change", [lambda a: a[:, :6], lambda a: a.astype(np.float32)])
def test_another_shape_or_type_in_a_later_file(tmp_path, change):
    data = list(cubes())
    data[4] = change(data[4])
    expected = "Expected are shape (2, 7, 5, 4) and type int16"
    hdf5, npy = h5_files(tmp_path, data), npy_files(tmp_path, data)
    said(lambda: Hdf5Slabs(hdf5, "full").read(4, BOX), f"{hdf5[4]}, data set 'full'", expected)
    said(lambda: NpySlabs(npy).read(4, BOX), str(npy[4]), expected)


@pytest.mark.slow
def test_zarr(tmp_path):
    done = command(sys.executable, "-m", "support.zarr_slabs", str(tmp_path), cwd=tmp_path)
    assert done.code == 0, done.err


def test_without_zarr_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(MissingExtra, match=r"pip install headway\[zarr\]"):
        ZarrSlabs(tmp_path)


def test_a_shape_that_was_asked_for(tmp_path):
    paths = h5_files(tmp_path, cubes())
    assert Hdf5Slabs(paths, "full", shape=SHAPE).shape == SHAPE
    asked = "Expected are shape (4, 8, 8, 8)"
    said(lambda: Hdf5Slabs(paths, "full", shape=(4, 8, 8, 8)), str(paths[0]), asked)
    said(lambda: NpySlabs(npy_rows(tmp_path, cubes()), shape=(4, 8, 8, 8)), "all.npy", asked)


def test_a_missing_file(make, tmp_path):
    reader = make(cubes())
    path = reader.paths[-1]
    path.unlink()
    said(lambda: reader.read(SAMPLES - 1, BOX), str(path), "cannot be read")


@pytest.mark.parametrize("left", [0, 40, 0.6])
def test_a_file_that_was_cut_short(make, left):
    reader = make(cubes())
    path = reader.paths[-1]
    whole = path.read_bytes()
    path.write_bytes(whole[: left if isinstance(left, int) else int(left * len(whole))])
    said(lambda: reader.read(SAMPLES - 1, BOX), str(path), "not a sound", "cut short")


def test_a_damaged_chunk(tmp_path):
    paths = h5_files(tmp_path, cubes(), chunks=SHAPE, fletcher32=True)
    reader = Hdf5Slabs(paths, "full")
    whole = bytearray(paths[2].read_bytes())
    whole[whole.index(cubes()[2].tobytes()) + 100] ^= 1
    paths[2].write_bytes(whole)
    said(lambda: reader.read(2, BOX), str(paths[2]), "not a sound HDF5 file")


def test_no_numbers_and_no_files(tmp_path):
    with h5py.File(tmp_path / "text.hdf5", "w") as file:
        file["full"] = np.array([b"a", b"b"])
    said(lambda: Hdf5Slabs(tmp_path / "text.hdf5", "full"), "text.hdf5", "|S1")
    said(lambda: NpySlabs([]), "no files")


def test_without_h5py_the_extra_is_named(tmp_path, monkeypatch):
    def absent(name):
        raise ImportError(f"No module named {name!r}")

    paths = h5_files(tmp_path, cubes())
    monkeypatch.setattr(readers_module.importlib, "import_module", absent)
    with pytest.raises(MissingExtra, match=r"pip install headway\[hdf5\]"):
        Hdf5Slabs(paths, "full")


# -- the source ----------------------------------------------------------------------------------


def cosmo(folder, cut, **options):
    """Input cut, labels of three dimensions cut likewise, target of four numbers whole."""
    data = cubes()
    paths = h5_files(folder, data)
    np.save(folder / "labels.npy", data[:, 0].astype(np.uint8))
    readers = (
        Hdf5Slabs(paths, "full"),
        NpySlabs(folder / "labels.npy"),
        Hdf5Slabs(paths, "nested/unitPar"),
    )
    return SlabSource(*readers, cut=cut, **options)


@pytest.mark.parametrize(("sizes", "offset"), [((), 0), ((3, 1, 1), 1), ((2, 2, 1), 3)])
def test_a_source_gives_slabs_labels_and_whole_targets(tmp_path, sizes, offset):
    cut = SlabCut(sizes, offset)
    source = cosmo(tmp_path, cut)
    assert isinstance(source, Source)
    assert as_source(source) is source
    x, labels, target = source.read([4, 1])
    box = tuple(slice(*held) for held in cut.ranges(SHAPE))
    data = cubes()[[4, 1]]
    assert np.array_equal(x, data[(slice(None), *box)])
    assert np.array_equal(labels, data[:, 0].astype(np.uint8)[(slice(None), *box[1:])])
    assert np.array_equal(target, data.reshape(2, -1)[:, :4].astype(np.float32))
    assert (x.dtype, labels.dtype, target.dtype) == (torch.int16, torch.uint8, torch.float32)
    sizes = [x[0].numel() * 2, labels[0].numel(), 16]
    assert (source.slabs_read, source.bytes_read) == (2, 2 * sum(sizes))
    assert source.shapes(2) == ((2, *SHAPE), (2, *SHAPE[1:]), (2, 4))


def test_what_is_delivered_is_finished_per_batch(tmp_path):
    source = cosmo(tmp_path, None, finish=lambda parts: (parts[0].float().log1p(), parts[2]))
    x, target = source.read([2])
    assert torch.equal(x[0], torch.from_numpy(cubes()[2]).float().log1p())
    assert target.shape == (1, 4)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_reads_slabs(tmp_path, workers):
    source = cosmo(tmp_path, SlabCut((2, 1, 1), 1))
    cursor = Cursor(seed=3)
    with Loader(
        source, BatchSplit(samples=4), rank=1, ranks=2, cursor=cursor, epochs=1, workers=workers
    ) as loader:
        batches = list(loader)
    shapes = [tuple(micro.data[0].shape) for batch in batches for micro in batch.micros]
    assert shapes == [(2, 2, 3, 5, 4), (1, 2, 3, 5, 4)]


def test_readers_that_do_not_belong_together(tmp_path):
    long, short = NpySlabs(npy_rows(tmp_path, cubes())), NpySlabs(npy_files(tmp_path, cubes()[:2]))
    said(lambda: SlabSource(long, short), "unequal length", "6, 2 samples")
    said(lambda: SlabSource(), "no readers")


# -- who owns what -------------------------------------------------------------------------------


def test_the_consumer_is_the_rule_of_the_paper():
    """Rank ((i mod mb) mod partitions) k + offset, here of 3 partitions of 4 ranks, mb = 5."""
    owners = SlabOwnership([9] * 3, "first")
    found = [4 * m.consumer + 2 for _ in range(2) for m in owners.plan(range(5))]
    assert found == [2, 6, 10, 2, 6, 2, 6, 10, 2, 6]


def test_who_reads_first_owns_and_sends():
    owners = SlabOwnership([9, 9], "recent")
    assert [(m.owner, m.consumer, m.kept) for m in owners.plan([5, 3, 8])] == [
        (None, 0, True),
        (None, 1, True),
        (None, 0, True),
    ]
    assert [(m.owner, m.consumer, m.kept) for m in owners.plan([3, 8, 5])] == [
        (1, 0, False),
        (0, 1, False),
        (0, 0, False),
    ]
    assert [owners.held(0), owners.held(1)] == [[5, 8], [3]]


def test_the_least_recently_used_gives_way():
    owners = SlabOwnership([2], "recent")
    owners.plan([0, 1])
    owners.plan([0])
    move = owners.plan([2])[0]
    assert (move.kept, move.gone, owners.held(0)) == (True, 1, [0, 2])


def test_what_came_first_stays():
    owners = SlabOwnership([2], "first")
    owners.plan([0, 1])
    move = owners.plan([2])[0]
    assert (move.kept, move.gone, owners.held(0)) == (False, None, [0, 1])


@pytest.mark.parametrize("keep", ["recent", "first"])
def test_nothing_is_kept_where_there_is_no_room(keep):
    move = SlabOwnership([0], keep).plan([7])[0]
    assert (move.owner, move.kept, move.gone) == (None, False, None)
