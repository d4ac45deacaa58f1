"""Check a table: it can be executed and makes, sums and applies every gradient exactly once.

All problems are collected, cell by cell; nothing here knows which generator made the table.
`index_cells` reads a table once, and all other rules look up what it found. A cell that breaks a
rule there is not looked at by later rules, so that one mistake is reported once.

*Messages.* One SEND, POST and RECV for each result that goes to another rank: SEND after its
producer, then POST, RECV and the consumer in that order. Where the transport has no tags, the k-th
message that a rank sends on a lane (pipe, direction) is the k-th that its peer posts.

*Deadlocks* are found by executing the table: a rank goes through its row and waits where it needs a
result of another rank, a RECV its SEND, a WAIT the SYNCs of all holders of the stage. A table hangs
exactly if some rank does not reach its end.

*Updates.* After the last gradient of a stage on a rank come SYNC, WAIT (where copies are summed)
and STEP; without a flush this repeats, and the STEPs cut the gradients into groups. All copies of a
stage take the same steps.

*Versions*: the number of STEPs of the stage behind the weights. The backward of a micro-batch uses
the version that its forward used, that version is still held, and a gradient is at most D - 1 steps
old when it is made (1 for D = 1), as on PipeDream's first stage (Narayanan et al., SOSP 2019,
weight stashing).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from headway.errors import PlanError
from headway.schedule.pipeline_schedule import (
    BACKWARD_KINDS,
    MESSAGE_KINDS,
    NO_NUMBER,
    STAGE_KINDS,
    WEIGHT_GRADIENT_KINDS,
    Action,
    ActionKind,
    PipelineSchedule,
    SchedulePipe,
    message_actions,
)

Key = tuple[ActionKind, str, int, int, int]
"""(kind, pipe, stage, micro-batch, stage at the other end)"""
_F, _B = ActionKind.FORWARD, ActionKind.BACKWARD
_I, _W = ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD


class TableCell(NamedTuple):
    """An action in its place; positions in a row count from 0."""

    rank: int
    position: int
    action: Action

    def __str__(self) -> str:
        return f"rank {self.rank}, cell {self.position} ({self.action})"


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken rule.

    Attributes:
        rank: Of the offending cell, or where an action is missing; NO_NUMBER: no single rank.
        position: Of the cell in the rank's row, from 0; NO_NUMBER where an action is missing.
    """

    rule: str
    rank: int
    position: int
    action: Action | None
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class CellIndex:
    """Where everything stands.

    Attributes:
        at: The first cell of every action of compute and of every message.
        elsewhere: Actions that stand on a wrong rank only.
        of_stage: By (rank, stage): its cells of compute, SYNC, WAIT and STEP in the row's order.
    """

    schedule: PipelineSchedule
    at: dict[Key, TableCell] = field(default_factory=dict)
    elsewhere: set[Key] = field(default_factory=set)
    of_stage: dict[tuple[int, int], list[TableCell]] = field(default_factory=dict)

    def has(self, key: Key) -> bool:
        return key in self.at or key in self.elsewhere

    def forward(self, pipe: str, stage: int, microbatch: int) -> TableCell | None:
        return self.at.get((_F, pipe, stage, microbatch, NO_NUMBER))

    def gradient(self, pipe: str, stage: int, microbatch: int) -> TableCell | None:
        """The cell that makes what earlier stages wait for: B, or I."""
        whole = self.at.get((_B, pipe, stage, microbatch, NO_NUMBER))
        return whole or self.at.get((_I, pipe, stage, microbatch, NO_NUMBER))


def cell_violation(rule: str, cell: TableCell, text: str) -> Violation:
    """A violation by a cell; its text begins with the place."""
    return Violation(rule, cell.rank, cell.position, cell.action, f"{cell}: {text}")


def missing_violation(rank: int, action: Action, text: str) -> Violation:
    """A violation by an action that is not there."""
    return Violation("missing", rank, NO_NUMBER, action, f"rank {rank} has no {action}: {text}")


