"""What this rank's device does in a second: products, streams, launches, updates.

All ranks of a machine measure at the same time, as they work at the same time: they share memory
and caches. Products at their best say what the device could do. All else is what a training step
does, with operands that are not in the caches, outputs in new memory and gradients, in rounds.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor
from torch.utils.data import default_collate

from headway.capture.clock import Clock
from headway.capture.kinds import cases, timed_of, visit
from headway.capture.rounds import SECONDS, Slowest, Visit, alone, in_rounds
from headway.cluster.device import UPDATED
from headway.cluster.readings import IdleStep, Kernels

_SIDES = {"cpu": (256, 512), "cuda": (2048, 4096)}
_DEPTHS = {"cpu": (32, 128, 256, 512, 1024), "cuda": (64, 256, 1024, 2048, 4096)}
_FORMATS = {
    "cpu": {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16},
    "cuda": {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16},
}
_SLOW_SECONDS = 0.1
"""A format in which one middling product takes longer is not measured: nobody trains in it."""
_CHAIN, _SAMPLES = 50, 128
_TENSORS = (32, 16, 4)
"""Parameters of each of `UPDATED` numbers that an optimiser steps over, most in no cache."""


def measure_kernels(
    device: torch.device,
    local_ranks: int,
    slowest: Slowest = alone,
    seconds: float = SECONDS,
    idle: Mapping[IdleStep, Visit] = MappingProxyType({}),
) -> Kernels:
    """Measure; collective among the ranks of the machine.

    Args:
        device: Of this rank.
        local_ranks: Ranks that share the memory of the machine.
        slowest: Of these ranks.
        seconds: For rounds, after some seconds for peaks.
        idle: Steps to be timed in the same rounds.
    """
    clock, kind = Clock(device), device.type
    products = {
        name: tuple(_products(dtype, clock, kind))
        for name, dtype in _FORMATS[kind].items()
        if not _too_slow(dtype, clock)
    }
    one = torch.randn(512, 512, device=device)
    spread = clock.spread(lambda: one @ one)
    every, updates = cases(), dict(_updates(clock))
    visits: list[Visit] = [partial(visit, case, clock) for case in every]
    visits += [lambda: (_dispatch(clock),), lambda: (_gather(clock),)]
    visits += [*updates.values(), *idle.values()]
    times = in_rounds(visits, slowest, seconds)
    timed = timed_of(list(zip(every, times, strict=False)))
    dispatch, gather, *steps = times[len(every) :]
    steps, idled = steps[: len(updates)], steps[len(updates) :]
    return Kernels(
        name=_name(device),
        adds=clock.on_host,
        products=products,
        streams=tuple(one.forward[1:] for one in timed if one.kind == "add"),
        dispatch=dispatch[0],
        gather=gather[0],
        kernel=0.0 if clock.on_host else _kernel(device, clock),
        skew=0.0,
        memory=_memory(device, local_ranks),
        spread=spread,
        kinds=timed,
        updates={name: (a, b, c) for name, (a, b, c) in zip(updates, steps, strict=True)},
        idle={step: own for step, (own,) in zip(idle, idled, strict=True)},
    )


def cores_in_use(seconds: float = 0.2) -> float:
    """Cores that are busy while this process does nothing; 0.0 where the system does not say."""
    before = _jiffies()
    time.sleep(seconds)
    after = _jiffies()
    if before is None or after is None or after[1] == before[1]:
        return 0.0
    share = (after[0] - before[0]) / (after[1] - before[1])
    return share * (os.cpu_count() or 1)


def _jiffies() -> tuple[int, int] | None:
    """(Busy, all) ticks of all cores since the machine started."""
    try:
        ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def device_name(kind: str) -> str:
    """As `Kernels.name`, of the first device of a kind: "cpu", "cuda", or "auto"."""
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    return _name(torch.device(kind))


def _name(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    words = re.sub(r"[^A-Za-z0-9]+", "-", torch.cuda.get_device_name(device)).strip("-")
    return words.lower().removeprefix("nvidia-")


def _too_slow(dtype: torch.dtype, clock: Clock) -> bool:
    one = torch.ones(256, 256, dtype=dtype, device=clock.device)
    clock.once(lambda: one @ one)
    return clock.once(lambda: one @ one) > _SLOW_SECONDS


def _products(dtype: torch.dtype, clock: Clock, kind: str) -> Iterator[tuple[int, int, int, float]]:
    count = 1 if clock.on_host else 10  # a queue that never runs empty
    for side in _SIDES[kind]:
        for depth in _DEPTHS[kind]:
            a = torch.randn(side, depth, device=clock.device).to(dtype)
            b = torch.randn(depth, side, device=clock.device).to(dtype)
            yield side, side, depth, clock.best(lambda a=a, b=b: a @ b, count)  # type: ignore[misc]


def _dispatch(clock: Clock) -> float:
    """Of a chain of products of four numbers: one kernel forward and two backward for each."""
    weights = [torch.ones(4, device=clock.device, requires_grad=True) for _ in range(_CHAIN)]

    def step() -> None:
        value = torch.ones(4, device=clock.device)
        for weight in weights:
            weight.grad = None
            value = value * weight
        value.sum().backward()

    return clock.once(step) / (3 * _CHAIN)


def _gather(clock: Clock) -> float:
    """Of one tensor of one sample: taken out of its column, and put into a batch with others."""
    columns = [torch.ones(_SAMPLES, 48) for _ in range(2)]

    def batch() -> object:
        samples = [tuple(column[n] for column in columns) for n in range(_SAMPLES)]
        return default_collate(samples)

    return clock.once(batch) / (_SAMPLES * len(columns))


def _kernel(device: torch.device, clock: Clock) -> float:
    """Of tiny kernels that nobody has to issue: a recorded graph of them, played."""
    value, graph = torch.ones(4, device=device), torch.cuda.CUDAGraph()
    value.add_(1.0)
    with torch.cuda.graph(graph):
        for _ in range(4 * _CHAIN):
            value.add_(1.0)
    return clock.best(graph.replay) / (4 * _CHAIN)


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """What decides the kernels of its step: "AdamW", "AdamW fused", "SGD momentum"."""
    words = [type(optimizer).__name__]
    words += [word for word in ("fused", "momentum") if optimizer.defaults.get(word)]
    return " ".join(words)


def _updates(clock: Clock) -> Iterator[tuple[str, Visit]]:
    """Seconds per parameter of each optimiser's step, and of the norm of the gradients, by the
    numbers of a tensor."""
    sets = [_parameters(clock, *pair) for pair in zip(_TENSORS, UPDATED, strict=True)]
    makers: tuple[Callable[[list[Tensor]], torch.optim.Optimizer], ...] = (
        torch.optim.AdamW,
        partial(torch.optim.AdamW, fused=True),
        torch.optim.Adam,
        partial(torch.optim.SGD, lr=1e-3),
        partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
        torch.optim.RMSprop,
        torch.optim.Adagrad,
    )
    for make in makers:
        optimizers = [make(parameters) for parameters in sets]
        steps = [optimizer.step for optimizer in optimizers]
        yield optimizer_name(optimizers[0]), partial(_per_parameter, clock, steps)
    norms = [partial(torch.nn.utils.clip_grad_norm_, parameters, 1.0) for parameters in sets]
    yield "clip", partial(_per_parameter, clock, norms)


def _per_parameter(clock: Clock, steps: Sequence[Callable[[], object]]) -> tuple[float, ...]:
    each = zip(steps, _TENSORS, UPDATED, strict=True)
    return tuple(clock.once(step) / (count * size) for step, count, size in each)


def _parameters(clock: Clock, count: int, size: int) -> list[Tensor]:
    """So many with gradients."""
    found: list[Tensor] = [
        torch.nn.Parameter(torch.ones(size, device=clock.device)) for _ in range(count)
    ]
    for parameter in found:
        parameter.grad = torch.ones_like(parameter)
    return found


def _memory(device: torch.device, local_ranks: int) -> float:
    """Bytes of this rank: of its GPU, or its share of the machine's (or container's)."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else ""
    return float(min(whole, int(text)) if text.isdigit() else whole) / local_ranks
