"""The world: ranks, device, process groups, store, and the watchdog over them.

A world of one rank has no process group and no store. Larger ones use torch's own process groups
(gloo on CPUs, NCCL beside it on GPUs). What torch raises when an exchange breaks becomes one of two
errors: a rank was lost (`PeerLost`), or one does not arrive (`Stalled`).

`Watchdog`: after the loss of a rank this process reports the reason and ends within seconds. A main
thread that comes to an exchange raises there; one that waits in an exchange is released by breaking
its connections; one that does neither (slow user code, a hang) is ended.
"""

from __future__ import annotations

import gc
import os
import re
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from headway.channel.facts import broadcast_facts
from headway.channel.gloo_listeners import drop_later_connections
from headway.channel.transport import is_channel_error
from headway.comm.exchange_errors import is_exchange_error, is_timeout
from headway.errors import (
    TIMEOUT_SECONDS,
    HeadwayError,
    PeerLost,
    Stalled,
    UsageError,
    WorkerFailed,
)
from headway.run.distributed.failure_record import (
    mark_reported_elsewhere,
    name_ranks,
    summarize_exception,
)
from headway.run.distributed.heartbeat import (
    Heartbeat,
    HeartbeatListener,
    ProcessIdentity,
    RankFailure,
    connect_heartbeat,
)
from headway.run.distributed.job_store import JobStore
from headway.run.distributed.launch_env import HEARTBEAT_TIMEOUT_SECONDS, LaunchEnv
from headway.run.distributed.rendezvous import join_rendezvous, listen, open_torch_store
from headway.units import counted
from headway.user_frames import innermost_user_frame


def open_sockets() -> dict[int, str]:
    """File descriptor -> identity of every socket of this process; empty where that is unknown."""
    found: dict[int, str] = {}
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{name}")
                if target.startswith("socket:"):
                    found[int(name)] = target
    return found


def break_connections(kept: frozenset[str]) -> int:
    """Shut down torch's connections, all but the identities in `kept`; returns how many.

    On Linux only; elsewhere nothing is known of the sockets of foreign code.
    """
    # A thread that waits inside gloo cannot be interrupted, but a connection that closes makes
    # torch raise as if the peer had died. Sockets that Python owns are not torch's.
    # Not isinstance: it asks objects for their __class__, which runs code of lazy ones.
    of_python = {
        thing.fileno() for thing in gc.get_objects() if issubclass(type(thing), socket.socket)
    }
    broken = 0
    for number, identity in open_sockets().items():
        if identity in kept or number in of_python:
            continue
        with suppress(OSError):
            # A second descriptor: `shutdown` acts on the connection itself, `close` on this number
            # alone, and torch's own stays valid.
            copy = socket.socket(fileno=os.dup(number))
            try:
                copy.getpeername()  # raises where it is not connected: a listening one stays
                copy.shutdown(socket.SHUT_RDWR)
                broken += 1
            finally:
                copy.close()
    return broken


MIN_HEARTBEAT_TIMEOUT_SECONDS = 2.0
# For the main thread to notice a closed connection, or its own error, before it is made to.
_BY_ITSELF_SECONDS = 1.0
# For the main thread to report once its connections are broken.
_LET_GO_SECONDS = 1.5
# As long as this what a rank does is nothing that anybody asks about.
_LONG_SECONDS = 1.0


def check_heartbeat_timeout(seconds: float) -> None:
    """Refuse a time-out within which a few lost packets would end a job.

    Raises:
        UsageError: Less than two seconds, and not 0 (no heartbeat).
    """
    if seconds and not seconds >= MIN_HEARTBEAT_TIMEOUT_SECONDS:
        raise UsageError(
            f"a patience of {seconds:g} s is too short",
            why="Ranks send a heartbeat once a second.",
            fix=f"Give at least {MIN_HEARTBEAT_TIMEOUT_SECONDS:g} s, or 0 to rely on the "
            "time-outs of exchanges alone.",
        )


