"""A stream of samples (`IterableDataset`, Hugging Face streaming, shards) as a source.

The law of order: batch k of an epoch is the samples kB to (k+1)B - 1 in the order in which one
process reads the stream. Every rank reads it and keeps its share; each epoch reads it anew, behind
`set_epoch` where it has that. An epoch has `length` samples, or ends where the stream ends.

A run that resumes skips what was used by counting. A stream with `state_dict` and `load_state_dict`
skips itself. What it then gives must be what it gave: a checkpoint has its state at the beginning
of a batch and fingerprints of the samples from there on.
"""

from __future__ import annotations

import copy
import hashlib
import io
import os
import pickle
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import default_collate

from headway.data.one_process import as_one_process
from headway.data.order import Cursor, take
from headway.data.source import Collate, GlobalGenerators, explained, join_samples
from headway.errors import DataError

COMPARED = 16
"""Samples by which a restored stream is compared with the one that the checkpoint was made of."""


@dataclass
class _Mark:
    """The state of a stream in front of the sample at `place`, and which samples followed."""

    place: int
    state: Any
    prints: list[str] = field(default_factory=list)

    @property
    def full(self) -> bool:
        return len(self.prints) == COMPARED


@dataclass
class _Reading:
    """One pass over the stream.

    Attributes:
        process: That began it; a forked one shares the offsets of open files with it.
        place: Of the sample that comes next.
        ahead: Samples that were read and not asked for yet, by their places.
        marks: At most two, the newest last; all but the last are full.
    """

    epoch: int
    process: int
    stream: Any
    samples: Iterator[Any]
    place: int = 0
    ended: bool = False
    ahead: dict[int, Any] = field(default_factory=dict)
    marks: list[_Mark] = field(default_factory=list)


