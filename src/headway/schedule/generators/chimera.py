"""Chimera: pipes in both directions over the same ranks, one filling the bubbles of another.

The table is closed formulas: the slot of an action depends on its pipe, stage and place in its
unit, and the order of a rank is the order of the slots; no rank has two actions in one slot (a
pair of forwards counts as one). Source: Li and Hoefler, SC 2021: figure 3 (basic unit), figure
7 (more micro-batches than stages), figure 8 (more than two pipes).

`chimera_split` splits the backwards into I and W (Qi et al. 2023) and runs W where a rank of
the plain table would idle: never longer than the plain table, and no more activations than its
fullest rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headway.documents import nearest
from headway.errors import PlanError
from headway.schedule.pipeline_schedule import Action, ActionKind, PipelineSchedule, SchedulePipe
from headway.schedule.stage_costs import StageCosts
from headway.schedule.weight_gradients import fill_with_weight_gradients

MODES = ("direct", "doubling", "halving")
"""How units follow each other where there are more micro-batches than ranks."""
_NAMES = {"direct": "chimera", "doubling": "chimera-doubling", "halving": "chimera-halving"}


@dataclass(frozen=True, slots=True)
class _Unit:
    """Micro-batches of all pipes that fill each other's bubbles: a stretch of the table.

    Attributes:
        forwards: For each pipe, how many forward slots it has.
        pair: Micro-batches per forward slot: 1 in a basic unit, 2 in a double one.
    """

    start: int
    forwards: tuple[int, ...]
    pair: int


def chimera(
    ranks: int, microbatches: int, *, pipes: int = 2, mode: str = "direct"
) -> PipelineSchedule:
    """Chimera's table of D = `ranks` stages and N = `microbatches`.

    With f = pipes / 2, stage s of pipe `d<i>` is on rank (i D/f + s) mod D, and `u<i>` is the
    complete reverse of `d<i>`. A basic unit gives D/(2f) micro-batches to each pipe:

        F(s, m) in slot s + 2m,    B(s, m) in slot 2D - 1 - s + 2m

    Args:
        ranks: D, even; each pipe has as many stages.
        microbatches: N of a step, at least 1. Fewer than D are spread over the pipes (pipes without
            any are left out); a remainder of N / D becomes a last unit that is not full.
        pipes: 2f, where f divides D/2.
        mode: "direct": basic units follow each other every 2D slots. "doubling": double units of 2D
            micro-batches, whose forwards go in pairs q, F(s, q) in slot s + 2q and B(s, j) in slot
            2D - 1 - s + 2j, every 3D slots; basic units for what is left; twice the activations,
            hence with recomputation. "halving": double units of D micro-batches, in which a
            micro-batch is the pair of its halves: the table has 2N halves, numbered 2m, 2m + 1.
            With more than two pipes, of which the paper does not speak here, double units follow
            every 2D + D/f slots, and the later one of two backwards that meet waits: the bubble
            ratio (backward twice a forward) is (D - 2f) / (2fN + D - 2f), as in the basic unit.

    Raises:
        PlanError: With all reasons why there is no such table, and the legal numbers.
    """
    _check(ranks, microbatches, pipes, mode)
    units = tuple(_units(ranks, microbatches, pipes, mode))
    chains = _pipes(ranks, units)
    slots = _slots(ranks, chains, units)
    # Only double units of more than two pipes have collisions.
    if pipes > 2 and any(unit.pair > 1 for unit in units):
        slots = _without_collisions(slots, chains)
    used = tuple(pipe for pipe in chains.values() if pipe.microbatches)
    # A double unit has a pair of micro-batches in every forward slot: twice the activations.
    in_use = max(unit.pair for unit in units) * ranks
    return PipelineSchedule(
        name=_NAMES[mode],
        pipes=used,
        order=_rows(ranks, slots, chains),
        slots=slots,
        recompute=tuple(range(ranks)) if mode == "doubling" else (),
        halves=mode == "halving",
        most_activations=min(in_use, sum(len(pipe.microbatches) for pipe in used)),
    )


def _rows(
    ranks: int, slots: dict[Action, int], chains: dict[str, SchedulePipe]
) -> tuple[tuple[Action, ...], ...]:
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    # The slots were inserted in ascending order, so that each row comes out in its order.
    for action in slots:
        rows[chains[action.pipe].placement[action.stage]].append(action)
    return tuple(map(tuple, rows))


def _check(ranks: int, microbatches: int, pipes: int, mode: str) -> None:
    problems = []
    if ranks < 2 or ranks % 2:
        near = "2" if ranks < 3 else f"{ranks - 1} or {ranks + 1}"
        problems.append(f"{ranks} ranks: Chimera needs an even number of stages; take {near}")
    else:
        legal = [2 * f for f in range(1, ranks // 2 + 1) if ranks // 2 % f == 0]
        if pipes not in legal:
            problems.append(
                f"{pipes} pipes: with {ranks} ranks there can be "
                f"{', '.join(map(str, legal))} (twice a divisor of {ranks // 2})"
            )
    if microbatches < 1:
        problems.append(f"{microbatches} micro-batches: there must be at least 1")
    if mode not in MODES:
        problems.append(f"unknown mode {mode}{nearest(mode, MODES)}")
    if problems:
        raise PlanError(
            "there is no such Chimera schedule",
            problems=problems,
            fix="Choose numbers from those named above.",
        )


def _units(ranks: int, microbatches: int, pipes: int, mode: str) -> Iterator[_Unit]:
    start, left = 0, microbatches
    while left:
        # A double unit holds 2D micro-batches, or D of which each is a pair of halves.
        double = mode == "halving" or (mode == "doubling" and left >= 2 * ranks)
        forwards = min(left, ranks)
        yield _Unit(start, _spread(forwards, pipes), 2 if double else 1)
        start += 2 * ranks + (2 * ranks // pipes if double else 0)  # f = 1: 3D
        left -= 2 * forwards if double and mode == "doubling" else forwards


def _spread(number: int, parts: int) -> tuple[int, ...]:
    return tuple(number // parts + (part < number % parts) for part in range(parts))


def _pipes(ranks: int, units: Sequence[_Unit]) -> dict[str, SchedulePipe]:
    """Down pipes, then up pipes, by name; their micro-batches are numbered consecutively."""
    pipes = len(units[0].forwards)
    f = pipes // 2
    chains, first = dict[str, SchedulePipe](), 0
    for index in range(pipes):
        down = [(index % f * (ranks // f) + stage) % ranks for stage in range(ranks)]
        up = index >= f
        name = f"{'u' if up else 'd'}{index % f}"
        number = sum(unit.forwards[index] * unit.pair for unit in units)
        placement = tuple(reversed(down) if up else down)
        chains[name] = SchedulePipe(name, placement, tuple(range(first, first + number)))
        first += number
    return chains


def _slots(
    ranks: int, chains: dict[str, SchedulePipe], units: Sequence[_Unit]
) -> dict[Action, int]:
    slots = {}
    for index, pipe in enumerate(chains.values()):
        done = 0
        for unit in units:
            taken = unit.forwards[index] * unit.pair
            for j, number in enumerate(pipe.microbatches[done : done + taken]):
                for stage in range(ranks):
                    forward = Action(ActionKind.FORWARD, pipe.name, stage, number)
                    backward = Action(ActionKind.BACKWARD, pipe.name, stage, number)
                    slots[forward] = unit.start + stage + 2 * (j // unit.pair)
                    slots[backward] = unit.start + 2 * ranks - 1 - stage + 2 * j
            done += taken
    # Of one slot by micro-batch: the two forwards of a pair then follow each other on their rank.
    return dict(sorted(slots.items(), key=lambda item: (item[1], item[0].microbatch)))


def _without_collisions(
    wanted: dict[Action, int], chains: dict[str, SchedulePipe]
) -> dict[Action, int]:
    """By slots; what would meet something else waits, and so does what needs it."""
    # The formulas put every action behind what it needs: their order stays possible whoever waits.
    slots = dict[Action, int]()
    newest = dict[int, Action]()  # of each rank
    for action in wanted:
        rank = chains[action.pipe].placement[action.stage]
        before = newest.get(rank, action)
        if wanted[before] == wanted[action] and _are_pair(before, action):
            slots[action] = slots[before]
        else:
            after = [slots[a] for a in (before, *_inputs(action)) if a in slots]
            slots[action] = max([wanted[action], *(slot + 1 for slot in after)])
        newest[rank] = action
    return slots


def _are_pair(first: Action, second: Action) -> bool:
    forwards = first.kind == second.kind == ActionKind.FORWARD
    same = (first.pipe, first.stage) == (second.pipe, second.stage)
    return forwards and same and first.microbatch < second.microbatch


def _inputs(action: Action) -> tuple[Action, ...]:
    """What must end first (at the ends of the pipe it is not there)."""
    pipe, stage, microbatch = action.pipe, action.stage, action.microbatch
    if action.kind == ActionKind.FORWARD:
        return (Action(ActionKind.FORWARD, pipe, stage - 1, microbatch),)
    later = Action(ActionKind.BACKWARD, pipe, stage + 1, microbatch)
    return later, Action(ActionKind.FORWARD, pipe, stage, microbatch)


def chimera_split(ranks: int, microbatches: int, *, pipes: int = 2) -> PipelineSchedule:
    """Chimera (direct) with split backwards; filled for equal stages with F = I = W.

    With two pipes and N a multiple of D the bubble is (D-2)/(6N+D-2), in D activations. For
    other costs fill a `chimera` with `fill_with_weight_gradients`.

    Raises:
        PlanError: As `chimera`.
    """
    plain = chimera(ranks, microbatches, pipes=pipes)
    return fill_with_weight_gradients(plain, StageCosts.of(ranks))
