"""Operator calls, and from an index expression to the axes of one call.

An `IndexExpression` is an entry of the registry: for each tensor argument an index like that of
einsum, and what is special about single axes (sums, windows, fixed axes). Axes about which it
says nothing may be split freely. Sizes come from the shapes; dimensions of size 1 are dropped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.graph.model_graph import (
    Dims,
    LoopAxis,
    OperatorAxes,
    TensorSpec,
    format_index,
    parse_index,
)


class UnsupportedCall(Exception):
    """A known kind of operator, called in a way for which the table has no rule."""


@dataclass(frozen=True)
class OperatorCall:
    """An operator with the specs of its tensors.

    Attributes:
        roles: Name of the argument of each input.
    """

    kind: str
    roles: tuple[str, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    attributes: Mapping[str, Any]

    def shape(self, role: str) -> tuple[int, ...]:
        """Of an input.

        Raises:
            UnsupportedCall: It is not given.
        """
        if role not in self.roles:
            raise UnsupportedCall(f"no {role}")
        return self.inputs[self.roles.index(role)].shape

    @property
    def result(self) -> tuple[int, ...]:
        """Shape of the first output."""
        return self.outputs[0].shape

    def value(self, name: str) -> Any:
        """An attribute that must be there.

        Raises:
            UnsupportedCall: It is not.
        """
        if name not in self.attributes:
            raise UnsupportedCall(f"no {name}")
        return self.attributes[name]

    def number(self, name: str, default: int) -> int:
        value = self.attributes.get(name, default)
        return default if value is None else int(value)

    def dim(self, name: str, rank: int, default: int = 0) -> int:
        """A dimension, counted from the front."""
        return self.number(name, default) % max(rank, 1)


@dataclass(kw_only=True)
class IndexExpression:
    """An entry of the table; see `OperatorAxes`.

    Attributes:
        axes: What is special about an axis, by its name (its size is filled in).
        sizes: Where they cannot be read from dimensions with one axis.
    """

    inputs: dict[str, str]
    outputs: list[str]
    axes: dict[str, LoopAxis] = field(default_factory=dict)
    linear: list[tuple[str, ...]] = field(default_factory=list)
    added: tuple[str, ...] = ()
    sizes: dict[str, int] = field(default_factory=dict)

    def fix(self, why: str, *names: str) -> IndexExpression:
        """Forbid to split axes."""
        for name in names:
            self.axes[name] = LoopAxis(name=name, size=0, kind="fixed", why=why)
        return self


def axis_labels(count: int, letter: str = "x") -> list[str]:
    """x0 x1 x2 ...: one axis for each of several dimensions."""
    return [f"{letter}{number}" for number in range(count)]


def broadcast_index(shape: Sequence[int], result: Sequence[int], names: Sequence[str]) -> str:
    """The index of an input that is broadcast to `result`, whose axes are `names`."""
    behind = len(result) - len(shape)
    dims = [
        () if size == 1 and result[behind + dim] != 1 else (names[behind + dim],)
        for dim, size in enumerate(shape)
    ]
    return format_index(dims)


def axes_from_expression(call: OperatorCall, form: IndexExpression) -> OperatorAxes:
    """The axes of a call by a form.

    Raises:
        UnsupportedCall: Form and shapes do not fit.
    """
    # A tensor of which the form says nothing may depend on any axis.
    missing = [role for role in call.roles if role not in form.inputs]
    if missing or len(form.outputs) != len(call.outputs):
        raise UnsupportedCall(f"{call.kind}: nothing is known of {missing or 'an output'}")
    inputs = [parse_index(form.inputs[role]) for role in call.roles]
    outputs = [parse_index(index) for index in form.outputs]
    tensors = [*zip(outputs, call.outputs, strict=True), *zip(inputs, call.inputs, strict=True)]
    sizes = _sizes(tensors, form)
    _check_results(outputs, sizes, form)
    read = _read_through_windows(tensors, form)
    gone = {name for name, size in sizes.items() if size == 1 and name not in read}
    return OperatorAxes(
        loops=tuple(_loop(name, size, form) for name, size in sizes.items() if name not in gone),
        inputs=tuple(_without(index, gone) for index in inputs),
        outputs=tuple(_without(index, gone) for index in outputs),
        linear=tuple(
            dict.fromkeys(tuple(call.roles.index(role) for role in roles) for roles in form.linear)
        ),
        added=tuple(call.roles.index(role) for role in form.added if role in call.roles),
    )


def _read_through_windows(
    tensors: Sequence[tuple[Dims, TensorSpec]], form: IndexExpression
) -> set[str]:
    """Axes with one result that is made of several entries: the last layers of a deep net."""
    return {
        name
        for index, spec in tensors
        for axes, size in zip(index, spec.shape, strict=True)
        for name in axes
        if size != 1 and name in form.axes and form.axes[name].window
    }


def _loop(name: str, size: int, form: IndexExpression) -> LoopAxis:
    said = form.axes.get(name)
    if said is None:
        return LoopAxis(name=name, size=size)
    return LoopAxis(
        name=name,
        size=size,
        kind=said.kind,
        why=said.why,
        window=said.window,
        exchange=said.exchange,
    )


def _check_results(outputs: list[Dims], sizes: Mapping[str, int], form: IndexExpression) -> None:
    """A free axis must stand in every result: else nothing says what becomes of the others."""
    for name in sizes:
        said = form.axes.get(name)
        if said is None or said.kind == "free":
            for index in outputs:
                if sizes[name] > 1 and not any(name in axes for axes in index):
                    raise UnsupportedCall(f"axis {name} is lost in a result")


def _without(index: Dims, gone: set[str]) -> str:
    return format_index([name for name in axes if name not in gone] for axes in index)


def _sizes(tensors: list[tuple[Dims, TensorSpec]], form: IndexExpression) -> dict[str, int]:
    """Of every axis, in order of appearance; outputs come first, so a window's size is theirs."""
    sizes = dict(form.sizes)
    for index, spec in tensors:
        if len(index) != len(spec.shape):
            raise UnsupportedCall(f"index {format_index(index)!r} for shape {spec.shape}")
        for axes, size in zip(index, spec.shape, strict=True):
            # Only a dimension with one axis tells its size; the others follow below.
            if len(axes) == 1:
                sizes.setdefault(axes[0], size)
    for index, spec in tensors:
        for axes, size in zip(index, spec.shape, strict=True):
            _check_dimension(axes, size, sizes, form)
    used = [name for index, _ in tensors for axes in index for name in axes]
    return {name: sizes[name] for name in dict.fromkeys(used)}


def _check_dimension(
    axes: Sequence[str], size: int, sizes: dict[str, int], form: IndexExpression
) -> None:
    unknown = [name for name in axes if name not in sizes]
    if len(unknown) > 1:
        raise UnsupportedCall(f"the sizes of {unknown} are not known")
    for name in unknown:
        sizes[name] = size // math.prod(sizes[other] for other in axes if other != name)
    # With a window the loop counts results, and a tensor may be longer or shorter.
    windows = any(name in form.axes and form.axes[name].window for name in axes)
    if not windows and math.prod(sizes[name] for name in axes) != size:
        raise UnsupportedCall(f"a dimension of {size} for {'*'.join(axes)}")
