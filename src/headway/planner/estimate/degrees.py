"""Parallel degrees of a plan and micro-batch sizes: which combinations the search tries.

Degrees are tensor, data, pipeline, micro-batches, ZeRO and recomputation; `combinations` lists
those that the search opens. The factors of memory per byte of parameters that depend on the degrees
alone (weights, gradients and optimiser state under ZeRO) are here too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from headway.cost.memory import GRADIENTS, HALF_PRECISION_BYTES, WEIGHTS
from headway.plans.tensor_layout import divisors
from headway.schedule.generators.registry import PLAIN, SCHEDULES, ScheduleOption

FULL = 4.0
"""Bytes of a number in 32 bits."""


@dataclass(frozen=True, kw_only=True, order=True)
class Degrees:
    """A combination: tensor t, data d, pipeline p, m micro-batches of b samples a step and replica.

    Attributes:
        zero: Stage of ZeRO over the data axis.
        virtual: Stages of one pipe on a rank.
        pipes: Pipes at once, each with a copy of every stage.
        order: Of the axes by their first letters, the innermost first: "tpd" as the meshes of
            `plans.pipelined` lie, or "tdp".
    """

    tensor: int
    data: int
    pipeline: int
    microbatch: int
    microbatches: int
    zero: int = 0
    schedule: str = PLAIN.name
    virtual: int = 1
    pipes: int = 1
    order: str = "tpd"

    @property
    def devices(self) -> int:
        return self.tensor * self.data * self.pipeline

    @property
    def scheme(self) -> ScheduleOption:
        """The schedule with its options."""
        return ScheduleOption(self.schedule, self.virtual, self.pipes)

    @property
    def stages(self) -> int:
        """Of one pipe."""
        return self.pipeline * self.virtual

    def stride(self, axis: Literal["tensor", "data", "pipe"]) -> int:
        """How far apart neighbours on an axis lie: the ranks of the axes inside of it."""
        sizes = {"t": self.tensor, "d": self.data, "p": self.pipeline}
        inside = self.order[: self.order.index(axis[0])]
        return math.prod(sizes[letter] for letter in inside)

    def in_flight(self, behind: int) -> int:
        """Micro-batches that a stage holds which has so many behind it; see `counted`."""
        if SCHEDULES[self.schedule].held == "all":
            return self.microbatches
        return min(self.microbatches, behind + 1)

    @property
    def counted(self) -> bool:
        """Whether `in_flight` is what the schedule's table says."""
        return bool(SCHEDULES[self.schedule].held)

    @property
    def gradient_share(self) -> float:
        """Share of a stage's gradients that a rank keeps while it computes."""
        # FSDP2 sums those of a unit as its backward ends, ZeRO 1 in the last micro-batch only; a
        # pipeline sums behind the last backward.
        in_parts = self.zero > 1 or (self.zero == 1 and self.microbatches == 1)
        return 1.0 / self.data if in_parts and self.pipeline == 1 else 1.0

    @property
    def late_gradients(self) -> bool:
        """Whether some stage holds all its micro-batches before the first backward makes
        gradients."""
        alone = self.tensor * self.virtual * self.pipes == 1
        # Copies of a whole model have buffers for gradients, which stay; stages and ZeRO have not.
        alone = alone and (self.data == 1 or self.zero > 0 or self.pipeline > 1)
        most = self.in_flight(self.pipeline - 1)
        return alone and self.counted and most == self.microbatches


def degree_labels(degrees: Degrees, microbatch: str) -> list[str]:
    """["tensor 8", "data 4", "24 micro-batches of 4", "ZeRO 1"]."""
    words = [
        f"{name} {size}"
        for name, size in (
            ("tensor", degrees.tensor),
            ("data", degrees.data),
            ("pipe", degrees.pipeline),
        )
        if size > 1
    ] or ["one device"]
    several = "es" if degrees.microbatches > 1 else ""
    words.append(f"{degrees.microbatches} micro-batch{several} of {microbatch}")
    if degrees.zero:
        words.append(f"ZeRO {degrees.zero}")
    return words


