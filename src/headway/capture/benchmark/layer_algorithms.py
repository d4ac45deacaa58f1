"""The algorithms torch has for each convolution and attention of a model: selected and timed.

A call of a convolution or an attention is replaced where it happens (`use_algorithms`); the module
stays as it is. All algorithms of a layer compute the same function with tensors of the same
layout, so choices for two layers are independent and their times add up.

`measure_algorithms` times the default algorithm of each layer alone with the tensors of a real
call, and the others by what the whole model then takes longer and allocates more: in the caches and
memory formats that it really has. Zou et al. 2017: T_kl and M_kl of the minibatch choice. Layers
that are called in the same way are measured once.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile

from headway.capture.benchmark.timer import DeviceTimer
from headway.errors import PlanError
from headway.graph.layer_algorithms import AlgorithmProfile, LayerAlgorithm

AlgorithmFunction = Callable[..., Tensor]
DEFAULT_ALGORITHM = "plain"
"""As torch chooses."""
ROOT = "(model)"
"""Of a call that the model's own forward makes."""


def _channels_last(x: Tensor, weight: Tensor, *rest: Any, **named: Any) -> Tensor:
    last = torch.channels_last
    made: Tensor = torch.conv2d(
        x.contiguous(memory_format=last), weight.contiguous(memory_format=last), *rest, **named
    )
    return made.contiguous()