class Watchdog:
    """Ends this process when another rank is lost; one for each world."""

    def __init__(self, place: LaunchEnv) -> None:
        self._place = place
        self._status: tuple[str, tuple[object, ...], float] = ("", (), time.monotonic())
        self._begun = False
        self._thread = threading.get_ident()
        self._waiting = 0
        self._over = threading.Event()
        self._kept: frozenset[str] = frozenset()
        self._heartbeat: Heartbeat | None = None

    def start(
        self,
        listener: HeartbeatListener | None,
        notice: str,
        patience: float = HEARTBEAT_TIMEOUT_SECONDS,
    ) -> None:
        """Start the heartbeat. Connections opened later may be broken to release the main thread.

        Args:
            notice: Address and token of rank 0's listener; "": there is no heartbeat.
        """
        self._kept = frozenset(open_sockets().values())
        if not notice:
            return
        own = ProcessIdentity.here(self._place)
        hub = None
        if listener is None:
            try:
                hub = connect_heartbeat(notice, own)
            except OSError as error:
                warnings.warn(
                    f"rank {own.rank} cannot reach the heartbeat of rank 0 ({error}): a lost rank "
                    "will only be noticed by the time-out",
                    stacklevel=2,
                )
                return
        self._heartbeat = Heartbeat(
            own,
            listener=listener,
            hub=hub,
            patience=patience,
            status=self.status,
            on_loss=self._end_all,
        )
        self._heartbeat.start()

    def stop(self, failure: str | None = None) -> None:
        """Say goodbye to the other ranks, or with `failure` why this one ends."""
        if failure is None:
            self._over.set()
        if self._heartbeat is not None:
            self._heartbeat.stop(failure)

    def doing(self, text: str, arguments: tuple[object, ...]) -> None:
        """Note what this rank is doing; the text is formatted only when it is asked for."""
        self._status = (text, arguments, time.monotonic())
        if not self._begun:
            self._begun = True
            if self._heartbeat is not None:
                self._heartbeat.beat_now()

    def status(self) -> tuple[str, float, bool]:
        """What this rank is doing, since when, and whether it is still preparing."""
        text, arguments, since = self._status
        said = text % arguments if arguments else text
        # Where it has stood for long, the user's line may be that of an exchange of its own.
        if said and time.monotonic() - since > _LONG_SECONDS:
            said += self._line_of_user()
        return said, since, not self._begun

    def _line_of_user(self) -> str:
        """Which line of the user's code the main thread is in."""
        frame = sys._current_frames().get(self._thread)
        walk = traceback.walk_stack(frame) if frame is not None else ()
        # Sources are not read: only the line's number is said.
        frames = traceback.StackSummary.extract(iter(walk), lookup_lines=False)
        found = innermost_user_frame(frames[::-1])
        return "" if found is None else f", at {found.filename}:{found.lineno} ({found.name})"

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While the main thread is in an exchange."""
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    def lost(self, seconds: float = 0.0) -> HeadwayError | None:
        """The error of a lost rank, if there is one."""
        if self._heartbeat is None:
            return None
        loss = self._heartbeat.await_loss(seconds) if seconds else self._heartbeat.loss
        return None if loss is None else self._error(loss)

    def states(self) -> dict[int, str]:
        """What each rank has been doing for how long, as far as that is known."""
        if self._heartbeat is None:
            return {}
        found = self._heartbeat.states().items()
        return {rank: f"{text}, for {seconds:.0f} s" for rank, (text, seconds) in found if text}

    def _error(self, loss: RankFailure) -> HeadwayError:
        step = re.search(r"\bstep \d+", self.status()[0])
        error = loss.error(where=step.group() if step else "")
        error.__dict__["frozen"] = loss.frozen
        return error

    def _end_all(self, loss: RankFailure) -> None:
        """In the heartbeat's thread: make sure that this process ends."""
        error = self._error(loss)
        # After a silence report at once: by the time the main thread does, the launcher may have
        # noticed the end of frozen siblings already, and would name those.
        if loss.kind == "silent" and self._place.emergency is not None:
            self._place.emergency(error)
        if loss.kind != "silent" and self._over.wait(_BY_ITSELF_SECONDS):
            return
        break_connections(self._kept)
        if self._over.wait(_LET_GO_SECONDS):
            return
        if self._place.emergency is not None:
            self._place.emergency(error)
        elif self._waiting:
            # A program of the user's own, with a main thread that even this has not released.
            os.write(2, f"{error.code} {error}\n".encode())
            os._exit(error.exit_code)


_BROKEN = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket (closed|error)|read error|write error"
    r"|remote peer|peer closed|no route to host|network is unreachable|ncclRemoteError"
    r"|ncclSystemError|connectFullMesh|pair .* (closed|error)|failed to (send|recv|connect)"
    r"|recvValue failed|aborted",
    re.IGNORECASE,
)
_FAREWELL_SECONDS = 2.0
# For rank 0's verdict to arrive after an exchange broke.
_NEWS_SECONDS = 1.0
_MOST_STATES = 8


