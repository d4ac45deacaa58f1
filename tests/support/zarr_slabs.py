"""Checks of slabs in zarr arrays, in a process of their own: the threads of zarr never end.

python -m support.zarr_slabs FOLDER
"""

from __future__ import annotations

import itertools
import pickle
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from headway.data import SlabCut, SlabSource, ZarrSlabs, slabs_in
from headway.errors import DataError
from headway.plans import LayerSplit, data_parallel
from headway.run.step.batch import rank_source

SHAPE, SAMPLES = (2, 7, 5, 4), 4


def cubes(dtype="int16"):
    return np.arange(SAMPLES * np.prod(SHAPE)).astype(dtype).reshape(SAMPLES, *SHAPE)


def made(folder, data):
    """The same samples as arrays of their own, and as rows of an array in a group."""
    import zarr

    folder.mkdir()
    paths = [folder / f"{number}.zarr" for number in range(SAMPLES)]
    for path, sample in zip(paths, data, strict=True):
        zarr.save_array(path, sample)
    group = zarr.open_group(folder / "all.zarr", mode="w")
    group.create_array("full", data=data, chunks=(1, 1, 3, 5, 4))
    return ZarrSlabs(paths), ZarrSlabs(folder / "all.zarr", "full")


def boxes(tmp_path):
    for dtype in ("int16", ">i2", "float32"):
        for reader in made(tmp_path / dtype, cubes(dtype)):
            reader = pickle.loads(pickle.dumps(reader))
            assert (len(reader), reader.shape) == (SAMPLES, SHAPE)
            for sample, offset in itertools.product(range(SAMPLES), range(6)):
                box = SlabCut((3, 2, 1), offset).ranges(SHAPE)
                found = reader.read(sample, box)
                assert np.array_equal(found, cubes(dtype)[(sample, *(slice(*b) for b in box))])
                assert found.dtype == reader.dtype == np.dtype(dtype).newbyteorder("=")


def a_folder_of_arrays_in_parts(tmp_path):
    import zarr

    zarr.save_array(tmp_path / "full.zarr", cubes())
    source = SlabSource(*slabs_in(tmp_path, "full"))
    plan = data_parallel(2, processes=2, split=LayerSplit(spatial=(1, 2, 1)))
    batch = rank_source(source, plan, 1).read([3, 0])
    assert np.array_equal(batch.data.numpy(), cubes()[[3, 0]][:, :, :, 3:])
    assert batch.extents == SHAPE[1:]


def arrays_that_are_missing_or_damaged(tmp_path):
    import zarr

    arrays, rows = made(tmp_path / "made", cubes())
    box = [(0, n) for n in SHAPE]
    with pytest.raises(DataError, match=r"all\.zarr"):
        ZarrSlabs(tmp_path / "made" / "all.zarr", "other")
    for path in (tmp_path / "made" / "all.zarr" / "full").rglob("c/2/*/*/*/*"):
        path.write_bytes(path.read_bytes()[:7])
    with pytest.raises(DataError, match=r"all\.zarr, array 'full'|not a sound zarr array"):
        rows.read(2, box)
    shutil.rmtree(arrays.paths[1])
    with pytest.raises(DataError, match=r"1\.zarr.*cannot be read|cannot be read"):
        arrays.read(1, box)
    shutil.rmtree(arrays.paths[0])
    zarr.save_array(arrays.paths[0], cubes("float32")[0])
    with pytest.raises(DataError, match="Expected are shape"):
        arrays.read(0, box)


if __name__ == "__main__":
    boxes(Path(sys.argv[1]))
    a_folder_of_arrays_in_parts(Path(sys.argv[1]))
    arrays_that_are_missing_or_damaged(Path(sys.argv[1]))
