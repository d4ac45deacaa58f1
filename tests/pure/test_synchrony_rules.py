"""pure: the invariants of every way to agree (workloads: asynchronous, bounded, local, gossip)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.plans import Synchrony
from headway.plans.synchrony import Topology
from headway.simulator.synchrony import SimulatedRun, VirtualMachines, simulate_run
from headway.synchrony import merging, mixing
from headway.synchrony.actors import Address, Compute, Gradient
from headway.synchrony.driving import replay
from headway.synchrony.history import History
from headway.synchrony.programs import make_run, server_places
from headway.synchrony.servers import Push, RoundServer, StreamServer
from support.plain_replicas import Descent, Shares

RATE = 0.1


def noisy(seed: int = 0) -> Callable[[int, int], float]:
    """Compute times between 0.5 and 1.5 that depend on worker and step alone."""
    return lambda worker, step: 0.5 + random.Random(f"{seed} {worker} {step}").random()


def quadratic(worker: int, step: int, value: Any) -> Gradient:
    """The gradient of (x - b)^2 / 2 with b of worker and step; for each share."""
    target = math.sin(1.7 * worker + 0.3 * step)
    return Gradient(tuple(x - target for x in value))


class Centrals:
    """A run with servers whose workers compute a gradient at what they have pulled."""

    def __init__(self, synchrony: Synchrony, workers: int, **options: Any) -> None:
        count = len(server_places(synchrony, workers))
        start, rate = options.pop("start", 1.0), options.pop("rate", RATE)
        self.replicas = [Shares((start,) * count, rate) for _ in range(workers)]
        self.shares = [Descent(start, rate, **options) for _ in range(count)]
        self.run = make_run(synchrony, self.replicas, self.shares)

    def gradient(self, worker: int, step: int, value: Any) -> Gradient:
        return quadratic(worker, step, self.replicas[worker].read())

    def simulate(self, steps: int = 40, seed: int = 0, **options: Any) -> SimulatedRun:
        machines = VirtualMachines(
            **{"compute": noisy(seed), "wire": 0.2, "latency": 0.05, "update": 0.02, **options}
        )
        return simulate_run(self.run, machines, steps=steps, gradient=self.gradient)

    @property
    def values(self) -> list[Any]:
        """Of the servers, which may have replaced the replicas that they were given."""
        servers: list[Any] = [
            self.run.holders[Address("server", number)] for number in range(len(self.shares))
        ]
        return [server.replica.read() for server in servers]


class Decentrals:
    """A run of workers with a model each."""

    def __init__(
        self, synchrony: Synchrony, starts: list[Any], rate: float = RATE, **options: Any
    ) -> None:
        self.replicas = [Descent(start, rate, **options) for start in starts]
        self.centre = Descent(sum(starts) / len(starts), rate)
        self.run = make_run(synchrony, self.replicas, [self.centre], seed=5)

    def gradient(self, worker: int, step: int, value: Any) -> Gradient:
        at = self.replicas[worker].read() if value is None else value
        return Gradient(at - math.sin(1.7 * worker + 0.3 * step))

    def simulate(self, steps: int = 40, seed: int = 0) -> SimulatedRun:
        machines = VirtualMachines(compute=noisy(seed), wire=0.2, latency=0.05, update=0.02)
        return simulate_run(self.run, machines, steps=steps, gradient=self.gradient)

    @property
    def values(self) -> list[Any]:
        return [replica.read() for replica in self.replicas]


def serial(workers: int, steps: int, start: float = 1.0, rate: float = RATE) -> float:
    """The serial run with the batches of all workers."""
    x = start
    for step in range(steps):
        parts = [x - math.sin(1.7 * worker + 0.3 * step) for worker in range(workers)]
        total = parts[0] * (1 / workers)
        for part in parts[1:]:
            total = total + part * (1 / workers)
        x = x - total * rate
    return x


# -- equalities --------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", ["single", "sharded", "colocated"])
@pytest.mark.parametrize("words", [{}, {"kind": "bounded", "delay_bound": 0, "read": "snapshot"}])
def test_synchronous_servers_equal_the_serial_run(
    topology: Topology, words: dict[str, Any]
) -> None:
    count = 2 if topology == "sharded" else None
    run = Centrals(Synchrony(topology=topology, servers=count, **words), 3)
    run.simulate(steps=30)
    assert run.values == [serial(3, 30)] * len(run.shares)


def test_asynchronous_with_one_worker_equals_the_serial_run() -> None:
    run = Centrals(Synchrony(kind="asynchronous", topology="single"), 1)
    run.simulate(steps=30)
    assert run.values == [serial(1, 30)]


def test_local_sgd_that_meets_after_every_step_equals_the_synchronous_mean() -> None:
    run = Decentrals(Synchrony(merge="mean"), [1.0] * 4)
    run.simulate(steps=30)
    assert run.values == pytest.approx([serial(4, 30)] * 4, abs=1e-12)


def test_neighbours_with_even_weights_over_all_equal_the_mean_of_parameters() -> None:
    starts = [0.0, 1.0, 4.0]
    run = Decentrals(Synchrony(merge="neighbour", topology="mesh"), starts)
    run.simulate(steps=20)
    x = starts
    for step in range(20):
        gradients = [x[w] - math.sin(1.7 * w + 0.3 * step) for w in range(3)]
        x = [sum(x) / 3 - RATE * g for g in gradients]
    assert run.values == pytest.approx(x, abs=1e-12)


def test_delay_compensation_of_nothing_is_asynchronous_bit_by_bit() -> None:
    plain = Centrals(Synchrony(kind="asynchronous", topology="single"), 4)
    other = Centrals(
        Synchrony(
            kind="asynchronous",
            topology="single",
            remedy="delay_compensation",
            compensation=1e-300,
        ),
        4,
    )
    plain.simulate()
    other.simulate()
    assert plain.values == other.values


def test_delay_compensation_without_delay_is_the_serial_run() -> None:
    run = Centrals(
        Synchrony(
            kind="asynchronous", topology="single", remedy="delay_compensation", compensation=5.0
        ),
        1,
    )
    run.simulate(steps=30)
    assert run.values == [serial(1, 30)]


def test_warm_up_is_synchronous() -> None:
    run = Decentrals(Synchrony(merge="mean", local_steps=5, warm_up=20), [1.0] * 3)
    run.simulate(steps=20)
    assert run.values == pytest.approx([serial(3, 20)] * 3, abs=1e-12)


# -- conservation and contraction ----------------------------------------------------------------


def test_elastic_meetings_keep_the_sum_and_close_the_gap() -> None:
    run = Decentrals(
        Synchrony(merge="elastic", kind="asynchronous", alpha=0.2, beta=0.2), [3.0, 0, 1]
    )
    total = sum(run.values) + run.centre.x
    for replica in run.replicas:
        replica.rate = 0.0
    run.simulate(steps=25)
    assert sum(run.values) + run.centre.x == pytest.approx(total, abs=1e-12)
    alone = Decentrals(Synchrony(merge="elastic", kind="asynchronous", alpha=0.2, beta=0.2), [3.0])
    alone.centre.x, alone.replicas[0].rate = 0.0, 0.0
    alone.simulate(steps=7)
    # Eight meetings: the last is begun before the program learns that there is no further step.
    assert alone.values[0] - alone.centre.x == pytest.approx(3.0 * (1 - 0.4) ** 8, rel=1e-12)


def test_elastic_meetings_in_rounds_move_the_centre_by_all() -> None:
    """Two rounds by hand: x_i and the centre that every worker keeps, from the same start."""
    run = Decentrals(Synchrony(merge="elastic", alpha=0.2, beta=0.2), [2.0] * 3)
    run.simulate(steps=3)
    x, centre = [2.0] * 3, 2.0
    for step in range(3):
        before = list(x)
        gradients = [before[w] - math.sin(1.7 * w + 0.3 * step) for w in range(3)]
        x = [b + 0.2 * (centre - b) for b in before]
        centre += sum(0.2 * (b - centre) for b in before)
        x = [v - RATE * g for v, g in zip(x, gradients, strict=True)]
    assert run.values == pytest.approx(x, abs=1e-12)


@pytest.mark.parametrize(
    ("topology", "workers"),
    [
        ("ring", 5),
        ("ring", 2),
        ("torus", 6),
        ("torus", 9),
        ("exponential", 6),
        ("hypercube", 8),
        ("mesh", 4),
    ],
)
def test_neighbours_keep_the_mean_and_contract_as_the_matrix_says(
    topology: Topology, workers: int
) -> None:
    synchrony = Synchrony(merge="neighbour", topology=topology)
    matrix = np.array(mixing.mixing_matrix(synchrony, workers))
    assert matrix.sum(0) == pytest.approx(np.ones(workers))
    assert matrix.sum(1) == pytest.approx(np.ones(workers))
    generator = np.random.default_rng(3)
    starts = [generator.standard_normal(5) for _ in range(workers)]
    run = Decentrals(synchrony, starts, rate=0.0)
    run.simulate(steps=10)
    expected = np.linalg.matrix_power(matrix, 10) @ np.array(starts)
    assert np.array(run.values) == pytest.approx(expected, abs=1e-12)
    assert np.mean(run.values, axis=0) == pytest.approx(np.mean(starts, axis=0), abs=1e-12)


def test_the_contraction_of_a_ring_of_five() -> None:
    matrix = np.array(mixing.mixing_matrix(Synchrony(merge="neighbour"), 5))
    sizes = sorted(abs(np.linalg.eigvals(matrix)))
    assert sizes[-2] == pytest.approx((1 + 2 * math.cos(2 * math.pi / 5)) / 3, abs=1e-10)
    assert sizes[-2] == pytest.approx(0.53934, abs=1e-5)


@pytest.mark.parametrize("topology", ["ring", "mesh", "exponential", "torus"])
@pytest.mark.parametrize("workers", [4, 9])
def test_pairwise_means_keep_the_sum_and_reach_consensus(topology: Topology, workers: int) -> None:
    starts = [float(i * i) for i in range(workers)]
    run = Decentrals(
        Synchrony(merge="pairwise", kind="asynchronous", topology=topology), starts, rate=0.0
    )
    run.simulate(steps=300)
    assert sum(run.values) == pytest.approx(sum(starts), abs=1e-9)
    assert run.values == pytest.approx([sum(starts) / workers] * workers, abs=1e-3)


def test_gossip_keeps_weights_and_weighted_sum_and_reaches_consensus() -> None:
    starts = [float(i * i) for i in range(5)]
    run = Decentrals(
        Synchrony(merge="push_sum", kind="asynchronous", probability=0.5), starts, rate=0.0
    )
    run.simulate(steps=200)
    models = [run.run.holders[Address("model", i)] for i in range(5)]
    assert all(isinstance(model, merging.Model) for model in models)
    weights = [model.weight for model in models]  # type: ignore[attr-defined]
    assert sum(weights) == pytest.approx(1.0, abs=1e-12)
    weighted = sum(w * x for w, x in zip(weights, run.values, strict=True))
    assert weighted == pytest.approx(sum(starts) / 5, abs=1e-12)
    assert run.values == pytest.approx([sum(starts) / 5] * 5, abs=1e-3)


# -- staleness -----------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [0, 1, 2, 5, 10])
@pytest.mark.parametrize(("factor", "stable"), [(0.98, True), (1.02, False)])
def test_the_stability_bound_of_delayed_gradients(
    delay: int, factor: float, *, stable: bool
) -> None:
    """x_{t+1} = x_t - rate x_{t-d} is stable below 2 sin(pi / (2 (2 d + 1)))."""
    rate = factor * 2 * math.sin(math.pi / (2 * (2 * delay + 1)))
    workers = delay + 1
    run = Centrals(
        Synchrony(kind="asynchronous", topology="single", reduce="sum"), workers, rate=rate
    )
    # Workers take turns: each push finds `delay` others between what it read and itself.
    machines = VirtualMachines(
        compute=lambda worker, step: 1.0 + (worker / workers if step == 0 else 0.0)
    )
    found = simulate_run(
        run.run,
        machines,
        steps=8000 // workers,
        gradient=lambda worker, step, value: Gradient(run.replicas[worker].read()),
    )
    late = [stale for of in found.staleness for stale in of[2:]]
    assert set(late) == {delay}
    # From 1: down by more than 1e3, or up by more than 10.
    assert abs(run.values[0]) < 1e-3 if stable else abs(run.values[0]) > 10


@given(
    workers=st.integers(2, 5),
    bound=st.integers(0, 4),
    seed=st.integers(0, 10_000),
    eager=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_a_bound_is_never_exceeded_and_reads_show_what_they_must(
    workers: int, bound: int, seed: int, *, eager: bool
) -> None:
    remedy = "eager_push" if eager else "none"
    run = Centrals(
        Synchrony(kind="bounded", delay_bound=bound, topology="single", remedy=remedy), workers
    )
    done = [0] * workers
    server = run.run.holders[Address("server")]
    assert isinstance(server, StreamServer)
    reads: list[tuple[int, int, tuple[int, ...]]] = []
    handle = server.handle

    def watched(sender: Any, message: Any) -> Any:
        if isinstance(message, Push):
            done[sender] += 1
            assert max(done) - min(done) <= bound + 1
        found = handle(sender, message)
        for sent in found:
            parameters = getattr(sent.value, "parameters", sent.value)
            worker = sent.to.number if isinstance(sent.to, Address) else sent.to
            reads.append((worker, parameters.clock, tuple(done)))
        return found

    server.handle = watched  # type: ignore[method-assign]
    found = run.simulate(steps=25, seed=seed)
    assert found.steps == [25] * workers
    if not eager:
        for worker, clock, seen in reads:
            assert min(seen) >= clock - bound
            assert seen[worker] >= clock


@given(workers=st.integers(2, 4), bound=st.integers(0, 3), seed=st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_snapshots_depend_on_nobodys_speed(workers: int, bound: int, seed: int) -> None:
    def play(chance: int) -> list[Any]:
        run = Centrals(
            Synchrony(kind="bounded", delay_bound=bound, topology="single", read="snapshot"),
            workers,
        )
        found = run.simulate(steps=15, seed=chance)
        assert found.steps == [15] * workers
        return run.values

    assert play(seed) == play(seed + 1)


def test_a_stopped_worker_stops_a_synchronous_run_at_once_and_others_as_they_are_bounded() -> None:
    def steps_of_others(**words: Any) -> set[int]:
        run = Centrals(Synchrony(topology="single", **words), 4)
        made = [0] * 4
        machines = VirtualMachines(
            compute=lambda worker, step: 1e9 if worker == 2 and step == 5 else 1.0
        )
        simulate_run(
            run.run,
            machines,
            seconds=1000.0,
            gradient=run.gradient,
            on_step=lambda time, worker, step: made.__setitem__(
                worker, made[worker] + (time < 1e6)
            ),
        )
        return {count - made[2] for worker, count in enumerate(made) if worker != 2}

    assert steps_of_others(kind="synchronous") == {1}
    assert steps_of_others(kind="bounded", delay_bound=0) == {1}
    assert steps_of_others(kind="bounded", delay_bound=3) == {4}
    assert min(steps_of_others(kind="asynchronous")) > 900


def test_a_value_bound_holds_at_every_update() -> None:
    limit = 0.12
    run = Centrals(Synchrony(kind="bounded", value_bound=limit, topology="single"), 4, rate=0.3)
    server: Any = run.run.holders[Address("server")]
    handle, waited = server.handle, 0

    def watched(sender: Any, message: Any) -> Any:
        nonlocal waited
        found = handle(sender, message)
        if isinstance(message, Push):
            waited += len(found) != 1
        for value in server._in_use.values():
            assert abs(server.replica.read() - value) < limit + 1e-12
        return found

    server.handle = watched
    found = run.simulate(steps=40)
    assert found.steps == [40] * 4
    assert waited


def test_backup_workers_close_a_step_without_the_slowest() -> None:
    run = Centrals(Synchrony(topology="single", backup_workers=1), 4)
    machines = VirtualMachines(compute=lambda worker, step: 10.0 if worker == 3 else 1.0)
    found = simulate_run(run.run, machines, steps=50, gradient=run.gradient)
    server = run.run.holders[Address("server")]
    assert isinstance(server, RoundServer)
    assert server.version == 50
    assert found.seconds < 70  # 50 steps of the three, and the last of the slow one
    assert found.steps[3] < 10
    assert server.dropped == found.steps[3]


def test_pushes_that_are_too_stale_are_rejected() -> None:
    run = Centrals(
        Synchrony(kind="bounded", delay_bound=3, on_violation="reject", topology="single"), 4
    )
    machines = VirtualMachines(compute=lambda worker, step: 10.0 if worker == 3 else 1.0)
    found = simulate_run(run.run, machines, steps=50, gradient=run.gradient)
    server = run.run.holders[Address("server")]
    assert isinstance(server, StreamServer)
    assert server.rejected == sum(stale > 3 for of in found.staleness for stale in of) > 0
    assert server.version == 200 - server.rejected


def test_ranks_of_a_node_share_its_link() -> None:
    """Two nodes of two, one server at rank 0: each model takes 1 s between nodes, 0.1 s inside."""
    rules = Synchrony(topology="single")
    seconds = {
        nodes: Centrals(rules, 4)
        .simulate(
            steps=1, nodes=nodes, wire=1.0, inside=0.1, latency=0.0, update=0.0,
            compute=lambda worker, step: 0.0,
        )
        .seconds
        for nodes in ((), (0, 0, 1, 1))
    }  # fmt: skip
    # What comes overlaps what goes: the last push is there 1 s after the last answer; then the
    # answers to those who ask for a second step.
    assert seconds[()] == pytest.approx(3 + 1 + 3)
    assert seconds[0, 0, 1, 1] == pytest.approx(2 + 1 + 2)


def test_a_busy_receiver_keeps_no_sender_from_others() -> None:
    """Of four workers with a server each, all send and get three quarters of a model at once."""
    found = Centrals(Synchrony(topology="colocated"), 4).simulate(
        steps=1, wire=1.0, latency=0.0, update=0.0, compute=lambda worker, step: 0.0
    )
    # Answers, pushes, and the answers to those who ask for a second step; no wire is ever idle.
    assert found.seconds == pytest.approx(3 * 0.75, rel=0.35)


def test_parameters_fetched_ahead_hide_their_way() -> None:
    """Computation of 1 s hides 0.7 s of messages; in turn they add to it."""

    def seconds(**words: Any) -> float:
        rules = Synchrony(topology="single", **words)
        options = {"wire": 0.1, "latency": 0.0, "update": 0.0}
        run = Centrals(rules, 4).simulate(steps=40, compute=lambda worker, step: 1.0, **options)
        return run.seconds / 40

    assert seconds(kind="bounded", delay_bound=1, read="ahead") < 1.02
    assert seconds(kind="asynchronous", read="ahead") < 1.02
    assert seconds(kind="asynchronous") > 1.15


def test_a_step_ahead_is_computed_without_ones_own_last_push() -> None:
    """One worker alone: x_{t+1} = x_t - rate * gradient at x_{t-1}."""
    made = Centrals(Synchrony(kind="asynchronous", topology="single", read="ahead"), 1)
    found = made.simulate(steps=12)
    expected = [1.0, 1.0]
    for step in range(12):
        (part,) = quadratic(0, step, (expected[-2],)).value
        expected.append(expected[-1] - RATE * part)
    assert made.shares[0].x == pytest.approx(expected[-1], rel=1e-12)
    assert found.staleness[0] == [0, *[1] * 11]


# -- histories -----------------------------------------------------------------------------------

WAYS = {
    "servers": Synchrony(topology="sharded", servers=2),
    "backup": Synchrony(topology="single", backup_workers=1),
    "asynchronous": Synchrony(kind="asynchronous"),
    "downpour": Synchrony(kind="asynchronous", fetch_every=3, push_every=2, reduce="sum"),
    "bounded": Synchrony(kind="bounded", delay_bound=2),
    "eager": Synchrony(kind="bounded", delay_bound=2, remedy="eager_push"),
    "snapshot": Synchrony(kind="bounded", delay_bound=2, read="snapshot"),
    "ahead": Synchrony(kind="asynchronous", read="ahead"),
    "bounded ahead": Synchrony(kind="bounded", delay_bound=1, read="ahead"),
    "value": Synchrony(kind="bounded", value_bound=0.2),
    "reject": Synchrony(kind="bounded", delay_bound=2, on_violation="reject"),
    "rate": Synchrony(kind="asynchronous", remedy="staleness_rate"),
    "compensation": Synchrony(kind="asynchronous", remedy="delay_compensation"),
    "local": Synchrony(merge="mean", local_steps=4),
    "slow momentum": Synchrony(merge="mean", local_steps=4, outer="momentum", outer_momentum=0.6),
    "diloco": Synchrony(
        merge="mean", local_steps=4, outer="nesterov", outer_rate=0.7, outer_momentum=0.9
    ),
    "elastic": Synchrony(merge="elastic", kind="asynchronous", local_steps=2),
    "elastic rounds": Synchrony(merge="elastic", local_steps=2),
    "tree": Synchrony(
        merge="elastic", kind="asynchronous", topology="tree", period_up=2, period_down=3
    ),
    "neighbours": Synchrony(merge="neighbour"),
    "pairwise": Synchrony(merge="pairwise", kind="asynchronous"),
    "gossip": Synchrony(merge="push_sum", kind="asynchronous", probability=0.5),
}


def make(synchrony: Synchrony) -> Centrals | Decentrals:
    return Centrals(synchrony, 4) if synchrony.central else Decentrals(synchrony, [1.0, 2, 3, 5])


@pytest.mark.parametrize("name", WAYS)
def test_a_history_is_replayed_bit_by_bit(name: str, tmp_path: Any) -> None:
    live, again = make(WAYS[name]), make(WAYS[name])
    found = live.simulate(steps=20, seed=11)
    found.history.save(tmp_path / "history")

    def compute(worker: int, wanted: Compute) -> Gradient | None:
        if wanted.step >= 20:
            return None
        return again.gradient(worker, wanted.step, wanted.value)

    replay(again.run, History.load(tmp_path / "history"), compute)
    assert again.values == live.values
    if isinstance(live, Decentrals) and isinstance(again, Decentrals):
        assert again.centre.x == live.centre.x


@pytest.mark.parametrize("name", WAYS)
def test_every_way_to_agree_finds_the_minimum(name: str) -> None:
    run = make(WAYS[name])

    def gradient(worker: int, step: int, value: Any) -> Gradient:
        at = run.replicas[worker].read() if value is None else value
        target = 0.3 + 0.2 * math.sin(worker + 1.9 * step)
        if isinstance(run, Centrals):
            return Gradient(tuple(x - target for x in at))
        return Gradient(at - target)

    simulate_run(
        run.run,
        VirtualMachines(compute=noisy(4), wire=0.1, latency=0.01),
        steps=300,
        gradient=gradient,
    )
    assert np.mean(run.values) == pytest.approx(0.3, abs=0.1)


def test_a_history_of_another_run_is_refused() -> None:
    from headway.errors import RunError

    live, again = make(WAYS["asynchronous"]), make(WAYS["asynchronous"])
    found = live.simulate(steps=20)
    with pytest.raises(RunError, match="does not fit"):
        replay(
            again.run,
            found.history,
            lambda worker, wanted: (
                None if wanted.step >= 19 else again.gradient(worker, wanted.step, None)
            ),
        )
