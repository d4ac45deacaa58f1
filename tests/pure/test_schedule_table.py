"""pure: schedules drawn as text, written as CSV and read back, in headway's dialect and torch's."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from headway.errors import DocumentError, PlanError
from headway.schedule.check import schedule_violations
from headway.schedule.csv_format import (
    from_csv,
    from_torch_csv,
    read_table,
    to_csv,
    to_torch_csv,
)
from headway.schedule.drawing import draw_aligned, draw_timed, legend
from headway.schedule.generators.registry import SCHEDULES, make_schedule
from headway.schedule.lowering import lower
from headway.schedule.pipeline_schedule import Action, PipelineSchedule, SchedulePipe
from headway.schedule.stage_costs import StageCosts
from headway.schedule.timing import time_schedule
from support.random_tables import random_schedule


def named(name, stages=4, microbatches=4, **options):
    return make_schedule(name, stages=stages, microbatches=microbatches, **options)


def timed(schedule, unit=None, **costs):
    given = StageCosts.of(schedule.stages, ranks=schedule.ranks, **costs)
    return draw_timed(schedule, time_schedule(schedule, given), unit=unit).splitlines()


# -- drawings ----------------------------------------------------------------------------------


def test_the_aligned_drawing_of_figure_3():
    assert draw_aligned(named("chimera")).splitlines() == [
        "P0 0.12c3da.b",
        "P1 .0213cadb.",
        "P2 .2031acbd.",
        "P3 2.30a1bc.d",
    ]


def test_the_aligned_drawing_of_figure_8():
    drawn = draw_aligned(named("chimera", 8, 8, pipes=4)).splitlines()
    assert drawn[0] == "P0 0.162734e5fcgdha.b"
    assert drawn[7] == "P7 4.526370a1bgchde.f"


def test_the_timed_drawing_has_one_column_per_unit():
    assert timed(named("chimera")) == [
        "P0 01.2cc3dd.aa..bb",
        "P1 .0213.ccaaddbb..",
        "P2 .2031.aaccbbdd..",
        "P3 23.0aa1bb.cc..dd",
    ]
    tenths = timed(named("chimera"), unit=0.1, forward=0.1, backward=0.2)
    assert tenths == timed(named("chimera"))
    twice = {"forward": 2, "backward": 2}
    assert timed(named("chimera"), **twice)[0] == "P0 01.2c3da.b"
    assert timed(named("chimera"), unit=1, **twice)[0] == "P0 0011..22cc33ddaa..bb"


def test_two_forwards_share_a_slot_of_doubling():
    drawn = draw_aligned(named("chimera", 4, 8, mode="doubling")).splitlines()
    assert drawn[0] == "P0 01 .  23 45 e  67 f  a  g  b  h  c  .  d"


def test_a_split_backward_has_capitals_for_weight_gradients():
    schedule = named("zb-h1")
    assert timed(schedule) == [
        "P0 0123...aAbBcCdD",
        "P1 .012..a3bAcBdCD",
        "P2 ..01.a2b3cAdBCD",
        "P3 ...0a1b2c3dABCD",
    ]
    assert legend(schedule) == (
        "digit: forward of that micro-batch, letter: its backward or input gradient (a is 0), "
        "capital: weight gradient, dot: idle"
    )


def test_more_than_ten_microbatches_get_cells_of_fixed_width():
    schedule = named("1f1b", 2, 11)
    lines = timed(schedule)
    assert lines[0].startswith("P0 F0  F1  .   .   B0  --- F2  B1  --- F3 ")
    assert lines[1].startswith("P1 .   F0  B0  --- F1  B1  --- F2  B2  --- ")
    said = "kind and number of the micro-batch (F: forward, B: backward), dot: idle"
    assert legend(schedule) == said


def test_several_stages_of_a_pipe_on_a_rank_are_told_apart():
    schedule = named("zbv", 2, 4)
    lines = timed(schedule)
    assert lines[0].startswith("P0 0F0 0F1 ")
    assert "3F0 3I0 3W0" in lines[0]
    assert legend(schedule).startswith("stage, kind and number of the micro-batch")


def test_ranks_are_aligned_and_idle_ends_are_drawn():
    lines = draw_aligned(named("chimera", 12, 2)).splitlines()
    assert lines[0].startswith("P0  0")
    assert lines[11].startswith("P11 1")
    assert len({len(line) for line in lines}) == 1


def test_lowered_tables_are_drawn_without_messages():
    schedule = named("chimera")
    lowered = lower(schedule, sync="eager")
    assert timed(lowered) == timed(schedule)
    assert draw_aligned(lowered) == draw_aligned(schedule)


def test_without_slots_there_is_no_aligned_drawing():
    with pytest.raises(ValueError, match="1f1b has no slots; use draw_timed"):
        draw_aligned(named("1f1b"))


def test_times_that_are_no_whole_units_are_rounded_and_nothing_vanishes():
    schedule = named("1f1b", 3, 6)
    costs = StageCosts.of(3, forward=(0.7, 1.0, 1.3), backward=(1.9, 2.0, 2.6), latency=0.35)
    drawn = draw_timed(schedule, time_schedule(schedule, costs))
    for line in drawn.splitlines():
        assert set("012345abcdef") <= set(line)


# -- headway's dialect -------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("sync", ["none", "eager"])
def test_what_is_written_is_read_back_exactly(name, sync):
    schedule = named(name, 4, 8)
    assert from_csv(to_csv(schedule)) == schedule
    assert from_csv(to_csv(schedule)).slots == schedule.slots
    lowered = lower(schedule, sync=sync)
    assert from_csv(to_csv(lowered)) == lowered


@pytest.mark.parametrize("seed", range(30))
def test_random_tables_are_read_back_exactly(seed):
    draw = random.Random(seed)
    schedule = replace(
        random_schedule(draw),
        name=f"number {seed}",
        recompute=tuple(s for s in range(4) if draw.random() < 0.3),
        blockwise=draw.random() < 0.5,
        halves=draw.random() < 0.5,
        flush=draw.random() < 0.5,
        most_activations=draw.choice([None, 2, 0.1, 4 / 3]),
    )
    again = from_csv(to_csv(schedule))
    assert again == schedule
    assert schedule == again


def test_the_text_of_a_table():
    assert to_csv(named("chimera", 2, 2)).splitlines() == [
        "# headway schedule",
        "# name = chimera",
        "# pipe d0 = ranks 0 1, microbatches 0",
        "# pipe u0 = ranks 1 0, microbatches 1",
        "# most_activations = 2",
        "# slots = columns",
        "d0.s0.F.0,u0.s1.F.1,u0.s1.B.1,d0.s0.B.0",
        "u0.s0.F.1,d0.s1.F.0,d0.s1.B.0,u0.s0.B.1",
    ]


def test_a_rank_without_actions_is_a_row():
    schedule = PipelineSchedule(
        name="lonely",
        pipes=(SchedulePipe("d0", (1,), (0,)),),
        order=((), tuple(map(Action.parse, ("d0.s0.F.0", "d0.s0.B.0"))), ()),
    )
    assert from_csv(to_csv(schedule)) == schedule
    assert to_csv(schedule).splitlines()[-3:] == [".", "d0.s0.F.0,d0.s0.B.0", "."]


def test_slots_are_written_only_if_the_rows_follow_them():
    schedule = named("chimera")
    rows = list(schedule.order)
    rows[0] = (*rows[0][1::-1], *rows[0][2:])
    swapped = replace(schedule, order=tuple(rows))
    assert "# slots" not in to_csv(swapped)
    assert from_csv(to_csv(swapped)) == swapped


BY_HAND = """\
## my own schedule
d0.s0.F.0, d0.s0.F.1, .,         d0.s0.B.0,          d0.s0.B.1

