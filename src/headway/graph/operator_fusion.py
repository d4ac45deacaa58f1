"""Operator fusion before the search: views and elementwise operators join their neighbours.

A fused operator computes what its parts computed one after another; FLOPs, bytes, parameters and
saved tensors are sums. Index expressions are unified: where the first operator makes `b s o` and
the second reads `b s h*k`, the axis o becomes h*k everywhere, and an axis keeps the stricter of
the two rules. One choice would be lost: if a product is followed by something nonlinear, that part
is fused into its consumer instead, so that a partial sum stays possible. Nothing is fused across
the border of a repeated block, so equal blocks stay equal.

Each operator's footprint also gets its transient bytes (`with_transient_bytes`): what `liveness`
finds alive while the operator runs, beside what is kept for backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice

from headway.graph.liveness import GraphSlice, simulate_liveness
from headway.graph.model_graph import (
    Footprint,
    FusedFootprint,
    LoopAxis,
    ModelGraph,
    Operator,
    OperatorAxes,
    TensorSpec,
    common_factors,
    format_index,
    parse_index,
    take_factors,
)
from headway.graph.repeated_blocks import find_repeated_blocks

PARTIAL_KINDS = ("sum", "avg", "max", "min", "masked")


def passes_partial_sum(first: Operator, second: Operator, tensor: str) -> bool:
    """Whether a pending sum of the first operator may pass through the second."""
    pending = any(axis.kind in PARTIAL_KINDS for axis in first.axes.loops) or first.axes.linear
    return not pending or _group(second, tensor) is not None


def _group(operator: Operator, tensor: str) -> tuple[int, ...] | None:
    """The inputs in which an operator is linear together with one of its inputs."""
    place = operator.inputs.index(tensor)
    return next((group for group in operator.axes.linear if place in group), None)


def fuse_pair(first: Operator, second: Operator, tensor: str, *, main: Operator) -> Operator | None:
    """Both as one operator; None where their axes cannot be unified.

    Args:
        first: Makes `tensor`.
        second: Reads it, and nothing else does.
        main: The one of both that gives name, kind and module.
    """
    # Read twice, or along with another result, the tensor could not vanish.
    if second.inputs.count(tensor) != 1 or set(first.outputs) & set(second.inputs) != {tensor}:
        return None
    unified = (
        _unify(first.axes, first.outputs.index(tensor), second.axes, second.inputs.index(tensor))
        if _known(first, second)
        else None
    )
    if unified is None:
        return None
    axes, place = unified, second.inputs.index(tensor)
    roles = _roles(first, second, main)
    rest = [number for number in range(len(second.inputs)) if number != place]
    out = [number for number, name in enumerate(first.outputs) if name != tensor]
    return replace(
        main,
        inputs=(*first.inputs, *(second.inputs[number] for number in rest)),
        roles=(*roles[0], *(roles[1][number] for number in rest)),
        outputs=(*(first.outputs[number] for number in out), *second.outputs),
        parameters=tuple(dict.fromkeys((*first.parameters, *second.parameters))),
        axes=axes,
        flops=first.flops + second.flops,
        traffic=first.traffic + second.traffic,
        # What both save is kept once.
        saved=tuple(dict.fromkeys((*first.saved, *second.saved))),
        footprint=Footprint(
            passing=max(first.footprint.passing, second.footprint.passing),
            weights=max(first.footprint.weights, second.footprint.weights),
            parts=(*first.moments, *_saving_less(second, first)),
        ),
        parts=(*(first.parts or (first.name,)), *(second.parts or (second.name,))),
        modules=tuple(dict.fromkeys(o for one in (first, second) for o in _modules(one))),
        folded=(*first.kernels, *second.kernels),
    )


def _modules(operator: Operator) -> tuple[str, ...]:
    return operator.modules or (operator.module,)


def _saving_less(operator: Operator, before: Operator) -> Iterator[FusedFootprint]:
    """Its moments, without what the operator before it has saved."""
    left = iter(operator.saved)
    for moment in operator.moments:
        own = islice(left, moment.saved)
        yield replace(moment, saved=sum(saved not in before.saved for saved in own))


def _known(first: Operator, second: Operator) -> bool:
    return first.axes.known and second.axes.known


def _roles(first: Operator, second: Operator, main: Operator) -> list[list[str]]:
    """The main operator's as they are, the other's behind its kind."""
    return [
        list(o.roles) if o is main else [f"{o.kind}.{role}" for role in o.roles]
        for o in (first, second)
    ]


@dataclass
class _Names:
    """New names of the axes of both operators, and what is known of them.

    Attributes:
        first: From an axis of the first operator to the new ones, the slowest first.
    """

    first: dict[str, tuple[str, ...]] = field(default_factory=dict)
    second: dict[str, tuple[str, ...]] = field(default_factory=dict)
    loops: dict[str, LoopAxis] = field(default_factory=dict)


@lru_cache(maxsize=4096)
def _unify(a: OperatorAxes, output: int, b: OperatorAxes, place: int) -> OperatorAxes | None:
    """The axes of a then b, where result `output` of a is input `place` of b."""
    names = _Names()
    left, right = parse_index(a.outputs[output]), parse_index(b.inputs[place])
    for dims in zip(left, right, strict=True):
        if not _unify_dimension(dims, a, b, names):
            return None
    for loop in a.loops:
        if loop.name not in names.first:
            _keep(loop, names.first, names)
    for loop in b.loops:
        if loop.name not in names.second:
            _keep(loop, names.second, names)
    inputs = [_renamed(index, names.first) for index in a.inputs]
    inputs += [_renamed(i, names.second) for n, i in enumerate(b.inputs) if n != place]
    outputs = [_renamed(index, names.first) for n, index in enumerate(a.outputs) if n != output]
    outputs += [_renamed(index, names.second) for index in b.outputs]
    shift = {n: len(a.inputs) + n - (n > place) for n in range(len(b.inputs)) if n != place}
    linear, added = _sums(a, b, place, shift)
    if linear is None:
        return None
    used = {
        name for index in (*inputs, *outputs) for names_ in parse_index(index) for name in names_
    }
    return OperatorAxes(
        # Axes of nothing but the tensor between the two are gone.
        loops=tuple(loop for loop in names.loops.values() if loop.name in used),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        linear=linear,
        added=added,
    )


def _unify_dimension(
    dims: tuple[Sequence[str], Sequence[str]], a: OperatorAxes, b: OperatorAxes, names: _Names
) -> bool:
    """Name the common factors of one dimension; false where there are none."""
    first = {axis.name: axis for axis in a.loops}
    second = {axis.name: axis for axis in b.loops}
    sizes = [first[n].size for n in dims[0]], [second[n].size for n in dims[1]]
    # A window's loop counts results, not what it reads.
    factors = common_factors(*sizes) if math.prod(sizes[0]) == math.prod(sizes[1]) else None
    if factors is None:
        return False
    fresh: list[str] = []
    for axis in dims[0]:
        count = _count(factors[len(fresh) :], first[axis].size)
        fresh += [axis] if count == 1 else [f"{axis}.{n}" for n in range(count)]
    for group, known, table in (
        (dims[0], first, names.first),
        (dims[1], second, names.second),
    ):
        some, rest = list(factors), list(fresh)
        for axis in group:
            table[axis] = tuple(take_factors(some, rest, known[axis].size))
            # A window slides along an axis, not along a factor of it.
            if known[axis].window and len(table[axis]) > 1:
                return False
    for name, size in zip(fresh, factors, strict=True):
        one = next(first[n] for n in dims[0] if name in names.first[n])
        two = next(second[n] for n in dims[1] if name in names.second[n])
        strict = _strictest(one, two)
        if strict is None:
            return False
        names.loops[name] = replace(strict, name=name, size=size)
    return True


def _count(factors: Sequence[int], size: int) -> int:
    """How many of the factors make up a size."""
    product, count = 1, 0
    while product < size:
        product *= factors[count]
        count += 1
    return count


def _strictest(one: LoopAxis, two: LoopAxis) -> LoopAxis | None:
    # Behind each other, two windows reach further than either of them says.
    if one.window and two.window:
        return None
    for axis, other in ((one, two), (two, one)):
        if other.kind == "free" and not other.window:
            return axis
    if "fixed" in (one.kind, two.kind):
        fixed = one if one.kind == "fixed" else two
        return replace(fixed, window=one.window or two.window)
    return None


def _keep(loop: LoopAxis, table: dict[str, tuple[str, ...]], names: _Names) -> None:
    """An axis that does not stand in the tensor between them; it may need another name."""
    name = loop.name
    while name in names.loops:
        name += "'"
    table[loop.name] = (name,)
    names.loops[name] = replace(loop, name=name)


def _renamed(index: str, table: Mapping[str, tuple[str, ...]]) -> str:
    return format_index([new for old in dims for new in table[old]] for dims in parse_index(index))


def _sums(
    a: OperatorAxes, b: OperatorAxes, place: int, shift: Mapping[int, int]
) -> tuple[tuple[tuple[int, ...], ...] | None, tuple[int, ...]]:
    """Where pending sums may pass, and what is added; None where that cannot be said."""
    group = next((g for g in b.linear if place in g), None)
    others = tuple(shift[n] for n in group or () if n != place)
    pending = any(axis.kind in PARTIAL_KINDS for axis in a.loops)
    # Behind a pending sum an operand that is added may be added by one part only.
    added = [*a.added, *(others if pending else ()), *(shift[n] for n in b.added if n != place)]
    if place in b.added:
        if len(a.linear) != 1 or len(a.linear[0]) != 1 or pending:
            return None, ()
        added.insert(0, a.linear[0][0])
    linear = [(*g, *others) for g in a.linear] if group is not None else []
    linear += [tuple(shift[n] for n in g) for g in b.linear if place not in g]
    return tuple(dict.fromkeys(linear)), tuple(dict.fromkeys(added))


# What is alive for a moment beside what is kept, operator by operator; and where modules are.


def with_transient_bytes(graph: ModelGraph) -> ModelGraph:
    """The graph, its operators' footprints with `passing` and `weights`: of one micro-batch alone
    whose gradients are added to those that are there."""
    peak = simulate_liveness(graph, gradients=True)
    held = {*graph.parameters, *graph.buffers, *graph.inputs}
    least = sum(
        graph.tensors[t].bytes for t in GraphSlice(graph, 0, len(graph.operators)).parameter_uses
    )
    kept, known = [0], set(held)
    for operator in graph.operators:
        own = {s.name: s.bytes for s in operator.saved if s.name not in known}
        known.update(own)
        kept.append(kept[-1] + sum(own.values()))
    most: dict[int, tuple[int, int]] = {}
    for moment in peak.curve:
        if moment.place < 0:
            continue
        # Left out: what was there before the step, and what this and earlier operators have saved.
        waiting = moment.bytes.get("gradients", 0) - least
        rest = moment.total - least - waiting - kept[moment.place + 1]
        before = most.get(moment.place, (0, 0))
        # Several moments belong to an operator: the fullest one counts.
        if rest + waiting > sum(before):
            most[moment.place] = rest, waiting
    return replace(
        graph,
        operators=tuple(
            _transient_footprint(graph, operator, *most.get(place, (0, 0)))
            for place, operator in enumerate(graph.operators)
        ),
    )


def _transient_footprint(
    graph: ModelGraph, operator: Operator, rest: int, waiting: int
) -> Operator:
    codes = zip(operator.inputs, operator.footprint.gradients, strict=False)
    # New gradients of parameters are among `rest`; they count as `weights`.
    made = sum(graph.tensors[t].bytes for t, c in codes if c == "new" and t in graph.parameters)
    made = min(made, max(rest, 0))
    found = replace(operator.footprint, passing=max(rest, 0) - made, weights=waiting + made)
    return replace(operator, footprint=found)


# Level 0 of the search: views and elementwise operators are folded into their neighbours.


_LIGHT_KINDS = """
_to_copy _unsafe_view add alias chunk clone contiguous detach div dropout expand flatten gelu
hardtanh leaky_relu masked_fill mul neg permute pow relu reshape rsqrt select sigmoid silu slice
split split_with_sizes sqrt square squeeze sub t tanh to transpose unbind unflatten unsqueeze
view where
"""
LIGHT_KINDS = frozenset(_LIGHT_KINDS.split())
"""Kinds that are folded."""


def fuse_light_operators(graph: ModelGraph) -> ModelGraph:
    """The graph with light operators folded; values that only lived inside are gone."""
    graph = with_transient_bytes(graph)
    state = _Fusion(graph)
    for operator in graph.operators:
        if operator.kind in LIGHT_KINDS and operator.axes.known:
            state.into_producer(operator)
    # From the end, so that a run of light operators comes to its consumer as one.
    for operator in reversed(graph.operators):
        if operator.kind in LIGHT_KINDS and operator.axes.known:
            state.into_consumer(operator)
    return state.result()


class _Fusion:
    """Attributes:
    at: The operators that are left, by their place in the original order.
    home: Where an original operator is now, by its name.
    """

    def __init__(self, graph: ModelGraph) -> None:
        self.graph = graph
        self.at = dict(enumerate(graph.operators))
        self.home = {operator.name: place for place, operator in self.at.items()}
        self.maker = dict(graph.producers)
        self.users = {tensor: set(places) for tensor, places in graph.consumers.items()}
        self.segment = [
            n
            for n, s in enumerate(find_repeated_blocks(graph).segments)
            for _ in range(s.start, s.stop)
        ]

    def into_producer(self, light: Operator) -> None:
        """Into the latest producer, which alone can have no other way to this operator."""
        place = self.home[light.name]
        light = self.at[place]
        made = [tensor for tensor in light.inputs if tensor in self.maker]
        if not made:
            return
        to = max(self.maker[tensor] for tensor in made)
        between = {tensor for tensor in made if self.maker[tensor] == to}
        if len(between) == 1 and self._alone(tensor := between.pop(), place):
            heavy = self.at[to]
            if passes_partial_sum(heavy, light, tensor):
                self._merge(to, place, heavy, light, tensor, main=heavy)

    def into_consumer(self, light: Operator) -> None:
        """Into the only operator that uses its result."""
        place = self.home[light.name]
        light = self.at[place]
        # It may have been folded into another operator in the first pass.
        if light.kind not in LIGHT_KINDS or len(light.outputs) != 1:
            return
        tensor = light.outputs[0]
        users = self.users.get(tensor, set())
        if len(users) == 1 and self._alone(tensor, to := next(iter(users))):
            self._merge(to, place, light, self.at[to], tensor, main=self.at[to])

    def _alone(self, tensor: str, user: int) -> bool:
        """Whether nothing else reads a tensor."""
        return self.users.get(tensor) == {user} and tensor not in self.graph.outputs

    def _merge(
        self, to: int, gone: int, first: Operator, second: Operator, tensor: str, *, main: Operator
    ) -> None:
        # Across the border of a repeated block equal blocks would become unequal.
        inside = self.segment[to] == self.segment[gone]
        merged = fuse_pair(first, second, tensor, main=main) if inside else None
        if merged is None:
            return
        del self.at[gone]
        self.at[to] = merged
        self.home |= dict.fromkeys(merged.parts, to)
        self.maker |= dict.fromkeys(merged.outputs, to)
        for name in (*first.inputs, *second.inputs):
            self._uses(name).discard(gone)
            self._uses(name).add(to)
        self.users.pop(tensor, None)

    def _uses(self, tensor: str) -> set[int]:
        return self.users.setdefault(tensor, set())

    def result(self) -> ModelGraph:
        operators = tuple(operator for _, operator in sorted(self.at.items()))
        return replace(self.graph, operators=operators, values=self._left(operators))

    def _left(self, operators: Iterable[Operator]) -> dict[str, TensorSpec]:
        made = {tensor for operator in operators for tensor in operator.outputs}
        return {name: spec for name, spec in self.graph.values.items() if name in made}
