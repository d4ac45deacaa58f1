"""Support vector machines before they are trained: memory of a rank, and the time of an outer step.

Bytes count the arrays of `headway.svm`, one by one, so that they are a bound: a rank needs no more,
beside the support vectors, of which nobody knows the number before. Seconds follow the algorithm:
kernel values between a rank's active samples and what is new in the working set; the choice of it,
an all-gather of candidates; the rows of what is new; the small problem, on every rank.

How many outer steps there are depends on the data: of three measured sets, a few for each working
set that the support vectors would fill (`STEPS_PER_FILL`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headway.cost.device import DeviceModel
from headway.cost.machines import Machine
from headway.cost.network import HierarchicalNetwork

DOUBLE, SINGLE, INDEX = 8, 4, 4
PROCESS_BYTES = 400 * 2**20
"""Of a process before it has read anything: Python, torch, scipy, numba; measured 330 MiB."""
READING_BYTES = 80 * 2**20
"""Of a block of text while it is parsed."""
NUMBERS_PER_SAMPLE = 30
"""Arrays of eight bytes a sample: labels, codes, weights and bounds; multipliers and gamma, now and
when gamma was last exact, and those of the active; what the choice of a working set makes."""
COPIES_OF_VECTOR = 6
"""How often a support vector is there while it goes round the ring, or to all ranks at the end."""
STRETCH = 8192
"""Samples whose gamma is made anew at a time (`svm.solver`)."""

FUNCTION_FLOPS = 125.0
"""FLOPs of a matrix product in the time of the rest of a kernel value: its exponential, its part in
the sum. Measured on one core: 1.45 ns at 86 GFLOP/s."""
SPARSE_FACTOR = 4.0
"""How much slower than in a matrix product a term of compressed rows is. Measured: 0.06 to 0.15 ns
a term."""
PAIR_SECONDS = 1.2e-9
"""Of a step of the small problem, for each sample of the working set; measured on one core."""
TABLE_WORKING_SETS = 4
"""Working sets that a problem with a table of all kernel values may fill (`svm.small_solver`)."""
PAIRS_PER_MEMBER = (0.5, 1.3)
"""Steps of the small problem in an outer step, for each sample of the working set: KDD04, Adult."""
SCANS = 15
"""Passes over the active samples in the choice of a working set."""
STEPS_PER_FILL = (7.0, 13.5)
"""Outer steps, for as many support vectors as are new in a working set: measured 7.2 (KDD04), 7.3
(Adult), 13.3 (letter)."""
SUPPORT_SHARES = (0.02, 0.4)
"""Of the samples, where nobody says: measured 2.2 % (KDD04), 18 % (letter), 36 % (Adult)."""
ACTIVE_SHARES = (0.2, 1.0)
"""Of the samples, in the mean of outer steps: measured 22 % (KDD04), 34 % (letter); all of them
where elimination does not pay."""


@dataclass(frozen=True)
class SampleSet:
    """What a machine is to be trained on.

    Attributes:
        nonzeros: Of a row, in the mean, where rows are compressed; None: they are dense.
        classes: Of more than two, the samples of a pair are copied.
    """

    rows: int
    columns: int
    nonzeros: float | None = None
    classes: int = 2

    @property
    def row_bytes(self) -> float:
        """Of a row in float64."""
        if self.nonzeros is None:
            return DOUBLE * self.columns
        return (DOUBLE + INDEX) * self.nonzeros + DOUBLE

    @property
    def scaled_width(self) -> int:
        return self.columns + 2

    def scaled_bytes(self, width: int) -> float:
        """Of a row as it stands in products, in numbers of so many bytes."""
        if self.nonzeros is None:
            return width * self.scaled_width
        return (width + INDEX) * self.nonzeros + INDEX + width


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank.

    Attributes:
        parts: By name; the process itself and what support vectors need are not in it.
        per_support: For each support vector of the machine.
    """

    parts: Mapping[str, float]
    per_support: float

    def at_most(self, support: float) -> float:
        """Bytes, where the machine has so many support vectors or fewer."""
        return PROCESS_BYTES + sum(self.parts.values()) + self.per_support * support


def rank_memory(
    data: SampleSet, ranks: int, *, working_set: int = 512, rows: int | None = None
) -> RankMemory:
    """What a rank needs at most.

    Args:
        rows: Of the rank that has most; None: every rank has an equal share.
    """
    own = math.ceil(data.rows / ranks) if rows is None else rows
    scaled, exact = data.scaled_bytes(SINGLE), data.scaled_bytes(DOUBLE)
    parts = {
        "samples": own * data.row_bytes,
        # While they are made, a compressed copy has its squares beside it.
        "scaled copy": own * scaled * (1 if data.nonzeros is None else 2),
        # The old one is there until the new one is made.
        "copies of the active": 2 * own * scaled,
        # Where rounding keeps it from the end, copies are made in float64.
        "copies in float64": own * (exact + 2 * (exact - scaled)),
        "numbers per sample": NUMBERS_PER_SAMPLE * DOUBLE * own,
        "working set": _working_set_bytes(data, working_set),
        "blocks": min(own, STRETCH) * (2 * exact + data.row_bytes) + READING_BYTES,
    }
    small = min(data.rows, TABLE_WORKING_SETS * working_set)
    if data.classes > 2:
        parts["samples of a pair"] = own * data.row_bytes
    if data.classes > 2 or small == data.rows:
        # Every rank has all samples of it; the table in float32 is there until the other is made.
        parts["a small problem"] = small * (
            small * (SINGLE + DOUBLE) + data.row_bytes + scaled + 2 * exact
        )
    # At the end every rank has the machine; before, vectors go round in parts.
    vector = COPIES_OF_VECTOR * (data.row_bytes + DOUBLE * 2) + 20 * DOUBLE
    return RankMemory(parts, vector)


