"""The price of what a dry run of lookups has counted, on a device.

A stretch of a pass takes the pass's own seconds by the share of its FLOPs that lies in it; what its
kernels take beyond those of the model without tables is what looking up takes: on the host, per
kernel, and by the bytes that they move.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headway.collective.table_traffic import KernelWork, RankPass, TableTraffic
from headway.cost.device import DeviceModel
from headway.simulator.table_work import PricedExchange, TableStretch, TableWork


def price_tables(
    traffic: TableTraffic,
    devices: Sequence[DeviceModel],
    *,
    dtype: str,
    updates: Sequence[float] = (),
    state: Sequence[float] = (),
) -> TableWork:
    """A step's lookups, for the simulator.

    Args:
        devices: By rank of the data axis.
        dtype: Format of the products.
        updates: Seconds by rank of updating rows; none: nothing is updated.
        state: Bytes by rank of rows and their state.
    """
    ranks = traffic.ranks
    return TableWork(
        exchanges=tuple(
            PricedExchange(
                one.kind,
                ranks,
                one.fullest * traffic.scale,
                sum(map(sum, one.bytes)) * traffic.scale,
            )
            for one in traffic.exchanges
        ),
        forward=_stretches(traffic, devices, "forward", dtype),
        backward=_stretches(traffic, devices, "backward", dtype),
        update=tuple(updates) or (0.0,) * ranks,
        state=tuple(state) or (0.0,) * ranks,
    )


def work_seconds(work: KernelWork, device: DeviceModel, dtype: str) -> float:
    """Of kernels one after the other."""
    if not work.kernels:
        return 0.0
    own = device.seconds_of_kernels(work.kernels) + work.bytes / device.memory_rate
    # The search says what is missing where nothing is known of a format.
    own += work.flops / device.rate(dtype if dtype in device.peak else next(iter(device.peak)))
    return float(device.join(float(device.seconds_of_host(work.kernels)), float(own)))


def _stretches(
    traffic: TableTraffic, devices: Sequence[DeviceModel], way: str, dtype: str
) -> tuple[tuple[tuple[TableStretch, ...], ...], ...]:
    alone = traffic.alone[way == "backward"]
    return tuple(
        tuple(
            tuple(_of_pass(one, alone, devices[rank], dtype, traffic.scale))
            for one in passes
            if one.way == way
        )
        for rank, passes in enumerate(traffic.passes)
    )


def _of_pass(
    one: RankPass, alone: KernelWork, device: DeviceModel, dtype: str, scale: float
) -> Iterator[TableStretch]:
    works = [*(mark.work for mark in one.marks), one.rest]
    shares = _shares(works)
    own = work_seconds(alone, device, dtype)
    # Samples of a rank may be fewer than those of the one that was looked at alone.
    own *= min(1.0, one.work.flops / alone.flops) if alone.flops else 1.0
    seconds = [work_seconds(work, device, dtype) for work in works]
    # What a stretch has less than its share another has more: only the sum counts.
    more = max(0.0, sum(seconds) - own)
    extra = [max(0.0, s - share * own) for s, share in zip(seconds, shares, strict=True)]
    total = sum(extra)
    for number, (share, part) in enumerate(zip(shares, extra, strict=True)):
        mark = one.marks[number] if number < len(one.marks) else None
        yield TableStretch(
            share,
            part * more / total * scale if total else 0.0,
            None if mark is None else mark.exchange,
            mark is not None and mark.starts,
        )


def _shares(works: Sequence[KernelWork]) -> list[float]:
    """Of the pass's own seconds in each stretch."""
    flops = sum(work.flops for work in works)
    if flops:
        return [work.flops / flops for work in works]
    return [0.0] * (len(works) - 1) + [1.0]
