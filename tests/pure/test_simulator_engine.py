"""pure: the event engine: order, several streams, shared streams, what decides, what cannot be."""

from __future__ import annotations

import time
from random import Random

import pytest

from headway.errors import PlanError
from headway.simulator.engine import NO_TASK, TaskProgram, run_tasks


def test_a_stream_does_one_thing_at_a_time_first_ready_first_served():
    """By hand: c is ready at 2, b at 3; c goes first although b was added before."""
    program = TaskProgram()
    one, two = program.stream(0, "compute"), program.stream(0, "exchange")
    a = program.add("forward", (one,), 3.0)
    c = program.add("forward", (), 2.0)
    b = program.add("sums", (two,), 1.0, (a,))
    d = program.add("sums", (two,), 4.0, (c,), delay=0.5)
    e = program.add("forward", (one,), 1.0, (b, d))
    played = run_tasks(program)
    assert [played.starts[t] for t in (a, c, d, b, e)] == [0.0, 0.0, 2.0, 6.0, 7.0]
    assert played.done[d] == 6.5
    assert played.makespan == 8.0
    assert played.awaited[b] == a
    assert played.cause[b] == d
    assert played.path() == (c, d, b, e)
    assert played.cause[a] == NO_TASK


def test_a_collective_takes_all_its_streams_at_once():
    program = TaskProgram()
    lanes = [program.stream(n, "exchange") for n in range(2)]
    first = program.add("sums", (lanes[0],), 5.0)
    both = program.add("sums", lanes, 1.0)
    other = program.add("sums", (lanes[1],), 1.0)
    played = run_tasks(program)
    assert (played.starts[first], played.starts[both], played.starts[other]) == (0.0, 5.0, 6.0)


def test_flows_of_a_shared_stream_divide_it_evenly():
    """A of 4 s begins at 0, B of 2 s at 1, C of 1 s at 5. A alone until 1 (3 s left), then half
    each: B ends at 5, A has 1 s left and shares with C, both end at 7."""
    program = TaskProgram()
    link = program.stream(0, "messages", shared=True)
    a = program.add("messages", (link,), 4.0)
    b = program.add("messages", (link,), 2.0, (program.add("", (), 1.0),))
    c = program.add("messages", (link,), 1.0, (program.add("", (), 5.0),))
    played = run_tasks(program)
    assert [played.ends[t] for t in (a, b, c)] == pytest.approx([7.0, 5.0, 7.0])


def test_a_shared_stream_is_never_idle_and_carries_everything():
    """Against a small step-by-step simulation with random flows."""
    for seed in range(50):
        random = Random(seed)
        flows = [(random.uniform(0, 5), random.uniform(0.1, 3)) for _ in range(8)]
        program = TaskProgram()
        link = program.stream(0, "messages", shared=True)
        tasks = [
            program.add("messages", (link,), size, (program.add("", (), begin),))
            for begin, size in flows
        ]
        played = run_tasks(program)
        assert [played.ends[t] for t in tasks] == pytest.approx(by_steps(flows), rel=1e-9)


def by_steps(flows):
    left, now, ends = [size for _, size in flows], 0.0, [0.0] * len(flows)
    while any(x > 0 for x in left):
        on = [i for i, (begin, _) in enumerate(flows) if begin <= now and left[i] > 0]
        coming = [begin for begin, _ in flows if begin > now]
        until = min(coming, default=float("inf"))
        if on:
            until = min(until, now + min(left[i] for i in on) * len(on))
        for i in on:
            left[i] -= (until - now) / len(on)
            if left[i] <= 1e-12:
                left[i], ends[i] = 0.0, until
        now = until
    return ends


def test_what_waits_for_itself_is_named():
    program = TaskProgram()
    a = program.add("forward", (), 1.0, label="first")
    b = program.add("forward", (), 1.0, (a,), label="second")
    program.need(a, b)
    with pytest.raises(PlanError) as error:
        run_tasks(program)
    assert list(error.value.problems) == ["first waits for second", "second waits for first"]


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_time_does_not_run_backwards(seconds):
    with pytest.raises(ValueError, match="forward"):
        TaskProgram().add("forward", (), seconds)


def test_a_flow_has_one_stream():
    program = TaskProgram()
    streams = [program.stream(0, "messages", shared=True), program.stream(0, "compute")]
    with pytest.raises(ValueError, match="one stream"):
        program.add("messages", streams, 1.0)


def test_nothing_to_do_takes_no_time():
    assert run_tasks(TaskProgram()).makespan == 0.0
    assert run_tasks(TaskProgram()).path() == ()


def test_the_time_to_play_grows_with_the_tasks_alone():
    """50 times the tasks in at most 500 times the time: quadratic would be 2,500."""

    def seconds(number):
        random, program = Random(0), TaskProgram()
        streams = [program.stream(n, "compute") for n in range(16)]
        for task in range(number):
            before = {random.randrange(task) for _ in range(2)} if task else set()
            program.add("forward", (streams[task % 16],), random.random(), tuple(before))
        begin = time.process_time()
        run_tasks(program)
        return time.process_time() - begin

    least = min(seconds(1_000) for _ in range(5))
    assert min(seconds(50_000) for _ in range(2)) < 500 * max(least, 1e-3)
