"""A training step as a task graph: schedule, messages, all-reduces and gathers on rank streams.

Each simulated rank has one compute stream, one stream for the collectives of each level of
links, and one for its messages to each other rank, or one shared stream for all that it sends
over a level. The table is followed cell by cell; cells are split where gradients leave or
parameters arrive while they run. Without all-reduces, ZeRO and faults the step is that of
`headway.schedule.timing`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from headway.schedule.pipeline_schedule import (
    BACKWARD_KINDS,
    WEIGHT_GRADIENT_KINDS,
    Action,
    ActionKind,
    PipelineSchedule,
)
from headway.schedule.stats import measure_schedule
from headway.schedule.timing import StageAllReduce, Wiring, make_wiring
from headway.simulator.engine import TaskProgram
from headway.simulator.ranks import Edge, EquivalentRanks, RepresentativeRanks, SimulatedRanks
from headway.simulator.table_work import TableStretch, merged
from headway.simulator.work import StageSegment, StageWork, StepWork


class CellChunk(NamedTuple):
    """A part of a cell.

    Attributes:
        share: Of the cell's seconds.
        leaves: Bytes of gradients that can be summed when it is done.
        enters: Bytes of parameters that must have been gathered before it.
    """

    share: float = 1.0
    leaves: float = 0.0
    enters: float = 0.0


UNCUT = (CellChunk(),)
ROUNDING = 1e-12


class CellPlan:
    """What the cells of a lowered table are, by their numbers in its wiring."""

    def __init__(self, work: StepWork) -> None:
        self.work = work
        self.table: PipelineSchedule = work.lowered()
        self.wiring: Wiring = make_wiring(self.table, work.costs, shared_links=True)
        self.last: dict[tuple[int, int], int] = {}
        self.all: dict[tuple[int, int], list[int]] = {}
        for place, row in enumerate(self.wiring.order):
            for cell in row:
                action = self.wiring.actions[cell]
                if action.kind in WEIGHT_GRADIENT_KINDS:
                    self.last[place, action.stage] = cell
                    self.all.setdefault((place, action.stage), []).append(cell)
        self._leaving = {cell for key in self.all for cell in self.rounds(*key)}
        self._cuts: dict[tuple[int, ActionKind, bool], tuple[CellChunk, ...]] = {}

    def stage(self, cell: int) -> StageWork:
        return self.work.stages[self.wiring.actions[cell].stage]

    def seconds(self, cell: int) -> tuple[float, float]:
        """Of a cell on sound devices; and of those, what are collectives of the tensor axis."""
        action = self.wiring.actions[cell]
        whole = (
            self.stage(cell).update if action.kind == ActionKind.STEP else self.wiring.seconds[cell]
        )
        return whole, self._collectives(action)

    def _collectives(self, action: Action) -> float:
        """Seconds of the tensor axis within an action."""
        forward, backward = self.work.stages[action.stage].collectives
        again = forward if action.stage in self.table.recompute else 0.0
        found = {
            ActionKind.FORWARD: forward,
            ActionKind.BACKWARD: again + backward,
            # Tables do not say where in a split backward the collectives are: half is in each part.
            ActionKind.INPUT_GRAD: again + backward / 2,
            ActionKind.WEIGHT_GRAD: backward / 2,
        }.get(action.kind, 0.0)
        return found / 2 if self.table.halves else found

    def memory(self, place: int, action: Action) -> tuple[float, float]:
        """What a cell takes at its start, and frees at its end; one update is of all stages."""
        part = 0.5 if self.table.halves else 1.0
        stage, kind = self.work.stages[action.stage], action.kind
        again = stage.again if action.stage in self.table.recompute else 0.0
        took = freed = 0.0
        if kind == ActionKind.FORWARD:
            took = stage.kept
        elif kind in BACKWARD_KINDS:
            # The pass for the inputs has computed the activations again; that for the weights finds
            # them.
            took = stage.transient + (again if kind != ActionKind.WEIGHT_GRAD else 0.0)
            freed = stage.transient + (stage.kept + again if kind in WEIGHT_GRADIENT_KINDS else 0.0)
        elif kind == ActionKind.STEP:
            hosted = {stage for _, stage in self.table.hosted(place)}
            both = sum(self.work.stages[stage].passing for stage in hosted)
            return both, both
        return took * part, freed * part

    def summed(self, stage: int) -> bool:
        """Whether several ranks hold a stage's gradients."""
        return self.work.grid.data * len(self.table.holders(stage)) > 1

    def rounds(self, place: int, stage: int) -> list[int]:
        """The cells behind which gradients of a stage are summed: the last one, or each."""
        if self.work.zero >= 2:
            # ZeRO 2 and 3 keep no whole gradients: those of every micro-batch are scattered.
            return self.all.get((place, stage), [])
        return [self.last[place, stage]] if (place, stage) in self.last else []

    def chunks(self, cell: int) -> tuple[CellChunk, ...]:
        """Of a cell."""
        action = self.wiring.actions[cell]
        if (
            action.kind not in BACKWARD_KINDS | {ActionKind.FORWARD}
            or not self.work.stages[action.stage].pieces
        ):
            return UNCUT
        leaving = cell in self._leaving
        # Cells of a stage and kind are cut alike, whatever their micro-batch.
        key = (action.stage, action.kind, leaving)
        if key not in self._cuts:
            self._cuts[key] = tuple(self._cut(cell, leaving)) or UNCUT
        return self._cuts[key]

    def _cut(self, cell: int, leaving: bool) -> Iterator[CellChunk]:
        work, action = self.work, self.wiring.actions[cell]
        stage, whole = work.stages[action.stage], self.wiring.seconds[cell]
        sharded = work.zero == 3 and work.grid.data > 1
        early = leaving and work.bucket is not None and work.sync != "post"
        if not whole or not (sharded or (early and self.summed(action.stage))):
            return
        if action.kind == ActionKind.FORWARD:
            own = sum(piece.forward for piece in stage.pieces)
            for seconds, params in _stretches(stage.pieces):
                yield CellChunk(seconds / own, 0.0, params)
            return
        # a whole stage that is computed again is, before its first gradient
        again = action.kind != ActionKind.WEIGHT_GRAD and action.stage in self.table.recompute
        ahead = stage.forward * (0.5 if self.table.halves else 1.0) / whole
        ahead *= again and not self.table.blockwise
        blocks = again and self.table.blockwise
        times = [piece.backward + blocks * piece.forward for piece in stage.pieces]
        own = sum(times)
        found = list(buckets(stage, times, work.bucket or 0.0))
        if not own or not found:
            return
        if found[-1][0] < own * (1.0 - ROUNDING):
            found.append((own, 0.0))  # what comes first in the model may have no parameters
        passed = 0.0
        for number, (until, size) in enumerate(found):
            share = (until - passed) / own * (1.0 - ahead) + (0.0 if number else ahead)
            yield CellChunk(share, size if leaving else 0.0, size if sharded else 0.0)
            passed = until