def index_cells(schedule: PipelineSchedule) -> tuple[CellIndex, list[Violation]]:
    """Read a table; impossible cells and repeated ones are reported and left out."""
    table = CellIndex(schedule)
    legal = {pipe.name: (pipe, frozenset(pipe.microbatches)) for pipe in schedule.pipes}
    edges = frozenset(schedule.edges)
    found = []
    for rank, row in enumerate(schedule.order):
        for position, action in enumerate(row):
            cell = TableCell(rank, position, action)
            # The order matters: every check relies on those before it (`legal[action.pipe]` needs a
            # known pipe).
            problem = (
                _malformed(cell)
                or _unknown(cell, legal)
                or _misplaced(cell, table, legal[action.pipe][0])
                or _no_edge(cell, edges, legal[action.pipe][0])
                or _enter(cell, table)
            )
            if problem:
                found.append(problem)
    return table, found


def _malformed(cell: TableCell) -> Violation | None:
    """What no text form could say, but a table made in Python can."""
    action = cell.action
    if (action.kind in MESSAGE_KINDS) != (action.other != NO_NUMBER):
        text = "messages, and nothing else, name the stage at the other end"
    elif (action.kind in STAGE_KINDS) != (action.microbatch == NO_NUMBER):
        text = "SYNC, WAIT and STEP, and nothing else, are without a micro-batch"
    else:
        return None
    return cell_violation("malformed", cell, text)


def _unknown(
    cell: TableCell, legal: dict[str, tuple[SchedulePipe, frozenset[int]]]
) -> Violation | None:
    action = cell.action
    if action.pipe not in legal:
        names = ", ".join(legal)
        return cell_violation("unknown-pipe", cell, f"no pipe {action.pipe}; there are {names}")
    pipe, microbatches = legal[action.pipe]
    for stage in (action.stage, action.other) if action.other != NO_NUMBER else (action.stage,):
        if not 0 <= stage < len(pipe.placement):
            last = len(pipe.placement) - 1
            return cell_violation(
                "unknown-stage", cell, f"no stage {stage}; the last one is {last}"
            )
    if action.kind not in STAGE_KINDS and action.microbatch not in microbatches:
        numbers = _shortened(pipe.microbatches)
        text = f"no micro-batch {action.microbatch} in pipe {pipe.name}, which has {numbers}"
        return cell_violation("unknown-microbatch", cell, text)
    return None


def _shortened(numbers: tuple[int, ...]) -> str:
    few = [str(number) for number in numbers]
    if len(few) > 6:
        few = [*few[:3], "...", few[-1]]
    return ", ".join(few) or "none"


def _misplaced(cell: TableCell, table: CellIndex, pipe: SchedulePipe) -> Violation | None:
    action = cell.action
    place = pipe.placement[action.stage]
    if place == cell.rank:
        return None
    # Noted, or the action would be reported a second time as missing from its own rank.
    table.elsewhere.add(key_of(action))
    text = f"stage {action.stage} of pipe {pipe.name} is on rank {place}; move the action there"
    return cell_violation("wrong-rank", cell, text)


def _no_edge(
    cell: TableCell, edges: frozenset[tuple[int, int]], pipe: SchedulePipe
) -> Violation | None:
    action = cell.action
    if action.kind not in MESSAGE_KINDS:
        return None
    ends = (min(action.stage, action.other), max(action.stage, action.other))
    if ends not in edges:
        text = f"stages {ends[0]} and {ends[1]} pass nothing to each other; remove the action"
        return cell_violation("message-edge", cell, text)
    if pipe.placement[ends[0]] == pipe.placement[ends[1]]:
        text = f"stages {ends[0]} and {ends[1]} are on the same rank; remove the action"
        return cell_violation("message-edge", cell, text)
    return None


def _enter(cell: TableCell, table: CellIndex) -> Violation | None:
    """Add it to the table, unless the same action is there already."""
    action = cell.action
    if action.kind not in MESSAGE_KINDS:
        table.of_stage.setdefault((cell.rank, action.stage), []).append(cell)
    if action.kind in STAGE_KINDS:
        return None
    key = key_of(action)
    first = table.at.setdefault(key, cell)
    if first is cell:
        return None
    return cell_violation("duplicate", cell, f"stands in cell {first.position} already; remove one")


def key_of(action: Action) -> Key:
    """What an action is, whatever version of the weights it uses."""
    return (action.kind, action.pipe, action.stage, action.microbatch, action.other)


