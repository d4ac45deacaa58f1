"""Where embedding tables should lie: over ranks and over their tiers of memory, with reasons.

`place_over_tiers` solves the problem that `costs` states and makes the answer plain data: a
`TablePlacement` and a tier for every piece, the time of every rank and its parts, what binds, and
for each table why it is split as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import cast

import numpy as np

from headway.documents import document
from headway.errors import NothingFits
from headway.planner.tables.choices import Assignment, Form, Held, Option, PlacementProblem
from headway.planner.tables.costs import TierMachine, tier_problem
from headway.planner.tables.demand import TableDemand, sent_bytes, travels
from headway.planner.tables.solve import SOLVE_SECONDS, Shortage, Solution, solve
from headway.plans.tables import TablePlacement, TableSplit, Travels, Way
from headway.units import format_bytes, format_seconds

FULL = 0.9
"""Of a tier: from there on it is said to be full."""


@document
class PlacedPiece:
    """A piece of a table on a rank.

    Attributes:
        columns: First, and one past the last.
        rows: How many.
        tier: Where its rows lie, but for the hot ones.
        hot_tier: Where those lie; as `tier`: there are none.
        hot_rows: The most frequent rows of the piece.
        bytes: With the optimiser's state, by tier.
        lookup: Seconds of reading and updating rows.
        exchange: Seconds of communication.
    """

    rank: int
    columns: tuple[int, int]
    rows: int
    tier: str
    hot_tier: str
    hot_rows: int = 0
    bytes: dict[str, float]
    lookup: float
    exchange: float


@document
class PlacedTable:
    """A table, and where it lies.

    Attributes:
        placement: What runs.
        way: See `plans.tables.Way`.
        pieces: By rank, ascending.
        bytes: Of all pieces.
        sent: Bytes that a rank would send in a step, in the mean, by what travels.
        why: In a sentence.
    """

    placement: TablePlacement
    way: str
    pieces: tuple[PlacedPiece, ...]
    bytes: float
    sent: dict[str, float]
    why: str

    @property
    def table(self) -> str:
        """The name of its parameter."""
        return self.placement.table

    @property
    def split(self) -> TableSplit:
        """What a plan says of it."""
        way = cast("Way", self.way)
        order = tuple(rank for parts in self.placement.owners for rank in parts)
        return TableSplit(
            tables=self.table,
            way=way,
            columns=len(self.placement.owners) if way in ("column", "grid") else 0,
            ranks=() if way == "copies" else order,
            travels=self.placement.travels,
            hot=self.placement.hot,
        )


@document
class RankLoad:
    """What a rank holds and does in a step.

    Attributes:
        lookup: Seconds of reading and updating rows, by tier.
        exchange: Seconds of communication, without latencies.
        used: Bytes by tier.
        capacity: Bytes by tier.
    """

    rank: int
    lookup: dict[str, float]
    exchange: float
    used: dict[str, float]
    capacity: dict[str, float]

    @property
    def seconds(self) -> float:
        """Of the rank in a step, without latencies."""
        return sum(self.lookup.values()) + self.exchange


@document
class TablesPlan:
    """Where all tables of a model lie.

    Attributes:
        samples: Of one rank.
        loads: By rank.
        latency: Seconds of a step that do not depend on what lies where.
        seconds: Of a step: the slowest rank, and the latency.
        bound: No placement takes fewer seconds.
        binds: What would have to be faster or larger for a shorter step, one sentence each.
    """

    samples: int
    tables: tuple[PlacedTable, ...]
    loads: tuple[RankLoad, ...]
    latency: float
    seconds: float
    bound: float
    binds: tuple[str, ...]

    @property
    def splits(self) -> tuple[TableSplit, ...]:
        """`split.tables` of a plan, with explicit ranks."""
        return tuple(table.split for table in self.tables)

    @property
    def gap(self) -> float:
        """Of `seconds`, what a better placement could save at most."""
        return max(0.0, 1.0 - self.bound / self.seconds) if self.seconds > 0 else 0.0

    @property
    def device_bytes(self) -> float:
        """Of the device's own memory, on the rank with most."""
        return max(next(iter(load.used.values())) for load in self.loads)