def _stretches(pieces: tuple[StageSegment, ...]) -> Iterator[tuple[float, float]]:
    """(seconds, bytes of parameters) of a forward pass: what has no parameters goes with those
    before it."""
    seconds = params = 0.0
    for piece in pieces:
        if piece.params and params:
            yield seconds, params
            seconds = params = 0.0
        seconds += piece.forward
        params += piece.params
    yield seconds, params


def buckets(stage: StageWork, times: Sequence[float], size: float) -> Iterator[tuple[float, float]]:
    """(seconds of backward until the gradients of a bucket are there, their bytes), in order.

    Gradients come evenly while a piece's backward runs; a bucket leaves when it is full, or, with
    size 0, with the end of its piece.

    Args:
        stage: Whose gradients; where it says itself what leaves, that counts.
        times: Seconds of backward of each piece.
        size: Bytes of a bucket.
    """
    if stage.leaving:
        for number, filled in stage.leaving:
            yield math.fsum(times[number:]), filled
        return
    done = filled = 0.0
    for piece, seconds in zip(reversed(stage.pieces), reversed(times), strict=True):
        rest = piece.params
        while size and filled + rest >= size:
            rest -= size - filled
            yield done + seconds * (1.0 - rest / piece.params), size
            filled = 0.0
        filled += rest
        done += seconds
        if not size and filled:
            yield done, filled
            filled = 0.0
    if filled:
        yield done, filled


