"""A worker process: sets up its environment, runs the entry, reports, ends; watches the others.

A guarded worker is the child of the process that the agent knows: where a signal ends it and the
others can go on without it, its guardian tells the agent nothing.

A worker writes its result or failure to disk before it ends. A thread waits for the end of the
launcher (then the worker ends at once) and of the sibling workers. When a sibling has ended without
a result, the attempt is over: the worker has a short grace period to notice and report that itself,
then it is ended, even in the middle of slow user code.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from multiprocessing import connection
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn

from headway.atomic_files import write_atomically
from headway.errors import HeadwayError, WorkerFailed
from headway.launch.emulation import EmulatedCluster, PacedCluster
from headway.run.distributed.failure_record import (
    FAILURES_FOLDER,
    FailureRecord,
    describe_failure,
    should_report,
    write_failure,
)
from headway.run.distributed.launch_env import ATTEMPT, NODE, LaunchEnv, NoPeersLeft, RunEnding
from headway.user_frames import innermost_user_frame

_EXIT = os._exit
GRACE_SECONDS = {"failed": 2.0, "gone": 1.0}
ORPHANED = 137
ABANDONED = 3
LATE, ALONE = 4, 5
"""Of a worker that has come back when the others were about to end, or were gone."""
_POLL_SECONDS = 0.1


def watch_others(outbox: Path, place: LaunchEnv) -> None:
    """Start the watching thread of this worker."""
    write_atomically(outbox / f"pid-{place.rank:05d}", str(os.getpid()))
    watcher = _Watcher(outbox, place)
    threading.Thread(target=watcher.run, name="headway-watch", daemon=True).start()


def end_process(status: int, *, flush: bool = True) -> None:
    """End this process and its data-loading children now; nothing is cleaned up or waited for.

    Args:
        flush: Write out what was printed; not from the watching thread, which could wait for ever.
    """
    # `os._exit` skips multiprocessing's own clean-up, which would end them.
    for child in multiprocessing.active_children():
        child.kill()
    for stream in (sys.stdout, sys.stderr) if flush else ():
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    _EXIT(status)


def noted_pids(outbox: Path) -> dict[int, int]:
    """Process id of each rank that came so far as to note it: that which the agent knows."""
    return {
        int(path.name.partition("-")[2]): int(path.read_text())
        for name in ("pid", "guardian")
        for path in outbox.glob(f"{name}-*")
    }


def guarded_pids(outbox: Path) -> dict[int, int]:
    """Process id of each guardian -> that of its worker, which others still depend on."""
    found = {}
    for note in outbox.glob("guardian-*"):
        rank = note.name.partition("-")[2]
        worker = outbox / f"pid-{rank}"
        if worker.exists() and not (outbox / f"{FREE}-{rank}").exists():
            found[int(note.read_text())] = int(worker.read_text())
    return found


def noted_leaves(outbox: Path) -> set[int]:
    """Ranks that ended because another one had ended."""
    return {int(path.name.partition("-")[2]) for path in outbox.glob("left-*")}


def noted_deaths(outbox: Path) -> list[int]:
    """Ranks that ended without a report, in the order of their deaths."""
    return [rank for _, rank in _death_notes(outbox)]


def first_death(outbox: Path) -> float:
    """When a rank first ended without a report, in Unix seconds; infinity: none did."""
    return min((seconds for seconds, _ in _death_notes(outbox)), default=math.inf)


def _death_notes(outbox: Path) -> list[tuple[float, int]]:
    return sorted(
        (float(p.read_text()), int(p.name.partition("-")[2])) for p in outbox.glob("gone-*")
    )


def noted_stop(outbox: Path) -> str | None:
    """Name of the signal by which a rank was stopped in order, or None."""
    return next((path.read_text() for path in sorted(outbox.glob("stopped-*"))), None)


def has_reported(outbox: Path, rank: int) -> bool:
    """Whether a rank left a result or a failure, or was lost and the others have gone on."""
    if any((outbox / f"{name}-{rank:05d}").exists() for name in ("result", "lost")):
        return True
    return any((outbox / FAILURES_FOLDER).glob(f"attempt-*-rank-{rank:05d}.json"))


def noted_losses(outbox: Path) -> dict[int, str]:
    """Ranks that have died and not come back, where the others have gone on, and how."""
    return {
        int(path.name.partition("-")[2]): path.read_text()
        for path in outbox.glob("lost-*")
        if not path.with_name(path.name.replace("lost", "result")).exists()
    }


FREE, NEEDED, ENDED = "free", "needed", "ended"
"""Notes of a rank: it depends on no other process; on it others do; it is about to end."""


def others_go_on(outbox: Path, rank: int, ranks: int) -> bool:
    """Whether the others of a run go on without a rank that has died now."""
    free = all((outbox / f"{FREE}-{each:05d}").exists() for each in range(ranks))
    bound = any((outbox / f"{note}-{rank:05d}").exists() for note in (NEEDED, ENDED))
    return free and not bound


class _Watcher:
    """The watching thread's file descriptors, which become ready when a process ends."""

    def __init__(self, outbox: Path, place: LaunchEnv) -> None:
        self._outbox = outbox
        self._rank, self._ranks = place.rank, place.ranks
        # File descriptors of processes exist on Linux only; elsewhere the launcher is watched.
        others = set(range(place.ranks)) - {place.rank} if hasattr(os, "pidfd_open") else set()
        self._unknown = others
        self._ended_pids: dict[int, int] = {}
        self._siblings: dict[int, tuple[int, int]] = {}
        self._launcher = multiprocessing.parent_process()

    def run(self) -> None:
        launcher = [] if self._launcher is None else [self._launcher.sentinel]
        while True:
            self._meet_siblings()
            waiting: list[int] = [*launcher, *self._siblings]
            # Polls only until every sibling has written its process id.
            pause = _POLL_SECONDS if self._unknown else None
            ready = connection.wait(waiting, timeout=pause)
            if any(item in launcher for item in ready):
                # The launcher's files stay: torch's FileStore, opened in a folder that is gone,
                # waits five minutes and holds the GIL. The forkserver, the last, removes them.
                end_process(ORPHANED, flush=False)
            for descriptor in ready:
                assert isinstance(descriptor, int)
                os.close(descriptor)
                rank, self._ended_pids[rank] = self._siblings.pop(descriptor)
                self._ended(rank)

    def _meet_siblings(self) -> None:
        for rank in sorted(self._unknown):
            try:
                pid = int((self._outbox / f"pid-{rank:05d}").read_text())
            except FileNotFoundError:
                continue
            if pid == self._ended_pids.get(rank):  # it may come back, in another process
                continue
            self._unknown.discard(rank)
            try:
                self._siblings[os.pidfd_open(pid)] = rank, pid
            except ProcessLookupError:
                self._ended_pids[rank] = pid
                self._ended(rank)

    def _ended(self, rank: int) -> None:
        if (self._outbox / f"result-{rank:05d}").exists():
            return
        how = "failed" if has_reported(self._outbox, rank) else "gone"
        # A lost one counts as reported once its guardian has noted it.
        if (how == "gone" or self._was_lost(rank)) and others_go_on(
            self._outbox, rank, self._ranks
        ):
            self._unknown.add(rank)
            return
        path = self._outbox / f"gone-{rank:05d}"
        # The first note counts: deaths are ordered by it.
        if how == "gone" and not path.exists():
            with contextlib.suppress(OSError):
                write_atomically(path, repr(time.time()))
        threading.Timer(GRACE_SECONDS[how], self._leave).start()

    def _was_lost(self, rank: int) -> bool:
        return (self._outbox / f"lost-{rank:05d}").exists()

    def _leave(self) -> None:
        # Else the launcher would take this rank's end for one of its own accord.
        with contextlib.suppress(OSError):
            write_atomically(self._outbox / f"left-{self._rank:05d}", b"")
        end_process(ABANDONED, flush=False)


