"""What a schedule costs, in words: the figures of `headway schedule`.

Invariant: what is said of a table was measured on that table (`schedule.stats`); a formula stands
beside it only where the paper's holds for these costs, and says if it is that of a steady state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headway.cli.schedule_costs import Costs
from headway.cost.pipeline_formulas import Formula, Range, formula
from headway.schedule import Kind, PipelineSchedule
from headway.schedule.named import SCHEDULES
from headway.schedule.stats import ScheduleStats, measure
from headway.schedule.timing import Timing, time_schedule

_LABEL = 23
_MOST_RANKS = 16
"""Ranks of which each is listed."""


@dataclass(frozen=True)
class Figures:
    """A schedule, and what it costs."""

    schedule: PipelineSchedule
    costs: Costs
    timing: Timing
    stats: ScheduleStats
    formula: Formula | None

    @property
    def title(self) -> str:
        """For a picture: the name, the step and the bubble."""
        name = self.schedule.name
        known = name if name in SCHEDULES else "table"
        return f"{known}\nstep {self.stats.makespan:.5g}, bubble {self.stats.bubble:.1%}"


def figures(
    schedule: PipelineSchedule, costs: Costs, *, options: Mapping[str, int | str] | None = None
) -> Figures:
    """Time and measure a table.

    Args:
        schedule: A valid one.
        costs: Checked.
        options: With which its name made it; None: it was written by hand, no formula is known.

    Raises:
        PlanError: The table cannot be carried out.
    """
    stage_costs = costs.of(schedule)
    known = None if options is None else _formula(schedule, costs, options)
    return Figures(
        schedule,
        costs,
        time_schedule(schedule, stage_costs),
        measure(schedule, stage_costs),
        known,
    )


def _formula(
    schedule: PipelineSchedule, costs: Costs, options: Mapping[str, int | str]
) -> Formula | None:
    """Where the paper's holds: stages are alike, split backwards are halves of a whole one."""
    if not costs.are_even or schedule.recompute not in ((), schedule.every_stage):
        return None
    (forward,), (inputs,), (weights,) = costs.forward, *costs.parts
    if inputs != weights and _splits(schedule):
        return None
    again = forward if schedule.recompute else 0.0
    return formula(
        schedule.name,
        stages=schedule.ranks,
        microbatches=_whole(schedule),
        ratio=(again + inputs + weights) / forward,
        **{key: value for key, value in options.items() if key != "mode"},  # type: ignore[arg-type]
    )


def _splits(schedule: PipelineSchedule) -> bool:
    return any(action.kind == Kind.WEIGHT_GRAD for _, action in schedule.actions())


def _whole(schedule: PipelineSchedule) -> int:
    """Micro-batches of the plan; a table may have halves of them."""
    return schedule.num_microbatches // (2 if schedule.halves else 1)


# ---- in words ----------------------------------------------------------------------------------


def describe(found: Figures, drawing: str) -> str:
    """Sizes, the drawing, and the figures beside their formulas."""
    schedule, stats, known = found.schedule, found.stats, found.formula
    lines = [f"{_sizes(schedule)}; {found.costs.text()}", "", drawing, ""]

    def line(label: str, value: str, published: str = "") -> None:
        lines.append(f"{label:<{_LABEL}}{value:<26}{published}".rstrip())

    line("", "this table", "formula" if known else "")
    line("step", f"{stats.makespan:g}")
    line("bubble", f"{stats.bubble:.1%}", _bubble(found))
    line("activations by rank", _by_rank(stats.peak_activations), _range(known, "activations"))
    line("weights by rank", _by_rank(stats.weights), _range(known, "weights"))
    if max(stats.versions) > 1:
        line("versions of weights", _by_rank(stats.versions))
    line("messages", str(stats.messages))
    line("critical path", _path(stats))
    lines += ["", "activations, weights: in stages of 1/D of the model"]
    return "\n".join(lines)


def _sizes(schedule: PipelineSchedule) -> str:
    pipes = len(schedule.pipes)
    size = f"{schedule.ranks} ranks, "
    size += f"{pipes} pipes of " if pipes > 1 else ""
    size += f"{schedule.stages} stages, {_whole(schedule)} micro-batches"
    size += " (halved)" if schedule.halves else ""
    return size + (f", {schedule.recomputes}" if schedule.recompute else "")


def _bubble(found: Figures) -> str:
    if found.formula is None:
        return ""
    said = f"{found.formula.bubble:.1%} = {found.formula.text}"
    if not found.formula.exact:
        return f"{said}, steady state"
    return f"{said}, without messages" if found.costs.latency or found.costs.message else said


def _range(known: Formula | None, what: str) -> str:
    if known is None:
        return ""
    bounds: Range = getattr(known, what)
    return spread(bounds)


def spread(values: Sequence[float]) -> str:
    """Least and most: "5 to 8", or one number where they agree."""
    low, high = f"{min(values):g}", f"{max(values):g}"
    return low if low == high else f"{low} to {high}"


def _by_rank(values: Sequence[float]) -> str:
    if min(values) == max(values):
        return f"{values[0]:g} on each"
    if len(values) > _MOST_RANKS:
        return spread(values)
    return " ".join(f"{value:g}" for value in values)


def _path(stats: ScheduleStats) -> str:
    parts = [f"{stats.critical_forwards} forwards", f"{stats.critical_backwards} backwards"]
    if stats.critical_weight_grads:
        parts[1] = f"{stats.critical_backwards} input gradients or backwards"
        parts.append(f"{stats.critical_weight_grads} weight gradients")
    return ", ".join(parts)


# ---- for machines ------------------------------------------------------------------------------


def facts(found: Figures) -> dict[str, object]:
    """Everything that `describe` says, and the critical path itself."""
    schedule, stats, known = found.schedule, found.stats, found.formula
    return {
        "schedule": schedule.name,
        "ranks": schedule.ranks,
        "stages": schedule.stages,
        "microbatches": _whole(schedule),
        "flush": schedule.flush,
        "recompute": list(schedule.recompute),
        "blockwise": schedule.blockwise,
        "step": stats.makespan,
        "bubble": stats.bubble,
        "bubbles": list(stats.bubbles),
        "activations": list(stats.peak_activations),
        "weights": list(stats.weights),
        "versions": list(stats.versions),
        "messages": stats.messages,
        "critical_path": [[rank, str(action)] for rank, action in stats.critical_path],
        "formula": None
        if known is None
        else {
            "bubble": known.bubble,
            "text": known.text,
            "weights": list(known.weights),
            "activations": list(known.activations),
            "exact": known.exact,
        },
    }
