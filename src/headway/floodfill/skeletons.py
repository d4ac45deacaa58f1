"""Skeletons of bodies, and how far one gets along them before a segmentation errs.

A skeleton is a tree of nodes inside a body. An edge is *omitted* where an end lies in no segment,
*split* where its ends lie in two, *merged* where the segment also holds a node of another skeleton,
else *correct*. The run of a segment along a skeleton is the length of its correct edges there; the
expected run length is that of the run on which a random point of all skeletons lies, 0 where the
edge is in error (Januszewski et al. 2018):

    ERL = sum of L_run^2 / sum of L_skeleton

Skeletons come from files (SWC, JSON), or by thinning the truth (scikit-image's `skeletonize`).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage
from scipy.sparse import coo_array
from scipy.sparse.csgraph import minimum_spanning_tree
from scipy.spatial import cKDTree

from headway.documents import parse_json
from headway.errors import DataError, MissingExtra

Size = tuple[float, float, float]
"""Of a voxel, for z, y, x."""


@dataclass(frozen=True)
class Skeleton:
    """A tree, or several.

    Attributes:
        nodes: [n, 3] voxels, z y x.
        edges: [m, 2] numbers of nodes.
    """

    name: str
    nodes: NDArray[np.int64]
    edges: NDArray[np.int64]

    def lengths(self, voxel: Size) -> NDArray[np.float64]:
        """Of each edge, in the unit of `voxel`."""
        ends = self.nodes[self.edges] * np.asarray(voxel)
        return np.asarray(np.linalg.norm(ends[:, 0] - ends[:, 1], axis=1))


@dataclass(frozen=True)
class SkeletonAgreement:
    """What a segmentation reaches along skeletons.

    Attributes:
        run_length: Expected run length, in the unit of a voxel's size.
        most: What it would be without an error.
        length: Of all skeletons.
        correct, split, merged, omitted: Shares of that length.
    """

    run_length: float
    most: float
    length: float
    correct: float
    split: float
    merged: float
    omitted: float


def skeleton_agreement(
    segments: Any,
    skeletons: Sequence[Skeleton],
    *,
    voxel: Size = (1.0, 1.0, 1.0),
    merge_nodes: int = 1,
) -> SkeletonAgreement:
    """Edges and expected run length.

    Args:
        segments: [z, y, x] ids, an array; an id of 0 or less is none.
        voxel: Its size, for z, y, x.
        merge_nodes: So many nodes of each of two skeletons a segment that merges them holds. More
            than 1 forgives segments that reach over a border by a voxel.

    Raises:
        DataError: A node lies outside of the volume, or the skeletons have no edges.
    """
    found = [_segments_at(segments, skeleton) for skeleton in skeletons]
    holders: dict[int, set[int]] = {}
    for number, ids in enumerate(found):
        held, nodes = np.unique(ids[ids > 0], return_counts=True)
        for id_ in held[nodes >= merge_nodes].tolist():
            holders.setdefault(id_, set()).add(number)
    merging = np.array([id_ for id_, of in holders.items() if len(of) > 1], dtype=np.int64)
    sums = dict.fromkeys(("correct", "split", "merged", "omitted"), 0.0)
    squares, whole, length = 0.0, 0.0, 0.0
    for skeleton, ids in zip(skeletons, found, strict=True):
        lengths = skeleton.lengths(voxel)
        one, other = ids[skeleton.edges].T
        omitted = (one <= 0) | (other <= 0)
        split = ~omitted & (one != other)
        merged = ~omitted & ~split & np.isin(one, merging)
        correct = ~(omitted | split | merged)
        for name, kind in (("omitted", omitted), ("split", split), ("merged", merged),
                           ("correct", correct)):  # fmt: skip
            sums[name] += float(lengths[kind].sum())
        _, run = np.unique(one[correct], return_inverse=True)
        squares += float((np.bincount(run, lengths[correct]) ** 2).sum())
        whole += float(lengths.sum()) ** 2
        length += float(lengths.sum())
    if not length:
        raise DataError(
            "the skeletons have no edges",
            fix="Give skeletons of bodies that are longer than a voxel.",
        )
    return SkeletonAgreement(
        run_length=squares / length,
        most=whole / length,
        length=length,
        **{name: total / length for name, total in sums.items()},
    )


def _segments_at(segments: Any, skeleton: Skeleton) -> NDArray[np.int64]:
    nodes = skeleton.nodes
    outside = ((nodes < 0) | (nodes >= np.asarray(segments.shape))).any(axis=1)
    if outside.any():
        node = nodes[int(np.argmax(outside))].tolist()
        raise DataError(
            f"a node of skeleton {skeleton.name} lies outside of the volume",
            why=f"Node {node} (z, y, x) of a volume of {list(segments.shape)} voxels.",
            fix="Give the size of a voxel in the skeletons' unit, and skeletons of this volume.",
        )
    return np.asarray(segments[tuple(nodes.T)]).astype(np.int64)


def thin(
    bodies: NDArray[Any], *, min_size: int = 1000, voxel: Size = (1.0, 1.0, 1.0)
) -> Iterator[Skeleton]:
    """The skeletons of all bodies of so many voxels; each is a forest without cycles.

    Raises:
        MissingExtra: scikit-image is not installed.
    """
    morphology = _skimage("skimage.morphology")
    ids, numbers = np.unique(bodies, return_inverse=True)
    numbers = numbers.reshape(bodies.shape)
    sizes = np.bincount(numbers.ravel())
    boxes = ndimage.find_objects(numbers + 1)
    for number in np.flatnonzero((sizes >= min_size) & (ids > 0)).tolist():
        box = boxes[number]
        # A face of the box is no surface of the body: without a margin thinning would see one.
        own = np.pad(numbers[box] == number, 1)
        nodes = np.argwhere(morphology.skeletonize(own)) - 1 + [part.start for part in box]
        if len(nodes) > 1:
            yield Skeleton(str(ids[number]), nodes, _forest(nodes, voxel))


def _forest(nodes: NDArray[np.int64], voxel: Size) -> NDArray[np.int64]:
    """Edges between neighbours (26), the shortest ones that connect what is connected."""
    pairs = cKDTree(nodes).query_pairs(1.0, p=np.inf, output_type="ndarray")
    steps = np.linalg.norm((nodes[pairs[:, 0]] - nodes[pairs[:, 1]]) * np.asarray(voxel), axis=1)
    graph = coo_array((steps, (pairs[:, 0], pairs[:, 1])), shape=(len(nodes), len(nodes)))
    tree = minimum_spanning_tree(graph.tocsr()).tocoo()
    return np.stack([tree.row, tree.col], axis=1).astype(np.int64)


def _skimage(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtra(
            "scikit-image is not installed",
            why="Bodies are thinned to skeletons by it.",
            fix="pip install scikit-image, or give skeletons as SWC or JSON files.",
        ) from error


def read_skeletons(path: str | Path, *, voxel: Size = (1.0, 1.0, 1.0)) -> list[Skeleton]:
    """The skeletons of an SWC file, a JSON file, or of all of them in a folder.

    SWC has a line for each node: number, type, x, y, z, radius, number of the parent or -1. JSON
    has {name: {"nodes": [[z, y, x], ...], "edges": [[0, 1], ...]}}. Places are in the unit of
    `voxel`, and become those of the nearest voxels.

    Raises:
        DataError: There is none, or a file is of neither form.
    """
    path = Path(path)
    files = sorted(p for p in path.iterdir() if p.suffix in _READERS) if path.is_dir() else [path]
    found = []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
            read = _READERS[file.suffix.lower()](file.stem, text)
            found += [_in_voxels(*each, voxel) for each in read]
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise DataError(
                "skeletons cannot be read",
                where=str(file),
                why=f"{type(error).__name__}: {error}",
                fix='Give .swc files, or .json files {name: {"nodes": [[z, y, x], ...], "edges": '
                "[[0, 1], ...]}}.",
            ) from error
    if not found:
        raise DataError("no skeletons", where=str(path), fix="Give .swc or .json files.")
    return found


_Read = Iterator[tuple[str, Any, Any]]


def _of_swc(name: str, text: str) -> _Read:
    rows = [line.split() for line in text.splitlines() if line.strip()[:1] not in ("", "#")]
    place = {int(row[0]): number for number, row in enumerate(rows)}
    nodes = [(float(row[4]), float(row[3]), float(row[2])) for row in rows]
    edges = [(number, place[int(row[6])]) for number, row in enumerate(rows) if int(row[6]) >= 0]
    yield name, nodes, edges


def _of_json(_: str, text: str) -> _Read:
    found: Mapping[str, Any] = parse_json(text)
    for name, skeleton in found.items():
        yield name, skeleton["nodes"], skeleton["edges"]


_READERS = {".swc": _of_swc, ".json": _of_json}


def _in_voxels(name: str, nodes: Any, edges: Any, voxel: Size) -> Skeleton:
    places = np.asarray(nodes, dtype=np.float64).reshape(-1, 3) / np.asarray(voxel)
    ends = np.asarray(edges, dtype=np.int64).reshape(-1, 2)
    if ends.size and not 0 <= ends.min() <= ends.max() < len(places):
        raise ValueError(f"an edge of {name} has an end that is no node")
    return Skeleton(name, np.rint(places).astype(np.int64), ends)
