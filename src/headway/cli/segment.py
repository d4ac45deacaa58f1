"""`headway segment VOLUME`: the options, and the result."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from headway.cli.terminal.console import (
    exit_code,
    parse_option,
    say,
    say_json,
    table_lines,
    warn,
)
from headway.errors import UsageError
from headway.launch.restart_policy import RESTARTS

if TYPE_CHECKING:
    from headway.api.segmentation import SegmentationResult
    from headway.floodfill.network import Triple


def segment(
    volume: str,
    /,
    *,
    weights: Path,
    out: str,
    processes: Annotated[int, Parameter(alias="-n")] = 1,
    precision: Literal["float32", "bfloat16"] = "float32",
    initial: float = 0.95,
    pad: float = 0.05,
    move: float = 0.9,
    threshold: float = 0.6,
    min_size: int = 1000,
    boundary: str = "1,1,1",
    bias: float = 0.0,
    fov: str = "33,33,33",
    deltas: str = "8,8,8",
    subvolume: str = "512,512,512",
    overlap: str = "64,64,64",
    share: float = 0.6,
    voxel: str = "10,10,10",
    restarts: int = RESTARTS,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Segment a volume with a flood-filling network.

    The work is kept beside the result until that is complete: after a kill the same command goes
    on from there.

    Args:
        volume: Grey values: FILE.h5:NAME, FILE.npz:NAME, FILE.npy, FOLDER.zarr, precomputed:FOLDER,
            or a made one, tubes:Z,Y,X,SEED.
        weights: The reference implementation's as .npz, or .safetensors of a training.
        out: What to write: FILE.h5:NAME, FILE.npy, FOLDER.zarr or precomputed:FOLDER.
        processes: Processes of this machine; the result is the same for any number.
        precision: Of the layers; bfloat16 is faster where processors have it, and inexact.
        initial: Probability of the voxel where an object begins.
        pad: Probability of voxels that have not been seen.
        move: Least probability of a voxel that the field of view moves to.
        threshold: Least probability of a voxel of the object.
        min_size: Objects of fewer voxels are dropped.
        boundary: Z,Y,X: no object begins this close to another one.
        bias: If an object has more than this share of a field of view, voxels that were unlikely
            stay so; below 0: never.
        fov: Z,Y,X: the field of view that the network was trained with.
        deltas: Z,Y,X: how far it moves.
        subvolume: Z,Y,X: largest part of the volume that is segmented at once.
        overlap: Z,Y,X: of two such parts.
        share: Objects of two parts are one if each has this share of the other in the overlap.
        voxel: Z,Y,X: size of a voxel in nm, for viewers.
        restarts: Most restarts of dead processes.
        json: Print JSON.
    """
    from headway.api.segmentation import segment as segment_volume
    from headway.floodfill.canvas import FillingOptions
    from headway.floodfill.segmentation_job import SegmentationJob

    job = SegmentationJob(
        volume=volume,
        weights=weights,
        out=out,
        options=FillingOptions(
            initial=initial,
            pad=pad,
            move=move,
            segment=threshold,
            min_boundary_distance=_voxels("--boundary", boundary, least=0),
            min_size=min_size,
            disconnected_bias=bias,
        ),
        precision=precision,
        fov=_voxels("--fov", fov),
        deltas=_voxels("--deltas", deltas, least=0),
        subvolume=_voxels("--subvolume", subvolume),
        overlap=_voxels("--overlap", overlap),
        share=share,
        voxel=parse_option("--voxel", voxel, _sizes),
    )
    if processes < 1:
        raise UsageError(f"--processes {processes}: give at least 1")
    result = segment_volume(job, processes=processes, restarts=restarts, on_restart=_restarted)
    _print_result(job.out, result, json=json)
    return exit_code(result.stopped_by)


def _voxels(option: str, text: str, *, least: int = 1) -> Triple:
    def parse(written: str) -> Triple:
        z, y, x = (int(part) for part in written.split(","))
        if min(z, y, x) < least:
            raise ValueError(f"three whole numbers from {least} on, as in 8,8,8")
        return z, y, x

    return parse_option(option, text, parse)


def _sizes(text: str) -> tuple[float, float, float]:
    z, y, x = (float(part) for part in text.split(","))
    if min(z, y, x) <= 0:
        raise ValueError("three positive numbers, as in 10,10,10")
    return z, y, x


def _restarted(attempt: int, why: str) -> None:
    warn(f"{why}; attempt {attempt}: what is settled stays so")


def _print_result(out: str, result: SegmentationResult, *, json: bool) -> None:
    totals = {
        name: sum(getattr(part, name) for part in result.figures)
        for name in ("seeds", "moves", "in_vain", "voxels")
    }
    if json:
        facts = {"out": out, "objects": result.objects, **totals}
        say_json(facts | {"stopped_by": result.stopped_by, "attempts": result.attempts})
        return
    if result.stopped_by is not None:
        warn(f"stopped by {result.stopped_by}; the same command goes on")
        return
    rows = [
        ("objects", f"{result.objects:,}", f"of {totals['seeds']:,} seeds"),
        ("voxels", f"{totals['voxels']:,}", "of objects"),
        ("fields of view", f"{totals['moves']:,}", f"and {totals['in_vain']:,} in vain"),
        ("written", out, ""),
    ]
    say("\n".join(table_lines(rows)))