-        , d0.s1.F.0, d0.s1.B.0, d0.s1.F.1 d0.s1.B.1
"""


def test_a_table_by_hand_needs_no_header():
    schedule = from_csv(BY_HAND, name="mine")
    assert schedule.pipes == (SchedulePipe("d0", (0, 1), (0, 1)),)
    assert [len(row) for row in schedule.order] == [4, 4]
    assert schedule_violations(schedule) == ()
    assert schedule.name == "mine"
    assert schedule.slots is None


def test_the_microbatches_of_a_table_without_header_enter_as_stage_0_takes_them():
    rows = "d0.s0.F.3,d0.s0.F.1,d0.s0.B.1,d0.s0.B.3\nd0.s1.F.3,d0.s1.B.3,d0.s1.F.1,d0.s1.B.1\n"
    assert from_csv(rows).pipes[0].microbatches == (3, 1)
    v = "d0.s0.F.0,d0.s1.F.0,d0.s1.B.0,d0.s0.B.0\n"
    assert from_csv(v).pipes == (SchedulePipe("d0", (0, 0), (0,)),)


def test_spreadsheets_quote_cells_and_begin_with_a_mark():
    text = '\ufeff"d0.s0.F.0","d0.s0.B.0",\r\n'
    assert [str(action) for action in from_csv(text).order[0]] == ["d0.s0.F.0", "d0.s0.B.0"]


def problems(text, read=from_csv, **options):
    with pytest.raises(DocumentError) as caught:
        read(text, where="my.csv", **options)
    return caught.value.problems


def test_all_problems_of_a_file_come_at_once_by_line_and_column():
    text = """\
