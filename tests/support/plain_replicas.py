"""Replicas of numbers with plain gradient descent, for the rules of synchrony."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass
class Descent:
    """x, with gradient descent and, where asked, momentum (as torch's SGD)."""

    x: Any
    rate: float = 0.1
    momentum: float = 0.0
    moved: Any = None

    def read(self) -> Any:
        return self.x

    def write(self, value: Any) -> None:
        self.x = value

    def step(self, gradient: Any, rate: float = 1.0) -> None:
        if self.momentum:
            gradient = gradient if self.moved is None else self.momentum * self.moved + gradient
            self.moved = gradient
        self.x = self.x - gradient * (self.rate * rate)

    def clone(self) -> Descent:
        return replace(self)

    def read_state(self) -> Any:
        return self.moved

    def write_state(self, state: Any) -> None:
        self.moved = state


@dataclass
class Shares:
    """A worker's parameters where servers hold a share each: a tuple of values."""

    values: tuple[Any, ...]
    rate: float = 0.1

    def read(self) -> tuple[Any, ...]:
        return self.values

    def write(self, value: tuple[Any, ...]) -> None:
        self.values = value

    def step(self, gradient: tuple[Any, ...], rate: float = 1.0) -> None:
        factor = self.rate * rate
        self.values = tuple(x - g * factor for x, g in zip(self.values, gradient, strict=True))

    def clone(self) -> Shares:
        return replace(self)

    def read_state(self) -> None:
        return None

    def write_state(self, state: Any) -> None:
        assert state is None
