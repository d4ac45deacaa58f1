"""What is alive for a moment beside what is kept, operator by operator; and where modules are.

Invariant: kept bytes and passing ones of an operator are together what `liveness` finds there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headway.graph.liveness import Part, play
from headway.graph.model import ModelGraph
from headway.graph.operator import Operator


def with_passing(graph: ModelGraph) -> ModelGraph:
    """The graph, its operators' footprints with `passing` and `weights`: of one micro-batch alone
    whose gradients are added to those that are there."""
    peak = play(graph, gradients=True)
    held = {*graph.parameters, *graph.buffers, *graph.inputs}
    least = sum(graph.tensors[t].bytes for t in Part(graph, 0, len(graph.operators)).parameter_uses)
    kept, known = [0], set(held)
    for operator in graph.operators:
        own = {s.name: s.bytes for s in operator.saved if s.name not in known}
        known.update(own)
        kept.append(kept[-1] + sum(own.values()))
    most: dict[int, tuple[int, int]] = {}
    for moment in peak.curve:
        if moment.place < 0:
            continue
        waiting = moment.bytes.get("gradients", 0) - least
        rest = moment.total - least - waiting - kept[moment.place + 1]
        before = most.get(moment.place, (0, 0))
        if rest + waiting > sum(before):
            most[moment.place] = rest, waiting
    return replace(
        graph,
        operators=tuple(
            _passing(graph, operator, *most.get(place, (0, 0)))
            for place, operator in enumerate(graph.operators)
        ),
    )


def _passing(graph: ModelGraph, operator: Operator, rest: int, waiting: int) -> Operator:
    codes = zip(operator.inputs, operator.footprint.gradients, strict=False)
    made = sum(graph.tensors[t].bytes for t, c in codes if c == "new" and t in graph.parameters)
    made = min(made, max(rest, 0))
    found = replace(operator.footprint, passing=max(rest, 0) - made, weights=waiting + made)
    return replace(operator, footprint=found)


def regions_of(graph: ModelGraph, modules: Sequence[str]) -> list[tuple[int, int]]:
    """For each of some modules the range of operators in which it is called.

    Args:
        graph: Not folded.
        modules: Paths: "blocks.3".
    """
    found = []
    for module in modules:
        inside = [
            n for n, o in enumerate(graph.operators) if f"{o.module}.".startswith(f"{module}.")
        ]
        found.append((inside[0], inside[-1] + 1))
    return found
