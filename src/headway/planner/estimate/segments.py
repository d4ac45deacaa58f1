"""What every interval of a model's units costs, each distinct block solved once.

For each structure of unit, each placement of what enters and leaves it, and each of J prices (of
bytes in seconds) the Pareto solver finds the cheapest strategy, including re-layouts. An interval
is the cheapest way through its units: a product of matrices in min-plus algebra. The J strategies
of an interval are points of its lower hull.

A run of equal units is joined only until it repeats itself: where one more unit adds the same
amounts to every strategy, so does each further one (P U = a P implies P U^n = a^n P; Baccelli et
al. 1992, "Synchronization and Linearity", section 3.7).

Sources: Cai et al. 2022 (TensorOpt), section 4 and FT-LDP; Zheng et al. 2022 (Alpa), stages as
intervals.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import groupby
from typing import NamedTuple

import numpy as np

from headway.cost.device import Array
from headway.graph.model_graph import Operator
from headway.graph.sharding_rules import Rule
from headway.planner.estimate.operators import (
    PARTS,
    OperatorSetting,
    gradient_placement,
    legal_rules,
    operator_cost,
)
from headway.planner.estimate.stage_cut import IntervalClasses, LayerUnit
from headway.planner.estimate.transient_memory import TransientMemory
from headway.planner.pareto.choice_graph import (
    BUDGET,
    ChoiceGraph,
    EliminationOrder,
    all_choices,
    make_cost_tables,
    order_eliminations,
)
from headway.planner.pareto.elimination import find_weighted_bounds

# What a further unit adds may differ by this share, as sums of floats do.
_SAME = 1e-12


@dataclass(eq=False)
class UnitRun:
    """Further units behind a chain, of the kind of its last one.

    Attributes:
        step: (2, J, len(PARTS)): what each of them adds.
        picks: (2, J, A, B): the placement in front of it.
    """

    step: Array
    picks: np.ndarray


Longer = tuple[tuple[UnitRun, int], ...]
"""How many further units the runs on the way have."""


@dataclass(eq=False)
class UnitChain:
    """A row of units.

    Attributes:
        rows: (2, J, A, B, len(PARTS)): without and with recomputation, by price, by placement at
            both ends.
        last: Kind of the last unit.
        before: The row without it; None: it is alone.
        picks: (2, J, A, B): the placement in front of it.
        run: Units of the same kind that may follow; None: not known, or each adds something else.
        behind: With one more unit, by its kind.
    """

    rows: Array
    last: int
    before: UnitChain | None = None
    picks: np.ndarray | None = None
    run: UnitRun | None = None
    behind: dict[int, UnitChain] = field(default_factory=dict)


class UnitChains:
    """The rows of one model under one setting."""

    def __init__(self, weights: Array, unit: Callable[[int], Array]) -> None:
        self.weights = weights
        self._unit = unit
        self._first: dict[int, UnitChain] = {}
        self._priced: dict[int, Array] = {}

    def first(self, kind: int) -> UnitChain:
        """A unit alone."""
        if kind not in self._first:
            self._first[kind] = UnitChain(self._unit(kind), kind)
        return self._first[kind]

    def of(self, kinds: Sequence[int]) -> tuple[UnitChain, Longer]:
        """A row of units of these kinds, one or more."""
        chain = self.first(kinds[0])
        runs: Longer = ()
        for number, (kind, alike) in enumerate(groupby(kinds)):
            left = len(list(alike)) - (number == 0)
            while left:
                before = chain
                chain, runs = self.longer(chain, runs, kind)
                left -= 1
                if chain is before:  # nothing new comes
                    *others, (run, units) = runs
                    runs, left = (*others, (run, units + left)), 0
        return chain, runs

    def longer(self, chain: UnitChain, runs: Longer, kind: int) -> tuple[UnitChain, Longer]:
        """With one more unit."""
        if self.missing(chain, kind):
            self.join([(chain, kind)])
        if chain.run is None or kind != chain.last:
            return chain.behind[kind], runs
        if runs and runs[-1][0] is chain.run:
            return chain, (*runs[:-1], (chain.run, runs[-1][1] + 1))
        return chain, (*runs, (chain.run, 1))

    @staticmethod
    def missing(chain: UnitChain, kind: int) -> bool:
        """Whether `join` has not seen this unit behind this chain."""
        return kind not in chain.behind and (chain.run is None or kind != chain.last)

    def join(self, pairs: Iterable[tuple[UnitChain, int]]) -> None:
        """Chains and units behind them, those of one kind and shape at once."""
        # One product of arrays for all chains of a shape: there are thousands of them.
        groups: dict[tuple[int, tuple[int, ...]], list[UnitChain]] = {}
        for chain, kind in pairs:
            groups.setdefault((kind, chain.rows.shape), []).append(chain)
        for (kind, _), chains in groups.items():
            right = self._unit(kind)
            if kind not in self._priced:
                self._priced[kind] = _price(right, self.weights)
            left = np.stack([chain.rows for chain in chains])
            rows, picks = min_plus_product(left, right, self.weights, self._priced[kind])
            # Placements are few: int8 keeps the back-pointers of thousands of chains small.
            for chain, own, between in zip(chains, rows, picks.astype(np.int8), strict=True):
                _follow(chain, UnitChain(own, kind, chain, between))


def _follow(chain: UnitChain, more: UnitChain) -> None:
    if more.last == chain.last and more.rows.shape == chain.rows.shape:
        # A further unit that adds the same to every strategy starts a run, which is never joined
        # again.
        added = more.rows - chain.rows
        # One number for all placements at both ends, as P U = a P requires.
        step = added[:, :, :1, :1]
        if (np.abs(added - step) <= _SAME * np.abs(more.rows)).all():
            assert more.picks is not None
            chain.run = UnitRun(step[:, :, 0, 0].copy(), more.picks)
            return
    chain.behind[more.last] = more


def rows_of(chain: UnitChain, runs: Longer) -> Array:
    """(2, J, A, B, len(PARTS)) of a chain with longer runs."""
    found = chain.rows
    for run, number in runs:
        found = found + number * run.step[:, :, None, None]
    return found


def path(
    chain: UnitChain, runs: Longer, again: int, price: int, ends: tuple[int, int]
) -> tuple[tuple[int, int], ...]:
    """Of every unit of a chain the placements at its entry and exit, as numbers."""
    entry, exit_ = ends
    states = []
    further = {id(run): number for run, number in runs}
    here: UnitChain | None = chain
    while here is not None:
        fronts = [] if here.picks is None else [here.picks]
        if here.run is not None:
            # The units of a run lie behind the chain that they continue, so they are walked first.
            fronts = [here.run.picks] * further.get(id(here.run), 0) + fronts
        for front in fronts:
            between = int(front[again, price, entry, exit_])
            states.append((between, exit_))
            exit_ = between
        here = here.before
    return ((entry, exit_), *reversed(states))


def _price(rows: Array, weights: Array) -> Array:
    """(..., 2, J, A, B): what strategies (..., 2, J, A, B, 5) cost."""
    return np.asarray(np.einsum("...rjabp,rjp->...rjab", rows, weights))


def min_plus_product(
    left: Array, right: Array, weights: Array, other: Array | None = None
) -> tuple[Array, np.ndarray]:
    """One after the other, by the cheapest placement between them, (..., 2, J, A, C, 5) and picks.

    Args:
        left: There may be several in front, (..., 2, J, A, B, 5).
        other: `_price` of those behind.
    """
    # Without a tensor axis there is one placement, hence nothing to choose.
    if left.shape[-2] == 1 and right.shape[-3] == 1:
        sums = left[..., :, 0, None, :] + right[..., None, 0, :, :]
        return sums, np.zeros(sums.shape[:-1], dtype=np.int64)
    priced = _price(left, weights)
    other = _price(right, weights) if other is None else other
    best = priced[..., :, 0, None] + other[..., None, 0, :]
    picks = np.zeros(best.shape, dtype=np.int64)
    for between in range(1, left.shape[-2]):
        sums = priced[..., :, between, None] + other[..., None, between, :]
        # Strictly less: of equal placements the first one stays.
        picks[sums < best] = between
        np.minimum(best, sums, out=best)
    one, two = _lines(picks.shape[:-1], left.shape[-2], right.shape[:-1])
    # Rows are taken by their flat numbers: one take instead of an index by five arrays.
    return _taken(left, one + picks) + _taken(right, two + picks * right.shape[3]), picks


@lru_cache(maxsize=256)
def _lines(
    shape: tuple[int, ...], between: int, right: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """The lines of both tables where the placement between them is the first one."""
    one = np.arange(math.prod(shape)).reshape(*shape, 1) * between
    two = np.arange(math.prod(right[:2])).reshape(*right[:2], 1, 1) * right[2] * right[3]
    return one, two + np.arange(right[3])


def _taken(table: Array, lines: np.ndarray) -> Array:
    return table.reshape(-1, table.shape[-1]).take(lines, axis=0)


ENDS = ("<entry", "exit>")
"""Nodes of what enters and leaves a unit."""


@dataclass(frozen=True)
class UnitStrategies:
    """The strategies of one structure.

    Attributes:
        rows: (2, J, A, B, len(PARTS)): without and with recomputation, by price, by placement at
            the entry and the exit.
        strategies: The choice of each operator, (A, B, 2 J).
    """

    rows: Array
    strategies: Mapping[str, np.ndarray]
    rules: Mapping[str, tuple[Rule, ...]]
    graph: ChoiceGraph


def solve_unit(setting: OperatorSetting, unit: LayerUnit, weights: Array) -> UnitStrategies:
    """All pairs of placements at the ends, all prices at once."""
    made = _Graph(setting, unit)
    graph = made.graph
    prices = weights.reshape(-1, len(PARTS))
    found = _choices(graph, prices) if setting.tensor > 1 else {}  # else there is no choice
    entries, exits = (
        setting.placements(tensor) if tensor else ("",) for tensor in (unit.entry, unit.exit)
    )
    whole = (len(entries), len(exits), len(prices))
    chosen = found | {
        ENDS[0]: np.arange(len(entries))[:, None, None],
        ENDS[1]: np.arange(len(exits))[:, None],
    }
    none = np.zeros((1, 1, 1), dtype=np.int64)
    picks = {name: chosen.get(name, none) for name in graph.nodes}
    rows = np.broadcast_to(graph.evaluate(picks), (*whole, len(PARTS)))
    rows = np.moveaxis(rows, 2, 0).reshape(*weights.shape[:2], *whole[:2], len(PARTS)).copy()
    if unit.entry:
        # With recomputation a unit keeps only what enters it, as it lies on the tensor axis.
        parts = np.array([setting.tensor if state.startswith("S") else 1 for state in entries])
        rows[1, ..., 4] = (setting.bytes_of(unit.entry) / parts)[:, None]
    else:
        # The first unit keeps nothing: the samples are there anyway.
        rows[1, ..., 4] = 0.0
    strategies = {name: np.broadcast_to(pick, whole) for name, pick in picks.items()}
    return UnitStrategies(rows, strategies, made.rules, graph)


def _choices(graph: ChoiceGraph, prices: Array) -> dict[str, np.ndarray]:
    """Of every node for each pair of placements at the ends and each price."""
    network = make_cost_tables(graph, all_choices(graph))
    scopes = [tuple(name for name in scope if name not in ENDS) for scope in network.scopes]
    sizes = {name: size for name, size in network.sizes.items() if name not in ENDS}
    order = _order(tuple(scopes), tuple(sizes.items()))
    return find_weighted_bounds(network, order, prices, whole=False, given=ENDS).choices


@lru_cache(maxsize=512)
def _order(
    scopes: tuple[tuple[str, ...], ...], sizes: tuple[tuple[str, int], ...]
) -> EliminationOrder:
    return order_eliminations(scopes, dict(sizes), BUDGET)


class _Graph:
    def __init__(self, setting: OperatorSetting, unit: LayerUnit) -> None:
        self.setting = setting
        self.unit = unit
        graph = setting.work.graph
        self.operators = graph.operators[unit.start : unit.stop]
        self.rules = {operator.name: legal_rules(setting, operator) for operator in self.operators}
        self.made = {tensor: o for o in self.operators for tensor in o.outputs}
        self.states: dict[str, tuple[tuple[str, str], ...]] = {}
        self.names: dict[str, str] = {}
        self.nodes: dict[str, Array] = {}
        self.edges: dict[tuple[str, str], Array] = {}
        self._tensors()
        self._operators()
        self.graph = ChoiceGraph(PARTS, self.nodes, self.edges)

    def _tensors(self) -> None:
        uses: dict[str, int] = {}
        for operator in self.operators:
            for tensor in dict.fromkeys(operator.inputs):
                uses[tensor] = uses.get(tensor, 0) + 1
        shared = [t for t, n in uses.items() if n > 1 and t in self.made]
        ends = {self.unit.entry: ENDS[0], self.unit.exit: ENDS[1]}
        for tensor in dict.fromkeys([self.unit.entry, self.unit.exit, *shared]):
            # What every rank makes itself needs no re-layout and no choice.
            if not tensor or tensor in self.setting.work.fixed:
                continue
            states = [(place, place) for place in self.setting.placements(tensor)]
            if tensor not in ends and self.setting.tensor > 1:
                states.append(("R", "P"))  # gradients are added up before they are summed
            self.names[tensor] = ends.get(tensor, f"={tensor}")
            self.states[tensor] = tuple(states)
            self.nodes[self.names[tensor]] = np.zeros((len(states), len(PARTS)))

    def _operators(self) -> None:
        counted: set[str] = set()
        graph = self.setting.work.graph
        for operator in self.operators:
            names = (saved.name for saved in operator.saved)
            own = [name for name in names if name not in graph.held and name not in counted]
            # A storage that several operators save is kept once.
            counted.update(own)
            self.nodes[operator.name] = np.array(
                [
                    operator_cost(self.setting, operator, r, tuple(own))
                    for r in self.rules[operator.name]
                ]
            )
            for number, tensor in enumerate(operator.inputs):
                self._enters(operator, number, tensor)
        for tensor, name in self.names.items():
            if self.setting.tensor > 1 and tensor in self.made:
                self._edge(
                    self.made[tensor].name,
                    name,
                    tensor,
                    self._made_as(tensor),
                    list(self.states[tensor]),
                )

    def _made_as(self, tensor: str) -> list[tuple[str, str]]:
        """How each choice of its maker lays a tensor, and wants its gradient."""
        maker = self.made[tensor]
        place = maker.outputs.index(tensor)
        lies = (rule.outputs[place] for rule in self.rules[maker.name])
        return [(placement, gradient_placement(placement)) for placement in lies]

    def _enters(self, operator: Operator, number: int, tensor: str) -> None:
        if tensor in self.setting.work.fixed or self.setting.tensor == 1:
            return
        targets = [(r.inputs[number], r.gradients[number]) for r in self.rules[operator.name]]
        if tensor in self.names:
            states = list(self.states[tensor])
            self._edge(self.names[tensor], operator.name, tensor, states, targets)
        elif tensor in self.made:
            maker = self.made[tensor].name
            self._edge(maker, operator.name, tensor, self._made_as(tensor), targets)

    def _edge(
        self,
        source: str,
        target: str,
        tensor: str,
        sources: list[tuple[str, str]],
        targets: list[tuple[str, str]],
    ) -> None:
        costs = np.zeros((len(sources), len(targets), len(PARTS)))
        # Only tensors of floating point have gradients, hence a re-layout in backward.
        both = 1 + self.setting.work.graph.tensors[tensor].floating
        size = self.setting.bytes_of(tensor)
        found = self.setting.relayout.table(tuple(sources), tuple(targets), size)
        costs[..., :both] = found[..., :both]
        # An operator may take several tensors of one maker: parallel edges are summed here.
        before = self.edges.get((source, target))
        self.edges[source, target] = costs if before is None else before + costs


# Room is counted so much too large, which is more than sums of floats are off.
ROUNDING = 1e-9


class StageCapacity(NamedTuple):
    """What units of each kind take at least; (kinds, 1) or (2, kinds, 1): without and with
    recomputation.

    A stage with c units of one kind takes at least c times the least seconds of such a unit, and
    holds at least c times its least bytes. If the room of all stages together is less than the
    units that there are, no plan is possible, and none needs to be cut.

    Attributes:
        params: Bytes of parameters of a device.
        kept: Bytes that a micro-batch keeps, without what the unit before keeps, too.
        peak: Bytes of one micro-batch at the fullest moment.
        seconds: Of a micro-batch.
        ahead: Share of the forward pass in the seconds of a stage, at most.
    """

    counts: np.ndarray
    params: Array
    kept: Array
    peak: Array
    seconds: Array
    ahead: float
    kinds: tuple[int, ...]

    @property
    def least(self) -> dict[int, float]:
        """Seconds of a micro-batch by kind."""
        return dict(zip(self.kinds, self.seconds.min(axis=0)[:, 0].tolist(), strict=True))

    @property
    def whole(self) -> Array:
        """(kinds, 1): least seconds of all units of a kind together."""
        return np.asarray(self.counts * self.seconds.min(axis=0))


BYTE_PRICES = (0.0, 0.03, 0.1, 0.3, 1.0, 3.0, 30.0, 1e7)
"""Of a whole device's memory, in seconds of a micro-batch of the whole model."""
SAVED_WEIGHTS = (1.0, 8.0)
"""Kept activations against parameters: micro-batches under way per 16 bytes of state."""
STEPS = (1.0, 32.0)
"""Micro-batches over which a step's own seconds are spread."""


