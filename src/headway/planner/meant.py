"""Which operators a pattern of what is forced is about.

Invariant: operators without parameters are never forced.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from headway.graph import Operator


def forcible(operator: Operator) -> tuple[str, ...]:
    """What a pattern may call an operator with parameters: its module; in the model itself, which
    has no name, its parameters."""
    return (operator.module,) if operator.module else tuple(operator.parameters)


def means(pattern: str, operator: Operator) -> bool:
    """Whether a pattern of `operators.Setting.force` is about an operator."""
    names = forcible(operator) if operator.parameters else ()
    return any(fnmatchcase(name, pattern) for name in names)
