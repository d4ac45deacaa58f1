"""pure: steps of copies, tensor groups, buckets, ZeRO and faults; by hand and against all ranks."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from headway.cluster.link import Link
from headway.collective.model.link_fit import LinkFit
from headway.cost.network import HierarchicalNetwork, LinkLevel
from headway.errors import PlanError
from headway.planner.guidelines.layer_parallelism import LayerTimes, windows
from headway.schedule.generators.registry import make_schedule
from headway.simulator.ranks import RankGrid, SimulatedRanks, SlowPath, StepFaults
from headway.simulator.simulation import simulate_training_step
from headway.simulator.task_graph import buckets
from headway.simulator.work import StageSegment, StageWork, StepWork
from support.transformer_formula import pipeline_seconds

FLAT = HierarchicalNetwork((LinkLevel(name="all", width=math.inf, link=Link(rate=1.0)),))
NODES = HierarchicalNetwork(
    (
        LinkLevel(name="node", width=4.0, link=Link(rate=8.0, latency=0.01)),
        LinkLevel(name="cluster", width=math.inf, link=Link(rate=1.0, latency=0.05)),
    )
)


def stage(forward=1.0, backward=2.0, **more):
    return StageWork(forward=forward, input_grad=backward / 2, weight_grad=backward / 2, **more)


def one_f_one_b(stages, microbatches, grid, **more):
    table = make_schedule("1f1b", stages=len(stages), microbatches=microbatches)
    return StepWork(table=table, stages=tuple(stages), grid=grid, **({"network": FLAT} | more))


# -- closed forms ---------------------------------------------------------------------------------


def random_stack(random):
    """Layers with backward in one piece, some without parameters, on a link of some speed."""
    count = int(random.integers(1, 9))
    scale = 10 ** random.uniform(-1.5, 1.5)
    return [
        LayerTimes(
            forward=float(random.uniform(0.1, 1)),
            weight_grad=float(random.uniform(0.1, 1)),
            input_grad=float(random.uniform(0.1, 1)) if i else 0.0,
            num_bytes=float(random.uniform(1, 100) * scale) if random.random() < 0.85 else 0.0,
        )
        for i in range(count)
    ], LinkFit(float(random.uniform(0, 0.3)), 0.02)


def data_parallel_of(stack, link, ranks=2):
    """Two ranks: a ring's sum of S bytes takes 2 alpha + S / beta."""
    pieces = tuple(
        StageSegment(
            forward=one.forward, backward=one.weight_grad + one.input_grad, params=one.num_bytes
        )
        for one in stack
    )
    forward, backward = (sum(getattr(p, name) for p in pieces) for name in ("forward", "backward"))
    params = sum(one.num_bytes for one in stack)
    ends = Link(rate=1 / link.seconds_per_byte, latency=link.latency / 2)
    return one_f_one_b(
        [stage(forward, backward, pieces=pieces, params=params)],
        1,
        RankGrid(data=ranks),
        network=HierarchicalNetwork((LinkLevel(name="all", width=math.inf, link=ends),)),
        bucket=0.0,
    )


@pytest.mark.parametrize("part", range(4))
def test_d4_the_windows_equal_the_simulated_step_on_1000_stacks(part):
    """Serial network, sums needed at the end of backward. (Needed by the next forward: see
    test_guidelines_das, which plays several steps on the same engine.)"""
    random, exposed = np.random.default_rng(part), 0
    for _ in range(250):
        stack, link = random_stack(random)
        said = windows(stack, link, need="update", weights_first=False)
        found = simulate_training_step(data_parallel_of(stack, link))
        assert found.seconds == pytest.approx(said.step, rel=1e-9)
        waited = found.exposed.get("sums", 0.0)
        assert waited == pytest.approx(sum(said.exposed), rel=1e-9, abs=1e-9)
        assert found.bubble == 0.0
        exposed += waited > 0
    assert exposed > 200


