"""A target of training, "loss<=0.45" or "accuracy>=0.9", and the callback that ends a run there.

Where the recipe has validation data, its validations are judged; else the means of the training
loss over successive steps. How the run came to its end is in outcome.json of its directory. A run
that was stopped in between goes on as if it had not been: the sums go through checkpoints, and a
resumed run repeats a validation that its checkpoint precedes. Imports no torch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headway.atomic_files import write_atomically
from headway.documents import nearest
from headway.errors import RecipeError

if TYPE_CHECKING:
    from headway.run.training.callbacks import RunView

OUTCOME = "outcome.json"
"""Name of the file in the run directory."""
Ending = Literal["reached", "diverged", "cut", "budget"]
"""At the target; where a loss is no number; over a limit of steps; at the recipe's stop."""


@dataclass(frozen=True, slots=True)
class Target:
    """A value and on which side of it the goal is."""

    metric: str
    value: float
    above: bool

    @staticmethod
    def parse(text: str) -> Target:
        """Parse "loss=0.45", "loss<=0.45", "accuracy>=0.9".

        Raises:
            ValueError: It has another form.
        """
        match = re.fullmatch(r"\s*([^<>=]*[^<>=\s])\s*(<=|>=|=)\s*(\S+)\s*", text)
        if match is None:
            raise ValueError(f"{text!r} is not of the form loss<=0.45 or accuracy>=0.9")
        metric, sign, number = match.groups()
        if sign == "=" and metric != "loss":
            raise ValueError(f"{text!r} does not say which side is better: write <= or >=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ValueError(f"{number!r} in {text!r} is not a number")
        return Target(metric, value, sign == ">=")

    def meets(self, value: float) -> bool:
        """Whether a value is at the target or beyond."""
        return value >= self.value if self.above else value <= self.value

    def __str__(self) -> str:
        return f"{self.metric}{'>=' if self.above else '<='}{self.value:g}"


@dataclass
class TargetWatch:
    """The callback: ends the run at the target, where its loss diverges, or over a limit.

    Attributes:
        every: Steps over which the training loss is averaged.
        validates: Judge validations; False: those means.
        limit: A run that needs more steps than this is of no interest; None: it is.
        total, steps: Of the mean in progress.
    """

    target: Target
    every: int
    validates: bool
    limit: int | None = None
    total: float = 0.0
    steps: int = 0
    ended: Ending | None = field(default=None, repr=False)

    def on_step_end(self, run: RunView) -> None:
        """Count the step; judge the mean of the loss where it is due."""
        if self.limit is not None and run.step > self.limit:
            self._end(run, "cut", self.limit, run.loss)
        if self.validates:
            return
        self.total, self.steps = self.total + run.loss, self.steps + 1
        if run.step % self.every == 0 or run.step == run.steps:
            mean, self.total, self.steps = self.total / self.steps, 0.0, 0
            self._judge(run, mean)

    def on_validation_end(self, run: RunView) -> None:
        """Judge a validation.

        Raises:
            RecipeError: It has no such value.
        """
        if not self.validates:
            return
        if self.target.metric not in run.validation:
            raise unknown_metric(self.target, run.validation)
        value = run.validation[self.target.metric]
        # A metric that counts may have had nothing to count yet, 0 of 0: only the loss diverges.
        if math.isfinite(value) or not math.isfinite(run.validation["loss"]):
            self._judge(run, value)

    def state_dict(self) -> dict[str, float]:
        """For a checkpoint."""
        return {"total": self.total, "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.total, self.steps = state["total"], state["steps"]

    def _judge(self, run: RunView, value: float) -> None:
        if not math.isfinite(value):
            self._end(run, "diverged", run.step, value)
        elif self.target.meets(value):
            self._end(run, "reached", run.step, value)

    def _end(self, run: RunView, ending: Ending, step: int, value: float) -> None:
        # The run makes one more step before it stops; only one that was cut may still change.
        if self.ended not in (None, "cut") or ending == self.ended:
            return
        self.ended = ending
        run.stop()
        if run.rank == 0:
            write_outcome(run.directory, ending, step, value)


def unknown_metric(target: Target, values: Mapping[str, float]) -> RecipeError:
    """The error that names the nearest value of a validation."""
    return RecipeError(
        f"the target is {target}, and no validation gives {target.metric}"
        f"{nearest(target.metric, list(values))}",
        why=f"There are {', '.join(values)}.",
    )


def write_outcome(directory: Path, ending: Ending, step: int, value: float | None) -> None:
    """Write outcome.json, whole or not at all."""
    shown = value if value is not None and math.isfinite(value) else None
    content = json.dumps({"end": ending, "steps": step, "value": shown})
    write_atomically(directory / OUTCOME, content + "\n")
