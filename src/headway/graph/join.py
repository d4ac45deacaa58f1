"""Two operators that run one after another, as one: their index expressions are unified.

Where the first makes `b s o` and the second reads `b s h*k`, the axis o becomes h*k everywhere. An
axis keeps the strictest of what both say about it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice

from headway.graph.index import common_factors, parse, take, text
from headway.graph.operator import Axes, Axis, Footprint, Moments, Operator

PENDING = ("sum", "avg", "max", "min", "masked")


def carries(first: Operator, second: Operator, tensor: str) -> bool:
    """Whether a pending sum of the first operator may pass through the second."""
    pending = any(axis.kind in PENDING for axis in first.axes.loops) or first.axes.linear
    return not pending or _group(second, tensor) is not None


def _group(operator: Operator, tensor: str) -> tuple[int, ...] | None:
    """The inputs in which an operator is linear together with one of its inputs."""
    place = operator.inputs.index(tensor)
    return next((group for group in operator.axes.linear if place in group), None)


def joined(first: Operator, second: Operator, tensor: str, *, main: Operator) -> Operator | None:
    """Both as one operator; None where their axes cannot be unified.

    Args:
        first: Makes `tensor`.
        second: Reads it, and nothing else does.
        tensor: The only tensor between them.
        main: The one of both that gives name, kind and module.
    """
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


def _saving_less(operator: Operator, before: Operator) -> Iterator[Moments]:
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
        second: Likewise.
        loops: The new axes.
    """

    first: dict[str, tuple[str, ...]] = field(default_factory=dict)
    second: dict[str, tuple[str, ...]] = field(default_factory=dict)
    loops: dict[str, Axis] = field(default_factory=dict)


@lru_cache(maxsize=4096)
def _unify(a: Axes, output: int, b: Axes, place: int) -> Axes | None:
    """The axes of a then b, where result `output` of a is input `place` of b."""
    names = _Names()
    left, right = parse(a.outputs[output]), parse(b.inputs[place])
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
    used = {name for index in (*inputs, *outputs) for names_ in parse(index) for name in names_}
    return Axes(
        loops=tuple(loop for loop in names.loops.values() if loop.name in used),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        linear=linear,
        added=added,
    )


def _unify_dimension(
    dims: tuple[Sequence[str], Sequence[str]], a: Axes, b: Axes, names: _Names
) -> bool:
    """Name the common factors of one dimension; false where there are none."""
    first = {axis.name: axis for axis in a.loops}
    second = {axis.name: axis for axis in b.loops}
    sizes = [first[n].size for n in dims[0]], [second[n].size for n in dims[1]]
    factors = common_factors(*sizes)
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
            table[axis] = tuple(take(some, rest, known[axis].size))
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


def _strictest(one: Axis, two: Axis) -> Axis | None:
    if one.window and two.window:
        return None
    for axis, other in ((one, two), (two, one)):
        if other.kind == "free" and not other.window:
            return axis
    if "fixed" in (one.kind, two.kind):
        fixed = one if one.kind == "fixed" else two
        return replace(fixed, window=one.window or two.window)
    return None


def _keep(loop: Axis, table: dict[str, tuple[str, ...]], names: _Names) -> None:
    """An axis that does not stand in the tensor between them; it may need another name."""
    name = loop.name
    while name in names.loops:
        name += "'"
    table[loop.name] = (name,)
    names.loops[name] = replace(loop, name=name)


def _renamed(index: str, table: Mapping[str, tuple[str, ...]]) -> str:
    return text([new for old in dims for new in table[old]] for dims in parse(index))


def _sums(
    a: Axes, b: Axes, place: int, shift: Mapping[int, int]
) -> tuple[tuple[tuple[int, ...], ...] | None, tuple[int, ...]]:
    """Where pending sums may pass, and what is added; None where that cannot be said."""
    group = next((g for g in b.linear if place in g), None)
    others = tuple(shift[n] for n in group or () if n != place)
    pending = any(axis.kind in PENDING for axis in a.loops)
    added = [*a.added, *(others if pending else ()), *(shift[n] for n in b.added if n != place)]
    if place in b.added:
        if len(a.linear) != 1 or len(a.linear[0]) != 1 or pending:
            return None, ()
        added.insert(0, a.linear[0][0])
    linear = [(*g, *others) for g in a.linear] if group is not None else []
    linear += [tuple(shift[n] for n in g) for g in b.linear if place not in g]
    return tuple(dict.fromkeys(linear)), tuple(dict.fromkeys(added))
