"""pure: messages and all-reduces put into tables: complete, in order, and without cost of time."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from headway.errors import HeadwayError, PlanError
from headway.schedule.check import schedule_violations
from headway.schedule.generators.chimera import chimera
from headway.schedule.generators.gpipe_and_1f1b import one_f_one_b, pipedream
from headway.schedule.generators.registry import SCHEDULES, make_schedule
from headway.schedule.generators.zero_bubble import zbv
from headway.schedule.lowering import eager_stages, idle_after_gradients, lower
from headway.schedule.pipeline_schedule import (
    COMPUTE_KINDS,
    MESSAGE_KINDS,
    STAGE_KINDS,
    ActionKind,
    SchedulePipe,
)
from headway.schedule.stage_costs import StageCosts
from headway.schedule.stats import count_messages
from headway.schedule.timing import time_schedule
from support.tables import random_table, table_of

SIZES = [(4, 1), (4, 3), (4, 4), (4, 8), (6, 8)]


def every_schedule():
    for name in SCHEDULES:
        for stages, microbatches in SIZES:
            try:
                yield make_schedule(name, stages=stages, microbatches=microbatches)
            except HeadwayError:
                continue


def message_of(schedule, action):
    """(pipe, from, to, micro-batch) of a SEND or POST, and the rank at the other end."""
    ends = (action.stage, action.other)
    ends = ends if action.kind == ActionKind.SEND else ends[::-1]
    peer = schedule.pipe_of[action.pipe].placement[action.other]
    return (action.pipe, *ends, action.microbatch), peer


def operations(schedule):
    """For each ordered (rank, peer): the messages that the rank SENDs to or POSTs for the peer."""
    found = {}
    for rank, action in schedule.actions():
        if action.kind in (ActionKind.SEND, ActionKind.POST):
            message, peer = message_of(schedule, action)
            found.setdefault((rank, peer), []).append(message)
    return found


def runs_on_blocking_pairs(schedule):
    """Execute where each pair of ranks has one channel that does one operation at a time.

    An operation is done when both sides have come to it; only RECV makes a rank wait.
    """
    channels, done = {}, set()
    position = [0] * schedule.ranks
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.order):
            while position[rank] < len(row):
                action = row[position[rank]]
                if action.kind == ActionKind.RECV:
                    message = (action.pipe, action.other, action.stage, action.microbatch)
                    if message not in done:
                        break
                elif action.kind in (ActionKind.SEND, ActionKind.POST):
                    message, peer = message_of(schedule, action)
                    channels.setdefault((rank, peer), []).append(message)
                position[rank] += 1
                moved = True
        for (rank, peer), waiting in channels.items():
            other = channels.get((peer, rank), [])
            while waiting and other and waiting[0] == other[0]:
                done.add(waiting.pop(0))
                other.pop(0)
                moved = True
    return all(p == len(row) for p, row in zip(position, schedule.order, strict=True))


@pytest.mark.parametrize("sync", ["none", "post", "eager", "eager-opt"])
@pytest.mark.parametrize("tags", [True, False])
def test_every_schedule_is_lowered_to_a_valid_table_that_takes_as_long(sync, tags):
    for schedule in every_schedule():
        costs = StageCosts.of(schedule.stages, ranks=schedule.ranks)
        low = lower(schedule, sync=sync, tags=tags, lookahead=3)
        assert schedule_violations(low, transport_has_tags=tags) == ()
        assert low.compute == schedule.compute
        assert time_schedule(low, costs).makespan == time_schedule(schedule, costs).makespan
        kinds = [action.kind for _, action in low.actions()]
        expected = count_messages(schedule)
        assert [kinds.count(k) for k in sorted(MESSAGE_KINDS)] == [expected] * 3


def test_messages_with_a_price_take_as_long_in_both_forms():
    """The lowered table sends in the order in which the other one is taken to send."""
    for seed in range(60):
        schedule = random_table(random.Random(seed))
        costs = StageCosts.of(schedule.stages, message=0.75, latency=0.5)
        low = lower(schedule)
        assert time_schedule(low, costs).makespan == time_schedule(schedule, costs).makespan


def test_send_follows_and_receive_precedes_directly():
    for seed in range(30):
        for row in lower(random_table(random.Random(seed))).order:
            for i, action in enumerate(row):
                if action.kind == ActionKind.SEND:
                    near = [a for a in row[:i] if a.kind in COMPUTE_KINDS][-1]
                elif action.kind == ActionKind.RECV:
                    near = next(a for a in row[i:] if a.kind in COMPUTE_KINDS)
                else:
                    continue
                assert (near.pipe, near.stage, near.microbatch) == (
                    action.pipe,
                    action.stage,
                    action.microbatch,
                )


@pytest.mark.parametrize("lookahead", [0, 1, 2, 4])
def test_a_message_is_posted_as_early_as_allowed(lookahead):
    """And, from as many computes on as there are before it, at the beginning of the row."""
    schedule = replace(zbv(4, 8), most_activations=None)
    for row in lower(schedule, lookahead=lookahead).order:
        for i, action in enumerate(row):
            if action.kind != ActionKind.POST:
                continue
            receive = row.index(replace(action, kind=ActionKind.RECV))
            between = sum(a.kind in COMPUTE_KINDS for a in row[i:receive])
            before = sum(a.kind in COMPUTE_KINDS for a in row[:receive])
            assert between == min(lookahead, before)


def test_a_post_does_not_go_beyond_the_declared_memory():
    """1F1B with a bound of 1: the last rank may not hold one activation and await another."""
    schedule = one_f_one_b(2, 4)
    free = lower(replace(schedule, most_activations=None), lookahead=4)
    tight = lower(replace(schedule, most_activations=1), lookahead=4)
    texts = [str(a) for a in tight.order[1]]
    assert texts.index("d0.s1.POST.1<0") > texts.index("d0.s1.B.0")
    texts = [str(a) for a in free.order[1]]
    assert texts.index("d0.s1.POST.1<0") < texts.index("d0.s1.F.0")
    within = [str(a) for a in lower(replace(schedule, most_activations=2), lookahead=4).order[1]]
    assert within.index("d0.s1.POST.1<0") < within.index("d0.s1.B.0")
    assert within.index("d0.s1.POST.2<0") > within.index("d0.s1.B.0")


@pytest.mark.parametrize("lookahead", [0, 1, 4, 100])
def test_without_tags_both_ranks_of_a_pair_have_one_order(lookahead):
    tables = [*every_schedule(), *(random_table(random.Random(seed)) for seed in range(60))]
    for schedule in tables:
        low = lower(schedule, tags=False, lookahead=lookahead)
        found = operations(low)
        assert all(found[rank, peer] == found[peer, rank] for rank, peer in found)
        assert runs_on_blocking_pairs(low)


def test_with_tags_the_order_may_differ_and_then_blocks_such_a_transport():
    """The reason for `tags`: the pairs of the test above are not in order by themselves."""
    low = lower(chimera(4, 4))
    found = operations(low)
    assert any(found[rank, peer] != found[peer, rank] for rank, peer in found)
    assert not runs_on_blocking_pairs(low)


@pytest.mark.parametrize(("pair", "first"), [((0, 1), 0), ((1, 2), 2), ((0, 2), 0), ((1, 3), 1)])
def test_of_two_messages_made_at_once_that_of_the_even_or_lower_rank_comes_first(pair, first):
    """The parity rule: two opposite pipes send to each other at the same moment."""
    pipes = (SchedulePipe("d0", pair, (0,)), SchedulePipe("u0", pair[::-1], (1,)))
    rows = [[] for _ in range(4)]
    rows[pair[0]] = ["d0.s0.F.0", "u0.s1.F.1", "u0.s1.B.1", "d0.s0.B.0"]
    rows[pair[1]] = ["u0.s0.F.1", "d0.s1.F.0", "d0.s1.B.0", "u0.s0.B.1"]
    low = lower(table_of(pipes, *rows), tags=False)
    pipe = "d0" if first == pair[0] else "u0"
    assert operations(low)[pair][0][0] == pipe


def test_lowering_again_changes_nothing():
    once = lower(chimera(4, 8), sync="eager-opt")
    assert lower(once) == once
    assert lower(once, sync="eager-opt") == once
    assert lower(lower(once, sync="post"), sync="eager-opt", tags=True) == once


def stage_texts(row):
    return [str(a) for a in row if a.kind in STAGE_KINDS]


def test_post_puts_everything_at_the_end_in_stage_order():
    row = lower(chimera(4, 4), sync="post").order[1]
    assert [a.kind in STAGE_KINDS for a in row[-6:]] == [True] * 6
    expected = [
        f"{stage}.{kind}" for kind in ("SYNC", "WAIT", "STEP") for stage in ("d0.s1", "u0.s2")
    ]
    assert stage_texts(row) == expected


def test_eager_puts_all_reduces_behind_the_last_gradient_and_its_messages():
    row = lower(chimera(4, 4), sync="eager").order[1]
    texts = [str(a) for a in row]
    assert texts[texts.index("u0.s2.SYNC") - 2 :][:2] == ["u0.s2.B.3", "u0.s2.SEND.3>1"]
    assert texts[texts.index("d0.s1.SYNC") - 2 :][:2] == ["d0.s1.B.1", "d0.s1.SEND.1>0"]
    assert stage_texts(row)[-4:] == ["d0.s1.WAIT", "u0.s2.WAIT", "d0.s1.STEP", "u0.s2.STEP"]


@pytest.mark.parametrize(
    ("stages", "eager"), [(4, {3}), (6, {5, 4}), (8, {7, 6, 5})], ids=["D4", "D6", "D8"]
)
def test_eager_opt_chooses_the_stages_of_the_paper_on_both_holders(stages, eager):
    schedule = chimera(stages, stages)
    found = eager_stages(schedule, "eager-opt")
    for stage in range(stages):
        for rank in schedule.holders(stage):
            assert (stage in found[rank]) == (stage in eager)


@pytest.mark.parametrize(
    ("stages", "idle"),
    [(4, {3: 3, 2: 0}), (6, {5: 6, 4: 2, 3: 0}), (8, {7: 9, 6: 4, 5: 2, 4: 0})],
    ids=["D4", "D6", "D8"],
)
def test_idle_time_behind_the_gradients(stages, idle):
    schedule = chimera(stages, stages)
    timing = time_schedule(schedule, StageCosts.of(stages))
    for stage, time in idle.items():
        for rank in schedule.holders(stage):
            assert idle_after_gradients(timing, rank, stage) == time


def test_eager_opt_follows_the_given_costs():
    """Slow messages leave idle time behind every stage that is not the last of its rank."""
    costs = StageCosts.of(4, latency=1)
    assert eager_stages(chimera(4, 4), "eager-opt", costs) == ({3}, {2}, {2}, {3})
    low = lower(chimera(4, 4), sync="eager-opt", costs=costs)
    texts = [str(a) for a in low.order[1]]
    assert texts.index("u0.s2.SYNC") < texts.index("d0.s1.B.1")


def test_eager_hides_what_post_exposes():
    """All-reduces of 3: post 16 + 2 * 3, eager-opt saves those of stage 3."""
    costs = StageCosts.of(4, sync=3)
    spans = {
        sync: time_schedule(lower(chimera(4, 4), sync=sync, costs=costs), costs).makespan
        for sync in ("post", "eager", "eager-opt")
    }
    assert spans == {"post": 22, "eager": 19, "eager-opt": 20}


def test_a_split_backward_is_complete_with_its_weight_gradient():
    row = lower(zbv(2, 4), sync="eager").order[0]
    texts = [str(a) for a in row]
    last = max(i for i, a in enumerate(row) if a.kind == ActionKind.WEIGHT_GRAD and a.stage == 0)
    assert texts[last + 1] == "d0.s0.SYNC"


def test_without_a_flush_every_step_is_preceded_by_its_all_reduce():
    low = lower(pipedream(2, 3), sync="eager")
    assert schedule_violations(low) == ()
    texts = stage_texts(low.order[0])
    assert texts[:3] == ["d0.s0.SYNC@1", "d0.s0.WAIT@1", "d0.s0.STEP@1"]
    assert len(texts) == 9


def test_a_stage_that_two_pipes_bring_to_a_rank_is_summed_once():
    pipes = (SchedulePipe("d0", (0, 1), (0,)), SchedulePipe("d1", (0, 1), (1,)))
    rows = [[f"d{n}.s{s}.{kind}.{n}" for kind in ("F", "B") for n in range(2)] for s in range(2)]
    low = lower(table_of(pipes, *rows), sync="eager")
    assert schedule_violations(low) == ()
    assert stage_texts(low.order[1]) == ["d0.s1.SYNC", "d0.s1.WAIT", "d0.s1.STEP"]
    texts = [str(a) for a in low.order[1]]
    assert texts.index("d0.s1.SYNC") > texts.index("d1.s1.B.1")


def test_eager_opt_of_a_table_that_cannot_go_on_is_refused():
    table = chimera(4, 4)
    with pytest.raises(PlanError, match="cannot go on"):
        lower(replace(table, order=tuple(row[::-1] for row in table.order)), sync="eager-opt")


def test_unknown_words_are_errors_of_the_caller():
    with pytest.raises(ValueError, match="sync='late'"):
        lower(chimera(4, 4), sync="late")
    with pytest.raises(ValueError, match="lookahead=-1"):
        lower(chimera(4, 4), lookahead=-1)
