"""`headway.simulate` of plans whose workers do not agree at every step, on virtual clocks.

Programs and rules are those of the run (`synchrony`). The seconds of a worker's own step are those
of the simulated step of its ranks; messages take the seconds of the cluster's links, an exchange in
which all meet those of an all-reduce.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import permutations

from headway.api.plan_request import device_types_of_ranks
from headway.cluster import Cluster
from headway.cluster.faults import CutLink, Fault, KillRank, SlowLink, SlowRank
from headway.errors import TIMEOUT_SECONDS, PlanError, UsageError
from headway.keywords import checks_keywords
from headway.planner.export.to_simulation import step_of_plan
from headway.planner.export.worker_machines import bytes_of_meeting, worker_machines
from headway.planner.search.branch_and_bound import PlanSearch
from headway.planner.search.request import PlanRequest
from headway.plans import Plan, Synchrony
from headway.plans.mesh import Mesh
from headway.plans.synchrony import WORKER_AXIS
from headway.run.distributed.launch_env import HEARTBEAT_TIMEOUT_SECONDS
from headway.simulator.ranks import SlowPath, StepFaults
from headway.simulator.simulation import simulate_training_step
from headway.simulator.synchrony import (
    Cut,
    DriftingReplica,
    SimulatedRun,
    StillReplica,
    VirtualMachines,
    simulate_run,
)
from headway.simulator.what_if import change_device_types, parse_rank_faults
from headway.synchrony.actors import Address, Gradient
from headway.synchrony.programs import make_run, server_places
from headway.units import format_seconds


@checks_keywords
@dataclass(frozen=True, kw_only=True)
class WorkerFigures:
    """What one worker does.

    Attributes:
        steps: Made until the end of the simulation.
        rate: Samples per second.
        waits: Seconds by cause: "bound", "server", "neighbour", "meeting", "link".
        staleness: Updates between the version that a gradient was computed with and that which it
            changed -> pushes to a server.
        dies: The step, from 1, before which it dies; None: it lives.
    """

    worker: int
    steps: int
    rate: float
    waits: Mapping[str, float]
    staleness: Mapping[int, int]
    dies: int | None = None


@checks_keywords
@dataclass(frozen=True, kw_only=True)
class WorkerScenario:
    """A run on some hardware.

    Attributes:
        seconds: That were played.
        rate: Samples per second of all workers.
        links: Bytes that went from one worker to another, by (from, to).
        met: Bytes that each worker sent in the exchanges in which all meet.
        ends: How a cut link ends the run; "": it does not.
        least: With a bound by value, samples per second where every update comes to the bound;
            `rate` is where none does. Which it is follows from the numbers.
        assumes: What is not known here.
    """

    name: str
    seconds: float
    rate: float
    workers: tuple[WorkerFigures, ...]
    links: Mapping[tuple[int, int], float]
    met: float
    ends: str = ""
    least: float | None = None
    assumes: tuple[str, ...] = ()


def worker_scenarios(
    plan: Plan,
    question: PlanRequest,
    cluster: Cluster,
    *,
    change: Sequence[str],
    fault: Sequence[str],
    steps: int,
) -> tuple[WorkerScenario, ...]:
    """A run as planned and, where something is changed or faulty, as it is then.

    Args:
        plan: With a `synchrony` other than all-reduce.
        question: The plan's batch on its devices.
        cluster: Of the question's machines.
        change: As for `headway.simulate`; so are `fault` and `steps`.

    Raises:
        UsageError: A sentence means nothing here.
        PlanError: The plan cannot be simulated.
    """
    if steps < 1:
        raise UsageError(f"--steps {steps}: at least 1")
    _check_simulable(plan)
    parsed = parse_rank_faults(fault, plan.ranks, cluster)
    faults = [_possible(one, plan, cluster) for one in parsed]
    if sum(isinstance(one, CutLink) for one in faults) > 1:
        raise UsageError(
            "several links are cut: the first cut ends the run", where="--fault", fix="Keep one."
        )
    changed = question.with_machines(change_device_types(question.machines, cluster, change))
    undisturbed = _Workers(plan, question, cluster, ())
    alone = undisturbed.played(steps, None).seconds
    scenarios = [undisturbed.scenario("as planned", steps, alone)]
    if change or fault:
        disturbed = _Workers(plan, changed, cluster, faults)
        scenarios.append(disturbed.scenario("changed", steps, alone))
    return tuple(scenarios)


def _check_simulable(plan: Plan) -> None:
    if problems := [*plan.synchrony.carried_out_by_nothing()]:
        raise PlanError("the workers of this plan cannot be simulated", problems=problems)


def _possible(fault: Fault, plan: Plan, cluster: Cluster) -> Fault:
    """A fault, if the simulation can play it.

    Raises:
        UsageError: It cannot; says why.
    """
    why = fix = ""
    if isinstance(fault, CutLink):
        ends = [{*cluster.ranks_of(name)} for name in fault.ends]
        if any(all(end & {*members} for end in ends) for members in _members_of_all(plan)):
            why = "a worker has ranks on both ends: its own step never ends"
            fix = "Let the ranks of a worker stand on one node."
    elif isinstance(fault, SlowLink) and (fault.first > 1 or fault.until is not None):
        why = "workers are at different steps at the same time: a link is slow in the whole run"
        fix = "Leave the steps out."
    elif isinstance(fault, KillRank):
        fix = '`headway train --fault` shows how such a job survives; or write "rank 3 slow 2x".'
        rules, each = plan.synchrony, plan.ranks // plan.workers
        holds = server_places(rules, plan.workers) if rules.has_servers else ()
        if rules.merge == "elastic" and rules.place == "master":
            holds = (0,)
        if not plan.survives:
            why = "workers of this plan wait for all others: the run ends"
        elif fault.rank // each in holds:
            why = "a server or the centre lives there, without which nobody goes on: the run ends"
    if why:
        raise UsageError(f"{str(fault)!r}: {why}", where="--fault", fix=fix)
    return fault


def _members_of_all(plan: Plan) -> list[frozenset[int]]:
    """The ranks of each worker."""
    each = plan.ranks // plan.workers
    return [frozenset(plan.worker_ranks(worker * each)) for worker in range(plan.workers)]


class _Workers:
    """The workers of a plan on some hardware."""

    def __init__(
        self, plan: Plan, question: PlanRequest, cluster: Cluster, faults: Sequence[Fault]
    ) -> None:
        self._plan, self._rules = plan, plan.synchrony
        self._question, self._cluster, self._faults = question, cluster, faults
        self._each = plan.ranks // plan.workers
        self._kinds = device_types_of_ranks(plan, cluster)
        copies = range(plan.copies)
        self.samples = [
            sum(len(plan.batch.share(w * len(copies) + c, plan.data_degree)) for c in copies)
            for w in range(plan.workers)
        ]
        self._places = server_places(self._rules, plan.workers) if self._rules.has_servers else ()
        self._seconds: dict[tuple[object, ...], tuple[float, float]] = {}

    def scenario(self, name: str, steps: int, seconds: float) -> WorkerScenario:
        """The figures of a run.

        Args:
            seconds: As long is played where workers do not meet.
        """
        made = [0] * self._plan.workers
        until = float("inf") if self._meets else seconds

        def count(now: float, worker: int, step: int) -> None:
            made[worker] += now <= until

        run = self.played(steps, None if self._meets else seconds, count)
        whole = run.seconds if self._meets else seconds
        for worker, (since, _, cause) in run.stuck.items():
            run.waits[worker][cause] += max(0.0, whole - since)
        rates = [own * n / whole for own, n in zip(made, self.samples, strict=True)]
        return WorkerScenario(
            name=name,
            seconds=whole,
            rate=sum(rates),
            workers=tuple(
                WorkerFigures(
                    worker=worker,
                    steps=made[worker],
                    rate=rates[worker],
                    waits=dict(run.waits[worker]),
                    staleness=dict(sorted(Counter(run.staleness[worker]).items())),
                    dies=self._deaths[worker] + 1 if worker in self._deaths else None,
                )
                for worker in range(self._plan.workers)
            ),
            links={
                ends: models * self._model for ends, models in sorted(run.traffic.items()) if models
            },
            met=self._met(run),
            ends=self._end(run),
            least=self._least(steps) if self._rules.value_bound is not None else None,
            assumes=tuple(self._assumptions()),
        )

    def _assumptions(self) -> Iterator[str]:
        if self._rules.value_bound is not None:
            yield "no update comes to the bound by value"
        if self._rules.compress != "none":
            yield "compressing takes no time"

    def _least(self, steps: int) -> float:
        """Samples per second where every update comes to the bound by value."""
        assert self._rules.value_bound is not None
        drift = 2 * self._rules.value_bound * self._plan.workers
        return steps * sum(self.samples) / self.played(steps, None, drift=drift).seconds

    def _end(self, run: SimulatedRun) -> str:
        """What the live run does about a cut link."""
        if not run.stuck:
            return ""
        worker, (since, holder, _) = min(run.stuck.items(), key=lambda item: item[1][0])
        if self._rules.survives:
            # Such workers watch their messages, and nobody their heartbeat.
            what, limit = "--timeout", TIMEOUT_SECONDS
        else:
            what, limit = "--patience", HEARTBEAT_TIMEOUT_SECONDS
        whom = "the others" if holder.kind == "meeting" else f"{holder}"
        return (
            f"from {format_seconds(since)} on worker {worker} waits for {whom} in vain: after "
            f"{what} ({limit:g} s, unless another is given) the run ends with an error"
        )

    def played(
        self,
        steps: int,
        seconds: float | None,
        on_step: Callable[[float, int, int], None] | None = None,
        drift: float = 0.0,
    ) -> SimulatedRun:
        """A run of so many steps of each worker, or so many seconds.

        Args:
            drift: By how much a push moves the parameters of a bound by value.
        """
        workers = self._plan.workers
        replica = StillReplica if self._rules.value_bound is None else DriftingReplica
        run = make_run(
            self._rules,
            [StillReplica(len(self._places)) for _ in range(workers)],
            [replica() for _ in self._places or (0,)],
        )
        return simulate_run(
            run,
            self._machines,
            steps=steps if seconds is None else None,
            seconds=seconds,
            gradient=lambda *_: Gradient((drift,) * len(self._places) if self._places else drift),
            on_step=on_step,
        )

    @property
    def _meets(self) -> bool:
        """Whether all make the same steps."""
        return self._rules.in_rounds

    @property
    def _model(self) -> float:
        """Bytes of the parameters."""
        return float(self._question.work.graph.parameter_bytes)

    def _met(self, run: SimulatedRun) -> float:
        """Bytes that a worker has sent where all meet, by a ring."""
        workers, work = self._plan.workers, self._question.work
        meetings = sum(1 for _ in run.history.senders(Address("meeting"))) / workers
        return meetings * bytes_of_meeting(
            self._plan, self._model, work.optimiser.state, self._shapes
        )

    # -- seconds -------------------------------------------------------------------------------

    @cached_property
    def _deaths(self) -> dict[int, int]:
        kills = [one for one in self._faults if isinstance(one, KillRank)]
        return {
            one.rank // self._each: one.step - 1 for one in sorted(kills, key=lambda k: -k.step)
        }

    @property
    def _shapes(self) -> list[tuple[int, ...]]:
        return [spec.shape for spec in self._question.work.graph.parameters.values()]

    @cached_property
    def _cut(self) -> Cut | None:
        one = next((fault for fault in self._faults if isinstance(fault, CutLink)), None)
        if one is None:
            return None
        here, there = (self._ranks_of(name) for name in one.ends)
        members = _members_of_all(self._plan)
        between = {
            pair
            for a, b in permutations(range(len(members)), 2)
            if members[a] & here and members[b] & there
            for pair in ((a, b), (b, a))
        }
        if not between:
            return None
        # The first rank of the first end pulls the cable, before its step.
        return Cut(worker=min(here) // self._each, step=one.step - 1, between=frozenset(between))

    @cached_property
    def _paths(self) -> tuple[SlowPath, ...]:
        return tuple(
            SlowPath(
                ends=(self._ranks_of(one.ends[0]), self._ranks_of(one.ends[1])), factor=one.factor
            )
            for one in self._faults
            if isinstance(one, SlowLink)
        )

    def _ranks_of(self, name: str) -> frozenset[int]:
        return frozenset(rank for rank in self._cluster.ranks_of(name) if rank < self._plan.ranks)

    def _members(self, worker: int) -> frozenset[int]:
        return frozenset(range(worker * self._each, (worker + 1) * self._each))

    @cached_property
    def _machines(self) -> VirtualMachines:
        """What the programs are played on."""
        return worker_machines(
            self._plan,
            self._question.machine.network,
            self._step,
            model=self._model,
            state=self._question.work.optimiser.state,
            shapes=self._shapes,
            paths=self._paths,
            deaths=self._deaths,
            cut=self._cut,
        )

    def _step(self, worker: int, step: int) -> tuple[float, float]:
        """Seconds of a worker's own step without the update, and of the update."""
        first = worker * self._each
        slow: dict[int, float] = {}
        for one in self._faults:
            if isinstance(one, SlowRank) and one.rank in self._members(worker):
                begun = step + 1 >= one.first and (one.until is None or step + 1 < one.until)
                if begun:
                    inside = one.rank - first
                    slow[inside] = slow.get(inside, 1.0) * one.factor
        paths = tuple(
            SlowPath(
                ends=(
                    frozenset(r - first for r in path.ends[0] & self._members(worker)),
                    frozenset(r - first for r in path.ends[1] & self._members(worker)),
                ),
                factor=path.factor,
            )
            for path in self._paths
            if path.joins(self._members(worker))
        )
        kinds = self._kinds[first : first + self._each]
        key = (self.samples[worker], kinds, tuple(sorted(slow.items())), paths)
        if key not in self._seconds:
            self._seconds[key] = self._played_step(
                worker, kinds, StepFaults(slow=slow, paths=paths)
            )
        return self._seconds[key]

    def _played_step(
        self, worker: int, kinds: tuple[str, ...], faults: StepFaults
    ) -> tuple[float, float]:
        one = len({*kinds}) <= 1
        question = self._question.of(kinds[0]) if kinds and one else self._question
        plan = self._plan_of(worker)
        search = PlanSearch(
            replace(question, devices=(plan.ranks,), batch=plan.batch.samples, objective="fastest")
        )
        work, _ = step_of_plan(plan, search, () if one else kinds)
        found = simulate_training_step(replace(work, faults=faults))
        update = max(account.busy.get("update", 0.0) for account in found.accounts)
        return found.seconds - update, update

    def _plan_of(self, worker: int) -> Plan:
        """What a worker's ranks do in a step, as a plan of their own."""
        plan, copies = self._plan, self._plan.copies
        shares = plan.batch.shares[worker * copies : (worker + 1) * copies]
        return replace(
            plan,
            mesh=Mesh(axes=tuple(a for a in plan.mesh.axes if a.name != WORKER_AXIS)),
            batch=replace(plan.batch, samples=self.samples[worker], shares=shares),
            synchrony=Synchrony(),
            prediction=None,
        )
