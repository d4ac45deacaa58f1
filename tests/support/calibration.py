"""Fit the cost model's numbers to measured steps, with the uncertainty that remains.

Two things are fitted together, by damped Gauss-Newton (Levenberg-Marquardt, Marquardt 1963) on
the logarithm of time with a soft-L1 loss (Barron 2019, alpha = 1): few physical numbers of the
machine, each held by a prior (a datasheet, or experience) as firmly as that is known; and by
which factor each *measured* layer shape differs from the formula, held near one and alike for
shapes that are alike. A measured shape is thus predicted as measured, one far from all of them
by the formula alone. The same rows give the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.cost.device import Array
from headway.cost.machines import DEVICE
from headway.errors import PlanError
from support.transformer_formula import (
    FormulaMachine,
    Transformer,
    TransformerSplit,
    TransformerStepTime,
    price_transformer,
)

Access = tuple[Callable[[FormulaMachine], float], Callable[[FormulaMachine, float], FormulaMachine]]
"""How a number is read from a machine, and written."""


def _device(name: str) -> Access:
    def write(machine: FormulaMachine, value: float) -> FormulaMachine:
        fields: dict[str, Any] = {name: value}
        return replace(machine, device=replace(machine.device, **fields))

    return lambda machine: float(getattr(machine.device, name)), write


def _link(part: str, name: str) -> Access:
    def read(machine: FormulaMachine) -> float:
        return float(getattr(getattr(machine.network.levels[0], part), name))

    def write(machine: FormulaMachine, value: float) -> FormulaMachine:
        inner, *outer = machine.network.levels
        link = replace(getattr(inner, part), **{name: value})
        levels = (replace(inner, **{part: link}), *outer)
        return replace(machine, network=replace(machine.network, levels=levels))

    return read, write


NUMBERS: Mapping[str, Access] = {
    **{name: _device(name) for name in DEVICE},
    "link_rate": _link("link", "rate"),
    "link_latency": _link("link", "latency"),
    "message_rate": _link("message", "rate"),
    "message_latency": _link("message", "latency"),
    "skew": (lambda machine: machine.skew, lambda machine, value: replace(machine, skew=value)),
    "whole_head": (
        lambda machine: machine.whole_head,
        lambda machine, value: replace(machine, whole_head=value),
    ),
}
"""What can be fitted to measured steps: how it is read from a machine, and written."""

LEAST_SQUARES_ROUNDS = 200
CONVERGENCE_TOLERANCE = 1e-12
"""Relative gain of a round below which it ends."""


def minimise_least_squares(
    residuals: Callable[[Array], Array],
    slopes: Callable[[Array], Array],
    start: Array,
    *,
    robust: int,
) -> Array:
    """The unknowns that minimise the sum of squared residuals, of the first `robust` ones the sum
    of 2 (sqrt(1 + z^2) - 1).

    Args:
        slopes: Their derivatives, (residuals, unknowns).
        start: Unknowns to begin with; all should be about 1 in size.
        robust: How many residuals, from the first, may be wild.
    """
    x, damping = start, 1e-2
    z = residuals(x)
    here = _soft(z, robust)
    for _ in range(LEAST_SQUARES_ROUNDS):
        jacobian = slopes(x) * _bend(z, here, robust)[:, None]
        normal, slope = jacobian.T @ jacobian, jacobian.T @ here
        gained = 0.0
        while damping < 1e8:
            move = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -slope)
            moved = residuals(x + move)
            there = _soft(moved, robust)
            gained = float(here @ here - there @ there)
            if np.isfinite(gained) and gained > 0:
                x, z, here, damping = x + move, moved, there, damping / 5.0
                break
            damping *= 4.0
        if gained <= CONVERGENCE_TOLERANCE * float(here @ here):
            break
    return x


def _soft(residuals: Array, robust: int) -> Array:
    """Residuals whose squares are the loss."""
    bent = residuals.copy()
    z = residuals[:robust]
    bent[:robust] = np.sign(z) * np.sqrt(2.0 * (np.sqrt(1.0 + z * z) - 1.0))
    return bent


def _bend(residuals: Array, bent: Array, robust: int) -> Array:
    """Derivative of `_soft`."""
    slope = np.ones_like(residuals)
    z, f = residuals[:robust], bent[:robust]
    known = np.abs(z) > 1e-6
    slope[:robust][known] = z[known] / np.sqrt(1.0 + z[known] ** 2) / f[known]
    return slope


# Training steps as a table: what was measured, or what is to be predicted.


@dataclass(frozen=True, kw_only=True)
class StepTable:
    """Steps of plans; fields are arrays of one length, or numbers that all share."""

    model: Transformer
    split: TransformerSplit

    def __len__(self) -> int:
        """How many; all numbers: 1."""
        return max(int(np.size(value)) for value in self._values().values())

    def take(self, rows: Sequence[int] | NDArray[np.intp]) -> StepTable:
        """Some of them, by number."""

        def part(item: Transformer | TransformerSplit) -> dict[str, Any]:
            values = {field.name: getattr(item, field.name) for field in fields(item)}
            return {k: np.asarray(v)[rows] if np.ndim(v) else v for k, v in values.items()}

        return StepTable(
            model=Transformer(**part(self.model)), split=TransformerSplit(**part(self.split))
        )

    def shapes(self) -> Array:
        """What the time of a layer depends on (h, a, s, ffn, b, t), as logarithms to base 2."""
        return self._logarithms(
            "hidden", "heads", "sequence", "ffn", "microbatch", "tensor", "sequence_parallel"
        )

    def spread(self, count: int) -> list[int]:
        """The numbers of `count` steps that differ most, which are worth to be measured.

        Each next one is farthest from those before, in doublings; of equals the first. The first
        one is that in the middle.
        """
        places = np.concatenate(
            [self.shapes(), self._logarithms("layers", "microbatches", "data", "pipeline")], axis=1
        )
        middle = np.abs(places - np.median(places, axis=0)).sum(axis=1)
        chosen = [int(np.argmin(middle))]
        apart = np.full(len(self), np.inf)
        while len(chosen) < min(count, len(self)):
            apart = np.minimum(apart, np.abs(places - places[chosen[-1]]).sum(axis=1))
            chosen.append(int(np.argmax(apart)))
        return chosen

    def _values(self) -> dict[str, Any]:
        items = (self.model, self.split)
        return {f.name: getattr(item, f.name) for item in items for f in fields(item)}

    def _logarithms(self, *names: str) -> Array:
        values = self._values()
        columns = [np.broadcast_to(np.asarray(values[name]), (len(self),)) for name in names]
        return np.stack(
            [column * 1.0 if column.dtype == bool else np.log2(column) for column in columns],
            axis=1,
        )


# The cost model's numbers from measured steps, with what is still uncertain afterwards.


DERIVATIVE_STEP = 1e-4
"""Of the finite differences, in logarithms or standard deviations."""


@dataclass(frozen=True, slots=True)
class Prior:
    """What is known of a number before anything is measured.

    Attributes:
        name: Of the number, see `NUMBERS`.
        spread: Standard deviation of its logarithm: 0.1 is about 10 %.
    """

    name: str
    spread: float


PRIORS = (
    Prior("efficiency", 0.03),
    Prior("depth", 0.5),
    Prior("memory_rate", 0.1),
    Prior("kernel", 0.4),
    Prior("dispatch", 0.3),
    Prior("skew", 0.7),
    Prior("sharpness", 0.4),
    Prior("update", 0.3),
    Prior("link_rate", 0.1),
    Prior("link_latency", 0.6),
    Prior("message_rate", 0.3),
    Prior("message_latency", 0.5),
    Prior("whole_head", 0.5),
)
"""How well the numbers of an assumed machine are known."""


BOUNDS: Mapping[str, tuple[float, float]] = {"efficiency": (0.01, 1.0), "sharpness": (1.0, 100.0)}
"""A fit does not leave these; all numbers are positive besides."""


@dataclass(frozen=True, kw_only=True)
class CalibrationOptions:
    """How firmly the fit believes what.

    Attributes:
        layer: Standard deviation of the logarithm by which a layer's time misses the formula.
        head: The same of logits, loss and embedding.
        noise: The same of a step, once its shape is known.
        reach: Distance (in doublings, summed over h, a, s, ffn, b, t) in which the misses of two
            shapes become unlike: their correlation is exp(-distance / reach).
    """

    layer: float = 0.10
    head: float = 0.15
    noise: float = 0.01
    reach: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What a fit found.

    Attributes:
        shapes: Measured shapes, as `StepTable.shapes`; one row each.
        layer: Logarithm of the factor of a layer, by shape.
        head: The same of logits, loss and embedding.
        devices: The most of a measured step.
        error: Mean of |predicted / measured - 1| over these rows.
    """

    machine: FormulaMachine
    shapes: Array
    layer: Array
    head: Array
    options: CalibrationOptions
    rows: int
    devices: float
    error: float

    def price(self, steps: StepTable) -> TransformerStepTime:
        """Every part of the steps."""
        weights = _kriging(steps.shapes(), self.shapes, self.options.reach)
        return price_transformer(
            steps.model,
            steps.split,
            self.machine,
            layer_factor=np.exp(weights @ self.layer),
            head_factor=np.exp(weights @ self.head),
        )

    def predict(self, steps: StepTable) -> Array:
        """Seconds of the steps."""
        return np.asarray(self.price(steps).seconds)

    def known(self, steps: StepTable) -> Array:
        """How much of each shape was measured: 1, this very one; 0, nothing like it."""
        mine = steps.shapes()
        weights = _kriging(mine, self.shapes, self.options.reach)
        cross = _correlation(mine, self.shapes, self.options.reach)
        return np.asarray(np.clip(np.sum(weights * cross, axis=1), 0.0, 1.0))

    def labels(self, steps: StepTable) -> list[str]:
        """Of each: "measured shape" or "formula", and ", extrapolated x16" where it takes more
        devices than the largest measured step."""
        known = self.known(steps)
        times = np.broadcast_to(steps.split.devices / self.devices, known.shape)
        return [
            ("measured shape" if near > 0.99 else "formula")
            + (f", extrapolated x{more:.3g}" if more > 1 else "")
            for near, more in zip(known, times, strict=True)
        ]