INTERRUPTED = 130
STOPPED = 143
LINGER_SECONDS = 1.5
REPORT_SECONDS = 3.0
_SET_DEATH_SIGNAL, _GET_DEATH_SIGNAL = 1, 2
# What the agent sets for each worker must not be overwritten by the launcher's own variables.
_OF_AGENT = ("TORCHELASTIC_", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "GROUP_", "ROLE_")
_OF_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every worker is sent.

    Attributes:
        entry: Called as entry(place, *arguments); a text is "module:function".
        outbox: Private directory of this attempt: results, failures, process ids.
        forkserver: Process id of the one that the workers of this attempt are forked from.
        guarded: The others may go on where one dies.
        returns: How often one that has died then comes back, at most.
        environment: The launcher's variables; a forkserver that ran before may have old ones.
    """

    entry: Callable[..., Any] | str
    arguments: tuple[Any, ...]
    outbox: Path
    directory: Path | None
    attempt: int
    threads: int
    environment: Mapping[str, str]
    emulated: EmulatedCluster | PacedCluster | None = None
    forkserver: int | None = None
    guarded: bool = False
    returns: int = 0


def run_worker(job: Job) -> None:
    """Body of a worker process; the agent calls it. Ends the process itself unless all is well."""
    # Like torchrun's workers: a terminal's Ctrl-C goes to the agent, which passes it on once; data
    # loading processes never see it, so that the last step and the checkpoint can be finished.
    with contextlib.suppress(OSError):
        os.setsid()
    _unblock_signals()
    _end_with_forkserver(job.forkserver)
    rank = int(os.environ["RANK"])
    life = _guard(job, rank) if job.guarded else 0
    if life is None:
        return
    ending = WorkerExit(lambda error: _record_or_print(job, rank, error))
    with _exits_reported(ending):
        try:
            stopped_by = _run_entry(job, ending, life)
        except KeyboardInterrupt:
            end_process(INTERRUPTED)
        except RunEnding:
            end_process(LATE)
        except NoPeersLeft:
            end_process(ALONE)
        except BaseException as error:
            ending(_unless_exit(error))
        if stopped_by:
            # The agent is ending its workers: it will not come to collect a return value.
            end_process(STOPPED)
        if job.guarded:
            end_process(0)


def _guard(job: Job, rank: int) -> int | None:
    """Fork the worker and wait for its end, and again while it comes back.

    Returns:
        In the worker, the number of its life, from 0; in the guardian None: the rank has ended.
    """
    guardian, ranks = os.getpid(), int(os.environ["WORLD_SIZE"])
    write_atomically(job.outbox / f"guardian-{rank:05d}", str(guardian))
    passed: list[int] = []
    children: list[int] = []

    def pass_on(number: int, _: object) -> None:
        passed.append(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(children[-1], number)

    handled = [
        number
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]
    for life in itertools.count():
        signal.pthread_sigmask(signal.SIG_BLOCK, handled)
        child = os.fork()
        if child == 0:
            for number in handled:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
            _unblock_signals()
            if sys.platform == "linux":
                ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, int(signal.SIGKILL))
            if os.getppid() != guardian:
                os.kill(os.getpid(), signal.SIGKILL)
            return life
        children.append(child)
        for number in handled:
            signal.signal(number, pass_on)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status in (0, LATE):
            return None
        if status == ALONE:
            (job.outbox / f"lost-{rank:05d}").unlink(missing_ok=True)
            status = -signal.SIGKILL
            break
        if status > 0:
            end_process(status)
        if passed or not others_go_on(job.outbox, rank, ranks):
            break
        write_atomically(job.outbox / f"lost-{rank:05d}", signal.Signals(-status).name)
        if life == job.returns:
            return None
    with contextlib.suppress(OSError):  # of SIGKILL, which has no handler
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
    return None


def _run_entry(job: Job, ending: WorkerExit, life: int) -> str:
    """Set up the worker, run the entry, write its result; returns the signal that stopped it."""
    _set_environment(job)
    # A forkserver's children would start their own data-loading processes by it: without the
    # user's modules and state. The platform's default is the first of the list.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    here = _enter_node(job) if job.emulated else LaunchEnv.here()
    place = replace(
        here,
        emergency=ending.from_thread,
        meeting=job.outbox / "store",
        note_folder=job.outbox if job.guarded else None,
        life=life,
    )
    watch_others(job.outbox, place)
    with _signals_noticed() as signals:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        import torch  # here, where its failure is this rank's error
        import torch.distributed as dist

        torch.set_num_threads(job.threads)
        dist.set_debug_level_from_env()  # type: ignore[attr-defined]  # the forkserver read another
        entry = resolve_name(job.entry) if isinstance(job.entry, str) else job.entry
        # Pickled here, so that a result which cannot be is an error of this rank.
        result = pickle.dumps(entry(place, *job.arguments))
        stopped_by = signals()
        if stopped_by:
            write_atomically(job.outbox / f"stopped-{place.rank:05d}", stopped_by)
        write_atomically(job.outbox / f"result-{place.rank:05d}", result)
        return stopped_by or signals()


def _record_or_print(job: Job, rank: int, error: BaseException) -> FailureRecord:
    record = describe_failure(rank, job.attempt, error)
    _write_record(record, job.outbox, job.directory)
    if not has_reported(job.outbox, rank):
        # The launcher finds nothing, and can say no more than the exit code.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(f"{record.error()}\n{record.trace}\n")
            sys.stderr.flush()
    return record


def _unblock_signals() -> None:
    """Let signals end this worker; the forkserver, whose handlers it has, outlives them."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # under nohup
            signal.signal(number, signal.SIG_DFL)


