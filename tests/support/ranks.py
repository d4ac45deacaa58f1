"""Tests on several ranks: `@ranks(n)` runs a test's body in n fresh processes that form a world.

    @ranks(4)
    def test_sum(world):
        one = torch.ones(3)
        dist.all_reduce(one, group=world.group)
        assert one.tolist() == [4, 4, 4]

The processes come from a forkserver that has imported torch already (0.1 to 0.3 s a world after the
first), find each other through a file (no ports), speak gloo, and compute on one thread each. A
world that hangs is asked for its stacks and killed; it fails its own test and nothing else. What a
rank raised, or the signal that killed it, is in the message, with the rank.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

import pytest

from headway.launch import forkserver as warm
from support.leaks import alive_children, alive_threads, process_ids, settled
from support.patience import patient

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

PRELOAD = [*warm.PRELOAD, "pytest", "headway.verification", "headway.checkpoint.storage"]
GRACE = 1.0
"""Seconds that the other ranks get to end by themselves once one of them has failed."""


@dataclass(frozen=True, kw_only=True)
class World:
    """What a rank knows.

    Attributes:
        rank: Its number.
        size: The number of ranks.
        group: The default process group (gloo).
        directory: An empty directory that all ranks of this world share; deleted afterwards.
    """

    rank: int
    size: int
    group: ProcessGroup
    directory: Path


class RanksFailed(AssertionError):
    """At least one rank raised, was killed, or did not end in time; the message holds all."""


def ranks(
    size: int,
    timeout: float = 60,
    *,
    check: Callable[[list[Any]], None] | None = None,
    mortal: Collection[int] = (),
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Decorator: run the body `def test_x(world, ...)` on `size` ranks.

    The other parameters of the body are pytest fixtures and parameters; they reach the ranks by
    value, so they must pickle. The variables and the directory of the test's process do, too, and
    its warning filters: a warning on a rank is an error there.

    Args:
        size: The number of ranks.
        timeout: Seconds from the start of the processes, on a quiet machine (`support.patience`).
        check: Called in the test's process with what the body returned on each rank, in order of
            rank; assertions read best there. Without it the body must return None.
        mortal: Ranks that may be killed by a signal; they return None.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        signature = inspect.signature(body)
        own = list(signature.parameters.values())[1:]

        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            __tracebackhide__ = True
            try:
                results = run_ranks(size, body, timeout=timeout, mortal=mortal, **arguments)
            except RanksFailed as error:
                failure = pytest.fail.Exception(str(error), pytrace=False)
            else:
                failure = None
            if failure is not None:
                raise failure  # outside of the handler: the message is whole, a chain adds noise
            if check is not None:
                check(results)
            elif any(result is not None for result in results):
                pytest.fail("the body returned values that nobody looks at: give ranks(check=...)")

        test.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
        return test

    return decorate


def run_ranks(
    size: int,
    body: Callable[..., Any],
    *arguments: Any,
    timeout: float = 60,
    mortal: Collection[int] = (),
    **named: Any,
) -> list[Any]:
    """Run `body(world, *arguments, **named)` on `size` ranks; what it returned, in order of rank.

    Args:
        size: The number of ranks.
        body: A function at the top level of its module (the ranks import that module).
        arguments: Passed by value; they must pickle, and so must the results.
        timeout: Seconds from the start of the processes, on a quiet machine (`support.patience`).
        mortal: Ranks that may be killed by a signal; they return None.
        named: As `arguments`.

    Raises:
        RanksFailed: With the report of every rank that raised, was killed or did not end.
    """
    __tracebackhide__ = True
    timeout = patient(timeout)
    folder = Path(tempfile.mkdtemp(prefix="headway-world-"))
    try:
        (folder / "shared").mkdir()
        job = _Job(
            size=size,
            folder=folder,
            module=body.__module__,
            file=inspect.getfile(inspect.unwrap(body)),
            name=body.__qualname__,
            patience=timeout + 60,
            cargo=pickle.dumps((arguments, named, warnings.filters)),
            environment=dict(os.environ),
            directory=os.getcwd(),
        )
        processes = _start(job)
        try:
            verdict = _wait(processes, job, timeout, frozenset(mortal))
        finally:
            _end(processes)
        return _results(job, verdict, frozenset(mortal))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What every rank needs to know to begin."""

    size: int
    folder: Path
    module: str
    file: str
    name: str
    patience: float
    cargo: bytes
    environment: Mapping[str, str]
    directory: str

    def path(self, kind: str, rank: int) -> Path:
        return self.folder / f"{kind}-{rank}"


