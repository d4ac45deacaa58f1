"""Split tensors in nested arguments and results; order and structure stay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from headway.parallel.tensor.split_tensor import SplitTensor


def mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Nested arguments, a function applied to all that are no containers."""
    if type(value) in (tuple, list):
        return type(value)(mapped(entry, function) for entry in value)
    if isinstance(value, dict):
        return {key: mapped(entry, function) for key, entry in value.items()}
    return function(value)


def all_split(*values: Any) -> list[Any]:
    """All split tensors in nested arguments."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, SplitTensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            found += all_split(*value)
        elif isinstance(value, dict):
            found += all_split(*value.values())
    return found


def with_origins(result: Any, origins: frozenset[str]) -> Any:
    """The result, with the weights that its split comes from."""
    if isinstance(result, SplitTensor):
        return result if result.origins or not origins else replace(result, origins=origins)
    if type(result) in (tuple, list):
        return type(result)(with_origins(entry, origins) for entry in result)
    return result
