"""`headway segment`: a volume is segmented by processes of this machine, and written.

What each process does is `segmentation_worker.py`. The work is kept in a folder beside the result
until that is complete: the same command goes on from there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headway.errors import UsageError
from headway.floodfill.array_files import check_image, check_new, new_array, open_array
from headway.floodfill.canvas import FillingOptions
from headway.floodfill.network import Triple
from headway.floodfill.prediction import Precision
from headway.floodfill.seed_ledger import LedgerFigures
from headway.floodfill.subvolumes import Subvolume, cut_volume, reconcile
from headway.floodfill.weight_files import read_network
from headway.launch.local import launch_local
from headway.launch.restart_policy import RESTARTS, RestartPolicy

_ENTRY = "headway.floodfill.segmentation_worker"
"""Imported by workers alone."""


@dataclass(frozen=True, kw_only=True)
class SegmentationJob:
    """What is to be segmented, and how.

    Attributes:
        volume: Name of the image, as `array_files.open_array` takes it.
        out: Name of the result, as `array_files.new_array` takes it.
        subvolume: Largest size of a part that is segmented at once.
        share: See `subvolumes.reconcile`.
        voxel: Size in nm, for z, y, x; for viewers.
    """

    volume: str
    weights: Path
    out: str
    options: FillingOptions = field(default_factory=FillingOptions)
    precision: Precision = "float32"
    fov: Triple = (33, 33, 33)
    deltas: Triple = (8, 8, 8)
    subvolume: Triple = (512, 512, 512)
    overlap: Triple = (64, 64, 64)
    share: float = 0.6
    voxel: tuple[float, float, float] = (10.0, 10.0, 10.0)

    @property
    def folder(self) -> Path:
        """Where the work is kept."""
        name = self.out.removeprefix("precomputed:").removeprefix("//").removeprefix("file://")
        path = Path(name.partition(":")[0])
        return path.with_name(f"{path.name}.work")

    def facts(self) -> dict[str, Any]:
        """What the result depends on, as JSON."""
        facts = asdict(self) | {"weights": str(self.weights)}
        facts.pop("out")
        return dict(json.loads(json.dumps(facts)))

    def parts(self, shape: Triple) -> list[Subvolume]:
        """The sub-volumes; see `cut_volume`."""
        return cut_volume(shape, self.subvolume, self.overlap, self.fov)


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
    check_new(job.out)
    read_network(job.weights, fov=job.fov, deltas=job.deltas)
    image = open_array(job.volume)
    check_image(image, job.volume, job.fov)
    shape: Triple = tuple(image.shape)
    parts = job.parts(shape)
    _prepare_folder(job)
    launched = launch_local(
        f"{_ENTRY}:segment_in_worker",
        (job,),
        processes=processes,
        directory=job.folder,
        policy=RestartPolicy(limit=restarts),
        preload=(_ENTRY,),
        on_restart=on_restart,
    )
    figures = next((found for found in launched.results if found is not None), ())
    if launched.stopped_by is not None or len(figures) < len(parts):
        return SegmentationResult(
            objects=0,
            figures=tuple(figures),
            stopped_by=launched.stopped_by or "SIGTERM",
            attempts=launched.attempts,
        )
    objects = _write(job, shape, parts, [one.objects for one in figures])
    shutil.rmtree(job.folder)
    return SegmentationResult(
        objects=objects, figures=tuple(figures), stopped_by=None, attempts=launched.attempts
    )


def _prepare_folder(job: SegmentationJob) -> None:
    """The folder of the work, with the job in it.

    Raises:
        UsageError: There is work of another job.
    """
    noted = job.folder / "job.json"
    facts = job.facts()
    if not noted.exists():
        job.folder.mkdir(exist_ok=True)
        noted.write_text(json.dumps(facts, indent=1))
        return
    before = json.loads(noted.read_text())
    different = sorted(name for name in facts if facts[name] != before.get(name))
    if different:
        raise UsageError(
            "the work that is kept there was begun with other options",
            where=str(job.folder),
            why="; ".join(f"{n}: {before.get(n)} then, {facts[n]} now" for n in different[:3]),
            fix="Give the same options to go on, or delete the folder to begin anew.",
        )


def finished_path(job: SegmentationJob, number: int) -> Path:
    """The ids of a sub-volume that is finished."""
    return job.folder / f"segments-{number:05d}.npy"


def _write(job: SegmentationJob, shape: Triple, parts: list[Subvolume], counts: list[int]) -> int:
    """Write the whole volume; returns the number of its objects."""

    def ids(number: int, box: tuple[slice, ...]) -> Any:
        array = np.load(finished_path(job, number), mmap_mode="r")
        starts = (part.start for part in parts[number].box)
        return array[
            tuple(slice(b.start - s, b.stop - s) for b, s in zip(box, starts, strict=True))
        ]

    tables = reconcile(parts, ids, counts, job.share)
    objects = max(int(table.max()) for table in tables)
    facts = job.facts() | {"objects": objects}
    facts["options"] = json.dumps(facts["options"])
    with new_array(job.out, shape, np.uint32, voxel=job.voxel, facts=facts) as out:
        for number, (part, table) in enumerate(zip(parts, tables, strict=True)):
            out[part.owned] = table[ids(number, part.owned)]
    return objects
