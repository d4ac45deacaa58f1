"""pure: every rule of the validator, and random corruptions against an independent executor."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from headway.errors import PlanError
from headway.schedule.check import check_schedule, schedule_violations
from headway.schedule.generators.registry import SCHEDULES, make_schedule
from headway.schedule.lowering import lower
from headway.schedule.pipeline_schedule import Action, ActionKind, PipelineSchedule, SchedulePipe
from support.random_tables import random_schedule
from support.sampling import sampled
from support.symbolic import Wrong, execute


def table(*rows, placements=((0, 1),), microbatches=((0, 1),), **facts):
    """A schedule of texts: `F0` is written for `d0.s<rank>.F.0` where there is one pipe."""

    def action(text, rank):
        return Action.parse(text if "." in text else f"d0.s{rank}.{text[0]}.{text[1:]}")

    pipes = tuple(
        SchedulePipe(f"{'du'[number]}0", placement, numbers)
        for number, (placement, numbers) in enumerate(zip(placements, microbatches, strict=True))
    )
    order = tuple(tuple(action(t, rank) for t in row.split()) for rank, row in enumerate(rows))
    return PipelineSchedule(name="mine", pipes=pipes, order=order, **facts)


def rules(schedule, **options):
    return [(v.rule, v.rank, v.position) for v in schedule_violations(schedule, **options)]


GOOD = ("F0 F1 B0 B1", "F0 B0 F1 B1")
RULES = frozenset({
    "pipes", "malformed", "unknown-pipe", "unknown-stage", "unknown-microbatch", "wrong-rank",
    "duplicate", "missing", "mixed-backward", "order", "deadlock", "message-edge", "message-order",
    "lane-order", "sync", "step", "version", "memory",
})  # fmt: skip


def edited(schedule, rank, change):
    """With one row as `change` makes it from a list of texts."""
    texts = [str(action) for action in schedule.order[rank]]
    change(texts)
    rows = list(schedule.order)
    rows[rank] = tuple(map(Action.parse, texts))
    return replace(schedule, order=tuple(rows))


def moved(text, to):
    """Takes the action out and puts it before another one, or at the end."""

    def change(texts):
        texts.remove(text)
        texts.insert(texts.index(to) if to else len(texts), text)

    return change


def without(text):
    return lambda texts: texts.remove(text)


# -- what is right -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8), (4, 10)])
def test_every_named_schedule_is_right(name, stages, microbatches):
    schedule = make_schedule(name, stages=stages, microbatches=microbatches)
    for sync in ("none", "post", "eager", "eager-opt"):
        for tags in (True, False):
            lowered = lower(schedule, sync=sync, tags=tags)
            assert schedule_violations(lowered, transport_has_tags=tags) == ()
            execute(lowered, tags=tags)
    assert schedule_violations(schedule) == ()
    check_schedule(schedule)
    execute(schedule)


def test_a_table_by_hand_is_right():
    assert schedule_violations(table(*GOOD)) == ()
    assert schedule_violations(table("F0 F1 I0 W0 B1", "F0 I0 F1 B1 W0")) == ()


# -- cells -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "expected", "said"),
    [
        (
            ("F0 F1 x.s0.B.0 B0 B1", GOOD[1]),
            [("unknown-pipe", 0, 2)],
            "rank 0, cell 2 (x.s0.B.0): no pipe x; there are d0",
        ),
        (
            ("F0 F1 B0 B1 d0.s2.F.0", GOOD[1]),
            [("unknown-stage", 0, 4)],
            "rank 0, cell 4 (d0.s2.F.0): no stage 2; the last one is 1",
        ),
        (
            ("F0 F1 B0 B1", "F0 B0 F1 B1 F2"),
            [("unknown-microbatch", 1, 4)],
            "rank 1, cell 4 (d0.s1.F.2): no micro-batch 2 in pipe d0, which has 0, 1",
        ),
        (
            ("F0 F1 B0 B1 d0.s1.F.1", "F0 B0 B1"),
            [("wrong-rank", 0, 4)],
            "stage 1 of pipe d0 is on rank 1; move the action there",
        ),
        (
            ("F0 F1 B0 B1", "B0 F1 B1"),
            [("missing", 1, -1)],
            "rank 1 has no d0.s1.F.0: every stage computes every micro-batch of its pipe; add it",
        ),
        (
            ("F0 F1 B0", GOOD[1]),
            [("missing", 0, -1)],
            "rank 0 has no d0.s0.B.1: its backward is missing; add B, or I and W",
        ),
        (
            ("F0 F1 B0 I1", GOOD[1]),
            [("missing", 0, -1)],
            "rank 0 has no d0.s0.W.1: there is I, which is half of a backward",
        ),
        (
            ("F0 F1 B0 W1", GOOD[1]),
            [("missing", 0, -1)],
            "rank 0 has no d0.s0.I.1: there is W, which is half of a backward",
        ),
        (
            ("F0 F1 B0 F0 B1", GOOD[1]),
            [("duplicate", 0, 3)],
            "rank 0, cell 3 (d0.s0.F.0): stands in cell 0 already; remove one",
        ),
        (
            ("F0 F1 B0 W0 B1", GOOD[1]),
            [("mixed-backward", 0, 3)],
            "rank 0, cell 3 (d0.s0.W.0): there is a whole backward B too; keep B, or I and W",
        ),
        (
            ("F0 B1 F1 B0", GOOD[1]),
            [("order", 0, 1)],
            "rank 0, cell 1 (d0.s0.B.1): needs d0.s0.F.1 in cell 2; swap them",
        ),
        (
            ("F0 F1 W0 I0 B1", GOOD[1]),
            [("order", 0, 2)],
            "rank 0, cell 2 (d0.s0.W.0): needs d0.s0.I.0 in cell 3; swap them",
        ),
    ],
)
def test_a_cell_that_is_wrong_is_named_with_what_to_do(rows, expected, said):
    schedule = table(*rows)
    assert rules(schedule) == expected
    assert said in str(schedule_violations(schedule)[0])


def test_results_between_stages_of_one_rank_come_in_order():
    v = {"placements": ((0, 1, 1, 0),), "microbatches": ((0,),)}
    right = ("d0.s0.F.0 d0.s3.F.0 d0.s3.B.0 d0.s0.B.0", "d0.s1.F.0 d0.s2.F.0 d0.s2.B.0 d0.s1.B.0")
    assert rules(table(*right, **v)) == []
    wrong = (right[0], "d0.s2.F.0 d0.s1.F.0 d0.s1.B.0 d0.s2.B.0")
    assert rules(table(*wrong, **v)) == [("order", 1, 0), ("order", 1, 2)]


@pytest.mark.parametrize(
    "action",
    [
        Action(ActionKind.FORWARD, "d0", 0, 0, other=1),
        Action(ActionKind.STEP, "d0", 0, microbatch=0),
    ],
)
def test_an_action_that_has_no_text_form_is_refused(action):
    good = table(*GOOD)
    bad = replace(good, order=((*good.order[0], action), good.order[1]))
    assert rules(bad) == [("malformed", 0, 4)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"pipes": ()}, "the schedule has no pipes or no ranks"),
        (
            {"pipes": (SchedulePipe("d0", (0, 1), (0,)), SchedulePipe("d0", (1, 0), (1,)))},
            "2 pipes are called d0",
        ),
        (
            {"pipes": (SchedulePipe("d0", (0, 1), (0,)), SchedulePipe("u0", (1,), (1,)))},
            "pipe u0 has 1 stages and pipe d0 2",
        ),
        (
            {"pipes": (SchedulePipe("d0", (0, 2), (0, 1)),)},
            "stage 1 of pipe d0 is on rank 2; there are",
        ),
        (
            {"pipes": (SchedulePipe("d0", (0, 1), (0, 1)), SchedulePipe("u0", (1, 0), (1,)))},
            "micro-batch 1 goes through pipes 2 times",
        ),
        ({"skips": ((0, 2),)}, "the skip 0 > 2 does not lead to a later stage"),
        ({"skips": ((1, 0),)}, "the skip 1 > 0 does not lead to a later stage"),
        ({"recompute": (0, 2)}, "stage 2 recomputes; there are stages 0 to 1"),
    ],
)
def test_pipes_that_cannot_be(change, said):
    found = schedule_violations(replace(table(*GOOD), **change))
    assert [v.rule for v in found] == ["pipes"]
    assert said in found[0].text


# -- waiting -----------------------------------------------------------------------------------


def test_a_deadlock_names_the_cells_of_the_circle():
    schedule = table("F0 B0 F1 B1", "F1 F0 B0 B1")
    (found,) = schedule_violations(schedule)
    assert (found.rule, found.rank, found.position) == ("deadlock", 0, 1)
    assert found.text == (
        "rank 0, cell 1 (d0.s0.B.0) waits for rank 1, cell 2 (d0.s1.B.0); "
        "rank 1, cell 0 (d0.s1.F.1) waits for rank 0, cell 2 (d0.s0.F.1): "
        "nobody can go on; move one of the awaited actions forward in its row"
    )


def test_two_circles_are_two_violations_and_those_who_wait_for_them_are_none():
    rows = ("d0.s0.F.0 d0.s0.B.0 d0.s0.F.1 d0.s0.B.1", "d0.s1.F.1 d0.s1.F.0 d0.s1.B.0 d0.s1.B.1")
    rows += tuple(row.replace("d0", "u0") for row in rows)
    rows = tuple(rows[:2]) + tuple(
        row.replace("F.0", "F.2").replace("F.1", "F.3").replace("B.0", "B.2").replace("B.1", "B.3")
        for row in rows[2:]
    )
    both = {"placements": ((0, 1), (2, 3)), "microbatches": ((0, 1), (2, 3))}
    assert rules(table(*rows, **both)) == [("deadlock", 0, 1), ("deadlock", 2, 1)]
    skip = table(
        "F0 B0 F1 B1",
        "F1 F0 B0 B1",
        "F0 B0 F1 B1",
        placements=((0, 1, 2),),
        skips=((0, 2),),
    )
    assert [rule for rule, _, _ in rules(skip)] == ["deadlock"]


def test_an_all_reduce_can_deadlock():
    rows = ["d0.s0.F.0 d0.s0.B.0", "u0.s0.F.1 u0.s0.B.1"]
    one = {"placements": ((0,), (1,)), "microbatches": ((0,), (1,))}
    good = [row + f" {row[:2]}.s0.SYNC {row[:2]}.s0.WAIT" for row in rows]
    assert rules(table(*good, **one)) == []
    two = ["d0.s0.F.0 d0.s1.F.0 d0.s1.B.0 d0.s0.B.0", "u0.s0.F.1 u0.s1.F.1 u0.s1.B.1 u0.s0.B.1"]
    crossed = [
        two[0] + " d0.s0.SYNC d0.s0.WAIT d0.s1.SYNC d0.s1.WAIT",
        two[1] + " u0.s1.SYNC u0.s1.WAIT u0.s0.SYNC u0.s0.WAIT",
    ]
    sizes = {"placements": ((0, 0), (1, 1)), "microbatches": ((0,), (1,))}
    assert rules(table(*crossed, **sizes)) == [("deadlock", 0, 5)]


# -- messages ----------------------------------------------------------------------------------


LOWERED = lower(table(*GOOD), lookahead=1)


def test_the_lowered_table_is_as_these_tests_expect():
    assert [" ".join(map(str, row[:6])) for row in LOWERED.order] == [
        "d0.s0.F.0 d0.s0.SEND.0>1 d0.s0.POST.0<1 d0.s0.F.1 d0.s0.SEND.1>1 d0.s0.POST.1<1",
        "d0.s1.POST.0<0 d0.s1.RECV.0<0 d0.s1.F.0 d0.s1.POST.1<0 d0.s1.B.0 d0.s1.SEND.0>0",
    ]


@pytest.mark.parametrize(
    ("rank", "change", "expected", "said"),
    [
        (0, without("d0.s0.SEND.0>1"), ("missing", 0, -1), "stage 1 needs the result of stage 0"),
        (1, without("d0.s1.POST.0<0"), ("missing", 1, -1), "rank 1 has no d0.s1.POST.0<0"),
        (1, without("d0.s1.RECV.0<0"), ("missing", 1, -1), "rank 1 has no d0.s1.RECV.0<0"),
        (
            0,
            moved("d0.s0.SEND.0>1", "d0.s0.F.0"),
            ("message-order", 0, 0),
            "rank 0, cell 0 (d0.s0.SEND.0>1): must come behind d0.s0.F.0 in cell 1; move it there",
        ),
        (
            1,
            moved("d0.s1.RECV.0<0", "d0.s1.POST.0<0"),
            ("message-order", 1, 0),
            "must come behind d0.s1.POST.0<0",
        ),
        (
            1,
            moved("d0.s1.F.0", "d0.s1.RECV.0<0"),
            ("message-order", 1, 1),
            "must come behind d0.s1.RECV.0<0",
        ),
        (
            0,
            lambda texts: texts.append("d0.s0.SEND.0>1"),
            ("duplicate", 0, 10),
            "stands in cell 1 already",
        ),
    ],
)
def test_messages_that_are_wrong(rank, change, expected, said):
    broken = edited(LOWERED, rank, change)
    assert rules(broken) == [expected]
    assert said in schedule_violations(broken)[0].text


def test_messages_between_stages_that_pass_nothing():
    three = table(
        "F0 B0", "F0 B0", "F0 B0 d0.s2.SEND.0>0", placements=((0, 1, 2),), microbatches=((0,),)
    )
    assert ("message-edge", 2, 2) in rules(three)
    same = table(
        "d0.s0.F.0 d0.s0.SEND.0>1 d0.s1.F.0 d0.s1.B.0 d0.s0.B.0",
        placements=((0, 0),),
        microbatches=((0,),),
    )
    assert rules(same) == [("message-edge", 0, 1)]
    assert "on the same rank" in schedule_violations(same)[0].text


def test_a_message_that_nobody_can_send_in_time_is_a_deadlock():
    change = moved("d0.s0.SEND.0>1", None)
    assert [rule for rule, _, _ in rules(edited(LOWERED, 0, change))] == ["deadlock"]


def test_lanes_need_one_order_only_without_tags():
    posts = edited(LOWERED, 1, moved("d0.s1.POST.1<0", "d0.s1.POST.0<0"))
    assert rules(posts) == []
    assert rules(posts, transport_has_tags=False) == [("lane-order", 1, 1)]
    assert schedule_violations(posts, transport_has_tags=False)[0].text == (
        "rank 1, cell 1 (d0.s1.POST.0<0): rank 0 sends this message before the one posted before "
        "it (rank 0, cell 1 (d0.s0.SEND.0>1) and rank 0, cell 4 (d0.s0.SEND.1>1)); "
        "post and send in one order"
    )


def test_lanes_of_other_pipes_and_directions_are_free():
    schedule = lower(make_schedule("chimera", stages=4, microbatches=4), lookahead=4)
    assert rules(schedule, transport_has_tags=False) == []


# -- updates -----------------------------------------------------------------------------------


PAIR = table(
    "d0.s0.F.0 u0.s1.F.1 u0.s1.B.1 d0.s0.B.0",
    "u0.s0.F.1 d0.s1.F.0 d0.s1.B.0 u0.s0.B.1",
    placements=((0, 1), (1, 0)),
    microbatches=((0,), (1,)),
)
SUMMED = lower(PAIR, sync="eager")


@pytest.mark.parametrize(
    ("change", "expected", "said"),
    [
        (without("u0.s1.SYNC"), {("missing", 0, -1), ("sync", 0, 12)}, "and rank 1 1"),
        (without("u0.s1.WAIT"), {("sync", 0, 8)}, "nothing waits for its end"),
        (without("u0.s1.STEP"), {("missing", 0, -1)}, "and rank 1 1"),
        (
            moved("u0.s1.SYNC", "u0.s1.B.1"),
            {("sync", 0, 6)},
            "(u0.s1.SYNC): comes before u0.s1.B.1 in cell 7; move it behind",
        ),
        (
            moved("u0.s1.WAIT", "u0.s1.SYNC"),
            {("sync", 0, 8)},
            "comes before u0.s1.SYNC",
        ),
        (moved("u0.s1.STEP", "u0.s1.WAIT"), {("step", 0, 13)}, "comes before u0.s1.WAIT in"),
        (moved("u0.s1.STEP", "u0.s1.F.1"), {("step", 0, 5)}, "comes before u0.s1.WAIT in"),
        (
            lambda texts: texts.append("u0.s1.STEP"),
            {("duplicate", 0, 16)},
            "stands in cell 15 already",
        ),
    ],
)
def test_updates_that_are_wrong(change, expected, said):
    broken = edited(SUMMED, 0, change)
    assert set(rules(broken)) == expected
    assert any(said in violation.text for violation in schedule_violations(broken))


def test_copies_that_are_stepped_without_being_summed_drift_apart():
    def drop(texts):
        texts[:] = [t for t in texts if not t.endswith(("SYNC", "WAIT"))]

    broken = edited(edited(SUMMED, 0, drop), 1, drop)
    assert [rule for rule, _, _ in rules(broken)] == ["sync", "sync"]
    assert "the copies on ranks 0, 1 would drift apart" in schedule_violations(broken)[0].text


# -- versions ----------------------------------------------------------------------------------


STALE = make_schedule("pipedream", stages=3, microbatches=4)


def first_row(schedule):
    return " ".join(map(str, schedule.order[0]))


def test_the_row_of_pipedream_is_as_these_tests_expect():
    assert first_row(STALE).split()[:7] == [
        *("d0.s0.F.0@0", "d0.s0.F.1@0", "d0.s0.F.2@0"),
        *("d0.s0.B.0@0", "d0.s0.STEP@1", "d0.s0.F.3@1", "d0.s0.B.1@0"),
    ]


def rename(old, new):
    def change(texts):
        texts[texts.index(old)] = new

    return change


@pytest.mark.parametrize(
    ("change", "expected", "said"),
    [
        (rename("d0.s0.F.2@0", "d0.s0.F.2@1"), 2, "version 1 is not there after 0 STEPs"),
        (rename("d0.s0.B.1@0", "d0.s0.B.1@1"), 6, "its forward used version 0; write @0"),
        (rename("d0.s0.B.3@1", "d0.s0.B.3@0"), 10, "its forward used version 1; write @1"),
        (rename("d0.s0.F.0@0", "d0.s0.F.0"), 0, "say which are used: @0 or older"),
        (rename("d0.s0.STEP@1", "d0.s0.STEP@2"), 4, "the version made here is 1; write @1"),
    ],
)
def test_versions_that_are_wrong(change, expected, said):
    broken = edited(STALE, 0, change)
    found = [v for v in schedule_violations(broken) if v.position == expected]
    assert [v.rule for v in found] == ["version"]
    assert said in found[0].text


def test_weights_may_be_as_old_as_pipedreams_and_no_older():
    many = make_schedule("pipedream", stages=2, microbatches=6)
    assert rules(many) == []

    def older(texts):
        texts[:] = [text.replace(".5@4", ".5@3") for text in texts]

    broken = edited(many, 0, older)
    assert [rule for rule, _, _ in rules(broken)] == ["version"]
    assert "its weights are 2 steps old, the most is 1" in schedule_violations(broken)[0].text


def test_without_a_flush_every_group_of_gradients_has_its_step():
    row = first_row(STALE).split()
    assert [r for r, _, _ in rules(edited(STALE, 0, lambda texts: texts.pop()))] == ["step"]
    twice = edited(STALE, 0, lambda texts: texts.append("d0.s0.STEP@5"))
    assert rules(twice) == [("step", 0, len(row))]
    never = replace(
        STALE, order=tuple(tuple(a for a in r if a.kind != "STEP") for r in STALE.order)
    )
    assert {rule for rule, _, _ in rules(never)} >= {"step", "missing"}


def test_with_a_flush_there_are_no_versions():
    assert rules(replace(STALE, flush=True))[0][0] == "version"


# -- memory ------------------------------------------------------------------------------------


def test_the_memory_bound_counts_stages_by_their_share_of_a_rank():
    assert rules(table(*GOOD, most_activations=2)) == []
    assert rules(table(*GOOD, most_activations=1)) == [("memory", 0, 1)]
    assert "2 activations are held from here on, at most 1" in (
        schedule_violations(table(*GOOD, most_activations=1))[0].text
    )
    looped = table("d0.s0.F.0 d0.s1.F.0 d0.s1.I.0 d0.s1.W.0 d0.s0.B.0", placements=((0, 0),))
    looped = replace(looped, pipes=(SchedulePipe("d0", (0, 0), (0,)),), most_activations=1)
    assert rules(looped) == []
    assert rules(replace(looped, most_activations=0.5)) == [("memory", 0, 1)]


def test_of_a_split_backward_only_the_weight_gradient_frees():
    schedule = table("F0 I0 F1 W0 B1", "F0 B0 F1 B1", most_activations=1)
    assert rules(schedule) == [("memory", 0, 2)]


# -- all together ------------------------------------------------------------------------------


def test_all_problems_come_together_by_rank_and_position():
    schedule = table("B0 F0 F1", "F0 B0 F1 B1 x.s0.F.0")
    with pytest.raises(PlanError) as caught:
        check_schedule(schedule)
    assert caught.value.problems == (
        "missing: rank 0 has no d0.s0.B.1: its backward is missing; add B, or I and W",
        "order: rank 0, cell 0 (d0.s0.B.0): needs d0.s0.F.0 in cell 1; swap them",
        "unknown-pipe: rank 1, cell 4 (x.s0.F.0): no pipe x; there are d0",
    )
    assert "the schedule mine cannot be executed" in str(caught.value)


def test_a_long_list_is_cut():
    with pytest.raises(PlanError) as caught:
        check_schedule(table("", "", microbatches=(tuple(range(10)),)))
    assert len(caught.value.problems) == 13
    assert caught.value.problems[-1] == "and 28 more"


# -- random tables -----------------------------------------------------------------------------


def randomly_lowered(draw, schedule, tags):
    sync = draw.choice(["none", "post", "eager", "eager-opt"])
    return lower(schedule, sync=sync, lookahead=draw.randint(0, 4), tags=tags)


@pytest.mark.parametrize("seed", sampled(range(100), 25))
def test_random_valid_tables_are_right_and_never_hang(seed):
    draw = random.Random(seed)
    schedule = random_schedule(draw)
    assert schedule_violations(schedule) == ()
    execute(schedule)
    for tags in (True, False):
        lowered = randomly_lowered(draw, schedule, tags)
        assert schedule_violations(lowered, transport_has_tags=tags) == ()
        execute(lowered, tags=tags)


# -- random corruptions ------------------------------------------------------------------------


def swap(draw, rows):
    row, other = draw.choice(rows), draw.choice(rows)
    i, j = draw.randrange(len(row)), draw.randrange(len(other))
    row[i], other[j] = other[j], row[i]


def swap_neighbours(draw, rows):
    row = draw.choice(rows)
    i = draw.randrange(len(row))
    row[i - 1], row[i] = row[i], row[i - 1]


def drop(draw, rows):
    row = draw.choice(rows)
    del row[draw.randrange(len(row))]


def duplicate(draw, rows):
    row, other = draw.choice(rows), draw.choice(rows)
    other.insert(draw.randrange(len(other) + 1), draw.choice(row))


def misplace(draw, rows):
    row, other = draw.choice(rows), draw.choice(rows)
    action = row.pop(draw.randrange(len(row)))
    other.insert(draw.randrange(len(other) + 1), action)


def shift(draw, rows):
    row = draw.choice(rows)
    action = row.pop(draw.randrange(len(row)))
    row.insert(draw.randrange(len(row) + 1), action)


def change(draw, rows):
    row = draw.choice(rows)
    i, part = (
        draw.randrange(len(row)),
        draw.choice(["kind", "pipe", "stage", "microbatch", "other"]),
    )
    values = {"kind": list(ActionKind), "pipe": ["d0", "d1", "u0", "x"]}.get(part, range(-1, 4))
    row[i] = replace(row[i], **{part: draw.choice(values)})


CORRUPTIONS = (swap, swap_neighbours, drop, duplicate, misplace, shift, change)


def corrupted(draw, schedule):
    rows = [list(row) for row in schedule.order]
    for _ in range(draw.choice([1, 1, 1, 2])):
        draw.choice(CORRUPTIONS)(draw, [row for row in rows if row] or [[schedule.order[0][0]]])
    return replace(schedule, order=tuple(map(tuple, rows)))


def tables_to_corrupt(draw, *, lowered):
    named = [
        make_schedule(name, stages=stages, microbatches=microbatches)
        for name in ("chimera", "1f1b", "gems", "zbv", "pipedream", "pipedream-2bw", "zb-h1")
        for stages, microbatches in ((2, 2), (2, 3), (4, 4))
        if name != "pipedream-2bw" or stages == 2
    ]
    schedules = [*named, *(random_schedule(draw) for _ in range(len(named)))]
    return [randomly_lowered(draw, s, tags=False) for s in schedules] if lowered else schedules


def harm(schedule, tags):
    try:
        execute(schedule, tags=tags)
    except Wrong as error:
        return str(error)
    return None


@pytest.mark.parametrize("lowered", [False, True])
@pytest.mark.parametrize("seed", sampled(list(range(5)), 1))
def test_random_corruptions_are_rejected_or_harmless(lowered, seed):
    """And little of what is harmless is rejected: only memory and the form of updates."""
    draw, number = random.Random(seed), 1000
    schedules = tables_to_corrupt(draw, lowered=lowered)
    outcomes = Counter()
    for _ in range(number):
        schedule, tags = corrupted(draw, draw.choice(schedules)), draw.random() < 0.5
        found = schedule_violations(schedule, transport_has_tags=tags)
        harmful = harm(schedule, tags)
        assert found or not harmful, f"{harmful}: {schedule}"
        assert all(violation.rule in RULES for violation in found)
        outcomes["rejected" if found else "harmless"] += 1
        if found and not harmful:
            outcomes["strict"] += 1
            strict = {"memory", "version", "duplicate", "sync", "step", "message-order"}
            assert {violation.rule for violation in found} <= strict
    assert outcomes["rejected"] > 0.7 * number
    assert outcomes["harmless"] > 0.05 * number
    assert outcomes["strict"] < 0.02 * number