def _end_with_forkserver(forkserver: int | None) -> None:
    """Have the kernel kill this worker if the forkserver dies; the launcher starts another."""
    # torch has it send SIGINT (`torch.multiprocessing.spawn._wrap`): a request to stop in order,
    # of which the user knows nothing. prctl(2), linux/prctl.h; elsewhere torch does nothing.
    if sys.platform == "linux":
        chosen, prctl = ctypes.c_int(), ctypes.CDLL(None).prctl
        prctl(_GET_DEATH_SIGNAL, ctypes.byref(chosen))
        if chosen.value:
            prctl(_SET_DEATH_SIGNAL, int(signal.SIGKILL))
    # It has died already, and the launcher knows nothing of a process that it cannot wait for.
    if forkserver is not None and os.getppid() != forkserver:
        os.kill(os.getpid(), signal.SIGKILL)


def run_rank_here(
    entry: Callable[..., Any],
    arguments: tuple[Any, ...],
    *,
    place: LaunchEnv,
    directory: Path | None,
    tell: Callable[[HeadwayError], None],
) -> Any:
    """Run one rank in this process, in a world that another launcher (torchrun, srun) has made.

    After an error the process ends at once with the error's exit code: clean-ups of the
    communication library could wait for ranks that are gone.

    Args:
        tell: Called with an error that began in this rank (not with its echo in other ranks).
    """

    def report(error: BaseException) -> FailureRecord:
        record = describe_failure(place.rank, place.attempt, error)
        _write_record(record, directory)
        if should_report(record, error):
            tell(record.error())
        return record

    ending = WorkerExit(report)
    try:
        with _exits_reported(ending):
            return entry(replace(place, emergency=ending.from_thread), *arguments)
    except KeyboardInterrupt:
        end_process(INTERRUPTED)
    except BaseException as error:
        ending(_unless_exit(error))


