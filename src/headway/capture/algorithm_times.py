"""How long each way of each layer takes, and its work space: the tables of Zou's minibatch choice.

The plain way of a layer is timed alone, forward and backward, with the tensors of a real call; what
another way takes longer, and by how much the peak of memory grows, in the whole model: in the
caches, memory formats and moments that it really has. What torch takes by itself counts to the
feature maps; a work space is what a way needs beyond that. Invariant: layers that are called alike
are measured once. Source: Zou et al. 2017, procedure for the minibatch.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from headway.capture.algorithms import PLAIN, Called, chosen, layers_of
from headway.capture.clock import Clock
from headway.graph.algorithms import Algorithm, Profile

Step = Callable[[], Tensor]
"""A forward pass; returns the loss."""


@dataclass(frozen=True)
class Layered:
    """A model at one minibatch.

    Attributes:
        profile: For `knapsack.choose_minibatch`.
        seconds: Of a forward and a backward pass as torch chooses.
        peak: Bytes that both allocate at most.
    """

    profile: Profile
    seconds: float
    peak: float


def measure(
    model: nn.Module,
    step: Step,
    *,
    clock: Clock,
    parameters: float,
    known: dict[object, tuple[Algorithm, ...]],
    rounds: int = 3,
) -> Layered:
    """The profile of a model at one minibatch.

    All ways are timed in turn, round by round, and the shortest times count: what else a machine
    does meanwhile then hits all of them alike.

    Args:
        model: In training mode.
        step: Its forward pass with that minibatch.
        clock: Of the device.
        parameters: M_MP: bytes of weights, gradients and copies of the optimiser.
        known: What has been measured; filled.
        rounds: Of measurements.
    """
    found = layers_of(model, step)
    trials = {called.key: _trials(called, clock) for called in found if called.key not in known}
    alike = {key: [called.name for called in found if called.key == key] for key in trials}

    def both() -> None:
        model.zero_grad(set_to_none=True)
        step().backward()

    def timed(algorithms: Mapping[str, str]) -> float:
        with chosen(model, algorithms):
            return clock.best(both)

    def most() -> float:
        model.zero_grad(set_to_none=True)  # else their end would count as less than nothing
        return peak_bytes(both, clock)

    whole, peak = math.inf, most()
    for key, some in trials.items():
        for trial in some:
            with chosen(model, dict.fromkeys(alike[key], trial.name)):
                trial.work = most() - peak
    for _ in range(rounds):
        whole = min(whole, timed({}))
        for key, some in trials.items():
            for trial in some:
                trial.alone = min(trial.alone, clock.best(trial.both))
                inside = timed(dict.fromkeys(alike[key], trial.name))
                trial.inside = min(trial.inside, inside)
    model.zero_grad(set_to_none=True)
    for key, some in trials.items():
        known[key] = tuple(_in_place(some, whole, len(alike[key])))
    layers = {called.name: known[called.key] for called in found}
    plain = [way for ways in layers.values() for way in ways if way.name == PLAIN]
    # Where another way needs less than the plain one, what that has more is work space, too.
    own = sum(way.bytes for way in plain)
    gradients = sum(_size(p) for p in model.parameters() if p.requires_grad)
    return Layered(
        profile=Profile(
            layers=layers,
            rest=max(0.0, whole - sum(way.seconds for way in plain)),
            features=max(0.0, peak - gradients - own),
            parameters=parameters,
        ),
        seconds=whole,
        peak=peak,
    )


@dataclass(slots=True)
class _Trial:
    """One way of one layer.

    Attributes:
        name: Of the way.
        both: Its forward and its backward.
        work: Bytes by which the peak of the whole model grows with it.
        alone: Its shortest time.
        inside: The shortest time of the whole model with it.
    """

    name: str
    both: Callable[[], object]
    work: float = 0.0
    alone: float = math.inf
    inside: float = math.inf


def _in_place(trials: Sequence[_Trial], whole: float, layers: int) -> Iterator[Algorithm]:
    """The ways of a layer: the plain one's time alone, the others' by what the whole model then
    takes longer or shorter; work spaces from that of the way that needs least."""
    plain = next(trial for trial in trials if trial.name == PLAIN)
    least = min([0.0, *(trial.work for trial in trials if trial is not plain)])
    for trial in trials:
        longer = 0.0 if trial is plain else (trial.inside - min(whole, plain.inside)) / layers
        work = (0.0 if trial is plain else trial.work) - least
        yield Algorithm(trial.name, max(0.0, plain.alone + longer), work / layers)


def _trials(called: Called, clock: Clock) -> list[_Trial]:
    """Those that this device has."""
    found = []
    for name in called.ways:
        try:
            found.append(_trial(called, name, clock))
        except (RuntimeError, NotImplementedError):
            if name == PLAIN:
                raise
    return found


def _trial(called: Called, name: str, clock: Clock) -> _Trial:
    def leaf(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.detach().requires_grad_(value.requires_grad)

    args = tuple(map(leaf, called.args))
    named = {key: leaf(value) for key, value in called.named.items()}
    wanted = [
        value
        for value in (*args, *named.values())
        if isinstance(value, Tensor) and value.requires_grad
    ]
    way = called.ways[name]
    with torch.no_grad():
        gradient = torch.ones_like(way(*args, **named))

    def both() -> list[Tensor]:
        with torch.enable_grad():
            made = way(*args, **named)
            return [made, *(torch.autograd.grad(made, wanted, gradient) if wanted else ())]

    both()
    return _Trial(name, both)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def peak_bytes(call: Callable[[], object], clock: Clock) -> float:
    """What a call allocates at most at a time, its results included.

    On the host by the profiler's notes of every allocation, which also see those inside of kernels
    as far as they go through torch's allocator.
    """
    if not clock.on_host:
        torch.cuda.reset_peak_memory_stats(clock.device)
        before = torch.cuda.memory_allocated(clock.device)
        kept = call()
        clock.wait()
        del kept
        return float(torch.cuda.max_memory_allocated(clock.device) - before)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with _quiet():
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as noted:
                kept = call()
            del kept
            noted.export_chrome_trace(str(path))
        events = json.loads(path.read_text("utf-8"))["traceEvents"]
    held = most = 0.0
    changes = [event for event in events if event.get("name") == "[memory]"]
    for event in sorted(changes, key=lambda event: (event["ts"], event["args"]["Ev Idx"])):
        held += event["args"]["Bytes"]
        most = max(most, held)
    return most


@contextmanager
def _quiet() -> Iterator[None]:
    """The profiler's library writes a line for each start and stop to the standard error."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


# -- recorded ------------------------------------------------------------------------------------


def to_plain(profile_: Profile) -> dict[str, Any]:
    """For a file."""
    return {
        "layers": {
            layer: [[way.name, way.seconds, way.bytes] for way in ways]
            for layer, ways in profile_.layers.items()
        },
        "rest": profile_.rest,
        "features": profile_.features,
        "parameters": profile_.parameters,
    }


def from_plain(found: Mapping[str, Any]) -> Profile:
    """What `to_plain` has made.

    Raises:
        ValueError: A number is none from 0 upwards.
    """
    profile_ = Profile(
        layers={
            layer: tuple(Algorithm(str(name), float(s), float(b)) for name, s, b in ways)
            for layer, ways in found["layers"].items()
        },
        rest=float(found["rest"]),
        features=float(found["features"]),
        parameters=float(found["parameters"]),
    )
    numbers = [n for ways in profile_.layers.values() for w in ways for n in (w.seconds, w.bytes)]
    if not all(math.isfinite(n) and n >= 0 for n in [*numbers, profile_.rest, profile_.features]):
        raise ValueError("times and sizes are numbers from 0 upwards")
    return profile_