def _unfold(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """Explicit GEMM: every window of the input is a column of a matrix."""
    if isinstance(padding, str):
        raise NotImplementedError("padding by name")
    columns = F.unfold(x, weight.shape[2:], dilation, padding, stride)
    steps = [
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, p, d, k, s in zip(
            x.shape[2:],
            _pair(padding),
            _pair(dilation),
            weight.shape[2:],
            _pair(stride),
            strict=True,
        )
    ]
    some = columns.unflatten(1, (groups, -1))
    made: Tensor = weight.flatten(1).unflatten(0, (groups, -1)) @ some
    made = made.flatten(1, 2).unflatten(2, steps)
    return made if bias is None else made + bias[:, None, None]


def _pair(value: Any) -> tuple[int, int]:
    found = (value,) * 2 if isinstance(value, int) else tuple(value)
    return (found * 2)[:2] if len(found) == 1 else found


@contextmanager
def _without_onednn() -> Iterator[None]:
    """Not by `mkldnn.flags`, which also sets TF32 and warns where there is none."""
    backend: Any = torch.backends.mkldnn
    before = backend.enabled
    backend.enabled = False
    try:
        yield
    finally:
        backend.enabled = before


class _WithoutOneDnn(torch.autograd.Function):
    """torch's own convolution, in both passes."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, options: tuple[Any, ...]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.options, ctx.bias = options, None if bias is None else list(bias.shape)
        with _without_onednn():
            return torch.conv2d(x, weight, bias, *options)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.options
        with _without_onednn():
            found = torch.ops.aten.convolution_backward(
                gradient, x, weight, ctx.bias, list(_pair(stride)), list(_pair(padding)),
                list(_pair(dilation)), False, [0, 0], groups,
                [*ctx.needs_input_grad[:2], ctx.bias is not None],
            )  # fmt: skip
        return *found, None


def _native(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    if isinstance(padding, str):
        raise NotImplementedError("padding by name")
    options = (stride, padding, dilation, groups)
    return _WithoutOneDnn.apply(x, weight, bias, options)  # type: ignore[no-any-return,no-untyped-call]


def _attention(backend: SDPBackend, *args: Any, **named: Any) -> Tensor:
    with sdpa_kernel([backend]):
        return F.scaled_dot_product_attention(*args, **named)


CONVOLUTION: Mapping[str, AlgorithmFunction] = MappingProxyType(
    {
        DEFAULT_ALGORITHM: torch.conv2d,
        "channels-last": _channels_last,
        "unfold": _unfold,
        "native": _native,
    }
)
ATTENTION: Mapping[str, AlgorithmFunction] = MappingProxyType(
    {
        DEFAULT_ALGORITHM: F.scaled_dot_product_attention,
        "math": partial(_attention, SDPBackend.MATH),
        "flash": partial(_attention, SDPBackend.FLASH_ATTENTION),
        "efficient": partial(_attention, SDPBackend.EFFICIENT_ATTENTION),
    }
)
_ALGORITHMS: Mapping[Any, Mapping[str, AlgorithmFunction]] = {
    torch.conv2d: CONVOLUTION,
    F.scaled_dot_product_attention: ATTENTION,
}


@dataclass(frozen=True)
class LayerCall:
    """A call of a layer with several ways.

    Attributes:
        name: The path of the module that makes it, and "#2" for its second call of this kind.
    """

    name: str
    ways: Mapping[str, AlgorithmFunction] = field(repr=False)
    args: tuple[Any, ...] = field(repr=False)
    named: Mapping[str, Any] = field(repr=False)

    @property
    def key(self) -> object:
        """Equal for calls that take equally long."""
        return (
            next(iter(self.ways.values())),
            tuple(map(_signature, self.args)),
            tuple((name, _signature(value)) for name, value in sorted(self.named.items())),
        )


def _signature(value: Any) -> object:
    if not isinstance(value, Tensor):
        return tuple(value) if isinstance(value, list) else value
    return tuple(value.shape), value.dtype, value.stride(), value.device.type, value.requires_grad


class _LayerCallMode(TorchFunctionMode):
    """Hands every call of a layer to `handle`, with the path of the module that makes it."""

    def __init__(self, handle: Callable[[LayerCall], Tensor]) -> None:
        super().__init__()
        self._handle = handle
        self.paths: list[str] = [""]
        self.counts: dict[tuple[str, str], int] = {}

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        try:
            ways = _ALGORITHMS.get(function)
        except TypeError:  # not hashable
            ways = None
        if ways is None:
            return function(*args, **(kwargs or {}))
        path = self.paths[-1] or ROOT
        key = (path, "attention" if ways is ATTENTION else "convolution")
        self.counts[key] = number = self.counts.get(key, 0) + 1
        return self._handle(
            LayerCall(path if number == 1 else f"{path}#{number}", ways, args, kwargs or {})
        )


@contextmanager
def _intercept_layers(model: nn.Module, handle: Callable[[LayerCall], Tensor]) -> Iterator[None]:
    mode = _LayerCallMode(handle)

    def enter(path: str, *_: Any) -> None:
        if not path:
            mode.counts.clear()  # a new forward pass: its first call of a layer is "#1" again
        mode.paths.append(path)

    def leave(*_: Any) -> None:
        mode.paths.pop()

    with ExitStack() as stack:
        for path, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(partial(enter, path)).remove)
            # Also after an error: the path of the module has to be left.
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        stack.enter_context(mode)
        yield


def layers_of(model: nn.Module, run: Callable[[], object]) -> tuple[LayerCall, ...]:
    """The convolutions and attentions that a forward pass calls, in order."""
    found: list[LayerCall] = []

    def note(called: LayerCall) -> Tensor:
        found.append(called)
        return called.ways[DEFAULT_ALGORITHM](*called.args, **called.named)

    with _intercept_layers(model, note):
        run()
    return tuple(found)


@contextmanager
def use_algorithms(model: nn.Module, algorithms: Mapping[str, str]) -> Iterator[None]:
    """Within it, the model's layers are computed in the ways that are named.

        with use_algorithms(model, {"stem": "channels-last", "blocks.0.attention": "math"}):
            loss = criterion(model(x), y)

    Args:
        algorithms: By layer, as `layers_of` names them; others as torch chooses.

    Raises:
        PlanError: A layer has no such way; or, on leaving, a named layer was not called.
    """
    unknown = [
        f"{layer}: {name}" for layer, name in algorithms.items()
        if name not in CONVOLUTION and name not in ATTENTION
    ]  # fmt: skip
    if unknown:
        ways = ", ".join(dict.fromkeys([*CONVOLUTION, *ATTENTION]))
        raise PlanError("there is no such algorithm", problems=unknown, fix=f"There are: {ways}.")
    used: set[str] = set()

    def compute(called: LayerCall) -> Tensor:
        name = algorithms.get(called.name, DEFAULT_ALGORITHM)
        used.add(called.name)
        if name not in called.ways:
            raise PlanError(
                f"{called.name} cannot be computed by {name}",
                problems=[f"it has the ways {', '.join(called.ways)}"],
            )
        return called.ways[name](*called.args, **called.named)

    with _intercept_layers(model, compute):
        yield
    missing = sorted(algorithms.keys() - used)
    if used and missing:
        raise PlanError(
            "some layers of a choice of algorithms were not called",
            problems=missing,
            fix="Choose for the model as it is; its layers: " + ", ".join(sorted(used)) + ".",
        )


Step = Callable[[], Tensor]
"""A forward pass; returns the loss."""


@dataclass(frozen=True)
class MinibatchModel:
    """A model at one minibatch.

    Attributes:
        seconds: Of a forward and a backward pass as torch chooses.
        peak: Bytes that both allocate at most.
    """

    profile: AlgorithmProfile
    seconds: float
    peak: float


def measure_algorithms(
    model: nn.Module,
    step: Step,
    *,
    clock: DeviceTimer,
    parameters: float,
    known: dict[object, tuple[LayerAlgorithm, ...]],
    rounds: int = 3,
) -> MinibatchModel:
    """The profile of a model at one minibatch.

    All ways are timed in turn, round by round, and the shortest times count: what else a machine
    does meanwhile then hits all of them equally.

    Args:
        step: Its forward pass with that minibatch.
        parameters: M_MP: bytes of weights, gradients and copies of the optimiser.
    """
    found = layers_of(model, step)
    trials = {called.key: _trials(called, clock) for called in found if called.key not in known}
    # Layers with equal calls change together: a difference is that of all of them.
    same_calls = {key: [called.name for called in found if called.key == key] for key in trials}

    def both() -> None:
        model.zero_grad(set_to_none=True)
        step().backward()

    def timed(algorithms: Mapping[str, str]) -> float:
        with use_algorithms(model, algorithms):
            return clock.best(both)

    def most() -> float:
        model.zero_grad(set_to_none=True)  # else their end would count as less than nothing
        return peak_bytes(both, clock)

    # Peaks first and alone: a profiler that notes allocations would spoil the times.
    whole, peak = math.inf, most()
    for key, some in trials.items():
        for trial in some:
            with use_algorithms(model, dict.fromkeys(same_calls[key], trial.name)):
                trial.work = most() - peak
    for _ in range(rounds):
        whole = min(whole, timed({}))
        for key, some in trials.items():
            for trial in some:
                trial.alone = min(trial.alone, clock.best(trial.both))
                inside = timed(dict.fromkeys(same_calls[key], trial.name))
                trial.inside = min(trial.inside, inside)
    model.zero_grad(set_to_none=True)
    for key, some in trials.items():
        known[key] = tuple(_in_place(some, whole, len(same_calls[key])))
    layers = {called.name: known[called.key] for called in found}
    plain = [way for ways in layers.values() for way in ways if way.name == DEFAULT_ALGORITHM]
    # Where another way needs less than the plain one, what that has more is work space, too.
    own = sum(way.bytes for way in plain)
    gradients = sum(_size(p) for p in model.parameters() if p.requires_grad)
    return MinibatchModel(
        profile=AlgorithmProfile(
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
        work: Bytes by which the peak of the whole model grows with it.
    """

    name: str
    both: Callable[[], object]
    work: float = 0.0
    alone: float = math.inf
    inside: float = math.inf


def _in_place(trials: Sequence[_Trial], whole: float, layers: int) -> Iterator[LayerAlgorithm]:
    """The ways of a layer: the plain one's time alone, the others' by what the whole model then
    takes longer or shorter; work spaces from that of the way that needs least."""
    plain = next(trial for trial in trials if trial.name == DEFAULT_ALGORITHM)
    least = min([0.0, *(trial.work for trial in trials if trial is not plain)])
    for trial in trials:
        # The plain trial and `whole` measure the same model: the shorter time counts.
        longer = 0.0 if trial is plain else (trial.inside - min(whole, plain.inside)) / layers
        work = (0.0 if trial is plain else trial.work) - least
        yield LayerAlgorithm(trial.name, max(0.0, plain.alone + longer), work / layers)


def _trials(called: LayerCall, clock: DeviceTimer) -> list[_Trial]:
    found = []
    for name in called.ways:
        try:
            found.append(_trial(called, name, clock))
        # Few algorithms support all shapes and types: one that refuses these is left out.
        except (RuntimeError, NotImplementedError):
            if name == DEFAULT_ALGORITHM:
                raise
    return found


def _trial(called: LayerCall, name: str, clock: DeviceTimer) -> _Trial:
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

    # Here, so that an algorithm that cannot compute this is left out by `_trials`.
    both()
    return _Trial(name, both)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def peak_bytes(call: Callable[[], object], clock: DeviceTimer) -> float:
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
    # Several events may have one time stamp; their index has the order.
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