def place_over_tiers(
    demands: Sequence[TableDemand],
    machine: TierMachine,
    *,
    samples: int,
    seconds: float = SOLVE_SECONDS,
) -> TablesPlan:
    """The placement of the shortest step.

    Args:
        samples: Of one rank.
        seconds: Of searching; see `TablesPlan.gap` for what that may have cost.

    Raises:
        NothingFits: The tables do not fit; what is missing, in which tier, on which ranks.
    """
    problem = tier_problem(demands, machine, samples=samples)
    found = solve(problem, seconds=seconds)
    if isinstance(found, Shortage):
        raise _shortage_error(demands, machine, found)
    return _Report(demands, machine, problem, found, samples).plan


class _Report:
    """A solution in words and numbers."""

    def __init__(
        self,
        demands: Sequence[TableDemand],
        machine: TierMachine,
        problem: PlacementProblem,
        solution: Solution,
        samples: int,
    ) -> None:
        self.demands, self.machine, self.problem = demands, machine, problem
        self.solution, self.samples = solution, samples
        self.held: Assignment = solution.assignment

    @cached_property
    def plan(self) -> TablesPlan:
        tables = tuple(self._table(number) for number in range(len(self.demands)))
        loads = tuple(self._load(rank) for rank in range(self.machine.ranks))
        return TablesPlan(
            samples=self.samples,
            tables=tables,
            loads=loads,
            latency=self.problem.latency(self.held),
            seconds=self.solution.seconds,
            bound=self.solution.bound,
            binds=tuple(self._binding(loads)),
        )

    def _forms(self) -> Iterator[tuple[int, int, Form]]:
        """(table, rank, form) of every piece."""
        for number, held in enumerate(self.held):
            option = self.problem.options[number][held.option]
            for rank, form in held.forms.items():
                yield number, rank, option.forms[form]

    def _load(self, rank: int) -> RankLoad:
        lookup, used = np.zeros(len(self.machine.tiers)), np.zeros(len(self.machine.tiers))
        exchange = 0.0
        for _, own, form in self._forms():
            if own == rank and form.lookups is not None:
                lookup += form.lookups[:, rank]
                used += form.bytes[:, rank]
                exchange += form.exchange
        return RankLoad(
            rank=rank,
            lookup=self._by_tier(lookup),
            exchange=exchange,
            used=self._by_tier(used),
            capacity=self._by_tier(self.machine.capacity[:, rank]),
        )

    def _by_tier(self, values: Sequence[float] | np.ndarray) -> dict[str, float]:
        return {name: float(v) for name, v in zip(self.machine.tiers, values, strict=True)}

    def _table(self, number: int) -> PlacedTable:
        demand, held = self.demands[number], self.held[number]
        option = self.problem.options[number][held.option]
        owners = _owners(option, held)
        placement = TablePlacement(
            table=demand.table,
            rows=demand.rows,
            columns=demand.columns,
            owners=owners,
            cut="none" if option.way == "copies" else "hash" if option.way == "hash" else "range",
            travels=self._travels(number, option),
        )
        pieces = tuple(
            self._piece(placement, rank, option.forms[form]) for rank, form in held.forms.items()
        )
        sent = dict(sent_bytes(demand, self.machine.ranks, self.samples))
        return PlacedTable(
            placement=replace(placement, hot=self._in_memory(held, option, pieces)),
            way=option.way,
            pieces=pieces,
            bytes=sum(sum(piece.bytes.values()) for piece in pieces),
            sent=sent,
            why=self._why(number, option, held, sent),
        )

    def _travels(self, number: int, option: Option) -> Travels:
        if option.way == "copies":
            return "auto"
        return travels(self.demands[number], self.machine.ranks, self.samples, option.parts)

    def _piece(self, placement: TablePlacement, rank: int, form: Form) -> PlacedPiece:
        place = placement.piece_of(rank)
        assert place is not None
        columns = placement.column_range(place[0])
        rows = placement.rows
        if placement.cut == "range":
            rows = len(placement.row_range(*place))
        elif placement.cut == "hash":
            rows = -(-rows // len(placement.owners[place[0]]))
        assert form.lookups is not None
        return PlacedPiece(
            rank=rank,
            columns=(columns.start, columns.stop),
            rows=rows,
            tier=self.machine.tiers[form.slow],
            hot_tier=self.machine.tiers[form.fast],
            hot_rows=min(form.hot, rows),
            bytes={
                name: float(size)
                for name, size in zip(self.machine.tiers, form.bytes[:, rank], strict=True)
                if size
            },
            lookup=float(form.lookups[:, rank].sum()),
            exchange=form.exchange,
        )

    def _in_memory(self, held: Held, option: Option, pieces: Sequence[PlacedPiece]) -> str:
        """`TableSplit.hot`: rows of a piece that lie in no mapped file; "": all of every piece."""
        rows = []
        for piece, number in zip(pieces, held.forms.values(), strict=True):
            form = option.forms[number]
            if self.machine.mapped[form.slow]:
                rows.append(0 if self.machine.mapped[form.fast] else piece.hot_rows)
        return f"{min(rows)} rows" if rows else ""

    def _why(self, number: int, option: Option, held: Held, sent: Mapping[str, float]) -> str:
        demand, ranks = self.demands[number], self.machine.ranks
        words = {name: format_bytes(size) for name, size in sent.items()}
        rows = self._travels(number, option) == "rows"
        if ranks == 1:
            return "there is one rank" + self._why_tier(number, option, held)
        if option.way == "copies":
            least = min(sent["rows"], sent["table"])
            found = f"gradients of its rows are {words['copies']}; one owner would send "
            found += format_bytes(least)
            found += ", but look up for all" if sent["copies"] > least else ""
        elif option.parts == 1:
            found = "one owner" if option.way == "table" else self._why_not_whole(number)
            found += "; each range of columns" if option.way == "column" else ""
            kinds = ("rows", "table") if rows else ("table", "rows")
            named = {"rows": "rows", "table": "vectors"}
            found += f" sends {named[kinds[0]]}, {words[kinds[0]]} of all"
            if demand.pooled:
                found += f" ({named[kinds[1]]}: {words[kinds[1]]}, sums of parts: {words['sums']})"
        else:
            found = self._why_not_whole(number)
            if not demand.pooled:
                found += f"; rows travel, {words['rows']}, as they are not summed"
            else:
                first, second = ("rows", "sums") if rows else ("sums", "rows")
                found += (
                    f"; {first} are {words[first]}, {second} {words[second]}: "
                    f"{demand.bag:.3g} lookups of a sample, {ranks} ranks"
                )
            if option.way == "hash":
                found += "; frequent rows lie side by side, a hash deals them evenly"
        return found + self._why_tier(number, option, held)

    def _why_not_whole(self, number: int) -> str:
        """Why no rank alone has a table that is in pieces."""
        whole = next((o for o in self.problem.options[number] if o.way == "table"), None)
        if whole is None:
            return "it is cut"
        room = [
            form for form in whole.forms if (form.bytes <= self.machine.capacity).all(axis=0).any()
        ]
        size = format_bytes(self.demands[number].bytes)
        if not room:
            return f"{size} fit no rank"
        alone = min(float(form.seconds.min()) for form in room)
        if alone > self.solution.seconds:
            return f"one owner alone would take {format_seconds(alone)}"
        return f"one owner of {size} would be fuller or slower than the others"

    def _why_tier(self, number: int, option: Option, held: Held) -> str:
        forms = {option.forms[form].hot: option.forms[form] for form in held.forms.values()}
        split = next((form for form in forms.values() if form.fast != form.slow), None)
        if split is not None:
            share = self.demands[number].accesses.share(split.hot * option.parts)
            fast, slow = (self.machine.tiers[n] for n in (split.fast, split.slow))
            return f"; {share:.0%} of lookups are of its hot rows ({fast}), the rest lies in {slow}"
        lowest = {form.slow for form in forms.values()}
        if max(lowest) > 0:
            return f"; no room before {self.machine.tiers[max(lowest)]}"
        return ""

    def _binding(self, loads: Sequence[RankLoad]) -> Iterator[str]:
        slowest = max(loads, key=lambda load: load.seconds)
        if slowest.seconds > 0:
            parts = {f"rows in {name}": part for name, part in slowest.lookup.items()}
            parts["exchange"] = slowest.exchange
            said = ", ".join(
                f"{name} {part / slowest.seconds:.0%}"
                for name, part in sorted(parts.items(), key=lambda item: -item[1])
                if part >= 0.005 * slowest.seconds
            )
            yield f"rank {slowest.rank} is the slowest, {format_seconds(slowest.seconds)}: {said}"
        if slowest.exchange > 0.5 * slowest.seconds:
            level = self.machine.network.levels[-1]
            joined = [one for one in self.machine.network.levels if one.width >= self.machine.ranks]
            yield f"the links of level {(joined or [level])[0].name} bind"
        for name in self.machine.tiers:
            full = [
                load.rank
                for load in loads
                if load.capacity[name] and load.used[name] >= FULL * load.capacity[name]
            ]
            if full:
                ranks = ", ".join(map(str, full)) if len(full) < len(loads) else "all ranks"
                yield f"{name} is full on {'rank ' if len(full) == 1 else ''}{ranks}"


def _owners(option: Option, held: Held) -> tuple[tuple[int, ...], ...]:
    """Of ranges of columns, then parts of rows; ranks in ascending order."""
    ranks = sorted(held.forms)
    if option.way == "copies":
        return (tuple(ranks),)
    size = len(ranks) // option.columns
    return tuple(tuple(ranks[n * size : (n + 1) * size]) for n in range(option.columns))


def _shortage_error(
    demands: Sequence[TableDemand], machine: TierMachine, shortage: Shortage
) -> NothingFits:
    total = sum(demand.bytes for demand in demands)
    places = [
        (name, rank, float(shortage.missing[tier, rank]))
        for tier, name in enumerate(machine.tiers)
        for rank in range(machine.ranks)
        if shortage.missing[tier, rank] > 0
    ]
    missing = sum(size for _, _, size in places)
    problems = [
        f"rank {rank}: {format_bytes(size)} more of {name} needed; it has "
        f"{format_bytes(machine.capacity[machine.tiers.index(name), rank])}"
        for name, rank, size in places
    ]
    last = machine.tiers[-1]
    state = sum(d.bytes - d.rows * d.columns * d.itemsize for d in demands)
    ways = [f"give each rank {format_bytes(missing / machine.ranks)} more of {last}"]
    per_rank = float(machine.capacity.sum(axis=0).max())
    if per_rank > 0:
        ways.append(f"take {int(np.ceil(missing / per_rank))} more ranks")
    if state >= missing:
        ways.append(
            f"take an optimiser with less state than {format_bytes(state)} (row-wise Adagrad)"
        )
    if not any(machine.mapped):
        ways.append("describe a tier behind the memory, such as NVMe (`tiers` in cluster.toml)")
    return NothingFits(
        f"the tables do not fit: {format_bytes(total)} with the optimiser's state, and "
        f"{format_bytes(missing)} of memory are missing",
        problems=problems,
        fix=f"The nearest remedies: {'; '.join(ways)}.",
    )
