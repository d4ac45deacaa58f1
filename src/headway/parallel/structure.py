"""Values taken apart into leaves and a description of how they were put together.

What a model is called with, and what goes from stage to stage, is rarely one tensor: tuples, dicts,
dataclasses of them, with numbers and plain objects between. `flatten` and `Structure.rebuild` are
inverse; two values have equal structures exactly if they differ in leaves alone.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Structure:
    """How a value is put together.

    A dataclass with a class attribute `whole_in_messages` that is true is a constant.

    Attributes:
        kind: "leaf", "constant", "tuple", "list", "dict", "named" (tuples with names) or "object"
            (dataclasses).
        type: Of a container.
        keys: Of a dict, in its order; the fields of a dataclass.
        parts: Of a container.
        constant: What is neither a container nor a leaf, as it is.
        example: A dataclass of this type, without its fields.
    """

    kind: str
    type: type | None = None
    keys: tuple[Any, ...] = ()
    parts: tuple[Structure, ...] = ()
    constant: Any = None
    example: Any = field(default=None, compare=False)

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """The value with these leaves in place of its own."""
        if self.kind == "leaf":
            return leaves[0]
        return _build(self, iter(leaves))

    @property
    def leaves(self) -> int:
        """Their number."""
        return 1 if self.kind == "leaf" else sum(part.leaves for part in self.parts)


LEAF = Structure("leaf")


def is_payload(value: Any) -> bool:
    """The leaves of what goes from stage to stage: tensors, and numbers, which may change."""
    return isinstance(value, Tensor) or type(value) in (int, float)


def flatten(
    value: Any, is_leaf: Callable[[Any], bool], *, open_parts: bool = True
) -> tuple[list[Any], Structure]:
    """The leaves of a value in order, and its structure.

    Args:
        value: Anything.
        is_leaf: Asked for everything that is not a tuple, list, dict or dataclass; what is no leaf
            is a constant.
        open_parts: A dataclass that answers for functions of torch (this rank's part of a tensor)
            is taken apart as well; it is a leaf otherwise.
    """
    leaves: list[Any] = []

    def is_one(found: Any) -> bool:
        closed = not open_parts and is_like_a_tensor(found)
        return closed or isinstance(found, Tensor)

    return leaves, _take_apart(value, is_leaf, is_one, leaves)


def is_like_a_tensor(value: Any) -> bool:
    """Whether functions of torch can be called on it."""
    return hasattr(type(value), "__torch_function__")


def _take_apart(
    value: Any,
    is_leaf: Callable[[Any], bool],
    is_one: Callable[[Any], bool],
    leaves: list[Any],
) -> Structure:
    if is_one(value):
        leaves.append(value)
        return LEAF
    kind = _kind(value)
    if not kind:
        if is_leaf(value):
            leaves.append(value)
            return LEAF
        return Structure("constant", constant=value)
    keys: tuple[Any, ...] = ()
    inner: Sequence[Any] = value
    if kind == "dict":
        keys, inner = tuple(value), list(value.values())
    elif kind == "object":
        keys = tuple(entry.name for entry in dataclasses.fields(value))
        inner = [getattr(value, key) for key in keys]
    parts = tuple(_take_apart(part, is_leaf, is_one, leaves) for part in inner)
    example = _like(value, dict.fromkeys(keys)) if kind == "object" else None
    return Structure(kind, type(value), keys, parts, example=example)


def _kind(value: Any) -> str:
    """Of a container; empty for everything else."""
    if type(value) is tuple:
        return "tuple"
    if type(value) is list:
        return "list"
    if isinstance(value, dict):
        return "dict"
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return "named"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return "" if getattr(type(value), "whole_in_messages", False) else "object"
    return ""


def _build(structure: Structure, leaves: Iterator[Any]) -> Any:
    if structure.kind == "leaf":
        return next(leaves)
    if structure.kind == "constant":
        return structure.constant
    parts = [_build(part, leaves) for part in structure.parts]
    kind = structure.type
    assert kind is not None
    match structure.kind:
        case "dict":
            return kind(zip(structure.keys, parts, strict=True))
        case "named":
            return kind(*parts)
        case "object":
            return _like(structure.example, dict(zip(structure.keys, parts, strict=True)))
        case _:
            return kind(parts)


def _like(example: Any, fields: dict[str, Any]) -> Any:
    """A dataclass with other fields, whatever its constructor wants."""
    value = copy.copy(example)
    for name, content in fields.items():
        object.__setattr__(value, name, content)
    return value