@pytest.mark.parametrize("message", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("last", [1.0, 1.4])
@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_the_closed_form_of_a_pipeline_is_simulated(stages, last, message):
    """transformer_formula.pipeline_seconds, for equal stages and a heavier last one, m >= p."""
    weights = [1.0] * (stages - 1) + [last]
    for microbatches in (stages, 2 * stages, 24):
        row = [stage(w, 2 * w, message=message) for w in weights]
        found = simulate_training_step(one_f_one_b(row, microbatches, RankGrid(pipeline=stages)))
        said = pipeline_seconds(
            3 * last, 3 * sum(weights), microbatches, stages=stages, message=message
        )
        assert found.seconds == pytest.approx(float(sum(said)), rel=1e-9)


def test_the_bubble_of_equal_stages():
    """(p - 1) / (m + p - 1) of the step."""
    for p, m in ((2, 2), (4, 8), (8, 32)):
        found = simulate_training_step(one_f_one_b([stage()] * p, m, RankGrid(pipeline=p)))
        assert found.bubble == pytest.approx((p - 1) / (m + p - 1), rel=1e-12)
        assert found.seconds == pytest.approx(3 * (m + p - 1))


@pytest.mark.parametrize("stages", [2, 4, 7])
def test_w4_stage_i_holds_n_minus_i_micro_batches(stages):
    work = one_f_one_b(
        [stage(state=100.0, kept=1.0, transient=0.25)] * stages,
        3 * stages,
        RankGrid(pipeline=stages),
    )
    peaks = [account.peak for account in simulate_training_step(work).accounts]
    assert peaks == [100.0 + (stages - i) + 0.25 for i in range(stages)]


def test_without_a_flush_older_weights_are_held_too():
    """PipeDream on four ranks: four versions of 10 bytes on the first, one on the last."""
    table = make_schedule("pipedream", stages=4, microbatches=8)
    row = (stage(params=10.0, state=100.0),) * 4
    work = StepWork(table=table, stages=row, grid=RankGrid(pipeline=4), network=FLAT)
    assert [a.peak for a in simulate_training_step(work).accounts] == [130.0, 120.0, 110.0, 100.0]


def test_recomputation_costs_a_forward_and_holds_what_enters():
    row = [stage(kept=1.0, again=5.0)] * 2
    work = one_f_one_b(row, 4, RankGrid(pipeline=2))
    again = replace(work, table=replace(work.table, recompute=(0, 1)))
    assert simulate_training_step(work).seconds == 3 * 5
    assert simulate_training_step(again).seconds == 4 * 5
    assert [a.peak for a in simulate_training_step(again).accounts] == [7.0, 6.0]


# -- faults by hand -------------------------------------------------------------------------------


def test_a_slow_rank_by_hand():
    """Two copies of two stages, four micro-batches, F = 1, B = 2; sums of 3 bytes.

    Sound: 3 (4 + 1) = 15, and the first stage's sum, 3 s between two ranks: 18.
    Rank 1 is the second copy of the first stage, twice as slow: F = 2, B = 4. It begins at 0 and is
    never idle for long: four forwards and four backwards are 24 s. It waits for the first backward:
    F0 F1 end at 4, the second stage's B0 at 2 + 1 + 2 = 5. 4 + 1 (idle) + 4 B0 + 2 F2 + 4 B1 + 2 F3
    + 4 B2 + 4 B3 = 25. Then the sum: 28.
    """
    grid = RankGrid(data=2, pipeline=2)
    work = one_f_one_b([stage(params=3.0)] * 2, 4, grid)
    assert simulate_training_step(work).seconds == 18.0
    slow = simulate_training_step(replace(work, faults=StepFaults(slow={1: 2.0})))
    assert slow.seconds == 28.0
    assert [(a.rank, a.count) for a in slow.accounts] == [(0, 1), (2, 1), (1, 1), (3, 1)]
    own = next(a for a in slow.accounts if a.rank == 1)
    assert sum(own.busy.values()) == 24.0
    assert (own.bubble, own.exposed) == (1.0, {"sums": 3.0})
    other = next(a for a in slow.accounts if a.rank == 0)
    assert other.bubble == 28.0 - 12.0 - 3.0


def test_a_slow_link_by_hand():
    """Four ranks of a data axis, two nodes; a ring over one link of 1 byte/s: 2 (3/4) 8 = 12 s;
    the link between the nodes ten times slower: 120 s."""
    wide = replace(NODES.levels[0], width=2.0, link=Link(rate=1e9))
    network = HierarchicalNetwork((wide, replace(NODES.levels[1], link=Link(rate=1.0))))
    work = one_f_one_b([stage(params=8.0)], 1, RankGrid(data=4), network=network)
    plain = simulate_training_step(work)
    path = SlowPath(ends=(frozenset({0, 1}), frozenset({2, 3})), factor=10.0)
    slow = simulate_training_step(replace(work, faults=StepFaults(paths=(path,))))
    assert plain.seconds - 3.0 == pytest.approx(8.0, rel=1e-6)  # levels: 2 (1/2) 8
    assert slow.seconds - 3.0 == pytest.approx(80.0, rel=1e-6)


def test_a_slow_link_slows_only_the_copies_that_use_it():
    """Pipelines of two ranks with a link of their own each; that of ranks 1 and 3 is slow."""
    work = one_f_one_b([stage(message=1.0)] * 2, 2, RankGrid(data=2, pipeline=2))
    path = SlowPath(ends=(frozenset({1}), frozenset({3})), factor=3.0)
    found = simulate_training_step(replace(work, faults=StepFaults(paths=(path,))))
    assert [(a.rank, a.count) for a in found.accounts] == [(0, 1), (2, 1), (1, 1), (3, 1)]
    first, second = found.accounts[0], found.accounts[2]
    # neighbours of the data axis send side by side over one stretch of the level: 1 s a byte
    assert first.exposed["messages"] < second.exposed["messages"]


def test_a_tensor_group_by_hand():
    """F 1 with 0.2 s of collectives, B 2 with 0.4: three times slower without them; and, over a
    link that is five times slower, with five times them."""
    work = one_f_one_b([stage(collectives=(0.2, 0.4))], 1, RankGrid(tensor=2))
    assert simulate_training_step(work).exposed == pytest.approx({"tensor axis": 0.6})
    slow = simulate_training_step(replace(work, faults=StepFaults(slow={1: 3.0})))
    assert slow.seconds == pytest.approx(3 * 0.8 + 0.2 + 3 * 1.6 + 0.4)
    path = SlowPath(ends=(frozenset({0}), frozenset({1})), factor=5.0)
    late = simulate_training_step(replace(work, faults=StepFaults(paths=(path,))))
    assert late.seconds == pytest.approx(3.0 + 4 * 0.6)
    assert late.exposed == pytest.approx({"tensor axis": 3.0})


# -- sums as they come, ZeRO ----------------------------------------------------------------------


def test_buckets_leave_when_they_are_full():
    """Backward of the last piece first: 4 bytes in 2 s, then 8 bytes in 4 s; buckets of 5."""
    one = StageSegment(forward=1.0, backward=4.0, params=8.0)
    two = StageSegment(forward=1.0, backward=2.0, params=4.0)
    row = stage(2.0, 6.0, pieces=(one, two))
    times = [4.0, 2.0]
    assert list(buckets(row, times, 5.0)) == [(2.5, 5.0), (5.0, 5.0), (6.0, 2.0)]
    assert list(buckets(row, times, 0.0)) == [(2.0, 4.0), (6.0, 8.0)]
    assert list(buckets(row, times, 100.0)) == [(6.0, 12.0)]
    said = replace(row, leaving=((1, 3.0), (0, 9.0)))
    assert list(buckets(said, times, 5.0)) == [(2.0, 3.0), (6.0, 9.0)]


def test_overlap_hides_what_fits_and_computation_may_feel_it():
    """Backward 2 + 4 s, sums of 3 and 3 s: the first hides, the second does not. Where computation
    feels a sum in full, nothing is hidden."""
    pieces = (
        StageSegment(forward=1, backward=4, params=3),
        StageSegment(forward=1, backward=2, params=3),
    )
    work = one_f_one_b([stage(2, 6, pieces=pieces, params=6.0)], 1, RankGrid(data=2), bucket=0.0)
    assert simulate_training_step(work).seconds == 2 + 6 + 3
    assert simulate_training_step(replace(work, sync="post", bucket=None)).seconds == 2 + 6 + 6
    felt = simulate_training_step(replace(work, overlap=0.0))
    assert felt.seconds == 2 + 6 + 6
    assert felt.exposed == {"sums": 6.0}


def test_what_is_computed_again_delays_the_buckets():
    """Pieces of 1 and 1 s forward, 4 and 2 backward, 7 bytes each. A whole stage first: the last
    piece is done 2 + 2 s into backward; block by block 1 + 2 s. Sums: 7 s and 7 s."""
    pieces = (
        StageSegment(forward=1, backward=4, params=7),
        StageSegment(forward=1, backward=2, params=7),
    )
    work = one_f_one_b([stage(2, 6, pieces=pieces, params=14.0)], 1, RankGrid(data=2), bucket=0.0)
    for blockwise, first in ((False, 4.0), (True, 3.0)):
        table = replace(work.table, recompute=(0,), blockwise=blockwise)
        assert simulate_training_step(replace(work, table=table)).seconds == 2 + first + 7 + 7


def test_gradients_leave_once_in_a_step_or_with_zero_2_every_time():
    pieces = (
        StageSegment(forward=1, backward=4, params=7),
        StageSegment(forward=1, backward=2, params=7),
    )
    work = one_f_one_b([stage(2, 6, pieces=pieces, params=14.0)], 3, RankGrid(data=2), bucket=0.0)
    for zero, number in ((0, 2), (1, 3), (2, 7)):
        spans = simulate_training_step(replace(work, zero=zero)).timeline.spans
        assert sum(span.lane == "exchange" for span in spans) == number, zero


def test_what_a_rank_sends_over_a_level_shares_it():
    """Two ranks, F 1 and B 2; a sum of 6 s beside a message of 1 s: the second stage's gradient
    (1 byte) leaves at 5, its sum at 5, too. Alone the message arrives at 6; shared at 7, for the
    sum has the other half; the first stage's backward ends at 9, not 8."""
    pieces = (StageSegment(forward=1, backward=2, params=6),)
    row = [stage(message=1.0), stage(pieces=pieces, params=6.0)]
    work = one_f_one_b(row, 1, RankGrid(data=2, pipeline=2), bucket=0.0)
    alone, both = simulate_training_step(work), simulate_training_step(replace(work, shared=True))
    ends = [
        max(s.end for s in found.timeline.spans if s.rank == 0 and s.kind == "backward")
        for found in (alone, both)
    ]
    assert ends == [8.0, 9.0]


def test_zero_by_hand():
    """One stage of two pieces, two ranks; a scatter or gather of S bytes takes S / 2 seconds.

    ZeRO 1: F 2, B 6, the scatters of 2 and 2 s: the first hides, the second shows; update 1; gather
    of 8 bytes 4: 15. ZeRO 3, two micro-batches: gathers of 2 s before every piece, one piece ahead.
    """
    pieces = (
        StageSegment(forward=1, backward=4, params=4),
        StageSegment(forward=1, backward=2, params=4),
    )
    row = [stage(2, 6, pieces=pieces, params=8.0, update=1.0)]
    one = simulate_training_step(one_f_one_b(row, 1, RankGrid(data=2), bucket=0.0, zero=1))
    assert one.seconds == 2 + 6 + 2 + 1 + 4
    assert one.exposed == {"scatters": 2.0, "gathers": 4.0}
    three = simulate_training_step(one_f_one_b(row, 1, RankGrid(data=2), bucket=0.0, zero=3))
    assert three.seconds == by_hand_zero_3()


def test_parameters_are_gathered_one_chunk_ahead():
    """Gathers of 0.5 s; the third one begins when the first chunk is done, at 1.5."""
    pieces = (
        StageSegment(forward=1, backward=2, params=1),
        StageSegment(forward=1, backward=2, params=1),
    )
    row = [stage(2, 4, pieces=pieces, params=2.0, update=1.0)]
    found = simulate_training_step(one_f_one_b(row, 1, RankGrid(data=2), bucket=0.0, zero=3))
    lane = [span for span in found.timeline.spans if span.lane == "exchange"]
    gathers = [span.start for span in lane if span.label.startswith("for ")]
    assert gathers == [0.0, 0.5, 1.5, 2.5]
    assert found.seconds == 8.0


def by_hand_zero_3():
    """Lane and compute, by their rules: gather n after chunk n - 2, chunk n after its gather; the
    lane serves whatever is ready first."""
    chunks = [(1, False), (1, False), (2, True), (4, True)]
    gathered, computed, lane = [], [], 0.0
    waiting = []
    for n, (seconds, backward) in enumerate(chunks):
        ready = computed[n - 2] if n >= 2 else 0.0
        for begin in [w for w in waiting if w <= ready]:
            lane = max(lane, begin) + 2
            waiting.remove(begin)
        lane = max(lane, ready) + 2
        gathered.append(lane)
        computed.append(max(computed[-1] if n else 0.0, lane) + seconds)
        if backward:
            waiting.append(computed[-1])
    for begin in waiting:
        lane = max(lane, begin) + 2
    return lane + 1.0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"stages": (stage(),)}, "1 stages for a table of 2"),
        ({"grid": RankGrid(pipeline=3)}, "a pipeline of 3 for 2 ranks"),
        ({"table": make_schedule("chimera", stages=2, microbatches=2), "zero": 1}, "with 2 pipes"),
    ],
)
def test_steps_that_cannot_be(changed, message):
    work = one_f_one_b([stage()] * 2, 2, RankGrid(pipeline=2))
    with pytest.raises(PlanError) as error:
        replace(work, **changed)
    assert message in error.value.problems[0]


