"""What headway's executor sends for a plan, operation by operation, on one rank in one step.

Buckets are those of `collective.fusion`, payloads those of `collective.payload`, messages and sums
those of the lowered table: nothing is decided here. Invariant: count and bytes are those that are
recorded when the executor runs (after the first step, which also agrees on layouts).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from headway.collective.calls import Call, Calls, Kind, Parameters, Part, Phase, merged
from headway.collective.fusion import fill_buckets
from headway.collective.payload import gathered_parts, payloads
from headway.collective.predict import FIRST_BUCKET
from headway.errors import PlanError
from headway.graph import TensorSpec
from headway.plan import Exchange, Plan, parse_compression
from headway.plan.pipeline import AXIS
from headway.planner.candidate import Point
from headway.planner.collectives_zero import (
    EXACT,
    by_type,
    entries,
    gathers,
    kept,
    norms,
    of_whole,
    rows_of,
    sums,
)
from headway.planner.search import Search
from headway.schedule import Action
from headway.schedule import Kind as Of
from headway.schedule.lowering import lower

TALLY = 3 * 8
"""Bytes of the sum of loss, count and votes."""
DEFAULT_BUCKET = 8 * 2**20
"""Until measured."""


def collectives_of_plan(
    plan: Plan,
    parts: Sequence[Part] | Mapping[int, Sequence[Part]],
    *,
    rank: int = 0,
    clip: bool = False,
) -> Calls:
    """What a rank does in one step of a full batch.

    Args:
        plan: A legal one.
        parts: The stages as the rank has them; the whole model as one where there is no pipeline.
            Where micro-batches differ: those by the samples of a micro-batch.
        rank: Which.
        clip: Whether the norm of the gradients is limited.

    Raises:
        PlanError: The exchange is one of which only the traffic is known (`collective.wire`), or
            parts lack what is needed.
    """
    sizes = plan.micro_sizes(rank)
    by_size = parts if isinstance(parts, Mapping) else dict.fromkeys(sizes, parts)
    _refuse(plan, by_size, sizes)
    first = by_size[sizes[0]]
    found = [_sum("tally", "world", plan.ranks, TALLY)]
    if plan.pipe_degree > 1:
        found += _of_pipeline(plan, by_size, sizes, rank)
        if clip:
            found.append(_sum("gradients", "world", plan.ranks, EXACT))
        return merged(found)
    (whole,) = first
    for size in sizes:
        for calls in (by_size[size][0].passes or {}).values():
            found += calls
    split = plan.split.tensor and plan.data_degree == 1
    if plan.memory.zero and not split:
        found += of_whole(plan, whole, clip=clip)
    elif plan.exchange_degree > 1:
        found += of_exchange(plan.exchange, whole.parameters, plan.exchange_degree)
    if clip:
        found += norms(whole)
    return merged(found)


def _refuse(plan: Plan, by_size: Mapping[int, Sequence[Part]], sizes: Sequence[int]) -> None:
    problems = []
    if missing := sorted(set(sizes) - set(by_size)):
        problems.append(
            f"micro-batches of {', '.join(map(str, missing))} samples: nothing is known"
        )
    known = [part for size in sizes for part in by_size.get(size, ())]
    if plan.group_degree > 1 and any(part.passes is None for part in known):
        problems.append(f"split: {plan.split}; what its operators send is not known")
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
            fix="Give the parts that `run.rehearsal.rehearsed` makes of the model.",
        )


def _sum(phase: Phase, axis: str, ranks: int, size: float, beside: float = 0.0) -> Call:
    return Call(kind="all_reduce", axis=axis, ranks=ranks, bytes=size, phase=phase, beside=beside)


# -- data parallelism -----------------------------------------------------------------------------


def of_exchange(exchange: Exchange, parameters: Parameters, ranks: int) -> Iterator[Call]:
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
        handed = payloads(how.name, how.amount, [s.shape for s in specs], specs[0].itemsize, ranks)
        flags = len(names) * (2 if how.name in ("fp16", "bf16") else specs[0].itemsize)
        dense = how.name in ("none", "fp16", "bf16")
        for payload in handed:
            whole = payload.operation == "all_gather"
            for size in gathered_parts(payload.num_bytes, ranks) if whole else [payload.num_bytes]:
                yield Call(
                    kind=payload.operation,
                    axis=exchange.axis,
                    ranks=ranks,
                    bytes=size * (ranks if whole else 1),
                    phase="gradients",
                    beside=flags if dense else 0,
                )


def _buckets(exchange: Exchange, parameters: Parameters) -> Iterator[tuple[list[str], str]]:
    """Names and compressor of each, as `comm.buckets.fuse` fills them."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name in reversed(list(parameters)):
        part = exchange.part(name)
        text = part.compress if part and part.compress else exchange.compress
        alike.setdefault((text, parameters[name].dtype), []).append(name)
    limit = exchange.bucket_bytes or DEFAULT_BUCKET
    for (text, _), names in alike.items():
        sizes = [parameters[name].bytes for name in names]
        for bucket in fill_buckets(sizes, range(len(names)), limit, FIRST_BUCKET):
            yield [names[number] for number in bucket], text


