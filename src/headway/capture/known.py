"""Decisions by numbers that need no data: masks and ranges which the forward makes itself.

A graph is followed without numbers, but `bool((mask == causal).all())` of masks that the code has
just made (torch's own Transformer asks this) has one answer for all data. While a `Known` lasts,
calls of torch are noted whose tensors were all made by such calls, from nothing but sizes; once a
decision asks for a number, they are carried out for real, up to there. Invariant: what comes from
data, parameters or chance has no number here, and is asked of the stand-in, which refuses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from headway.capture.fake import unpretended

_DECISIONS = frozenset(
    (
        *("__bool__", "__complex__", "__contains__", "__float__", "__index__", "__int__"),
        *("allclose", "equal", "is_nonzero", "item", "tolist"),
    )
)
_CHANCE = (
    *("bernoulli", "cauchy", "dropout", "empty", "exponential", "geometric", "gumbel"),
    *("multinomial", "normal", "poisson", "rand", "resize", "rrelu", "uniform"),
)
"""In names of functions whose numbers nobody knows."""


class Known(TorchFunctionMode):
    """What is known of one run of a model."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, Tensor] = {}  # stand-ins with numbers, by identity
        self._noted: list[tuple[Any, Any, Any, Any]] = []  # calls not carried out yet
        self._real: dict[int, Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = all(id(tensor) in self._alive for tensor in tensors)
        if known and tensors and name in _DECISIONS:
            return self._decided(func, args, kwargs)
        result = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        chance = any(word in name for word in _CHANCE)
        if known and not chance and (made or _changes(name, kwargs)):
            self._alive.update((id(leaf), leaf) for leaf in made)
            self._noted.append((func, args, kwargs, result))
        elif _changes(name, kwargs) and any(id(tensor) in self._alive for tensor in tensors):
            self._alive.clear()  # which ones share its memory is not known
            self._noted.clear()
        return result

    def _decided(self, func: Any, args: Any, kwargs: Any) -> Any:
        with unpretended(), torch.no_grad():
            for one, given, named, result in self._noted:
                found = one(*self._numbers(given), **self._numbers(named))
                for leaf, real in zip(tree_leaves(result), tree_leaves(found), strict=True):
                    if isinstance(leaf, Tensor):
                        self._real[id(leaf)] = real
            self._noted.clear()
            return func(*self._numbers(args), **self._numbers(kwargs))

    def _numbers(self, tree: Any) -> Any:
        return tree_map_only(Tensor, lambda leaf: self._real[id(leaf)], tree)


def _changes(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether a call writes into its arguments."""
    plain = name.endswith("_") and not name.endswith("__")
    operators = name.startswith("__i") and name not in ("__index__", "__int__", "__invert__")
    return plain or operators or name in ("__setitem__", "__set__") or "out" in kwargs
