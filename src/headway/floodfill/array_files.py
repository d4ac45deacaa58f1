"""Volumes by the name of their file, read and written box by box.

| name | what it is |
|---|---|
| "FILE.npy", "FILE.npz:NAME" | NumPy's; an .npz file is read whole, and not written |
| "FILE.h5:NAME" | a data set of an HDF5 file |
| "FOLDER.zarr", "FOLDER.zarr:NAME" | a zarr array, or one in a group |
| "precomputed:FOLDER" | Neuroglancer's layout, `precomputed.py` |
| "tubes:Z,Y,X,SEED", "tubes-labels:Z,Y,X,SEED" | a made volume and its bodies, `tubes.py` |
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from headway.data.source import open_npy
from headway.errors import DataError, MissingExtra, UsageError
from headway.floodfill.network import Triple
from headway.floodfill.precomputed import PREFIX, PrecomputedReader, PrecomputedWriter
from headway.floodfill.tubes import make_tubes

_CHUNK = 64
_WHITE = 255
_HDF5 = (".h5", ".hdf5", ".hdf", ".he5")
_DATASET = "segmentation"
_FORMS = 'Give "FILE.h5:NAME", "FILE.npy", "FOLDER.zarr" or "precomputed:FOLDER"'


def open_array(name: str) -> Any:
    """Something that is sliced like an array; files are read as they are sliced.

    Raises:
        DataError: There is no such array.
        MissingExtra: A package for this kind of file is not installed.
    """
    path, key = _parts(name)
    try:
        if path in ("tubes", "tubes-labels"):
            return _of_tubes(path, key)
        if path == PREFIX:
            return PrecomputedReader(Path(key))
        if not Path(path).exists():
            raise ValueError("No such file or directory")
        if path.endswith((".npy", ".npz")):
            return _of_numpy(path, key)
        return _of_zarr(path, key) if Path(path).is_dir() else _of_hdf5(path, key)
    except (OSError, KeyError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else None
        raise DataError(
            "an array cannot be read",
            where=name,
            why=why or str(error.args[0] if error.args else error),
            fix=f'{_FORMS}; also "FILE.npz:NAME".',
        ) from error


def _parts(name: str) -> tuple[str, str]:
    path, _, key = name.partition(":")
    # As viewers have it: precomputed://file:///data/segments.
    return path, key.removeprefix("//").removeprefix("file://") if path == PREFIX else key


def _of_numpy(path: str, key: str) -> Any:
    if path.endswith(".npy"):
        return open_npy(Path(path))
    loaded = np.load(path)
    return loaded[_chosen(list(loaded.files), key)]


def _h5py() -> Any:
    try:
        import h5py
    except ImportError as error:
        raise MissingExtra("h5py is not installed", fix='pip install "headway[hdf5]"') from error
    return h5py


def _of_hdf5(path: str, key: str) -> Any:
    h5py = _h5py()
    file = h5py.File(path)
    names: list[str] = []
    file.visititems(lambda n, v: names.append(n) if isinstance(v, h5py.Dataset) else None)
    return file[_chosen(names, key)]


def _zarr() -> Any:
    try:
        import zarr
    except ImportError as error:
        raise MissingExtra("zarr is not installed", fix='pip install "headway[zarr]"') from error
    return zarr


def _of_zarr(path: str, key: str) -> Any:
    zarr = _zarr()
    try:
        found = zarr.open(path, mode="r")
    except FileNotFoundError as error:
        raise ValueError("The folder is no zarr array or group") from error
    if not isinstance(found, zarr.Group):
        if key:
            raise ValueError(f"It is one array, which has no {key!r} in it")
        return found
    return found[_chosen(sorted(found.array_keys()), key)]


def _of_tubes(path: str, key: str) -> Any:
    z, y, x, *seed = (int(number) for number in key.split(","))
    volume = make_tubes((z, y, x), seed=seed[0] if seed else 0)
    return volume.image if path == "tubes" else volume.labels


def _chosen(names: list[str], key: str) -> str:
    held = ", ".join(names) or "no arrays"
    if key:
        if key not in names:
            raise ValueError(f"There is no {key!r}; it holds {held}")
        return key
    if len(names) != 1:
        raise ValueError(f"It holds {held}, and no name was given")
    return names[0]


def check_new(name: str) -> None:
    """Refuse a volume that cannot be made.

    Raises:
        UsageError: It exists, or is of no kind that is written.
    """
    path = _target(name)
    if path.exists():
        raise UsageError("exists already", where=str(path), fix="Name another one, or delete it.")
    if not path.parent.is_dir():
        raise UsageError("there is no such folder", where=str(path.parent))
    if _parts(name)[0] != PREFIX and path.suffix not in (*_HDF5, ".npy", ".zarr"):
        raise UsageError("volumes of this kind are not written", where=name, fix=f"{_FORMS}.")
    if path.suffix in _HDF5:
        _h5py()
    if path.suffix == ".zarr":
        _zarr()


def _target(name: str) -> Path:
    path, key = _parts(name)
    return Path(key if path == PREFIX else path)


@contextmanager
def new_array(
    name: str,
    shape: Triple,
    dtype: Any,
    *,
    voxel: tuple[float, float, float],
    facts: Mapping[str, Any],
) -> Iterator[Any]:
    """A volume that boxes are assigned to; it has its name once the block ends without an error.

    Args:
        voxel: Size of a voxel in nm, for z, y, x.
        facts: Kept as attributes (HDF5, zarr) or in `provenance.json` (precomputed).

    Raises:
        UsageError: See `check_new`.
    """
    check_new(name)
    path, (head, key) = _target(name), _parts(name)
    aside = path.with_name(f"{path.name}.part{path.suffix}")
    if aside.is_dir():
        shutil.rmtree(aside)
    aside.unlink(missing_ok=True)
    attributes = {**facts, "voxel_nm": list(voxel)}
    chunks = tuple(min(size, _CHUNK) for size in shape)
    if head == PREFIX:
        yield PrecomputedWriter(aside, shape, dtype, voxel=voxel, facts=facts)
    elif path.suffix == ".npy":
        yield (array := np.lib.format.open_memmap(aside, "w+", dtype, shape))
        array.flush()
    elif path.suffix == ".zarr":
        made = {"shape": shape, "dtype": dtype, "chunks": chunks, "attributes": attributes}
        store = {"store": str(aside), **({"name": key} if key else {})}
        yield _zarr().create_array(**store, **made)
    else:
        with _h5py().File(aside, "w") as file:
            data = file.create_dataset(
                key or _DATASET, shape, dtype, chunks=chunks, compression="gzip", shuffle=True
            )
            data.attrs.update(attributes)
            yield data
    aside.rename(path)


def check_image(image: Any, name: str, fov: Triple) -> None:
    """Refuse what the network cannot segment.

    Raises:
        DataError: With what was found and what is expected.
    """
    why = ""
    kind = np.dtype(image.dtype)
    if len(image.shape) != 3:
        why = f"It has {len(image.shape)} dimensions, of sizes {tuple(image.shape)}; expected are 3"
    elif kind != np.uint8 and kind.kind != "f":
        why = f"Its numbers are {kind}; expected are uint8, or floats from 0 to 255"
    elif any(size < needed for size, needed in zip(image.shape, fov, strict=True)):
        shown = " x ".join(map(str, image.shape)), " x ".join(map(str, fov))
        why = f"It is {shown[0]} voxels, and the field of view {shown[1]}"
    if why:
        raise DataError("no image that can be segmented", where=name, why=f"{why}.")


def check_ids(labels: Any, name: str) -> None:
    """Refuse what cannot be the ids of segments or bodies.

    Args:
        labels: As of `open_array`.

    Raises:
        DataError: Its numbers are not whole.
    """
    kind = np.dtype(labels.dtype)
    if kind.kind not in "iub":
        raise DataError(
            "these are no ids of segments or bodies",
            where=name,
            why=f"Its numbers are {kind}; expected are integers, with 0 for none.",
            fix="Name the dataset with the ids, or write it with integers: "
            "volume.astype('uint32').",
        )


def check_grey_values(voxels: Any, name: str) -> None:
    """Refuse floats that are no grey values from 0 to 255.

    With others no object would begin, and nobody would know why.

    Args:
        voxels: [z, y, x], as of `open_array`.

    Raises:
        DataError: With what was found.
    """
    if np.dtype(voxels.dtype).kind != "f":
        return
    # A chunk's planes at a time; all of it is read, a moment beside what follows.
    planes = (np.asarray(voxels[z : z + _CHUNK]) for z in range(0, voxels.shape[0], _CHUNK))
    lows, highs = zip(*((part.min(), part.max()) for part in planes), strict=True)
    low, high = float(np.min(lows)), float(np.max(highs))
    why = ""
    if not math.isfinite(high - low):
        why = "There are voxels that are no number, or infinite"
    elif 0 < high <= 1:
        why = f"The largest one is {high:g}: these seem to be floats from 0 to 1"
    elif high >= 2 * _WHITE:
        why = f"The largest one is {high:g}"
    if why:
        raise DataError(
            "the voxels are no grey values", where=name, why=f"{why}.",
            fix=f"Write the volume with numbers from 0 to {_WHITE}.",
        )  # fmt: skip
