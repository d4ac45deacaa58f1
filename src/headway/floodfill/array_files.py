"""Arrays by the name of their file: "FILE.npy", "FILE.npz:NAME", "FILE.h5:NAME"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from headway.errors import DataError, MissingExtra


def open_array(name: str) -> Any:
    """Something that is sliced like an array; HDF5 is read as it is sliced.

    Raises:
        DataError: There is no such array.
        MissingExtra: h5py is not installed.
    """
    path, _, key = name.partition(":")
    try:
        if path.endswith((".npy", ".npz")):
            return _of_numpy(path, key)
        return _of_hdf5(path, key)
    except (OSError, KeyError, ValueError) as error:
        raise DataError(
            "an array cannot be read",
            where=name,
            why=error.strerror or str(error) if isinstance(error, OSError) else str(error),
            fix='Give "FILE.npy", "FILE.npz:NAME" or "FILE.h5:NAME".',
        ) from error


def _of_numpy(path: str, key: str) -> Any:
    loaded = np.load(path, mmap_mode="r")
    if isinstance(loaded, np.ndarray):
        return loaded
    return loaded[_only(list(loaded.files), key)]


def _of_hdf5(path: str, key: str) -> Any:
    try:
        import h5py
    except ImportError as error:
        raise MissingExtra("h5py is not installed", fix='pip install "headway[hdf5]"') from error
    if not Path(path).exists():
        raise ValueError("no such file")
    file = h5py.File(path)
    return file[_only([n for n, v in file.items() if isinstance(v, h5py.Dataset)], key)]


def _only(names: list[str], key: str) -> str:
    if key:
        return key
    if len(names) != 1:
        raise ValueError(f"it holds {', '.join(names) or 'no arrays'}, and no name was given")
    return names[0]
