"""How unequal devices share one task graph: Whale's Algorithm 1, and whole samples by filling up.

Device i has DF_i FLOP/s and room for DM_i bytes; with load L_i it takes L_i TG_flop / DF_i seconds
and fixed_i + L_i scaled_i bytes. Loads add up to 1, and none exceeds a device's memory. Source: Jia
et al. 2022 (Whale), eq. 1 and Algorithm 1.

`whole_filling` is headway's: the optimum in whole samples, for any times that grow with the share.
A worker of class c that takes b samples needs costs[c][b - 1], and the level is raised until all
samples are under it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headway.cost.device import Array
from headway.errors import PlanError
from headway.units import format_bytes

_ROUNDING = 1e-12


@dataclass(frozen=True, kw_only=True)
class DeviceShare:
    """One device, as a task graph sees it.

    Attributes:
        rate: DF, FLOP/s.
        memory: DM, bytes.
        scaled: Bytes of the whole load: what grows with the share of it.
        fixed: Bytes whatever the load: parameters of `replicate`; 0 as in the paper.
    """

    rate: float
    memory: float
    scaled: float
    fixed: float = 0.0

    @property
    def cap(self) -> float:
        """The largest load that fits, at most 1."""
        room = self.memory - self.fixed
        if room < 0:
            return 0.0
        return min(1.0, room / self.scaled) if self.scaled > 0 else 1.0

    def memory_utilisation(self, load: float) -> float:
        """mem_util: bytes over DM; above 1 the device is out of memory."""
        return (self.fixed + load * self.scaled) / self.memory


@dataclass(frozen=True, slots=True)
class LoadBalance:
    """Loads, and how they came about.

    Attributes:
        shifts: (peak, valley, load) in order.
    """

    loads: tuple[float, ...]
    shifts: tuple[tuple[int, int, float], ...] = ()


def proportional(shares: Sequence[DeviceShare]) -> tuple[float, ...]:
    """L_i = DF_i / sum DF: the optimum where memory does not matter."""
    total = sum(share.rate for share in shares)
    return tuple(share.rate / total for share in shares)


def algorithm_1(shares: Sequence[DeviceShare], *, as_printed: bool = False) -> LoadBalance:
    """Whale's Algorithm 1: from devices out of memory to the least loaded one, peak by peak.

    Args:
        as_printed: A peak that has given something away counts as resolved; else it stays until it
            fits. Without this repair a result may not fit, which then is an error here.

    Raises:
        PlanError: Loads do not fit; the error says by how much.
    """
    check_shares(shares)
    loads = list(proportional(shares))
    places = range(len(shares))
    over = {i for i in places if loads[i] > shares[i].cap + _ROUNDING}
    free = set(places) - over
    shifts: list[tuple[int, int, float]] = []
    while over and free:
        peak = max(over, key=lambda i: (shares[i].memory_utilisation(loads[i]), -i))
        valley = min(free, key=lambda i: (_idleness(shares[i], loads[i]), i))
        # The paper gives the valley all that it can hold; here no more than the peak has to lose.
        amount = min(loads[peak] - shares[peak].cap, shares[valley].cap - loads[valley])
        if amount <= _ROUNDING:
            free.discard(valley)
            continue
        loads[peak] -= amount
        loads[valley] += amount
        shifts.append((peak, valley, amount))
        if as_printed or loads[peak] <= shares[peak].cap + _ROUNDING:
            over.discard(peak)
    _check_fit(shares, loads)
    return LoadBalance(tuple(loads), tuple(shifts))


def _idleness(share: DeviceShare, load: float) -> tuple[float, float]:
    """(flop_util, mem_util)."""
    # Times that differ by rounding alone are equal.
    return float(f"{load / share.rate:.9e}"), share.memory_utilisation(load)


def check_shares(shares: Sequence[DeviceShare]) -> None:
    """Refuse devices that have no room, or no rate, at all."""
    problems = [] if shares else ["there is no device"]
    for i, share in enumerate(shares):
        if not (share.rate > 0 and share.memory > 0) or min(share.scaled, share.fixed) < 0:
            problems.append(f"device {i}: {share}")
        elif share.fixed > share.memory:
            missing = format_bytes(share.fixed - share.memory)
            problems.append(f"device {i} lacks {missing} for what does not depend on its load")
    if problems:
        raise PlanError(
            "no balance", problems=problems, fix="leave such a device out, or split the parameters"
        )


def check_room(shares: Sequence[DeviceShare]) -> None:
    """Refuse devices that do not hold the load together; the error says what is missing."""
    room = sum(share.cap for share in shares)
    if room < 1 - _ROUNDING:
        # What is missing depends on the device that would take it; the largest need is reported.
        most = max(share.scaled for share in shares)
        raise PlanError(
            "the load does not fit",
            problems=[
                f"all devices together hold {room:.3g} of it; {format_bytes((1 - room) * most)} "
                "are missing"
            ],
            fix="add devices, take a smaller batch, or recompute activations",
        )


def _check_fit(shares: Sequence[DeviceShare], loads: Sequence[float]) -> None:
    check_room(shares)
    problems = [
        f"device {i}: {share.memory_utilisation(load):.4g} of its memory"
        for i, (share, load) in enumerate(zip(shares, loads, strict=True))
        # `algorithm_1` itself accepts a load up to cap + _ROUNDING.
        if load > share.cap + 2 * _ROUNDING
    ]
    if problems:
        raise PlanError(
            "the balance does not fit", problems=problems, fix="use the algorithm with its repairs"
        )


def whole_filling(
    costs: Sequence[Array], copies: Sequence[int], samples: int
) -> tuple[tuple[int, ...], float]:
    """The samples of one worker of each class, and the longest time; each takes at least one.

    Args:
        costs: For each class the times of 1, 2, ... samples, not falling; infinite where they do
            not fit.
        samples: To be taken at least, by all workers together.

    Raises:
        PlanError: They cannot take so many.
    """
    costs = [cost[np.isfinite(cost)] for cost in costs]
    room = sum(n * len(cost) for n, cost in zip(copies, costs, strict=True))
    if room < samples or not all(len(cost) for cost in costs):
        raise PlanError(
            "the batch does not fit",
            problems=[f"{samples} samples for {sum(copies)} workers that take {room}"],
            fix="take a smaller batch, or more micro-batches",
        )
    # Every worker takes a sample, so the level cannot be below the slowest first sample.
    least = max(float(cost[0]) for cost in costs)
    levels = np.unique(np.concatenate(list(costs)))
    levels = levels[np.searchsorted(levels, least) :]
    low, high = 0, len(levels) - 1
    while low < high:
        middle = (low + high) // 2
        if _taken(costs, copies, float(levels[middle])) >= samples:
            high = middle
        else:
            low = middle + 1
    sizes = [int(np.searchsorted(cost, levels[low], side="right")) for cost in costs]
    # At this level they may take more than there is: the slowest classes give back first.
    for c in sorted(range(len(sizes)), key=lambda c: -float(costs[c][sizes[c] - 1])):
        over = sum(n * size for n, size in zip(copies, sizes, strict=True)) - samples
        sizes[c] -= min(sizes[c] - 1, max(over, 0) // copies[c])
    longest = max(float(cost[size - 1]) for cost, size in zip(costs, sizes, strict=True))
    return tuple(sizes), longest


def _taken(costs: Sequence[Array], copies: Sequence[int], level: float) -> int:
    sizes = [int(np.searchsorted(cost, level, side="right")) for cost in costs]
    return sum(n * size for n, size in zip(copies, sizes, strict=True))


def slowest_stage(each: Array, counts: Array, numbers: Array) -> tuple[Array, Array]:
    """(n,): what the slowest stage of any cut takes at least, and all stages together.

    Args:
        each: (types, kinds of units, n): their times, in n cases.
        counts: (kinds of units,): how many there are.
        numbers: (types,): stages.
    """
    # The mean over the stages, each weighted with 1 / time of the whole model on its type, units
    # where they weigh least: evenly spread work if types differ by the same factor in all units.
    weights = 1.0 / np.tensordot(each, counts, (1, 0))[:, None]
    slowest = counts @ (each * weights).min(axis=0) / (numbers @ weights[:, 0])
    # Of equal units each stage has a whole number.
    for unit, count in enumerate(counts.tolist()):
        if count > 1:
            slowest = np.maximum(slowest, _whole_units(each[:, unit], numbers, count))
    return slowest, counts @ each.min(axis=0)


def _whole_units(each: Array, numbers: Array, count: int) -> Array:
    """(n,): the least longest time of stages that take whole units; units, as `slowest_stage`."""
    least = np.full(each.shape[1], np.inf)
    safe = np.maximum(each, 1e-30)
    for own, number in zip(each, numbers.tolist(), strict=True):
        # With ceil(count / number) units each, the stages of this type alone hold all units.
        for taken in range(1, -(-count // number) + 1):
            # Rounded up: with room for one unit too few this would no longer be a lower bound.
            room = numbers @ np.floor(taken * own / safe * (1 + 1e-9))
            least = np.minimum(least, np.where(room >= count, taken * own, np.inf))
    return np.where(np.isfinite(least), least, 0.0)
