"""Values of a module's tests that are made when the first test asks for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")


class OnDemand(dict[str, Value]):
    """A dictionary that makes the value of a name that it lacks: a sample of tests needs few."""

    def __init__(self, make: Callable[[str], Value]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, name: str) -> Value:
        self[name] = self._make(name)
        return self[name]
