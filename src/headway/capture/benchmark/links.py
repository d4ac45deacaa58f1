"""Timed all-reduces, messages and overlap among the ranks of one group.

Every rank of a group times the same operations; an operation takes as long as on its slowest rank,
and all ranks decide from these times, equally, how often to repeat and when to stop.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import fmean, median

import torch
import torch.distributed as dist

from headway.capture.benchmark.timer import DeviceTimer
from headway.cluster.measurement import LinkReadings, SizeTimings

MESSAGE_SIZES = tuple(2**power for power in range(10, 25, 2))
"""1 KiB to 16 MiB."""
_SECONDS, _SWEEPS = 0.08, 3
"""For the repetitions of one size; all sizes once, and later again."""
_SLOW_SECONDS = 0.1
"""After a size that takes longer, larger ones are left out, once there are two."""
_LEAST, _MOST = 4, 60
_ROUNDS = 15


def measure_exchanges(group: dist.ProcessGroup, device: torch.device) -> LinkReadings:
    """Time the links among the ranks of a group, in two to six seconds; collective."""
    clock = DeviceTimer(device)

    def sums(buffer: torch.Tensor) -> None:
        dist.all_reduce(buffer, group=group)

    def there_and_back(buffer: torch.Tensor) -> None:
        rank = dist.get_rank(group)
        # Messages go between two ranks; the others only join in the maxima.
        if rank > 1:
            return
        # dist.send and dist.recv take ranks of the world, whatever the group.
        other = dist.get_global_rank(group, 1 - rank)
        for turn in (0, 1):
            if rank == turn:
                dist.send(buffer, other, group=group)
            else:
                dist.recv(buffer, other, group=group)

    both = _times(there_and_back, group, clock)
    return LinkReadings(
        ranks=dist.get_world_size(group),
        sums=_times(sums, group, clock),
        messages=tuple((size, seconds / 2) for size, seconds in both),
    )


def measure_overlap(group: dist.ProcessGroup, device: torch.device) -> float:
    """Share of an exchange that products beside it do not feel, from 0 to 1; collective.

    Where the exchange is carried by the very cores that compute, both together take as long as one
    after the other: nothing is hidden.
    """
    clock = DeviceTimer(device)
    one, buffer = torch.ones(384, 384, device=device), torch.zeros(2**20, device=device)

    def computed() -> None:
        for _ in range(8):
            one @ one

    def both() -> None:
        work = dist.all_reduce(buffer, group=group, async_op=True)
        computed()
        work.wait()

    calls = (computed, partial(dist.all_reduce, buffer, group=group), both)
    # The first round, in which buffers and connections are made, does not count.
    times = [[clock.once(call) for call in calls] for _ in range(_ROUNDS + 1)][1:]
    columns = zip(*times, strict=True)
    slowest = [slowest_of(list(column), group=group, device=device) for column in columns]
    hidden: list[float] = [
        (alone + exchange - together) / min(alone, exchange)
        for alone, exchange, together in zip(*slowest, strict=True)
    ]
    return min(1.0, max(0.0, median(hidden)))


def _times(
    operation: Callable[[torch.Tensor], None], group: dist.ProcessGroup, clock: DeviceTimer
) -> SizeTimings:
    """By size, the usual time: the mean of some sweeps, which see the machine at other moments."""
    found: dict[int, list[float]] = {}
    for _ in range(_SWEEPS):
        for size in MESSAGE_SIZES:
            call = partial(operation, torch.zeros(size // 4, device=clock.device))
            found.setdefault(size, []).append(_steady(call, group, clock))
            # These times are the same on all ranks, which leave the loop together.
            if found[size][-1] > _SLOW_SECONDS and size > MESSAGE_SIZES[0]:
                break
    return tuple((float(size), fmean(times)) for size, times in found.items())


def _steady(call: Callable[[], None], group: dist.ProcessGroup, clock: DeviceTimer) -> float:
    """The middle of the second half of a row without a pause: what a switch or an interface takes
    at once after a pause does not make it faster than it is, and a disturbed one makes the next
    faster."""
    clock.once(call)
    own = [clock.once(call), clock.once(call)]
    # Of times that all ranks share, so that all repeat equally often.
    first = min(slowest_of(own, group=group, device=clock.device))
    count = max(_LEAST, min(_MOST, int(_SECONDS / max(first, 1e-6))))
    own = [clock.once(call) for _ in range(count)][count // 2 :]
    return median(slowest_of(own, group=group, device=clock.device))


def slowest_of(
    times: list[float], *, group: dist.ProcessGroup, device: torch.device
) -> list[float]:
    """The longest of the ranks of a group, place by place; collective."""
    shared = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=group)
    return list(shared.tolist())
