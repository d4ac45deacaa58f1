"""Repeated blocks of a model: finding them, and extending a graph captured with a few of them.

Two runs of operators are equal if their operators, the wiring between them and the specs of what
enters are equal; names do not count. A GPT of 48 layers has one distinct block with 48 uses, so
the planner solves it once.

`extend_blocks` goes the other way: from a graph that was captured with `BLOCKS_KEPT` blocks of each
stack (the first, two in the middle, the last) to the graph of the whole model. A middle block
differs from the next one in names alone: what it reads is the same tensor for both, or lies one
block further. The result equals the capture of all blocks, names included (torch.fx counts "add",
"add_1", ...); where that cannot be guaranteed, `CannotExtendError` is raised.
"""

from __future__ import annotations

import builtins
import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import chain, groupby
from typing import NamedTuple

from headway.graph.model_graph import ModelGraph, Operator, Saved, TensorSpec


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Neighbouring operators.

    Attributes:
        module: The module that holds them; "" for a run between blocks.
        structure: Equal for segments of equal structure.
    """

    start: int
    stop: int
    module: str
    structure: str


@dataclass(frozen=True, kw_only=True)
class BlockPartition:
    """A model as a sequence of segments.

    Attributes:
        segments: In order, without gaps.
        uses: How often each structure occurs, in the order of first use.
    """

    segments: tuple[Segment, ...]
    uses: dict[str, int]

    @property
    def repeated(self) -> dict[str, int]:
        """Structures with more than one use."""
        return {structure: count for structure, count in self.uses.items() if count > 1}


def find_repeated_blocks(
    graph: ModelGraph, smallest: int = 3, structures: StructureHashes | None = None
) -> BlockPartition:
    """The largest repeated modules, and what lies between them.

    Args:
        smallest: Operators that a block has at least; less is left between the blocks.
        structures: Of the graph, where somebody has them.
    """
    structures = structures or StructureHashes(graph)
    runs = list(_runs(structures, 0, len(graph.operators), 0))
    counts = Counter(run.structure for run in runs)
    chosen: list[Segment] = []
    place = 0
    for run in runs:  # outer runs come before inner ones
        repeated = counts[run.structure] > 1 and run.stop - run.start >= smallest
        # A run inside of one that was chosen is a part of it.
        if repeated and run.start >= place:
            chosen.append(run)
            place = run.stop
    segments = tuple(_filled(structures, chosen))
    return BlockPartition(segments=segments, uses=dict(Counter(s.structure for s in segments)))


def _runs(structures: StructureHashes, start: int, stop: int, depth: int) -> Iterator[Segment]:
    """Every module's runs, outer ones first."""
    graph = structures.graph

    def path(place: int) -> tuple[str, ...]:
        return tuple(graph.operators[place].module.split("."))[: depth + 1]

    for module, group in groupby(range(start, stop), path):
        places = list(group)
        # Operators without a module of this depth.
        if len(module) <= depth or not module[0]:
            continue
        begin, end = places[0], places[-1] + 1
        yield Segment(
            start=begin,
            stop=end,
            module=".".join(module),
            structure=structures.of(begin, end),
        )
        yield from _runs(structures, begin, end, depth + 1)


def _filled(structures: StructureHashes, chosen: list[Segment]) -> Iterator[Segment]:
    place, stop = 0, len(structures.graph.operators)
    for segment in chosen:
        if segment.start > place:
            yield _between(structures, place, segment.start)
        yield segment
        place = segment.stop
    if place < stop:
        yield _between(structures, place, stop)


def _between(structures: StructureHashes, start: int, stop: int) -> Segment:
    return Segment(start=start, stop=stop, module="", structure=structures.of(start, stop))