# -- pipelines ------------------------------------------------------------------------------------


def _of_pipeline(
    plan: Plan, by_size: Mapping[int, Sequence[Part]], sizes: Sequence[int], rank: int
) -> list[Call]:
    place, parts = plan.mesh.coordinate(rank)[AXIS], by_size[sizes[0]]
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
    found: list[Call] = []
    for action in row:
        if action.microbatch >= 0:
            found += _of_action(by_size[sizes[action.microbatch]], action)
    order = [action.stage for action in row if action.kind == Of.SYNC]
    own = {stage for _, stage in table.hosted(place)}
    for where, (trained, every) in _shared(parts).items():
        if not own.intersection(where):
            continue
        holders = {holder for stage in where for holder in table.holders(stage)}
        # With the last of its stages on this rank.
        times = order.count(max(own.intersection(where), key=lambda s: _last(order, s)))
        rows = rows_of(plan, len(holders))
        if plan.memory.zero:
            found += gathers(kept(every, rows)[0], rows, entries(plan, full, row, where))
            inside, trained = kept(trained, rows)
            found += sums(inside, rows, times)
        found += _summed(trained, rows.parts * rows.copies, times)
    return found


def _of_action(parts: Sequence[Part], action: Action) -> Iterator[Call]:
    """A message, or what the operators of a stage send."""
    if action.kind in (Of.SEND, Of.RECV):
        yield from _message(parts, action)
    else:
        yield from (parts[action.stage].passes or {}).get(action.kind, ())


def _last(order: Sequence[int], stage: int) -> int:
    return max((n for n, other in enumerate(order) if other == stage), default=-1)


def _message(parts: Sequence[Part], action: Action) -> Iterator[Call]:
    """The tensors of one message; between s and t > s, s sends values and t their gradients."""
    early, late = sorted((action.stage, action.other))
    values = (action.stage < action.other) == (action.kind == Of.SEND)
    kind: Kind = "send" if action.kind == Of.SEND else "receive"
    for size, flows in parts[early].sends[late]:
        if values or flows:
            yield Call(
                kind=kind,
                axis=AXIS,
                ranks=2,
                bytes=size,
                phase="forward" if values else "backward",
            )


def _shared(
    parts: Sequence[Part],
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


def _summed(parameters: Parameters, ranks: int, times: int) -> Iterator[Call]:
    """One sum for each type, with a flag for each parameter."""
    for alike in by_type(parameters):
        specs = list(alike.values())
        flags = len(specs) * specs[0].itemsize
        size = sum(spec.bytes for spec in specs) + flags
        yield replace(_sum("gradients", "data", ranks, size, flags), count=times)


# -- from the graph -------------------------------------------------------------------------------


def parts_of(
    search: Search,
    point: Point,
    gathered: Sequence[Sequence[str]] | None = None,
    *,
    samples: int | None = None,
) -> tuple[Part, ...]:
    """The stages of a point, as the captured model has them.

    A parameter that nothing uses is in the last stage.

    Args:
        search: With the model.
        point: Of it.
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
        found.append(Part(parameters=trained, sends=sends, frozen=frozen, gathered=gathered))
    return tuple(found)