# nam = mine
# pipe d0 = ranks 0-1, microbatch 0
# pipe u0 = ranks 3-1, microbatches x
# recompute = yes
# name = a
# name = b
# flush: false
# Attention: this is a comment
d0.s0.F.0,d0.s0.X.1
  d0.s1.F, d0.s1.F.0 d0.s1.SEND.0
"""
    assert problems(text) == (
        "my.csv:1:3  unknown key nam; did you mean name? (begin a comment with ##)",
        "my.csv:2:3  write a pipe like '# pipe d0 = ranks 0-3, microbatches 0 1'",
        "my.csv:3:3  the range 3-1 goes down; write its numbers one by one",
        "my.csv:4:3  'yes' is not true, false or stages like 0 2-3",
        "my.csv:6:3  name is there already",
        "my.csv:7:3  write = behind flush",
        "my.csv:9:11  'd0.s0.X.1' is no action; write one like d0.s2.F.5 or d0.s2.STEP",
        "my.csv:10:3  'd0.s1.F': F needs a micro-batch",
        "my.csv:10:22  'd0.s1.SEND.0': SEND needs the stage at the other end",
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("# most-activations = 4", "unknown key most-activations; did you mean most_activations?"),
        ("# Pipe d0 = ranks 0, microbatches 0", "unknown key Pipe; did you mean pipe?"),
        ("# pipe = ranks 0, microbatches 0", "write a pipe like"),
        ("# pipe d0 = ranks 0 x, microbatches 0", "'x' is no number and no range like 0-3"),
        ("# most_activations = many", "'many' is no number of activations"),
        ("# skips = 0-2", "'0-2' is no skip; write one like 0>2"),
        ("# slots = rows", "'rows' is not columns"),
        ("# name of = x", "name stands alone before =, without of"),
    ],
)
def test_a_header_that_is_wrong(line, said):
    (problem,) = problems(f"{line}\nd0.s0.F.0,d0.s0.B.0\n")
    assert problem.startswith("my.csv:1:3  ")
    assert said in problem


def test_what_cannot_be_inferred_is_asked_for():
    two = problems("d0.s0.F.0,u0.s0.F.1\n")
    assert two == (
        "my.csv:1:11  pipe u0 beside d0: say what each holds in lines like "
        "'# pipe d0 = ranks 0 1, microbatches 0-3'",
    )
    twice = problems("d0.s0.F.0,d0.s1.F.0\nd0.s1.B.0\n")
    assert twice == (
        "my.csv:2:1  stage 1 is here and on rank 0; one of the two is wrong, or say so in a line "
        "'# pipe d0 = ranks ...'",
    )
    assert problems("d0.s1.F.0\n") == ("my.csv:1:1  no rank does anything for stage 0",)
    assert problems(".\n") == ("my.csv:1:1  no rank does anything for stage 0",)
    assert problems("# name = x\n") == ("my.csv:1:1  there are no rows; write one for each rank",)


def test_a_table_may_be_wrong_in_what_it_does():
    text = "# pipe d0 = ranks 0, microbatches 0\nd0.s1.F.0\n"
    found = [violation.rule for violation in schedule_violations(from_csv(text))]
    assert found == ["missing", "missing", "unknown-stage"]


# -- torch's dialect ---------------------------------------------------------------------------


DUALPIPE_V = """\
0F0,0F1,0F2,3F0,3I0,3W0,3F1,(0F3;3B1)OVERLAP_F_B,(3F2;0B0)OVERLAP_F_B,3B2,(3F3;0B1)OVERLAP_F_B,\
3B3,0I2,0W2,0I3,0W3
1F0,2F0,1F1,2F1,1F2,2B0,(2F2;1B0)OVERLAP_F_B,(1F3;2B1)OVERLAP_F_B,(2F3;1B1)OVERLAP_F_B,2B2,1B2,\
2I3,1I3,2W3,1W3
"""
ZBV = """\
0UNSHARD,3UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,3RECV_F0,3F0,3I0,3SEND_B0,3RECV_F1,3W0,3F1,3I1,\
3SEND_B1,0RECV_B0,3W1,3REDUCE_GRAD,3RESHARD,0I0,0W0,0RECV_B1,0I1,0W1,0REDUCE_GRAD,0RESHARD
1UNSHARD,2UNSHARD,1RECV_F0,1F0,1RECV_F1,2F0,2SEND_F0,1F1,2RECV_B0,2F1,2SEND_F1,2I0,2W0,2RECV_B1,\
1I0,1SEND_B0,1W0,2I1,2W1,2REDUCE_GRAD,2RESHARD,1I1,1SEND_B1,1W1,1REDUCE_GRAD,1RESHARD
"""
"""Written by torch 2.13."""


def test_a_table_of_torch_is_read_and_right():
    schedule = from_torch_csv(DUALPIPE_V, name="dualpipe-v")
    assert schedule.pipes == (SchedulePipe("d0", (0, 1, 1, 0), (0, 1, 2, 3)),)
    assert schedule_violations(schedule) == ()
    expected = named("dualpipe-v", 2, 4)
    assert replace(expected, most_activations=None) == schedule


def test_a_table_of_torch_with_messages_is_read_and_right():
    schedule = from_torch_csv(ZBV)
    assert schedule_violations(schedule) == ()
    assert schedule_violations(schedule, transport_has_tags=False) == ()
    first = " ".join(map(str, schedule.order[0]))
    assert first.startswith("d0.s0.F.0 d0.s0.SEND.0>1 d0.s0.F.1 d0.s0.SEND.1>1 d0.s3.POST.0<2")
    assert "d0.s0.POST.0<1 d0.s3.W.1 d0.s3.SYNC d0.s0.RECV.0<1 d0.s0.I.0 d0.s0.W.0" in first
    assert first.endswith("d0.s0.SYNC d0.s3.WAIT d0.s0.WAIT")


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zbv", "chimera", "dualpipe", "gems"])
def test_what_is_written_for_torch_is_read_back(name):
    schedule = named(name, 4, 8)
    pipes = len(schedule.pipes)
    back = from_torch_csv(to_torch_csv(schedule), name=name, pipes=pipes)
    plain = replace(schedule, most_activations=None)
    assert back == plain
    lowered = lower(plain)
    assert from_torch_csv(to_torch_csv(lowered), name=name, pipes=pipes) == lowered


def test_the_stages_of_several_pipes_are_numbered_through():
    assert to_torch_csv(named("chimera", 4, 4)).splitlines() == [
        "0F0,0F1,7F0,7B0,7F1,7B1,0B0,0B1",
        "1F0,6F0,1F1,6F1,6B0,1B0,6B1,1B1",
        "5F0,2F0,5F1,2F1,2B0,5B0,2B1,5B1",
        "4F0,4F1,3F0,3B0,3F1,3B1,4B0,4B1",
    ]
    four = named("chimera", 4, 4, pipes=4)
    names = [p.name for p in from_torch_csv(to_torch_csv(four), pipes=4).pipes]
    assert names == ["d0", "d1", "u0", "u1"]


def test_idle_slots_of_torch_are_empty_cells():
    schedule = from_torch_csv("0F0,,0B0\n,1F0,1B0\n")
    assert [[str(a) for a in row] for row in schedule.order] == [
        ["d0.s0.F.0", "d0.s0.B.0"],
        ["d0.s1.F.0", "d0.s1.B.0"],
    ]


def test_what_torch_cannot_say_is_refused():
    with pytest.raises(PlanError, match="versions of the weights"):
        to_torch_csv(named("pipedream"))
    with pytest.raises(PlanError, match="skip connections"):
        to_torch_csv(replace(named("1f1b", 3, 3), skips=((0, 2),)))


def test_all_problems_of_a_table_of_torch_come_at_once():
    read = {"read": from_torch_csv}
    assert problems("0F0, 0X1,(0F1;0Q1)OVERLAP_F_B\n1F\n", **read) == (
        "my.csv:1:6  '0X1' is no action of torch; write one like 2F0 or 2SEND_F0",
        "my.csv:1:15  '0Q1' is no action of torch; write one like 2F0 or 2SEND_F0",
        "my.csv:2:1  '1F' is no action of torch; write one like 2F0 or 2SEND_F0",
    )
    assert problems("0F0,1F0\n1B0,0B0\n", **read) == (
        "my.csv:2:1  stage 1 is on rank 0 already",
        "my.csv:2:5  stage 0 is on rank 0 already",
    )
    assert problems("0F0,0B0\n2F0,2B0\n", **read) == ("my.csv:1:1  no rank has stage 1",)
    assert problems("0F0,0B0\n2F0,1B0\n", pipes=2, **read) == (
        "my.csv:1:1  3 stages cannot be those of 2 pipes; give the right number of pipes",
    )
    assert problems("", **read)[0].startswith("my.csv:1:1  0 stages")


# -- files -------------------------------------------------------------------------------------


def test_a_file_tells_its_dialect(tmp_path):
    own, torch = tmp_path / "own.csv", tmp_path / "other.csv"
    own.write_text(BY_HAND)
    torch.write_text(DUALPIPE_V)
    assert read_table(own).name == "own"
    assert read_table(torch).stages == 4
    own.write_text(to_csv(named("chimera")))
    assert read_table(own) == named("chimera")
    torch.write_text(to_torch_csv(named("chimera")))
    assert read_table(torch, pipes=2).order == named("chimera").order


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(DocumentError, match="No such file"):
        read_table(tmp_path / "none.csv")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DocumentError, match="cannot be read"):
        read_table(tmp_path / "bytes.csv")


def test_stages_that_recompute():
    """`true` is of files of version 0.1 before stages could be named."""
    cells = "d0.s0.F.0,d0.s0.B.0\nd0.s1.F.0,d0.s1.B.0\n"
    both = (0, 1)
    for said, again in {"true": both, "false": (), "1": (1,), "1 0": both, "0-1": both}.items():
        assert from_csv(f"# recompute = {said}\n{cells}").recompute == again
    table = from_csv(f"# recompute = 1\n# blockwise = true\n{cells}")
    assert table.blockwise
    assert "# recompute = 1\n# blockwise = true\n" in to_csv(table)
