"""What each process of `headway segment` does: fill objects until every seed is settled."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from headway.documents import parse_json
from headway.floodfill.array_files import open_array
from headway.floodfill.canvas import Canvas
from headway.floodfill.network import Triple, scale_image
from headway.floodfill.prediction import FovPredictor
from headway.floodfill.seed_ledger import (
    LedgerFigures,
    SeedLedger,
    prepare_ledger,
    release_claims,
)
from headway.floodfill.seeds import peak_seeds, seed_groups
from headway.floodfill.segmentation_job import SegmentationJob, finished_path
from headway.floodfill.weight_files import read_network
from headway.run.distributed.launch_env import LaunchEnv
from headway.run.distributed.world import World
from headway.run.training.stop_request import StopRequest
from headway.units import counted

_POLL_SECONDS = 0.02
_LINE_SECONDS = 2.0
_BUSY = 0.75
"""Share of its cores that a process with borrowed threads must get."""
_FIELDS_ALONE = 50


def segment_in_worker(place: LaunchEnv, job: SegmentationJob) -> list[LedgerFigures]:
    """Segment all sub-volumes, one after the other, with the other processes.

    Returns:
        The figures of the sub-volumes that are finished.
    """
    image = open_array(job.volume)
    parts = job.parts(tuple(image.shape))
    network = read_network(job.weights, fov=job.fov, deltas=job.deltas)
    predict = FovPredictor(network, job.precision)
    done: list[LedgerFigures] = []
    with StopRequest() as request, World.join(place) as world:

        def stopped() -> bool:
            return request.requested is not None

        for number, part in enumerate(parts):
            world.barrier(f"waits for sub-volume {number + 1} to begin")
            if not (figures := _figures_path(job, number)).exists():
                voxels = np.asarray(image[part.box])
                folder = job.folder / f"ledger-{number:05d}"
                if world.rank == 0:
                    _begin(folder, voxels, job)
                world.barrier(f"waits for the seeds of sub-volume {number + 1}")
                ledger = SeedLedger(
                    folder,
                    distance=job.options.min_boundary_distance,
                    min_size=job.options.min_size,
                )
                canvas = Canvas(
                    scale_image(voxels), predict, job.options, fov=job.fov, deltas=job.deltas
                )
                line = ProgressLine(ledger, f"sub-volume {number + 1} of {len(parts)}")
                _Filler(
                    ledger,
                    canvas,
                    stopped,
                    tell=line if world.rank == 0 else lambda: None,
                    lend=LentThreads(ledger, world.ranks),
                ).fill_all()
                if not ledger.finished:
                    return done
                world.barrier(f"waits for sub-volume {number + 1} to end")
                if world.rank == 0:
                    _end(folder, ledger, finished_path(job, number), figures)
                world.barrier(f"waits for sub-volume {number + 1} to be written")
            done.append(LedgerFigures(**parse_json(figures.read_text())))
    return done


def _figures_path(job: SegmentationJob, number: int) -> Path:
    return finished_path(job, number).with_suffix(".json")


def _begin(folder: Path, voxels: np.ndarray, job: SegmentationJob) -> None:
    if not folder.exists():
        seeds = peak_seeds(voxels)
        margin = np.array(job.fov) // 2
        inside = ((seeds >= margin) & (seeds < np.array(voxels.shape) - margin)).all(axis=1)
        seeds = seeds[inside]
        prepare_ledger(folder, voxels.shape, seeds, seed_groups(voxels, seeds))
    release_claims(folder)


def _end(folder: Path, ledger: SeedLedger, path: Path, figures: Path) -> None:
    """Keep the ids, and say that they are complete, last."""
    path.unlink(missing_ok=True)
    path.hardlink_to(folder / "segments.npy")
    aside = figures.with_suffix(".part")
    aside.write_text(json.dumps(asdict(ledger.figures())))
    aside.rename(figures)
    shutil.rmtree(folder)


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
            self.tell()
            self.lend(index)
            seen.add(box)
            moves.append(position)
            worthwhile = ledger.mark(index, box, canvas.object_in(box))
            before, settled = settled, ledger.settled
            # A voxel that it has visited was taken since: it would have to be filled once more.
            taken = settled > before and any(ledger.is_taken(voxel) for voxel in moves)
            return worthwhile and not taken and not self.stopped()

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
    But threads wait for each other: where others use the cores, borrowed ones slow it down, so that
    it then goes on without them for a while.
    """

    def __init__(self, ledger: SeedLedger, processes: int) -> None:
        self._ledger, self._processes = ledger, processes
        self._own = self._now = torch.get_num_threads()
        self._index, self._alone = -1, 0
        self._wall, self._used = time.monotonic(), time.process_time()

    def __call__(self, index: int) -> None:
        """Set the threads of this process, before a field of view of a seed."""
        wall, used = time.monotonic(), time.process_time()
        got = (used - self._used) / max(1e-9, wall - self._wall)
        # Threads that wait for each other use their cores; less is used if they do not get them.
        if index == self._index and self._now > self._own and got < _BUSY * self._now:
            self._alone = _FIELDS_ALONE
        self._index, self._wall, self._used = index, wall, used
        self._alone = max(0, self._alone - 1)
        may = index == self._ledger.settled and not self._alone
        idle = self._processes - self._ledger.busy if may else 0
        threads = self._own * (1 + max(0, idle))
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

    def __init__(self, ledger: SeedLedger, name: str) -> None:
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
            f"{self._name}: {counted(figures.objects, 'object')}, "
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
