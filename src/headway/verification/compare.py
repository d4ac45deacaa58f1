"""Compares two recordings: how far apart they are, and which tensor differs first.

The error of a tensor is max |a - b| divided by its scale. The scale is the tensor's own largest
magnitude, but at least 2^-10 of the largest magnitude of its kind in the same step: a gradient
that is zero in exact arithmetic (the key bias of attention, say) is pure rounding of terms as
large as its neighbours', and has no scale of its own. float64 must agree to 1e-12.

Optimisers that divide by the gradient's own size (Adam) make as large a step where the gradient is
small. What is allowed to a gradient as a whole is there a larger share, and becomes that share
of the step. An element of a parameter may therefore be further apart by that much, summed over the
steps so far, and by 1e-6 at most; where the gradient is rounding alone it is as much as the largest
step of the tensor.

A model may make more of rounding than that: batch normalisation over few samples, saturated
functions, many layers of both. How much is measured, not assumed: serial runs from initial
parameters that are off by one unit in their last place (`VerifyJob.perturbed`). The split run may
be off by sixteen times as much as they are at most, in each kind of tensor and each step, and by
1e-4. There are several such runs, made as long as the difference is not explained: the error of an
optimiser that divides by the gradient's size is that of the one smallest gradient, which a single
draw may happen to leave alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from torch import Tensor

from headway.verification.recording import KINDS, Recording

# float64 rounds to 1.1e-16. Sums of a million terms in another order differ by 1e-13; a wrong count
# or sample by 1/N, more than 1e-6 for every realistic batch (docs/verification.md).
TOLERANCE = 1e-12
FLOOR = 2.0**-10
LOOSE = 1e-6
NOISE_FACTOR = 16.0
PERTURBED_RUNS = 4
"""At most: each is a serial run of its own."""
MAX_NOISE = 1e-4
MEMORY = 2.0
"""Adam's numerator and denominator both move with a gradient."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor of both runs.

    Attributes:
        error: Largest absolute difference over the scale; infinite where one run lacks the tensor.
    """

    step: int
    kind: str
    name: str
    error: float
    note: str = ""

    @property
    def place(self) -> tuple[int, str, str]:
        """What is rounded alike: a kind of tensor in a step; of a journal each number by itself."""
        return self.step, self.kind, self.name if self.kind == "journal" else ""

    def __str__(self) -> str:
        detail = self.note or f"relative error {self.error:.1e}"
        return f"step {self.step}, {self.kind} {self.name}: {detail}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """All tensors of two runs, in the order of execution.

    Attributes:
        noise: By `Difference.place` what rounding alone makes of it in this model, where that was
            measured and is more than the tolerance.
    """

    differences: tuple[Difference, ...]
    tolerance: float = TOLERANCE
    noise: Mapping[tuple[int, str, str], float] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        return self.first is None

    @property
    def wrong(self) -> tuple[Difference, ...]:
        """The tensors that differ by more than the tolerance, in the order of execution."""
        # In this form, so that NaN counts as wrong.
        return tuple(d for d in self.differences if not d.error <= self._allowed(d))

    def _allowed(self, difference: Difference) -> float:
        return max(self.tolerance, self.noise.get(difference.place, 0.0))

    @property
    def may_be_rounding(self) -> bool:
        """Whether what differs first does so by so little that it may be rounding in some model.

        Where more differs later, it is still not to be taken for the cause.
        """
        return self.first is not None and self.first.error <= MAX_NOISE

    @property
    def first(self) -> Difference | None:
        """The first tensor, in the order of execution, that differs."""
        return next(iter(self.wrong), None)

    def worst(self, kind: str) -> Difference | None:
        """The tensor of a kind with the largest error; NaN counts as larger than all."""
        of_kind = [d for d in self.differences if d.kind == kind]
        return max(of_kind, key=lambda d: (d.error != d.error, d.error), default=None)


def compare(
    serial: Recording,
    split: Recording,
    *,
    tolerance: float = TOLERANCE,
    perturbed: Sequence[Recording] = (),
) -> Comparison:
    """Compare every tensor of either run, by logical name.

    Args:
        serial: The reference; its order of execution names the first difference.
        perturbed: The same run from initial parameters that are off by rounding, several times.
    """
    scales = _scales(serial)
    noise = _noise([compare(serial, run) for run in perturbed], tolerance)
    slack = _slack(serial, split, scales, noise)
    # A tensor that only the split run has is a difference, too.
    extra = [key for key in [*split.order, *split.apart] if key not in serial.tensors]
    order = sorted([*_made(serial, split), *dict.fromkeys(extra)], key=_rank_of)
    return Comparison(
        tuple(_one(key, serial, split, scales, slack.get(key)) for key in order),
        tolerance,
        noise,
    )


def _noise(perturbed: Sequence[Comparison], tolerance: float) -> dict[tuple[int, str, str], float]:
    """By place what may be rounding, where it is more than the tolerance."""
    found: dict[tuple[int, str, str], float] = {}
    for difference in chain.from_iterable(one.differences for one in perturbed):
        if difference.kind in ("facts", "key"):
            continue
        # NaN, and whatever only one of the runs has, says nothing about rounding.
        allowed = NOISE_FACTOR * difference.error
        if tolerance < allowed < float("inf"):
            place = difference.place
            found[place] = max(found.get(place, 0.0), min(allowed, MAX_NOISE))
    return found


def _made(serial: Recording, split: Recording) -> list[str]:
    """What the split run had to make: until it ended, if it has."""
    if not split.ended:
        return list(serial.order)
    last = max(map(_rank_of, split.order), default=(0, 0))
    return [key for key in serial.order if _rank_of(key) <= last]


def _rank_of(key: str) -> tuple[int, int]:
    step, kind, _ = key.split("/", 2)
    return int(step), KINDS.index(kind)


def _one(
    key: str,
    serial: Recording,
    split: Recording,
    scales: dict[tuple[str, str], float],
    slack: Tensor | None,
) -> Difference:
    step, kind, name = key.split("/", 2)
    a, b = serial.tensors.get(key), split.tensors.get(key)
    if key in split.apart:
        return Difference(int(step), kind, name, float("inf"), split.apart[key])
    if a is None or b is None:
        who = "split" if b is None else "serial"
        return Difference(int(step), kind, name, float("inf"), f"the {who} run has none")
    if a.shape != b.shape:
        note = f"shape {list(a.shape)} in the serial run, {list(b.shape)} in the split run"
        return Difference(int(step), kind, name, float("inf"), note)
    bound = serial.bounds.get(key)
    # Facts have nothing in common: a rate is compared with itself, not with a seed. Keys, in two
    # halves of less than 2^31, are equal or not.
    least = 0.0 if kind in ("facts", "key") else FLOOR * scales[step, kind]
    error = _error(a, b, least, slack, bound)
    return Difference(int(step), kind, name, error)


def _error(a: Tensor, b: Tensor, least: float, slack: Tensor | None, bound: Tensor | None) -> float:
    if not a.numel():
        return 0.0
    a, b = a.double(), b.double()
    # Infinities, of a mask say, are equal, although their difference is no number.
    apart = (a - b).abs().masked_fill(a == b, 0.0)
    if bound is not None:
        # NaN stays NaN, and so wrong.
        apart = (apart - bound).clamp(min=0.0)
    scale = max(_magnitude(a), least)
    if slack is not None:
        excused = (apart > TOLERANCE * scale) & (apart <= slack.clamp(max=LOOSE * scale))
        apart = apart.masked_fill(excused, 0.0)
    distance = float(apart.max())
    return distance / scale if scale else distance


def _scales(recording: Recording) -> dict[tuple[str, str], float]:
    """(step, kind) -> largest magnitude of all tensors of that kind."""
    found: dict[tuple[str, str], float] = {}
    for key, tensor in recording.tensors.items():
        step, kind, _ = key.split("/", 2)
        found[step, kind] = max(found.get((step, kind), 0.0), _magnitude(tensor.double()))
    return found


def _magnitude(tensor: Tensor) -> float:
    """Of the largest finite element; 0 where there is none."""
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _slack(
    serial: Recording,
    split: Recording,
    scales: dict[tuple[str, str], float],
    noise: Mapping[tuple[int, str, str], float],
) -> dict[str, Tensor]:
    """Key of a parameter -> how far its elements may be apart for the sake of their gradients.

    Where the values are not recorded from which the first step starts, it counts as the largest
    element of the second one, and where there is none as `LOOSE` of the largest value.
    """
    found: dict[str, Tensor] = {}
    steps = _steps(serial)
    sums: dict[str, Tensor] = {}
    # In the order of the steps: the sums grow from each step to the next.
    for key in sorted(serial.order, key=_rank_of):
        step, kind, name = key.split("/", 2)
        if kind != "parameter" or key not in steps:
            continue
        gradient = serial.tensors.get(f"{step}/gradient/{name}")
        if gradient is not None and gradient.numel():
            size = gradient.double().abs()
            relative = max(TOLERANCE, noise.get((int(step), "gradient", ""), 0.0))
            allowed = relative * max(float(size.max()), FLOOR * scales[step, "gradient"])
            other = split.tensors.get(f"{step}/gradient/{name}")
            zero = size == 0
            if other is not None and other.shape == size.shape:
                zero &= other == 0
            sums[name] = sums.get(name, 0.0) + MEMORY * _moved(allowed, size, zero, steps[key])
        if name in sums:
            found[key] = sums[name]
    return found


def _moved(allowed: float, size: Tensor, zero: Tensor, step: Tensor) -> Tensor:
    """How far a gradient that is off by what is allowed moves each element of a parameter.

    In proportion to the element's own step, and no farther than the largest step of the tensor: an
    element whose gradient is rounding alone may step farther in one run than in the other, also if
    it is exactly zero in one of them. Where it is so in both (`zero`) nothing is allowed.
    """
    gain = (step / size).masked_fill(size == 0, 0.0)
    gain = gain.masked_fill((size == 0) & ~zero, float(gain.max()))
    return (allowed * gain).clamp(max=float(step.max()))


def _steps(serial: Recording) -> dict[str, Tensor]:
    """Key of a parameter -> magnitude of its elements' step to this value."""
    found: dict[str, Tensor] = {}
    last = {name: ("", value.double()) for name, value in serial.initial.items()}
    for key in sorted(serial.order, key=_rank_of):
        _, kind, name = key.split("/", 2)
        if kind != "parameter":
            continue
        now = serial.tensors[key].double()
        if name in last and now.numel() and last[name][1].shape == now.shape:
            before, then = last[name]
            found[key] = (now - then).abs()
            if before:
                found.setdefault(before, found[key].max().expand_as(now))
        last[name] = key, now
    for key, now in last.values():
        if key and now.numel():
            found.setdefault(key, (LOOSE * now.abs().max()).expand_as(now))
    return found
