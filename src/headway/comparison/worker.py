"""One process of a trial: `python -m headway.comparison.worker`, in the framework's environment.

Its job comes over standard input, which stays open as long as the comparison lives: when that ends,
however it does, this process ends, too. What it measured goes into a file.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import math
import os
import pickle
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.atomic_files import write_atomically

if TYPE_CHECKING:
    from torch import Tensor

    from headway.comparison.adapter import FrameworkAdapter, FrameworkJob
    from headway.launch.emulation import EmulatedCluster
    from headway.plans import Plan
    from headway.run.recipe.sent_recipe import SentRecipe


@dataclass(frozen=True, kw_only=True)
class WorkerJob:
    """What a process is told.

    Attributes:
        recipe: A reference, or a recipe object as bytes.
        overrides: Changes to a recipe that is a reference.
        adapter: "module:Class".
        warm_up: Steps before those that are measured, at least one.
        steps: That are measured.
        plan: For headway; None: data parallelism.
        shares: Into how many the serial reference cuts each batch.
        dropout: As the model has it; else off.
        node: The emulated node of this process.
        interface: Whose bytes are counted; "": another process counts them.
        folder: For the readings.
        path: Where the process that started this one finds modules.
    """

    recipe: SentRecipe | str
    overrides: tuple[str, ...]
    adapter: str
    rank: int
    ranks: int
    warm_up: int
    steps: int
    plan: Plan | None
    shares: int
    dropout: bool
    emulated: EmulatedCluster | None
    node: str
    interface: str
    folder: Path
    path: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RankReadings:
    """What a process measured.

    Attributes:
        first: Unix time at the end of the first step.
        seconds: Of every step behind the first.
        losses: Of every step from the first on; None where another process knows it.
        cpu_seconds: Of the process and its children in the measured steps, user and system.
        peak_bytes: The most resident memory that the process ever had.
        sent_bytes: Through the interface in the measured steps; None: another process counts.
        model_bytes: Of the parameters of the adapter's `model` that this process holds.
        draws: Whether the first step has drawn from torch's generator, as dropout does.
    """

    first: float
    seconds: tuple[float, ...]
    losses: tuple[float | None, ...]
    cpu_seconds: float
    peak_bytes: int
    sent_bytes: int | None
    model_bytes: int
    draws: bool


def readings_file(folder: Path, rank: int) -> Path:
    """Where a process leaves its readings."""
    return folder / f"readings-{rank}.json"


def failure_file(folder: Path, rank: int) -> Path:
    """Where a process says why it failed."""
    return folder / f"failure-{rank}.txt"


def stack_file(folder: Path, rank: int) -> Path:
    """Where a process says what it is doing when it is sent SIGUSR1."""
    return folder / f"stack-{rank}.txt"


def main(alive: list[FrameworkAdapter]) -> int:
    """Run the job that comes over standard input; the exit status.

    Args:
        alive: Gets the adapter, which the caller keeps until the process has ended: Gloo's groups
            may wait for ever, when they are taken down, for a process that is gone.
    """
    job: WorkerJob = pickle.load(sys.stdin.buffer)
    if job.emulated is not None and job.node:
        job.emulated.enter(job.node)  # before any other thread or socket
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.path += [folder for folder in job.path if folder not in sys.path]
    with stack_file(job.folder, job.rank).open("w") as stack:
        faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
        try:
            adapter, given = _prepare(job)
            alive.append(adapter)
            readings = _measure(job, adapter, given)
        except BaseException as error:
            traceback.print_exc()
            said = f"{type(error).__name__}: {error}"
            failure_file(job.folder, job.rank).write_text(said)
            return 1
        finally:
            faulthandler.unregister(signal.SIGUSR1)
    write_atomically(readings_file(job.folder, job.rank), json.dumps(asdict(readings)))
    return 0


def _end_with_parent() -> None:
    # Not through Python's buffer, whose lock it would still hold at the end.
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(1)


def _measure(job: WorkerJob, adapter: FrameworkAdapter, given: FrameworkJob) -> RankReadings:
    model_bytes = _parameter_bytes(getattr(adapter, "model", None))
    losses: list[float | None] = []
    stamps: list[float] = []
    first = cpu = 0.0
    sent, draws = 0, False
    batches = _batches(adapter, given, job)
    for step in range(job.warm_up + job.steps):
        if step == job.warm_up:
            cpu, sent = _cpu_seconds(), _sent_bytes(job.interface)
        batch = next(batches)
        before = _generator_state() if step == 0 else None
        loss = adapter.step(batch)
        if before is not None:
            draws = before != _generator_state()
        # As a loop does that prints it; it also ends whatever the step has left to be done.
        number = loss if loss is None or isinstance(loss, float) else loss.detach()
        losses.append(None if number is None else _finite(float(number), step))
        stamps.append(time.perf_counter())
        if step == 0:
            first = time.time()
    cpu, sent = _cpu_seconds() - cpu, _sent_bytes(job.interface) - sent
    peak = _peak_bytes()
    adapter.close()
    return RankReadings(
        first=first,
        seconds=tuple(after - before for before, after in itertools.pairwise(stamps)),
        losses=tuple(losses),
        cpu_seconds=cpu,
        peak_bytes=peak,
        sent_bytes=sent if job.interface else None,
        model_bytes=model_bytes,
        draws=draws,
    )


def _prepare(job: WorkerJob) -> tuple[FrameworkAdapter, FrameworkJob]:
    """The adapter, ready for its first step."""
    from headway.comparison.adapter import FrameworkJob
    from headway.run.recipe.factory import load_recipe

    module, _, name = job.adapter.partition(":")
    adapter: FrameworkAdapter = getattr(import_module(module), name)()
    given = FrameworkJob(
        recipe=load_recipe(job.recipe, job.overrides),
        rank=job.rank,
        ranks=job.ranks,
        plan=job.plan,
        shares=job.shares,
        dropout=job.dropout,
    )
    adapter.start(given)
    adapter.prepare(given)
    return adapter, given


def _batches(adapter: FrameworkAdapter, given: FrameworkJob, job: WorkerJob) -> Iterator[Any]:
    if adapter.reads != "by itself":
        return given.batches(adapter.reads)
    return iter([None] * (job.warm_up + job.steps))


def _parameter_bytes(model: Any) -> int:
    parameters: Iterable[Tensor] = getattr(model, "parameters", tuple)()
    # Of a DTensor, as FSDP2 makes them, this process's part.
    own = [one.to_local() if hasattr(one, "to_local") else one for one in parameters]
    return sum(one.numel() * one.element_size() for one in own)


def _generator_state() -> bytes:
    import torch

    return torch.get_rng_state().numpy().tobytes()


def _finite(loss: float, step: int) -> float:
    if not math.isfinite(loss):
        raise ValueError(f"the loss of step {step} is {loss}")
    return loss


def _cpu_seconds() -> float:
    # The children are those of the data loader; their time counts once they have ended.
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def _peak_bytes() -> int:
    # Not ru_maxrss, which a process takes over from the one that has forked it.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _sent_bytes(interface: str) -> int:
    """What an interface has sent since it is there; with all headers."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines() if interface else ():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[8])
    return 0


if __name__ == "__main__":
    alive: list[FrameworkAdapter] = []
    status = main(alive)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # without waiting for threads that a framework may leave behind
