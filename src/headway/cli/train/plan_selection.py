"""`headway train --plan auto` and `--collective`: decide before workers start.

`AutoPlanSearch` searches for the fastest plan on a given cluster, or on this machine as measured
now with as many processes as will train; plan and measured cluster are kept in the run directory.
`CollectiveOption` chooses the all-reduce algorithm for gradients from a description of the network.
A resumed run keeps the plan and the algorithm that it has. The module itself imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from headway.cli.plan.plan_file import record_provenance
from headway.cli.terminal.console import note, warn
from headway.cluster import Cluster, find_cluster
from headway.cluster.measurement import fingerprint, fingerprint_differences
from headway.collective.all_reduce.algorithm import ALL_REDUCE_KINDS, AllReduceOptions
from headway.errors import PlanError, UsageError
from headway.plan import ExchangePlan, Plan, with_collective
from headway.plan.exchange import AllReduceName
from headway.run.training.run_directory import RunDirectory
from headway.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from headway.cluster.measurement import RankReadings
    from headway.launch.emulation import EmulatedCluster, PacedCluster
    from headway.planner.collective_algorithm import AllReduceChoice
    from headway.planner.estimate.operators import PlanningWorkload
    from headway.planner.export.auto import AutoPlan, RecipeLimits
    from headway.planner.search.plan_point import Point
    from headway.planner.search.request import PlanRequest
    from headway.run.distributed.world import World
    from headway.run.recipe.recipe import Recipe


AUTO = Path("auto")
"""As the value of --plan."""
MEASURE = "measure"
"""As the value of --cluster."""
MEASURED_CLUSTER_FILE = "cluster.toml"
"""In the run directory."""


@dataclass(frozen=True, kw_only=True)
class AutoPlanSearch:
    """A plan that is to be found.

    Attributes:
        recipe: As for `headway train`.
        cluster: A cluster.toml, a preset, or "measure".
        device: To compute on: "auto", "cpu" or "cuda".
        fallback: Whether data parallelism does where no plan is found.
    """

    recipe: str
    overrides: tuple[str, ...]
    cluster: str
    device: str
    fallback: bool

    def ranks(self, processes: int | None) -> int:
        """Processes: as many as are asked for, else the given cluster's, else the machine's."""
        if processes is None and self.cluster != MEASURE:
            return find_cluster(self.cluster).ranks
        from headway.cli.cluster import default_ranks

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
            run: Where plan and cluster are kept.
            emulated: Where to measure; None: on the machine itself.
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
                from headway.cli.cluster import measure_in_workers

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
            directory: Of the run; rank 0 keeps the plan there.
            resume: Take the plan that the run has already, as restarted workers do.

        Raises:
            HeadwayError: As `find`; on all ranks.
        """
        from headway.run.distributed.process_groups import broadcast_from_rank0
        from headway.run.measure.cluster import measure_in

        run = RunDirectory(directory)
        again = resume or world.place.attempt > 0
        asked: list[_SearchInputs] = []

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
                plan = first(lambda: self._decide(asked[0], run, world.ranks, lambda: readings))
        except PlanError as error:
            self._fall_back(error, told=world.rank == 0)
            return None
        return plan

    def _known(self, run: RunDirectory) -> Path:
        note(f"plan auto: {run.plan_file}, as before")
        return run.plan_file

    def _fall_back(self, error: PlanError, *, told: bool = True) -> None:
        if not self.fallback:
            raise error
        if told:
            warn(f"plan auto: {error.what}; data parallelism instead")

    def _asked(self) -> _SearchInputs:
        from headway.cli.plan.optimizer_cost import optimizer_footprint
        from headway.planner.estimate.operators import PlanningWorkload
        from headway.run.measure.recipe_model import annotated_recipe_graph
        from headway.run.recipe.factory import load_recipe

        recipe = load_recipe(self.recipe, self.overrides)
        limits = search_limits(recipe)
        graph, samples, batch, said = annotated_recipe_graph(self.recipe, self.overrides)
        work = PlanningWorkload(
            graph=graph,
            samples=samples,
            optimiser=optimizer_footprint(recipe),
            reads=not recipe.workers,
        )
        return _SearchInputs(recipe, limits, work, batch, said.forced_choices().force)

    def _decide(
        self,
        asked: _SearchInputs,
        run: RunDirectory,
        ranks: int,
        measure: Callable[[], list[RankReadings]],
    ) -> Plan:
        """Search, say what was found, and keep it."""
        from headway.cli.plan.optimizer_cost import with_measured_optimizer
        from headway.cli.plan.question import search_precision
        from headway.cost.machine_presets import machine_of
        from headway.planner.search.request import PlanRequest

        recipe = asked.recipe
        run.path.mkdir(parents=True, exist_ok=True)
        cluster = self._cluster(run, ranks, measure)
        question = PlanRequest(
            work=asked.work,
            machine=with_measured_optimizer(machine_of(cluster), cluster, recipe),
            devices=(ranks,),
            batch=asked.batch,
            force=asked.force,
            precision=search_precision(recipe.precision),
        )
        decision = _fastest_executable(question, asked, cluster)
        for sentence in auto_plan_summary(decision):
            note(sentence)
        plan = replace(
            decision.plan,
            memory=replace(decision.plan.memory, precision=recipe.precision),
            exchange=recipe.exchange or decision.plan.exchange,
        )
        if not self.overrides:  # they are part of what was asked, and no word of Asked
            known = (
                str(run.path / MEASURED_CLUSTER_FILE) if self.cluster == MEASURE else self.cluster
            )
            plan = record_provenance(plan, self.recipe, known, None, run.plan_file)
        plan.save(run.plan_file)
        return plan

    def _cluster(
        self, run: RunDirectory, ranks: int, measure: Callable[[], list[RankReadings]]
    ) -> Cluster:
        if self.cluster == MEASURE:
            return self._measured(run, measure())
        cluster = find_cluster(self.cluster)
        if cluster.ranks < ranks:
            raise UsageError(
                f"{self.cluster} has {cluster.ranks} ranks, the job {ranks}",
                fix="Start fewer processes, describe a larger cluster, or leave --cluster out to "
                "measure this machine.",
            )
        if not cluster.measured:
            warn(f"{self.cluster} was not measured: its predictions may be wrong here")
            return cluster
        unlike = fingerprint_differences(cluster.measured, self._here(ranks))
        if found := "; ".join(unlike):
            warn(
                f"{self.cluster} was not measured on what runs here ({found}): its predictions "
                "may be wrong; leave --cluster out to measure"
            )
        return cluster

    def _measured(self, run: RunDirectory, readings: list[RankReadings]) -> Cluster:
        """Kept in the run directory."""
        from headway.cli.cluster import write_measured

        path = run.path / MEASURED_CLUSTER_FILE
        warning = write_measured(path, readings)
        if warning:
            warn(warning)
        note(f"plan auto: measured {len(readings)} processes on this machine, kept in {path}")
        return find_cluster(str(path))

    def _here(self, ranks: int) -> dict[str, str]:
        from headway.capture.benchmark.kernels import device_name
        from headway.launch.preflight import threads_for

        device = device_name(self.device)
        return fingerprint(device=device, ranks=ranks, threads=threads_for(ranks))