def find_incomplete(table: CellIndex) -> Iterator[Violation]:
    """F exactly once for each (pipe, stage, micro-batch), and either B, or I and W."""
    for pipe in table.schedule.pipes:
        for stage, rank in enumerate(pipe.placement):
            for microbatch in pipe.microbatches:
                rest = (pipe.name, stage, microbatch, NO_NUMBER)
                kinds = [kind for kind in (_F, _B, _I, _W) if table.has((kind, *rest))]
                # `kinds` has the order of the tuple above, so that lists can be compared.
                if kinds in ([_F, _B], [_F, _I, _W]):
                    continue
                yield from _unfinished(table, kinds, rank, Action(_F, pipe.name, stage, microbatch))


def _unfinished(
    table: CellIndex, kinds: list[ActionKind], rank: int, forward: Action
) -> Iterator[Violation]:
    pipe, stage, microbatch = forward.pipe, forward.stage, forward.microbatch
    if _F not in kinds:
        yield missing_violation(
            rank, forward, "every stage computes every micro-batch of its pipe; add it"
        )
    split = [kind for kind in (_I, _W) if kind in kinds]
    if _B in kinds:
        for kind in split:
            cell = table.at.get((kind, pipe, stage, microbatch, NO_NUMBER))
            if cell:
                text = "there is a whole backward B too; keep B, or I and W"
                yield cell_violation("mixed-backward", cell, text)
    elif not split:
        text = "its backward is missing; add B, or I and W"
        yield missing_violation(rank, Action(_B, pipe, stage, microbatch), text)
    elif len(split) == 1:
        missing = _I if split == [_W] else _W
        text = f"there is {split[0]}, which is half of a backward; add it, or make both one B"
        yield missing_violation(rank, Action(missing, pipe, stage, microbatch), text)


def find_misordered(table: CellIndex) -> Iterator[Violation]:
    """What needs something of its own rank stands behind it: F, then B or I, then W; stages."""
    at = table.at
    for (kind, pipe, stage, microbatch, _), cell in at.items():
        if kind in (_B, _I):
            yield from _behind(cell, table.forward(pipe, stage, microbatch))
        elif kind == _W:
            yield from _behind(cell, at.get((_I, pipe, stage, microbatch, NO_NUMBER)))
    for earlier, later, chain in _neighbours(table.schedule):
        name = chain.name
        for microbatch in chain.microbatches:
            yield from _behind(
                table.forward(name, later, microbatch), table.forward(name, earlier, microbatch)
            )
            yield from _behind(
                table.gradient(name, earlier, microbatch), table.gradient(name, later, microbatch)
            )


def _neighbours(schedule: PipelineSchedule) -> Iterator[tuple[int, int, SchedulePipe]]:
    """Pairs of stages that pass something to each other on one rank."""
    for pipe in schedule.pipes:
        for earlier, later in schedule.edges:
            if pipe.placement[earlier] == pipe.placement[later]:
                yield earlier, later, pipe


def _behind(cell: TableCell | None, needed: TableCell | None) -> Iterator[Violation]:
    if cell and needed and needed.position > cell.position:
        yield cell_violation(
            "order", cell, f"needs {needed.action} in cell {needed.position}; swap them"
        )


def cells_of_kinds(cells: Sequence[TableCell], *wanted: ActionKind) -> list[TableCell]:
    return [cell for cell in cells if cell.action.kind in wanted]


Edge = tuple[str, int, int, int]
"""An element of `PipelineSchedule.transfers`."""
Lane = tuple[int, int, str, bool]
"""(rank that sends, rank that receives, pipe, whether gradients)"""


def find_unmatched_messages(table: CellIndex) -> Iterator[Violation]:
    """Messages that are missing, or stand on the wrong side of what they belong to."""
    for edge in table.schedule.transfers():
        pipe, source, target, microbatch = edge
        result = table.forward if source < target else table.gradient
        actions = message_actions(*edge)
        send, post, receive = (table.at.get(key_of(action)) for action in actions)
        if not (send and post and receive):
            yield from _missing(table, edge, actions)
        yield from _in_turn(result(pipe, source, microbatch), send)
        yield from _in_turn(post, receive)
        yield from _in_turn(receive, result(pipe, target, microbatch))


def _missing(table: CellIndex, edge: Edge, actions: tuple[Action, ...]) -> Iterator[Violation]:
    for action in actions:
        if not table.has(key_of(action)):
            text = f"stage {edge[2]} needs the result of stage {edge[1]}; add it"
            yield missing_violation(table.schedule.rank_of(action), action, text)


