"""The coordinator: what all ranks have asked for, in which order they do it, and who is missing.

It lives at rank 0, knows neither connections nor tensors, and is asked by one thread. An operation
is ready when every rank of its process set has asked for the same name, or has joined. What is
ready leaves in one order for all ranks and process sets, so that no two ranks can wait for each
other crosswise. All-reduces and broadcasts that agree in type, set and operation leave together.

An operation that nobody waits for may be held back for a while, so that others join it: until it is
old, many bytes are ready, or some rank waits for what it has asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from headway.horovod.engine.request import (
    GLOBAL_SET,
    HorovodOp,
    Request,
    disagreement,
    wrong_argument,
)
from headway.horovod.engine.settings import HorovodSettings


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Operations that all ranks of a process set do together now, or that fail.

    Attributes:
        names: Of the operations; several are fused.
        error: Why they cannot be done; empty: they are done.
        wrong_argument: The error is of an argument, not between ranks.
        dtypes: Of all tensors, where a rank has joined and has none of its own; as are `shapes`.
        counts: Of the tensors of each operation, where there are `dtypes`.
        rows: Of an allgather: for each tensor the rows of each rank. Of an alltoall: for each rank
            what it sends to each.
        number: Of the process set that is made or ended, or the rank that joined last.
        ranks: Of the new process set.
        only: The one rank that this concerns; -1: all of the process set.
    """

    kind: str
    process_set: int = GLOBAL_SET
    names: tuple[str, ...] = ()
    error: str = ""
    wrong_argument: bool = False
    op: int = HorovodOp.SUM
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    counts: tuple[int, ...] = ()
    rows: tuple[tuple[int, ...], ...] = ()
    number: int = 0
    ranks: tuple[int, ...] = ()
    only: int = -1

    def to_message(self) -> dict[str, Any]:
        """Plain values, without those that are as usual."""
        values = ((each.name, getattr(self, each.name), each.default) for each in fields(self))
        return {name: value for name, value, usual in values if value != usual}

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Batch:
        """The inverse of `to_message`."""
        return cls(**{name: _tuples(value) for name, value in message.items()})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


@dataclass(slots=True)
class _Entry:
    """One operation, as far as ranks have asked for it."""

    since: float
    requests: dict[int, Request] = field(default_factory=dict)
    urgent: bool = False
    warned: bool = False


# A tensor that is alone travels where it lies, and two copies cost more than a transfer of its own.
_ALONE_BYTES = 1 << 20
_SEPARATE = ("allgather", "alltoall", "reducescatter", "barrier", "join", "add_set", "remove_set")
_WITHOUT_JOIN = ("allgather", "alltoall", "broadcast", "reducescatter")


