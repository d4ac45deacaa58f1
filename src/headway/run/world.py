"""The processes that train together, as one of them sees them: ranks, device, groups, store.

A world of one rank has no process group and no store at all. Larger ones use torch's own process
groups (gloo on CPUs, NCCL beside it on GPUs) over the fresh store of `meeting`. What torch says
when an exchange breaks becomes one of two errors: a peer vanished, or somebody does not come.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from headway.errors import HeadwayError, PeerLost, Stalled, UsageError
from headway.run.failure import brief
from headway.run.heartbeat import PATIENCE_SECONDS, Listener
from headway.run.lifeline import Lifeline, check_patience
from headway.run.meeting import meet, name_ranks
from headway.run.place import Place

_TIMED_OUT = re.compile(r"timed? ?out|timeout", re.IGNORECASE)
_BROKEN = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket (closed|error)|read error|write error"
    r"|remote peer|peer closed|no route to host|network is unreachable|ncclRemoteError"
    r"|ncclSystemError|connectFullMesh|pair .* (closed|error)|failed to (send|recv|connect)"
    r"|recvValue failed|aborted",
    re.IGNORECASE,
)
_EXCHANGE = re.compile(
    r"gloo|nccl|c10d|connection|socket|wait timeout|pair closure|store|pipe", re.IGNORECASE
)
_FAREWELL_SECONDS = 2.0
_NEWS_SECONDS = 1.0
"""For rank 0's word who it was, after an exchange broke."""
_MOST_STATES = 8


