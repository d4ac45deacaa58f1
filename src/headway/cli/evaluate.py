"""`headway evaluate SEGMENTS TRUTH`: variation of information, Rand error, skeletons."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from headway.cli.terminal.console import parse_option, say, say_json, table_lines, write_file
from headway.units import format_share

if TYPE_CHECKING:
    from headway.floodfill.agreement import Agreement, BodyError
    from headway.floodfill.skeletons import SkeletonAgreement

THINNED = "truth"


def evaluate(
    segments: str,
    truth: str,
    /,
    *,
    dust: int = 1000,
    worst: int = 5,
    skeletons: str | None = None,
    voxel: str = "1,1,1",
    merge_nodes: int = 1,
    image: str | None = None,
    report: Path | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Compare a segmentation with the truth.

    Args:
        segments: Ids of the segments: FILE.h5:NAME, FILE.npz:NAME or FILE.npy; 0 is none.
        truth: Ids of the bodies of these voxels, likewise.
        dust: Bodies of fewer voxels are left out.
        worst: How many of the bodies that are split, and of the segments that merge bodies, are
            listed.
        skeletons: An SWC or JSON file, or a folder of them; "truth": the bodies are thinned, with
            scikit-image. Without it nothing is said of run lengths.
        voxel: Size of a voxel, Z,Y,X, in the unit of run lengths and of skeleton files.
        merge_nodes: Nodes that a segment has of each of two skeletons if it merges them.
        image: Grey values of these voxels, for the pictures of the report.
        report: Write a page with pictures of slices to this file.
        json: Print JSON.
    """
    # These import torch's neighbours, and the page of --help does without.
    from headway.floodfill.agreement import agreement, chunks, contingency
    from headway.floodfill.array_files import check_ids, open_array

    found, right = open_array(segments), open_array(truth)
    check_ids(found, segments)
    check_ids(right, truth)
    figures = agreement(contingency(chunks(found, right)), dust=dust, worst=worst)
    size = parse_option("--voxel", voxel, _sizes)
    along = None if skeletons is None else _along(found, right, skeletons, size, merge_nodes, dust)
    if report is not None:
        write_file(report, _page(segments, figures, along, found, right, image))
    if json:
        facts = asdict(figures) | {"skeletons": None if along is None else asdict(along)}
        say_json(facts)
        return 0
    say("\n".join(_lines(figures, along)))
    if report is not None:
        say(f"report         {report}")
    return 0


def _sizes(text: str) -> tuple[float, float, float]:
    z, y, x = (float(part) for part in text.split(","))
    if min(z, y, x) <= 0:
        raise ValueError("three positive numbers, as in 10,10,10")
    return z, y, x


def _along(
    found: Any,
    right: Any,
    skeletons: str,
    size: tuple[float, float, float],
    merge_nodes: int,
    dust: int,
) -> SkeletonAgreement:
    import numpy as np

    from headway.floodfill.skeletons import read_skeletons, skeleton_agreement, thin

    if skeletons == THINNED:
        trees = list(thin(np.asarray(right[:]), min_size=dust, voxel=size))
    else:
        trees = read_skeletons(skeletons, voxel=size)
    return skeleton_agreement(np.asarray(found[:]), trees, voxel=size, merge_nodes=merge_nodes)


def _lines(figures: Agreement, along: SkeletonAgreement | None) -> Iterator[str]:
    yield from table_lines(figure_rows(figures, along))
    for title, kind, errors in (
        ("split most", "segments", figures.worst_splits),
        ("merge most", "bodies", figures.worst_merges),
    ):
        if errors:
            yield ""
            yield from table_lines([(title, "voxels", kind, "bits"), *map(_row, errors)], align=">")


def _row(error: BodyError) -> Sequence[str]:
    return str(error.id), f"{error.voxels:,}", str(error.parts), f"{error.bits:.4f}"


def figure_rows(figures: Agreement, along: SkeletonAgreement | None) -> list[Sequence[str]]:
    """Name, figure and what it says."""
    rows: list[Sequence[str]] = [
        ("VI split", f"{figures.split:.4f}", "bits, H(segment | body)"),
        ("VI merge", f"{figures.merge:.4f}", "bits, H(body | segment)"),
        ("Rand error", f"{figures.rand_error:.4f}",
         f"precision {figures.precision:.4f}, recall {figures.recall:.4f}"),
        ("coverage", format_share(figures.coverage),
         f"of {figures.voxels:,} voxels of {figures.bodies:,} bodies, in "
         f"{figures.segments:,} segments"),
    ]  # fmt: skip
    if along is not None:
        rows += [
            ("run length", f"{along.run_length:.1f}",
             f"expected; {along.most:.1f} without an error"),
            ("edges", format_share(along.correct),
             f"correct; split {format_share(along.split)}, merged {format_share(along.merged)}, "
             f"omitted {format_share(along.omitted)}"),
        ]  # fmt: skip
    return rows


def _page(
    name: str,
    figures: Agreement,
    along: SkeletonAgreement | None,
    found: Any,
    right: Any,
    image: str | None,
) -> str:
    from headway.floodfill.array_files import open_array
    from headway.report.segmentation_page import segmentation_page

    errors = [
        (title, kind, [_row(error) for error in errors])
        for title, kind, errors in (
            ("Bodies that are split most", "segments", figures.worst_splits),
            ("Segments that merge most", "bodies", figures.worst_merges),
        )
    ]
    return segmentation_page(
        name,
        figure_rows(figures, along),
        errors,
        segments=found,
        truth=right,
        image=None if image is None else open_array(image),
    )
