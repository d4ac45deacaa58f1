"""The plan of `train(plan="auto")`, and the algorithm of `collective=`, before workers start.

`AutoPlanSearch` searches for the fastest plan on a given cluster, or on this machine as measured
now with as many processes as will train; plan and measured cluster are kept in the run directory.
`CollectiveOption` chooses the all-reduce algorithm for gradients from a description of the network.
A resumed run keeps the plan and the algorithm that it has. The module itself imports no torch.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from headway.api.inputs import ClusterInput, record_provenance, resolve_cluster
from headway.cluster import Cluster, find_cluster
from headway.cluster.local_machine import fingerprint, fingerprint_differences
from headway.collective.all_reduce.algorithm import ALL_REDUCE_KINDS, AllReduceOptions
from headway.collective.topology import NetworkTopology
from headway.errors import PlanError, UsageError
from headway.plans import ExchangePlan, Plan, with_collective
from headway.plans.exchange import AllReduceName
from headway.run.training.run_directory import RunDirectory
from headway.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from headway.api.recipe_workload import RecipeWorkload
    from headway.cluster.measurement import RankReadings
    from headway.launch.emulation import EmulatedCluster, PacedCluster
    from headway.planner.collective_algorithm import AllReduceChoice
    from headway.planner.export.auto import AutoPlan, RecipeLimits
    from headway.planner.search.plan_point import Point
    from headway.run.distributed.world import World
    from headway.run.recipe.recipe import Recipe

    SearchInputs = tuple[RecipeLimits, RecipeWorkload]

_LOG = logging.getLogger("headway")

AUTO = "auto"
"""As the value of --plan."""
MEASURE = "measure"
"""As the value of --cluster."""
MEASURED_CLUSTER_FILE = "cluster.toml"
"""In the run directory."""


@dataclass(frozen=True, kw_only=True)
class AutoPlanSearch:
    """A plan that is to be found.

    Attributes:
        cluster: A cluster, its cluster.toml, a preset, or "measure".
        fallback: Whether data parallelism does where no plan is found.
    """

    recipe: Recipe | str
    overrides: tuple[str, ...]
    cluster: ClusterInput
    device: str
    fallback: bool

    def ranks(self, processes: int | None) -> int:
        """Processes: as many as are asked for, else the given cluster's, else the machine's."""
        if processes is None and self.cluster != MEASURE:
            return resolve_cluster(self.cluster).ranks
        from headway.api.cluster_measurement import default_ranks

        return default_ranks(processes, self.device)

    def find(
        self,
        run: RunDirectory,
        ranks: int,
        emulated: EmulatedCluster | PacedCluster | None,
        *,
        resume: bool,
    ) -> Path | None:
        """The plan's file, in the run directory; None: data parallelism, as no plan is found.

        Args:
            resume: Take the plan that a run has already.

        Raises:
            NothingFits: With what would do.
            PlanError: The model cannot be captured.
            UsageError: The recipe decides what the search should.
        """
        if resume and run.plan_file.exists():
            return self._known(run)
        try:
            asked = self._asked()

            def measure() -> list[RankReadings]:
                from headway.api.cluster_measurement import measure_in_workers

                return measure_in_workers(ranks, self.device, emulated)

            self._decide(asked, run, ranks, measure)
        except PlanError as error:
            self._fall_back(error)
            return None
        return run.plan_file

    def find_in(self, world: World, *, directory: Path, resume: bool) -> Plan | None:
        """The plan, in a world of another launcher: rank 0 searches for all; collective.

        Args:
            world: All its ranks measure, where the cluster is not given.
            resume: Take the plan that the run has already, as restarted workers do.

        Raises:
            HeadwayError: As `find`; on all ranks.
        """
        from headway.run.distributed.world import broadcast_from_rank0
        from headway.run.measure.cluster import measure_in

        run = RunDirectory(directory)
        # A restarted attempt must keep the plan: checkpoints were written under it, and measuring
        # anew could choose another one.
        again = resume or world.place.attempt > 0
        asked: list[SearchInputs] = []

        def first(find: Callable[[], Plan | None]) -> Plan | None:
            if world.ranks == 1:
                return find()
            return broadcast_from_rank0(world.rank, find, world.explained("the search for a plan"))

        def known() -> Plan | None:
            if again and run.plan_file.exists():
                return Plan.load(self._known(run))
            asked.append(self._asked())  # what is wrong with the recipe shows before the measuring
            return None

        try:
            plan = first(known)
            if plan is None:
                readings: list[RankReadings] = []
                if self.cluster == MEASURE:
                    with world.explained("measuring"):
                        readings = measure_in(world)
                # `asked` is filled on rank 0 alone, where both functions run.
                plan = first(lambda: self._decide(asked[0], run, world.ranks, lambda: readings))
        except PlanError as error:
            self._fall_back(error, told=world.rank == 0)
            return None
        return plan

    def _known(self, run: RunDirectory) -> Path:
        _LOG.info("plan auto: %s, as before", run.plan_file)
        return run.plan_file

    def _fall_back(self, error: PlanError, *, told: bool = True) -> None:
        if not self.fallback:
            raise error
        if told:
            warnings.warn(f"plan auto: {error.what}; data parallelism instead", stacklevel=2)

    def _asked(self) -> SearchInputs:
        """What the recipe asks of the search; the machine comes later."""
        from headway.api.recipe_workload import capture_workload
        from headway.run.recipe.factory import load_recipe

        # What the recipe decides itself is refused before the seconds of the capture.
        limits = search_limits(load_recipe(self.recipe, self.overrides))
        return limits, capture_workload(self.recipe, self.overrides)

    def _decide(
        self,
        asked: SearchInputs,
        run: RunDirectory,
        ranks: int,
        measure: Callable[[], list[RankReadings]],
    ) -> Plan:
        """Search, say what was found, and keep it."""
        _, captured = asked
        run.path.mkdir(parents=True, exist_ok=True)
        cluster = self._cluster(run, ranks, measure)
        decision = _fastest_executable(asked, cluster, ranks)
        for sentence in auto_plan_summary(decision):
            _LOG.info(sentence)
        plan = replace(
            decision.plan,
            memory=replace(decision.plan.memory, precision=captured.recipe.precision),
            exchange=captured.recipe.exchange or decision.plan.exchange,
        )
        if not self.overrides:  # they are part of what was asked, and no field of PlanProvenance
            measured = self.cluster == MEASURE
            known = run.path / MEASURED_CLUSTER_FILE if measured else self.cluster
            plan = record_provenance(plan, self.recipe, known, None, run.plan_file)
        plan.save(run.plan_file)
        return plan

    def _cluster(
        self, run: RunDirectory, ranks: int, measure: Callable[[], list[RankReadings]]
    ) -> Cluster:
        if self.cluster == MEASURE:
            return self._measured(run, measure())
        cluster = resolve_cluster(self.cluster)
        name = _cluster_name(self.cluster)
        # More ranks than the job has do no harm: the plan is for `ranks` devices of the cluster.
        if cluster.ranks < ranks:
            raise UsageError(
                f"{name} has {cluster.ranks} ranks, the job {ranks}",
                fix="Start fewer processes, describe a larger cluster, or leave --cluster out to "
                "measure this machine.",
            )
        if not cluster.measured:
            warnings.warn(
                f"{name} was not measured: its predictions may be wrong here", stacklevel=2
            )
            return cluster
        unlike = fingerprint_differences(cluster.measured, self._here(ranks))
        if found := "; ".join(unlike):
            warnings.warn(
                f"{name} was not measured on what runs here ({found}): its predictions "
                "may be wrong; leave --cluster out to measure",
                stacklevel=2,
            )
        return cluster

    def _measured(self, run: RunDirectory, readings: list[RankReadings]) -> Cluster:
        """Kept in the run directory."""
        from headway.api.cluster_measurement import write_measured

        path = run.path / MEASURED_CLUSTER_FILE
        warning = write_measured(path, readings)
        if warning:
            warnings.warn(warning, stacklevel=2)
        _LOG.info(
            "plan auto: measured %d processes on this machine, kept in %s", len(readings), path
        )
        # Read back: `explain` and `simulate` will price the plan with just these numbers.
        return find_cluster(str(path))

    def _here(self, ranks: int) -> dict[str, str]:
        from headway.capture.benchmark.kernels import device_name
        from headway.launch.preflight import threads_for

        device = device_name(self.device)
        return fingerprint(device=device, ranks=ranks, threads=threads_for(ranks))


def _fastest_executable(asked: SearchInputs, cluster: Cluster, ranks: int) -> AutoPlan:
    """The fastest plan; without a pipeline where the executor cannot cut the model so."""
    from headway.api.plan_request import device_type_counts, pricing_request
    from headway.api.planning import search_cuttable
    from headway.planner.export.auto import find_auto_plan

    (open_limits, captured), kinds = asked, device_type_counts(cluster)
    if len(kinds) > 1:
        raise PlanError(
            "--plan auto does not place ranks on devices of several types",
            problems=[f"devices: {', '.join(kinds)}"],
            fix="Search with `headway plan --out plan.json`, and start the ranks on the devices "
            "that it names.",
        )
    question = pricing_request(captured, cluster, devices=(ranks,))
    question = replace(question, force=captured.annotations.force)
    return search_cuttable(
        lambda limits: find_auto_plan(question, limits, cluster),
        lambda decision: decision.outcome,
        open_limits,
        captured.recipe,
    )


def search_limits(recipe: Recipe) -> RecipeLimits:
    """What a recipe leaves open.

    Raises:
        UsageError: It decides itself how it is split.
    """
    from headway.planner.export.auto import RecipeLimits

    said = {
        "stages": recipe.stages > 1,
        "shares": recipe.shares,
        "zero": recipe.zero,
        "split": recipe.split,
        "pipeline": recipe.pipeline is not None,
    }
    own = [name for name, value in said.items() if value]
    if own:
        raise UsageError(
            f"--plan auto contradicts the recipe's {', '.join(own)}",
            where=f"recipe {recipe.name}",
            fix="Leave one of them out: what the recipe says, the search does not decide.",
        )
    plain = recipe.exchange is None or recipe.exchange == ExchangePlan()
    return RecipeLimits(microbatch=recipe.microbatch, pipeline=plain)


def auto_plan_summary(decision: AutoPlan) -> Iterator[str]:
    """What was chosen, what it is expected to cost, and what the next best costs."""
    from headway.planner.estimate.degrees import describe_degrees

    point, question = decision.point, decision.outcome.question
    prediction = decision.plan.prediction
    assert prediction is not None
    shares = ", ".join(f"{n} {s / point.seconds:.0%}" for n, s in prediction.parts.items())
    yield (
        f"plan auto: {describe_degrees(point.degrees)}{_recompute_note(point)}: "
        f"{format_seconds(point.seconds)} a step predicted ({shares}), "
        f"{format_bytes(point.bytes)} of {format_bytes(question.cap)} per device; the fastest of "
        f"{decision.outcome.considered} configurations that the executor can run"
    )
    if not decision.others:
        yield "plan auto: no other plan fits these processes"
        return
    other = decision.others[0]
    yield (
        f"plan auto: next best: {describe_degrees(other.degrees)}{_recompute_note(other)}, "
        f"{format_seconds(other.seconds)} ({other.seconds / point.seconds - 1:+.0%}): "
        f"{_slowest_part(decision, other)}"
    )


def _slowest_part(decision: AutoPlan, other: Point) -> str:
    """The part of a step by which another plan is slower most."""
    from headway.planner.explain.step_parts import step_parts

    prediction = decision.plan.prediction
    assert prediction is not None
    more = {
        part.name: part.seconds - prediction.parts.get(part.name, 0.0)
        for part in step_parts(decision.outcome.question, other)
    }
    name = max(more, key=more.__getitem__)
    return f"{format_seconds(max(more[name], 0.0))} more {name}"


def _recompute_note(point: Point) -> str:
    number = sum(stage.recompute for stage in point.stages)
    return f", recomputing in {number} stage{'s' * (number > 1)}" if number else ""


# `headway train --collective NAME`: which program carries the sums of gradients.


CollectiveName = Literal["auto"] | AllReduceName


@dataclass(frozen=True, kw_only=True)
class CollectiveOption:
    """What the command line asks for.

    Attributes:
        cluster: That describes the network; None: not given.
    """

    name: CollectiveName | None
    cluster: ClusterInput | None
    emulate: ClusterInput | None

    def find(
        self, run: RunDirectory, known: Plan | None, ranks: int, *, resume: bool, told: bool
    ) -> tuple[AllReduceName | None, AllReduceOptions | None]:
        """What the exchange of the plan becomes; None: it stays what it is.

        Raises:
            UsageError: Nothing says what the network is, or it has another number of ranks.
            PlanError: No such program there; or it does not go with the plan.
        """
        if self.name is None:
            return _from_resumed_run(run, known, ranks, told=told) if resume else (None, None)
        if ranks == 1 or (self.name == "auto" and known and known.exchange_degree == 1):
            if told:
                _LOG.info(
                    "collective %s: this plan has no gradient exchange to use it for", self.name
                )
            return None, None
        collective, carrier = self._found(self.name, run, known, ranks, told=told)
        if known is not None:
            # For its checks alone, before workers start; they make the same plan again.
            with_collective(known, collective, carrier)
        return collective, carrier

    def _found(
        self, name: CollectiveName, run: RunDirectory, known: Plan | None, ranks: int, *, told: bool
    ) -> tuple[AllReduceName, AllReduceOptions | None]:
        network = self._network(run)
        # The exchange carries these out itself, without a program made for a network.
        own = name in ("all_reduce", "hierarchical")
        if name != "auto" and (own or (network is None and name != "trees")):
            return name, None
        if network is None:
            raise UsageError(
                f"--collective {name} needs to know the links between the ranks",
                fix="Add --cluster FILE|PRESET (`headway cluster measure` writes such a file), or "
                "--emulate FILE; or name one that needs none: ring, direct, halving-doubling, "
                "servers.",
            )
        from headway.planner.collective_algorithm import choose_all_reduce, parse_wires

        if isinstance(network, Cluster):
            wires = NetworkTopology.of_cluster(network)
        else:
            wires = parse_wires(str(network))
        if wires.ranks != ranks:
            raise UsageError(
                f"--collective {name}: {_cluster_name(network)} has {wires.ranks} ranks, the job "
                f"{ranks}",
                fix="Start as many processes, or describe the nodes on which the job runs.",
            )
        size = _message_bytes(known.exchange if known else ExchangePlan())
        carrying = choose_all_reduce(name, wires, size)
        if told:
            for sentence in collective_summary(name, carrying, size):
                _LOG.info(sentence)
        return carrying.collective, carrying.carrier

    def _network(self, run: RunDirectory) -> ClusterInput | None:
        """What describes it; the measured cluster is that of --plan auto."""
        if self.cluster is not None or self.emulate is not None:
            return self.cluster if self.cluster is not None else self.emulate
        measured = run.path / MEASURED_CLUSTER_FILE
        return measured if measured.is_file() else None


def _cluster_name(network: ClusterInput) -> str:
    return "the cluster" if isinstance(network, Cluster) else str(network)


def _from_resumed_run(
    run: RunDirectory, known: Plan | None, ranks: int, *, told: bool
) -> tuple[AllReduceName | None, AllReduceOptions | None]:
    """The program of a run that goes on, where it goes on with as many ranks."""
    if not run.plan_file.exists() or (known and known.exchange.carried):
        return None, None
    before = Plan.load(run.plan_file)
    exchange = before.exchange
    if not exchange.carried:
        return None, None
    if before.ranks != ranks:
        if told:
            _LOG.info(
                "collective: the program %s of the run was for %d ranks, and there are %d: without "
                "it; --collective finds another",
                exchange.collective,
                before.ranks,
                ranks,
            )
        return None, None
    if told:
        _LOG.info("collective: %s, as before", exchange.collective)
    return exchange.collective, exchange.carrier


def _message_bytes(exchange: ExchangePlan) -> int:
    """Bytes of the sums that programs carry one by one."""
    return exchange.initial_chunk_bytes if exchange.priority else exchange.initial_bucket_bytes


def collective_summary(name: str, carrying: AllReduceChoice, size: int) -> Iterator[str]:
    """What was chosen, how near to the bound, and what the next best takes."""
    chosen = carrying.chosen
    what = f"{chosen.name} ({text})" if (text := str(carrying.carrier or "")) else chosen.name
    if carrying.collective not in ALL_REDUCE_KINDS:
        what = f"{what}, which is the exchange's own {carrying.collective}"
    yield (
        f"collective {name}: {what}: {format_bytes(size)} in {format_seconds(chosen.seconds)} "
        f"predicted, {chosen.share:.0%} of the bound"
    )
    for other in carrying.others[:1]:
        yield (
            f"collective {name}: next best: {other.name}, {format_seconds(other.seconds)} "
            f"({other.seconds / chosen.seconds - 1:+.0%})"
        )
