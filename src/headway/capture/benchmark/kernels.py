"""What this rank's device does in a second: matrix products, kernels, launches, optimizers.

All ranks of a machine measure at the same time, as they work at the same time: they share memory
and caches. Peak matrix products say what the device could do. Everything else is measured as a
training step runs it: operands out of cache, outputs in new memory, gradients, in rounds.
Repeating one call on cached operands shows twice the rate that a step reaches.

Each kind of kernel (linear, convolution, recurrent, attention, embedding, ...) is timed forward and
backward at a few round shapes of no model in particular. FLOPs and bytes are counted by the
formulas used for captured graphs, so that a fit to these times predicts those.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import default_collate

from headway.capture.aten_trace import spec_of
from headway.capture.benchmark.timer import (
    ROUNDS_SECONDS,
    DeviceTimer,
    Slowest,
    Visit,
    slowest_of_one,
    time_in_rounds,
)
from headway.cluster.device import UPDATE_TENSOR_SIZES
from headway.cluster.local_machine import memory_bytes
from headway.cluster.measurement import DeviceReadings, IdleStep, KernelTiming
from headway.graph.aten.flops import flops_of, kernel_calls, parameter_traffic, traffic_of
from headway.graph.aten.index_expression import OperatorCall
from headway.graph.model_graph import kernel_pace_key

_FLAT = ((24, 40), (192, 384), (480, 800), (1280, 1152))
_IMAGES = ((2, 12, 6, 6), (4, 24, 20, 20), (8, 36, 36, 36), (8, 24, 80, 80))
"""Tiny (what a call costs), small, middling, and more than a cache holds."""
_SPAN, _FEWEST, _MOST = 9 * 2**21, 3, 24
"""Bytes of operands and results in a small step, and the bounds on its calls."""
_CELL = ("w_ih", "w_hh", "b_ih", "b_hh")
EMPTY_KERNEL = "empty"


@dataclass(frozen=True, kw_only=True)
class KernelCase:
    """One call.

    Attributes:
        call: Of the inputs, in the order of `roles`.
        inputs: Shapes; of whole numbers below a bound where one stands in `bounds`.
    """

    kind: str
    call: Callable[..., Tensor]
    roles: tuple[str, ...]
    inputs: tuple[tuple[int, ...], ...]
    trained: tuple[str, ...] = ()
    bounds: dict[str, int] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)


def _linears() -> Iterator[KernelCase]:
    shapes = (
        (48, 640, 640), (48, 320, 1280), (192, 320, 320), (192, 1280, 640), (192, 640, 1280),
        (640, 192, 192), (640, 768, 320), (640, 320, 1280), (1536, 320, 320), (1536, 192, 768),
        (96, 1152, 1152), (48, 1408, 896), (192, 192, 320), (320, 48, 448), (320, 448, 40),
        (24, 32, 48), (64, 96, 64), (16, 256, 128),
    )  # fmt: skip
    for rows, inner, outer in shapes:
        yield KernelCase(
            kind="linear",
            call=F.linear,
            roles=("input", "weight", "bias"),
            inputs=((rows, inner), (outer, inner), (outer,)),
            trained=("weight", "bias"),
        )


def _convolutions() -> Iterator[KernelCase]:
    shapes = (
        (6, 16, 16, 48, 3, 1), (2, 16, 48, 40, 3, 1), (12, 48, 16, 28, 3, 1), (6, 24, 24, 28, 3, 1),
        (6, 48, 48, 40, 3, 1), (2, 48, 48, 20, 3, 1), (6, 96, 96, 20, 3, 1), (2, 160, 96, 10, 3, 1),
        (6, 160, 160, 10, 3, 1), (6, 48, 96, 40, 3, 2), (12, 48, 80, 20, 1, 2),
        (6, 96, 48, 40, 1, 1), (6, 3, 48, 56, 5, 1), (8, 3, 16, 40, 3, 1),
        (4, 8, 12, 12, 3, 1), (8, 12, 24, 14, 1, 1), (2, 16, 16, 8, 3, 1), (12, 8, 16, 16, 3, 2),
    )  # fmt: skip
    for shape in shapes:
        yield _convolution(2, (*shape, 1))
    for samples, inner, outer, side in (
        (4, 48, 24, 20), (2, 48, 48, 20), (4, 96, 40, 12), (4, 20, 12, 40),
    ):  # fmt: skip
        yield KernelCase(
            kind="conv_transpose2d",
            call=lambda x, w: F.conv_transpose2d(x, w, None, 2),
            roles=("input", "weight"),
            inputs=((samples, inner, side, side), (inner, outer, 2, 2)),
            trained=("weight",),
        )


def _other_convolutions() -> Iterator[KernelCase]:
    """Of several groups, of lines and of volumes: a kind of their own each."""
    images = (
        (8, 24, 28, 3, 1, 4), (8, 48, 14, 3, 1, 4), (6, 64, 20, 3, 2, 8), (2, 32, 8, 3, 1, 8),
        (8, 24, 28, 3, 1, 24), (8, 96, 14, 3, 1, 96), (6, 48, 40, 3, 2, 48),
        (4, 160, 10, 5, 1, 160),
    )  # fmt: skip
    for samples, channels, side, kernel, stride, groups in images:
        yield _convolution(2, (samples, channels, channels, side, kernel, stride, groups))
    lines = (
        (8, 32, 48, 80, 3, 1, 1), (8, 64, 64, 144, 5, 1, 1), (4, 24, 24, 200, 1, 1, 1),
        (32, 80, 160, 50, 5, 1, 1), (16, 160, 96, 64, 3, 1, 1), (4, 16, 16, 24, 3, 1, 1),
        (8, 64, 64, 80, 5, 1, 64), (16, 96, 96, 144, 3, 1, 96), (8, 48, 48, 60, 3, 1, 4),
    )  # fmt: skip
    for shape in lines:
        yield _convolution(1, shape)
    volumes = (
        (2, 4, 16, 20, 3, 1, 1), (1, 16, 32, 10, 3, 1, 1), (2, 16, 16, 16, 3, 1, 1),
        (1, 40, 40, 8, 3, 1, 1),
    )  # fmt: skip
    for shape in volumes:
        yield _convolution(3, shape)


def _convolution(dims: int, shape: tuple[int, int, int, int, int, int, int]) -> KernelCase:
    samples, inner, outer, side, kernel, stride, groups = shape
    call = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[dims]
    return KernelCase(
        kind=f"conv{dims}d",
        call=lambda x, w: call(x, w, None, stride, kernel // 2, 1, groups),
        roles=("input", "weight"),
        inputs=(
            (samples, inner, *[side] * dims),
            (outer, inner // groups, *[kernel] * dims),
        ),
        trained=("weight",),
        attributes={"groups": groups},
    )


def _recurrences() -> Iterator[KernelCase]:
    """Layers of cells, one of which waits for the one before, and cells that the model calls."""
    for kind, gates in (("lstm", 4), ("gru", 3), ("rnn_tanh", 1)):
        for samples, places, inner, width in (
            (16, 12, 32, 48), (32, 24, 64, 96), (8, 16, 128, 64), (64, 10, 96, 160), (4, 6, 16, 16),
        ):  # fmt: skip
            yield _layer(kind, gates, samples, places, inner, width)
    cells: dict[str, tuple[int, Callable[..., Tensor]]] = {
        "lstm_cell": (4, lambda x, h, c, *own: torch.lstm_cell(x, (h, c), *own)[0]),
        "gru_cell": (3, torch.gru_cell),
        "rnn_tanh_cell": (1, torch.rnn_tanh_cell),
    }
    for kind, (gates, call) in cells.items():
        states = ("hx.0", "hx.1") if kind == "lstm_cell" else ("hx",)
        for samples, inner, width in ((8, 24, 24), (16, 32, 48), (48, 64, 96), (64, 128, 160)):
            held = ((gates * width, inner), (gates * width, width), *[(gates * width,)] * 2)
            yield KernelCase(
                kind=kind,
                call=call,
                roles=("input", *states, *_CELL),
                inputs=((samples, inner), *[(samples, width)] * len(states), *held),
                trained=_CELL,
            )


def _layer(kind: str, gates: int, samples: int, places: int, inner: int, width: int) -> KernelCase:
    several = kind == "lstm"
    states = ("hx.0", "hx.1") if several else ("hx",)
    weights = tuple(f"params.{number}" for number in range(4))
    layer = getattr(torch, kind)

    def call(x: Tensor, *others: Tensor) -> Tensor:
        state = tuple(others[:2]) if several else others[0]
        own = list(others[len(states) :])
        # torch's order: biases, layers, dropout, training, bidirectional, batch first.
        found: Tensor = layer(x, state, own, True, 1, 0.0, True, False, True)[0]
        return found

    held = ((gates * width, inner), (gates * width, width), *[(gates * width,)] * 2)
    return KernelCase(
        kind=kind,
        call=call,
        roles=("input", *states, *weights),
        inputs=((samples, places, inner), *[(1, samples, width)] * len(states), *held),
        trained=weights,
        attributes={"num_layers": 1, "batch_first": True},
    )


def _attentions() -> Iterator[KernelCase]:
    for shape in ((2, 2, 16, 16), (2, 6, 96, 48), (8, 6, 80, 64), (4, 3, 192, 48), (2, 4, 320, 96)):
        yield KernelCase(
            kind="scaled_dot_product_attention",
            call=lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            roles=("query", "key", "value"),
            inputs=(shape, shape, shape),
        )


def _streams() -> Iterator[KernelCase]:
    plain: dict[str, Callable[[Tensor], Tensor]] = {
        "relu": F.relu,
        "gelu": F.gelu,
        "silu": F.silu,
        "sigmoid": torch.sigmoid,
        "tanh": torch.tanh,
        "softmax": lambda x: F.softmax(x, -1),
        "dropout": lambda x: F.dropout(x, 0.1),
        "square": torch.square,
        "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    }
    images: dict[str, Callable[[Tensor], Tensor]] = {
        "group_norm": lambda x: F.group_norm(x, 6),
        "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
        "max_pool2d": lambda x: F.max_pool2d(x, 2),
        "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
        "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 1),
    }
    for size in range(len(_FLAT)):
        for kinds, shape in ((plain, _FLAT[size]), (images, _IMAGES[size])):
            for kind, call in kinds.items():
                yield KernelCase(kind=kind, call=call, roles=("input",), inputs=(shape,))


def _others() -> Iterator[KernelCase]:
    for shape in _FLAT:
        for kind, call in (("add", torch.add), ("mul", torch.mul)):
            yield KernelCase(kind=kind, call=call, roles=("self", "other"), inputs=(shape, shape))
        yield KernelCase(
            kind="cross_entropy_loss",
            call=F.cross_entropy,
            roles=("self", "target"),
            inputs=(shape, shape[:1]),
            bounds={"target": shape[1]},
        )
    for image in _IMAGES:
        yield KernelCase(
            kind="cat",
            call=lambda a, b: torch.cat((a, b), 1),
            roles=("tensors.0", "tensors.1"),
            inputs=(image, image),
        )
    for rows, width, number in (
        (200, 16, 20),
        (6000, 48, 1500),
        (2400, 96, 6000),
        (12000, 40, 500),
    ):
        yield KernelCase(
            kind="embedding",
            call=lambda w, i: F.embedding(i, w),
            roles=("weight", "indices"),
            inputs=((rows, width), (number,)),
            trained=("weight",),
            bounds={"indices": rows},
        )
    for rows, width, bags in (
        (6000, 48, (200, 10)), (6000, 48, (400, 20)), (24000, 24, (96, 8)), (1600, 96, (300, 24)),
    ):  # fmt: skip
        yield KernelCase(
            kind="embedding_bag",
            call=lambda w, i: F.embedding_bag(i, w, mode="sum"),
            roles=("weight", "indices"),
            inputs=((rows, width), bags),
            trained=("weight",),
            bounds={"indices": rows},
        )


def kernel_cases() -> tuple[KernelCase, ...]:
    """All of them; the first has a backward that does nothing."""
    empty = KernelCase(
        kind=EMPTY_KERNEL, call=lambda x: x.view_as(x), roles=("self",), inputs=_FLAT[:1]
    )
    products = (*_linears(), *_convolutions(), *_other_convolutions(), *_recurrences())
    return (empty, *products, *_attentions(), *_streams(), *_others())


def time_case(case: KernelCase, clock: DeviceTimer) -> tuple[float, float]:
    """Seconds of one call forward and backward, in a small step of several calls."""
    first = [_tensor(case, n, clock.device) for n in range(len(case.roles))]
    size = sum(tensor.nbytes for tensor in (*first, case.call(*first)))
    copies = min(max(_SPAN // size, _FEWEST), _MOST)
    return _pass(case, [first, *([*map(_copy, first)] for _ in range(copies - 1))], clock)


def kernel_timings(
    found: Sequence[tuple[KernelCase, tuple[float, ...]]],
) -> tuple[KernelTiming, ...]:
    """What cases compute and move, and their seconds without entering and leaving autograd, which a
    step does once and a visit once per call.
    """
    (_, (_, entry)), *others = found
    return tuple(
        _timed(case, forward, max(backward - entry, 0.2 * backward))
        for case, (forward, backward) in others
    )


def _timed(case: KernelCase, ahead: float, back: float) -> KernelTiming:
    tensors = [_tensor(case, n, torch.device("cpu")) for n in range(len(case.roles))]
    call = OperatorCall(
        kind=case.kind,
        roles=case.roles,
        inputs=tuple(spec_of(tensor) for tensor in tensors),
        outputs=(spec_of(case.call(*tensors)),),
        attributes=case.attributes,
    )
    needs = [tensor.requires_grad for tensor in tensors]
    trained = [role in case.trained for role in case.roles]
    flops = flops_of(call, needs, trained)
    traffic = traffic_of(call, needs, trained, view=False)
    own = sum(t.nbytes for t, is_weight in zip(tensors, trained, strict=True) if is_weight)
    weights = parameter_traffic(case.kind, own, traffic)
    return KernelTiming(
        kind=kernel_pace_key(case.kind, case.attributes),
        calls=kernel_calls(call),
        forward=(float(flops.forward), float(traffic.forward), ahead),
        backward=(
            float(flops.input_gradient + flops.weight_gradient),
            float(traffic.input_gradient + traffic.weight_gradient),
            back,
        ),
        weights=(
            float(weights.forward),
            float(weights.input_gradient + weights.weight_gradient),
        ),
    )


def _pass(case: KernelCase, models: list[list[Tensor]], clock: DeviceTimer) -> tuple[float, float]:
    """Seconds of one call forward and backward, in a step that makes one with each model.

    As in a step, weights were last used a step ago, what enters was made just now, results lie in
    new memory and stay there until backward, which goes the other way round.
    """
    trained = [role in case.trained for role in case.roles]

    def entering(model: list[Tensor]) -> list[Tensor]:
        pairs = zip(model, trained, strict=True)
        return [x if weight or not x.requires_grad else _copy(x) for x, weight in pairs]

    count = len(models)
    inputs: list[list[Tensor]] = []
    results: dict[int, Tensor] = {}
    gradients: dict[int, Tensor] = {}
    kept: list[object] = []

    def ahead(number: int) -> None:
        # Numbered from the end: backward begins with the newest result.
        results[count - 1 - number] = case.call(*inputs[number])

    def arrive(number: int) -> None:
        gradients[number] = torch.ones_like(results[number])

    def back(number: int) -> None:
        wanted = [tensor for tensor in inputs.pop() if tensor.requires_grad]
        kept.append(torch.autograd.grad(results.pop(number), wanted, gradients.pop(number)))

    forward = clock.sum_of(lambda n: inputs.append(entering(models[n])), ahead, count)
    backward = clock.sum_of(arrive, back, count)
    return forward / count, backward / count


def _tensor(case: KernelCase, number: int, device: torch.device) -> Tensor:
    role, shape = case.roles[number], case.inputs[number]
    if role in case.bounds:
        return torch.randint(case.bounds[role], shape, device=device)
    return torch.randn(shape, device=device, requires_grad=True)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


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
"""Parameters of each of `UPDATE_TENSOR_SIZES` numbers that an optimiser steps over, most in no
cache.
"""


def measure_kernels(
    device: torch.device,
    local_ranks: int,
    slowest: Slowest = slowest_of_one,
    seconds: float = ROUNDS_SECONDS,
    idle: Mapping[IdleStep, Visit] = MappingProxyType({}),
) -> DeviceReadings:
    """Measure; collective among the ranks of the machine.

    Args:
        seconds: For rounds, after some seconds for peaks.
        idle: Steps to be timed in the same rounds.
    """
    clock, kind = DeviceTimer(device), device.type
    products = {
        name: tuple(_products(dtype, clock, kind))
        for name, dtype in _FORMATS[kind].items()
        if not _too_slow(dtype, clock)
    }
    one = torch.randn(512, 512, device=device)
    spread = clock.spread(lambda: one @ one)
    every, updates = kernel_cases(), dict(_updates(clock))
    # `times` has the order of the visits, by which it is taken apart below.
    visits: list[Visit] = [partial(time_case, case, clock) for case in every]
    visits += [lambda: (_dispatch(clock),), lambda: (_gather(clock),)]
    visits += [*updates.values(), *idle.values()]
    times = time_in_rounds(visits, slowest, seconds)
    timed = kernel_timings(list(zip(every, times, strict=False)))
    dispatch, gather, *steps = times[len(every) :]
    steps, idled = steps[: len(updates)], steps[len(updates) :]
    return DeviceReadings(
        name=_name(device),
        adds=clock.on_host,
        products=products,
        streams=tuple(one.forward[1:] for one in timed if one.kind == "add"),
        dispatch=dispatch[0],
        gather=gather[0],
        kernel=0.0 if clock.on_host else _kernel(device, clock),
        memory=_memory(device, local_ranks),
        spread=spread,
        kinds=timed,
        updates={name: (a, b, c) for name, (a, b, c) in zip(updates, steps, strict=True)},
        idle={step: own for step, (own,) in zip(idle, idled, strict=True)},
    )


def device_name(kind: str) -> str:
    """As `DeviceReadings.name`, of the first device of a kind: "cpu", "cuda", or "auto"."""
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    return _name(torch.device(kind))


def _name(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    words = re.sub(r"[^A-Za-z0-9]+", "-", torch.cuda.get_device_name(device)).strip("-")
    return words.lower().removeprefix("nvidia-")


def _too_slow(dtype: torch.dtype, clock: DeviceTimer) -> bool:
    one = torch.ones(256, 256, dtype=dtype, device=clock.device)
    clock.once(lambda: one @ one)
    return clock.once(lambda: one @ one) > _SLOW_SECONDS


def _products(
    dtype: torch.dtype, clock: DeviceTimer, kind: str
) -> Iterator[tuple[int, int, int, float]]:
    count = 1 if clock.on_host else 10  # a queue that never runs empty
    for side in _SIDES[kind]:
        for depth in _DEPTHS[kind]:
            a = torch.randn(side, depth, device=clock.device).to(dtype)
            b = torch.randn(depth, side, device=clock.device).to(dtype)
            yield side, side, depth, clock.best(lambda a=a, b=b: a @ b, count)  # type: ignore[misc]


def _dispatch(clock: DeviceTimer) -> float:
    """Of a chain of products of four numbers: one kernel forward and two backward for each."""
    weights = [torch.ones(4, device=clock.device, requires_grad=True) for _ in range(_CHAIN)]

    def step() -> None:
        value = torch.ones(4, device=clock.device)
        for weight in weights:
            # Otherwise one kernel more would add to the old gradient.
            weight.grad = None
            value = value * weight
        value.sum().backward()

    return clock.once(step) / (3 * _CHAIN)


def _gather(clock: DeviceTimer) -> float:
    """Of one tensor of one sample: taken out of its column, and put into a batch with others."""
    columns = [torch.ones(_SAMPLES, 48) for _ in range(2)]

    def batch() -> object:
        samples = [tuple(column[n] for column in columns) for n in range(_SAMPLES)]
        return default_collate(samples)

    return clock.once(batch) / (_SAMPLES * len(columns))


def _kernel(device: torch.device, clock: DeviceTimer) -> float:
    """Of tiny kernels that nobody has to issue: a recorded graph of them, played."""
    value, graph = torch.ones(4, device=device), torch.cuda.CUDAGraph()
    # Once before the capture, as torch asks for: the first call loads the kernel.
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


def _updates(clock: DeviceTimer) -> Iterator[tuple[str, Visit]]:
    """Seconds per parameter of each optimiser's step, and of the norm of the gradients, by the
    numbers of a tensor."""
    sets = [_parameters(clock, *pair) for pair in zip(_TENSORS, UPDATE_TENSOR_SIZES, strict=True)]
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


def _per_parameter(clock: DeviceTimer, steps: Sequence[Callable[[], object]]) -> tuple[float, ...]:
    each = zip(steps, _TENSORS, UPDATE_TENSOR_SIZES, strict=True)
    return tuple(clock.once(step) / (count * size) for step, count, size in each)


def _parameters(clock: DeviceTimer, count: int, size: int) -> list[Tensor]:
    found: list[Tensor] = [
        torch.nn.Parameter(torch.ones(size, device=clock.device)) for _ in range(count)
    ]
    for parameter in found:
        # Optimisers leave out a parameter without a gradient.
        parameter.grad = torch.ones_like(parameter)
    return found


def _memory(device: torch.device, local_ranks: int) -> float:
    """Bytes of this rank: of its GPU, or its share of the machine's (or container's)."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return memory_bytes() / local_ranks
