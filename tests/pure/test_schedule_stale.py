"""pure: weight versions of the schedules that never run empty, and schedules by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headway.errors import PlanError, UsageError
from headway.schedule.generators.gpipe_and_1f1b import one_f_one_b, pipedream, pipedream_2bw
from headway.schedule.generators.registry import SCHEDULES, make_schedule
from headway.schedule.pipeline_schedule import NO_NUMBER, Action, ActionKind

SIZES = [(D, N) for D in (1, 2, 3, 4, 5, 8) for N in (*range(1, 2 * D + 3), 5 * D)]


def rows(schedule):
    def text(a):
        number = "" if a.microbatch == NO_NUMBER else a.microbatch
        return f"{a.kind}{number}@{a.version}"

    return [" ".join(map(text, order)) for order in schedule.order]


def versions_alive(order):
    """What a rank holds at each moment: the newest version, and what a backward still needs."""
    newest, needed = 0, []
    for a in order:
        if a.kind == ActionKind.FORWARD:
            assert a.version <= newest, "a version that is not there yet"
            needed.append(a.version)
        elif a.kind == ActionKind.BACKWARD:
            needed.remove(a.version)
        elif a.kind == ActionKind.STEP:
            newest += 1
            assert a.version == newest
        yield {newest, *needed}


def test_pipedream_by_hand():
    assert rows(pipedream(2, 3)) == [
        "F0@0 F1@0 B0@0 STEP@1 F2@1 B1@0 STEP@2 B2@1 STEP@3",
        "F0@0 B0@0 STEP@1 F1@1 B1@1 STEP@2 F2@2 B2@2 STEP@3",
    ]


def test_2bw_by_hand():
    assert rows(pipedream_2bw(2, 5)) == [
        "F0@0 F1@0 B0@0 F2@0 B1@0 STEP@1 F3@0 B2@0 F4@1 B3@0 STEP@2 B4@1 STEP@3",
        "F0@0 B0@0 F1@0 B1@0 STEP@1 F2@0 B2@0 F3@0 B3@0 STEP@2 F4@1 B4@1 STEP@3",
    ]


@pytest.mark.parametrize("generate", [pipedream, pipedream_2bw])
def test_without_steps_and_versions_the_order_is_that_of_1f1b(generate):
    for D, N in SIZES:
        schedule = generate(D, N)
        assert not schedule.flush
        bare = [tuple(replace(a, version=NO_NUMBER) for a in order) for order in schedule.compute]
        assert bare == list(one_f_one_b(D, N).order)


@pytest.mark.parametrize("generate", [pipedream, pipedream_2bw])
def test_a_backward_uses_the_version_of_its_forward(generate):
    for D, N in SIZES:
        for order in generate(D, N).order:
            used = {a.microbatch: a.version for a in order if a.kind == ActionKind.FORWARD}
            assert len(used) == N
            assert all(
                used[a.microbatch] == a.version for a in order if a.kind == ActionKind.BACKWARD
            )


def test_pipedream_steps_after_every_backward_and_forwards_use_the_newest():
    for D, N in SIZES:
        for stage, order in enumerate(pipedream(D, N).order):
            newest = 0
            for a, behind in zip(order, (*order[1:], None), strict=True):
                if a.kind == ActionKind.FORWARD:
                    assert a.version == newest == max(0, a.microbatch - (D - 1 - stage))
                elif a.kind == ActionKind.STEP:
                    newest += 1
                else:
                    assert behind == Action(ActionKind.STEP, "d0", stage, version=newest + 1)
            assert newest == N


def test_pipedream_keeps_as_many_versions_as_stages_follow():
    for D, N in SIZES:
        for stage, order in enumerate(pipedream(D, N).order):
            most = max(map(len, versions_alive(order)))
            assert most <= min(D - stage, N)
            if 2 * (D - stage) - 1 <= N:  # long enough for each forward under way to have its own
                assert most == D - stage


def test_2bw_keeps_two_versions_and_is_one_step_behind():
    for D, N in SIZES:
        for m in (max(1, D - 1), D, D + 1, 2 * D):
            for order in pipedream_2bw(D, N, group=m).order:
                assert max(map(len, versions_alive(order))) <= 2
                for a in order:
                    if a.kind != ActionKind.STEP:
                        assert a.version == max(0, a.microbatch // m - 1)


def test_2bw_steps_after_each_group():
    """Also after the last one, which need not be full."""
    for D, N in SIZES:
        for order in pipedream_2bw(D, N, group=D + 1).order:
            done, steps = 0, []
            for a in order:
                done += a.kind == ActionKind.BACKWARD
                if a.kind == ActionKind.STEP:
                    steps.append(done)
            assert steps == [*range(D + 1, N, D + 1), N]


def test_2bw_refuses_groups_that_end_too_late():
    with pytest.raises(PlanError, match="use groups of 3 or more"):
        pipedream_2bw(4, 12, group=2)
    with pytest.raises(PlanError, match="use groups of 1 or more"):
        pipedream_2bw(1, 12, group=0)


# ---- by name ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_name_makes_the_schedule_of_that_name(name):
    schedule = make_schedule(name, stages=4, microbatches=8)
    assert schedule.name == name
    assert schedule.ranks == 4
    kind = SCHEDULES[name]
    assert kind.about
    assert kind.source
    assert not kind.about.endswith(".")


def test_options_reach_the_generator():
    assert make_schedule("interleaved", stages=4, microbatches=8, virtual=3).stages == 12
    assert len(make_schedule("chimera", stages=8, microbatches=8, pipes=4).pipes) == 4
    doubled = make_schedule("chimera", stages=4, microbatches=8, mode="doubling")
    assert doubled == make_schedule("chimera-doubling", stages=4, microbatches=8)


def test_an_unknown_name_gets_the_nearest_one():
    with pytest.raises(UsageError, match="did you mean zbv"):
        make_schedule("zbw", stages=4, microbatches=8)
    with pytest.raises(UsageError, match="legal: 1f1b, breadth-first"):
        make_schedule("?", stages=4, microbatches=8)
