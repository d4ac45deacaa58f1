"""Plans whose steps do not equal the serial run's, priced beside those that do (`--inexact`).

Local SGD, D-PSGD, asynchronous and bounded servers with data-parallel workers on all devices of a
request. Computation and memory are those of the search's cost model; who waits for whom is played
with virtual clocks by the programs that train (`simulator.synchrony`); messages between nodes take
turns on the nodes' links. How many samples a run needs is not priced: the taxonomy's rules stand
beside each plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from headway.cluster import Cluster
from headway.cost import parameter_exchange
from headway.cost.parameter_exchange import WholeModelTimes
from headway.errors import PlanError
from headway.planner.estimate.degrees import Degrees, microbatch_sizes
from headway.planner.export.prediction import prediction_of
from headway.planner.export.worker_machines import worker_machines
from headway.planner.guidelines.zou import parameter_servers
from headway.planner.search.branch_and_bound import PlanSearch
from headway.planner.search.plan_point import Point, format_device_runs
from headway.planner.search.request import PlanRequest
from headway.plans import Plan, Synchrony, pipelined
from headway.plans.plan import unsupported_by_executor
from headway.plans.taxonomy import SelectionRule, selection_rules
from headway.simulator.synchrony import (
    SimulatedRun,
    StillReplica,
    VirtualMachines,
    simulate_run,
)
from headway.synchrony.mixing import receives_from
from headway.synchrony.programs import make_run, server_places
from headway.units import format_bytes

PERIODS = (2, 8, 32)
"""Steps between two meetings (tau) that are tried."""
DELAY_BOUND = 4
ROUNDS = 24
"""Of steps that are played where workers do not meet; the second half counts."""
MOST_MESSAGES = 1 << 14
"""Of a round, all workers to all servers: beyond, a way is not played."""


@dataclass(frozen=True, kw_only=True)
class InexactPlan:
    """A way to agree, with its price.

    Attributes:
        name: Short, for `--take`: "local-8", "async".
        plan: With its prediction, where it can be made; for the executor.
        seconds: In which all workers together make as many samples as a step has.
        rate: Samples per second.
        bytes: Of the fullest device.
        exchange: Seconds per step of a worker that its exchange takes at least, by the taxonomy's
            closed form; None: there is none.
        waits: Of a worker's time the share in which it does not compute, by cause, the largest
            first.
        rule: What the taxonomy says of the learning rate and of getting the same run again.
        repeated: "by itself", or "by its history": what a second run needs to end with the same
            numbers.
        lacks: What stands against it; "": `headway train --plan` runs it.
    """

    name: str
    synchrony: Synchrony
    plan: Plan | None = None
    seconds: float = 0.0
    rate: float = 0.0
    bytes: float = 0.0
    exchange: float | None = None
    waits: tuple[tuple[str, float], ...] = ()
    rule: SelectionRule | None = None
    repeated: str = ""
    lacks: str = ""


def inexact_plans(question: PlanRequest, cluster: Cluster) -> tuple[InexactPlan, ...]:
    """All ways, the fastest first; behind them those that cannot be, with the reason.

    Args:
        question: As of the search; all its devices are used.
        cluster: Of the question's machines.
    """
    pricing = _Pricing(question, cluster)
    found = [pricing.priced(name, words) for name, words in pricing.ways()]
    return tuple(sorted(found, key=lambda one: (one.plan is None, -one.rate)))


def inexact_plan(
    question: PlanRequest, cluster: Cluster, name: str, rules: Synchrony
) -> InexactPlan:
    """One way; arguments as of `inexact_plans`."""
    return _Pricing(question, cluster).priced(name, rules)


class _Pricing:
    def __init__(self, question: PlanRequest, cluster: Cluster) -> None:
        self.question, self.cluster = question, cluster
        self.ranks = question.most
        kinds = cluster.devices_of_ranks[: self.ranks] if question.groups else ()
        self.kinds = tuple(kind or "" for kind in kinds) or ("",) * self.ranks
        self.network = question.machine.network
        self.device = question.machine.device.name
        self.model = float(question.work.graph.parameter_bytes)
        self.state = question.work.optimiser.state
        self._engines: dict[str, PlanSearch] = {}

    def ways(self) -> Iterator[tuple[str, Synchrony]]:
        for period in PERIODS:
            yield f"local-{period}", Synchrony(merge="mean", local_steps=period)
        most = PERIODS[-1]
        yield (
            f"diloco-{most}",
            Synchrony(
                merge="mean", local_steps=most, state="keep", outer="nesterov", outer_rate=0.7,
                outer_momentum=0.9,
            ),
        )  # fmt: skip
        if (inner := self._inner) > 1:
            yield f"nodes-{most}", Synchrony(merge="mean", local_steps=most, copies=inner)
        yield "d-psgd", Synchrony(merge="neighbour")
        yield "async", Synchrony(kind="asynchronous")
        yield "async-ahead", Synchrony(kind="asynchronous", read="ahead")
        if 1 <= (servers := self._lemma) < self.ranks:
            name = f"async-{servers}-server" + "s" * (servers > 1)
            yield name, Synchrony(kind="asynchronous", topology="sharded", servers=servers)
        yield f"bounded-{DELAY_BOUND}", Synchrony(kind="bounded", delay_bound=DELAY_BOUND)

    def priced(self, name: str, rules: Synchrony) -> InexactPlan:
        bare = InexactPlan(name=name, synchrony=rules)
        try:
            return self._price(bare, _Step(self, rules))
        except PlanError as error:
            return replace(bare, lacks="; ".join(error.problems or [error.what]))

    def _price(self, bare: InexactPlan, step: _Step) -> InexactPlan:
        rules, question, plan = bare.synchrony, self.question, step.plan
        run, rate = step.played()
        seconds = question.batch / rate
        # So long all workers together would take if nobody waited.
        alone = question.batch / sum(s / c for s, c in zip(step.shares, step.compute, strict=True))
        compute = min(seconds, alone)
        update = 0.0 if rules.has_servers else min(step.update, seconds - compute)
        expected = prediction_of(
            self.cluster,
            seconds=seconds,
            parts={"compute": compute, "update": update, "exchange": seconds - compute - update},
            bytes=step.bytes,
            device=format_device_runs(self.kinds) if question.groups else self.device,
        )
        return replace(
            bare,
            plan=replace(plan, prediction=expected),
            seconds=seconds,
            rate=rate,
            bytes=step.bytes,
            exchange=step.exchange,
            waits=_waits(run),
            rule=next(iter(selection_rules(plan)), None),
            repeated="by itself" if rules.in_rounds else "by its history",
            lacks=", ".join(unsupported_by_executor(plan)),
        )

    @property
    def _inner(self) -> int:
        """Ranks of a node, where there are several nodes that are alike; else 1."""
        width = self.network.levels[0].width
        several = width < self.ranks and self.ranks % width == 0 and not self.question.groups
        return int(width) if several else 1

    @property
    def _lemma(self) -> int:
        """Servers that hide their traffic behind the computation (Zou et al. 2017, Lemma 2)."""
        try:
            step = _Step(self, Synchrony(kind="asynchronous"))
        except PlanError:
            return 0
        mean = sum(step.compute) / len(step.compute)
        rate = self.model / max(step.machines.wire, 1e-12)
        return parameter_servers(self.model, self.ranks, rate, mean)[0]

    def check_room(self, kind: str, size: float) -> None:
        """Raise PlanError where a device of a type has fewer bytes."""
        room = self._engines[kind].question.cap
        if size > room:
            raise _too_large(f"{format_bytes(size)} when all agree", room)

    def point(self, kind: str, share: int, inner: int, more: float) -> Point:
        """The fastest step of a worker of some ranks, of which each has room for more bytes.

        Raises:
            PlanError: None has room.
        """
        if kind not in self._engines:
            question = replace(
                self.question.of(kind), recompute="pipeline", zero=(0,), tensor=(1,), force=()
            )
            self._engines[kind] = PlanSearch(question)
        engine = self._engines[kind]
        room = engine.question.cap - more
        # As copies of the model: gradients have a place of their own.
        found = [
            engine.candidate(
                Degrees(
                    tensor=1,
                    data=max(inner, 2),
                    pipeline=1,
                    microbatch=size,
                    microbatches=share // size,
                )
            ).fastest(room)
            for size in microbatch_sizes(share)
        ]
        fits = [point for point in found if point is not None]
        if not fits:
            raise _too_large(f"{format_bytes(more)} beside a step", engine.question.cap)
        return min(fits, key=lambda point: _alone(point) + (point.exchange if inner > 1 else 0.0))


def _too_large(what: str, room: float) -> PlanError:
    told = f"a worker does not fit: {what}, in {format_bytes(room)}"
    return PlanError("a worker does not fit", problems=[told])


def _alone(point: Point) -> float:
    """Seconds of a step without exchange and update."""
    return point.seconds - point.exchange - point.update


class _Step:
    """What a step of each worker takes.

    Attributes:
        shares: Samples of each worker; of a batch that is not divided evenly the mean.
        compute: Seconds of each worker, with what is exchanged inside of it.
        update: Seconds of the optimiser.
    """

    def __init__(self, pricing: _Pricing, rules: Synchrony) -> None:
        self._pricing, self._rules = pricing, rules
        batch, ranks = pricing.question.batch, pricing.ranks
        self.workers = ranks // rules.copies
        if self.workers < 2:
            raise PlanError("no workers", problems=["there is one device: nobody to agree with"])
        if batch < ranks:
            raise PlanError(
                "too few samples", problems=[f"a batch of {batch} samples for {ranks} devices"]
            )
        self.places = server_places(rules, self.workers) if rules.has_servers else ()
        if self.workers * len(self.places) > MOST_MESSAGES:
            raise PlanError(
                "not priced",
                problems=[f"{self.workers} workers with {len(self.places)} servers: not played"],
            )
        largest = -(-batch // ranks)
        kept, _ = self._copies
        each = {
            kind: pricing.point(kind, largest, rules.copies, kept * pricing.model)
            for kind in dict.fromkeys(pricing.kinds)
        }
        points = [each[kind] for kind in pricing.kinds[:: rules.copies]]
        inside = [point.exchange if rules.copies > 1 else 0.0 for point in points]
        self.shares = [batch / self.workers] * self.workers
        self.compute = [_alone(point) + extra for point, extra in zip(points, inside, strict=True)]
        self.update = max(point.update for point in points)
        self._microbatch = min(point.degrees.microbatch for point in points)
        held = {kind: self._held(pricing.model, point) for kind, point in each.items()}
        for kind, size in held.items():
            pricing.check_room(kind, size)
        self.bytes = max(held.values())

    def _held(self, model: float, point: Point) -> float:
        """Bytes of a rank: in a step, or when all agree and nothing is computed."""
        kept, moment = self._copies
        return kept * model + max(point.bytes, point.stages[0].state + moment * model)

    @property
    def _copies(self) -> tuple[float, float]:
        """Models beside those of a step on the fullest rank: always, and for a moment while
        nothing is computed, gradients included. `tests/ranks/test_worker_memory.py`."""
        rules, optimiser = self._rules, self._pricing.question.work.optimiser
        state = optimiser.state
        if rules.merge == "mean":
            # What all agreed on and the outer momentum; then own model or state on its way, and the
            # terms of the outer step.
            averaged = state if rules.state == "average" else 0
            return (2.0, 6.0) if rules.outer != "none" else (1.0, 1.0 + max(1.0, averaged))
        if rules.merge == "neighbour":
            # Its own and the neighbours' while a gradient is computed, and what was sent before;
            # then the terms of the mean.
            near = len(receives_from(rules.place, 0, self.workers))
            return near + 2.0, 4.0
        # What was fetched and what was sent last; then what is sent now. A server's share with its
        # optimiser, in whose place the worker's own is never made; a push as it came and in parts,
        # and an answer to each worker.
        share = 3.0 + state + optimiser.together + self.workers
        return 2.0 - state + share / len(self.places), 2.0

    @cached_property
    def plan(self) -> Plan:
        question = self._pricing.question
        return pipelined(
            question.batch,
            processes=self._pricing.ranks,
            stages=1,
            microbatch=self._microbatch,
            precision="bfloat16" if question.precision == "bfloat16" else "float32",
            synchrony=self._rules,
        )

    @cached_property
    def _times(self) -> WholeModelTimes[float]:
        return WholeModelTimes(transmit=self.machines.wire, reduce=0.0, update=self.update)

    @property
    def exchange(self) -> float | None:
        """By the closed form."""
        rules, times = self._rules, self._times
        if rules.merge == "mean":
            whole = parameter_exchange.ring(replace(times, update=0.0), self.workers)
            return parameter_exchange.traffic_per_local_step(whole, rules.local_steps)
        if not rules.has_servers:
            return None
        # What comes overlaps what goes; servers share the parameters.
        return parameter_exchange.asynchronous_workers(times, self.workers) / len(self.places)

    def played(self) -> tuple[SimulatedRun, float]:
        """The run, and its samples per second."""
        rules = self._rules
        run = make_run(
            rules,
            [StillReplica(len(self.places)) for _ in range(self.workers)],
            [StillReplica() for _ in self.places],
        )
        if rules.in_rounds:
            steps = ROUNDS * rules.local_steps if rules.local_steps == 1 else 2 * rules.local_steps
            found = simulate_run(run, self.machines, steps=steps)
            return found, steps * sum(self.shares) / found.seconds
        made = [0.0]
        end = self._horizon

        def count(now: float, worker: int, step: int) -> None:
            if end / 2 < now <= end:
                made[0] += self.shares[worker]

        found = simulate_run(run, self.machines, seconds=end, on_step=count)
        return found, made[0] / (end / 2)

    @property
    def _horizon(self) -> float:
        """Seconds that are played."""
        once = parameter_exchange.sharded_servers(self._times, self.workers, len(self.places))
        return ROUNDS * (max(self.compute) + once + 4 * self.machines.latency)

    @cached_property
    def machines(self) -> VirtualMachines:
        """What the run is played on."""
        pricing = self._pricing
        return worker_machines(
            self.plan,
            pricing.network,
            lambda worker, step: (self.compute[worker], self.update),
            model=pricing.model,
            state=pricing.state,
        )


def _waits(run: SimulatedRun) -> tuple[tuple[str, float], ...]:
    """Of the workers' time, by cause, the largest first."""
    whole = run.seconds * len(run.waits)
    sums: dict[str, float] = {}
    for waits in run.waits:
        for cause, seconds in waits.items():
            sums[cause] = sums.get(cause, 0.0) + seconds
    found = [(cause, seconds / whole) for cause, seconds in sums.items() if seconds > 1e-3 * whole]
    return tuple(sorted(found, key=lambda one: -one[1]))