@dataclass(frozen=True)
class _Verdict:
    """Which ranks ended badly, in which order, and why: rank -> one sentence."""

    faults: Mapping[int, str]


@dataclass(frozen=True)
class _Outcome:
    """What a rank leaves in its result file; `kind` is "value", "skip" or "raise"."""

    kind: str
    value: Any
    time: float


# ---- in the test's process ------------------------------------------------------------------


def warm_up() -> None:
    """Start the process that all ranks are forked from, if it does not run yet."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    threads = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # is read when the forkserver imports torch
    try:
        forkserver.ensure_running()
    finally:
        if threads is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = threads


def _start(job: _Job) -> list[ForkServerProcess]:
    warm_up()
    context = multiprocessing.get_context("forkserver")
    processes: list[ForkServerProcess] = []
    try:
        for rank in range(job.size):
            process = context.Process(target=_live, args=(job, rank), name=f"rank {rank}")
            process.start()
            processes.append(process)
    except BaseException:
        _end(processes)
        raise
    return processes


def _wait(
    processes: list[ForkServerProcess], job: _Job, timeout: float, mortal: frozenset[int]
) -> _Verdict:
    """Wait for all ranks; once one has failed or the time is over, ask the rest for stacks."""
    faults: dict[int, str] = {}
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    deadline = time.monotonic() + timeout
    while running:
        ready = connection.wait(list(running), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for sentinel in ready:
            rank = running.pop(sentinel)  # type: ignore[call-overload]
            processes[rank].join()
            fault = _fault(job, rank, processes[rank].exitcode or 0)
            if fault and not (rank in mortal and fault.startswith("was killed")):
                if not faults:
                    deadline = min(deadline, time.monotonic() + GRACE)
                faults[rank] = fault
    late = f"did not end within {timeout:g} s"
    if faults:
        late = f"still ran {GRACE:g} s after the first failure"
    left = sorted(running.values())
    _ask_for_stacks(processes, job, left)
    return _Verdict(faults | dict.fromkeys(left, late))


def _fault(job: _Job, rank: int, code: int) -> str:
    """Why a rank that has ended did not end well; empty if it did."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    if code > 0 or not job.path("result", rank).exists():
        return f"exited with code {code} without a result"
    return "raised" if _outcome(job, rank).kind == "raise" else ""


def _outcome(job: _Job, rank: int) -> _Outcome:
    outcome = pickle.loads(job.path("result", rank).read_bytes())
    assert isinstance(outcome, _Outcome)
    return outcome


def _ask_for_stacks(processes: list[ForkServerProcess], job: _Job, left: list[int]) -> None:
    """Have every rank in `left` write its stacks; gives up after two seconds."""
    for rank in left:
        if job.path("stack", rank).exists():  # otherwise the signal would kill it
            os.kill(processes[rank].pid or 0, signal.SIGUSR1)
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        if all(_text(job.path("stack", rank)).count("\n") > 1 for rank in left):
            time.sleep(0.05)  # the last lines of the stack
            return
        time.sleep(0.02)