# -- some ranks stand for all ---------------------------------------------------------------------


def random_work(random):
    """Any grid of at most 64 ranks, schedule, ZeRO stage, order of axes, buckets and faults."""
    t, d, p = (int(random.choice([1, 2, 4])) for _ in range(3))
    number = int(random.choice([p, 2 * p]))
    name = str(random.choice(["1f1b", "gpipe", "interleaved", "zb-h1", "chimera", "zbv"]))
    if p == 1 or (name == "interleaved" and number % p):
        name = "1f1b"
    table = make_schedule(name, stages=p, microbatches=number)
    zero = int(random.integers(0, 4)) if len(table.pipes) == 1 else 0

    def some():
        return float(random.uniform(0.2, 2))

    row = []
    for _ in range(table.stages):
        pieces = tuple(
            StageSegment(
                forward=some(), backward=some(), params=some() if random.random() < 0.8 else 0.0
            )
            for _ in range(int(random.integers(1, 4)))
        )
        forward, backward = (sum(getattr(x, n) for x in pieces) for n in ("forward", "backward"))
        row.append(
            StageWork(
                forward=forward,
                input_grad=backward / 2,
                weight_grad=backward / 2,
                pieces=pieces,
                collectives=(0.1 * forward, 0.2 * backward) if t > 1 else (0.0, 0.0),
                message=some(),
                params=sum(piece.params for piece in pieces),
                step=some() / 10 if t > 1 and random.random() < 0.5 else 0.0,
                update=some(),
                state=some(),
                kept=some(),
                transient=some(),
            )
        )
    orders = [(1, t, t * d), (1, t * p, t), (d * p, 1, d)]
    grid = RankGrid(tensor=t, data=d, pipeline=p, strides=orders[int(random.integers(3))])
    slow = {}
    paths = ()
    if random.random() < 0.6:
        slow = {int(random.integers(grid.ranks)): some() + 1}
    if random.random() < 0.6 and grid.ranks > 4:
        nodes = [frozenset(range(n, n + 4)) for n in range(0, grid.ranks, 4)]
        pick = random.choice(len(nodes), 2, replace=False)
        paths = (SlowPath(ends=(nodes[pick[0]], nodes[pick[1]]), factor=some() + 1),)
    return StepWork(
        table=table,
        stages=tuple(row),
        grid=grid,
        network=NODES,
        bucket=[None, 0.0, 0.7][int(random.integers(3))] if zero < 2 else 0.0,
        zero=zero,
        overlap=float(random.choice([1.0, 0.5])),
        shared=bool(random.random() < 0.3),
        faults=StepFaults(slow=slow, paths=paths),
    )