def _working_set_bytes(data: SampleSet, members: int) -> float:
    """Kernel values of its pairs, and its rows, exact, scaled and packed."""
    columns = 0 if data.nonzeros is None else 3 * INDEX * data.columns
    return 3 * DOUBLE * members**2 + 8 * members * data.scaled_bytes(DOUBLE) + columns


@dataclass(frozen=True)
class OuterStep:
    """Seconds of an outer step, by part."""

    parts: Mapping[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def bound_by(self) -> str:
        """The part that takes longest."""
        return max(self.parts, key=lambda name: self.parts[name])


def outer_step(
    data: SampleSet,
    ranks: int,
    machine: Machine,
    *,
    working_set: int = 512,
    active: float = 1.0,
) -> OuterStep:
    """Seconds of an outer step.

    Args:
        active: Share of the samples that take part.
    """
    device, network = machine.device, machine.network
    own = active * math.ceil(data.rows / ranks)
    fresh = max(working_set / 2, 1.0)
    value = value_seconds(data, device)
    pairs = sum(PAIRS_PER_MEMBER) / 2 * working_set if working_set > 2 else 1.0
    return OuterStep(
        {
            "kernel values": own * fresh * value,
            "choice": SCANS * DOUBLE * own / device.memory_rate,
            "all-gather of candidates": _gather(network, ranks, DOUBLE * (7 + 5.0 * working_set)),
            "all-gather of rows": _gather(network, ranks, DOUBLE)
            + _gather(network, ranks, _most_rows(fresh, ranks) * message_bytes(data)),
            "small problem": pairs * working_set * PAIR_SECONDS + 2 * working_set**2 * value,
        }
    )


def value_seconds(data: SampleSet, device: DeviceModel) -> float:
    """Of a kernel value in float32, on a device."""
    terms = data.scaled_width if data.nonzeros is None else SPARSE_FACTOR * data.nonzeros
    return (2 * terms + FUNCTION_FLOPS) / device.rate("fp32")


def message_bytes(data: SampleSet) -> float:
    """Of a row on its way to another rank: all numbers are float64 there."""
    return DOUBLE * (data.columns if data.nonzeros is None else 1 + 2 * data.nonzeros)


def _gather(network: HierarchicalNetwork, ranks: int, each: float) -> float:
    """Seconds until every rank has so many bytes of each."""
    return float(network.all_gather(ranks * each, ranks))


def _most_rows(fresh: float, ranks: int) -> float:
    """Rows of the rank that gives most of `fresh`: shares are padded to that. Chosen at random."""
    mean = fresh / ranks
    return min(fresh, mean + math.sqrt(2 * mean * math.log(ranks))) if ranks > 1 else fresh


@dataclass(frozen=True)
class FitRange:
    """A whole training, at best and at worst.

    Attributes:
        support: Support vectors.
        steps: Outer steps.
    """

    support: tuple[float, float]
    steps: tuple[float, float]
    seconds: tuple[float, float]


def fit_range(
    data: SampleSet,
    ranks: int,
    machine: Machine,
    *,
    working_set: int = 512,
    support: Sequence[float] = SUPPORT_SHARES,
) -> FitRange:
    """From the least of all that is assumed to the most.

    Args:
        support: Support vectors as a share of the samples, the least and the most.
    """
    found = []
    for share, fills, active in zip(support, STEPS_PER_FILL, ACTIVE_SHARES, strict=True):
        vectors = share * data.rows
        steps = max(1.0, fills * vectors / max(working_set / 2, 1.0))
        step = outer_step(data, ranks, machine, working_set=working_set, active=active)
        # Gamma is made anew at least once, in float64.
        anew = 2 * math.ceil(data.rows / ranks) * vectors * value_seconds(data, machine.device)
        found.append((vectors, steps, steps * step.seconds + anew))
    (low, least, fast), (high, most, slow) = found
    return FitRange((low, high), (least, most), (fast, slow))


@dataclass(frozen=True)
class RankPlan:
    """A training on so many ranks."""

    ranks: int
    memory: RankMemory
    most_bytes: float
    fits: bool
    step: OuterStep
    fit: FitRange


def plan_ranks(
    data: SampleSet,
    counts: Sequence[int],
    machine: Machine,
    *,
    memory: float,
    working_set: int = 512,
    support: tuple[float, float] = SUPPORT_SHARES,
) -> list[RankPlan]:
    """A training on each of several numbers of ranks.

    Args:
        memory: Bytes that a rank has.
        support: See `fit_range`; what must fit is the most.
    """
    plans = []
    for ranks in counts:
        needed = rank_memory(data, ranks, working_set=working_set)
        most = needed.at_most(support[1] * data.rows)
        plans.append(
            RankPlan(
                ranks,
                needed,
                most,
                most <= memory,
                outer_step(data, ranks, machine, working_set=working_set),
                fit_range(data, ranks, machine, working_set=working_set, support=support),
            )
        )
    return plans


def fewest_ranks(
    data: SampleSet,
    *,
    memory: float,
    working_set: int = 512,
    support: tuple[float, float] = SUPPORT_SHARES,
) -> int | None:
    """The smallest number of ranks on which a training fits; None: on none."""
    most = support[1] * data.rows

    def fits(ranks: int) -> bool:
        return rank_memory(data, ranks, working_set=working_set).at_most(most) <= memory

    if not fits(data.rows):
        return None
    low, high = 1, data.rows
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low