class World:
    """The processes that train together, as one of them sees them; a context manager.

    Attributes:
        place: Where this process is; its `attempt` is the same on all ranks.
        backend: "gloo", "cpu:gloo,cuda:nccl", or "none" in a world of one rank.
        store: The store that rank 0 hosts; None in a world of one rank.
        side_group: A second group of all ranks, always gloo, for collectives of another thread
            (checkpoints); None in a world of one rank.
        timeout_seconds: Longest wait for another rank in an exchange.
    """

    def __init__(
        self,
        *,
        place: LaunchEnv,
        device: torch.device,
        backend: str = "none",
        store: Store | None = None,
        side_group: dist.ProcessGroup | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        self.place = place
        self.device = device
        self.backend = backend
        self.store = store
        self.side_group = side_group
        self.timeout_seconds = timeout_seconds
        self._watchdog = Watchdog(place)
        self._parted = False

    @property
    def alone(self) -> bool:
        """Whether there is nobody to meet: one process, or all have gone their own ways."""
        return self.place.ranks == 1 or self._parted

    def part(self) -> None:
        """From now on every process is on its own, and may die alone; collective, the last time.

        Sums and barriers are of this process alone then, and nobody watches its heartbeat.
        """
        self.barrier("the beginning of workers that do not meet")
        self.leave()
        self._parted = True

    @classmethod
    def come_back(cls, place: LaunchEnv, *, device: str, timeout_seconds: float) -> World:
        """The world of a process that comes back to one whose processes have parted."""
        world = cls(place=place, device=_device(place, device), timeout_seconds=timeout_seconds)
        world._parted = True
        return world

    @property
    def rank(self) -> int:
        """Of this process, from 0."""
        return self.place.rank

    @property
    def ranks(self) -> int:
        """The number of processes."""
        return self.place.ranks

    @classmethod
    def join(
        cls,
        place: LaunchEnv,
        *,
        device: str = "cpu",
        timeout_seconds: float = TIMEOUT_SECONDS,
        join_seconds: float | None = None,
        patience_seconds: float = HEARTBEAT_TIMEOUT_SECONDS,
    ) -> World:
        """Meet the other ranks; collective.

        Args:
            device: "cpu", "cuda", or "auto" (GPUs where every rank of the machine has one).
            join_seconds: Longest wait for all ranks to arrive; None: `timeout_seconds`.
            patience_seconds: Declare a rank lost after this long without a heartbeat (slow ranks
                still send them); 0: only time-outs detect a loss.

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
        check_heartbeat_timeout(patience_seconds)
        # Before the meeting, in which the others are told its port.
        watched = place.rank == 0 and patience_seconds
        listener = HeartbeatListener.open(*listen(place)) if watched else None
        try:
            meeting = join_rendezvous(
                place,
                timeout_seconds if join_seconds is None else join_seconds,
                notice="" if listener is None else listener.notice,
            )
        except BaseException:
            if listener is not None:
                listener.server.close()
            raise
        world = cls(
            place=replace(place, attempt=meeting.attempt),
            device=chosen,
            backend="cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo",
            store=meeting.store,
            timeout_seconds=timeout_seconds,
        )
        # Before the groups, because a rank that dies while they are made would keep the others
        # waiting in Gloo until the time-out.
        world._watchdog.start(listener, meeting.notice, patience_seconds)
        with world.explained("making the process groups"):
            world._make_groups(meeting.store)
        return world

    @classmethod
    def adopt(cls) -> World:
        """The world of a process group that the user's program has made, and keeps; collective."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        gpu = torch.cuda.is_available() and "nccl" in dist.get_backend()
        with drop_later_connections():
            side_group = dist.new_group(backend="gloo") if ranks > 1 else None
        if side_group is not None:
            # Who is through first may be refused what follows, and end, while others connect to it.
            dist.barrier(group=side_group)
        return cls(
            place=replace(LaunchEnv(), rank=rank, ranks=ranks, launcher="program"),
            device=torch.device("cuda", torch.cuda.current_device())
            if gpu
            else torch.device("cpu"),
            backend=dist.get_backend(),
            side_group=side_group,
        )

    def leave(self) -> None:
        """Leave in order: all other ranks, then rank 0, which hosts the store; idempotent."""
        if self.store is None:
            return
        # First, because connections that close from now on are no loss.
        self._watchdog.stop()
        self._farewell()
        if dist.is_initialized():
            dist.destroy_process_group()
        self.store = self.side_group = None

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, *__: object
    ) -> None:
        # After an error the other ranks may be gone or in the middle of an exchange: destroying
        # the groups could wait for them. The process ends, and with it everything.
        if error is None:
            self.leave()
        # The loss of a peer is not this rank's own failure: it must not be announced as the cause.
        elif not isinstance(error, PeerLost):
            self._watchdog.stop(summarize_exception(error).partition("\n")[0])

    def doing(self, text: str, *arguments: object) -> None:
        """Note what this rank does from now on, for errors about a stall; costs an assignment.

        Args:
            text: "waits for bucket %d (%s) of step %d", with `arguments` as in `logging`.
        """
        self._watchdog.doing(text, arguments)

    def lost(self, seconds: float = 0.0) -> HeadwayError | None:
        """The error of a lost rank, if there is one; waits for it up to `seconds`."""
        return self._watchdog.lost(seconds)

    def states(self) -> dict[int, str]:
        """See `Watchdog.states`."""
        return self._watchdog.states()

    def sum(self, tensor: torch.Tensor, doing: str) -> None:
        """Sum a small tensor of the host over all ranks, in place; collective."""
        if not self.alone:
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
        """Say of broken or late exchanges, torch's or a channel's, who is lost or missing.

        Raises:
            HeadwayError: A rank has been lost already.
        """
        lost = self.lost()
        if lost is not None:
            raise lost
        try:
            with self._watchdog.waiting():
                yield
        except (RuntimeError, PeerLost, Stalled) as error:
            known = translate_exception(error, self, doing)
            if known is None:
                raise
            raise known from error

    def missing(self, waiting_for: str, *, grace_seconds: float = 2.0) -> tuple[int, ...]:
        """After a time-out: the ranks that do not wait, as this one does; not collective."""
        found: list[tuple[int, ...]] = []

        def look() -> None:
            found.append(self._without_note(waiting_for, grace_seconds))

        # The store's host may be the rank that hangs: then its answer does not come.
        thread = threading.Thread(target=look, name="headway-missing", daemon=True)
        thread.start()
        thread.join(grace_seconds + 2.0)
        # No answer means that the store's host hangs, which is rank 0.
        return found[0] if found else (0,)

    def _without_note(self, waiting_for: str, grace_seconds: float) -> tuple[int, ...]:
        # Every rank whose exchange timed out notes in the store what it waits for; after a short
        # grace period those without a note are the ones that the others wait for.
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
            # The store is gone, and with it rank 0, which hosts it.
            return () if self.rank == 0 else (0,)

    def _make_groups(self, store: Store) -> None:
        timeout = timedelta(seconds=self.timeout_seconds)
        if self.device.type == "cuda":
            # NCCL makes its communicators, and `all_gather_object` its tensors, on this device.
            torch.cuda.set_device(self.device)
            if isinstance(store, JobStore):
                store = open_torch_store(self.place, store)
        # The prefix keeps torch's keys apart from those of the meeting and of the goodbye.
        with drop_later_connections():
            dist.init_process_group(
                self.backend,
                store=PrefixStore("groups", store),
                rank=self.rank,
                world_size=self.ranks,
                timeout=timeout,
            )
        with drop_later_connections():
            self.side_group = dist.new_group(backend="gloo", timeout=timeout)

    def _farewell(self) -> None:
        assert self.store is not None
        try:
            # Rank 0 waits for the others: they need its store until they have left.
            self.store.set(f"left/{self.rank}", "")
            deadline = time.monotonic() + _FAREWELL_SECONDS
            keys = [f"left/{rank}" for rank in range(self.ranks)]
            while self.rank == 0 and time.monotonic() < deadline and not self.store.check(keys):
                time.sleep(0.002)
        except RuntimeError:
            return  # the host of the store is gone already: nobody needs the goodbye


