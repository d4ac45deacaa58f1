"""One call of an aten operator as data: kind, tensors by argument, attributes, results."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from headway.graph import TensorSpec

_UNSAID = {"device", "pin_memory", "layout", "memory_format", "generator", "non_blocking"}
"""Arguments that say nothing about what may be split."""


def spec_of(tensor: Tensor) -> TensorSpec:
    """Shape and type as data."""
    return TensorSpec(
        shape=tuple(int(size) for size in tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
    )


def logical_names(called: nn.Module) -> tuple[dict[str, str], dict[str, str]]:
    """For every name of a tensor the first one, and for every tied parameter its first name;
    `called` holds the user's model as its "model"."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in called.named_parameters(remove_duplicate=False):
        bare = name.removeprefix("model.")
        names[name] = first.setdefault(id(parameter), bare)
        if names[name] != bare:
            tied[bare] = names[name]
    return names, tied


def name_of(argument: Any, named: Mapping[fx.Node, Any]) -> Any:
    return named.get(argument) if isinstance(argument, fx.Node) else None


def several(result: Any) -> bool:
    return isinstance(result, tuple | list)


def outputs_of(name: str, node: fx.Node, result: Any) -> dict[int, tuple[str, Tensor]]:
    """The tensors among the results that somebody uses, by their place."""
    if not several(result):
        return {0: (name, result)} if isinstance(result, Tensor) else {}
    used = {u.args[1] for u in node.users if u.target is operator.getitem and u.users}
    whole = any(user.target is not operator.getitem for user in node.users)
    return {
        n: (f"{name}.{n}", value)
        for n, value in enumerate(result)
        if isinstance(value, Tensor) and (whole or n in used)
    }


def kind_of(target: Any) -> str:
    namespace, _, name = str(target._schema.name).partition("::")
    bare = name[:-1] if name.endswith("_") and not name.endswith("__") else name
    return bare if namespace == "aten" else f"{namespace}::{bare}"


def arguments_of(
    target: Any,
    node: fx.Node,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    named: Mapping[fx.Node, Any],
) -> tuple[list[tuple[str, str, Tensor]], dict[str, Any]]:
    """Tensors as (argument, name, stand-in), and everything else as plain data."""
    tensors: list[tuple[str, str, Tensor]] = []
    attributes: dict[str, Any] = {}
    for number, argument in enumerate(target._schema.arguments):
        if number < len(args):
            value, given = args[number], node.args[number]
        elif argument.name in kwargs:
            value, given = kwargs[argument.name], node.kwargs[argument.name]
        else:
            continue
        if isinstance(value, Tensor):
            tensors.append((argument.name, str(name_of(given, named)), value))
        elif several(value) and any(isinstance(v, Tensor) for v in value):
            listed = zip(value, given, strict=True)  # type: ignore[arg-type]
            tensors += [
                (f"{argument.name}.{n}", str(name_of(g, named)), v)
                for n, (v, g) in enumerate(listed)
                if isinstance(v, Tensor)
            ]
        elif value is not None and argument.name not in _UNSAID:
            attributes[argument.name] = _plain(value)
    return tensors, attributes


def _plain(value: Any) -> Any:
    """As JSON can write it; infinite numbers and types as texts."""
    if isinstance(value, bool | str):
        return value
    if isinstance(value, int | torch.SymInt):
        return int(value)
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value)
    if several(value):
        return [_plain(inner) for inner in value]
    return str(value).removeprefix("torch.")