class WorkerExit:
    """Reports one error and ends the process, whichever thread comes first with one."""

    def __init__(self, report: Callable[[BaseException], FailureRecord]) -> None:
        self._report = report
        self._claimed = threading.Lock()

    def __call__(self, error: BaseException) -> None:
        """End this process with the error's exit code; a second error is not reported."""
        if not self._claimed.acquire(blocking=False):
            # Another thread is reporting, and ends this process unless it hangs.
            time.sleep(REPORT_SECONDS)
            end_process(ABANDONED, flush=False)
        with _undisturbed():
            record = self._report(error)
        for pid in getattr(error, "frozen", ()):
            # A stopped process does not end by itself, and does not even notice a SIGTERM.
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if record.secondary:
            # An agent reports the first dead worker that it sees: let it see the other one, with
            # the signal that killed it. It ends this one then.
            time.sleep(LINGER_SECONDS)
        end_process(record.exit_code)

    def from_thread(self, error: HeadwayError) -> None:
        """The same from another thread, while the main thread hangs."""
        # The main thread may hold a lock that the report needs: end without it after a while.
        end = threading.Timer(REPORT_SECONDS, end_process, (ABANDONED,), {"flush": False})
        end.daemon = True
        end.start()
        self(error)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    # An agent sends SIGTERM to all when the first rank has ended, which would cut off a slow report
    # of the cause. Only the main thread may set a signal handler.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def _write_record(record: FailureRecord, *directories: Path | None) -> None:
    """Write a failure down, for the launcher and in the run directory."""
    for directory in filter(None, directories):
        with contextlib.suppress(OSError):  # a full disk must not hide the error itself
            write_failure(directory, record)


