"""The tables of the literature that are legal in a layout: where a search starts from.

Invariant: every table has the layout's placement, is within the memory bound, and can be carried
out. Each is taken as it is and with its bubbles filled with weight gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from headway.errors import PlanError
from headway.planner.layouts import Layout
from headway.schedule import PipelineSchedule
from headway.schedule.named import make_schedule
from headway.schedule.stats import peak_activations
from headway.schedule.weight_gradients import fill_with_weight_gradients

KNOWN: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "straight": ("gpipe", "1f1b", "zb-h1"),
        "v": ("zbv", "dualpipe-v"),
        "loop": ("interleaved", "breadth-first", "interleaved-zero-bubble"),
        "both-directions": ("chimera", "chimera-doubling", "dualpipe"),
    }
)
"""Names of schedules by placement; of the others there are none."""
_ROUNDING = 1e-9


def known_tables(layout: Layout, most_activations: float) -> tuple[PipelineSchedule, ...]:
    """Tables within a memory bound.

    Args:
        layout: Pipes and costs.
        most_activations: That a rank may hold, in the unit of the costs.
    """
    found = []
    for schedule in _named(layout):
        if max(peak_activations(schedule, layout.costs)) <= most_activations + _ROUNDING:
            found.append(schedule)
        try:
            filled = fill_with_weight_gradients(schedule, layout.costs, most_activations)
        except PlanError:
            continue
        if filled.order != schedule.order:
            found.append(filled)
    return tuple(found)


def _named(layout: Layout) -> Iterator[PipelineSchedule]:
    number = sum(len(pipe.microbatches) for pipe in layout.pipes)
    for name in KNOWN.get(layout.placement, ()):
        try:
            schedule = make_schedule(name, stages=layout.ranks, microbatches=number)
        except PlanError:
            continue
        if set(schedule.pipes) == set(layout.pipes):
            yield replace(schedule, recompute=())