# A step as tasks: the table of a pipeline, its messages, sums and gathers, on streams of ranks.


MESSAGES, SUMS, SCATTERS, GATHERS = "messages", "sums", "scatters", "gathers"
"""Kinds of communication: between stages, and collectives of gradients and parameters."""
TABLES = "tables"
"""Kind of exchanges of ids, rows, sums over rows, and their gradients."""
COLLECTIVES = (SUMS, SCATTERS, GATHERS, TABLES)
COMMUNICATION = (MESSAGES, *COLLECTIVES)
HOST = "host"
"""Kind of what a rank does before its first pass."""
LOOKUPS = "lookups"
"""Kind of what split tables take beside what the model takes without them."""
TASK_KINDS = {ActionKind.FORWARD: "forward", ActionKind.STEP: "update"} | dict.fromkeys(
    BACKWARD_KINDS, "backward"
)
CollectiveMember = tuple[int, int, int]
"""(copy, part, place) of a rank that is played."""
GATHERS_AHEAD = 2
"""Parameters are gathered while what comes before them is computed: one chunk ahead."""


@dataclass(frozen=True, kw_only=True)
class RankStreams:
    """A rank that is played.

    Attributes:
        state: Bytes that it holds all the time.
    """

    rank: int
    place: int
    count: int
    compute: int
    state: float


@dataclass(slots=True)
class StepTasks:
    """A step, ready to be played.

    Attributes:
        devices: Who is played, by number.
        takes: Bytes that each of a task's devices holds from its start on.
        frees: Bytes that each lets go at its end.
        inside: Seconds of a computation that are collectives of the tensor axis.
    """

    work: StepWork
    program: TaskProgram = field(default_factory=TaskProgram)
    devices: list[RankStreams] = field(default_factory=list)
    takes: dict[int, float] = field(default_factory=dict)
    frees: dict[int, float] = field(default_factory=dict)
    inside: dict[int, float] = field(default_factory=dict)


def build_step_tasks(work: StepWork, *, everybody: bool = False) -> StepTasks:
    """The tasks of a step.

    Raises:
        PlanError: The table cannot be lowered.
    """
    return _Builder(work, everybody).build()


