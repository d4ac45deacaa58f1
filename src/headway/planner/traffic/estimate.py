"""The collectives by which a point of the search is priced, for each of its stages.

Every collective of the operators, of the re-layouts between them, of the gradients, and every
message between stages, with the bytes that `Network` is given.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from headway.collective.collective_calls import (
    CallKind,
    CollectiveCall,
    CollectiveCalls,
    Phase,
    merge_calls,
)
from headway.cost.network import HierarchicalNetwork
from headway.graph.model_graph import Operator
from headway.graph.sharding_rules import Rule
from headway.planner.estimate.degrees import Degrees
from headway.planner.estimate.operators import OperatorSetting, gradient_placement, parameter_bytes
from headway.planner.estimate.pipeline_time import PointStage
from headway.planner.estimate.segments import ENDS, SegmentTables
from headway.planner.estimate.stage_cut import LayerUnit
from headway.planner.search.branch_and_bound import PlanSearch
from headway.planner.search.candidate import PlanCandidate
from headway.planner.search.plan_point import CopyClass, Point, uniform_class


def collective_call(
    kind: str,
    phase: str,
    axis: str,
    ranks: int,
    size: float,
    *,
    count: int = 1,
    beside: float = 0.0,
) -> CollectiveCall:
    """`size` bytes each; `beside` of them are no numbers of the model."""
    return CollectiveCall(
        kind=cast(CallKind, kind),
        axis=axis,
        ranks=ranks,
        bytes=size,
        count=count,
        phase=cast(Phase, phase),
        beside=beside,
    )


def collective_seconds(
    calls: Iterable[CollectiveCall], network: HierarchicalNetwork, degrees: Degrees
) -> float:
    """What the cost model asks for the collectives, one after the other; messages count once, at
    their sender."""
    total = 0.0
    for call in calls:
        far = degrees.stride(call.axis)  # type: ignore[arg-type]
        if call.kind == "send":
            total += call.count * float(network.send(call.bytes, far))
        elif call.kind != "receive":
            price = getattr(network, call.kind)
            total += call.count * float(price(call.bytes, call.ranks, far))
    return total


@dataclass(frozen=True, kw_only=True)
class EqualRanks:
    """Ranks of a plan on groups of devices that do the same.

    Attributes:
        copies: Copies of the model in which they are.
    """

    stage: int
    kind: str
    copies: int
    microbatch: int
    calls: CollectiveCalls


def collectives_of_ranks(search: PlanSearch, point: Point) -> tuple[EqualRanks, ...]:
    """Stage by stage, and class by class of the copies."""
    found = []
    for one in point.classes or (uniform_class(point),):
        for kind in dict.fromkeys(one.kinds):
            # A stage in a class sends what it sends where all copies are of that class.
            lists = collectives_of(search, uniform_point(point, one, kind))
            found += [
                EqualRanks(
                    stage=stage,
                    kind=kind,
                    copies=len(one.copies),
                    microbatch=one.microbatch,
                    calls=calls,
                )
                for stage, calls in enumerate(lists)
                if one.kinds[stage] == kind
            ]
    return tuple(sorted(found, key=lambda one: one.stage))


def uniform_point(point: Point, one: CopyClass, kind: str) -> Point:
    """As if all copies were of one class, on devices of one type."""
    return replace(
        point,
        degrees=replace(point.degrees, microbatch=one.microbatch),
        # Stages that the class has elsewhere stand for themselves.
        stages=one.stages,
        amounts=((kind, point.devices),) if kind else (),
        classes=(),
    )


def collectives_of(search: PlanSearch, point: Point) -> tuple[CollectiveCalls, ...]:
    """For each stage what one of its ranks does in one step; of copies that differ, those of the
    slowest stages.

    Args:
        search: That found the point, or has its model, batch and cluster.
    """
    candidate = search.candidate(point.degrees, point.kind)
    return tuple(
        merge_calls(
            [
                *_of_messages(candidate.tables, point, number),
                *_of_tensors(candidate.tables, point, stage),
                *of_gradients(point.degrees, _messages(candidate, point, stage), stage.params),
                *_of_ties(candidate, point, number),
            ]
        )
        for number, stage in enumerate(point.stages)
    )


def of_gradients(degrees: Degrees, sizes: Iterable[float], held: float) -> Iterator[CollectiveCall]:
    """Over the data axis, and all copies of a stage (Rajbhandari et al. 2020, section 7).

    Args:
        held: Bytes of all parameters of a device.
    """
    m, zero = _microbatches_of_rank(degrees), degrees.zero
    # Without a data axis the copies of a stage are those of several pipes.
    axis = "data" if degrees.data > 1 else "pipe"
    ranks = degrees.data * (degrees.pipes if zero < 2 else 1)
    for size in sizes:
        one = collective_call("all_reduce", "gradients", axis, ranks, size)
        if zero == 0:
            yield one
            continue
        # ZeRO 1 scatters once, ZeRO 2 in each micro-batch; ZeRO 3 also gathers in both passes of
        # each.
        yield replace(one, kind="reduce_scatter", count=1 if zero == 1 else m)
        if zero == 3:
            yield replace(one, kind="all_gather", phase="forward", count=m)
            yield replace(one, kind="all_gather", phase="backward", count=m)
    if zero in (1, 2):
        yield collective_call("all_gather", "forward", "data", degrees.data, held)


def _microbatches_of_rank(degrees: Degrees) -> int:
    """Micro-batches of a step that a rank computes of one stage; of several pipes the largest
    share."""
    return -(-degrees.microbatches // degrees.pipes)


def _messages(candidate: PlanCandidate, point: Point, stage: PointStage) -> list[float]:
    """In which the gradients of a stage travel: units with ZeRO 2 and 3, else the buckets of a
    model that is not cut, one of a stage."""
    degrees, pricing, shared = point.degrees, candidate.pricing, candidate.shared
    if degrees.zero < 2 and not point.bucket:
        return [stage.params]
    units = pricing.units(stage.start, stage.stop, int(stage.recompute), stage.price, point.border)[
        :, 3
    ]
    if degrees.zero >= 2:
        found: list[float] = pricing.memory.own(units, stage.start).tolist()
        return found
    parts = np.where(shared.held > 0, units / np.maximum(shared.held, 1.0), 0.0)
    sizes, _ = shared.gradients.messages(point.bucket, parts)
    return [float(size) for size in sizes]


def _of_ties(candidate: PlanCandidate, point: Point, number: int) -> Iterator[CollectiveCall]:
    starts = [other.start for other in point.stages]
    for tie in candidate.shared.ties:
        stages = {bisect_right(starts, unit) - 1 for unit in tie.units}
        if number in stages:
            yield collective_call(
                "all_reduce", "gradients", "pipe", len(stages), tie.bytes / point.degrees.tensor
            )


def _of_messages(tables: SegmentTables, point: Point, number: int) -> Iterator[CollectiveCall]:
    m = _microbatches_of_rank(point.degrees)
    for border, ways in ((number, ("receive", "send")), (number + 1, ("send", "receive"))):
        if not 0 < border < len(point.stages):
            continue
        size = float(tables.crossing(point.border)[point.stages[border].start])
        for kind, phase in zip(ways, ("forward", "backward"), strict=True):
            yield collective_call(kind, phase, "pipe", 2, size, count=m)


def _of_tensors(tables: SegmentTables, point: Point, stage: PointStage) -> Iterator[CollectiveCall]:
    """Of the tensor axis; units of one structure and one strategy are looked at once."""
    if point.degrees.tensor == 1:
        return
    row, again = tables.row, int(stage.recompute)
    way = tables.path(stage.start, stage.stop, again, stage.price, point.border)
    equal: Counter[tuple[int, tuple[int, int]]] = Counter()
    for unit, pair in zip(row[stage.start : stage.stop], way, strict=True):
        equal[unit.kind, pair] += 1
    m = _microbatches_of_rank(point.degrees)
    # Strategies lie (A, B, 2 J): those without recomputation first.
    strategy = again * tables.weights.shape[1] + stage.price
    # Recomputation repeats the collectives of the forward pass.
    times = {"forward": m * (1 + again), "backward": m, "gradients": 1}
    for (kind, pair), units in equal.items():
        unit = next(unit for unit in row if unit.kind == kind)
        solved = tables.solved(kind)
        picks = {name: int(some[(*pair, strategy)]) for name, some in solved.strategies.items()}
        rules = {name: some[picks[name]] for name, some in solved.rules.items()}
        for call in of_unit(tables.setting, unit, rules, picks):
            yield replace(call, count=call.count * units * times[call.phase])


def of_unit(
    setting: OperatorSetting, unit: LayerUnit, rules: Mapping[str, Rule], picks: Mapping[str, int]
) -> Iterator[CollectiveCall]:
    """Of one micro-batch's passes through a unit, once each, and of a step's end.

    Args:
        picks: Of each tensor that several use ("=name") and of the ends the number of its state.
    """
    operators = setting.work.graph.operators[unit.start : unit.stop]
    for operator in operators:
        yield from _own(setting, operator, rules[operator.name])
    for tensor, (lies, wants), (needs, gives) in _edges(setting, unit, operators, rules, picks):
        size = setting.bytes_of(tensor)
        yield from _moved(setting, lies, needs, size, "forward")
        if setting.work.graph.tensors[tensor].floating:
            yield from _moved(setting, gives, wants, size, "backward")


def _own(setting: OperatorSetting, operator: Operator, rule: Rule) -> Iterator[CollectiveCall]:
    """What an operator itself sends: halos, statistics, gradients of whole parameters."""
    plain = collective_call("all_reduce", "forward", "tensor", setting.tensor, 0)
    scale = setting.scale if operator.name in setting.work.batch_loops else 1.0
    passes: tuple[Phase, Phase] = ("forward", "backward")
    for phase in passes:
        if rule.halo and rule.parts > 1:
            yield replace(plain, kind="send", ranks=2, bytes=rule.halo * scale, phase=phase)
        if rule.exchange:
            yield replace(plain, bytes=rule.exchange, phase=phase)
    for size in parameter_bytes(setting, operator, rule)[1]:
        yield replace(plain, bytes=size, phase="gradients")


def _moved(
    setting: OperatorSetting, source: str, target: str, size: float, phase: Phase
) -> Iterator[CollectiveCall]:
    found = setting.relayout.needed(source, target, size)
    if found is not None:
        yield collective_call(found.kind, phase, "tensor", setting.tensor, found.bytes)


_Placed = tuple[str, str]
"""Where a tensor lies, and how its maker wants the gradient; or how it is needed, and how its
gradient comes."""


def _edges(
    setting: OperatorSetting,
    unit: LayerUnit,
    operators: tuple[Operator, ...],
    rules: Mapping[str, Rule],
    picks: Mapping[str, int],
) -> Iterator[tuple[str, _Placed, _Placed]]:
    """All ways of a tensor inside of a unit, as `segments` prices them."""
    made = {tensor: o for o in operators for tensor in o.outputs}
    ends = {unit.entry: ENDS[0], unit.exit: ENDS[1]}
    states: dict[str, _Placed] = {}
    for tensor in dict.fromkeys([unit.entry, unit.exit, *made]):
        number = picks.get(ends.get(tensor, f"={tensor}"))
        if tensor and number is not None:
            places = setting.placements(tensor)
            # Behind the placements `segments` has one more state: whole, with gradients added up
            # before they are summed.
            states[tensor] = (places[number],) * 2 if number < len(places) else ("R", "P")

    def source(tensor: str) -> _Placed:
        maker = made[tensor]
        lies = rules[maker.name].outputs[maker.outputs.index(tensor)]
        return lies, gradient_placement(lies)

    for operator in operators:
        rule = rules[operator.name]
        for number, tensor in enumerate(operator.inputs):
            if tensor not in setting.work.fixed and (tensor in states or tensor in made):
                lies = states[tensor] if tensor in states else source(tensor)
                yield tensor, lies, (rule.inputs[number], rule.gradients[number])
    for tensor, state in states.items():
        if tensor in made:
            yield tensor, source(tensor), state
