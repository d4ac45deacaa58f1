"""From the readings of all ranks to a cluster description: device types, kernel rates, links.

Each number keeps when and with what it was measured, and by how much its formula misses the
times it was fitted to. Peaks are the shortest of repeated times, everything else is what a step
usually takes.

The rates of each kind of kernel follow

    seconds = calls * call + FLOPs / a + bytes / b + bytes of weights / c + bytes beyond NEAR / d

with all terms at least 0. Relative errors count. Which terms there are is decided by the final
prediction error (Akaike 1970), so that two or three shapes do not make four terms. A call costs
more than its launch: libraries choose and set up a kernel, convolutions lay their operands out
anew. Weights are packed for every call and come from memory, where activations often come from
a cache.

The host is what the model leaves unexplained of steps of a few numbers, timed for several
plans:

    step + microbatches * microbatch + tensors * tensor
    piped_step + (microbatches + 1) * (piped_microbatch + message)      in a pipeline of two stages
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from statistics import median
from typing import NamedTuple

import numpy as np

from headway.cluster.cluster import Cluster, Node, node_names
from headway.cluster.device import CORE_CACHE_BYTES, Device, HostOverhead, KernelPace, OptimizerPace
from headway.cluster.link import Level, Link
from headway.cluster.measurement import (
    DeviceReadings,
    IdleStep,
    KernelTiming,
    LinkReadings,
    RankReadings,
    SizeTimings,
)
from headway.collective.model.link_fit import LinkFit, fit_line, fit_link
from headway.cost.machines import device_of
from headway.cost.network import HierarchicalNetwork, link_level, network_of
from headway.units import format_bytes

_WIDTH, _BYTES = 4, 16.0
"""Of a trained tensor of such a step: numbers, bytes."""
_EACH, _ENDS = 4, 3
"""Kernels of both passes of each product, and of the mean."""


def add_host_costs(
    device: Device, found: DeviceReadings, network: HierarchicalNetwork, ranks: int, stamp: str
) -> Device:
    """The device with what steps take beside it; as it is where that was not measured."""
    if not found.idle:
        return device

    def rest(step: IdleStep) -> float:
        return found.idle[step] - _known(step, device, network, ranks)

    one, many, several = (step for step in found.idle if step.stages == 1)
    # A difference of two steps leaves only what grows: the rest of both cancels.
    tensor = max(0.0, (rest(many) - rest(one)) / (many.tensors - one.tensors))
    micro = max(0.0, (rest(several) - rest(one)) / (several.microbatches - one.microbatches))
    left = rest(one) - one.tensors * tensor - one.microbatches * micro
    host = HostOverhead(
        step=_four_digits(max(0.0, left)),
        microbatch=_four_digits(micro),
        tensor=_four_digits(tensor),
    )
    piped = [step for step in found.idle if step.stages > 1]
    if piped:
        few, more = piped
        each = (rest(more) - rest(few)) / (more.microbatches - few.microbatches)
        each = max(0.0, each)
        left = rest(few) - (few.microbatches + 1) * each
        host = replace(
            host,
            piped_step=_four_digits(max(0.0, left)),
            piped_microbatch=_four_digits(each),
        )
    words = f"measured {stamp}: steps of the executor with next to nothing to compute"
    return replace(device, host=host, source={**device.source, "host": words})


def _known(step: IdleStep, device: Device, network: HierarchicalNetwork, ranks: int) -> float:
    """What the model says of such a step without these terms."""
    dispatch, gather = device.dispatch or 0.0, device.gather or 0.0
    sgd = device.updates.get("SGD")
    own = step.tensors // step.stages
    kernels = (_EACH * own + _ENDS) * dispatch
    update = 0.0 if sgd is None else own * sgd.seconds(_WIDTH)
    read = step.microbatches * step.samples * gather
    if step.stages == 1:
        summed = float(network.all_reduce(_BYTES * own, ranks)) if ranks > 1 else 0.0
        return step.microbatches * kernels + update + read + summed
    message = float(network.send(_BYTES * step.samples))
    return (step.microbatches + 1) * (kernels + message) + update + read


def _four_digits(value: float) -> float:
    # What was measured is not known better.
    return float(f"{value:.4g}")


Point = tuple[float, float, float, float, float]
"""FLOPs, bytes without weights, bytes of weights, calls, seconds."""
# Relative error of a time, below which no fit is better than another.
NOISE = 0.03
_WHOLE = ("rate", "both", "call")
_APART = ("weights", "rate", "stream", "call")
_STREAMED = ("both", "far", "call")


class PaceTerms(NamedTuple):
    """FLOP/s, bytes/s, bytes/s of weights, of what is beyond `CORE_CACHE_BYTES`, seconds of a call;
    None where a term is nothing.
    """

    rate: float | None = None
    stream: float | None = None
    weights: float | None = None
    far: float | None = None
    call: float | None = None

    def named(self, phase: str) -> dict[str, float | None]:
        """As `KernelPace` names the terms of a pass: "forward", "forward_stream", ..."""
        return {f"{phase}_{k}" if k != "rate" else phase: v for k, v in self._asdict().items()}


def fit_paces(
    timed: Sequence[KernelTiming], floor: float, peak: float = np.inf
) -> tuple[dict[str, KernelPace], str]:
    """By kind; and the misses of all in words.

    Args:
        floor: Seconds of a launch, of which a backward has one for each gradient.
        peak: FLOP/s of products at their best.
    """
    found: dict[str, KernelPace] = {}
    misses: list[float] = []
    for kind in dict.fromkeys(one.kind for one in timed):
        same = [one for one in timed if one.kind == kind]
        ahead = fit_terms([_point(one, 0) for one in same], misses, floor, peak)
        back = fit_terms([_point(one, 1) for one in same], misses, 2 * floor, peak)
        found[kind] = KernelPace(**ahead.named("forward"), **back.named("backward"))
    if not misses:
        return found, "none"
    return found, f"fit error {sum(misses) / len(misses):.0%} (largest {max(misses):.0%})"


def _point(timed: KernelTiming, number: int) -> Point:
    """Forward (0) or backward (1)."""
    flops, moved, seconds = (timed.forward, timed.backward)[number]
    weights = timed.weights[number]
    return flops, moved - weights, weights, timed.calls, seconds


def fit_terms(
    points: Sequence[Point], misses: list[float], floor: float = 0.0, peak: float = np.inf
) -> PaceTerms:
    """The terms of one pass of a kind.

    Args:
        floor: Seconds of its launches, which the terms leave out; at most four fifths of a time.
    """
    flops, moved, weights, calls, seconds = np.array(points).T
    # Divided by the measured time, so that least squares minimise relative errors.
    columns = {
        "rate": flops / seconds,
        "stream": moved / seconds,
        "weights": weights / seconds,
        "both": (moved + weights) / seconds,
        "call": calls / seconds,
        "rest": np.maximum(1.0 - floor / seconds, 0.2),
    }
    sets = (_WHOLE, _APART)
    # A factor below 1 / peak would mean products faster than the peak.
    if flops.any():  # what computes has a rate, if any fits: weights may grow like FLOPs by chance
        found = _chosen(columns, sets, "rate", 1.0 / peak) or _chosen(columns, sets)
    else:
        columns["far"] = np.maximum(moved + weights - CORE_CACHE_BYTES, 0.0) / seconds
        found = _chosen(columns, (*sets, _STREAMED))
    if found is None:
        return PaceTerms()
    names, inverse = found
    table = np.stack([columns[name] for name in names], axis=1)
    misses += np.abs(table @ inverse - columns["rest"]).tolist()
    terms = dict(zip(names, map(_four_digits, inverse), strict=True))
    rates = {"stream" if k == "both" else k: 1.0 / v for k, v in terms.items() if k != "call"}
    rounded = {name: _four_digits(rate) for name, rate in rates.items()}
    return PaceTerms(**rounded, call=terms.get("call"))


def _chosen(
    columns: Mapping[str, np.ndarray],
    sets: Sequence[tuple[str, ...]],
    needed: str = "",
    least: float = 0.0,
) -> tuple[tuple[str, ...], np.ndarray] | None:
    """The terms that are expected to err least, and their factors; None: none fit.

    Args:
        columns: Of each term, over the times; "rest": what all terms should give.
        needed: One of them that must be there, with a factor of at least `least`.
    """
    rest = columns["rest"]
    count = len(rest)
    best: tuple[float, tuple[str, ...], np.ndarray] | None = None
    for names in _sets(sets, count):
        if needed and needed not in names:
            continue
        table = np.stack([columns[name] for name in names], axis=1)
        # Terms that are proportional over these shapes cannot be told apart.
        if not table.any(axis=0).all() or np.linalg.matrix_rank(table) < len(names):
            continue
        inverse = np.linalg.lstsq(table, rest, rcond=None)[0]
        if (inverse <= 0).any() or (needed and inverse[names.index(needed)] < least):
            continue
        # Akaike: an error below the noise of times must not buy another term.
        error = float(((table @ inverse - rest) ** 2).mean()) + NOISE**2
        expected = error * (count + len(names)) / max(count - len(names), 1)
        # Of sets that do equally well the first one stays, which has fewer terms.
        if best is None or expected < best[0] * (1 - 1e-9):
            best = expected, names, inverse
    return None if best is None else best[1:]


def _sets(sets: Sequence[tuple[str, ...]], count: int) -> Iterator[tuple[str, ...]]:
    # As many terms as times would fit anything. `stream` leaves weights out, so it needs their
    # term.
    found = dict.fromkeys(
        names
        for every in sets
        for number in range(1, len(every) + 1)
        if number < max(count, 2)
        for names in combinations(every, number)
        if (count > 1 or names != ("call",)) and ("stream" not in names or "weights" in names)
    )
    yield from found


BUSY_CORES, BUSY_SPREAD = 0.3, 1.3
"""Cores in use by others, and usual time over shortest one, above which a machine is busy."""


def cluster_of_readings(readings: Sequence[RankReadings], stamp: str) -> Cluster:
    """The cluster: of unequal ranks and nodes the slowest exchange and the usual device count.

    Args:
        stamp: Date and versions: "2026-11-21, torch 2.13.0".
    """
    by_node: dict[str, list[RankReadings]] = {}
    for reading in readings:
        by_node.setdefault(reading.node, []).append(reading)
    by_device: dict[str, list[DeviceReadings]] = {}
    for reading in readings:
        by_device.setdefault(reading.kernels.name, []).append(reading.kernels)
    devices = {
        name: device_of_kernels(_usual(several), stamp) for name, several in by_device.items()
    }
    processes = max(len(members) for members in by_node.values())
    names = node_names(len(by_node))
    nodes = tuple(
        Node(
            name=name,
            processes=None if len(members) == processes else len(members),
            device=members[0].kernels.name if len(devices) > 1 else None,
        )
        for name, members in zip(names, by_node.values(), strict=True)
    )
    inside = _slowest(reading.inside for reading in readings)
    between = _slowest(reading.between for reading in readings)
    levels = [level_of_exchanges("node", 1, inside, stamp)] if inside else []
    levels += [level_of_exchanges("cluster", None, between, stamp)] if between else []
    cluster = Cluster(nodes=nodes, processes=processes, levels=tuple(levels), devices=devices)
    network = network_of(cluster)
    hosts = {
        name: add_host_costs(devices[name], _usual(several), network, len(readings), stamp)
        for name, several in by_device.items()
    }
    return replace(cluster, devices=hosts)


def busy_warning(readings: Sequence[RankReadings]) -> str | None:
    """A sentence if the machine did other things meanwhile, else None."""
    cores = max(reading.busy for reading in readings)
    spread = max(reading.kernels.spread for reading in readings)
    if cores < BUSY_CORES and spread < BUSY_SPREAD:
        return None
    return (
        f"the machine was busy: others used {cores:.1f} cores before, and products usually took "
        f"{spread:.2f} times as long as at best; measure again when it is idle"
    )


def _usual(several: Sequence[DeviceReadings]) -> DeviceReadings:
    # Equal devices differ a little; the one of middle speed stands for all.
    ordered = sorted(several, key=lambda kernels: sum(s for _, s in kernels.streams))
    return ordered[len(ordered) // 2]


def _slowest(exchanges: Iterable[LinkReadings | None]) -> LinkReadings | None:
    known = [exchange for exchange in exchanges if exchange is not None]
    return max(known, key=lambda e: sum(s for _, s in e.sums), default=None)


def level_of_exchanges(name: str, nodes: int | None, found: LinkReadings, stamp: str) -> Level:
    """Latency and rate of a level, from all-reduces; of plain messages from such."""
    sums = fit_link(found.sums, ranks=found.ranks)
    plain = fit_link(found.messages, ranks=2)
    level = Level(
        name=name,
        nodes=nodes,
        rate=_four_digits(_rate(sums, found.sums)),
        # A sum of nothing takes 2 log2(n) steps (tree), a large one passes 2 (n-1)/n of its bytes
        # (ring).
        latency=_four_digits(sums.latency / (2 * math.log2(found.ranks))),
        message=Link(
            rate=_four_digits(_rate(plain, found.messages)), latency=_four_digits(plain.latency)
        ),
    )
    network = HierarchicalNetwork((link_level(level, found.ranks),))
    assert level.message is not None
    predicted = [float(network.all_reduce(size, found.ranks)) for size, _ in found.sums]
    sent = [level.message.seconds(size) for size, _ in found.messages]
    sizes = f"{format_bytes(found.sums[0][0])} to {format_bytes(found.sums[-1][0])}"
    summed = (
        f"measured {stamp}: all-reduce among {found.ranks} ranks, {sizes}, "
        f"{_miss(predicted, found.sums)}"
    )
    one = f"measured {stamp}: from one rank to another, {_miss(sent, found.messages)}"
    return replace(level, source={"rate": summed, "latency": summed, "message": one})


def _rate(fit: LinkFit, times: SizeTimings) -> float:
    size, seconds = times[-1]
    # Where no time grew with the size, the largest one gives the rate.
    return fit.rate if math.isfinite(fit.rate) else size / seconds


def device_of_kernels(found: DeviceReadings, stamp: str) -> Device:
    """All numbers of a device; its peaks are those that products reach, so efficiency is 1."""
    main = "fp32" if found.adds or "bf16" not in found.products else "bf16"
    overhead, stream = fit_line(found.streams)
    floor = found.kernel + (found.dispatch if found.adds else 0.0)
    depth = _depth(found.products[main], floor)
    peak = {
        # `DeviceModel.seconds_of_matmul` solved for the peak, with efficiency 1.
        name: _four_digits(
            median(2.0 * m * n * (k + depth) / _work(s, floor) for m, n, k, s in points)
        )
        for name, points in found.products.items()
    }
    kinds, misses = fit_paces(found.kinds, floor, peak.get("fp32", math.inf))
    updates = {
        name: OptimizerPace(
            **dict(zip(("small", "middle", "large"), map(_four_digits, times), strict=True))
        )
        for name, times in found.updates.items()
    }
    device = Device(
        peak=peak,
        memory=found.memory,
        memory_rate=_four_digits(1.0 / stream),
        efficiency=1.0,
        depth=_four_digits(depth),
        kernel=_four_digits(found.kernel),
        dispatch=_four_digits(found.dispatch),
        sharpness=1.0 if found.adds else None,
        update=_four_digits(updates["AdamW"].large + updates["clip"].large) if updates else None,
        gather=None if found.gather is None else _four_digits(found.gather),
        overlap=None if found.overlap is None else float(f"{found.overlap:.2g}"),
        kinds=kinds,
        updates=updates,
    )
    streamed = [overhead + stream * size for size, _ in found.streams]
    words = {
        "peak": f"products of matrices, {_products_miss(device, found, floor)}",
        "memory": "what the system says, shared by the ranks of the node",
        "memory_rate": f"sums of two tensors into a new one, {_miss(streamed, found.streams)}",
        "efficiency": "peaks are those that products reach",
        "depth": f"products of matrices in {main}",
        "kernel": "tiny kernels",
        "dispatch": "tiny kernels, forward and backward",
        "sharpness": "host and device are one processor",
        "update": "AdamW and the norm of the gradients, large tensors",
        "updates": "a step of each optimiser, and the norm of the gradients, by size of tensors",
        "gather": "collating tensors of small samples",
        "overlap": "products beside an all-reduce",
        "kinds": f"several shapes of each in small steps, {misses}",
    }
    given = {*device.own, "peak", *(["kinds", "updates"] if kinds else [])}
    said = {key: f"measured {stamp}: {text}" for key, text in words.items() if key in given}
    return replace(device, source=said)


def _depth(points: Sequence[tuple[int, int, int, float]], floor: float) -> float:
    # seconds / (2 m n) = (depth + k) / rate is a line in k.
    constant, slope = fit_line((k, _work(s, floor) / (2.0 * m * n)) for m, n, k, s in points)
    return constant / slope if slope else 0.0


def _work(seconds: float, floor: float) -> float:
    # A floor may be overestimated; a product never takes less than a fifth of its time.
    return max(seconds - floor, 0.2 * seconds)


def _products_miss(device: Device, found: DeviceReadings, floor: float) -> str:
    model = device_of(device, found.name)
    texts = []
    for name, points in found.products.items():
        predicted = [
            floor + float(model.seconds_of_matmul(m, n, k, dtype=name)) for m, n, k, _ in points
        ]
        texts.append(f"{name} {_miss(predicted, [(0.0, s) for *_, s in points])}")
    return ", ".join(texts)


def _miss(predicted: Sequence[float], times: Sequence[tuple[float, float]]) -> str:
    misses = [abs(p / s - 1.0) for p, (_, s) in zip(predicted, times, strict=True)]
    return f"fit error {sum(misses) / len(misses):.0%} (largest {max(misses):.0%})"