class World:
    """A context manager; leaving it in order destroys the process groups.

    Attributes:
        place: Where this process is; its `attempt` is the same on all ranks.
        device: The device of this rank.
        backend: "gloo", "cpu:gloo,cuda:nccl", or "none" in a world of one rank.
        store: The store that rank 0 hosts; None in a world of one rank.
        side_group: A second group of all ranks, always gloo, for collectives of another thread
            (checkpoints); None in a world of one rank.
        timeout_seconds: Longest wait for another rank in an exchange.
    """

    def __init__(
        self,
        *,
        place: Place,
        device: torch.device,
        backend: str = "none",
        store: Store | None = None,
        side_group: dist.ProcessGroup | None = None,
        timeout_seconds: float = 300.0,
    ) -> None:
        self.place = place
        self.device = device
        self.backend = backend
        self.store = store
        self.side_group = side_group
        self.timeout_seconds = timeout_seconds
        self._lifeline = Lifeline(place)

    @property
    def rank(self) -> int:
        """The number of this process."""
        return self.place.rank

    @property
    def ranks(self) -> int:
        """The number of processes."""
        return self.place.ranks

    @classmethod
    def join(
        cls,
        place: Place,
        *,
        device: str = "cpu",
        timeout_seconds: float = 300.0,
        join_seconds: float | None = None,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> World:
        """Meet the other ranks; collective.

        Args:
            place: From `Place.here()`.
            device: "cpu", "cuda", or "auto" (GPUs where every rank of the machine has one).
            timeout_seconds: Longest wait for another rank in an exchange.
            join_seconds: Longest wait for all ranks to arrive; None: `timeout_seconds`.
            patience_seconds: Of which nothing is heard for so long, that rank is lost (a slow one
                is not: it goes on beating); 0: only time-outs notice.

        Raises:
            UsageError: No such device, or a process group exists already, or no patience.
            Stalled: Names the ranks that did not arrive.
            PeerLost: A rank vanished while the groups were made.
        """
        chosen = _device(place, device)
        if place.ranks == 1:
            return cls(place=place, device=chosen, timeout_seconds=timeout_seconds)
        if dist.is_initialized():
            raise UsageError(
                "this process already belongs to a process group",
                why="headway makes the groups of its world itself.",
                fix="Call dist.destroy_process_group() before, or leave the init to headway.",
            )
        check_patience(patience_seconds)
        listener = Listener.open() if place.rank == 0 and patience_seconds else None
        try:
            meeting = meet(
                place,
                timeout_seconds if join_seconds is None else join_seconds,
                notice="" if listener is None else listener.notice,
            )
        except BaseException:
            if listener is not None:
                listener.socket.close()
            raise
        world = cls(
            place=replace(place, attempt=meeting.attempt),
            device=chosen,
            backend="cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo",
            store=meeting.store,
            timeout_seconds=timeout_seconds,
        )
        world._lifeline.start(listener, meeting.store.host, meeting.notice, patience_seconds)
        with world.explained("making the process groups"):
            world._make_groups(meeting.store)
        return world

    @classmethod
    def adopt(cls) -> World:
        """The world of the process group that the user's own program has made; collective.

        Leaving it leaves the program's group alone.
        """
        rank, ranks = dist.get_rank(), dist.get_world_size()
        gpu = torch.cuda.is_available() and "nccl" in dist.get_backend()
        return cls(
            place=replace(Place.alone(), rank=rank, ranks=ranks, launcher="program"),
            device=torch.device("cuda", torch.cuda.current_device())
            if gpu
            else torch.device("cpu"),
            backend=dist.get_backend(),
            side_group=dist.new_group(backend="gloo") if ranks > 1 else None,
        )

    def leave(self) -> None:
        """Leave in order: all ranks, then rank 0, which hosts the store. May be called again."""
        if self.store is None:
            return
        self._lifeline.stop()
        self._farewell()
        if dist.is_initialized():
            dist.destroy_process_group()
        self.store = self.side_group = None

    def __enter__(self) -> World:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # After an error the other ranks may be gone or in the middle of an exchange: destroying
        # the groups could wait for them. The process ends, and with it everything.
        if error is None:
            self.leave()
        elif not isinstance(error, PeerLost):
            self._lifeline.stop(brief(error).partition("\n")[0])

    def doing(self, text: str, *arguments: object) -> None:
        """Say what this rank does from now on; costs no more than an assignment.

        Args:
            text: "waits for bucket %d (%s) of step %d"; read if a rank is missed somewhere.
            arguments: For the text, as in `logging`.
        """
        self._lifeline.doing(text, arguments)

    def lost(self, seconds: float = 0.0) -> HeadwayError | None:
        """The error of a rank that has been lost, if there is one.

        Args:
            seconds: For the news to arrive.
        """
        return self._lifeline.lost(seconds)

    def states(self) -> dict[int, str]:
        """What each rank has been doing for how long, as far as it stands still."""
        return self._lifeline.states()

    def sum(self, tensor: torch.Tensor, doing: str) -> None:
        """Sum a small tensor of the host over all ranks, in place; collective."""
        if self.ranks > 1:
            with self.explained(doing):
                shared = tensor.to(self.device)
                dist.all_reduce(shared)
                tensor.copy_(shared)

    def barrier(self, doing: str) -> None:
        """Wait for all ranks; collective.

        Args:
            doing: What for, for the error message: "opening the run directory".
        """
        if self.side_group is not None:
            with self.explained(doing):
                dist.barrier(group=self.side_group)

    @contextmanager
    def explained(self, doing: str) -> Iterator[None]:
        """Turn torch's errors of broken or late exchanges into PeerLost or Stalled.

        Args:
            doing: What the exchange is for: "the exchange of step 17".

        Raises:
            HeadwayError: A rank has been lost already.
        """
        lost = self.lost()
        if lost is not None:
            raise lost
        try:
            with self._lifeline.waiting():
                yield
        except RuntimeError as error:
            known = translate(error, self, doing)
            if known is None:
                raise
            raise known from error

    def missing(self, waiting_for: str, *, grace_seconds: float = 2.0) -> tuple[int, ...]:
        """After a time-out: which ranks do not wait, as this one does; not collective.

        Every rank whose exchange timed out notes in the store what it waits for; after a short
        grace those without a note are the ones that somebody waits for.

        Args:
            waiting_for: The note of this rank.
            grace_seconds: For the notes of the others.
        """
        found: list[tuple[int, ...]] = []

        def look() -> None:
            found.append(self._without_note(waiting_for, grace_seconds))

        # The store's host may be the rank that hangs: then its answer does not come.
        thread = threading.Thread(target=look, name="headway-missing", daemon=True)
        thread.start()
        thread.join(grace_seconds + 2.0)
        return found[0] if found else (0,)

    def _without_note(self, waiting_for: str, grace_seconds: float) -> tuple[int, ...]:
        if self.store is None:
            return ()
        try:
            self.store.set(f"stalled/{self.rank}", waiting_for)
            deadline = time.monotonic() + grace_seconds
            while True:
                notes = [self.store.check([f"stalled/{rank}"]) for rank in range(self.ranks)]
                if all(notes) or time.monotonic() > deadline:
                    return tuple(rank for rank, note in enumerate(notes) if not note)
                time.sleep(0.05)
        except RuntimeError:
            return () if self.rank == 0 else (0,)

    def _make_groups(self, store: Store) -> None:
        timeout = timedelta(seconds=self.timeout_seconds)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            self.backend,
            store=PrefixStore("groups", store),
            rank=self.rank,
            world_size=self.ranks,
            timeout=timeout,
        )
        self.side_group = dist.new_group(backend="gloo", timeout=timeout)

    def _farewell(self) -> None:
        """Say goodbye; rank 0 waits shortly for the goodbyes of the others, who need its store."""
        if self.store is None:
            return
        try:
            self.store.set(f"left/{self.rank}", "")
            deadline = time.monotonic() + _FAREWELL_SECONDS
            keys = [f"left/{rank}" for rank in range(self.ranks)]
            while self.rank == 0 and time.monotonic() < deadline and not self.store.check(keys):
                time.sleep(0.002)
        except RuntimeError:
            return  # the host of the store is gone already: nobody needs the goodbye