@dataclass(frozen=True)
class _SearchInputs:
    """What a recipe asks of the search; the machine comes later."""

    recipe: Recipe
    limits: RecipeLimits
    work: PlanningWorkload
    batch: int
    force: tuple[tuple[str, str], ...]


def _fastest_executable(question: PlanRequest, asked: _SearchInputs, cluster: Cluster) -> AutoPlan:
    """The fastest plan; without a pipeline where the executor cannot cut the model so."""
    from headway.cli.plan.search import why_not_cuttable
    from headway.planner.estimate.degrees import describe_degrees
    from headway.planner.export.auto import find_auto_plan

    decision = find_auto_plan(question, asked.limits, cluster)
    degrees = decision.point.degrees
    why = why_not_cuttable(asked.recipe, decision.plan, degrees.microbatch)
    if not why:
        return decision
    note(f"plan auto: {describe_degrees(degrees)} would be faster, but cannot run: {why}")
    return find_auto_plan(question, replace(asked.limits, pipeline=False), cluster)


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
        f"{decision.outcome.considered} combinations that run today"
    )
    if not decision.others:
        yield "plan auto: nothing else fits these processes"
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
        name: Of a collective, or "auto"; None: nothing.
        cluster: A cluster.toml, or a preset; None: not given.
        emulate: The cluster.toml of an emulated job.
    """

    name: CollectiveName | None
    cluster: str | None
    emulate: Path | None

    def find(
        self, run: RunDirectory, known: Plan | None, ranks: int, *, resume: bool, told: bool
    ) -> tuple[AllReduceName | None, AllReduceOptions | None]:
        """What the exchange of the plan becomes; None: it stays what it is.

        Args:
            run: Holds the measured cluster, and the plan of a run that goes on.
            known: The plan, if it can be known here.

        Raises:
            UsageError: Nothing says what the network is, or it has another number of ranks.
            PlanError: No such program there; or it does not go with the plan.
        """
        if self.name is None:
            return _from_resumed_run(run, known, ranks, told=told) if resume else (None, None)
        if ranks == 1 or (self.name == "auto" and known and known.exchange_degree == 1):
            if told:
                note(f"collective {self.name}: this plan has no exchange that it could carry")
            return None, None
        collective, carrier = self._found(self.name, run, known, ranks, told=told)
        if known is not None:
            with_collective(known, collective, carrier)
        return collective, carrier

    def _found(
        self, name: CollectiveName, run: RunDirectory, known: Plan | None, ranks: int, *, told: bool
    ) -> tuple[AllReduceName, AllReduceOptions | None]:
        network = self._network(run)
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

        wires = parse_wires(network)
        if wires.ranks != ranks:
            raise UsageError(
                f"--collective {name}: {network} has {wires.ranks} ranks, the job {ranks}",
                fix="Start as many processes, or describe the nodes on which the job runs.",
            )
        size = _message_bytes(known.exchange if known else ExchangePlan())
        carrying = choose_all_reduce(name, wires, size)
        if told:
            for sentence in collective_summary(name, carrying, size):
                note(sentence)
        return carrying.collective, carrying.carrier

    def _network(self, run: RunDirectory) -> str | None:
        """What describes it; the measured cluster is that of --plan auto."""
        if self.cluster is not None or self.emulate is not None:
            return self.cluster or str(self.emulate)
        measured = run.path / "cluster.toml"
        return str(measured) if measured.is_file() else None


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
            note(
                f"collective: the program {exchange.collective} of the run was for {before.ranks} "
                f"ranks, and there are {ranks}: without it; --collective finds another"
            )
        return None, None
    if told:
        note(f"collective: {exchange.collective}, as before")
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
