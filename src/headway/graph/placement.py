"""Which tensors of a model live in regions where it is cut into stages, and by which protocol.

Pure: from the graph and the cuts. The paper's analysis in three steps: the edges that cross; static
where shape inference knows the shape, here where captures with several batches agree in it; and the
place where the sender allocates what crosses, which may be the region at once (no copy).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headway.errors import PlanError
from headway.graph import ModelGraph
from headway.graph.cut import constants
from headway.graph.liveness import Part


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A tensor that goes from one stage to another.

    Attributes:
        tensor: Its name in the graph.
        source: The stage that makes it.
        target: A stage that uses it.
        shape: None for a dimension that is not the same in all captures.
        dtype: As torch names it: "float32".
        bytes: In the first capture.
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
class Placement:
    """All tensors that cross, in the order in which they are made."""

    tensors: tuple[Placed, ...]

    def between(self, source: int, target: int) -> tuple[Placed, ...]:
        """Those from one stage to another."""
        return tuple(t for t in self.tensors if (t.source, t.target) == (source, target))

    def region_bytes(self, stage: int, slots: int = 2) -> int:
        """Bytes that a stage registers for static tensors that come to it."""
        here = (t for t in self.tensors if t.target == stage and t.protocol == "static")
        return slots * sum(t.bytes for t in here)

    @property
    def uncopied(self) -> float:
        """The share of all bytes that the senders do not copy; 1 where nothing crosses."""
        total = sum(t.bytes for t in self.tensors)
        return sum(t.bytes for t in self.tensors if t.site) / total if total else 1.0


def place_tensors(graph: ModelGraph, cuts: Sequence[int], *others: ModelGraph) -> Placement:
    """The tensors that cross cuts.

    Args:
        graph: A capture of the model.
        cuts: Numbers of operators before which stages begin, ascending, as `Cut.place`.
        others: Captures of the same model with batches of other sizes.

    Raises:
        PlanError: Cuts outside of the graph or not ascending, or captures of another model.
    """
    _check(graph, cuts, others)
    roots = Part(graph, 0, len(graph.operators)).roots
    fixed = constants(graph)
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
                Placed(
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
    return Placement(tuple(tensors))


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