def _in_turn(first: TableCell | None, second: TableCell | None) -> Iterator[Violation]:
    if first and second and first.position > second.position:
        text = f"must come behind {first.action} in cell {first.position}; move it there"
        yield cell_violation("message-order", second, text)


def find_misordered_messages(table: CellIndex) -> Iterator[Violation]:
    """Lanes on which messages are sent in one order and posted in another."""
    sent, posted = _by_lane(table)
    for lane, posts in posted.items():
        # A lane without any SEND is reported by `find_unmatched_messages`.
        pairs = ((p, sent[lane].get(edge)) for edge, p in posts.items() if lane in sent)
        matched = [(post, send) for post, send in pairs if send]
        # In the order of the POSTs, the order of the SENDs must not go back.
        matched.sort(key=lambda pair: pair[0].position)
        for (_, before), (post, send) in itertools.pairwise(matched):
            if send.position < before.position:
                text = (
                    f"rank {lane[0]} sends this message before the one posted before it "
                    f"({send} and {before}); post and send in one order"
                )
                yield cell_violation("lane-order", post, text)
                break


def _by_lane(
    table: CellIndex,
) -> tuple[dict[Lane, dict[Edge, TableCell]], dict[Lane, dict[Edge, TableCell]]]:
    sent, posted = dict[Lane, dict[Edge, TableCell]](), dict[Lane, dict[Edge, TableCell]]()
    for (kind, pipe, stage, microbatch, other), cell in table.at.items():
        if kind == ActionKind.SEND or kind == ActionKind.POST:
            source, target = (stage, other) if kind == ActionKind.SEND else (other, stage)
            placement = table.schedule.pipe_of[pipe].placement
            lane = (placement[source], placement[target], pipe, source > target)
            lanes = sent if kind == ActionKind.SEND else posted
            lanes.setdefault(lane, {})[pipe, source, target, microbatch] = cell
    return sent, posted


Needs = Mapping[tuple[int, int], Sequence[TableCell]]
"""By (rank, position): cells of other ranks that come first."""


def find_deadlocks(table: CellIndex, broken: Collection[tuple[int, int]]) -> Iterator[Violation]:
    """One violation for each circle.

    Args:
        broken: Cells, as (rank, position), that break another rule: they are taken not to wait, so
            that what follows from their mistake is not reported again.
    """
    order = table.schedule.order
    needs = {place: cells for place, cells in _needs(table).items() if place not in broken}
    reached = _reached(order, needs)
    # Every stuck rank waits for one other stuck rank: following them ends in a circle.
    stuck: dict[int, tuple[TableCell, TableCell]] = {}
    # Cells without needs never stop a rank: where one stands still, something it needs is unmet.
    for rank, position in enumerate(reached):
        if position < len(order[rank]):
            unmet = next(n for n in needs[rank, position] if n.position >= reached[n.rank])
            stuck[rank] = TableCell(rank, position, order[rank][position]), unmet
    for circle in _circles(stuck):
        waiting = "; ".join(f"{stuck[r][0]} waits for {stuck[r][1]}" for r in circle)
        text = f"{waiting}: nobody can go on; move one of the awaited actions forward in its row"
        cell = stuck[circle[0]][0]
        yield Violation("deadlock", cell.rank, cell.position, cell.action, text)


def _reached(order: Sequence[Sequence[object]], needs: Needs) -> list[int]:
    """For each rank how many cells can be executed."""
    reached = [0] * len(order)
    able, waiting = list(range(len(order))), dict[int, list[int]]()
    while able:
        rank = able.pop()
        position = reached[rank]
        while position < len(order[rank]):
            unmet = [n for n in needs.get((rank, position), ()) if n.position >= reached[n.rank]]
            if unmet:
                # One rank at a time: when that one has gone on, the cell is looked at again.
                waiting.setdefault(unmet[0].rank, []).append(rank)
                break
            position += 1
        # Whoever waits for this rank looks at its cell again only when this rank has moved.
        if position > reached[rank]:
            reached[rank] = position
            able += waiting.pop(rank, ())
    return reached


