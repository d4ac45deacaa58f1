"""`headway segment`: a volume is segmented by processes of this machine, and written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from headway.errors import UsageError
from headway.floodfill.array_files import check_grey_values, check_image, check_new, open_array
from headway.floodfill.network import Triple
from headway.floodfill.seed_ledger import LedgerFigures
from headway.floodfill.segmentation_job import (
    SegmentationJob,
    only_command,
    prepare_folder,
    write_volume,
)
from headway.floodfill.subvolumes import Subvolume
from headway.floodfill.weight_files import read_network
from headway.launch.local import launch_local
from headway.launch.restart_policy import RESTARTS, RestartPolicy

_ENTRY = "headway.floodfill.segmentation_worker"
"""Imported by workers alone."""


@dataclass(frozen=True, kw_only=True)
class SegmentationResult:
    """What has been made.

    Attributes:
        objects: Of the whole volume.
        figures: Of each sub-volume; objects in overlaps count in each.
        stopped_by: Name of the signal that stopped it; then there is no result yet.
    """

    objects: int
    figures: tuple[LedgerFigures, ...]
    stopped_by: str | None
    attempts: int


def segment(
    job: SegmentationJob,
    *,
    processes: int = 1,
    restarts: int = RESTARTS,
    on_restart: Callable[[int, str], None] | None = None,
) -> SegmentationResult:
    """Segment a volume.

    The result does not depend on the number of processes, nor on whether they were killed.

    Raises:
        UsageError: Options that are impossible, a result that exists, or work of another job.
        DataError: The image or the weights cannot be used.
        WorkerFailed: A process has failed, or was killed again and again.
    """
    job.options.check()
    if not 0.5 < job.share <= 1:
        raise UsageError(
            f"objects are the same from a share of {job.share:g} on",
            fix="Give more than 0.5, so that an object has one partner at most, and at most 1.",
        )
    if any(move > size // 2 for move, size in zip(job.deltas, job.fov, strict=True)):
        raise UsageError(
            f"the field of view is {job.fov}, and moves by {job.deltas}",
            why="It moves to voxels that it has seen: by half of its size at most.",
            fix="Give --fov and --deltas that the network was trained with.",
        )
    check_new(job.out)
    read_network(job.weights, fov=job.fov, deltas=job.deltas)
    image = open_array(job.volume)
    check_image(image, job.volume, job.fov)
    check_grey_values(image, job.volume)
    shape: Triple = tuple(image.shape)
    parts = job.parts(shape)
    prepare_folder(job)
    with only_command(job):
        return _segment_parts(job, shape, parts, processes, restarts, on_restart)


def _segment_parts(
    job: SegmentationJob,
    shape: Triple,
    parts: list[Subvolume],
    processes: int,
    restarts: int,
    on_restart: Callable[[int, str], None] | None,
) -> SegmentationResult:
    launched = launch_local(
        f"{_ENTRY}:segment_in_worker",
        (job,),
        processes=processes,
        directory=job.folder,
        policy=RestartPolicy(
            limit=restarts,
            goal="settled seed",
            unit="seed",
            relief="a smaller --subvolume or fewer processes; the same command goes on",
        ),
        preload=(_ENTRY,),
        on_restart=on_restart,
        progress=partial(job.settled, len(parts)),
    )
    figures = job.figures(len(parts))
    if launched.stopped_by is not None or len(figures) < len(parts):
        return SegmentationResult(
            objects=0,
            figures=tuple(figures),
            stopped_by=launched.stopped_by or "SIGTERM",
            attempts=launched.attempts,
        )
    objects = write_volume(job, shape, parts, [one.objects for one in figures])
    shutil.rmtree(job.folder)
    return SegmentationResult(
        objects=objects, figures=tuple(figures), stopped_by=None, attempts=launched.attempts
    )