def calibrate(
    steps: StepTable,
    seconds: Array,
    start: FormulaMachine,
    priors: Sequence[Prior],
    options: CalibrationOptions | None = None,
) -> Calibration:
    """Fit a machine to measured steps.

    Args:
        start: The machine before; its numbers are the centres of the priors.

    Raises:
        PlanError: No rows, a time that is not positive, or a number that cannot be fitted.
    """
    options = options or CalibrationOptions()
    _check(steps, seconds, priors)
    problem = CalibrationProblem.of(steps, np.asarray(seconds, dtype=float), start, priors, options)
    best = minimise_least_squares(
        problem.residuals, problem.slopes, np.zeros(problem.size), robust=len(problem.measured)
    )
    machine, layer, head = problem.unpack(best)
    missed = np.abs(np.expm1(problem.misses(machine, layer, head)))
    return Calibration(
        machine=machine,
        shapes=problem.shapes,
        layer=layer,
        head=head,
        options=options,
        rows=len(steps),
        devices=float(np.max(steps.split.devices)),
        error=float(np.mean(missed)),
    )


def prediction_intervals(
    steps: StepTable,
    seconds: Array,
    start: FormulaMachine,
    priors: Sequence[Prior],
    wanted: StepTable,
    *,
    options: CalibrationOptions | None = None,
    draws: int = 20,
    level: float = 0.9,
    seed: int = 0,
) -> tuple[Array, Array]:
    """(low, high) seconds of `wanted` that hold with about this probability.

    The rows are drawn again with replacement, and each draw is fitted; what the formula misses on
    shapes that were not measured is added as noise of its own.
    """
    options = options or CalibrationOptions()
    random = np.random.default_rng(seed)
    found = []
    for _ in range(draws):
        rows = random.integers(0, len(steps), len(steps))
        fit = calibrate(steps.take(rows), np.asarray(seconds)[rows], start, priors, options)
        unknown = np.sqrt(1.0 - fit.known(wanted)) * options.layer + options.noise
        noise = random.standard_normal(len(unknown)) * unknown
        found.append(np.log(fit.predict(wanted)) + noise)
    tail = (1.0 - level) / 2.0
    low, high = np.quantile(np.asarray(found), (tail, 1.0 - tail), axis=0)
    return np.exp(low), np.exp(high)


