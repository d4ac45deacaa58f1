"""What `headway segment` is asked for, where its work is kept, and how its result is written.

Processes are started by `api/segmentation.py`; what each does is `segmentation_worker.py`. The work
is kept in a folder beside the result until that is complete.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headway.atomic_files import write_atomically
from headway.documents import parse_json
from headway.errors import UsageError
from headway.floodfill.array_files import new_array
from headway.floodfill.canvas import FillingOptions
from headway.floodfill.network import Triple
from headway.floodfill.prediction import Precision
from headway.floodfill.seed_ledger import LedgerFigures, settled_seeds
from headway.floodfill.subvolumes import Subvolume, cut_volume, reconcile

_WORK_VERSION = 2
"""Of the files of the folder."""


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
        return dict(parse_json(json.dumps(facts)))

    def ledger_path(self, number: int) -> Path:
        """The work on a sub-volume that is not finished."""
        return self.folder / f"ledger-{number:05d}"

    def segments_path(self, number: int) -> Path:
        """The ids of a sub-volume that is finished."""
        return self.folder / f"segments-{number:05d}.npy"

    def figures_path(self, number: int) -> Path:
        """The figures of a sub-volume, written last."""
        return self.segments_path(number).with_suffix(".json")

    def figures(self, parts: int) -> list[LedgerFigures]:
        """Of the sub-volumes that are finished."""
        paths = (self.figures_path(number) for number in range(parts))
        return [LedgerFigures(**parse_json(path.read_text())) for path in paths if path.exists()]

    def settled(self, parts: int) -> int:
        """How many seeds are settled, of all sub-volumes."""
        ledgers = [self.ledger_path(n) for n in range(parts) if not self.figures_path(n).exists()]
        begun = sum(settled_seeds(folder) for folder in ledgers if folder.exists())
        return begun + sum(figures.seeds for figures in self.figures(parts))

    def parts(self, shape: Triple) -> list[Subvolume]:
        """The sub-volumes; see `cut_volume`."""
        return cut_volume(shape, self.subvolume, self.overlap, self.fov)


def prepare_folder(job: SegmentationJob) -> None:
    """The folder of the work, with the job in it.

    Raises:
        UsageError: There is work of another job.
    """
    noted = job.folder / "job.json"
    facts = job.facts() | {"work": _WORK_VERSION}
    if not noted.exists():
        job.folder.mkdir(exist_ok=True)
        write_atomically(noted, json.dumps(facts, indent=1))
        return
    before = parse_json(noted.read_text())
    different = sorted(name for name in facts if facts[name] != before.get(name))
    if different:
        raise UsageError(
            "the work that is kept there was begun with other options",
            where=str(job.folder),
            why="; ".join(f"{n}: {before.get(n)} then, {facts[n]} now" for n in different[:3]),
            fix="Give the same options to go on, or delete the folder to begin anew.",
        )


@contextmanager
def only_command(job: SegmentationJob) -> Iterator[None]:
    """Keep others from the folder of the work, which takes them for dead.

    Raises:
        UsageError: Another command is at work there.
    """
    with (job.folder / "command.lock").open("w") as lock:
        # The kernel releases it when the command dies; its workers end with it.
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(
                "another command is at work on this result",
                where=str(job.folder),
                fix="Wait for its end, or name another result.",
            ) from error
        yield


def write_volume(
    job: SegmentationJob, shape: Triple, parts: list[Subvolume], counts: list[int]
) -> int:
    """Write the whole volume; returns the number of its objects."""

    def ids(number: int, box: tuple[slice, ...]) -> Any:
        array = np.load(job.segments_path(number), mmap_mode="r")
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