def on_unlike_devices(random, work):
    """The same step where some copies are on devices that are slower at some things, with smaller
    micro-batches."""

    def slower(one):
        factor = float(random.uniform(1, 3))
        pieces = tuple(
            replace(piece, forward=piece.forward * factor, backward=piece.backward * factor)
            for piece in one.pieces
        )
        times = {n: getattr(one, n) * factor for n in ("forward", "input_grad", "weight_grad")}
        halves = {n: getattr(one, n) / 2 for n in ("message", "kept", "transient")}
        return replace(one, pieces=pieces, update=one.update * 1.5, **times, **halves)

    others = tuple(tuple(map(slower, work.stages)) for _ in range(2))
    variant = tuple(int(random.integers(3)) for _ in range(work.grid.data))
    return replace(work, others=others, variant=variant)


@pytest.mark.parametrize("unlike", [False, True], ids=["alike", "unlike"])
@pytest.mark.parametrize("part", range(4))
def test_representatives_are_all_ranks_bit_for_bit(part, unlike):
    random, fewer = np.random.default_rng(part), 0
    for _ in range(20):
        work = random_work(random)
        work = on_unlike_devices(random, work) if unlike else work
        some, everybody = simulate_training_step(work), simulate_training_step(work, everybody=True)
        assert some.seconds == everybody.seconds
        assert len(everybody.accounts) == work.grid.ranks == some.ranks
        all_of = {account.rank: account for account in everybody.accounts}
        for account in some.accounts:
            other = all_of[account.rank]
            assert (account.busy, account.bubble) == (other.busy, other.bubble)
            assert account.exposed == other.exposed
            assert account.curve == other.curve
        assert some.bubble == pytest.approx(everybody.bubble, rel=1e-9, abs=1e-12)
        assert some.exposed == pytest.approx(everybody.exposed, rel=1e-9)
        assert some.peak == everybody.peak
        fewer += len(some.accounts) < len(everybody.accounts)
        for account in everybody.accounts:
            parts = [*account.busy.values(), *account.exposed.values(), account.bubble]
            assert math.fsum(parts) == pytest.approx(some.seconds, rel=1e-9)
    assert fewer > 5