def _circles(stuck: Mapping[int, tuple[TableCell, TableCell]]) -> Iterator[list[int]]:
    seen: set[int] = set()
    for first in stuck:
        path: list[int] = []
        rank = first
        while rank not in seen:
            seen.add(rank)
            path.append(rank)
            rank = stuck[rank][1].rank
        # A walk that runs into an earlier walk has no circle of its own: that one has reported it.
        if rank in path:
            yield path[path.index(rank) :]


def _needs(table: CellIndex) -> dict[tuple[int, int], list[TableCell]]:
    needs = dict[tuple[int, int], list[TableCell]]()
    # In a lowered table a consumer waits for nothing but the RECV before it, on its own rank.
    pairs = _messages(table) if table.schedule.is_lowered else _results(table)
    for cell, needed in (*pairs, *_all_reduces(table)):
        # Within a rank the order of the row decides; `find_misordered` has looked at that.
        if cell and needed and cell.rank != needed.rank:
            needs.setdefault((cell.rank, cell.position), []).append(needed)
    return needs


def _results(table: CellIndex) -> Iterator[tuple[TableCell | None, TableCell | None]]:
    for pipe, source, target, microbatch in table.schedule.transfers():
        result = table.forward if source < target else table.gradient
        yield result(pipe, target, microbatch), result(pipe, source, microbatch)


def _messages(table: CellIndex) -> Iterator[tuple[TableCell | None, TableCell | None]]:
    for (kind, pipe, stage, microbatch, other), cell in table.at.items():
        if kind == ActionKind.RECV:
            yield cell, table.at.get((ActionKind.SEND, pipe, other, microbatch, stage))


def _all_reduces(table: CellIndex) -> Iterator[tuple[TableCell | None, TableCell | None]]:
    """The k-th SYNCs of a stage belong together; a WAIT is for the SYNC before it."""
    syncs = {
        place: cells_of_kinds(cells, ActionKind.SYNC) for place, cells in table.of_stage.items()
    }
    for (rank, stage), cells in table.of_stage.items():
        for wait in cells_of_kinds(cells, ActionKind.WAIT):
            own = syncs[rank, stage]  # the WAIT is for the last of them before it, number k
            k = sum(sync.position < wait.position for sync in own) - 1
            for holder in table.schedule.holders(stage):
                theirs = syncs.get((holder, stage), [])
                if 0 <= k < len(theirs):
                    yield wait, theirs[k]


def find_wrong_updates(table: CellIndex) -> Iterator[Violation]:
    """SYNC, WAIT or STEP missing, too many, too early, or not the same on all copies."""
    schedule = table.schedule
    every = [cell for cells in table.of_stage.values() for cell in cells]
    # With a flush the updates may be left to `lower`; a single STEP demands those of all stages.
    steps = not schedule.flush or bool(cells_of_kinds(every, ActionKind.STEP))
    for stage in range(schedule.stages):
        holders = schedule.holders(stage)
        for rank in holders:
            for group in _groups(table, rank, stage):
                yield from _wrong_group(group, flush=schedule.flush)
        yield from _uneven(table, stage, ActionKind.SYNC, 0)
        yield from _uneven(table, stage, ActionKind.STEP, 1 if steps else 0)
        yield from _unsummed(table, stage)


def _groups(table: CellIndex, rank: int, stage: int) -> list[list[TableCell]]:
    """A stage's cells on a rank: up to each STEP, and what is left; with a flush all together."""
    cells = table.of_stage.get((rank, stage), [])
    if table.schedule.flush:
        return [cells]
    groups: list[list[TableCell]] = [[]]
    for cell in cells:
        groups[-1].append(cell)
        if cell.action.kind == ActionKind.STEP:
            groups.append([])
    return groups


def _wrong_group(cells: list[TableCell], *, flush: bool) -> Iterator[Violation]:
    gradients = cells_of_kinds(cells, *BACKWARD_KINDS)
    syncs, waits, steps = (
        cells_of_kinds(cells, k) for k in (ActionKind.SYNC, ActionKind.WAIT, ActionKind.STEP)
    )
    for several in (syncs, waits, steps):
        for again in several[1:]:
            text = f"stands in cell {several[0].position} already; remove one"
            yield cell_violation("duplicate", again, text)
    if syncs:
        yield from _early("sync", syncs[0], gradients)
    if waits:
        if not syncs:
            text = "there is no SYNC to wait for; add one behind the gradients"
            yield cell_violation("sync", waits[0], text)
        yield from _early("sync", waits[0], syncs[:1])
    elif syncs:
        yield cell_violation(
            "sync", syncs[0], "nothing waits for its end; add WAIT before the STEP"
        )
    if steps:
        yield from _early("step", steps[0], [c for c in cells if c.action.kind != ActionKind.STEP])
        if not (flush or gradients):
            yield cell_violation(
                "step", steps[0], "there is no gradient since the STEP before; remove it"
            )
    elif gradients and not flush:
        text = "no STEP of its stage comes behind it; add one, or its gradient is lost"
        yield cell_violation("step", gradients[-1], text)


