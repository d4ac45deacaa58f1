"""Random pipeline schedules that can be carried out."""

from __future__ import annotations

from dataclasses import replace

from headway.schedule.pipeline_schedule import Action, ActionKind, PipelineSchedule, SchedulePipe


def random_placement(draw, ranks, stages):
    there_and_back = [*range(ranks), *reversed(range(ranks))]
    return draw.choice(
        [
            tuple(stage % ranks for stage in range(stages)),
            tuple(ranks - 1 - stage % ranks for stage in range(stages)),
            tuple(there_and_back[stage % (2 * ranks)] for stage in range(stages)),
            tuple(draw.randrange(ranks) for _ in range(stages)),
        ]
    )


def random_schedule(draw):
    """Any pipes, placements and skips; rows in a random order that the dependencies allow."""
    ranks = draw.randint(1, 4)
    stages = draw.randint(max(1, ranks - 1), 2 * ranks)
    pipes, first = [], 0
    for number in range(draw.choice([1, 1, 2, 3])):
        count = draw.randint(0 if number else 1, 3)
        microbatches = tuple(range(first, first + count))
        pipes.append(
            SchedulePipe(f"d{number}", random_placement(draw, ranks, stages), microbatches)
        )
        first += count
    skips = ()
    if stages > 1:
        skips = [tuple(sorted(draw.sample(range(stages), 2))) for _ in range(draw.choice([0, 2]))]
    edges = {(stage, stage + 1) for stage in range(stages - 1)} | set(skips)
    rows, needs = [[] for _ in range(ranks)], {}
    for pipe in pipes:
        for number in pipe.microbatches:
            split = [draw.random() < 0.4 for _ in range(stages)]
            forward = [Action(ActionKind.FORWARD, pipe.name, s, number) for s in range(stages)]
            gradient = [replace(f, kind=ActionKind("BI"[split[f.stage]])) for f in forward]
            for stage in range(stages):
                needs[forward[stage]] = {forward[a] for a, b in edges if b == stage}
                needs[gradient[stage]] = {gradient[b] for a, b in edges if a == stage}
                needs[gradient[stage]].add(forward[stage])
                if split[stage]:
                    needs[replace(forward[stage], kind=ActionKind.WEIGHT_GRAD)] = {gradient[stage]}
    place = {pipe.name: pipe.placement for pipe in pipes}
    done = set()
    while len(done) < len(needs):
        action = draw.choice([a for a in needs if a not in done and needs[a] <= done])
        rows[place[action.pipe][action.stage]].append(action)
        done.add(action)
    order = tuple(map(tuple, rows))
    return PipelineSchedule(name="random", pipes=tuple(pipes), order=order, skips=tuple(skips))