def translate_exception(error: Exception, world: World, doing: str) -> HeadwayError | None:
    """What an exception of torch.distributed or a channel means; None: it says that itself.

    Args:
        world: Asked which rank is lost or, after a time-out, missing; this takes up to 5 s.
    """
    if isinstance(error, HeadwayError):
        # A channel knows only the rank at its other end, which may wait for a third one.
        broken, late, text = is_channel_error(error), isinstance(error, Stalled), error.what
    else:
        text = str(error)
        mismatch = _mismatch(text)
        if mismatch is not None:
            return mismatch
        late = is_timeout(error)
        known = late or isinstance(error, dist.DistError) or bool(_BROKEN.search(text))
        broken = known and is_exchange_error(error)
    if not broken:
        return None
    if late:
        return world.lost() or _stalled(world, doing)
    return world.lost(_NEWS_SECONDS) or PeerLost(
        f"another rank vanished during {doing}",
        why=_first_line(text),
        fix="Its own error, or the signal that killed it, is the cause.",
    )


_FINGERPRINT = re.compile(
    r"Rank (\d+) is running (?:inconsistent )?collective: CollectiveFingerPrint\("
    r"(?:SequenceNumber=(\d+), )?OpType=(\w+)(?:, TensorShape=\[([\d, ]*)\]"
    r"(?:, TensorDtypes=(\w+))?)?",
    re.IGNORECASE,
)