def _early(rule: str, cell: TableCell, others: list[TableCell]) -> Iterator[Violation]:
    late = [other for other in others if other.position > cell.position]
    if late:
        last = late[-1]
        text = f"comes before {last.action} in cell {last.position}; move it behind"
        yield cell_violation(rule, cell, text)


def _uneven(table: CellIndex, stage: int, kind: ActionKind, least: int) -> Iterator[Violation]:
    """Copies with fewer SYNCs or STEPs than another one, or than there must be."""
    numbers = {
        rank: len(cells_of_kinds(table.of_stage.get((rank, stage), []), kind))
        for rank in table.schedule.holders(stage)
    }
    most = max(numbers.values())
    # With a flush repeated ones are reported as duplicates: then one is enough.
    wanted = min(most, 1) if table.schedule.flush else most
    for rank, number in numbers.items():
        if number >= max(wanted, least):
            continue
        action = Action(kind, table.schedule.stages_on(rank)[stage], stage)
        if key_of(action) not in table.elsewhere:
            why = "every stage must be updated"
            if most:
                fullest = next(r for r, n in numbers.items() if n == most)
                why = f"it has {number} for this stage, and rank {fullest} {most}"
            yield missing_violation(
                rank, action, f"{why}; add it behind the gradients of the stage"
            )


def _unsummed(table: CellIndex, stage: int) -> Iterator[Violation]:
    holders = table.schedule.holders(stage)
    cells = [cell for rank in holders for cell in table.of_stage.get((rank, stage), [])]
    steps = cells_of_kinds(cells, ActionKind.STEP)
    # A SYNC that only some of the copies lack is reported by `_uneven`; here none has one.
    if len(holders) > 1 and steps and not cells_of_kinds(cells, ActionKind.SYNC):
        ranks = ", ".join(map(str, holders))
        text = f"the copies on ranks {ranks} would drift apart; add SYNC and WAIT before each STEP"
        yield cell_violation("sync", steps[0], text)


def find_wrong_versions(table: CellIndex) -> Iterator[Violation]:
    """Versions that are not said, not there yet, too old, or not those of the forward."""
    for cells in table.of_stage.values():
        steps = 0  # of this stage on this rank, so far: the newest version that exists
        for cell in cells:
            if text := _wrong_version(table, cell.action, steps):
                yield cell_violation("version", cell, text)
            steps += cell.action.kind == ActionKind.STEP


def _wrong_version(table: CellIndex, action: Action, steps: int) -> str:
    """What is wrong with the version of an action after so many STEPs; empty: nothing."""
    version = action.version
    if table.schedule.flush:
        superfluous = "with a flush there is one version of the weights; remove the @"
        return "" if version == NO_NUMBER else superfluous
    if action.kind in STAGE_KINDS:
        # A STEP may say which version it makes, its SYNC and WAIT too.
        right = version in (NO_NUMBER, steps + 1)
        return "" if right else f"the version made here is {steps + 1}; write @{steps + 1}"
    if version == NO_NUMBER:
        return f"weights change without a flush; say which are used: @{steps} or older"
    if action.kind == ActionKind.FORWARD:
        late = f"version {version} is not there after {steps} STEPs of the stage; "
        return "" if version <= steps else f"{late}use @{steps} or older"
    forward = table.forward(action.pipe, action.stage, action.microbatch)
    if forward and forward.action.version not in (NO_NUMBER, version):
        used = forward.action.version
        return f"its forward used version {used}; write @{used}"
    # On PipeDream's first stage D - 1 STEPs happen between a forward and its gradient.
    age, most = steps - version, max(1, table.schedule.stages - 1)
    old = f"its weights are {age} steps old, the most is {most}; use a newer version"
    return "" if age <= most else old


