"""What the user of `headway schedule` says that things cost, the same for all stages or for each.

Invariant: numbers are of a rank's share of the model, 1/D of it; finer stages share them out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Annotated, Any

from cyclopts import Parameter

from headway.errors import UsageError
from headway.planner.layouts import costs_of
from headway.schedule import PipelineSchedule, StageCosts

Numbers = tuple[float, ...]
"""One for all stages, or one for each."""


def _convert(_: Any, tokens: Sequence[Any]) -> Numbers:
    text = tokens[0].value
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{text!r} is no number, nor one for each stage as in 1,1.5,1,1") from None


_Option = Annotated[
    Numbers, Parameter(converter=_convert, n_tokens=1, negative="", show_default=False)
]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Costs:
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

    def _given(self) -> dict[str, Numbers]:
        options = {
            "--forward": self.forward,
            "--backward": self.backward,
            "--input-grad": self.input_grad,
            "--weight-grad": self.weight_grad,
            "--activation": self.activation,
            "--kept": self.kept,
            "--latency": (self.latency,),
            "--message": (self.message,),
        }
        return {option: values for option, values in options.items() if values is not None}

    @property
    def are_even(self) -> bool:
        """Stages cost the same, and hold activations of the usual unit."""
        return self.activation is self.kept is None and self._stages == 1

    @property
    def _stages(self) -> int:
        return max(len(values) for values in self._given().values())

    @property
    def parts(self) -> tuple[Numbers, Numbers]:
        """Input and weight gradient."""
        if self.input_grad is not None and self.weight_grad is not None:
            return self.input_grad, self.weight_grad
        half = self.forward if self.backward is None else tuple(v / 2 for v in self.backward)
        return half, half

    def text(self) -> str:
        inputs, weights = self.parts
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
        with suppress(ValueError):
            if count % ranks == 0:
                return costs_of(stages, found)
        raise UsageError(
            f"numbers for {count} stages do not fit {stages} stages on {ranks} ranks",
            fix=f"Give one number, or {ranks} numbers with commas.",
        )


def _one(values: Numbers) -> float | Numbers:
    return values[0] if len(values) == 1 else values


def _join(values: Numbers) -> str:
    return " ".join(f"{value:g}" for value in values)