@contextlib.contextmanager
def _exits_reported(ending: WorkerExit) -> Iterator[None]:
    """Inside, `os._exit` of the user's code is an error with its line, whatever the status.

    A launcher takes status 0 for success, and waits for the other ranks for ever.
    """
    own = os.getpid()

    def leave(status: int) -> NoReturn:
        # Children of a worker that were forked end themselves by it.
        if os.getpid() == own:
            ending(_exit_error(status))
        _EXIT(status)

    os._exit = leave
    try:
        yield
    finally:
        os._exit = _EXIT


def _exit_error(status: int) -> WorkerFailed:
    frame = innermost_user_frame(traceback.extract_stack())
    place = f"Called at {frame.filename}:{frame.lineno}, in {frame.name}." if frame else ""
    return WorkerFailed(
        f"the code called os._exit({status})",
        why=place,
        fix="Raise an exception to stop with an error; return to stop without.",
    )


def _unless_exit(error: BaseException) -> BaseException:
    # sys.exit in a worker is a failure like any other: the other ranks need this one.
    if not isinstance(error, SystemExit):
        return error
    return WorkerFailed(
        f"the code called sys.exit({error.code!r})",
        fix="Raise an exception to stop with an error; return to stop without.",
    )


def _set_environment(job: Job) -> None:
    for name, value in job.environment.items():
        if not name.startswith(_OF_AGENT) and name not in _OF_RANK:
            os.environ[name] = value
    os.environ[ATTEMPT] = str(job.attempt)
    os.environ["OMP_NUM_THREADS"] = str(job.threads)
    # All ranks are on this machine: never depend on what its host name stands for, and never listen
    # at the interface that the shell names for runs of several machines.
    named = set(os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
    if named != {"lo"} and any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def _enter_node(job: Job) -> LaunchEnv:
    """Enter the namespace of this rank's node, before any socket is made."""
    assert job.emulated is not None
    cluster, rank = job.emulated.cluster, int(os.environ["RANK"])
    name = cluster.nodes_of_ranks[rank]
    ranks = cluster.ranks_of(name)
    job.emulated.enter(name, job.outbox)
    os.environ["LOCAL_RANK"] = str(ranks.index(rank))
    os.environ["LOCAL_WORLD_SIZE"] = str(len(ranks))
    os.environ["GROUP_RANK"] = str(cluster.names.index(name))
    os.environ["GROUP_WORLD_SIZE"] = str(len(cluster.nodes))
    os.environ["GLOO_SOCKET_IFNAME"] = job.emulated.interface
    os.environ[NODE] = name
    return replace(LaunchEnv.here(), pace=job.emulated.pace(name, job.outbox.parent))


@contextlib.contextmanager
def _signals_noticed() -> Iterator[Callable[[], str]]:
    """Yields a function: the name of a signal to stop that has arrived inside, or ""."""
    # By the wake-up descriptor: the handlers belong to the user's code and the training loop.
    read_end, write_end = socket.socketpair()
    read_end.setblocking(False)
    write_end.setblocking(False)
    before = signal.set_wakeup_fd(write_end.fileno(), warn_on_full_buffer=False)
    # A data-loading process must not tell its own signals on a copy of the socket.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))

    def arrived() -> str:
        with contextlib.suppress(BlockingIOError):
            for number in read_end.recv(4096):
                if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                    return signal.Signals(number).name
        return ""

    try:
        yield arrived
    finally:
        signal.set_wakeup_fd(before)
        read_end.close()
        write_end.close()
