"""Where a model can be cut into pipeline stages, and which tensors cross such a cut.

Tensors that depend on no input and no parameter (positions, rotary tables, causal masks) do not
cross a cut: every stage makes them itself. Neither do the caller's inputs, which every stage can
be given. `boundary_tensors` adds what the transfer protocol needs: whether a shape is static (here:
equal in captures with several batch sizes) and which operator allocates the tensor, so that it can
be allocated in the communication region at once (no copy). Xue et al. 2019, "Fast Distributed Deep
Learning over RDMA".
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headway.errors import PlanError
from headway.graph.liveness import GraphSlice
from headway.graph.model_graph import ModelGraph


@dataclass(frozen=True, kw_only=True)
class CutPoint:
    """A place between two operators.

    Attributes:
        place: Number of the operator before which it lies; 1 to the number of operators - 1.
        tensors: What crosses it, in the order in which it was made.
    """

    place: int
    tensors: tuple[str, ...]
    bytes: int


def cut_points(graph: ModelGraph, most: int = 1) -> tuple[CutPoint, ...]:
    """All places that at most `most` tensors cross.

    Views of one tensor that cross together count each: what crosses is what a later operator reads.
    """
    fixed = input_independent_tensors(graph)
    last = {tensor: max(places) for tensor, places in graph.consumers.items()}
    # A result of the model is needed until the end, behind the last operator.
    last |= dict.fromkeys(graph.outputs, len(graph.operators))
    alive: dict[str, int] = {}
    found = []
    for place, operator in enumerate(graph.operators):
        # What the operator itself reads still crosses the place before it.
        alive = {tensor: end for tensor, end in alive.items() if end >= place}
        if place and 0 < len(alive) <= most:
            size = sum(graph.values[tensor].bytes for tensor in alive)
            found.append(CutPoint(place=place, tensors=tuple(alive), bytes=size))
        for tensor in operator.outputs:
            if tensor not in fixed and last.get(tensor, -1) > place:
                alive[tensor] = last[tensor]
    return tuple(found)


def input_independent_tensors(graph: ModelGraph) -> frozenset[str]:
    """Tensors that are made of no input and no parameter."""
    found: set[str] = set()
    for operator in graph.operators:
        if all(tensor in found or tensor in graph.buffers for tensor in operator.inputs):
            found.update(operator.outputs)
    return frozenset(found)


# Which tensors of a model live in regions where it is cut into stages, and by which protocol.


@dataclass(frozen=True, kw_only=True)
class BoundaryTensor:
    """A tensor that goes from one stage to another.

    Attributes:
        shape: None for a dimension that is not the same in all captures.
        dtype: As torch names it: "float32".
        protocol: "static" where the shape is known.
        site: The operator whose result is to be allocated in the region, so that nothing is copied;
            "": there is none, because the tensor is a part of something larger, or no operator of
            its stage has made its memory.
    """

    tensor: str
    source: int
    target: int
    shape: tuple[int | None, ...]
    dtype: str
    bytes: int
    protocol: Literal["static", "dynamic"]
    site: str


@dataclass(frozen=True)
class BoundaryTensors:
    """All tensors that cross, in the order in which they are made."""

    tensors: tuple[BoundaryTensor, ...]


def boundary_tensors(
    graph: ModelGraph, cuts: Sequence[int], *others: ModelGraph
) -> BoundaryTensors:
    """The tensors that cross cuts.

    Args:
        cuts: Numbers of operators before which stages begin, ascending, as `CutPoint.place`.
        others: Captures of the same model with batches of other sizes.

    Raises:
        PlanError: Cuts outside of the graph or not ascending, or captures of another model.
    """
    _check(graph, cuts, others)
    roots = GraphSlice(graph, 0, len(graph.operators)).roots
    fixed = input_independent_tensors(graph)
    tensors = []
    for place, operator in enumerate(graph.operators):
        source = bisect_right(cuts, place)
        for tensor in operator.outputs:
            uses = graph.consumers.get(tensor, ())
            targets = sorted({bisect_right(cuts, use) for use in uses} - {source})
            if tensor in fixed or not targets:
                continue
            spec, shape = graph.values[tensor], _shape(graph, tensor, others)
            tensors += [
                BoundaryTensor(
                    tensor=tensor,
                    source=source,
                    target=target,
                    shape=shape,
                    dtype=spec.dtype,
                    bytes=spec.bytes,
                    protocol="dynamic" if None in shape else "static",
                    site=_site(graph, cuts, tensor, roots.get(tensor, tensor)),
                )
                for target in targets
            ]
    return BoundaryTensors(tuple(tensors))


def _shape(graph: ModelGraph, tensor: str, others: Sequence[ModelGraph]) -> tuple[int | None, ...]:
    shapes = [g.values[tensor].shape for g in (graph, *others)]
    return tuple(sizes[0] if len(set(sizes)) == 1 else None for sizes in zip(*shapes, strict=True))


def _site(graph: ModelGraph, cuts: Sequence[int], tensor: str, root: str) -> str:
    """The operator that makes the memory of a tensor, in its stage and for it alone."""
    maker = graph.producers.get(root)
    if maker is None or graph.values[root].bytes != graph.values[tensor].bytes:
        return ""
    if bisect_right(cuts, maker) != bisect_right(cuts, graph.producers[tensor]):
        return ""
    return graph.operators[maker].name


def _check(graph: ModelGraph, cuts: Sequence[int], others: Sequence[ModelGraph]) -> None:
    problems = []
    if list(cuts) != sorted(set(cuts)) or not all(0 < c < len(graph.operators) for c in cuts):
        problems.append(f"cuts {list(cuts)} are not ascending in 1 to {len(graph.operators) - 1}")
    for number, other in enumerate(others, 2):
        names = [o.name for o in other.operators] == [o.name for o in graph.operators]
        dims = {t: len(s.shape) for t, s in graph.values.items()}
        if not names or dims != {t: len(s.shape) for t, s in other.values.items()}:
            problems.append(f"capture {number} is not of the same model as the first")
    if problems:
        raise PlanError("tensors cannot be placed in regions", problems=problems)