@dataclass(frozen=True)
class StructureHashes:
    """Hashes of what neighbouring operators are, whatever they and their tensors are called."""

    graph: ModelGraph
    _specs: dict[str, str] = field(default_factory=dict)
    _known: dict[tuple[int, ...], str] = field(default_factory=dict)

    def of(self, start: int, stop: int) -> str:
        """Of the operators from `start` to before `stop`."""
        numbers: dict[str, int] = {}
        key: list[int] = []
        for fact, tensors in self._lines[start:stop]:
            key.append(fact)
            # Tensors are numbered as they appear, so that names do not count.
            key += [numbers.setdefault(tensor, len(numbers)) for tensor in tensors]
        line = tuple(key)
        if line not in self._known:
            self._known[line] = self._hash(start, stop)
        return self._known[line]

    @cached_property
    def _lines(self) -> list[tuple[int, tuple[str, ...]]]:
        """Of every operator a number of what it is, with the specs of its tensors; and these."""
        facts: dict[tuple[str, ...], int] = {}
        found = []
        for operator in self.graph.operators:
            tensors = (*operator.inputs, *operator.outputs)
            fact = self._fact(operator), *map(self._spec, tensors)
            found.append((facts.setdefault(fact, len(facts)), tensors))
        return found

    def _hash(self, start: int, stop: int) -> str:
        numbers: dict[str, int] = {}
        lines = []
        for operator in self.graph.operators[start:stop]:
            wires = [
                f"({numbers.setdefault(tensor, len(numbers))}, {self._spec(tensor)})"
                for tensor in (*operator.inputs, *operator.outputs)
            ]
            lines.append(f"[{', '.join(wires)}] {self._fact(operator)}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    def _spec(self, tensor: str) -> str:
        if tensor not in self._specs:
            spec = self.graph.tensors[tensor]
            self._specs[tensor] = f"{spec.shape}, {spec.dtype!r}"
        return self._specs[tensor]

    def _fact(self, operator: Operator) -> str:
        """What does not depend on the operators before it."""
        trained = [tensor in operator.parameters for tensor in operator.inputs]
        kept = sorted(saved.bytes for saved in operator.saved)
        facts = f"{len(operator.inputs)} {trained} {kept}"
        return f"{facts}\n{self.graph.descriptions[operator.name]}"


# A graph with few of its repeated blocks, extended to all of them.


BLOCKS_KEPT = 4
"""Blocks of a stack with which it is captured."""
_NAMES = {"name", "inputs", "outputs", "parameters", "module", "saved"}
_FACTS = tuple(f.name for f in fields(Operator) if f.name not in _NAMES)
_COUNTED = re.compile(r"(.*)_([1-9][0-9]*)")


class CannotExtendError(Exception):
    """The blocks do not follow each other as said above; the words say what was found."""


@dataclass(frozen=True, kw_only=True)
class RepeatedStack:
    """Equal blocks that are called one after another.

    Attributes:
        path: Of what holds them, in the whole model; "" for the model itself.
        first: Number of the first block there.
    """

    path: str
    first: int
    blocks: int

    def module(self, block: int) -> str:
        """Path of a block."""
        number = str(self.first + block)
        return f"{self.path}.{number}" if self.path else number


@dataclass(frozen=True, kw_only=True)
class FullModel:
    """The whole model.

    Attributes:
        paths: From a path of the short model to the path of the same module in the whole one.
        parameters, tied, frozen: As in `ModelGraph`.
        registered: Names of those in the short model.
    """

    stacks: tuple[RepeatedStack, ...]
    paths: Mapping[str, str]
    parameters: dict[str, TensorSpec]
    buffers: Mapping[str, TensorSpec]
    registered: tuple[str, ...]
    tied: dict[str, str]
    frozen: tuple[str, ...]


class _Place(NamedTuple):
    """Where a tensor belongs: stack, block, and what it is there: (operator, rest of the name) of
    what was made, the name of a parameter inside of its block."""

    stack: int
    block: int
    key: tuple[int, str] | str


def extend_blocks(short: ModelGraph, whole: FullModel) -> ModelGraph:
    """The graph of the whole model.

    Args:
        short: Captured with `BLOCKS_KEPT` blocks of each stack.

    Raises:
        CannotExtendError: Its blocks are not alike.
    """
    return _Extension(short, whole).result()


@dataclass
class _Extension:
    short: ModelGraph
    whole: FullModel
    periods: list[list[list[Operator]]] = field(default_factory=list)
    between: list[list[Operator]] = field(default_factory=lambda: [[]])
    places: dict[str, _Place] = field(default_factory=dict)
    steps: list[dict[str, int]] = field(default_factory=list)
    values: dict[str, TensorSpec] = field(default_factory=dict)
    where: dict[str, int] = field(default_factory=dict)

    def result(self) -> ModelGraph:
        self._divide()
        self._count()
        operators = tuple(self._operators())
        names = [operator.name for operator in operators]
        held = {*self.whole.parameters, *self.short.inputs}
        if len({*names, *held}) != len(names) + len(held):
            raise CannotExtendError("names that are there already")
        return replace(
            self.short,
            operators=operators,
            values=self.values,
            outputs=tuple(self._named(name) for name in self.short.outputs),
            parameters=self.whole.parameters,
            buffers=self._buffers(),
            tied=self.whole.tied,
            frozen=self.whole.frozen,
        )

    # -- the short graph -----------------------------------------------------------------------

    def _divide(self) -> None:
        """Operators by block; what runs between two blocks belongs to the first of them."""
        owners = self._owners()
        now: tuple[int, int] | None = None
        for operator in self.short.operators:
            owner = owners.get(operator.module)
            if owner is not None and owner != now:
                follows = now is not None and owner == (now[0], now[1] + 1)
                if not follows and (now is not None or owner != (len(self.periods), 0)):
                    raise CannotExtendError(f"{operator.module} is not called in its turn")
                if owner[1] == 0:
                    self.periods.append([])
                self.periods[-1].append([])
                now = owner
            # Behind its last block a stack is over.
            if owner is None and now is not None and now[1] == BLOCKS_KEPT - 1:
                self.between.append([])
                now = None
            self._place(operator, now)
        if len(self.between) == len(self.periods):
            self.between.append([])
        if [len(blocks) for blocks in self.periods] != [BLOCKS_KEPT] * len(self.whole.stacks):
            raise CannotExtendError("blocks that compute nothing")

    def _owners(self) -> dict[str, tuple[int, int]]:
        """Stack and block by path in the short model; what blocks hold gets its place."""
        blocks = {
            stack.module(full): (number, block)
            for number, stack in enumerate(self.whole.stacks)
            # The blocks that are kept, by their numbers in the whole model.
            for block, full in enumerate((0, 1, 2, stack.blocks - 1))
        }
        found: dict[str, tuple[int, int]] = {}
        inside: dict[str, str] = {}
        for path, full in self.whole.paths.items():
            ends = [n for n, letter in enumerate(f"{full}.") if letter == "."]
            end = next((end for end in ends if full[:end] in blocks), None)
            if end is not None:
                found[path] = blocks[full[:end]]
                inside[path] = f"{full[end + 1 :]}." if full[end + 1 :] else ""
        for name in (*self.short.parameters, *self.short.buffers):
            module, _, own = name.rpartition(".")
            if module in found:
                self.places[name] = _Place(*found[module], inside[module] + own)
        return found

    def _place(self, operator: Operator, now: tuple[int, int] | None) -> None:
        if now is None:
            self.between[-1].append(operator)
            return
        period = self.periods[now[0]][now[1]]
        for name in (*operator.outputs, *(saved.name for saved in operator.saved)):
            if name.startswith((f"{operator.name}.", f"{operator.name}/")) or name == operator.name:
                rest = name[len(operator.name) :]
                self.places.setdefault(name, _Place(*now, (len(period), rest)))
        period.append(operator)

    def _count(self) -> None:
        """By how much the names of a kind grow from block to block."""
        seen: dict[str, set[int]] = {}
        for operator in self.short.operators:
            base, number = _counted(operator.name)
            seen.setdefault(base, set()).add(number)
        loose = {
            base
            for base, numbers in seen.items()
            if len(numbers) <= max(numbers) - (base in vars(builtins))  # "sum" begins with 1
        }
        for number, (_, one, two, _) in enumerate(self.periods):
            if len(one) != len(two):
                raise CannotExtendError(f"{len(one)} operators in a block, {len(two)} in the next")
            steps: dict[str, int] = {}
            for a, b in zip(one, two, strict=True):
                (base, low), (other, high) = _counted(a.name), _counted(b.name)
                # Only where all names of a kind move on by one number can later names be computed.
                if base != other or steps.setdefault(base, high - low) != high - low:
                    raise CannotExtendError(f"{b.name} behind {a.name}")
            behind = chain(*self.between[number + 1 :], *chain(*self.periods[number + 1 :]))
            if any(_counted(o.name)[0] in loose - steps.keys() for o in behind):
                raise CannotExtendError("names that leave numbers out")
            self.steps.append(steps)

    # -- names ---------------------------------------------------------------------------------

    def _counted_on(self, name: str, stacks: int, further: Mapping[int, int]) -> str:
        """The name of an operator behind so many whole stacks.

        Args:
            further: By how many blocks it lies further inside of a stack.
        """
        base, number = _counted(name)
        for stack in range(stacks):
            number += self.steps[stack].get(base, 0) * (
                self.whole.stacks[stack].blocks - BLOCKS_KEPT
            )
        for stack, blocks in further.items():
            number += self.steps[stack].get(base, 0) * blocks
        return f"{base}_{number}" if number else base

    def _at(self, place: _Place) -> str:
        """The name of what has a place in the whole model."""
        stack = self.whole.stacks[place.stack]
        if isinstance(place.key, str):
            return f"{stack.module(place.block)}.{place.key}"
        line, rest = place.key
        blocks = self.periods[place.stack]
        last = place.block == stack.blocks - 1
        # In the middle, names count on from those of the second block.
        like = BLOCKS_KEPT - 1 if last else min(place.block, 1)
        name = blocks[like][line].name
        further = {place.stack: place.block - like}
        return self._counted_on(name, place.stack, further) + rest

    def _named(self, name: str) -> str:
        """A tensor of the short graph in the whole one, read from outside of the middle."""
        place = self.places.get(name)
        if place is None:
            if name in self.short.values:
                maker = self.short.operators[self.short.producers[name]].name
                return self._counted_on(maker, self._before(maker), {}) + name[len(maker) :]
            if "/" in name and name not in self.short.tensors:
                maker, _, rest = name.partition("/")
                return f"{self._counted_on(maker, self._before(maker), {})}/{rest}"
            return self._held(name)
        blocks = self.whole.stacks[place.stack].blocks
        # The last block's neighbour is block 2 here; block 1 stands for many, read by blocks only.
        ends = {0: 0, BLOCKS_KEPT - 2: blocks - 2, BLOCKS_KEPT - 1: blocks - 1}
        if place.block not in ends:
            raise CannotExtendError(f"{name}, in the middle of a stack, is used elsewhere")
        return self._at(place._replace(block=ends[place.block]))

    def _held(self, name: str) -> str:
        """A parameter, buffer or input outside of the stacks."""
        module, _, own = name.rpartition(".")
        if name in self.short.inputs or not module:
            return name
        return f"{self.whole.paths.get(module, module)}.{own}"

    def _before(self, operator: str) -> int:
        """Stacks before an operator that is in none."""
        if not self.where:
            for number, operators in enumerate(self.between):
                self.where |= {o.name: number for o in operators}
        return self.where[operator]

    # -- the whole graph -----------------------------------------------------------------------

    def _operators(self) -> Iterator[Operator]:
        for number, operators in enumerate(self.between):
            for operator in operators:
                yield self._end(operator, None, number)
            if number < len(self.periods):
                yield from self._stack(number)

    def _stack(self, number: int) -> Iterator[Operator]:
        first, one, two, last = self.periods[number]
        blocks = self.whole.stacks[number].blocks
        for line, operator in enumerate(first):
            yield self._end(operator, (number, 0), number, line)
        middle = [self._like(number, a, b) for a, b in zip(one, two, strict=True)]
        for block in range(1, blocks - 1):
            for line, (operator, refs) in enumerate(zip(one, middle, strict=True)):
                yield self._repeated(operator, refs, _Place(number, block, (line, "")))
        for line, operator in enumerate(last):
            yield self._end(operator, (number, BLOCKS_KEPT - 1), number, line)

    def _end(
        self, operator: Operator, own: tuple[int, int] | None, stacks: int, line: int = 0
    ) -> Operator:
        """An operator that the short graph has, under its name in the whole one."""
        if own is None:
            name = self._counted_on(operator.name, stacks, {})
        else:
            block = 0 if own[1] == 0 else self.whole.stacks[own[0]].blocks - 1
            name = self._at(_Place(own[0], block, (line, "")))
        made = {t: name + t[len(operator.name) :] for t in operator.outputs}
        self.values.update((new, self.short.values[old]) for old, new in made.items())
        read = {t: self._named(t) for t in operator.inputs}
        kept = [
            Saved(name=made.get(s.name) or self._named(s.name), bytes=s.bytes)
            for s in operator.saved
        ]
        return replace(
            operator,
            name=name,
            inputs=tuple(read[t] for t in operator.inputs),
            outputs=tuple(made[t] for t in operator.outputs),
            parameters=tuple(read[t] for t in operator.parameters),
            module=self.whole.paths.get(operator.module, operator.module),
            saved=tuple(kept),
        )

    def _like(self, number: int, one: Operator, two: Operator) -> _Refs:
        """How an operator of a block reads, from the same one of the next block.

        Raises:
            CannotExtendError: They are not alike.
        """
        specs = [self.short.specs(operator) for operator in (one, two)]
        if any(getattr(one, key) != getattr(two, key) for key in _FACTS) or specs[0] != specs[1]:
            raise CannotExtendError(f"{two.name} is not like {one.name}")
        trained = [[tensor in o.parameters for tensor in o.inputs] for o in (one, two)]
        sizes = [(len(o.outputs), [saved.bytes for saved in o.saved]) for o in (one, two)]
        modules = [self._inside(number, n, o) for n, o in enumerate((one, two), 1)]
        if any(pair[0] != pair[1] for pair in (trained, sizes, modules)):
            raise CannotExtendError(f"{two.name} is not like {one.name}")
        inputs = zip(one.inputs, two.inputs, strict=True)
        saved = zip(one.saved, two.saved, strict=True)
        return _Refs(
            inputs=tuple(self._moves(number, a, b) for a, b in inputs),
            saved=tuple(self._moves(number, a.name, b.name) for a, b in saved),
            module=modules[0],
        )

    def _inside(self, number: int, block: int, operator: Operator) -> str:
        """The module of an operator behind the path of its block; "/" before one outside."""
        full = self.whole.paths.get(operator.module, operator.module)
        path = self.whole.stacks[number].module(block)
        inside = full == path or full.startswith(f"{path}.")
        return full[len(path) :] if inside else f"/{full}"

    def _moves(self, number: int, one: str, two: str) -> str | _Place:
        """What a block reads and the next one: the same tensor, or that of one block further."""
        if one == two:
            return self._named(one)
        a, b = self.places.get(one), self.places.get(two)
        if a is None or b is None or a.stack != number or b != a._replace(block=a.block + 1):
            raise CannotExtendError(f"one block reads {one}, the next one {two}")
        return a

    def _repeated(self, operator: Operator, refs: _Refs, place: _Place) -> Operator:
        """The operator of the second block in a later one."""
        name = self._at(place)
        by = place.block - 1

        def moved(ref: str | _Place) -> str:
            return ref if isinstance(ref, str) else self._at(ref._replace(block=ref.block + by))

        inputs = tuple(moved(ref) for ref in refs.inputs)
        read = dict(zip(operator.inputs, inputs, strict=True))
        outputs = tuple(name + t[len(operator.name) :] for t in operator.outputs)
        specs = (self.short.values[t] for t in operator.outputs)
        self.values.update(zip(outputs, specs, strict=True))
        path = self.whole.stacks[place.stack].module(place.block)
        return replace(
            operator,
            name=name,
            inputs=inputs,
            outputs=outputs,
            parameters=tuple(read[t] for t in operator.parameters),
            module=refs.module[1:] if refs.module.startswith("/") else path + refs.module,
            saved=tuple(
                Saved(name=moved(ref), bytes=saved.bytes)
                for ref, saved in zip(refs.saved, operator.saved, strict=True)
            ),
        )

    def _buffers(self) -> dict[str, TensorSpec]:
        """Registered ones in the model's order, then what the code holds elsewhere."""
        names = tuple(self.short.buffers)
        registered, rest = names[: len(self.whole.registered)], names[len(self.whole.registered) :]
        if registered != self.whole.registered:
            raise CannotExtendError("buffers in another order")
        return {**self.whole.buffers, **{name: self.short.buffers[name] for name in rest}}


class _Refs(NamedTuple):
    """What the operator of a block reads: names, and places as the second block sees them."""

    inputs: Sequence[str | _Place]
    saved: Sequence[str | _Place]
    module: str


def _counted(name: str) -> tuple[str, int]:
    """("add", 3) of "add_3"; 0 where there is no number."""
    found = _COUNTED.fullmatch(name)
    return (found[1], int(found[2])) if found else (name, 0)
