"""What each process of `headway segment` does: fill objects until every seed is settled."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
import torch

from headway.atomic_files import write_atomically
from headway.floodfill.array_files import open_array
from headway.floodfill.canvas import Canvas
from headway.floodfill.crews import Crews, prepare_crews
from headway.floodfill.network import Triple, scale_image
from headway.floodfill.prediction import FovPredictor
from headway.floodfill.seed_ledger import (
    LedgerFigures,
    SeedLedger,
    prepare_ledger,
    release_claims,
)
from headway.floodfill.seeds import peak_seeds, seed_groups
from headway.floodfill.segmentation_job import SegmentationJob
from headway.floodfill.weight_files import read_network
from headway.run.distributed.launch_env import LaunchEnv
from headway.run.distributed.world import World
from headway.run.training.stop_request import StopRequest
from headway.units import counted

# What waits must not take time from lent threads, which wait for each other.
_POLL_SECONDS = 0.1
_LINE_SECONDS = 2.0
_BUSY = 0.75
"""Share of its cores that a process with borrowed threads must get."""
_STARVED_FIELDS = 3
"""In a row; one may have had to prepare something."""
_FIELDS_ALONE = 50


def segment_in_worker(place: LaunchEnv, job: SegmentationJob) -> None:
    """Segment all sub-volumes with the other processes, or until a signal asks for the end."""
    image = open_array(job.volume)
    parts = job.parts(tuple(image.shape))
    network = read_network(job.weights, fov=job.fov, deltas=job.deltas)
    predict = FovPredictor(network, job.precision)
    own = torch.get_num_threads()
    with StopRequest() as request, World.join(place) as world:
        if world.rank == 0:
            _release_all(job, len(parts))
        world.barrier("waits for the work that is kept to be looked through")

        def stopped() -> bool:
            return request.requested is not None

        crews = Crews(job.folder)
        while not stopped() and (joined := crews.join()) is not None:
            number, first = joined
            voxels = np.asarray(image[parts[number].box])
            if first:
                _prepare(job, number, voxels)
            ledger = _open_ledger(job, number, stopped)
            if ledger is None:
                return
            canvas = Canvas(
                scale_image(voxels), predict, job.options, fov=job.fov, deltas=job.deltas
            )
            line = ProgressLine(ledger, partial(_place_in_volume, crews, number, len(parts)))
            _Filler(
                ledger,
                canvas,
                stopped,
                tell=line if world.rank == 0 else lambda: None,
                lend=LentThreads(ledger, partial(crews.size, number), own),
            ).fill_all()
            if crews.leave(number, complete=ledger.finished):
                _end(job, number, ledger)


def _release_all(job: SegmentationJob, parts: int) -> None:
    """Nobody works at what processes that were killed have left."""
    for number in range(parts):
        folder = job.ledger_path(number)
        if job.figures_path(number).exists():
            # Left, in part, where a process was killed while it deleted it.
            shutil.rmtree(folder, ignore_errors=True)
        elif folder.exists():
            release_claims(folder)
    prepare_crews(job.folder, [job.figures_path(number).exists() for number in range(parts)])


def _prepare(job: SegmentationJob, number: int, voxels: np.ndarray) -> None:
    folder = job.ledger_path(number)
    if folder.exists():
        return
    seeds = peak_seeds(voxels)
    margin = np.array(job.fov) // 2
    inside = ((seeds >= margin) & (seeds < np.array(voxels.shape) - margin)).all(axis=1)
    seeds = seeds[inside]
    prepare_ledger(folder, voxels.shape, seeds, seed_groups(voxels, seeds))


def _open_ledger(
    job: SegmentationJob, number: int, stopped: Callable[[], bool]
) -> SeedLedger | None:
    """The ledger, once the first process there has prepared it; None: a signal came before."""
    folder = job.ledger_path(number)
    while not folder.exists():
        if stopped():
            return None
        time.sleep(_POLL_SECONDS)
    options = job.options
    return SeedLedger(folder, distance=options.min_boundary_distance, min_size=options.min_size)


def _end(job: SegmentationJob, number: int, ledger: SeedLedger) -> None:
    """Keep the ids, and say that they are complete, last."""
    folder, path = job.ledger_path(number), job.segments_path(number)
    path.unlink(missing_ok=True)
    path.hardlink_to(folder / "segments.npy")
    write_atomically(job.figures_path(number), json.dumps(asdict(ledger.figures())))
    shutil.rmtree(folder)


def _place_in_volume(crews: Crews, number: int, parts: int) -> str:
    name = f"sub-volume {number + 1} of {parts}"
    return f"{name} ({crews.complete} complete)" if parts > 1 else name


@dataclass(frozen=True)
class _Filler:
    """Fills the objects of a ledger, with others.

    Attributes:
        stopped: Whether to end before all is done.
        tell: Called now and then.
        lend: Called before each field of view, with the seed.
    """

    ledger: SeedLedger
    canvas: Canvas
    stopped: Callable[[], bool]
    tell: Callable[[], None]
    lend: Callable[[int], None]

    def fill_all(self) -> None:
        while not self.ledger.finished and not self.stopped():
            self.tell()
            index = self.ledger.claim()
            if index is None:
                time.sleep(_POLL_SECONDS)
                continue
            self._fill(index)

    def _fill(self, index: int) -> None:
        ledger, canvas = self.ledger, self.canvas
        seen = _SeenBox()
        moves: list[Triple] = []
        settled = ledger.settled

        def go_on(box: tuple[slice, ...], position: Triple) -> bool:
            nonlocal settled
            seen.add(box)
            moves.append(position)
            ledger.mark(index, box, canvas.object_in(box))
            while True:
                self.tell()
                before, settled = settled, ledger.settled
                # A voxel that it has visited was taken since: it would have to be filled once more.
                taken = settled > before and any(ledger.is_taken(voxel) for voxel in moves)
                if taken or not ledger.is_worthwhile(index) or self.stopped():
                    return False
                if not ledger.pause(index):
                    break
                time.sleep(_POLL_SECONDS)
            self.lend(index)
            return True

        self.lend(index)
        filled = canvas.fill(ledger.seed(index), ledger.is_taken, go_on)
        if filled is None:
            ledger.give_up(index, seen.box, len(moves))
        else:
            ledger.submit(index, filled)


class LentThreads:
    """Threads of processes without an object to fill, lent to the one whose turn it is.

    All that this one does is needed; what others fill ahead may be in vain. Two threads on one
    field of view are nearly as fast as two processes, and its bits do not depend on their number.
    But threads wait for each other: where other programs use the cores, more threads are slower
    than one. A process that does not get its cores goes on without what was lent for a while, and
    if that is not enough, with one thread.

    Args:
        processes: How many work at this sub-volume.
        own: Threads of a process; it may still have others, lent in the sub-volume before.
    """

    def __init__(self, ledger: SeedLedger, processes: Callable[[], int], own: int) -> None:
        self._ledger, self._processes = ledger, processes
        self._own, self._now = own, torch.get_num_threads()
        self._index, self._starved = -1, 0
        self._alone = self._single = 0
        self._wall, self._used = time.monotonic(), time.process_time()

    def __call__(self, index: int) -> None:
        """Set the threads of this process, before a field of view of a seed."""
        wall, used = time.monotonic(), time.process_time()
        got = (used - self._used) / max(1e-9, wall - self._wall)
        # Threads that wait for each other use their cores; less is used if they do not get them.
        if index == self._index and self._now > 1:
            self._starved = self._starved + 1 if got < _BUSY * self._now else 0
        if self._starved == _STARVED_FIELDS:
            self._starved = 0
            if self._now > self._own:
                self._alone = _FIELDS_ALONE
            else:
                self._single = _FIELDS_ALONE
        self._index, self._wall, self._used = index, wall, used
        self._set_threads(index)

    def _set_threads(self, index: int) -> None:
        self._alone, self._single = max(0, self._alone - 1), max(0, self._single - 1)
        may = index == self._ledger.settled and not self._alone and not self._single
        idle = self._processes() - self._ledger.busy if may else 0
        threads = 1 if self._single else self._own * (1 + max(0, idle))
        if threads != self._now:
            torch.set_num_threads(threads)
            self._now = threads


class _SeenBox:
    """The box around boxes."""

    def __init__(self) -> None:
        self.box: tuple[slice, ...] | None = None

    def add(self, box: tuple[slice, ...]) -> None:
        before = self.box or box
        self.box = tuple(
            slice(min(a.start, b.start), max(a.stop, b.stop))
            for a, b in zip(before, box, strict=True)
        )


class ProgressLine:
    """A line about a sub-volume on standard error, now and then."""

    def __init__(self, ledger: SeedLedger, name: Callable[[], str]) -> None:
        self._ledger, self._name = ledger, name
        self._began = time.monotonic()
        self._next = self._began + _LINE_SECONDS
        self._before = ledger.figures()

    def __call__(self) -> None:
        """Write the line, unless the last one is younger than two seconds."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _LINE_SECONDS
        figures, before, seconds = self._ledger.figures(), self._before, now - self._began
        sys.stderr.write(
            f"{self._name()}: {counted(figures.objects, 'object')}, "
            f"{figures.voxels / 1e6:.2f} million voxels "
            f"({(figures.voxels - before.voxels) / seconds:,.0f}/s), "
            f"{counted(figures.moves, 'field')} of view "
            f"and {figures.under_way:,} of {counted(figures.busy, 'object')} under way "
            f"({(_all_moves(figures) - _all_moves(before)) / seconds:.1f}/s), "
            f"{figures.settled / max(1, figures.seeds):.0%} of the seeds settled\n"
        )
        sys.stderr.flush()


def _all_moves(figures: LedgerFigures) -> int:
    return figures.moves + figures.under_way + figures.in_vain
