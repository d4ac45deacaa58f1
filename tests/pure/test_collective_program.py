"""pure: collective programs: each rule of the check, every generator, random corruptions."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import get_args

import pytest

from headway.collective.generators import (
    chain,
    direct,
    halving_doubling,
    hierarchical,
    ring,
    servers,
    star,
    trees,
    two_level,
)
from headway.collective.nodes import Nodes
from headway.collective.program.check import PROGRAM_RULES, check_program, program_problems
from headway.collective.program.program import (
    ROOTED,
    BufferSpan,
    CollectiveProgram,
    CollectiveTask,
    Combine,
    Copy,
    Op,
    Recv,
    Send,
    Wait,
    even_sizes,
    proportional_sizes,
    rounds,
)
from headway.errors import PlanError
from support.program_oracle import Stuck, carry_out, expected

SIZES = (0, 1, 3, 17)


def random_tree(ranks, root, draw):
    order = [root, *draw.sample([r for r in range(ranks) if r != root], ranks - 1)]
    parents = [None] * ranks
    for place, rank in enumerate(order[1:], start=1):
        parents[rank] = draw.choice(order[:place])
    return tuple(parents)


def binomial(ranks, root):
    """The tree of recursive doubling: without its lowest bit, a place is that of its parent."""
    parents = [None] * ranks
    for place in range(1, ranks):
        parents[(root + place) % ranks] = (root + (place & (place - 1))) % ranks
    return tuple(parents)


def random_nodes(ranks, draw):
    return Nodes.of([str(draw.randrange(3)) for _ in range(ranks)])


def programs(collective):
    """Of every generator that makes one, with several options."""
    c, n = collective, collective.ranks
    draw = random.Random(f"{c}")
    yield direct(c)
    if c.op == "all_to_all":
        return
    order = draw.sample(range(n), n)
    yield from (ring(c), ring(c, chunk=2, order=order))
    yield from (hierarchical(c, nodes, chunk=2) for nodes in (Nodes.one(n), random_nodes(n, draw)))
    roots = range(n) if c.root is None else [c.root] * 2
    yield trees(c, [(random_tree(n, r, draw), draw.uniform(0.1, 2)) for r in roots], chunk=2)
    if c.root is None:
        yield halving_doubling(c)
    if c.op == "all_reduce":
        yield from (servers(c), servers(c, [n - 1, 0][: min(n, 2)], chunk=3))


def collectives(ranks):
    draw = random.Random(ranks)
    for op in get_args(Op):
        for elements in (*SIZES, 4 * ranks):
            yield CollectiveTask.of(op, ranks, elements, root=ranks - 1 if op in ROOTED else None)
    shares = tuple(draw.randrange(4) for _ in range(ranks))
    yield CollectiveTask("all_gather", ranks, shares)
    yield CollectiveTask("reduce_scatter", ranks, shares)
    table = tuple(tuple(draw.randrange(4) for _ in range(ranks)) for _ in range(ranks))
    yield CollectiveTask("all_to_all", ranks, (), table=table)


@pytest.mark.parametrize("ranks", range(1, 9))
def test_every_generator_makes_what_it_is_asked_for(ranks):
    for collective in collectives(ranks):
        for program in programs(collective):
            assert program_problems(program) == (), program.name
            assert all(size > 0 for size in program.sent().values())


@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_numbers_come_out_right_whatever_the_timing(ranks):
    for collective in collectives(ranks):
        for program in programs(collective):
            for seed in range(2):
                found = carry_out(program, seed)
                assert found == [expected(program, rank) for rank in range(ranks)], program.name


# -- each rule ---------------------------------------------------------------------------------

A, B, T = BufferSpan("out", 0, 1), BufferSpan("out", 1, 2), BufferSpan("tmp", 0, 1)
SWAP = (Recv(1, 0, T), Send(1, 0, A), Wait((0, 1)), Combine(A, T))
BACK = (Recv(0, 0, T), Send(0, 0, A), Wait((0, 1)), Combine(A, T))


def program(*steps, op="all_reduce", elements=1, scratch=1):
    collective = CollectiveTask.of(op, len(steps), elements)
    return CollectiveProgram(collective, steps, (scratch,) * len(steps), "mine")


def rules(*steps, **facts):
    return [(p.rule, p.rank, p.place) for p in program_problems(program(*steps, **facts))]


def test_two_ranks_that_swap_and_add_are_right():
    assert rules(SWAP, BACK) == []


CASES = {
    "malformed": [
        ((Recv(0, 0, T), *SWAP[1:]), ("malformed", 0, 0)),
        ((Recv(2, 0, T), *SWAP[1:]), ("malformed", 0, 0)),
        ((*SWAP[:3], Combine(A, BufferSpan("tmp", 0, 2))), ("malformed", 0, 3)),
        ((*SWAP[:3], Combine(A, BufferSpan("tmp", 0, 0))), ("malformed", 0, 3)),
        ((*SWAP[:3], Combine(A, A)), ("malformed", 0, 3)),
    ],
    "unmatched": [((Recv(1, 7, T), *SWAP[1:]), ("unmatched", 0, 0))],
    "wait": [
        ((*SWAP[:2], Wait((0, 1, 1)), SWAP[3]), ("wait", 0, 2)),
        ((*SWAP[:2], Wait((0, 2)), SWAP[3]), ("wait", 0, 2)),
    ],
    "unwaited": [((*SWAP[:2], Wait((0,)), SWAP[3]), ("unwaited", 0, 1))],
    "receive-first": [
        ((Send(1, 0, A), Recv(1, 0, T), Wait((0, 1)), SWAP[3]), ("receive-first", 0, 1))
    ],
    "race": [
        ((*SWAP[:2], SWAP[3], SWAP[2]), ("race", 0, 2)),
        ((*SWAP[:2], Wait((0,)), SWAP[3], Wait((1,))), ("race", 0, 3)),
    ],
    "result": [(SWAP[:3], ("result", 0, -1)), ((*SWAP, SWAP[3]), ("result", 0, -1))],
    "undefined": [((*SWAP[:3], Combine(A, BufferSpan("tmp", 1, 2))), ("undefined", 0, 3))],
}


@pytest.mark.parametrize(("first", "wanted"), [case for cases in CASES.values() for case in cases])
def test_each_rule_finds_what_breaks_it(first, wanted):
    assert wanted in rules(first, BACK, scratch=2)


def test_ranks_that_wait_for_each_other_in_a_circle():
    one = (Recv(1, 0, T), Wait((0,)), Send(1, 0, A), Wait((2,)), Combine(A, T))
    two = (Recv(0, 0, T), Wait((0,)), Send(0, 0, A), Wait((2,)), Combine(A, T))
    assert rules(one, two) == [("deadlock", 0, 0), ("deadlock", 1, 0)]
    head_on = (Send(1, 0, A), Wait((0,)), Recv(1, 0, T), Wait((2,)), Combine(A, T))
    other = (Send(0, 0, A), Wait((0,)), Recv(0, 0, T), Wait((2,)), Combine(A, T))
    found = rules(head_on, other)
    assert ("deadlock", 0, 0) in found  # a send is through only when its receive has begun


def test_what_is_read_only_stays():
    gather = program(
        (
            Recv(1, 0, B),
            Send(1, 0, BufferSpan("in", 0, 1)),
            Wait((0, 1)),
            Copy(BufferSpan("in", 0, 1), B),
        ),
        (
            Recv(0, 0, A),
            Send(0, 0, BufferSpan("in", 0, 1)),
            Wait((0, 1)),
            Copy(B, BufferSpan("in", 0, 1)),
        ),
        op="all_gather",
        elements=2,
    )
    assert [p.rule for p in program_problems(gather)] == ["read-only"]


def test_every_rule_has_a_failing_example():
    assert {*CASES, "deadlock", "read-only"} == set(PROGRAM_RULES)


def test_all_problems_come_together():
    with pytest.raises(PlanError) as caught:
        check_program(program((*SWAP[:2], Wait((0,))), BACK[:2]))
    assert len(caught.value.problems) == 3
    assert "mine does not carry out all_reduce of 1 elements on 2 ranks" in str(caught.value)


# -- corruptions -------------------------------------------------------------------------------


def corrupted(program, draw):
    """One change: a step dropped, doubled, moved, aimed elsewhere, of another span or tag."""
    rank = draw.randrange(program.ranks)
    steps = list(program.steps[rank])
    place = draw.randrange(len(steps))
    step = steps[place]
    kind = draw.choice(["drop", "double", "swap", "change", "change", "change"])
    if kind in ("drop", "double"):
        steps[place : place + 1] = [] if kind == "drop" else [step, step]
        by = -1 if kind == "drop" else 1
        steps = [moved(one, place, by) for one in steps]
    elif kind == "swap" and place + 1 < len(steps):
        steps[place], steps[place + 1] = steps[place + 1], steps[place]
    else:
        steps[place] = changed(step, program.ranks, draw)
    rows = (*program.steps[:rank], tuple(steps), *program.steps[rank + 1 :])
    return replace(program, steps=rows)


def moved(step, place, by):
    if isinstance(step, Wait):
        return Wait(tuple(one + by if one > place else one for one in step.steps))
    return step


def changed(step, ranks, draw):
    if isinstance(step, Wait):
        return Wait(step.steps[1:] if draw.random() < 0.5 else (*step.steps, step.steps[0] + 1))
    if isinstance(step, Recv | Send):
        field = "into" if isinstance(step, Recv) else "of"
        return draw.choice(
            [
                replace(step, peer=draw.randrange(ranks)),
                replace(step, tag=step.tag + draw.choice([-1, 1])),
                replace(step, **{field: other(getattr(step, field), draw)}),
            ]
        )
    field = draw.choice(["dst", "src"])
    if draw.random() < 0.3:
        kind = Copy if isinstance(step, Combine) else Combine
        return kind(step.dst, step.src)
    return replace(step, **{field: other(getattr(step, field), draw)})


def other(span, draw):
    if draw.random() < 0.2:
        return replace(span, buffer=draw.choice(["in", "out", "tmp"]))
    start, stop = draw.choice([(1, 1), (-1, -1), (0, 1), (0, -1), (1, 0)])
    return replace(span, start=span.start + start, stop=span.stop + stop)


def well_formed(program):
    return not any(p.rule in ("malformed", "read-only", "wait") for p in program_problems(program))


@pytest.mark.parametrize("seed", range(6))
def test_a_corrupted_program_is_rejected_or_still_right(seed):
    draw = random.Random(seed)
    rejected = accepted = 0
    good = [
        p
        for ranks in (2, 3, 4)
        for op in get_args(Op)
        for p in programs(CollectiveTask.of(op, ranks, 7, root=1 if op in ROOTED else None))
    ]
    for _ in range(120):
        bad = corrupted(draw.choice(good), draw)
        if program_problems(bad):
            rejected += 1
            continue
        accepted += 1
        for timing in range(4):
            found = carry_out(bad, timing)
            assert found == [expected(bad, rank) for rank in range(bad.ranks)]
    assert rejected > 60
    assert accepted


def test_what_is_rejected_as_wrong_can_go_wrong():
    """Not only suspicious: for some timing the numbers are wrong, or ranks wait forever."""
    draw = random.Random(7)
    good = list(programs(CollectiveTask.of("all_reduce", 3, 7)))
    wrong = 0
    for _ in range(250):
        bad = corrupted(draw.choice(good), draw)
        found = {problem.rule for problem in program_problems(bad)}
        if not found or not found <= {"result", "deadlock", "race"}:
            continue
        for timing in range(20):
            try:
                result = carry_out(bad, timing)
            except Stuck:
                break
            if result != [expected(bad, rank) for rank in range(3)]:
                break
        else:
            assert found == {"race"}  # may need another timing than the drawn ones
            continue
        wrong += 1
    assert wrong > 10


# -- what programs cost, and what is refused ---------------------------------------------------


def test_rounds_are_those_of_the_literature():
    for n, log in ((2, 1), (4, 2), (8, 3)):
        c = CollectiveTask.of("all_reduce", n, 64)
        assert rounds(ring(c)) == 2 * (n - 1)
        assert rounds(direct(c)) == 2
        assert rounds(halving_doubling(c)) == 2 * log
        assert rounds(trees(c, [(binomial(n, 0), 1.0)], chunk=64)) == 2 * log
        assert rounds(trees(c, [(chain(range(n)), 1.0)], chunk=64)) == 2 * (n - 1)
    assert rounds(halving_doubling(CollectiveTask.of("all_reduce", 6, 64))) == 6


def test_bytes_are_those_of_the_formulas():
    c = CollectiveTask.of("all_reduce", 4, 40)
    around = ring(c).traffic(4)
    assert around.sent == {(0, 1): 240.0, (1, 2): 240.0, (2, 3): 240.0, (3, 0): 240.0}
    assert {*direct(c).traffic(4).sent.values()} == {80.0}
    nodes = Nodes(((0, 1), (2, 3)))
    across = hierarchical(c, nodes).traffic(4)
    assert across.by_node(nodes, 0) == 2 * 40 * 4 / 2  # 2 (m - 1) / m of the buffer
    assert servers(c, [1]).sent() == {
        (a, b): 40 for a in range(4) for b in range(4) if a != b and 1 in (a, b)
    }
    weights = trees(c, [(chain(range(4)), 3.0), (star(4, 3), 1.0)]).sent()
    assert weights[0, 1] == weights[1, 0] == 30
    assert weights[0, 3] == 10


def test_nodes_give_the_levels_of_a_tree():
    nodes = Nodes(((0, 3, 5), (1, 2), (4,)))
    assert two_level(nodes, 3) == (3, 2, 3, None, 3, 3)
    assert two_level(nodes, 4) == (4, 4, 1, 0, None, 0)


def test_shares():
    assert even_sizes(10, 4) == (3, 3, 2, 2)
    assert proportional_sizes(10, [1, 1, 2]) == (2, 3, 5)
    assert sum(proportional_sizes(1001, [0.1, 7, 0.3])) == 1001


def test_what_a_generator_does_not_make_is_refused():
    c = CollectiveTask.of("all_to_all", 4, 8)
    for make in (ring, halving_doubling, servers):
        with pytest.raises(PlanError, match="program for all_to_all"):
            make(c)
    c = CollectiveTask.of("all_reduce", 4, 8)
    with pytest.raises(PlanError, match="each rank is on one node"):
        hierarchical(c, Nodes.one(3))
    with pytest.raises(ValueError, match="make no tree"):
        trees(c, [((None, 2, 1, 0), 1.0)])
    with pytest.raises(ValueError, match="other roots"):
        trees(CollectiveTask.of("broadcast", 4, 8), [(star(4, 1), 1.0)])
    with pytest.raises(ValueError, match="no tree carries the part of rank 1"):
        trees(CollectiveTask.of("all_gather", 2, 8), [(star(2, 0), 1.0)])


@pytest.mark.parametrize(
    "facts",
    [
        ("all_gather", 2, (1,)),
        ("all_reduce", 2, (-1,)),
        ("broadcast", 2, (1,)),
        ("all_to_all", 2, (1,)),
    ],
)
def test_a_collective_that_cannot_be_is_refused(facts):
    with pytest.raises(ValueError, match="ranks with"):
        CollectiveTask(*facts)
