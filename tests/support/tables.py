"""Small pipeline tables for tests: from texts, and random ones that are valid by construction."""

from __future__ import annotations

from dataclasses import replace

from headway.schedule.pipeline_schedule import Action, ActionKind, PipelineSchedule, SchedulePipe


def table_of(pipes, *rows):
    """A schedule from rows of action texts."""
    order = tuple(tuple(Action.parse(text) for text in row) for row in rows)
    return PipelineSchedule(name="by-hand", pipes=tuple(pipes), order=order)


def random_table(draw, *, ranks=None, skips=True):
    """Any pipes on any ranks in any order that can be carried out; some backwards split.

    Args:
        draw: A `random.Random`.
        ranks: How many; 1 to 4 if not given.
        skips: There may be edges that pass stages.
    """
    ranks = ranks or draw.randint(1, 4)
    stages = draw.randint(1, 5)
    pipes, first = [], 0
    for number in range(draw.randint(1, 3)):
        count = draw.randint(1, 4)
        placement = tuple(draw.randrange(ranks) for _ in range(stages))
        pipes.append(SchedulePipe(f"p{number}", placement, tuple(range(first, first + count))))
        first += count
    pairs = [(a, b) for b in range(stages) for a in range(b - 1)]
    chosen = tuple(draw.sample(pairs, min(len(pairs), draw.randint(0, 2)))) if skips else ()
    empty = PipelineSchedule(
        name="random", pipes=tuple(pipes), order=((),) * ranks, skips=tuple(sorted(chosen))
    )
    return _filled(draw, empty)


def _filled(draw, schedule):
    """Carry out any action that can be carried out, until there is none left."""
    rows = [[] for _ in range(schedule.ranks)]
    needs = {}
    for pipe in schedule.pipes:
        for m in pipe.microbatches:
            for stage in range(schedule.stages):
                _add_needs(draw, needs, schedule, pipe.name, stage, m)
    done = set()
    while needs:
        able = [action for action, before in needs.items() if before <= done]
        action = draw.choice(able)
        del needs[action]
        rows[schedule.rank_of(action)].append(action)
        done.add(_plain(action))
    order = tuple(map(tuple, rows))
    return PipelineSchedule(
        name=schedule.name, pipes=schedule.pipes, order=order, skips=schedule.skips
    )


def _plain(action):
    kind = ActionKind.BACKWARD if action.kind == ActionKind.INPUT_GRAD else action.kind
    return (kind, action.pipe, action.stage, action.microbatch)


def _add_needs(draw, needs, schedule, pipe, stage, m):
    earlier = [a for a, b in schedule.edges if b == stage]
    later = [b for a, b in schedule.edges if a == stage]
    needs[Action(ActionKind.FORWARD, pipe, stage, m)] = {
        (ActionKind.FORWARD, pipe, a, m) for a in earlier
    }
    split = draw.random() < 0.4
    gradient = Action(ActionKind.INPUT_GRAD if split else ActionKind.BACKWARD, pipe, stage, m)
    needs[gradient] = {(ActionKind.BACKWARD, pipe, b, m) for b in later}
    needs[gradient] |= {(ActionKind.FORWARD, pipe, stage, m)}
    if split:
        weight = Action(ActionKind.WEIGHT_GRAD, pipe, stage, m)
        needs[weight] = {(ActionKind.BACKWARD, pipe, stage, m)}


def table_without_flush(*, uneven=False):
    """Four stages on two ranks, split backwards, five micro-batches in updates of two and three.

    Args:
        uneven: The last stage makes its first update one micro-batch later than the others.
    """
    rows = []
    for stages in ((0, 2), (1, 3)):
        row = [action for m in (0, 1) for action in _forwards(stages, m)]
        for m in range(5):
            for stage in reversed(stages):
                row += [_late("I", stage, m), _late("W", stage, m)]
                ends = 2 if uneven and stage == 3 else 1
                if m in (ends, 4):
                    row.append(f"d0.s{stage}.STEP@{1 if m < 4 else 2}")
            row += _forwards(stages, m + 2) if m < 3 else []
        rows.append(row)
    table = table_of([SchedulePipe("d0", (0, 1, 0, 1), (0, 1, 2, 3, 4))], *rows)
    return replace(table, flush=False)


def _forwards(stages, microbatch):
    return [_late("F", stage, microbatch) for stage in stages]


def _late(kind, stage, microbatch):
    """The first stage sees the fourth micro-batch with older weights than it could."""
    version = 1 if microbatch > 3 or (microbatch == 3 and stage in (1, 2)) else 0
    return f"d0.s{stage}.{kind}.{microbatch}@{version}"