_ROUNDING = 1e-9  # Three stages on a rank make shares of 1/3.


def find_excess_activations(table: CellIndex) -> Iterator[Violation]:
    """The first cell of each rank that goes beyond the declared bound."""
    schedule, most = table.schedule, table.schedule.most_activations
    if most is None:
        return
    # Every forward counts the share of a rank's model, until B, or W where the backward is split.
    share = schedule.ranks / schedule.stages
    for rank, row in enumerate(schedule.order):
        live = 0
        for position, action in enumerate(row):
            if action.kind == ActionKind.FORWARD:
                live += 1
                if live * share > most + _ROUNDING:
                    text = (
                        f"{live * share:g} activations are held from here on, at most {most:g} "
                        "are declared; put a backward before it"
                    )
                    yield cell_violation("memory", TableCell(rank, position, action), text)
                    break
            elif action.kind in WEIGHT_GRADIENT_KINDS:
                live -= 1


_MOST = 12
"""Problems that one message shows."""


def schedule_violations(
    schedule: PipelineSchedule, *, transport_has_tags: bool = True
) -> tuple[Violation, ...]:
    """Everything that is wrong with a table.

    Messages are checked where the table has any; SYNC, WAIT and STEP likewise.

    Args:
        transport_has_tags: Messages between two ranks are told apart by a tag, so that they may be
            posted in another order than sent.

    Returns:
        By rank and position; empty: the table is good.
    """
    if shape := list(_wrong_shape(schedule)):
        # With such pipes the other rules would have no meaning.
        return tuple(Violation("pipes", NO_NUMBER, NO_NUMBER, None, text) for text in shape)
    table, found = index_cells(schedule)
    found += [*find_incomplete(table), *find_misordered(table)]
    if schedule.is_lowered:
        found += find_unmatched_messages(table)
        found += () if transport_has_tags else find_misordered_messages(table)
    found += [
        *find_wrong_updates(table),
        *find_wrong_versions(table),
        *find_excess_activations(table),
    ]
    # Last, because cells that break another rule are taken not to wait.
    found += find_deadlocks(table, {(violation.rank, violation.position) for violation in found})
    return tuple(sorted(found, key=lambda violation: (violation.rank, violation.position)))


def check_schedule(schedule: PipelineSchedule, *, transport_has_tags: bool = True) -> None:
    """Refuse a table that is wrong; arguments as for `schedule_violations`.

    Raises:
        PlanError: With the first 12 problems and how many more there are.
    """
    found = schedule_violations(schedule, transport_has_tags=transport_has_tags)
    if not found:
        return
    problems = [f"{violation.rule}: {violation.text}" for violation in found[:_MOST]]
    if len(found) > _MOST:
        problems.append(f"and {len(found) - _MOST} more")
    raise PlanError(
        f"the schedule {schedule.name} cannot be executed",
        problems=problems,
        fix="Fix the named cells (ranks and cells count from 0).",
    )


def _wrong_shape(schedule: PipelineSchedule) -> Iterator[str]:
    pipes, ranks = schedule.pipes, schedule.ranks
    if not pipes or not ranks:
        yield "the schedule has no pipes or no ranks"
        return
    for name, number in Counter(pipe.name for pipe in pipes).items():
        if number > 1:
            yield f"{number} pipes are called {name}; give each a name of its own"
    for pipe in pipes:
        length = len(pipe.placement)
        if length != schedule.stages or not length:
            yield f"pipe {pipe.name} has {length} stages and pipe {pipes[0].name} {schedule.stages}"
        for stage, rank in enumerate(pipe.placement):
            if not 0 <= rank < ranks:
                yield (
                    f"stage {stage} of pipe {pipe.name} is on rank {rank}; there are ranks 0 to "
                    f"{ranks - 1}"
                )
    for microbatch, number in Counter(m for pipe in pipes for m in pipe.microbatches).items():
        if number > 1:
            yield f"micro-batch {microbatch} goes through pipes {number} times; once is enough"
    for earlier, later in schedule.skips:
        if not 0 <= earlier < later < schedule.stages:
            yield f"the skip {earlier} > {later} does not lead to a later stage"
    for stage in schedule.recompute:
        if not 0 <= stage < schedule.stages:
            yield f"stage {stage} recomputes; there are stages 0 to {schedule.stages - 1}"
