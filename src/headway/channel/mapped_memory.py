"""Tensors in mapped files: for tables that are larger than the memory that they may take.

A file is scratch: it has no name, so that nothing of it is left when the process ends in whatever
way, and its room on the disk is reserved at once, so that a full disk is an error here and not a
signal at some later write. What lies in it counts as resident while it is mapped in; `drop` maps it
out again. The kernel may keep it in its page cache, from which it takes it back when it needs room.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headway.errors import RunError
from headway.units import format_bytes

_DROP_SECONDS = 0.005
"""How often what a model's constructor has written is mapped out."""

_FILES: WeakValueDictionary[int, MappedFile] = WeakValueDictionary()
"""Address of a mapping -> the file."""


class MappedFile(mmap.mmap):
    """A mapped file without a name; tensors over it keep it alive.

    Attributes:
        folder: The directory that it was made in; empty: that of temporary files.
    """

    descriptor: int
    folder: str

    def __del__(self) -> None:
        os.close(self.descriptor)

    # Beside the mapping, in the same pages of the kernel: on the machine measured, a row costs a
    # quarter of what mapping its page in and out costs, and nothing becomes resident.

    def read_stretches(self, starts: Sequence[int], sizes: Sequence[int], into: bytearray) -> None:
        """Read stretches of bytes, one behind the other."""
        view = self._fetched(starts, sizes, into)
        at = 0
        for start, size in zip(starts, sizes, strict=True):
            os.preadv(self.descriptor, (view[at : at + size],), start)
            at += size

    def write_stretches(self, starts: Sequence[int], sizes: Sequence[int], data: bytearray) -> None:
        """Write stretches of bytes that lie one behind the other."""
        view = self._fetched(starts, sizes, data)
        at = 0
        for start, size in zip(starts, sizes, strict=True):
            os.pwrite(self.descriptor, view[at : at + size], start)
            at += size

    def _fetched(self, starts: Sequence[int], sizes: Sequence[int], data: bytearray) -> memoryview:
        # Pages are read for what is written, too, and all of them at the same time.
        for start, size in zip(starts, sizes, strict=True):
            os.posix_fadvise(self.descriptor, start, size, os.POSIX_FADV_WILLNEED)
        return memoryview(data)

    def drop(self) -> None:
        """Map all of it out of this process; nothing is lost."""
        self.madvise(mmap.MADV_DONTNEED)


def mapped_tensor(
    shape: Sequence[int], dtype: torch.dtype, folder: str = "", *, what: str = "a table"
) -> Tensor:
    """Zeros in a new mapped file.

    Args:
        folder: Where the file lies; empty: the directory of temporary files.
        what: For the error.

    Raises:
        RunError: The directory cannot be written, or its disk has not so much room.
    """
    size = max(math.prod(shape) * dtype.itemsize, 1)
    place = folder or tempfile.gettempdir()
    try:
        with tempfile.TemporaryFile(dir=place, buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, size)
            found = MappedFile(file.fileno(), size)
            found.descriptor, found.folder = os.dup(file.fileno()), folder
    except OSError as error:
        raise _no_room(what, place, size, error) from error
    found.madvise(mmap.MADV_RANDOM)
    flat = torch.frombuffer(found, dtype=torch.uint8)
    _FILES[flat.untyped_storage().data_ptr()] = found
    return flat[: math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))


def _no_room(what: str, folder: str, size: int, error: OSError) -> RunError:
    why = f"{error.strerror}; it needs {format_bytes(size)}"
    try:
        free = os.statvfs(folder)
        missing = size - free.f_bavail * free.f_frsize
        if missing > 0:
            why += f", and {format_bytes(missing)} of that are missing"
    except OSError:
        pass  # there is no such directory: the error says so
    return RunError(
        f"the file of {what} cannot be made",
        where=folder,
        why=why,
        fix="Let cold name a directory of a disk with room, or hold more of it in memory (hot).",
    )


