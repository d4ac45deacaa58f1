"""Example values of a graph's nodes, computed only where somebody asks.

Used while a model is traced (which way does this `if` go?) and while it is cut (is this a tensor?).
Invariant: the model's buffers and attributes and torch's random numbers are left as they were.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from headway.parallel.plain_state import plain_state, put_back
from headway.parallel.structure import flatten, is_payload


class Examples:
    """A context manager; values are computed inside of it only.

    Args:
        model: The whole model, in the mode that the graph is for.

    Attributes:
        busy: A value is being computed: what happens now is no part of a trace.
        constants: What the graph uses and the model does not hold, by name.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._values: dict[fx.Node, Any] = {}
        self._draws: set[fx.Node] = set()
        self._kept: _Kept | None = None
        self.busy = False
        self.constants: dict[str, Any] = {}

    def __enter__(self) -> Examples:
        self._kept = _Kept(self._model)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._kept is not None
        self._kept.restore()
        self._kept = None

    def forget(self) -> None:
        """Free the values."""
        self._values = {n: v for n, v in self._values.items() if n.op == "placeholder"}

    def know(self, node: fx.Node, value: Any) -> None:
        """Give the value of a placeholder."""
        leaves, structure = flatten([value], is_payload)
        own = [x.detach().clone() if isinstance(x, Tensor) else x for x in leaves]
        self._values[node] = structure.rebuild(own)[0]

    def value(self, node: fx.Node) -> Any:
        """Of a node, and so of all that it needs."""
        waiting = [node]
        with torch.no_grad(), self._computing():
            while waiting:
                missing = [n for n in waiting[-1].all_input_nodes if n not in self._values]
                if missing:
                    waiting += missing
                elif waiting[-1] in self._values:
                    waiting.pop()
                else:
                    last = waiting.pop()
                    self._values[last] = self._compute(last)
        return self._values[node]

    def draws(self, node: fx.Node) -> bool:
        """Whether a node takes random numbers."""
        self.value(node)
        return node in self._draws

    @contextmanager
    def _computing(self) -> Iterator[None]:
        assert self._kept is not None
        before, self.busy = self.busy, True
        try:
            yield
        finally:
            self.busy = before

    def _compute(self, node: fx.Node) -> Any:
        args = map_arg(node.args, self._values.__getitem__)
        kwargs = map_arg(node.kwargs, self._values.__getitem__)
        before = _random_states()
        value = self._call(node, args, kwargs)
        if any(not torch.equal(a, b) for a, b in zip(before, _random_states(), strict=True)):
            self._draws.add(node)
        return value

    def _call(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        match node.op:
            case "get_attr":
                return self._find(str(node.target))
            case "call_module":
                return self._find(str(node.target))(*args, **kwargs)
            case "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            case _:
                assert callable(node.target)
                return node.target(*args, **kwargs)

    def _find(self, name: str) -> Any:
        return self.constants[name] if name in self.constants else find(self._model, name)


class _Kept:
    """The model's buffers and plain attributes, and torch's generators, at a moment."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._plain = plain_state(model, [name for name, _ in model.named_modules()])
        self._buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        self._states = _random_states()

    def restore(self) -> None:
        put_back(self._model, self._plain)
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)
        torch.set_rng_state(self._states[0])
        if len(self._states) > 1:
            torch.cuda.set_rng_state(self._states[1])


@contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Put buffers, plain attributes and random numbers back at the end."""
    kept = _Kept(model)
    try:
        yield
    finally:
        kept.restore()


def find(model: nn.Module, name: str) -> Any:
    """A module, parameter, buffer or other attribute by its dotted name."""
    found: Any = model
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _random_states() -> list[Tensor]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states