class _Builder:
    """Cells first, then what they wait for."""

    def __init__(self, work: StepWork, everybody: bool) -> None:
        self.work = work
        self.built = StepTasks(work)
        self.program = self.built.program
        self.variants = tuple(CellPlan(one) for one in work.alike)
        self.cells = self.variants[0]  # of what all copies have in common
        self.table, self.wiring = self.cells.table, self.cells.wiring
        self.world = SimulatedRanks(work.grid, work.network, work.faults)
        holders = tuple(self.table.holders(stage) for stage in range(self.table.stages))
        edges = tuple(_edges(self.table))
        # Where each rank has other pieces of tables, all are played.
        everybody = everybody or work.tables is not None
        self.cast = RepresentativeRanks(self.world, edges, holders, everybody, work.variant)
        self.numbers: dict[CollectiveMember, int] = {}
        self.older = _older_weights(work)
        self.lanes: dict[tuple[int, str, str], int] = {}
        # Of each cell the tasks with which its chunks end, and begin.
        self.tasks: dict[tuple[int, int], list[int]] = {}
        self.begins: dict[tuple[int, int], list[int]] = {}
        # Of each exchange of tables what starts it, and what waits for it.
        self.started: dict[int, list[int]] = {}
        self.awaiting: dict[int, list[int]] = {}
        self.events: dict[tuple[int, int], list[int]] = {}

    def build(self) -> StepTasks:
        for copy, part, place in self.cast:
            self._device(copy, part, place)
        for copy in self.cast.copies:
            for place in range(self.table.ranks):
                self._row(copy.first, place)
        self._exchange_tables()
        for copy in self.cast.copies:
            self._messages(copy.first)
        # Tasks that are ready at the same moment start in the order of addition, so this one must
        # not depend on the table's row order.
        for sync in sorted(self.wiring.syncs, key=lambda sync: (sync.stage, sync.event)):
            self._sum(sync)
        for copy in self.cast.copies:
            self._needs(copy.first)
        if self.work.zero and self.work.grid.data > 1:
            self._gather()
        self._end()
        return self.built

    # -- devices and cells ---------------------------------------------------------------------

    def _of(self, copy: int) -> CellPlan:
        """The cells of a copy, on its own devices."""
        return self.variants[self.work.variant[copy] if self.work.variant else 0]

    def _device(self, copy: EquivalentRanks, part: EquivalentRanks, place: int) -> None:
        number = len(self.built.devices)
        self.numbers[copy.first, part.first, place] = number
        hosted = sorted({stage for _, stage in self.table.hosted(place)})
        stages = self._of(copy.first).work.stages
        self.built.devices.append(
            RankStreams(
                rank=self.work.grid.rank(part.first, copy.first, place),
                place=place,
                count=copy.count * part.count,
                compute=self.program.stream(number, "compute", "compute"),
                state=sum(stages[stage].early for stage in hosted)
                + self.older[place]
                + (self.work.tables.state[copy.first] if self.work.tables else 0.0),
            )
        )

    def _compute(self, copy: int, place: int) -> tuple[int, ...]:
        """The compute streams of a tensor group."""
        numbers = [self.numbers[copy, part.first, place] for part in self.cast.parts]
        return tuple(self.built.devices[number].compute for number in numbers)

    def _row(self, copy: int, place: int) -> None:
        """What one tensor group does, in order."""
        on, cells = self._compute(copy, place), self._of(copy)
        stages = cells.work.stages
        before = self._host(copy, place, on)
        # Cells of a kind and stage are alike, whatever their micro-batch.
        known: dict[tuple[ActionKind, int], tuple[float, float, float, float]] = {}
        # Stages whose gradients do not exist before the first backward of the step.
        late = {n for n, stage in enumerate(stages) if stage.gradients}
        for cell in self.wiring.order[place]:
            action = self.wiring.actions[cell]
            kind, label = TASK_KINDS.get(action.kind, ""), str(action)
            alike = (action.kind, action.stage)
            if alike not in known:
                known[alike] = (*self._seconds(copy, place, cell), *cells.memory(place, action))
            whole, inside, took, freed = known[alike]
            if action.stage in late and action.kind in BACKWARD_KINDS:
                late.remove(action.stage)
                more = stages[action.stage].more
                # Gradients that this backward makes stay, so they are taken and not freed.
                took, freed = took + more + stages[action.stage].gradients, freed + more
            chain: list[int] = []
            begins: list[int] = []
            parts = self._parts(copy, action, cells.chunks(cell))
            for share, beside, awaited, ends, starts in parts:
                task = self.program.add(kind, on, whole * share, before, label=label)
                for exchange in awaited:
                    self.awaiting.setdefault(exchange, []).append(task)
                begins += [task] if len(begins) == len(chain) else []
                if inside:
                    self.built.inside[task] = inside * share
                if beside:
                    slow = self.world.slowness(copy, place)
                    task = self.program.add(LOOKUPS, on, beside * slow, (task,), label=label)
                for exchange in starts:
                    self.started.setdefault(exchange, []).append(task)
                if ends:
                    chain.append(task)
                before = (task,)
            self.tasks[copy, cell], self.begins[copy, cell] = chain, begins
            if took or freed:
                self.built.takes[begins[0]] = took
                self.built.frees[chain[-1]] = freed

    def _parts(
        self, copy: int, action: Action, chunks: Sequence[CellChunk]
    ) -> Iterator[tuple[float, float, tuple[int, ...], bool, tuple[int, ...]]]:
        """Of a cell one part after the other: its share, seconds of lookups beside, the exchanges
        of tables that it waits for, whether a chunk ends with it, and the exchanges that start
        behind it."""
        tables, number = self.work.tables, action.microbatch
        stretches: tuple[TableStretch, ...] = ()
        if tables is not None and action.kind == ActionKind.STEP:
            stretches = (TableStretch(1.0, tables.update[copy]),)
        elif tables is not None and action.kind in BACKWARD_KINDS | {ActionKind.FORWARD}:
            ahead = action.kind == ActionKind.FORWARD
            stretches = (tables.forward if ahead else tables.backward)[copy][number]
        if not stretches:
            yield from ((chunk.share, 0.0, (), True, ()) for chunk in chunks)
            return
        awaited: tuple[int, ...] = ()
        for share, ended, stretch in merged([chunk.share for chunk in chunks], stretches):
            beside = 0.0 if stretch is None else stretch.lookups
            mark = None if stretch is None else stretch.exchange
            starts = () if mark is None or stretch is None or not stretch.starts else (mark,)
            yield share, beside, awaited, ended, starts
            awaited = () if mark is None or starts else (mark,)

    def _exchange_tables(self) -> None:
        """Each exchange begins when all ranks have started it."""
        if self.work.tables is None:
            return
        size, stride = self.world.shape((0,))
        name = self.world.level_of(size, stride).name
        members = [(copy.first, 0, 0) for copy in self.cast.copies]
        network = self.world.group(0, (0,))
        for number, one in enumerate(self.work.tables.exchanges):
            before = self.started.get(number, ())
            seconds = one.seconds(network, stride)
            done = self._collective(TABLES, members, seconds, before, name, one.kind)
            for task in self.awaiting.get(number, ()):
                self.program.need(task, *done)

    def _host(self, copy: int, place: int, on: tuple[int, ...]) -> tuple[int, ...]:
        """What a rank does before its first pass; on a slow rank it takes longer, too."""
        stages = self._of(copy).work.stages
        seconds = max((stages[stage].host for _, stage in self.table.hosted(place)), default=0.0)
        seconds *= self.world.slowness(copy, place)
        return (self.program.add(HOST, on, seconds, (), label=HOST),) if seconds else ()

    def _seconds(self, copy: int, place: int, cell: int) -> tuple[float, float]:
        """Of a cell on a tensor group, which may be slow, or joined by a slow link; and of those,
        what are collectives."""
        whole, inside = self._of(copy).seconds(cell)
        slow = self.world.slowness(copy, place)
        links = self.world.links_of_tensor(copy, place)
        # (whole - inside) + inside may differ by rounding; without faults a step is that of
        # `schedule.timing` to the bit.
        if slow == 1.0 and links == 1.0:
            return whole, inside
        return (whole - inside) * slow + inside * links, inside * links

    # -- messages ------------------------------------------------------------------------------

    def _lane(self, device: int, level: str, what: str) -> int:
        """The stream of a rank's messages to another one, or of its collectives."""
        shared = self.work.shared
        key = (device, level, "" if shared else what)
        if key not in self.lanes:
            name = " ".join([level, key[2]]).strip()
            self.lanes[key] = self.program.stream(device, "link", name, shared=shared)
        return self.lanes[key]

    def _messages(self, copy: int) -> None:
        """Each position on the tensor axis sends its own."""
        wiring, rank = self._of(copy).wiring, self.work.grid.rank
        takers = {event: cell for cell, needs in enumerate(wiring.needs) for event in needs}
        prices = {
            (part.first, ends): self.world.message(
                *(rank(part.first, copy, place) for place in ends)
            )
            for part in self.cast.parts
            for ends in self.cast.edges
        }
        for giver, found in enumerate(wiring.sends):
            for message in found:
                one, other = wiring.ranks[giver], wiring.ranks[takers[message.event]]
                tasks = []
                for part in self.cast.parts:
                    source, target = (rank(part.first, copy, place) for place in (one, other))
                    per_byte, latency, level = prices[part.first, (one, other)]
                    device = self.numbers[copy, part.first, one]
                    lane = self._lane(device, level, f"to {target}")
                    seconds, before = message.wire * per_byte, self.tasks[copy, giver][-1:]
                    label = f"{wiring.actions[takers[message.event]]}, from rank {source}"
                    tasks.append(
                        self.program.add(
                            MESSAGES, (lane,), seconds, before, delay=latency, label=label
                        )
                    )
                self.events[copy, message.event] = tasks

    def _needs(self, copy: int) -> None:
        for cell, events in enumerate(self.wiring.needs):
            first = self.begins[copy, cell][0]
            for event in events:
                # An event without a message or a sum is a cell of the same rank.
                found = self.events.get((copy, event)) or self.tasks[copy, event][-1:]
                self.program.need(first, *found)

    # -- sums and gathers ----------------------------------------------------------------------

    def _sum(self, sync: StageAllReduce) -> None:
        """The gradients of a stage, summed over all that hold it: at once, or as they come."""
        stage, copies = self.work.stages[sync.stage], self.cast.copies
        size, stride = self.world.shape(sync.ranks)
        name = self.world.level_of(size, stride).name
        kind = SCATTERS if self.work.zero else SUMS
        done: list[int] = []
        for before, num_bytes, label in self._rounds(sync) if size > 1 and stage.params else ():
            for part in self.cast.parts:
                network = self.world.group(part.first, sync.ranks)
                call = network.reduce_scatter if self.work.zero else network.all_reduce
                members = [(c.first, part.first, p) for c in copies for p in sync.ranks]
                seconds = float(call(num_bytes, size, stride))
                done += self._collective(kind, members, seconds, before, name, label)
        for copy in copies:
            own = [*done, *(self.tasks[copy.first, cell][-1] for cell in sync.cells)]
            step = self._of(copy.first).work.stages[sync.stage].step
            for cell in sync.cells if step else ():
                members = [
                    (copy.first, part.first, self.wiring.ranks[cell]) for part in self.cast.parts
                ]
                before = self.tasks[copy.first, cell][-1:]
                label = f"stage {sync.stage}, over the tensor axis"
                name = self.world.level_of(self.work.grid.tensor, 1).name
                own += self._collective(SUMS, members, step, before, name, label)
            self.events[copy.first, sync.event] = own

    def _rounds(self, sync: StageAllReduce) -> Iterator[tuple[list[int], float, str]]:
        """(what must be done, bytes, label) of each sum of a stage."""
        cells, copies = self.cells, self.cast.copies
        rounds = [cells.rounds(place, sync.stage) for place in sync.ranks]
        label = f"stage {sync.stage}"
        first = cells.chunks(rounds[0][-1]) if rounds[0] else ()
        # No cell is cut: all gradients of the stage leave together, behind the cells of the sum.
        if not any(chunk.leaves for chunk in first):
            before = [self.tasks[c.first, cell][-1] for c in copies for cell in sync.cells]
            stage = self.work.stages[sync.stage]
            for _, size in stage.leaving or [(0, stage.params)]:
                yield before, size, label
            return
        for number, members in enumerate(zip(*rounds, strict=True)):
            for place, chunk in enumerate(cells.chunks(members[0])):
                if not chunk.leaves:
                    continue
                before = [self.tasks[c.first, cell][place] for c in copies for cell in members]
                more = f", round {number}" if len(rounds[0]) > 1 else ""
                yield before, chunk.leaves, f"{label}{more}, bucket {place}"

    def _gather(self) -> None:
        """Parameters that ZeRO has spread: after the update, or before every use."""
        for place, row in enumerate(self.wiring.order):
            if self.work.zero == 3:
                self._ahead(place, row)
                continue
            for cell in row:
                if self.wiring.actions[cell].kind == ActionKind.STEP:
                    before = [self.tasks[copy.first, cell][-1] for copy in self.cast.copies]
                    self._gathered(place, cell, self.cells.stage(cell).params, before)

    def _ahead(self, place: int, row: Sequence[int]) -> None:
        chunks = [
            (cell, number, chunk)
            for cell in row
            for number, chunk in enumerate(self.cells.chunks(cell))
            if chunk.enters
        ]
        for place_in_row, (cell, number, chunk) in enumerate(chunks):
            before = []
            if place_in_row >= GATHERS_AHEAD:
                earlier, which, _ = chunks[place_in_row - GATHERS_AHEAD]
                before = [self.tasks[copy.first, earlier][which] for copy in self.cast.copies]
            gathered = self._gathered(place, cell, chunk.enters, before)
            for copy in self.cast.copies:
                self.program.need(self.begins[copy.first, cell][number], *gathered)

    def _gathered(
        self, place: int, cell: int, num_bytes: float, before: Sequence[int]
    ) -> list[int]:
        size, stride = self.world.shape((place,))
        name, found = self.world.level_of(size, stride).name, []
        for part in self.cast.parts:
            seconds = float(
                self.world.group(part.first, (place,)).all_gather(num_bytes, size, stride)
            )
            members = [(copy.first, part.first, place) for copy in self.cast.copies]
            label = f"for {self.wiring.actions[cell]}"
            found += self._collective(GATHERS, members, seconds, before, name, label)
        return found

    def _collective(
        self,
        kind: str,
        members: Sequence[CollectiveMember],
        seconds: float,
        before: Sequence[int],
        name: str,
        label: str,
    ) -> list[int]:
        """A task on the lanes of its members, and on their compute, where that feels it."""
        numbers = [self.numbers[member] for member in members]
        lanes = [self._lane(number, name, "collectives") for number in numbers]
        # A task on a shared stream has no other stream, so each member gets a task of its own.
        parts = [(lane,) for lane in lanes] if self.work.shared else [tuple(lanes)]
        tasks = [self.program.add(kind, on, seconds, before, label=label) for on in parts]
        felt = (1.0 - self.work.overlap) * seconds
        if felt > 0:
            streams = [self.built.devices[number].compute for number in numbers]
            tasks += [self.program.add(kind, (s,), felt, before, label=label) for s in streams]
        return tasks

    def _end(self) -> None:
        """Every rank is done when all that it takes part in is."""
        streams, kinds = self.program.streams, self.program.kind
        own: dict[int, list[int]] = {}
        for task, on in enumerate(self.program.on):
            for stream in on if kinds[task] in COLLECTIVES else ():
                own.setdefault(streams[stream].device, []).append(task)
        for number, device in enumerate(self.built.devices):
            self.program.add("", (device.compute,), 0.0, own.get(number, ()), label="end")


def _older_weights(work: StepWork) -> tuple[float, ...]:
    """Bytes of each place's weights beside the newest: without a flush several are in use."""
    table = work.table
    if table.flush:
        return (0.0,) * table.ranks
    params = tuple(stage.params for stage in work.stages)
    held = measure_schedule(table, replace(work.costs, message=(), weight=params)).weights
    newest = [
        sum(params[stage] for stage in {stage for _, stage in table.hosted(place)})
        for place in range(table.ranks)
    ]
    return tuple(some - one for some, one in zip(held, newest, strict=True))


def _edges(table: PipelineSchedule) -> Iterator[Edge]:
    """Between which ranks messages go, in both directions."""
    found = {(pipe.placement[a], pipe.placement[b]) for pipe in table.pipes for a, b in table.edges}
    for one, other in sorted(found):
        if one != other:
            yield one, other
            yield other, one
