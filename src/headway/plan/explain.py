"""A plan in words, and the difference of two plans in words."""

from __future__ import annotations

from typing import Any

from headway.plan.plan import Plan


def explain(plan: Plan, tokens: int | None = None) -> str:
    """Sentences that say what the plan does.

    Args:
        plan: A legal plan.
        tokens: Tokens of one sample, where the batch was stated in tokens.
    """
    axes = " x ".join(f"{axis.name} {axis.size}" for axis in plan.mesh.axes)
    ranks = "1 rank" if plan.ranks == 1 else f"{plan.ranks} ranks"
    lines = [
        f"plan {plan.hash}: mesh {axes}, {ranks}",
        f"batch: {plan.batch.equation(plan.data_degree, tokens)}",
        f"precision: {plan.memory.precision}",
    ]
    if plan.data_degree > 1:
        when = (
            "during the last backward pass" if plan.exchange.overlap else "after the backward pass"
        )
        lines.append(
            f"exchange: gradients are summed over {plan.exchange.axis} by "
            f"{plan.exchange.collective}, in buckets of "
            f"{plan.exchange.bucket}, {when}; "
            f"every rank waits for all ({plan.synchrony.kind}, exact)"
        )
    else:
        lines.append("exchange: none; one rank holds the whole batch")
    return "\n".join(lines)


def difference(old: Plan, new: Plan) -> list[str]:
    """One line per value that differs: "mesh.axes.0.size: 2 -> 4"; empty for equal plans."""
    before, after = _flat(old.to_dict()), _flat(new.to_dict())
    keys = list(dict.fromkeys([*before, *after]))
    return [
        f"{key}: {before.get(key, 'absent')} -> {after.get(key, 'absent')}"
        for key in keys
        if before.get(key, _ABSENT) != after.get(key, _ABSENT)
    ]


_ABSENT = object()


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    match value:
        case dict():
            items = list(value.items())
        case list() | tuple():
            items = list(enumerate(value))
        case _:
            return {path: value}
    flat: dict[str, Any] = {}
    for key, inner in items:
        flat |= _flat(inner, f"{path}.{key}" if path else str(key))
    return flat
