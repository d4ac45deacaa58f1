"""The ways to compute a model's convolutions and attentions, measured one by one, and carried out.

A call of a convolution or an attention is replaced where it happens; the module stays as it is.
Each way takes and returns tensors as the plain one does, so that the ways of two layers do not
depend on each other, and their times add up. Invariant: every way computes the same function.
Source: Zou et al. 2017, the algorithms of its layers (implicit, explicit GEMM, ...), as far as the
device at hand has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from headway.errors import PlanError

Way = Callable[..., Tensor]
PLAIN = "plain"
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


CONVOLUTION: Mapping[str, Way] = MappingProxyType(
    {
        PLAIN: torch.conv2d,
        "channels-last": _channels_last,
        "unfold": _unfold,
        "native": _native,
    }
)
ATTENTION: Mapping[str, Way] = MappingProxyType(
    {
        PLAIN: F.scaled_dot_product_attention,
        "math": partial(_attention, SDPBackend.MATH),
        "flash": partial(_attention, SDPBackend.FLASH_ATTENTION),
        "efficient": partial(_attention, SDPBackend.EFFICIENT_ATTENTION),
    }
)
_WAYS: Mapping[Any, Mapping[str, Way]] = {
    torch.conv2d: CONVOLUTION,
    F.scaled_dot_product_attention: ATTENTION,
}


@dataclass(frozen=True)
class Called:
    """A call of a layer with several ways.

    Attributes:
        name: The path of the module that makes it, and "#2" for its second call of this kind.
        ways: By name.
        args: Of the call; tensors as they were.
        named: Of the call.
    """

    name: str
    ways: Mapping[str, Way] = field(repr=False)
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


class _Seen(TorchFunctionMode):
    """Hands every call of a layer to `handle`, with the path of the module that makes it."""

    def __init__(self, handle: Callable[[Called], Tensor]) -> None:
        super().__init__()
        self._handle = handle
        self.paths: list[str] = [""]
        self.counts: dict[tuple[str, str], int] = {}

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        try:
            ways = _WAYS.get(function)
        except TypeError:  # not hashable
            ways = None
        if ways is None:
            return function(*args, **(kwargs or {}))
        path = self.paths[-1] or ROOT
        key = (path, "attention" if ways is ATTENTION else "convolution")
        self.counts[key] = number = self.counts.get(key, 0) + 1
        return self._handle(
            Called(path if number == 1 else f"{path}#{number}", ways, args, kwargs or {})
        )


@contextmanager
def _seeing(model: nn.Module, handle: Callable[[Called], Tensor]) -> Iterator[None]:
    mode = _Seen(handle)

    def enter(path: str, *_: Any) -> None:
        if not path:
            mode.counts.clear()  # a new forward pass
        mode.paths.append(path)

    def leave(*_: Any) -> None:
        mode.paths.pop()

    with ExitStack() as stack:
        for path, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(partial(enter, path)).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        stack.enter_context(mode)
        yield


def layers_of(model: nn.Module, run: Callable[[], object]) -> tuple[Called, ...]:
    """The convolutions and attentions that a forward pass calls, in order.

    Args:
        model: Any module.
        run: A forward pass of it.
    """
    found: list[Called] = []

    def note(called: Called) -> Tensor:
        found.append(called)
        return called.ways[PLAIN](*called.args, **called.named)

    with _seeing(model, note):
        run()
    return tuple(found)


@contextmanager
def chosen(model: nn.Module, algorithms: Mapping[str, str]) -> Iterator[None]:
    """Within it, the model's layers are computed in the ways that are named.

        with chosen(model, {"stem": "channels-last", "blocks.0.attention": "math"}):
            loss = criterion(model(x), y)

    Args:
        model: Any module.
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

    def compute(called: Called) -> Tensor:
        name = algorithms.get(called.name, PLAIN)
        used.add(called.name)
        if name not in called.ways:
            raise PlanError(
                f"{called.name} cannot be computed by {name}",
                problems=[f"it has the ways {', '.join(called.ways)}"],
            )
        return called.ways[name](*called.args, **called.named)

    with _seeing(model, compute):
        yield
    missing = sorted(algorithms.keys() - used)
    if used and missing:
        raise PlanError(
            "some layers of a choice of algorithms were not called",
            problems=missing,
            fix="Choose for the model as it is; its layers: " + ", ".join(sorted(used)) + ".",
        )