def translate(error: RuntimeError, world: World, doing: str) -> HeadwayError | None:
    """What an exception of torch.distributed means; None: no trouble with other ranks.

    Args:
        error: What torch raised.
        world: Asked who is lost, or after a time-out who is missing; this takes up to 5 s.
        doing: What the exchange was for.
    """
    text = str(error)
    if not (isinstance(error, dist.DistError) or _EXCHANGE.search(text)):
        return None
    if _TIMED_OUT.search(text):
        return world.lost() or _stalled(world, doing)
    if isinstance(error, dist.DistError) or _BROKEN.search(text):
        return world.lost(_NEWS_SECONDS) or PeerLost(
            f"another rank vanished during {doing}",
            why=_first_line(text),
            fix="Its own error, or the signal that killed it, is the cause.",
        )
    return None


def _stalled(world: World, doing: str) -> Stalled:
    """Nobody is lost, and yet nothing moves: who is missing, and what those do instead."""
    missing = world.missing(doing)
    states = world.states()
    who = f"{name_ranks(missing)} did not come" if missing else "the exchange took too long"
    why = f"Rank {world.rank} waited {world.timeout_seconds:g} s. "
    why += "All other ranks wait, too." if missing else "All ranks wait: a link is broken."
    concerned = [rank for rank in missing or sorted(states) if rank in states]
    lines = [f"rank {rank}: {states[rank]}" for rank in concerned[:_MOST_STATES]]
    return Stalled(
        f"{doing}: {who}",
        why="\n  ".join([why, *lines]),
        fix="Look for what those ranks do instead (slow data, a hang, another number of "
        "batches), or allow more time (--timeout, timeout_seconds).",
    )


def _first_line(text: str) -> str:
    """The first line without gloo's "[path/to/file.cc:123]" in front and advice behind."""
    line = text.strip().partition("\n")[0].partition(" This is typically")[0]
    return re.sub(r"^(\[[^\]]*\]\s*)+", "", line)


def _device(place: Place, wish: str) -> torch.device:
    """The device of a rank.

    Raises:
        UsageError: Not one of the three words, or fewer GPUs than ranks on this machine.
    """
    if wish not in ("cpu", "cuda", "auto"):
        raise UsageError(f"there is no device {wish!r}", fix="Use cpu, cuda or auto.")
    if wish == "cpu":
        return torch.device("cpu")
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if place.local_rank < found and place.local_ranks <= found:
        return torch.device("cuda", place.local_rank)
    if wish == "auto":
        return torch.device("cpu")
    raise UsageError(
        f"{place.local_ranks} ranks on this machine need as many GPUs; torch sees {found}",
        where=f"rank {place.rank}",
        fix="Start fewer processes, or use --device cpu.",
    )