class StreamSource:
    """The samples of a stream by their places in an epoch; asked for in rising order, read once.

    Args:
        length: Samples of an epoch, the first ones of the stream; None: its `len`, or where it has
            none, all until it ends.
        collate: Makes one batch of a list of samples; None: torch's `default_collate`.

    Attributes:
        length: None: an epoch ends where the stream ends.

    Raises:
        DataError: It can be read only once.
    """

    def __init__(
        self, stream: Iterable[Any], length: int | None = None, collate: Collate | None = None
    ) -> None:
        # Any: of what a stream may have beside __iter__ the methods are asked for by name.
        self.stream: Any = stream
        self.collate = collate or default_collate
        self.kind = type(stream).__name__
        if isinstance(stream, Iterator):
            raise self._read_only_once()
        self.length = _stated_length(stream) if length is None else length
        self._epoch, self._mark_at = 0, -1
        self._saved: Cursor | None = None
        self._refused = False  # its own skipping was found wrong
        self._reading: _Reading | None = None
        self._last_iterator: Iterator[Any] | None = None

    def __len__(self) -> int:
        """Samples of an epoch.

        Raises:
            DataError: The stream does not say.
        """
        if self.length is None:
            raise DataError(
                f"this {self.kind} has no length",
                why="Here an epoch must be a number of samples; a stream does not say where it "
                "ends.",
                fix="Write data=headway.data.StreamSource(stream, length=10_000), or give the "
                "stream a __len__.",
            )
        return self.length

    # -- places ------------------------------------------------------------------------------

    def resume(self, cursor: Cursor) -> None:
        """Begin at a cursor, by the state that it has of the stream, if any."""
        self._saved = cursor if cursor.stream is not None else None
        self._reading, self._refused = None, False

    def enter(self, start: Cursor) -> None:
        """The next reads are of the batch that begins at `start`."""
        if self._epoch != start.epoch:
            self._epoch, self._reading = start.epoch, None
        self._mark_at = start.position
        if self._reading is not None:
            ahead = self._reading.ahead
            self._reading.ahead = {n: s for n, s in ahead.items() if n >= start.position}

    def take(self, cursor: Cursor, batch: int, drop_last: bool) -> tuple[int, Cursor]:
        """Of a stream without a length, as `headway.data.order.take`; reads the batch, and as much
        behind it as says whether another one follows.

        Raises:
            DataError: There are no samples, or with `drop_last` less than one batch of them.
        """
        self.enter(cursor)
        first, behind = cursor.position, cursor.position + batch
        # In front of the sample that only tells whether the stream goes on.
        self._mark_at = behind
        with self._watched():
            reading = self._read_to(behind + (batch if drop_last else 1), first)
        least = batch if drop_last else 1
        if first == 0 and reading.place < least:
            raise self._too_short(cursor.epoch, reading.place, batch)
        return take(cursor, reading.place, batch, drop_last)

    def read(self, indices: Sequence[int]) -> Any:
        """The samples at these places as one batch.

        Raises:
            DataError: The stream ends before, fails, or draws from the global generators.
        """
        with self._watched():
            samples = [self._sample(index) for index in indices]
        return join_samples(self.collate, indices, samples, self.kind)

    def fingerprint(self, start: Cursor) -> str:
        """Of the first sample of a batch, by which ranks compare what they read."""
        self.enter(start)
        with self._watched():
            self._sample(start.position, keep=True)
            assert self._reading is not None
            return fingerprint(self._reading.ahead[start.position])

    def mark(self, after: Cursor) -> Mapping[str, Any] | None:
        """What a checkpoint keeps of the stream for a run that begins at `after`."""
        reading = self._reading
        if reading is None or reading.epoch != after.epoch:
            return None
        marks = [mark for mark in reading.marks if mark.full]
        if not marks:
            return None
        newest = marks[-1]
        return {"place": newest.place, "state": newest.state, "samples": list(newest.prints)}

    # -- reading -----------------------------------------------------------------------------

    def _sample(self, index: int, *, keep: bool = False) -> Any:
        reading = self._read_to(index + 1, index)
        if index not in reading.ahead:
            raise self._ends_early(reading.place)
        return reading.ahead[index] if keep else reading.ahead.pop(index)

    def _read_to(self, stop: int, first: int) -> _Reading:
        """Read until `stop` samples were read; those from `first` on can be asked for."""
        reading = self._reading
        behind = reading is not None and reading.place > first and first not in reading.ahead
        if reading is None or behind or reading.process != os.getpid():
            self._reading = None
            reading = self._restored(first) or self._begun()
        self._reading = None  # a pass that has failed is not gone on with
        while reading.place < stop and not reading.ended:
            self._next(reading, first)
        self._reading = reading
        return reading

    def _next(self, reading: _Reading, first: int) -> None:
        place = reading.place
        due = place == self._mark_at and place > 0
        if due and (not reading.marks or reading.marks[-1].full) and self._restorable:
            with explained(f"the state_dict of {self.kind} fails at sample {place}"):
                state = _packed(reading.stream.state_dict())
            reading.marks = [*reading.marks[-1:], _Mark(place, state)]
        with explained(f"sample {place} cannot be read", self.kind):
            try:
                sample = next(reading.samples)
            except StopIteration:
                reading.ended = True
                return
        if reading.marks and not reading.marks[-1].full:
            reading.marks[-1].prints.append(fingerprint(sample))
        self._compare(reading.epoch, place, sample)
        reading.place = place + 1
        if place >= first:
            reading.ahead[place] = sample

    def _begun(self) -> _Reading:
        """A pass from the beginning of the epoch."""
        before = self._last_iterator
        stream = copy.copy(self.stream) if self._restorable else self.stream
        with explained(f"{self.kind} cannot be read"):
            if callable(getattr(stream, "set_epoch", None)):
                stream.set_epoch(self._epoch)
            samples = iter(stream)
        if samples is before:
            raise self._read_only_once()
        self._last_iterator = samples
        return _Reading(self._epoch, os.getpid(), stream, samples)

    # -- a stream that skips by itself -------------------------------------------------------

    @property
    def _restorable(self) -> bool:
        names = ("state_dict", "load_state_dict")
        return all(callable(getattr(self.stream, name, None)) for name in names)

    def _restored(self, first: int) -> _Reading | None:
        """A pass that begins where a checkpoint says; None: there is none, or it does not fit."""
        saved = self._saved_here()
        if saved is None or saved["place"] > first or not self._restorable:
            return None
        try:
            stream = _deep_copy(self.stream)
            if callable(getattr(stream, "set_epoch", None)):
                stream.set_epoch(self._epoch)
            stream.load_state_dict(_unpacked(saved["state"]))
            samples = iter(stream)
        except Exception as error:
            raise DataError(
                f"{self.kind} cannot be restored from the checkpoint",
                where=f"epoch {self._epoch}, sample {saved['place']}",
                why=f"{type(error).__name__}: {error}",
                fix="Resume with the stream that the run was started with; without "
                "load_state_dict it is read from its beginning and skipped by counting.",
            ) from error
        mark = _Mark(saved["place"], saved["state"], list(saved["samples"]))
        reading = _Reading(
            self._epoch, os.getpid(), stream, samples, place=mark.place, marks=[mark]
        )
        try:
            while reading.place < mark.place + COMPARED and not reading.ended:
                self._next(reading, first)
        except _OtherSample:
            reading.ended = True
        if reading.place == mark.place + COMPARED:
            return reading
        warnings.warn(
            f"{self.kind} goes on with other samples than it gave before the checkpoint (a shuffle "
            "buffer is not in its state): it is read again from the beginning of the epoch",
            stacklevel=2,
        )
        self._refused = True
        return None

    def _saved_here(self) -> Mapping[str, Any] | None:
        saved = self._saved
        if saved is None or saved.epoch != self._epoch or self._refused:
            return None
        return saved.stream

    def _compare(self, epoch: int, place: int, sample: Any) -> None:
        """Hold a sample against the one that the checkpoint's run has read there."""
        saved = self._saved
        if saved is None or saved.stream is None or saved.epoch != epoch:
            return
        number = place - saved.stream["place"]
        prints = saved.stream["samples"]
        if 0 <= number < len(prints) and fingerprint(sample) != prints[number]:
            raise _OtherSample(
                f"{self.kind} gives another sample {place} of epoch {epoch} than before the "
                "checkpoint",
                fix="Resume with the stream that the run was started with, or start a new run.",
            )

    # -- what goes wrong ---------------------------------------------------------------------

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Inside the stream is read: as in one process, and without global random numbers."""
        generators = GlobalGenerators()
        try:
            with as_one_process():
                yield
            drew = generators.used()
        finally:
            generators.restore()
        if drew:
            raise DataError(
                f"{self.kind} draws from the global random generators",
                why="What it gives would depend on how many samples were read before.",
                fix="Give it a generator of its own, seeded in __iter__.",
            )

    def _ends_early(self, place: int) -> DataError:
        if place == 0:
            return self._too_short(self._epoch, 0, 1)
        return DataError(
            f"{self.kind} ends after {place} of {self.length} samples",
            fix=f"Write headway.data.StreamSource(stream, length={place}).",
        )

    def _too_short(self, epoch: int, samples: int, batch: int) -> DataError:
        if samples:
            return DataError(
                f"{self.kind} gives {samples} samples in epoch {epoch}, less than one batch of "
                f"{batch}",
                fix="Set a smaller batch, or drop_last=False.",
            )
        if epoch == 0:
            fix = "Check the path or the filter that selects its samples."
        else:
            fix = "Let its __iter__ begin anew, with a generator made there and not kept."
        return DataError(f"{self.kind} gives no samples in epoch {epoch}", fix=fix)

    def _read_only_once(self) -> DataError:
        return DataError(
            f"this {self.kind} can be read only once",
            why="Each epoch, and each run that resumes, reads the stream from its beginning.",
            fix="Give an object whose __iter__ begins anew, for example an IterableDataset.",
        )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_reading": None, "_last_iterator": None}


class _OtherSample(DataError):
    pass


def _packed(state: Any) -> Any:
    """A copy of a state as plain values: with tensors (of a generator) as the bytes of a file."""
    parts, form = tree_flatten(state)
    if not any(isinstance(part, torch.Tensor) for part in parts) and not _is_packed(state):
        return copy.deepcopy(state)
    # A view would be saved with all that it is a view of.
    own = [p.detach().cpu().clone() if isinstance(p, torch.Tensor) else p for p in parts]
    file = io.BytesIO()
    torch.save(tree_unflatten(own, form), file)
    return {_FILE: file.getvalue()}


def _unpacked(state: Any) -> Any:
    """The state that `_packed` was given; of a file only what needs no code of anybody's."""
    if not _is_packed(state):
        return copy.deepcopy(state)
    return torch.load(io.BytesIO(state[_FILE]), weights_only=True)


