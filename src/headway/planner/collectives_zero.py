"""What headway's executor sends to keep state in parts (ZeRO), on one rank in one step.

Without a pipeline FSDP2 gathers and sums groups of modules; in a pipeline headway itself gathers
the parameters of stages, and sums their gradients into the parts, each type of elements by itself.
Invariant: as of `collectives_plan`. Source: Rajbhandari et al. 2020 (ZeRO), section 5.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from headway.collective.calls import Call, Parameters, Part
from headway.graph import TensorSpec
from headway.plan import Plan
from headway.plan.layer_split import SPACE
from headway.plan.sharding import SHARD
from headway.planner.collectives_torch import Wrapped, fully_sharded, padded
from headway.schedule import Action, Kind, PipelineSchedule

EXACT = 8
"""Bytes of a number that is summed in float64: squares of norms, gradients of single numbers."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The ranks that train a parameter.

    Attributes:
        parts: That keep parts of it together.
        copies: Groups that do so.
    """

    parts: int
    copies: int


def rows_of(plan: Plan, holders: int) -> Rows:
    """Who keeps the parameters of a stage together.

    With ZeRO 3 those are ranks that come to the same action together, where there are several.

    Args:
        plan: With `memory.zero`.
        holders: Ranks of one pipeline that train the stage, 1 without a pipeline.
    """
    copies = plan.data_degree * plan.mesh.degree(SPACE)
    ranks, parts = copies * holders, plan.mesh.degree(SHARD)
    if parts == 1:
        parts = copies if plan.memory.zero == 3 and plan.data_degree > 1 else ranks
    return Rows(parts, ranks // parts)


# -- the whole model ------------------------------------------------------------------------------


def of_whole(plan: Plan, part: Part, *, clip: bool) -> Iterator[Call]:
    """Without a pipeline: FSDP2's operations, the sums of single numbers, and of the norm those
    over the ranks that keep parts; see `norms`.

    Args:
        plan: With `memory.zero`.
        part: The whole model.
        clip: Whether the norm is limited.
    """
    rows, gathered = rows_of(plan, 1), part.gathered or ()
    every = {**part.frozen, **part.parameters}
    known = {name: spec for name, spec in every.items() if spec.shape}
    inside = {name for names in gathered for name in names}
    rest = Wrapped(
        parameters={name: spec for name, spec in known.items() if name not in inside},
        reshard=False,
        frozen=frozenset(part.frozen),
    )
    groups = [
        Wrapped(parameters={name: known[name] for name in names}, frozen=frozenset(part.frozen))
        for names in gathered
    ]
    yield from fully_sharded(
        [rest, *groups],
        rows.parts,
        zero=plan.memory.zero,
        microbatches=plan.batch.passes(plan.data_degree),
        copies=rows.copies,
    )
    numbers = sum(not spec.shape for spec in part.parameters.values())
    kinds = {part.cuts.get(name, ()) for name, spec in part.parameters.items() if spec.shape}
    for ranks, size, times in (
        (rows.parts, EXACT * numbers, 1),
        (rows.copies, EXACT * numbers, 1),
        (rows.parts, EXACT, len(kinds) if clip else 0),
    ):
        yield _exact("data", ranks, size, times)


def norms(part: Part) -> Iterator[Call]:
    """Of a whole model whose layers are split: of the squares of what is cut alike one sum along
    each axis (`parallel.state_sharding.square_of_norm`)."""
    for axes in {part.cuts.get(name, ()) for name in part.parameters}:
        for _, ranks in axes:
            yield _exact("tensor", ranks, EXACT, 1)


def _exact(axis: str, ranks: int, size: int, count: int) -> Call:
    return Call(
        kind="all_reduce", axis=axis, ranks=ranks, bytes=size, count=count, phase="gradients"
    )


# -- stages ---------------------------------------------------------------------------------------


def kept(parameters: Parameters, rows: Rows) -> tuple[dict[str, TensorSpec], dict[str, TensorSpec]]:
    """(those that are kept in parts, those that stay whole)."""
    inside = {name for name, spec in parameters.items() if spec.shape and rows.parts > 1}
    return (
        {name: spec for name, spec in parameters.items() if name in inside},
        {name: spec for name, spec in parameters.items() if name not in inside},
    )


def gathers(parameters: Parameters, rows: Rows, times: int) -> Iterator[Call]:
    """Their numbers to all ranks that train them.

    Args:
        parameters: Of the same stages.
        rows: Of these stages.
        times: In a step.
    """
    for alike in by_type(parameters):
        size, beside = padded(alike, rows.parts)
        yield Call(
            kind="all_gather",
            axis="data",
            ranks=rows.parts,
            bytes=size,
            count=times,
            phase="forward",
            beside=beside,
        )


def sums(parameters: Parameters, rows: Rows, times: int) -> Iterator[Call]:
    """Of gradients into the parts, with a flag for each parameter and rank; then over the copies.

    Args:
        parameters: Trained ones of the same stages.
        rows: Of these stages.
        times: In a step.
    """
    for alike in by_type(parameters):
        size, beside = padded(alike, rows.parts)
        flags = rows.parts * len(alike) * next(iter(alike.values())).itemsize
        for kind, ranks, share in (
            ("reduce_scatter", rows.parts, 1),
            ("all_reduce", rows.copies, rows.parts),
        ):
            yield Call(
                kind=kind,  # type: ignore[arg-type]
                axis="data" if share == 1 else "replicate",
                ranks=ranks,
                bytes=(size + flags) / share,
                count=times,
                phase="gradients",
                beside=(beside + flags) / share,
            )


def by_type(parameters: Parameters) -> list[dict[str, TensorSpec]]:
    """Parameters whose elements are of one type together."""
    found: dict[str, dict[str, TensorSpec]] = {}
    for name, spec in parameters.items():
        found.setdefault(spec.dtype, {})[name] = spec
    return list(found.values())


def entries(
    plan: Plan, table: PipelineSchedule, row: Sequence[Action], where: Collection[int]
) -> int:
    """How often a rank enters stages in a step: each time their weights are gathered with ZeRO 3,
    else they stay for the step.

    Args:
        plan: With `memory.zero`.
        table: Of the plan.
        row: Of the rank.
        where: The stages.
    """
    if plan.memory.zero < 3:
        return 1
    again = () if table.blockwise else table.recompute
    times = {
        Kind.FORWARD: (1, 1),
        Kind.WEIGHT_GRAD: (1, 1),
        Kind.BACKWARD: (1, 2),
        Kind.INPUT_GRAD: (1, 2),
    }
    return sum(
        times[action.kind][action.stage in again]
        for action in row
        if action.stage in where and action.kind in times
    )