class Coordinator:
    """See the module; times are seconds of a monotonic clock."""

    def __init__(self, size: int, settings: HorovodSettings, warn: Callable[[str], None]) -> None:
        self._settings = settings
        self._warn = warn
        self._sets: dict[int, tuple[int, ...]] = {GLOBAL_SET: tuple(range(size))}
        self._next_set = 1
        self._entries: dict[tuple[int, str], _Entry] = {}
        self._ready: list[_Entry] = []
        self._ready_bytes = 0
        self._joined: dict[int, float] = {}
        self._last_joined = 0
        self._gone: dict[int, str] = {}
        # Operations that failed before all ranks had asked: who is still to be told.
        self._failed: dict[tuple[int, str], tuple[str, set[int]]] = {}
        self._batches: list[Batch] = []

    def submit(self, rank: int, request: Request, now: float) -> None:
        """A rank asks for an operation."""
        if request.key in self._failed and rank in self._failed[request.key][1]:
            self._tell_late(rank, request)
            return
        if request.kind == "join":
            self._joined[rank] = now
            self._last_joined = rank
        entry = self._entries.setdefault(request.key, _Entry(since=now))
        entry.requests[rank] = request
        self._look(request.key, entry, now)
        if request.kind == "join":
            for key, other in list(self._entries.items()):
                self._look(key, other, now)

    def hurry(self, rank: int) -> None:
        """A rank waits for what it has asked for so far."""
        for entry in (*self._entries.values(), *self._ready):
            entry.urgent |= rank in entry.requests

    def leave(self, rank: int, why: str) -> None:
        """A rank is gone: what needs it fails."""
        self._gone[rank] = why
        for key, entry in list(self._entries.items()):
            if rank in self._members(key) and rank not in entry.requests:
                self._fail(key, entry, why)

    def take(self, now: float) -> list[Batch]:
        """What is to be done now; each is to be told to all ranks, in this order."""
        self._check_stalls(now)
        if self._ready and now >= self.due():
            ready, self._ready, self._ready_bytes = self._ready, [], 0
            self._batches += self._fused(ready)
        batches, self._batches = self._batches, []
        return batches

    def due(self) -> float:
        """When `take` is to be called next, unless something happens before."""
        if self._batches:
            return 0.0
        times = [self._next_stall(entry) for _, entry in self._oldest()]
        if self._ready:
            hasty = self._ready_bytes >= self._settings.flush_bytes
            hasty = hasty or any(entry.urgent for entry in self._ready)
            times.append(0.0 if hasty else self._ready[0].since + self._settings.cycle_seconds)
        return min(times, default=float("inf"))

    def _members(self, key: tuple[int, str]) -> tuple[int, ...]:
        return self._sets.get(key[0], ())

    def _look(self, key: tuple[int, str], entry: _Entry, now: float) -> None:
        """Move an operation on, if everyone is there or somebody never will be."""
        missing = [rank for rank in self._members(key) if rank not in entry.requests]
        joining = any(request.kind == "join" for request in entry.requests.values())
        if gone := [rank for rank in missing if rank in self._gone]:
            self._fail(key, entry, self._gone[gone[0]])
        elif not missing or (not joining and all(rank in self._joined for rank in missing)):
            del self._entries[key]
            entry.since = now
            self._ready.append(entry)
            self._ready_bytes += next(iter(entry.requests.values())).num_bytes

    def _fail(self, key: tuple[int, str], entry: _Entry, why: str) -> None:
        """Give an operation up; ranks that ask for it later are told then."""
        self._entries.pop(key, None)
        late = {
            rank
            for rank in self._members(key)
            if rank not in entry.requests and rank not in self._gone
        }
        if late:
            self._failed[key] = why, late
        first = next(iter(entry.requests.values()))
        if first.kind == "join":
            self._joined.clear()
        self._batches.append(Batch(kind=first.kind, process_set=key[0], names=(key[1],), error=why))

    def _tell_late(self, rank: int, request: Request) -> None:
        why, late = self._failed[request.key]
        late.discard(rank)
        if not late:
            del self._failed[request.key]
        self._batches.append(
            Batch(
                kind=request.kind,
                process_set=request.process_set,
                names=(request.name,),
                error=why,
                only=rank,
            )
        )

    def _oldest(self) -> Iterator[tuple[tuple[int, str], _Entry]]:
        """The entries that can be the next to stall: later ones are younger than the last of these.

        Asked at every turn, with hundreds of gradients under way.
        """
        for key, entry in list(self._entries.items()):
            yield key, entry
            if not entry.warned and self._next_stall(entry) < float("inf"):
                return

    def _next_stall(self, entry: _Entry) -> float:
        times = [
            entry.since + seconds
            for seconds, passed in (
                (self._settings.stall_warning_seconds, entry.warned),
                (self._settings.stall_error_seconds, False),
            )
            if seconds and not passed
        ]
        waits_for_all = any(request.kind == "join" for request in entry.requests.values())
        # Who has joined waits for the others' data to end, however long that takes.
        return float("inf") if waits_for_all else min(times, default=float("inf"))

    def _check_stalls(self, now: float) -> None:
        for key, entry in self._oldest():
            if now < self._next_stall(entry):
                continue
            entry.warned = True
            missing = [
                rank
                for rank in self._members(key)
                if rank not in entry.requests and rank not in self._joined
            ]
            kind = next(iter(entry.requests.values())).kind
            text = (
                f"{kind} {key[1]!r} has waited {now - entry.since:.0f} s for {_ranks(missing)}; "
                f"{_ranks(sorted(entry.requests))} asked for it"
            )
            limit = self._settings.stall_error_seconds
            if limit and now >= entry.since + limit:
                self._fail(key, entry, f"{text}. All ranks must do the same operations.")
            else:
                self._warn(text)

    def _fused(self, ready: Sequence[_Entry]) -> list[Batch]:
        """Batches in the order of their first operation."""
        found: list[Batch] = []
        open_: dict[tuple[Any, ...], tuple[int, int]] = {}
        for entry in ready:
            batch = self._batch(entry)
            request = next(iter(entry.requests.values()))
            size = request.num_bytes
            alike = len(set(request.dtypes)) == 1
            alone = batch.error or batch.kind in _SEPARATE or not alike or size >= _ALONE_BYTES
            if alone:
                found.append(batch)
                continue
            mean = request.op == HorovodOp.AVERAGE
            key = (
                batch.kind, batch.process_set, request.dtypes[0], request.device, request.root,
                HorovodOp.SUM if mean else request.op, bool(batch.shapes),
            )  # fmt: skip
            place, filled = open_.get(key, (-1, 0))
            if place < 0 or filled + size > self._settings.fusion_bytes:
                open_[key] = len(found), size
                found.append(batch)
                continue
            open_[key] = place, filled + size
            found[place] = Batch(
                kind=batch.kind,
                process_set=batch.process_set,
                names=found[place].names + batch.names,
                op=found[place].op,
                dtypes=found[place].dtypes + batch.dtypes,
                shapes=found[place].shapes + batch.shapes,
                counts=found[place].counts + batch.counts,
            )
        return found

    def _batch(self, entry: _Entry) -> Batch:
        """One operation that is ready."""
        requests = dict(sorted(entry.requests.items()))
        first = next(iter(requests.values()))
        members = self._sets.get(first.process_set, ())
        error, wrong = disagreement(requests, members), False
        absent = len(requests) < len(members)
        if not error and absent and first.kind in _WITHOUT_JOIN:
            names = _ranks([rank for rank in members if rank not in requests])
            error = f"{first.kind} {first.name!r} is not possible while {names} have joined"
        if not error:
            error = wrong_argument(requests, members)
            wrong = bool(error)
        if not error and first.kind == "add_set" and first.ranks in self._sets.values():
            error = f"there is a process set of the ranks {first.ranks} already"
            wrong = True
        facts = {} if error else self._facts(requests, first, absent)
        return Batch(
            kind=first.kind,
            process_set=first.process_set,
            names=(first.name,),
            error=error,
            wrong_argument=wrong,
            op=first.op,
            **facts,
        )

    def _facts(
        self, requests: Mapping[int, Request], first: Request, absent: bool
    ) -> dict[str, Any]:
        """What ranks must be told of an operation beyond what they asked for."""
        size = len(self._sets[first.process_set])
        match first.kind:
            case "allgather":
                tensors = range(len(first.shapes))
                return {
                    "rows": tuple(
                        tuple(request.shapes[place][0] for request in requests.values())
                        for place in tensors
                    )
                }
            case "alltoall":
                return {
                    "rows": tuple(
                        request.splits or (request.shapes[0][0] // size,) * size
                        for request in requests.values()
                    )
                }
            case "join":
                self._joined.clear()
                return {"number": self._last_joined}
            case "add_set":
                number, self._next_set = self._next_set, self._next_set + 1
                self._sets[number] = first.ranks
                return {"number": number, "ranks": first.ranks}
            case "remove_set":
                known = self._sets.pop(first.root, None) is not None
                return {"number": first.root if known else -1}
        if not absent:
            return {}
        return {"dtypes": first.dtypes, "shapes": first.shapes, "counts": (len(first.shapes),)}


def _ranks(ranks: Iterable[int]) -> str:
    listed = list(ranks)
    return f"rank{'s' * (len(listed) != 1)} {', '.join(map(str, listed))}"
