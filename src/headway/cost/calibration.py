"""The cost model's numbers from measured steps, with what is still uncertain afterwards.

Two things are fitted together, by damped Gauss-Newton on the logarithm of time with a soft-L1 loss:
few physical numbers of the machine, each held by a prior (a datasheet, or experience) as firmly as
that is known; and by which factor each *measured* layer shape differs from the formula, held near
one and alike for shapes that are alike. A shape that was measured is so predicted as measured, one
far from all of them by the formula alone. Invariant: the same rows give the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.cost.device import Array
from headway.cost.least_squares import minimise
from headway.cost.steps import Steps
from headway.cost.transformer import Machine, Step, price_transformer
from headway.errors import PlanError

STEP = 1e-4
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


Access = tuple[Callable[[Machine], float], Callable[[Machine, float], Machine]]
"""How a number is read from a machine, and written."""
DEVICE = (
    "efficiency",
    "depth",
    "memory_rate",
    "kernel",
    "dispatch",
    "skew",
    "sharpness",
    "update",
)


def _device(name: str) -> Access:
    def write(machine: Machine, value: float) -> Machine:
        fields: dict[str, Any] = {name: value}
        return replace(machine, device=replace(machine.device, **fields))

    return lambda machine: float(getattr(machine.device, name)), write


def _link(part: str, name: str) -> Access:
    def read(machine: Machine) -> float:
        return float(getattr(getattr(machine.network.levels[0], part), name))

    def write(machine: Machine, value: float) -> Machine:
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
    "whole_head": (
        lambda machine: machine.whole_head,
        lambda machine, value: replace(machine, whole_head=value),
    ),
}
"""What can be fitted: how it is read from a machine, and written."""
BOUNDS: Mapping[str, tuple[float, float]] = {"efficiency": (0.01, 1.0), "sharpness": (1.0, 100.0)}
"""A fit does not leave these; all numbers are positive besides."""


@dataclass(frozen=True, kw_only=True)
class Options:
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
        machine: With the fitted numbers.
        shapes: Measured shapes, as `Steps.shapes`; one row each.
        layer: Logarithm of the factor of a layer, by shape.
        head: The same of logits, loss and embedding.
        options: Of the fit.
        rows: How many were measured.
        devices: The most of a measured step.
        error: Mean of |predicted / measured - 1| over these rows.
    """

    machine: Machine
    shapes: Array
    layer: Array
    head: Array
    options: Options
    rows: int
    devices: float
    error: float

    def price(self, steps: Steps) -> Step:
        """Every part of the steps."""
        weights = _kriging(steps.shapes(), self.shapes, self.options.reach)
        return price_transformer(
            steps.model,
            steps.split,
            self.machine,
            layer_factor=np.exp(weights @ self.layer),
            head_factor=np.exp(weights @ self.head),
        )

    def predict(self, steps: Steps) -> Array:
        """Seconds of the steps."""
        return np.asarray(self.price(steps).seconds)

    def known(self, steps: Steps) -> Array:
        """How much of each shape was measured: 1, this very one; 0, nothing like it."""
        mine = steps.shapes()
        weights = _kriging(mine, self.shapes, self.options.reach)
        cross = _correlation(mine, self.shapes, self.options.reach)
        return np.asarray(np.clip(np.sum(weights * cross, axis=1), 0.0, 1.0))

    def labels(self, steps: Steps) -> list[str]:
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
    steps: Steps,
    seconds: Array,
    start: Machine,
    priors: Sequence[Prior],
    options: Options | None = None,
) -> Calibration:
    """Fit a machine to measured steps.

    Args:
        steps: What was measured.
        seconds: How long each step took.
        start: The machine before; its numbers are the centres of the priors.
        priors: Which numbers are fitted.
        options: Of the fit.

    Raises:
        PlanError: No rows, a time that is not positive, or a number that cannot be fitted.
    """
    options = options or Options()
    _check(steps, seconds, priors)
    problem = Problem.of(steps, np.asarray(seconds, dtype=float), start, priors, options)
    best = minimise(
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


def intervals(
    steps: Steps,
    seconds: Array,
    start: Machine,
    priors: Sequence[Prior],
    wanted: Steps,
    *,
    options: Options | None = None,
    draws: int = 20,
    level: float = 0.9,
    seed: int = 0,
) -> tuple[Array, Array]:
    """(low, high) seconds of `wanted` that hold with about this probability.

    The rows are drawn again with replacement, and each draw is fitted; what the formula misses on
    shapes that were not measured is added as noise of its own.
    """
    options = options or Options()
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


def _check(steps: Steps, seconds: Array, priors: Sequence[Prior]) -> None:
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
class Problem:
    """Unknowns, all about N(0, 1) before: the machine's numbers, then whitened misses of layers
    and of heads by shape."""

    steps: Steps
    measured: Array
    start: Machine
    priors: tuple[Prior, ...]
    options: Options
    shapes: Array
    place: NDArray[np.intp]
    root: Array

    @staticmethod
    def of(
        steps: Steps, seconds: Array, start: Machine, priors: Sequence[Prior], options: Options
    ) -> Problem:
        shapes, place = np.unique(steps.shapes(), axis=0, return_inverse=True)
        own = _correlation(shapes, shapes, options.reach) + 1e-9 * np.eye(len(shapes))
        return Problem(
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

    def unpack(self, unknowns: Array) -> tuple[Machine, Array, Array]:
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

    def misses(self, machine: Machine, layer: Array, head: Array) -> Array:
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
            moved[place] += STEP
            columns.append(self.misses(self.unpack(moved)[0], layer, head) - here)
        reach = self.root[self.place]
        of_layer = (self.misses(machine, layer + STEP, head) - here)[:, None]
        of_head = (self.misses(machine, layer, head + STEP) - here)[:, None]
        table = [np.stack(columns, axis=1)] if columns else []
        table += [of_layer * self.options.layer * reach, of_head * self.options.head * reach]
        rows = np.concatenate(table, axis=1) / STEP / self.options.noise
        return np.concatenate([rows, np.eye(self.size)])
