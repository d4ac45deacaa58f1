"""Which exchange is fastest on this link: candidates, ranked by their predicted step.

Exact candidates come first among equals, and an inexact one is only considered where inexact
results are allowed, and only chosen where it gains enough to be worth an approximation. Invariant:
the ranking depends on the arguments alone, so that ranks with the same numbers choose the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from headway.collective.bound import Consistency, Diagnosis, diagnose
from headway.collective.predict import Layer, Predicted, Scheme, layer_bound, predict
from headway.collective.service import Network, Speed
from headway.collective.wire import is_layered
from headway.units import format_seconds

CANDIDATES = (
    ("none", 0.0),
    ("fp16", 0.0),
    ("int8", 0.0),
    ("powersgd", 4.0),
    ("powersgd", 2.0),
    ("powersgd", 1.0),
    ("topk", 0.01),
)
"""From exact to coarse: of equally fast ones the first is taken."""
COARSE = frozenset({"sign", "topk", "mstopk", "adaptive", "randomk", "powersgd"})
"""They need error feedback, change how training converges, and are never used unasked where
gradients are sparse: PowerSGD made recommendation models diverge."""
WORTH = (1.0, 1.02, 1.05)
"""By class of exactness: an inexact exchange must be so many times faster than an exact one."""
TYPICAL: dict[str, Speed] = {
    "fp16": Speed(0.04e-9, 0.03e-9),
    "bf16": Speed(0.04e-9, 0.03e-9),
    "int8": Speed(0.35e-9, 0.1e-9),
    "sign": Speed(0.1e-9, 0.15e-9),
    "topk": Speed(0.45e-9, 0.01e-9),
    "mstopk": Speed(0.7e-9, 0.01e-9),
    "adaptive": Speed(0.45e-9, 0.01e-9),
    "randomk": Speed(0.1e-9, 0.05e-9),
    "powersgd": Speed(0.4e-9, 0.1e-9),
    "adasum": Speed(0.15e-9),
}
"""Seconds per byte of one processor core with AVX2; to be replaced by what was measured."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One candidate with its price.

    Attributes:
        scheme: How it exchanges.
        predicted: Its step.
        diagnosis: What limits it.
        exactness: 0: exact; 1: rounded to fewer bits; 2: coarse, with error feedback.
        reason: One sentence: why it stands where it stands.
    """

    scheme: Scheme
    predicted: Predicted
    diagnosis: Diagnosis
    exactness: int
    reason: str = ""

    @property
    def step(self) -> float:
        return self.predicted.step


def exactness(scheme: Scheme) -> int:
    """0: the sum is exact; 1: rounded; 2: coarse."""
    if scheme.reduce == "adasum" or scheme.compressor in COARSE:
        return 2
    return 0 if scheme.compressor == "none" else 1


def pays(speed: Speed, ratio: float, seconds_per_byte: float) -> bool:
    """Whether a compressor can pay at all: 1 / S < (1 - 1 / q) x link time per byte.

    Args:
        speed: Of the compressor, per byte of gradient.
        ratio: q: how many times smaller it makes gradients.
        seconds_per_byte: Of the link, for uncompressed gradients.
    """
    return speed.encode + speed.decode < (1 - 1 / ratio) * seconds_per_byte


def choose(
    layers: Sequence[Layer],
    network: Network,
    *,
    base: Scheme,
    exact_only: bool = False,
    speeds: Mapping[str, Speed] = TYPICAL,
    candidates: Iterable[tuple[str, float]] = CANDIDATES,
    vary_priority: bool = False,
) -> list[Choice]:
    """Rank compressors, the best first: by the step, multiplied by what an approximation must gain.

    Args:
        layers: With measured times, in forward order.
        network: As measured.
        base: The rest of the exchange; its compressor is varied.
        exact_only: Leave inexact candidates out.
        speeds: Measured, by compressor.
        candidates: (compressor, amount).
        vary_priority: Try every candidate with and without crossing the border of the step.
    """
    found = []
    for scheme in _schemes(base, candidates, network, vary_priority=vary_priority):
        if exact_only and exactness(scheme):
            continue
        found.append(judge(scheme, predict(scheme, layers, network, speeds), layers, network))
    return _ranked(found)


def judge(
    scheme: Scheme, predicted: Predicted, layers: Sequence[Layer], network: Network
) -> Choice:
    """A candidate, diagnosed."""
    how: Consistency = "none"
    if scheme.overlap:
        how = "crossing" if predicted.crossing else "overlap"
    diagnosis = diagnose(
        predicted.step,
        predicted.forward,
        predicted.backward,
        predicted.communication,
        how,
        sharp=layer_bound(scheme, layers, network),
    )
    return Choice(
        scheme=scheme, predicted=predicted, diagnosis=diagnosis, exactness=exactness(scheme)
    )


def _schemes(
    base: Scheme,
    candidates: Iterable[tuple[str, float]],
    network: Network,
    *,
    vary_priority: bool,
) -> Iterable[Scheme]:
    layered = is_layered(network.nodes, base.collective)
    for compressor, amount in candidates:
        if layered and compressor in ("int8", "sign", "powersgd", "randomk"):
            continue  # shards cut gradients anywhere
        for priority in (False, True) if vary_priority else (base.priority,):
            yield replace(base, compressor=compressor, amount=amount, priority=priority)


def _ranked(found: Sequence[Choice]) -> list[Choice]:
    """By step, each multiplied by what its class must gain."""
    place = {id(choice): number for number, choice in enumerate(found)}

    def key(choice: Choice) -> tuple[float, int]:
        return choice.step * WORTH[choice.exactness], place[id(choice)]

    ranked = sorted(found, key=key)
    return [
        replace(choice, reason=_reason(choice, ranked, number))
        for number, choice in enumerate(ranked)
    ]


def _reason(choice: Choice, ranked: Sequence[Choice], number: int) -> str:
    step = format_seconds(choice.step)
    if number == 0:
        exact = next((c for c in ranked if not c.exactness), None)
        if choice.exactness == 0 or exact is None:
            head = "exact, and " if choice.exactness == 0 else ""
            return f"{head}{step} a step: {choice.diagnosis.sentence}"
        gain = exact.step / choice.step
        return f"{step} a step, {gain:.2f}x as fast as the best exact exchange"
    best = ranked[0]
    if choice.step < best.step:
        gain = best.step / choice.step
        need = WORTH[choice.exactness] / WORTH[best.exactness]
        return (
            f"{gain:.2f}x as fast as {best.scheme.compress}, but less exact: it must be {need:.2f}x"
        )
    return f"{choice.step / best.step:.2f}x the step of {best.scheme.compress}"