def _end(processes: list[ForkServerProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join()
        process.close()


def _results(job: _Job, verdict: _Verdict, mortal: frozenset[int]) -> list[Any]:
    __tracebackhide__ = True
    if verdict.faults:
        order = sorted(verdict.faults, key=lambda rank: _order(job, rank, verdict.faults[rank]))
        names = ", ".join(f"rank {rank} {verdict.faults[rank]}" for rank in order)
        reports = [_report(job, rank, verdict.faults[rank]) for rank in order]
        raise RanksFailed("\n\n".join([f"{names} (of {job.size} ranks)", *reports]))
    outcomes = [
        _Outcome("value", None, 0.0)
        if rank in mortal and not job.path("result", rank).exists()
        else _outcome(job, rank)
        for rank in range(job.size)
    ]
    for rank, outcome in enumerate(outcomes):
        sys.stdout.write(_text(job.path("output", rank)))
        if outcome.kind == "skip":
            pytest.skip(f"rank {rank}: {outcome.value}")
    return [pickle.loads(outcome.value) if outcome.value else None for outcome in outcomes]


def _order(job: _Job, rank: int, fault: str) -> tuple[int, float, int]:
    """The cause first: a kill, then what was raised first, then those that waited for it."""
    if fault == "raised":
        return (1, _outcome(job, rank).time, rank)
    return (2 if fault.startswith(("did not", "still")) else 0, 0.0, rank)


def _report(job: _Job, rank: int, fault: str) -> str:
    parts = [f"---- rank {rank} of {job.size} {fault}"]
    if fault == "raised":
        parts.append(str(_outcome(job, rank).value).rstrip())
    stack = _text(job.path("stack", rank)).rstrip()
    if fault.startswith(("did not", "still")):
        parts.append(stack or "(it gave no stack: it had not begun, or holds its interpreter)")
    output = _text(job.path("output", rank)).rstrip()
    if output:
        parts += [f"---- output of rank {rank} (its end)", output[-4000:]]
    return "\n".join(parts)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""


# ---- in the process of a rank -----------------------------------------------------------------


def _live(job: _Job, rank: int) -> None:
    """The life of a rank, from its first line to its result file."""
    import faulthandler

    _die_with_parent()
    with open(job.path("output", rank), "wb", buffering=0) as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    with open(job.folder / f"early-{rank}", "wb") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        os.rename(stack.name, job.path("stack", rank))  # from now on the signal may be sent
        try:
            outcome = _Outcome("value", pickle.dumps(_run(job, rank)), time.time())
        except pytest.skip.Exception as error:
            outcome = _Outcome("skip", str(error), time.time())
        except BaseException as error:
            outcome = _Outcome("raise", _trace(error, job.file), time.time())
        early = job.folder / f"result-{rank}.early"
        early.write_bytes(pickle.dumps(outcome))
        early.rename(job.path("result", rank))
        faulthandler.unregister(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        sys.stdout.flush()
        sys.stderr.flush()
        # A rank is a process of its own: nothing that a test left behind may delay its end.
        os._exit(0)


def _run(job: _Job, rank: int) -> Any:
    import torch
    import torch.distributed as dist

    os.environ.clear()
    os.environ.update(job.environment)
    os.environ["OMP_NUM_THREADS"] = "1"
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no look-up of the host's name
    os.chdir(job.directory)
    torch.set_num_threads(1)
    known = process_ids()
    body = _find(_load(job.module, job.file), job.name)
    arguments, named, filters = pickle.loads(job.cargo)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job.folder / 'rendezvous'}",
        rank=rank,
        world_size=job.size,
        timeout=timedelta(seconds=job.patience),  # the harness gives up first, with stacks
    )
    dist.barrier()
    group = dist.group.WORLD
    assert group is not None
    world = World(rank=rank, size=job.size, group=group, directory=job.folder / "shared")
    with warnings.catch_warnings():
        warnings.filters[:] = filters  # type: ignore[index]
        result = body(world, *arguments, **named)
    left = settled(lambda: [*alive_threads(), *alive_children(known)])
    assert not left, f"the body left behind: {', '.join(left)}"
    if dist.is_initialized():
        dist.destroy_process_group()
    return result


def _load(name: str, file: str) -> ModuleType:
    """The module of the test, as pytest names it, from its file."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _find(module: ModuleType, name: str) -> Callable[..., Any]:
    """The body `name` of a module, without its decorator."""
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part)
    body = inspect.unwrap(found)
    assert callable(body)
    return body


def _die_with_parent() -> None:
    """Have the kernel kill this rank when the test's process ends, whatever this rank is doing.

    The parent holds the other end of a pipe; its end is an event on that pipe, and the event's
    signal is SIGKILL. (The signal of a parent's death would not do: this rank's parent is the
    forkserver, and the forkserver lives as long as any rank does.)
    """
    import fcntl

    parent = multiprocessing.parent_process()
    assert parent is not None
    line = parent.sentinel
    fcntl.fcntl(line, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(line, fcntl.F_SETSIG, signal.SIGKILL)  # type: ignore[attr-defined]
    fcntl.fcntl(line, fcntl.F_SETFL, fcntl.fcntl(line, fcntl.F_GETFL) | os.O_ASYNC)
    if connection.wait([line], 0):
        os._exit(1)  # it had ended before


def _trace(error: BaseException, file: str) -> str:
    """The traceback, and the local variables of the innermost frame of the test's file."""
    lines = traceback.format_exception(error)
    frame, step = None, error.__traceback__
    while isinstance(step, TracebackType):
        if step.tb_frame.f_code.co_filename == file:
            frame = step.tb_frame
        step = step.tb_next
    if frame is not None:
        lines.append("with\n")
        lines += [f"    {name} = {_short(value)}\n" for name, value in frame.f_locals.items()]
    return "".join(lines)


def _short(value: object) -> str:
    try:
        text = repr(value)
    except Exception as error:
        return f"<{type(value).__name__}: {error!r}>"
    return text if len(text) <= 300 else f"{text[:300]}..."