def describe_degrees(degrees: Degrees) -> str:
    """ "tensor 8, data 4, pipe 2, 24 micro-batches of 4, ZeRO 1"."""
    words = degree_labels(degrees, str(degrees.microbatch))
    if degrees.pipeline > 1 and degrees.scheme != PLAIN:
        words.append(str(degrees.scheme))
    if degrees.data > 1 and degrees.pipeline > 1 and degrees.order == "tdp":
        words.append("data inside pipe")
    return ", ".join(words)


def microbatch_sizes(share: int) -> tuple[int, ...]:
    """Sizes of a micro-batch that are tried: all that divide a share."""
    # Powers of two alone leave out good ones: 3 of 6, one step away from 3 of 3 on twice the ranks.
    return tuple(divisors(share))


def combinations(
    devices: int,
    batch: int,
    *,
    units: int,
    tensor: Sequence[int] | None = None,
    zero: Sequence[int],
    schedules: Sequence[ScheduleOption] = (PLAIN,),
    orders: Sequence[str] = ("tpd",),
    one_level: int = 0,
) -> Iterator[Degrees]:
    """All (t, d, p, b, m) with t d p = devices and d b m = batch, b as in `microbatch_sizes`.

    Args:
        units: A pipeline has at most so many stages.
        tensor: Degrees of the tensor axis; None: all divisors.
        orders: Of the axes; only the first one where one axis or one level of links has all ranks.
        one_level: Ranks that the innermost level of links joins.
    """
    for t in divisors(devices):
        if tensor is not None and t not in tensor:
            continue
        for p in divisors(devices // t):
            d = devices // t // p
            if p > units or batch % d:
                continue
            ways = orders if d > 1 and p > 1 and devices > one_level else orders[:1]
            for b in microbatch_sizes(batch // d):
                m = batch // d // b
                for stage in zero if d > 1 else (0,):
                    for scheme in schedules if p > 1 else (PLAIN,):
                        if p * scheme.virtual > units or (scheme.pipes > 1 and m == 1):
                            continue
                        for order in ways:
                            yield Degrees(
                                tensor=t,
                                data=d,
                                pipeline=p,
                                microbatch=b,
                                microbatches=m,
                                zero=stage,
                                schedule=scheme.name,
                                virtual=scheme.virtual,
                                pipes=scheme.pipes,
                                order=order,
                            )


def gradients_per_byte(itemsize: int) -> float:
    """Bytes of gradients per byte of parameters."""
    return GRADIENTS / itemsize if itemsize == HALF_PRECISION_BYTES else 1.0


def late_per_byte(itemsize: int, degrees: Degrees) -> float:
    """Bytes per byte of parameters of gradients that do not exist when a step begins."""
    if not degrees.late_gradients:
        return 0.0
    return gradients_per_byte(itemsize) * degrees.gradient_share


def least_state_per_byte(itemsize: int, degrees: Degrees, copies: int = 2) -> float:
    """As `state_per_byte`, of what exists at any moment of a step."""
    return state_per_byte(itemsize, degrees, copies) - late_per_byte(itemsize, degrees)


def state_per_byte(itemsize: int, degrees: Degrees, copies: int = 2) -> float:
    """Bytes of weights, gradients and optimiser state per byte of parameters that a device holds.

    ZeRO divides the optimiser's (1), these and the gradients (2) or all (3) by the data degree
    (Rajbhandari et al. 2020).
    """
    # In a pipeline a stage has its weights and gradients whole while it computes, with any ZeRO:
    # gradients are summed once a step, behind the last backward
    # (`parallel/pipeline/data_parallel.py`).
    zero, data, whole = degrees.zero, degrees.data, degrees.pipeline > 1
    # With Adam's two copies of 32 bits: 16 bits: 2 + 4 + 12 bytes per parameter, of which 4 are
    # weights in 32 bits; 32 bits: 4 + 4 + 8.
    weights, state = (
        (WEIGHTS, FULL + copies * FULL)
        if itemsize == HALF_PRECISION_BYTES
        else (itemsize, copies * itemsize)
    )
    gradients = gradients_per_byte(itemsize) * itemsize
    total = weights / (data if zero >= 3 and not whole else 1)
    total += gradients * degrees.gradient_share
    total += state / (data if zero >= 1 else 1)
    # In 32 bits, whole weights lie beside the parts that are updated; in 16 bits those are the
    # weights in 32.
    if (zero in (1, 2) or (zero and whole)) and itemsize != HALF_PRECISION_BYTES:
        total += itemsize / data
    return total / itemsize
