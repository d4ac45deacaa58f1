"""What a rank sends in one step of a plan: headway's executor, and FSDP2 beneath it.

Of headway's executor buckets are those of the plan, payloads those of `collective.compression`,
messages and sums those of the lowered table: nothing is decided here. Counts and bytes are those
recorded when the executor runs, after the first step, which also agrees on layouts.

With ZeRO and no pipeline FSDP2 gathers and sums groups of modules. In a pipeline headway itself
gathers the parameters of stages and sums their gradients into shards, each element type by itself
(Rajbhandari et al. 2020, ZeRO, section 5). FSDP2 as torch 2.11 to 2.14 has it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from headway.collective.collective_calls import (
    CallKind,
    CollectiveCall,
    CollectiveCalls,
    CommunicatingStage,
    Parameters,
    merge_calls,
)
from headway.collective.compression import gathered_parts, parse_compression
from headway.collective.model.gradient_buckets import fill_buckets
from headway.collective.model.scheme_ranking import FIRST_BUCKET
from headway.errors import PlanError
from headway.graph.model_graph import TensorSpec
from headway.planner.search.branch_and_bound import PlanSearch
from headway.planner.search.plan_point import Point
from headway.planner.traffic.estimate import collective_call
from headway.plans import ExchangePlan, Plan
from headway.plans.layer_split import SPACE
from headway.plans.pipeline import PIPE_AXIS
from headway.plans.plan import SHARD_AXIS
from headway.schedule.lowering import lower
from headway.schedule.pipeline_schedule import Action, ActionKind, PipelineSchedule

STEP_REDUCTION = 3 * 8
"""Bytes of the sum of loss, count and votes."""
EXACT = 8
"""Bytes of a number that is summed in float64: squares of norms, gradients of single numbers."""


# -- torch's own wrapper -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FullyShardedModule:
    """A module for which `fully_shard` was called.

    Attributes:
        parameters: Those that no wrapped module inside of it has, as they lie on this rank where a
            tensor axis splits them.
    """

    parameters: Mapping[str, TensorSpec]
    reshard: bool = True
    frozen: frozenset[str] = frozenset()


def fsdp2_wrapper_calls(
    modules: Sequence[FullyShardedModule],
    ranks: int,
    *,
    zero: int = 3,
    microbatches: int = 1,
    copies: int = 1,
) -> CollectiveCalls:
    """FSDP2, and how it does ZeRO.

    ZeRO 3: parameters are gathered for each pass of each micro-batch. ZeRO 2: they stay until the
    step has ended (`set_reshard_after_backward(False)` but for the last micro-batch, and no
    `reshard_after_forward`). ZeRO 1: also gradients are summed once, with the last micro-batch
    (`set_requires_gradient_sync`).

    Args:
        copies: Of the shards, over which gradients are also summed (a mesh of two axes).
    """
    found: list[CollectiveCall] = []
    for module in modules:
        gathered, filled = padded_shard_bytes(module.parameters, ranks)
        common = collective_call("all_gather", "forward", "data", ranks, gathered, beside=filled)
        each = microbatches if zero == 3 else 1
        found.append(replace(common, count=each))
        if zero == 3 and module.reshard:
            found.append(replace(common, count=each, phase="backward"))
        summed, filled = padded_shard_bytes(module.parameters, ranks, module.frozen)
        sums = replace(
            common,
            kind="reduce_scatter",
            bytes=summed,
            beside=filled,
            phase="gradients",
            count=1 if zero == 1 else microbatches,
        )
        found.append(sums)
        # Over the copies only this rank's part is summed.
        found.append(
            replace(
                sums, kind="all_reduce", axis="replicate", ranks=copies,
                bytes=summed / ranks, beside=filled / ranks,
            )
        )  # fmt: skip
    return merge_calls(found)


def padded_shard_bytes(
    parameters: Mapping[str, TensorSpec], ranks: int, without: frozenset[str] = frozenset()
) -> tuple[float, float]:
    """(bytes of all shards, filled up to equal sizes; of what is filled up)."""
    whole = filled = 0
    for name, spec in parameters.items():
        if name not in without:
            # FSDP2 splits along the first dimension, filled up to as many rows for each rank.
            full = _rows(spec, ranks) * math.prod(spec.shape[1:]) * spec.itemsize
            whole += full
            filled += full - spec.bytes
    return float(whole), float(filled)


def _rows(spec: TensorSpec, ranks: int) -> int:
    return -(-spec.shape[0] // ranks) * ranks


# -- headway's executor --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ShardingGroups:
    """The ranks that train a parameter."""

    parts: int
    copies: int


def sharding_groups(plan: Plan, holders: int) -> ShardingGroups:
    """Who keeps the parameters of a stage together.

    Args:
        holders: Ranks of one pipeline that train the stage, 1 without a pipeline.
    """
    copies = plan.data_degree * plan.mesh.degree(SPACE)
    ranks, parts = copies * holders, plan.mesh.degree(SHARD_AXIS)
    if parts == 1:
        # With ZeRO 3 those are ranks that come to the same action together, where there are
        # several.
        parts = copies if plan.memory.zero == 3 and plan.data_degree > 1 else ranks
    return ShardingGroups(parts, ranks // parts)


# -- the whole model ------------------------------------------------------------------------------


def fsdp2_calls(plan: Plan, part: CommunicatingStage, *, clip: bool) -> Iterator[CollectiveCall]:
    """Without a pipeline: FSDP2's operations, the sums of single numbers, and of the norm those
    over the ranks that keep parts; see `norm_calls`.
    """
    rows, gathered = sharding_groups(plan, 1), part.gathered or ()
    every = {**part.frozen, **part.parameters}
    known = {name: spec for name, spec in every.items() if spec.shape}
    inside = {name for names in gathered for name in names}
    # The root keeps its parameters between forward and backward, as `parallel/fsdp.py` wraps it.
    rest = FullyShardedModule(
        parameters={name: spec for name, spec in known.items() if name not in inside},
        reshard=False,
        frozen=frozenset(part.frozen),
    )
    groups = [
        FullyShardedModule(
            parameters={name: known[name] for name in names}, frozen=frozenset(part.frozen)
        )
        for names in gathered
    ]
    yield from fsdp2_wrapper_calls(
        [rest, *groups],
        rows.parts,
        zero=plan.memory.zero,
        microbatches=plan.batch.passes(plan.data_degree),
        copies=rows.copies,
    )
    # A single number has no rows to split, so FSDP2 leaves it out; beside its gradient goes whether
    # the rank has used it.
    numbers = 2 * sum(not spec.shape for spec in part.parameters.values())
    kinds = {part.cuts.get(name, ()) for name, spec in part.parameters.items() if spec.shape}
    for ranks, size, times in (
        (rows.parts, EXACT * numbers, 1),
        (rows.copies, EXACT * numbers, 1),
        (rows.parts, EXACT, len(kinds) if clip else 0),
    ):
        yield collective_call("all_reduce", "gradients", "data", ranks, size, count=times)


def norm_calls(part: CommunicatingStage) -> Iterator[CollectiveCall]:
    """Of a whole model whose layers are split: the sums for the norm of its gradients."""
    for axes in {part.cuts.get(name, ()) for name in part.parameters}:
        for _, ranks in axes:
            yield collective_call("all_reduce", "gradients", "tensor", ranks, EXACT)


# -- stages ---------------------------------------------------------------------------------------


def split_kept_parameters(
    parameters: Parameters, rows: ShardingGroups
) -> tuple[dict[str, TensorSpec], dict[str, TensorSpec]]:
    """(those that are kept in parts, those that stay whole)."""
    inside = {name for name, spec in parameters.items() if spec.shape and rows.parts > 1}
    return (
        {name: spec for name, spec in parameters.items() if name in inside},
        {name: spec for name, spec in parameters.items() if name not in inside},
    )


def gather_calls(
    parameters: Parameters, rows: ShardingGroups, times: int
) -> Iterator[CollectiveCall]:
    for alike in parameters_by_dtype(parameters):
        size, beside = padded_shard_bytes(alike, rows.parts)
        yield collective_call(
            "all_gather", "forward", "data", rows.parts, size, count=times, beside=beside
        )


def reduce_scatter_calls(
    parameters: Parameters, rows: ShardingGroups, times: int
) -> Iterator[CollectiveCall]:
    """Of gradients into the parts, with a flag for each parameter and rank; then over the
    copies."""
    for alike in parameters_by_dtype(parameters):
        size, beside = padded_shard_bytes(alike, rows.parts)
        flags = rows.parts * len(alike) * next(iter(alike.values())).itemsize
        for kind, ranks, share in (
            ("reduce_scatter", rows.parts, 1),
            ("all_reduce", rows.copies, rows.parts),
        ):
            yield collective_call(
                kind,
                "gradients",
                "data" if share == 1 else "replicate",
                ranks,
                (size + flags) / share,
                count=times,
                beside=(beside + flags) / share,
            )


def parameters_by_dtype(parameters: Parameters) -> list[dict[str, TensorSpec]]:
    """Parameters whose elements are of one type together."""
    found: dict[str, dict[str, TensorSpec]] = {}
    for name, spec in parameters.items():
        found.setdefault(spec.dtype, {})[name] = spec
    return list(found.values())


def stage_entries(
    plan: Plan, table: PipelineSchedule, row: Sequence[Action], where: Collection[int]
) -> int:
    """How often a rank enters stages in a step: each time their weights are gathered with ZeRO 3,
    else they stay for the step."""
    if plan.memory.zero < 3:
        return 1
    # A stage that is recomputed whole is entered twice in its backward, blocks within one entry.
    again = () if table.blockwise else table.recompute
    times = {
        ActionKind.FORWARD: (1, 1),
        ActionKind.WEIGHT_GRAD: (1, 1),
        ActionKind.BACKWARD: (1, 2),
        ActionKind.INPUT_GRAD: (1, 2),
    }
    return sum(
        times[action.kind][action.stage in again]
        for action in row
        if action.stage in where and action.kind in times
    )


def collectives_of_plan(
    plan: Plan,
    parts: Sequence[CommunicatingStage] | Mapping[int, Sequence[CommunicatingStage]],
    *,
    rank: int = 0,
    clip: bool = False,
) -> CollectiveCalls:
    """What a rank does in one step of a full batch.

    Args:
        parts: The stages as the rank has them; the whole model as one where there is no pipeline.
            Where micro-batches differ: those by the samples of a micro-batch.
        clip: Whether the norm of the gradients is limited.

    Raises:
        PlanError: The exchange is one of which only the traffic is known (`collective.wire`), or
            parts lack what is needed.
    """
    sizes = plan.micro_sizes(rank)
    by_size = parts if isinstance(parts, Mapping) else dict.fromkeys(sizes, parts)
    _refuse(plan, by_size, sizes)
    first = by_size[sizes[0]]
    found = [collective_call("all_reduce", "tally", "world", plan.ranks, STEP_REDUCTION)]
    if plan.pipe_degree > 1:
        found += _of_pipeline(plan, by_size, sizes, rank)
        if clip:
            found.append(collective_call("all_reduce", "gradients", "world", plan.ranks, EXACT))
        return merge_calls(found)
    (whole,) = first
    for size in sizes:
        for calls in (by_size[size][0].passes or {}).values():
            found += calls
    split = plan.split.tensor and plan.data_degree == 1
    if plan.memory.zero and not split:
        found += fsdp2_calls(plan, whole, clip=clip)
    elif plan.exchange_degree > 1:
        found += of_exchange(plan.exchange, whole.parameters, plan.exchange_degree)
    if clip:
        found += norm_calls(whole)
    return merge_calls(found)


def _refuse(
    plan: Plan, by_size: Mapping[int, Sequence[CommunicatingStage]], sizes: Sequence[int]
) -> None:
    problems = []
    if missing := sorted(set(sizes) - set(by_size)):
        problems.append(
            f"micro-batches of {', '.join(map(str, missing))} samples: nothing is known"
        )
    known = [part for size in sizes for part in by_size.get(size, ())]
    if plan.group_degree > 1 and any(part.passes is None for part in known):
        problems.append(f"split: {plan.split}; what its operators send is not known")
    if plan.split.tables:
        problems.append("split.tables: what lookups send follows from the ids of each batch")
    if (
        plan.memory.zero
        and plan.ranks > 1
        and plan.pipe_degree == 1
        and any(part.gathered is None for part in known)
    ):
        problems.append(
            f"memory.zero: {plan.memory.zero}; it is not known which modules are gathered together"
        )
    if problems:
        raise PlanError(
            "the operations of this plan are not listed",
            problems=problems,
            fix="Give the parts that headway.run.measure.communication_dry_run.dry_run returns.",
        )


# -- data parallelism -----------------------------------------------------------------------------


def of_exchange(
    exchange: ExchangePlan, parameters: Parameters, ranks: int
) -> Iterator[CollectiveCall]:
    """Bucket by bucket; before anything is measured, where sizes are to be fitted.

    Raises:
        PlanError: See `collectives_of_plan`.
    """
    others = {
        "reduce": exchange.reduce == "adasum",
        "collective": exchange.collective != "all_reduce",
        "priority": exchange.priority,
        "parts": any(part.ranks for part in exchange.parts),
        "compress": exchange.compression is None,
    }
    if any(others.values()):
        raise PlanError(
            "the operations of this exchange are not listed",
            problems=[f"exchange.{name}" for name, other in others.items() if other],
            fix="`headway exchange` has the bytes that it sends from rank to rank.",
        )
    for names, text in _buckets(exchange, parameters):
        specs = [parameters[name] for name in names]
        how = parse_compression(text)
        handed = how.payloads([s.shape for s in specs], specs[0].itemsize, ranks)
        flags = len(names) * how.wire_element_bytes(specs[0].itemsize) if how.elementwise else 0
        for payload in handed:
            whole = payload.operation == "all_gather"
            for size in gathered_parts(payload.num_bytes, ranks) if whole else [payload.num_bytes]:
                yield collective_call(
                    payload.operation,
                    "gradients",
                    exchange.axis,
                    ranks,
                    size * (ranks if whole else 1),
                    beside=flags,
                )


def _buckets(exchange: ExchangePlan, parameters: Parameters) -> Iterator[tuple[list[str], str]]:
    alike: dict[tuple[str, str], list[str]] = {}
    # In reverse, as backward makes the gradients.
    for name in reversed(list(parameters)):
        part = exchange.part(name)
        text = part.compress if part and part.compress else exchange.compress
        alike.setdefault((text, parameters[name].dtype), []).append(name)
    # Before anything is measured, as `comm/exchange` fills them.
    limit = exchange.initial_bucket_bytes
    for (text, _), names in alike.items():
        sizes = [parameters[name].bytes for name in names]
        for bucket in fill_buckets(sizes, range(len(names)), limit, FIRST_BUCKET):
            yield [names[number] for number in bucket], text


# -- pipelines ------------------------------------------------------------------------------------


def _of_pipeline(
    plan: Plan, by_size: Mapping[int, Sequence[CommunicatingStage]], sizes: Sequence[int], rank: int
) -> list[CollectiveCall]:
    place, parts = plan.mesh.coordinate(rank)[PIPE_AXIS], by_size[sizes[0]]
    assert plan.batch.parts is not None
    edges = {(a, b) for a, part in enumerate(parts) for b in part.sends}
    skips = tuple(sorted((a, b) for a, b in edges if b != a + 1))
    full = replace(plan.pipeline.make(plan.pipe_degree, plan.batch.parts), skips=skips)
    if full.stages != len(parts):
        raise PlanError(
            "the model is cut into another number of stages",
            problems=[f"{len(parts)} stages, the schedule has {full.stages}"],
            fix="Give as many stages as the schedule has.",
        )
    table = lower(full, sync=plan.pipeline.sync)
    row = table.order[place]
    found: list[CollectiveCall] = []
    for action in row:
        # Sums and updates belong to no micro-batch.
        if action.microbatch >= 0:
            found += _of_action(by_size[sizes[action.microbatch]], action)
    order = [action.stage for action in row if action.kind == ActionKind.SYNC]
    own = {stage for _, stage in table.hosted(place)}
    for where, (trained, every) in _shared(parts).items():
        if not own.intersection(where):
            continue
        holders = {holder for stage in where for holder in table.holders(stage)}
        # With the last of its stages on this rank.
        times = order.count(max(own.intersection(where), key=lambda s: _last(order, s)))
        rows = sharding_groups(plan, len(holders))
        if plan.memory.zero:
            found += gather_calls(
                split_kept_parameters(every, rows)[0], rows, stage_entries(plan, full, row, where)
            )
            inside, trained = split_kept_parameters(trained, rows)
            found += reduce_scatter_calls(inside, rows, times)
        found += _summed(trained, rows.parts * rows.copies, times)
    return found


def _of_action(parts: Sequence[CommunicatingStage], action: Action) -> Iterator[CollectiveCall]:
    if action.kind in (ActionKind.SEND, ActionKind.RECV):
        yield from _message(parts, action)
    else:
        yield from (parts[action.stage].passes or {}).get(action.kind, ())


def _last(order: Sequence[int], stage: int) -> int:
    return max((n for n, other in enumerate(order) if other == stage), default=-1)


def _message(parts: Sequence[CommunicatingStage], action: Action) -> Iterator[CollectiveCall]:
    """The tensors of one message; between s and t > s, s sends values and t their gradients."""
    early, late = sorted((action.stage, action.other))
    values = (action.stage < action.other) == (action.kind == ActionKind.SEND)
    kind: CallKind = "send" if action.kind == ActionKind.SEND else "receive"
    for size, flows in parts[early].sends[late]:
        if values or flows:
            yield collective_call(kind, "forward" if values else "backward", PIPE_AXIS, 2, size)


def _shared(
    parts: Sequence[CommunicatingStage],
) -> dict[tuple[int, ...], tuple[dict[str, TensorSpec], dict[str, TensorSpec]]]:
    """Parameters by the stages that use them: (those that are trained, all)."""
    where: dict[str, list[int]] = {}
    for number, part in enumerate(parts):
        for name in (*part.parameters, *part.frozen):
            where.setdefault(name, []).append(number)
    found: dict[tuple[int, ...], tuple[dict[str, TensorSpec], dict[str, TensorSpec]]] = {}
    for name, numbers in where.items():
        first = parts[numbers[0]]
        trained, every = found.setdefault(tuple(numbers), ({}, {}))
        if name in first.parameters:
            trained[name] = first.parameters[name]
        every[name] = first.parameters.get(name) or first.frozen[name]
    return found


def _summed(parameters: Parameters, ranks: int, times: int) -> Iterator[CollectiveCall]:
    """One sum for each type, with a flag for each parameter."""
    for alike in parameters_by_dtype(parameters):
        specs = list(alike.values())
        flags = len(specs) * specs[0].itemsize
        size = sum(spec.bytes for spec in specs) + flags
        yield collective_call(
            "all_reduce", "gradients", "data", ranks, size, count=times, beside=flags
        )


# -- from the graph -------------------------------------------------------------------------------


def parts_of(
    search: PlanSearch,
    point: Point,
    gathered: Sequence[Sequence[str]] | None = None,
    *,
    samples: int | None = None,
) -> tuple[CommunicatingStage, ...]:
    """The stages of a point, as the captured model has them.

    A parameter that nothing uses is in the last stage.

    Args:
        gathered: Of a whole model, as `Part.gathered`.
        samples: Of a micro-batch; None: those of the point.
    """
    graph, row = search.question.work.graph, search.row
    setting = search.tables_of(point.degrees.tensor, point.degrees.microbatch).setting
    setting = replace(setting, samples=samples or point.degrees.microbatch)
    used = [
        {
            name
            for operator in graph.operators[row[s.start].start : row[s.stop - 1].stop]
            for name in operator.parameters
        }
        for s in point.stages
    ]
    used[-1] |= set(graph.parameters) - set().union(*used)
    found = []
    for number, stage in enumerate(point.stages):
        sends: dict[int, list[tuple[int, bool]]] = {}
        if number + 1 < len(point.stages):
            tensor = row[stage.stop - 1].exit
            floating = graph.tensors[tensor].floating
            sends[number + 1] = [(round(setting.bytes_of(tensor)), floating)]
        held = {name: spec for name, spec in graph.parameters.items() if name in used[number]}
        frozen = {name: spec for name, spec in held.items() if name in graph.frozen}
        trained = {name: spec for name, spec in held.items() if name not in frozen}
        found.append(
            CommunicatingStage(parameters=trained, sends=sends, frozen=frozen, gathered=gathered)
        )
    return tuple(found)
