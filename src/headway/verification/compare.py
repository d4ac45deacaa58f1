"""Two recordings side by side: how far apart, and which tensor differs first.

The error of a tensor is max |a - b| divided by its scale. The scale is the tensor's own largest
magnitude, but at least 2^-10 of the largest magnitude of its kind in the same step: a gradient
that is zero in exact arithmetic (the key bias of attention, say) is pure rounding of terms as
large as its neighbours', and has no scale of its own. float64 must agree to 1e-12.

Optimisers that divide by the gradient's own size (Adam) turn such rounding into steps of up to the
learning rate. Elements of a parameter whose gradient was ever rounding alone need therefore agree
to 1e-6 only; that their gradient is zero says that the loss does not depend on them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headway.verification.record import KINDS, Recording

TOLERANCE = 1e-12
FLOOR = 2.0**-10
ROUNDING = 2.0**-40
"""A gradient below this part of the step's largest one, and not zero, is rounding."""
LOOSE = 1e-6


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor of both runs.

    Attributes:
        step: Optimiser step, from 1.
        kind: One of KINDS.
        name: Logical name.
        error: Largest absolute difference over the scale; infinite where one run lacks the tensor.
        note: What is wrong where no number can say it.
    """

    step: int
    kind: str
    name: str
    error: float
    note: str = ""

    def __str__(self) -> str:
        detail = self.note or f"relative error {self.error:.1e}"
        return f"step {self.step}, {self.kind} {self.name}: {detail}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """All tensors of two runs, in the order of execution."""

    differences: tuple[Difference, ...]
    tolerance: float = TOLERANCE

    @property
    def equal(self) -> bool:
        return self.first is None

    @property
    def wrong(self) -> tuple[Difference, ...]:
        """The tensors that differ by more than the tolerance, in the order of execution."""
        return tuple(d for d in self.differences if not d.error <= self.tolerance)

    @property
    def first(self) -> Difference | None:
        """The first tensor, in the order of execution, that differs."""
        return next(iter(self.wrong), None)

    def worst(self, kind: str) -> Difference | None:
        """The tensor of a kind with the largest error; NaN counts as larger than all."""
        of_kind = [d for d in self.differences if d.kind == kind]
        return max(of_kind, key=lambda d: (d.error != d.error, d.error), default=None)


def compare(serial: Recording, split: Recording, *, tolerance: float = TOLERANCE) -> Comparison:
    """Compare every tensor of either run, by logical name.

    Args:
        serial: The reference; its order of execution names the first difference.
        split: The run to be proved.
        tolerance: Largest error that counts as equal.
    """
    scales = _scales(serial)
    rounded = _rounded(serial, scales)
    extra = [key for key in split.order if key not in serial.tensors]
    order = sorted([*serial.order, *extra], key=_rank_of)
    return Comparison(
        tuple(_one(key, serial, split, scales, rounded.get(key)) for key in order), tolerance
    )


def _rank_of(key: str) -> tuple[int, int]:
    step, kind, _ = key.split("/", 2)
    return int(step), KINDS.index(kind)


def _one(
    key: str,
    serial: Recording,
    split: Recording,
    scales: dict[tuple[str, str], float],
    rounded: Tensor | None,
) -> Difference:
    step, kind, name = key.split("/", 2)
    a, b = serial.tensors.get(key), split.tensors.get(key)
    if a is None or b is None:
        who = "split" if b is None else "serial"
        return Difference(int(step), kind, name, float("inf"), f"the {who} run has none")
    if a.shape != b.shape:
        note = f"shape {list(a.shape)} in the serial run, {list(b.shape)} in the split run"
        return Difference(int(step), kind, name, float("inf"), note)
    return Difference(int(step), kind, name, _error(a, b, FLOOR * scales[step, kind], rounded))


def _error(a: Tensor, b: Tensor, least: float, rounded: Tensor | None) -> float:
    if not a.numel():
        return 0.0
    a, b = a.double(), b.double()
    apart = (a - b).abs()
    if rounded is not None:
        excused = rounded & (apart <= LOOSE * max(float(a.abs().max()), least))
        apart = apart.masked_fill(excused, 0.0)
    distance = float(apart.max())
    scale = max(float(a.abs().max()), least)
    return distance / scale if scale else distance


def _scales(recording: Recording) -> dict[tuple[str, str], float]:
    """(step, kind) -> largest magnitude of all tensors of that kind."""
    found: dict[tuple[str, str], float] = {}
    for key, tensor in recording.tensors.items():
        step, kind, _ = key.split("/", 2)
        size = float(tensor.double().abs().max()) if tensor.numel() else 0.0
        found[step, kind] = max(found.get((step, kind), 0.0), size)
    return found


def _rounded(serial: Recording, scales: dict[tuple[str, str], float]) -> dict[str, Tensor]:
    """Key of a parameter -> its elements whose gradient was rounding in this or an earlier step."""
    found: dict[str, Tensor] = {}
    before: dict[str, Tensor] = {}
    for key in sorted(serial.order, key=_rank_of):
        step, kind, name = key.split("/", 2)
        if kind == "gradient":
            size = serial.tensors[key].double().abs()
            tiny = (size > 0) & (size < ROUNDING * scales[step, kind])
            before[name] = tiny | before[name] if name in before else tiny
        elif kind == "parameter" and name in before and bool(before[name].any()):
            found[key] = before[name]
    return found