def _check(steps: StepTable, seconds: Array, priors: Sequence[Prior]) -> None:
    times = np.asarray(seconds, dtype=float)
    problems = [f"no number {p.name!r} to fit" for p in priors if p.name not in NUMBERS]
    problems += [f"{p.name}: a spread of {p.spread:g}" for p in priors if not p.spread > 0]
    if not len(steps) or times.shape != (len(steps),):
        problems.append(f"{len(steps)} steps with times of shape {times.shape}")
    if np.any(~(times > 0)) or np.any(~np.isfinite(times)):
        problems.append("a measured time is not positive")
    if problems:
        raise PlanError("these measurements cannot be fitted", problems=problems)


def _correlation(one: Array, other: Array, reach: float) -> Array:
    apart = np.sum(np.abs(one[:, None, :] - other[None, :, :]), axis=2)
    return np.asarray(np.exp(-apart / reach), dtype=float)


def _kriging(wanted: Array, known: Array, reach: float) -> Array:
    """Weights of the known shapes in each wanted one."""
    own = _correlation(known, known, reach) + 1e-9 * np.eye(len(known))
    return np.asarray(np.linalg.solve(own, _correlation(known, wanted, reach)).T)


@dataclass(frozen=True, kw_only=True)
class CalibrationProblem:
    """Unknowns, all about N(0, 1) before: the machine's numbers, then whitened misses of layers
    and of heads by shape."""

    steps: StepTable
    measured: Array
    start: FormulaMachine
    priors: tuple[Prior, ...]
    options: CalibrationOptions
    shapes: Array
    place: NDArray[np.intp]
    root: Array

    @staticmethod
    def of(
        steps: StepTable,
        seconds: Array,
        start: FormulaMachine,
        priors: Sequence[Prior],
        options: CalibrationOptions,
    ) -> CalibrationProblem:
        shapes, place = np.unique(steps.shapes(), axis=0, return_inverse=True)
        own = _correlation(shapes, shapes, options.reach) + 1e-9 * np.eye(len(shapes))
        return CalibrationProblem(
            steps=steps,
            measured=np.log(seconds),
            start=start,
            priors=tuple(priors),
            options=options,
            shapes=shapes,
            place=np.asarray(place).reshape(-1).astype(np.intp),
            root=np.asarray(np.linalg.cholesky(own)),
        )

    @property
    def size(self) -> int:
        return len(self.priors) + 2 * len(self.shapes)

    def unpack(self, unknowns: Array) -> tuple[FormulaMachine, Array, Array]:
        machine = self.start
        for prior, value in zip(self.priors, unknowns, strict=False):
            read, write = NUMBERS[prior.name]
            low, high = BOUNDS.get(prior.name, (0.0, np.inf))
            moved = read(self.start) * float(np.exp(value * prior.spread))
            machine = write(machine, min(max(moved, low), high))
        first, count = len(self.priors), len(self.shapes)
        layer = self.options.layer * (self.root @ unknowns[first : first + count])
        head = self.options.head * (self.root @ unknowns[first + count :])
        return machine, layer, head

    def misses(self, machine: FormulaMachine, layer: Array, head: Array) -> Array:
        """Logarithm of predicted / measured."""
        step = price_transformer(
            self.steps.model,
            self.steps.split,
            machine,
            layer_factor=np.exp(layer[self.place]),
            head_factor=np.exp(head[self.place]),
        )
        return np.asarray(np.log(step.seconds) - self.measured)

    def residuals(self, unknowns: Array) -> Array:
        return np.concatenate([self.misses(*self.unpack(unknowns)) / self.options.noise, unknowns])

    def slopes(self, unknowns: Array) -> Array:
        """Derivatives of the residuals: of the machine's numbers one by one, of all shapes at once,
        because a row has one shape."""
        machine, layer, head = self.unpack(unknowns)
        here = self.misses(machine, layer, head)
        columns = []
        for place in range(len(self.priors)):
            moved = unknowns.copy()
            moved[place] += DERIVATIVE_STEP
            columns.append(self.misses(self.unpack(moved)[0], layer, head) - here)
        reach = self.root[self.place]
        of_layer = (self.misses(machine, layer + DERIVATIVE_STEP, head) - here)[:, None]
        of_head = (self.misses(machine, layer, head + DERIVATIVE_STEP) - here)[:, None]
        table = [np.stack(columns, axis=1)] if columns else []
        table += [of_layer * self.options.layer * reach, of_head * self.options.head * reach]
        rows = np.concatenate(table, axis=1) / DERIVATIVE_STEP / self.options.noise
        return np.concatenate([rows, np.eye(self.size)])