def test_copies_on_unlike_devices_by_hand():
    """Two stages, one micro-batch, one copy twice as slow with half the bytes: it ends at 2 (1 + 2)
    2, plus its messages; both wait for the sums of the slow copy's stages."""
    fast = stage(message=0.4, params=3.0, kept=1.0)
    slow = stage(2.0, 4.0, message=0.2, params=3.0, kept=0.5)
    work = one_f_one_b([fast, fast], 1, RankGrid(data=2, pipeline=2), bucket=None)
    mixed = simulate_training_step(replace(work, others=((slow, slow),), variant=(0, 1)))
    assert len(mixed.accounts) == mixed.ranks == 4
    by_rank = {account.rank: account for account in mixed.accounts}
    assert mixed.seconds == pytest.approx(2 * (2 + 4) + 2 * 0.2 + 3)  # the first stage's sum
    assert by_rank[0].busy["forward"] == by_rank[2].busy["forward"] == 1
    assert by_rank[1].busy["backward"] == pytest.approx(4) == by_rank[3].busy["backward"]
    assert (by_rank[0].peak, by_rank[1].peak) == (1.0, 0.5)
    assert simulate_training_step(work).seconds == pytest.approx(2 * (1 + 2) + 2 * 0.4 + 3)
    assert (
        simulate_training_step(replace(work, others=((slow, slow),), variant=(1, 1))).seconds
        == mixed.seconds
    )


def test_what_copies_are_on_is_told_of_all():
    with pytest.raises(PlanError) as caught:
        one_f_one_b(
            [stage(), stage()],
            2,
            RankGrid(data=3, pipeline=2),
            others=((stage(),),),
            variant=(0, 1),
        )
    assert len(caught.value.problems) == 2


def test_a_message_is_priced_on_the_level_that_joins_its_ends():
    """As Network.send where all messages of a stride are alike; exact where some leave a node."""
    world = SimulatedRanks(RankGrid(tensor=2, data=2, pipeline=4), NODES)
    for num_bytes in (0.0, 3.0):
        per_byte, latency, name = world.message(0, 4)
        assert latency + num_bytes * per_byte == float(NODES.send(num_bytes, 4))
        assert name == "cluster"
    inside = SimulatedRanks(RankGrid(pipeline=8), NODES)
    assert inside.message(2, 3) == (1 / 8.0, 0.01, "node")
    assert inside.message(3, 4) == (1.0, 0.05, "cluster")


def test_the_same_question_has_the_same_answer():
    work = random_work(np.random.default_rng(3))
    one, two = simulate_training_step(work), simulate_training_step(work)
    assert one.timeline == two.timeline
    assert one == two