def _is_packed(state: Any) -> bool:
    return type(state) is dict and set(state) == {_FILE}


_FILE = "torch.save"


def _deep_copy(stream: Any) -> Any:
    """For a state to be put into: the parts of a stream of Hugging Face would keep it."""
    try:
        return copy.deepcopy(stream)
    except Exception:  # open files and locks cannot be copied
        return copy.copy(stream)


def _stated_length(stream: Any) -> int | None:
    try:
        return len(stream)
    except TypeError:
        return None


def fingerprint(sample: Any) -> str:
    """Equal for equal samples, in all processes."""
    leaves, form = tree_flatten(sample)
    found = hashlib.blake2b(repr(form).encode(), digest_size=8)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            leaf = leaf.detach().cpu().contiguous()
            found.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            found.update(leaf.flatten().view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, np.ndarray) and leaf.dtype.kind != "O":
            found.update(f"{leaf.dtype} {leaf.shape}".encode() + leaf.tobytes())
        elif isinstance(leaf, str | bytes | int | float | complex | None):
            found.update(repr(leaf).encode())
        else:
            found.update(_bytes_of(leaf))
    return found.hexdigest()


def _bytes_of(value: Any) -> bytes:
    # The text of an object may have its address in it; an image pickles as its bytes.
    try:
        return pickle.dumps(value)
    except Exception:
        return type(value).__name__.encode()