class IntervalStrategies(NamedTuple):
    """Strategies of intervals, each (2, classes, K): without and with recomputation.

    Attributes:
        forward: Seconds of a micro-batch.
        backward: The same, with what is computed again.
        step: Seconds of a step on the tensor axis.
        params: Bytes of parameters of a device, each counted once.
        kept: Bytes that a micro-batch keeps, each counted once.
        more: Transient bytes, as `TransientMemory.beside` has them.
        prices: (K,) numbers of the prices, those that give strategies of their own.
    """

    forward: Array
    backward: Array
    step: Array
    params: Array
    kept: Array
    more: Array
    prices: np.ndarray

    def first(self, classes: int) -> IntervalStrategies:
        """Of the first classes."""
        if classes == self.params.shape[1]:
            return self
        return IntervalStrategies._make([*(part[:, :classes] for part in self[:-1]), self.prices])


class _Group(NamedTuple):
    """Classes of intervals that are one chain: `rows` of it, (2, J, len(PARTS)) what a further
    unit of each of its runs adds, the classes, and (members, runs) how many units those have."""

    rows: Array
    steps: list[Array]
    members: np.ndarray
    counts: Array


@dataclass(frozen=True)
class SegmentTables:
    """What all intervals of a model cost under one `OperatorSetting`."""

    setting: OperatorSetting
    row: tuple[LayerUnit, ...]
    classes: IntervalClasses
    transients: TransientMemory
    scale: float
    _places: dict[int, tuple[UnitChain, Longer]] = field(default_factory=dict)
    _grouped: dict[int, list[_Group]] = field(default_factory=dict)
    _solved: dict[int, UnitStrategies] = field(default_factory=dict)
    _cells: dict[str, IntervalStrategies] = field(default_factory=dict)
    _least: list[IntervalStrategies] = field(default_factory=list)
    _least_of: dict[int, float] = field(default_factory=dict)
    _crossing: dict[str, Array] = field(default_factory=dict)
    _states: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _paths: dict[tuple[int, ...], tuple[tuple[int, int], ...]] = field(default_factory=dict)

    @cached_property
    def weights(self) -> Array:
        """(2, J, 5): prices of `PARTS`."""
        memory = self.setting.machine.device.memory
        lines = []
        for price in BYTE_PRICES:
            for saved in SAVED_WEIGHTS if price else (0.0,):
                for steps in STEPS:
                    each = price * self.scale / memory
                    lines.append((1.0, 1.0, 1.0 / steps, 8.0 * each, saved * each))
        # 30 prices: two without a price of bytes, and 7 x 2 x 2 with one.
        plain = np.array(lines)
        # With recomputation forward counts twice, and what is kept inside of a unit not.
        again = plain * np.array([2.0, 1.0, 1.0, 1.0, 0.0])
        return np.stack([plain, again])

    def solved(self, kind: int) -> UnitStrategies:
        if kind not in self._solved:
            unit = next(unit for unit in self.row if unit.kind == kind)
            self._solved[kind] = solve_unit(self.setting, unit, self.weights)
        return self._solved[kind]

    @cached_property
    def kinds(self) -> tuple[np.ndarray, Array]:
        """(kinds,): how many units there are of each, and its least seconds of a micro-batch."""
        counts = Counter(unit.kind for unit in self.row)
        least = [float(self.solved(k).rows[0, ..., :2].sum(axis=-1).min()) for k in counts]
        return np.array(list(counts.values())), np.array(least)

    @cached_property
    def room(self) -> StageCapacity:
        counts, _ = self.kinds
        kinds = list(dict.fromkeys(unit.kind for unit in self.row))
        moments, part = self.transients.units(self.setting), self.setting.tensor
        entries = {unit.kind: unit.entry for unit in self.row}
        lines = []
        ahead = 0.0
        for kind in kinds:
            rows = self.solved(kind).rows.reshape(2, -1, 5)
            forward, backward = rows[..., 0], rows[..., 1] + np.arange(2.0)[:, None] * rows[..., 0]
            kept, more, again, *_ = moments[kind]
            entry = self.setting.bytes_of(entries[kind])
            twice = self.transients.twice(kind, self.setting)
            least = rows[..., 4].min(axis=1)
            seconds = (forward + backward).min(axis=1)
            lines.append(
                [
                    *(rows[..., 3].min(),) * 2,
                    *(max(least[0] - twice, 0.0), least[1]),
                    *((kept + more) / part, max(entry, again) / part),
                    *seconds,
                ]
            )
            both = forward + backward
            ahead = max(ahead, float(np.divide(forward, both, out=0 * both, where=both > 0).max()))
        params, kept_, peak, seconds_ = np.array(lines).T.reshape(4, 2, len(kinds), 1)
        return StageCapacity(counts[:, None], params[0], kept_, peak, seconds_, ahead, tuple(kinds))

    def states(self, tensor: str) -> tuple[str, ...]:
        """Placements of what crosses a border of units."""
        if tensor not in self._states:
            self._states[tensor] = self.setting.placements(tensor) if tensor else ("",)
        return self._states[tensor]

    @cached_property
    def chains(self) -> UnitChains:
        return UnitChains(self.weights, lambda kind: self.solved(kind).rows)

    def interval(self, number: int) -> Array:
        """(2, J, A, B, len(PARTS)) of a class of intervals."""
        return rows_of(*self._place_of(number))

    def _place_of(self, number: int) -> tuple[UnitChain, Longer]:
        """The chain of a class, and how much longer its runs are."""
        if number not in self._places:
            before, last = self.classes.before[number], self.classes.last[number]
            if before < 0:
                self._places[number] = self.chains.first(last), ()
            elif before in self._places:
                self._places[number] = self.chains.longer(*self._places[before], last)
            else:
                start, stop = self.classes.examples[number]
                self._places[number] = self.chains.of([u.kind for u in self.row[start:stop]])
        return self._places[number]

    def _groups(self, classes: int) -> list[_Group]:
        """The first classes, those of one chain together."""
        if classes not in self._grouped:
            groups: dict[tuple[int, ...], list[int]] = {}
            self._join_all(classes)
            for number in range(classes):
                chain, runs = self._place_of(number)
                # Chains and runs are shared: classes with the same ones differ only in how long the
                # runs are.
                groups.setdefault((id(chain), *(id(run) for run, _ in runs)), []).append(number)
            found = []
            for members in groups.values():
                places = [self._places[number] for number in members]
                chain, runs = places[0]
                counts = np.array([[n for _, n in runs] for _, runs in places], dtype=float)
                steps = [run.step for run, _ in runs]
                found.append(_Group(chain.rows, steps, np.array(members), counts))
            self._grouped[classes] = found
        return self._grouped[classes]

    def _join_all(self, classes: int) -> None:
        """Joins the units of the first classes, those of one length at once."""
        before, last = self.classes.before, self.classes.last
        for low, high in self.classes.lengths:
            if low >= classes:
                break
            pairs = {}
            for number in range(low, high):
                if number not in self._places and before[number] >= 0:
                    chain, _ = self._place_of(before[number])
                    if self.chains.missing(chain, last[number]):
                        # Classes that share a chain ask for the same product; it is joined once.
                        pairs[id(chain), last[number]] = chain, last[number]
            self.chains.join(pairs.values())

    @cached_property
    def transient(self) -> float:
        """Bytes that the largest unit keeps while it is computed again."""
        kinds = sorted({unit.kind for unit in self.row})
        return max(float(self.solved(kind).rows[0, 0, ..., 4].min()) for kind in kinds)

    def cells(self, border: str, doubled: Array) -> IntervalStrategies:
        """Of the first classes of intervals, with one placement at both ends.

        Args:
            border: The placement; whole where a tensor cannot have it. "": of the whole row only,
                as class 0.
            doubled: (classes,) bytes of parameters that are counted more than once; the same
                whoever asks.
        """
        # Tables of more classes serve those of fewer: shorter intervals come first.
        known = self._cells.get(border)
        if known is None or len(doubled) > known.params.shape[1]:
            known = self._cells[border] = self._cells_of(border, doubled)
        return known.first(len(doubled))

    def _cells_of(self, border: str, doubled: Array) -> IntervalStrategies:
        if not border:
            rows = self.interval(int(self.classes.of[0, -1]))[:, :, 0, 0]
            groups = [_Group(rows[:, :, None, None], [], np.zeros(1, dtype=int), np.zeros((1, 0)))]
        else:
            groups = self._groups(len(doubled))
        lines = []
        for group in groups:
            start, stop = self.classes.examples[group.members[0]] if border else (0, len(self.row))
            first, last = self.row[start].entry, self.row[stop - 1].exit
            entry, exit_ = self.place(first, border), self.place(last, border)
            lines.append(group.rows[:, :, entry, exit_])
        every = np.stack([*lines, *(step for group in groups for step in group.steps)])
        # Prices with equal strategies everywhere count once: all that follows grows with K.
        by_price = {every[:, :, j].tobytes(): j for j in reversed(range(every.shape[2]))}
        prices = np.sort(list(by_price.values()))
        parts = np.empty((every.shape[-1], 2, len(doubled), len(prices)))
        for group, line in zip(groups, lines, strict=True):
            own = line[:, prices].transpose(2, 0, 1)[:, :, None]
            for step, numbers in zip(group.steps, group.counts.T, strict=True):
                own = own + step[:, prices].transpose(2, 0, 1)[:, :, None] * numbers[:, None]
            parts[:, :, group.members] = own
        return self._laid_out(parts, doubled, prices)

    def least(self, doubled: Array) -> IntervalStrategies:
        """Of the whole row at all prices, with whole tensors at its ends; arguments as `cells`."""
        if not self._least:
            rows = self.interval(int(self.classes.of[0, -1]))[:, :, 0, 0]
            parts = np.ascontiguousarray(rows.transpose(2, 0, 1)[:, :, None])
            self._least.append(self._laid_out(parts, doubled, np.arange(parts.shape[-1])))
        return self._least[0]

    def _laid_out(self, parts: Array, doubled: Array, prices: np.ndarray) -> IntervalStrategies:
        """From (5, 2, classes, K)."""
        forward, backward, step, params, kept = parts
        # The second row is with recomputation, which runs the forward pass again.
        backward = backward + np.arange(2.0)[:, None, None] * forward
        params = np.maximum(params - (doubled / self.setting.tensor)[:, None], 0.0)
        several = len(doubled) > 1
        kept, more = self.transients.beside(self.setting, kept, several=several)
        return IntervalStrategies(forward, backward, step, params, kept, more, prices)

    @cached_property
    def borders(self) -> tuple[str, ...]:
        """Placements with which the borders of stages are tried."""
        length = len(self.row)
        found: set[str] = set()
        # Those of some cheapest way through the whole model at a quarter of it, at half and at
        # three quarters.
        for middle in sorted({length // 4, length // 2, 3 * length // 4} - {0}):
            left = self.interval(int(self.classes.of[0, middle]))
            right = self.interval(int(self.classes.of[middle, length]))
            _, picks = min_plus_product(left, right, self.weights)
            states = self.states(self.row[middle].entry)
            found.update(states[place] for place in np.unique(picks))
        return tuple(sorted(found))

    def least_of(self, units: int) -> float:
        """Seconds below which no interval of so many units, or more, takes for a micro-batch."""
        if units not in self._least_of:
            sums = np.concatenate([[0.0], np.cumsum([self.room.least[u.kind] for u in self.row])])
            self._least_of[units] = float((sums[units:] - sums[:-units]).min()) * (1.0 - ROUNDING)
        return self._least_of[units]

    def crossing(self, border: str) -> Array:
        """(L,): bytes of a device of what enters each unit, where it has this placement."""
        if border not in self._crossing:
            tensors = [unit.entry for unit in self.row]
            split = [border.startswith("S") and border in self.states(tensor) for tensor in tensors]
            whole = [self.setting.bytes_of(tensor) for tensor in tensors]
            self._crossing[border] = np.array(whole) / np.where(split, self.setting.tensor, 1)
        return self._crossing[border]

    def place(self, tensor: str, state: str) -> int:
        """The number of a placement of a border's tensor; 0, whole, where it has not got it."""
        states = self.states(tensor)
        return states.index(state) if state in states else 0

    def path(
        self, start: int, stop: int, again: int, price: int, border: str
    ) -> tuple[tuple[int, int], ...]:
        """Of every unit of an interval the placements at its entry and exit, as numbers, with this
        placement at both ends."""
        entry, exit_ = self.row[start].entry, self.row[stop - 1].exit
        ends = self.place(entry, border), self.place(exit_, border)
        number = int(self.classes.of[start, stop])
        key = (number, again, price, *ends)
        if key not in self._paths:
            self._paths[key] = path(*self._place_of(number), again, price, ends)
        return self._paths[key]


def make_segment_tables(
    setting: OperatorSetting,
    row: tuple[LayerUnit, ...],
    classes: IntervalClasses,
    transients: TransientMemory,
) -> SegmentTables:
    """Tables for a setting; `row`, `classes` and `transients` are those of its model."""
    flops = setting.work.graph.flops.total * setting.scale / setting.tensor
    rate = next(iter(setting.machine.device.peak.values()))
    return SegmentTables(setting, row, classes, transients, flops / rate)
