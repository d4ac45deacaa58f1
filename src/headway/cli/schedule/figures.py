"""The cost options of `headway schedule`, and the lines and JSON that describe one schedule.

`ScheduleCosts` are command-line options: values refer to a rank's share of the model, 1/D of it,
and finer stages divide them. `evaluate_schedule` measures the table at these costs
(`headway.schedule.stats`); a formula is set beside the figures only where its paper's assumptions
hold, and is marked if it describes a steady state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from typing import Annotated, Any

from cyclopts import Parameter

from headway.cost.pipeline_model import Range, ScheduleFormula, schedule_formula
from headway.errors import UsageError
from headway.planner.schedule_search.placements import costs_of
from headway.schedule.generators.registry import SCHEDULES
from headway.schedule.pipeline_schedule import ActionKind, PipelineSchedule
from headway.schedule.stage_costs import StageCosts
from headway.schedule.stats import ScheduleStats, measure_schedule
from headway.schedule.timing import ScheduleTiming, time_schedule

StageValues = tuple[float, ...]
"""One for all stages, or one for each."""


def _convert(_: Any, tokens: Sequence[Any]) -> StageValues:
    text = tokens[0].value
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{text!r} is no number, nor one for each stage as in 1,1.5,1,1") from None


_Option = Annotated[
    StageValues, Parameter(converter=_convert, n_tokens=1, negative="", show_default=False)
]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ScheduleCosts:
    """What the user says that things cost; all times in one unit.

    Attributes:
        forward: Time of one micro-batch's forward through what a rank has of the model, 1 if not
            given; or, as 1,1.5,1,1, of each of the D parts.
        backward: Time of its backward; by default twice the forward.
        input_grad: In place of --backward, with --weight-grad: time of the input's gradient.
        weight_grad: In place of --backward, with --input-grad: time of the weights' gradients.
        activation: Memory of a micro-batch between its forward and its backward; by default 1.
        kept: What a stage that recomputes keeps of that; by default all, the cautious convention.
        latency: Time of a message of no size from rank to rank.
        message: Time that the bytes of a message are on the wire.
    """

    forward: _Option = (1.0,)
    backward: _Option | None = None
    input_grad: _Option | None = None
    weight_grad: _Option | None = None
    activation: _Option | None = None
    kept: _Option | None = None
    latency: float = 0.0
    message: float = 0.0

    def check(self) -> None:
        """Refuse what cannot be.

        Raises:
            UsageError: A time is negative or not finite, a backward is stated twice or by half, or
                options have different numbers of stages.
        """
        for option, values in self._given().items():
            for value in values:
                if not (math.isfinite(value) and value >= 0):
                    what = "a size" if option in ("--activation", "--kept") else "a time"
                    raise UsageError(f"{option} {value}: {what}, at least 0")
        if not all(self.forward):
            raise UsageError("--forward 0: more than 0")
        if (self.input_grad is None) != (self.weight_grad is None):
            raise UsageError("--input-grad and --weight-grad go together")
        if self.backward is not None and self.input_grad is not None:
            raise UsageError("--backward is the sum of --input-grad and --weight-grad: say one")
        lengths = {option: len(v) for option, v in self._given().items() if len(v) > 1}
        if len(set(lengths.values())) > 1:
            said = ", ".join(f"{option} has {length}" for option, length in lengths.items())
            raise UsageError(f"numbers of as many stages are needed: {said}")

    def _given(self) -> dict[str, StageValues]:
        options = {f"--{f.name.replace('_', '-')}": getattr(self, f.name) for f in fields(self)}
        return {
            option: said if isinstance(said, tuple) else (said,)
            for option, said in options.items()
            if said is not None
        }

    @property
    def are_even(self) -> bool:
        """Stages cost the same, and hold activations of the usual unit."""
        return self.activation is self.kept is None and self._stages == 1

    @property
    def _stages(self) -> int:
        return max(len(values) for values in self._given().values())

    @property
    def parts(self) -> tuple[StageValues, StageValues]:
        """Input and weight gradient."""
        if self.input_grad is not None and self.weight_grad is not None:
            return self.input_grad, self.weight_grad
        half = self.forward if self.backward is None else tuple(v / 2 for v in self.backward)
        return half, half

    def text(self) -> str:
        inputs, weights = self.parts
        # Of two lengths the shorter is one number, which stands for every stage.
        single = min(inputs, weights, key=len)[0]
        whole = tuple(a + b for a, b in zip_longest(inputs, weights, fillvalue=single))
        said = f"forward {_join(self.forward)}, backward {_join(whole)}"
        if inputs != weights:
            said += f" (input {_join(inputs)}, weights {_join(weights)})"
        if self.latency or self.message:
            said += f", message {self.latency:g} + {self.message:g}"
        if self.activation is not None:
            said += f", activations {_join(self.activation)}"
        if self.kept is not None:
            said += f", kept {_join(self.kept)}"
        return said

    def of(self, schedule: PipelineSchedule) -> StageCosts:
        """For the stages of a table.

        Raises:
            UsageError: It has another number of them, which these cannot be cut into.
        """
        found = self.of_stages(schedule.stages, schedule.ranks)
        return found.halved() if schedule.halves else found

    def of_stages(self, stages: int, ranks: int) -> StageCosts:
        """For so many stages on so many ranks.

        Raises:
            UsageError: As `of`.
        """
        count = stages if self._stages == 1 else self._stages
        inputs, weights = self.parts
        found = StageCosts.of(
            count,
            ranks=ranks,
            forward=_one(self.forward),
            input_grad=_one(inputs),
            weight_grad=_one(weights),
            latency=self.latency,
            message=self.message,
            kept=None if self.kept is None else _one(self.kept),
        )
        if self.activation is not None:
            held = self.activation
            part = tuple(v * ranks / count for v in held * count) if len(held) == 1 else held
            found = replace(found, activation=part)
        # `costs_of` raises where these parts cannot be cut or joined into so many stages.
        with suppress(ValueError):
            if count % ranks == 0:
                return costs_of(stages, found)
        raise UsageError(
            f"numbers for {count} stages do not fit {stages} stages on {ranks} ranks",
            fix=f"Give one number, or {ranks} numbers with commas.",
        )


def _one(values: StageValues) -> float | StageValues:
    return values[0] if len(values) == 1 else values


def _join(values: StageValues) -> str:
    return " ".join(f"{value:g}" for value in values)


# What a schedule costs, in words: the figures of `headway schedule`.


_LABEL = 23
_MOST_RANKS = 16
"""Ranks of which each is listed."""


@dataclass(frozen=True)
class ScheduleFigures:
    """A schedule, and what it costs."""

    schedule: PipelineSchedule
    costs: ScheduleCosts
    timing: ScheduleTiming
    stats: ScheduleStats
    formula: ScheduleFormula | None

    @property
    def title(self) -> str:
        """For a picture: the name, the step and the bubble."""
        name = self.schedule.name
        known = name if name in SCHEDULES else "table"
        return f"{known}\nstep {self.stats.makespan:.5g}, bubble {self.stats.bubble:.1%}"


def evaluate_schedule(
    schedule: PipelineSchedule,
    costs: ScheduleCosts,
    *,
    options: Mapping[str, int | str] | None = None,
) -> ScheduleFigures:
    """Time and measure a table.

    Args:
        options: With which its name made it; None: it was written by hand, no formula is known.

    Raises:
        PlanError: The table cannot be executed.
    """
    stage_costs = costs.of(schedule)
    known = None if options is None else _formula(schedule, costs, options)
    return ScheduleFigures(
        schedule,
        costs,
        time_schedule(schedule, stage_costs),
        measure_schedule(schedule, stage_costs),
        known,
    )


def _formula(
    schedule: PipelineSchedule, costs: ScheduleCosts, options: Mapping[str, int | str]
) -> ScheduleFormula | None:
    """Where the paper's holds: stages are alike, split backwards are halves of a whole one."""
    if not costs.are_even or schedule.recompute not in ((), schedule.every_stage):
        return None
    # Stages that are even have one number each.
    (forward,), (inputs,), (weights,) = costs.forward, *costs.parts
    if inputs != weights and _splits(schedule):
        return None
    again = forward if schedule.recompute else 0.0
    return schedule_formula(
        schedule.name,
        stages=schedule.ranks,
        microbatches=_whole(schedule),
        ratio=(again + inputs + weights) / forward,
        **{key: value for key, value in options.items() if key != "mode"},  # type: ignore[arg-type]
    )


