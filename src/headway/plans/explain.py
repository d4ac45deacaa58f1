"""A plan in words, and the difference of two plans."""

from __future__ import annotations

from typing import Any

from headway.plans.layer_split import SPACE, LayerSplit
from headway.plans.plan import SHARD_AXIS, Plan
from headway.plans.synchrony import MERGES
from headway.units import counted


def explain(plan: Plan, tokens: int | None = None) -> str:
    """Sentences that say what the plan does."""
    axes = " x ".join(f"{axis.name} {axis.size}" for axis in plan.mesh.axes)
    ranks = "1 rank" if plan.ranks == 1 else f"{plan.ranks} ranks"
    lines = [
        f"plan {plan.hash}: mesh {axes}, {ranks}",
        f"batch: {plan.batch.equation(plan.data_degree, tokens, pipe=plan.pipe_degree)}",
        f"precision: {plan.memory.precision}",
    ]
    if plan.pipe_degree > 1:
        lines.append(f"pipeline: {explain_pipeline(plan)}")
    if plan.split != LayerSplit():
        lines.append(f"split: {plan.split}")
    if plan.memory.zero:
        lines.append(f"state: {explain_sharding(plan)}")
    lines.append(f"exchange: {explain_exchange(plan)}")
    if not plan.synchrony.by_all_reduce:
        lines.append(f"synchrony: {explain_synchrony(plan)}")
    return "\n".join(lines)


def explain_pipeline(plan: Plan) -> str:
    """One sentence."""
    assert plan.batch.parts is not None
    schedule = plan.pipeline.make(plan.pipe_degree, plan.batch.parts)
    pipeline = plan.pipeline
    cut = ", ".join(pipeline.cut) or pipeline.by_hand or _BALANCE[pipeline.balance]
    pipes = "" if len(schedule.pipes) == 1 else f" in {len(schedule.pipes)} pipes"
    return (
        f"{schedule.name} over {plan.pipe_degree} ranks, {schedule.stages} stages{pipes}, "
        f"{schedule.num_microbatches} micro-batches; cut at {cut}"
        + (
            ""
            if schedule.flush
            else "; updates within a step, by gradients of older weights: inexact"
        )
        + (f"; {schedule.recomputes}" if schedule.recompute else "")
        + ("" if pipeline.shared_memory else "; values go over the process group")
    )


def explain_sharding(plan: Plan) -> str:
    """One sentence."""
    what = ["the optimiser's state", "gradients", "parameters"][: plan.memory.zero]
    ranks = plan.copies * plan.mesh.degree(SPACE)
    parts = plan.mesh.degree(SHARD_AXIS) if SHARD_AXIS in plan.mesh.names else ranks
    if plan.has_leaders:
        return (
            f"each rank of a worker keeps 1/{parts} of the parameters between steps (ZeRO "
            f"{plan.memory.zero}); the first one has all of them besides"
        )
    listed = what[0] if len(what) == 1 else f"{', '.join(what[:-1])} and {what[-1]}"
    copies = ranks // parts
    more = f", in {copies} copies" if copies > 1 else ""
    return f"each rank keeps 1/{parts} of {listed} (ZeRO {plan.memory.zero}){more}"


def explain_exchange(plan: Plan) -> str:
    """One sentence."""
    exchange = plan.exchange
    if plan.pipe_degree > 1:
        when = "" if plan.flushes else " before each update"
        return f"gradients are summed over the copies of each stage{when}, exact"
    if plan.data_degree == 1:
        return "none; one rank holds the whole batch"
    if plan.copies == 1:
        return "none; each worker holds the whole of its share"
    how = _HOW[exchange.reduce].replace("gradients", exchange.values)
    if plan.memory.zero:
        return "gradients are summed during the backward pass, where they are kept; exact"
    by = exchange.collective + (f" ({text})" if (text := str(exchange.carrier or "")) else "")
    if exchange.carrier is not None and exchange.carrier.rates and exchange.repack:
        by += ", re-packed when links drift"
    where = f"{how} over {exchange.axis} by {by}"
    if exchange.compress != "none":
        where += f", compressed by {exchange.compress}"
    if exchange.priority:
        order = (
            f"most urgent first, across the border of the step, in chunks of {exchange.chunk} "
            f"with {exchange.credit} on their way"
        )
        wait = "every layer waits for its own parameters only"
    else:
        size = "fitted size" if exchange.bucket == "auto" else exchange.bucket
        when = "during" if exchange.overlap else "after"
        order = f"in buckets of {size}, {when} the {'last ' * exchange.overlap}backward pass"
        wait = "every rank waits for all"
    parts = "".join(
        f"; {part.parameters}: "
        + ", ".join(
            [f"compress {part.compress}"] * bool(part.compress)
            + [f"inside {len(part.ranks or ())} groups of ranks"] * bool(part.ranks)
        )
        for part in exchange.parts
    )
    exact = "exact" if exchange.exact else "inexact"
    return f"{where}, {order}; {wait} ({plan.synchrony.kind}, {exact}){parts}"


def explain_synchrony(plan: Plan) -> str:
    """One sentence about workers that do not agree at every step."""
    rules = plan.synchrony
    each = "" if plan.ranks == plan.workers else f" of {plan.ranks // plan.workers} ranks"
    exact = "exact" if rules.exact else "inexact"
    how = MERGES[rules.merge]
    if rules.merge in ("mean", "elastic", "neighbour") and rules.place != "tree":
        often = counted(rules.local_steps, "step")
        how += " after each step" if rules.local_steps == 1 else f" every {often}"
    return f"{plan.workers} workers{each}: {how} ({rules}; {exact})"


_BALANCE = {
    "parameters": "equal numbers of parameters",
    "time": "equal times, measured when the model is cut",
}
_HOW = {
    "mean": "gradients are summed",
    "sum": "gradients are summed, not averaged,",
    "adasum": "gradients are combined by Adasum",
}


def plan_difference(old: Plan, new: Plan) -> list[str]:
    """One line per value that differs: "mesh.axes.0.size: 2 -> 4"; empty for equal plans.

    None and a value that is absent are the same: of parts that only one plan has, only their
    entries are listed.
    """
    before, after = _flat(old.to_dict()), _flat(new.to_dict())
    keys = list(dict.fromkeys([*before, *after]))
    return [
        f"{key}: {before.get(key, 'absent')} -> {after.get(key, 'absent')}"
        for key in keys
        if before.get(key) != after.get(key)
    ]


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
