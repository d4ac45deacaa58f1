"""What the code of modules may read beside tensors: plain attributes, and hooks around forwards.

A traced graph has these values frozen in it. They are noted when a model is traced, put back where
tracing has run code that changes them, and compared before every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from headway.errors import RunError

PlainAttribute = tuple[str, str]
"""(module, name)"""
_OWN = frozenset(vars(nn.Module()))
"""Attributes of every module, its mode among them: there is a graph for each mode."""
_STATE = (bool, int, float, str, type(None))


def plain_state(model: nn.Module, names: Iterable[str]) -> dict[PlainAttribute, Any]:
    """Numbers, flags and texts that modules hold as attributes."""
    return {
        (name, key): value
        for name in names
        for key, value in vars(model.get_submodule(name)).items()
        if isinstance(value, _STATE) and key not in _OWN
    }


def check_state(
    model: nn.Module, opened: Iterable[str], state: Mapping[PlainAttribute, Any]
) -> None:
    """Refuse to go on where plain attributes of these modules are no longer what they were.

    Raises:
        RunError: One has changed.
    """
    now = plain_state(model, opened)
    if now != state:
        key = next(k for k in {**now, **state} if now.get(k) != state.get(k))
        raise RunError(
            f"{'.'.join(filter(None, key))} of the model has changed since it was cut",
            why=f"It was {state.get(key)!r} and is {now.get(key)!r}; the stages do not see that.",
            fix="Keep what changes in a buffer, or inside a module that is not cut.",
        )


def put_back(model: nn.Module, before: Mapping[PlainAttribute, Any]) -> list[PlainAttribute]:
    """Give plain attributes their old values; returns those that had others."""
    now = plain_state(model, [name for name, _ in model.named_modules()])
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    for module, name in changed:
        if (module, name) in before:
            setattr(model.get_submodule(module), name, before[module, name])
        else:
            delattr(model.get_submodule(module), name)
    return changed


def has_hooks(module: nn.Module) -> bool:
    """Whether something happens around a module's forward that a graph would not know of."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name) for name in hooks)