def file_of(tensor: Tensor) -> MappedFile | None:
    """The mapped file in which a tensor lies; None: ordinary memory."""
    if type(tensor) not in (Tensor, nn.Parameter):  # a DTensor has no memory that one could ask of
        return None
    return _FILES.get(tensor.untyped_storage().data_ptr())


def drop(tensor: Tensor) -> None:
    """Map a tensor out of this process, if it lies in a mapped file."""
    file = file_of(tensor)
    if file is not None:
        file.drop()


def into_file(tensor: Tensor, folder: str = "", *, what: str = "a table") -> Tensor:
    """A tensor in a mapped file with these values: itself where it lies in one."""
    if file_of(tensor) is not None:
        return tensor.detach()
    found = mapped_tensor(tensor.shape, tensor.dtype, folder, what=what)
    copy_rows(found, tensor.detach())
    return found


def copied(tensor: Tensor) -> Tensor:
    """A copy of a tensor that lies in a mapped file, in a file beside it."""
    file = file_of(tensor)
    assert file is not None
    found = mapped_tensor(tensor.shape, tensor.dtype, file.folder, what="a copy for a checkpoint")
    copy_rows(found, tensor)
    return found


def copy_rows(to: Tensor, source: Tensor) -> None:
    """Copy a tensor; what of either lies in a mapped file never becomes resident as a whole."""
    if not to.dim():
        to.copy_(source)
        return
    for part in row_chunks(to):
        to[part] = source[part]
        drop(to)
        drop(source)


def row_chunks(tensor: Tensor, size: int = 16 << 20) -> Iterator[slice]:
    """Ranges of rows of about `size` bytes each."""
    rows = max(1, size * len(tensor) // max(1, tensor.nbytes))
    for start in range(0, len(tensor), rows):
        yield slice(start, start + rows)


class _LargeTensorsInFiles(TorchFunctionMode):
    """Torch's functions that make memory make it in files where it is large."""

    def __init__(self, above: int, folder: str) -> None:
        super().__init__()
        self._above, self._folder = above, folder
        self.files: list[MappedFile] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _MAKERS:
            return func(*args, **kwargs)
        # What it would be, without memory.
        form = func(*args, **{**kwargs, "device": "meta", "pin_memory": False})
        asked = torch.device(kwargs.get("device") or (args[0].device if func in _LIKE else _here()))
        if asked.type != "cpu" or not form.is_floating_point() or form.nbytes < self._above:
            return func(*args, **kwargs)
        found = mapped_tensor(form.shape, form.dtype, self._folder, what="a tensor of the model")
        file = file_of(found)
        assert file is not None
        self.files.append(file)
        if func is torch.full_like:
            value = kwargs.get("fill_value", args[1] if len(args) > 1 else 0)
            if value:
                found.fill_(value)
        return found.requires_grad_(form.requires_grad)


_LIKE = (torch.empty_like, torch.zeros_like, torch.full_like)
_MAKERS = (torch.empty, torch.zeros, *_LIKE)


def _here() -> torch.device:
    return torch.get_default_device()


@contextmanager
def large_tensors_in_files(above: int, folder: str = "") -> Iterator[None]:
    """Inside, torch makes large tensors on the CPU in mapped files.

    For a model and its optimiser: their own code fills what they make, by its own laws, and memory
    never holds all of it.

    Args:
        above: Bytes from which a tensor counts as large.
        folder: See `mapped_tensor`.

    Raises:
        RunError: As of `mapped_tensor`.
    """
    mode = _LargeTensorsInFiles(above, folder)
    done = threading.Event()

    def dropping() -> None:
        while not done.wait(_DROP_SECONDS):
            for file in tuple(mode.files):
                file.drop()

    thread = threading.Thread(target=dropping, daemon=True)
    thread.start()
    try:
        with mode:
            yield
    finally:
        done.set()
        thread.join()
        for file in mode.files:
            file.drop()