def _splits(schedule: PipelineSchedule) -> bool:
    return any(action.kind == ActionKind.WEIGHT_GRAD for _, action in schedule.actions())


def _whole(schedule: PipelineSchedule) -> int:
    """Micro-batches of the plan; a table may have halves of them."""
    return schedule.num_microbatches // (2 if schedule.halves else 1)


def describe_schedule(found: ScheduleFigures, drawing: str) -> str:
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


def _bubble(found: ScheduleFigures) -> str:
    if found.formula is None:
        return ""
    said = f"{found.formula.bubble:.1%} = {found.formula.text}"
    if not found.formula.exact:
        return f"{said}, steady state"
    return f"{said}, without messages" if found.costs.latency or found.costs.message else said


def _range(known: ScheduleFormula | None, what: str) -> str:
    if known is None:
        return ""
    bounds: Range = getattr(known, what)
    return format_range(bounds)


def format_range(values: Sequence[float]) -> str:
    """Least and most: "5 to 8", or one number where they agree."""
    low, high = f"{min(values):g}", f"{max(values):g}"
    return low if low == high else f"{low} to {high}"


def _by_rank(values: Sequence[float]) -> str:
    if min(values) == max(values):
        return f"{values[0]:g} on each"
    if len(values) > _MOST_RANKS:
        return format_range(values)
    return " ".join(f"{value:g}" for value in values)


def _path(stats: ScheduleStats) -> str:
    parts = [f"{stats.critical_forwards} forwards", f"{stats.critical_backwards} backwards"]
    if stats.critical_weight_grads:
        parts[1] = f"{stats.critical_backwards} input gradients or backwards"
        parts.append(f"{stats.critical_weight_grads} weight gradients")
    return ", ".join(parts)


def schedule_data(found: ScheduleFigures) -> dict[str, object]:
    """Everything that `describe_schedule` says, and the critical path itself."""
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
