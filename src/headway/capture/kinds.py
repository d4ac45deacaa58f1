"""How long kinds of kernels take that are no matrix products: convolutions, norms, pools, tables.

A few shapes of each kind, forward and backward, as a training step runs them. The shapes are
round numbers of middling size and those of no model. What a kernel computes and moves is counted
by the formulas with which captured graphs count it, so that a fit to these times predicts those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.capture.clock import Clock
from headway.cluster.readings import Timed
from headway.graph.axes import Call
from headway.graph.operator import TensorSpec
from headway.graph.work import flops_of, traffic_of

_FLAT = (512, 768)
_IMAGES = (8, 24, 40, 40)


@dataclass(frozen=True, kw_only=True)
class _Case:
    """One call.

    Attributes:
        kind: As graphs name it.
        call: Of the inputs, in the order of `roles`.
        roles: Of the inputs.
        inputs: Shapes; of whole numbers below a bound where one stands in `bounds`.
        trained: Roles that are parameters.
        bounds: Of inputs that are whole numbers.
        attributes: That the formulas need.
    """

    kind: str
    call: Callable[..., Tensor]
    roles: tuple[str, ...]
    inputs: tuple[tuple[int, ...], ...]
    trained: tuple[str, ...] = ()
    bounds: dict[str, int] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)


def _convolutions() -> Iterator[_Case]:
    shapes = (
        (4, 12, 12, 56, 3, 1), (4, 24, 24, 40, 3, 1), (4, 40, 40, 28, 3, 1), (4, 80, 80, 12, 3, 1),
        (4, 40, 80, 24, 3, 2), (4, 48, 96, 20, 1, 1), (4, 3, 20, 48, 5, 1),
    )  # fmt: skip
    for samples, inner, outer, side, kernel, stride in shapes:
        yield _Case(
            kind="conv2d",
            call=lambda x, w, s=stride, k=kernel: F.conv2d(x, w, None, s, k // 2),
            roles=("input", "weight"),
            inputs=((samples, inner, side, side), (outer, inner, kernel, kernel)),
            trained=("weight",),
        )
    for samples, inner, outer, side in ((4, 48, 24, 20), (4, 96, 40, 12), (4, 20, 12, 40)):
        yield _Case(
            kind="conv_transpose2d",
            call=lambda x, w: F.conv_transpose2d(x, w, None, 2),
            roles=("input", "weight"),
            inputs=((samples, inner, side, side), (inner, outer, 2, 2)),
            trained=("weight",),
        )


def _attentions() -> Iterator[_Case]:
    for shape in ((2, 6, 96, 48), (4, 3, 192, 48), (2, 4, 320, 96)):
        yield _Case(
            kind="scaled_dot_product_attention",
            call=lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            roles=("query", "key", "value"),
            inputs=(shape, shape, shape),
        )


def _streams() -> Iterator[_Case]:
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
    for shape, calls in ((_FLAT, plain), (_IMAGES, images)):
        for kind, call in calls.items():
            yield _Case(kind=kind, call=call, roles=("input",), inputs=(shape,))
    yield _Case(
        kind="cat",
        call=lambda a, b: torch.cat((a, b), 1),
        roles=("tensors.0", "tensors.1"),
        inputs=(_IMAGES, _IMAGES),
    )
    yield _Case(
        kind="cross_entropy_loss",
        call=F.cross_entropy,
        roles=("self", "target"),
        inputs=(_FLAT, _FLAT[:1]),
        bounds={"target": _FLAT[1]},
    )
    rows, width = 6000, 48
    yield _Case(
        kind="embedding",
        call=lambda w, i: F.embedding(i, w),
        roles=("weight", "indices"),
        inputs=((rows, width), (1500,)),
        trained=("weight",),
        bounds={"indices": rows},
    )
    yield _Case(
        kind="embedding_bag",
        call=lambda w, i: F.embedding_bag(i, w, mode="sum"),
        roles=("weight", "indices"),
        inputs=((rows, width), (200, 10)),
        trained=("weight",),
        bounds={"indices": rows},
    )


def measure_kinds(clock: Clock) -> tuple[Timed, ...]:
    """Time all of them; about two seconds."""
    cases = (*_convolutions(), *_attentions(), *_streams())
    return tuple(_timed(case, clock) for case in cases)


def _timed(case: _Case, clock: Clock) -> Timed:
    tensors = [_tensor(case, n, clock.device) for n in range(len(case.roles))]
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    result = case.call(*tensors)
    gradient = torch.ones_like(result)

    def both() -> None:
        torch.autograd.grad(case.call(*tensors), wanted, gradient)

    count = 1 if clock.on_host else 10
    forward = clock.best(lambda: case.call(*tensors), count)
    whole = clock.best(both, count)
    call = Call(
        kind=case.kind,
        roles=case.roles,
        inputs=tuple(_spec(tensor) for tensor in tensors),
        outputs=(_spec(result),),
        attributes=case.attributes,
    )
    needs = [tensor.requires_grad for tensor in tensors]
    trained = [role in case.trained for role in case.roles]
    flops = flops_of(call, needs, trained)
    traffic = traffic_of(call, needs, trained, view=False)
    return Timed(
        kind=case.kind,
        forward=(float(flops.forward), float(traffic.forward), forward),
        backward=(
            float(flops.input_gradient + flops.weight_gradient),
            float(traffic.input_gradient + traffic.weight_gradient),
            max(whole - forward, 0.2 * forward),
        ),
    )


def _tensor(case: _Case, number: int, device: torch.device) -> Tensor:
    role, shape = case.roles[number], case.inputs[number]
    if role in case.bounds:
        return torch.randint(case.bounds[role], shape, device=device)
    return torch.randn(shape, device=device, requires_grad=True)


def _spec(tensor: Tensor) -> TensorSpec:
    return TensorSpec(shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