def _mismatch(text: str) -> WorkerFailed | None:
    """The error of ranks that call different collectives, as torch's debug level DETAIL finds it.

    Gloo itself compares nothing: it aborts the process, waits for ever, or sums what does not
    belong together.
    """
    found = [match.groups() for match in _FINGERPRINT.finditer(text)]
    if len(found) < 2:
        return None
    calls = sorted((int(rank), name, shape, dtype) for rank, _, name, shape, dtype in found)
    said = [
        f"rank {rank} calls {name.lower()}" + (f" of {dtype or ''}[{shape}]" if shape else "")
        for rank, name, shape, dtype in calls
    ]
    number = next((number for _, number, *_ in found if number), None)
    where = "" if number is None else f" (number {number} of their group)"
    return WorkerFailed(
        f"the ranks call different collectives: {', '.join(said)}",
        why=f"Collectives must be the same on all ranks, with equal shapes{where}.",
        fix="Look for calls that depend on the rank, on its samples, or on their number.",
    )


def _stalled(world: World, doing: str) -> Stalled:
    """The error of a time-out without a lost rank: who is missing, and what those do instead."""
    missing = world.missing(doing)
    states = world.states()
    who = f"{name_ranks(missing)} did not come" if missing else "the exchange took too long"
    why = f"Rank {world.rank} waited {world.timeout_seconds:g} s. "
    why += (
        "All other ranks wait, too."
        if missing
        else "All ranks wait: a link is broken, or they call different collectives (set "
        "TORCH_DISTRIBUTED_DEBUG=DETAIL to have the first one named)."
    )
    concerned = [rank for rank in missing or sorted(states) if rank in states]
    lines = [f"rank {rank}: {states[rank]}" for rank in concerned[:_MOST_STATES]]
    return Stalled(
        f"{doing}: {who}",
        why="\n  ".join([why, *lines]),
        fix="Check what those ranks do instead (slow data, a hang, a different number of "
        "batches), or allow more time (--timeout, timeout_seconds).",
    )


def _first_line(text: str) -> str:
    """The first line, without gloo's prefix "[path/to/file.cc:123]" and its advice."""
    line = text.strip().partition("\n")[0].partition(" This is typically")[0]
    return re.sub(r"^(\[[^\]]*\]\s*)+", "", line)


def _device(place: LaunchEnv, wish: str) -> torch.device:
    """The device of a rank.

    Raises:
        UsageError: Not one of the three words, or fewer GPUs than ranks on this machine.
    """
    if wish not in ("cpu", "cuda", "auto"):
        raise UsageError(f"there is no device {wish!r}", fix="Use cpu, cuda or auto.")
    if wish == "cpu":
        return torch.device("cpu")
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # By the number of ranks, too, so that those of one machine decide alike.
    if place.local_rank < found and place.local_ranks <= found:
        return torch.device("cuda", place.local_rank)
    if wish == "auto":
        return torch.device("cpu")
    raise UsageError(
        f"this machine has {counted(place.local_ranks, 'rank')}, and each needs a GPU; torch sees "
        f"{found}",
        where=f"rank {place.rank}",
        fix="Start fewer processes, or use --device cpu.",
    )


Result = TypeVar("Result")


def broadcast_from_rank0(
    rank: int, find: Callable[[], Result], exchanging: AbstractContextManager[None]
) -> Result:
    """Compute something on rank 0, and give its result or its error to all ranks; collective.

    Args:
        find: Called on rank 0 alone; its result travels as typed text (`channel.typed_text`).

    Raises:
        HeadwayError: What `find` raised on rank 0. Another exception, of the user's code, is raised
            there as it is, and a `WorkerFailed` on the other ranks.
    """
    found: list[Any] = [None]
    cause: Exception | None = None
    if rank == 0:
        try:
            found = [find()]
        except HeadwayError as error:
            found, cause = [error], error
        except Exception as error:
            # It may not be picklable, and its class may not exist elsewhere: its text travels.
            found, cause = [WorkerFailed(summarize_exception(error), where="rank 0")], error
    with exchanging:
        found[0] = broadcast_facts(found[0])
    if cause is not None:
        raise cause
    if isinstance(found[0], HeadwayError):
        raise mark_reported_elsewhere(found[0])
    result: Result = found[0]
    return result
