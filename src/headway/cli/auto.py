"""`headway train --plan auto`: search for the fastest plan on this machine, and say what was found.

The cluster is given, or measured now with as many processes as will train. The plan, with what is
predicted of it, and the measured cluster are kept in the run directory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from headway.cli.asked import with_asked
from headway.cli.console import note, warn
from headway.cluster import Cluster, find_cluster
from headway.cluster.fingerprint import differences, fingerprint
from headway.errors import PlanError, UsageError
from headway.plan import Exchange, Plan
from headway.run.directory import RunDirectory
from headway.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from headway.cluster.readings import Readings
    from headway.launch.emulation import Emulated
    from headway.launch.paced import Paced
    from headway.planner.automatic import Decision, Limits
    from headway.planner.candidate import Point
    from headway.planner.operators import Workload
    from headway.planner.search import Question
    from headway.run.recipe import Recipe
    from headway.run.world import World

AUTO = Path("auto")
"""As the value of --plan."""
MEASURE = "measure"
"""As the value of --cluster."""
MEASURED = "cluster.toml"
"""In the run directory."""


@dataclass(frozen=True, kw_only=True)
class Automatic:
    """A plan that is to be found.

    Attributes:
        recipe: As for `headway train`.
        overrides: Likewise.
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
        from headway.cli.cluster import usual_ranks

        return usual_ranks(processes, self.device)

    def find(
        self, run: RunDirectory, ranks: int, emulated: Emulated | Paced | None, *, resume: bool
    ) -> Path | None:
        """The plan's file, in the run directory; None: data parallelism, as no plan is found.

        Args:
            run: Where plan and cluster are kept.
            ranks: Of the job.
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

            def measure() -> list[Readings]:
                from headway.cli.cluster import launch_measuring

                return launch_measuring(ranks, self.device, emulated)

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
        from headway.run.first import found_by_first
        from headway.run.measuring import measure_in

        run = RunDirectory(directory)
        again = resume or world.place.attempt > 0
        asked: list[_Asked] = []

        def first(find: Callable[[], Plan | None]) -> Plan | None:
            if world.ranks == 1:
                return find()
            return found_by_first(world.rank, find, world.explained("the search for a plan"))

        def known() -> Plan | None:
            if again and run.plan_file.exists():
                return Plan.load(self._known(run))
            asked.append(self._asked())  # what is wrong with the recipe shows before the measuring
            return None

        try:
            plan = first(known)
            if plan is None:
                readings: list[Readings] = []
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

    def _asked(self) -> _Asked:
        from headway.cli.optimizer_cost import optimiser_of
        from headway.planner.operators import Workload
        from headway.run.model_graph import annotated_graph_of
        from headway.run.recipe_file import load_recipe

        recipe = load_recipe(self.recipe, self.overrides)
        limits = limits_of(recipe)
        graph, samples, batch, said = annotated_graph_of(self.recipe, self.overrides)
        work = Workload(
            graph=graph, samples=samples, optimiser=optimiser_of(recipe), reads=not recipe.workers
        )
        return _Asked(recipe, limits, work, batch, said.forced_choices().force)

    def _decide(
        self, asked: _Asked, run: RunDirectory, ranks: int, measure: Callable[[], list[Readings]]
    ) -> Plan:
        """Search, say what was found, and keep it."""
        from headway.cli.optimizer_cost import with_optimizer
        from headway.cli.plan_question import precision_in
        from headway.cost.presets import machine_of
        from headway.planner.search import Question

        recipe = asked.recipe
        run.path.mkdir(parents=True, exist_ok=True)
        cluster = self._cluster(run, ranks, measure)
        question = Question(
            work=asked.work,
            machine=with_optimizer(machine_of(cluster), cluster, recipe),
            devices=(ranks,),
            batch=asked.batch,
            force=asked.force,
            precision=precision_in(recipe.precision),
        )
        decision = _decided(question, asked, cluster)
        for sentence in sentences(decision):
            note(sentence)
        plan = replace(
            decision.plan,
            memory=replace(decision.plan.memory, precision=recipe.precision),
            exchange=recipe.exchange or decision.plan.exchange,
        )
        if not self.overrides:  # they are part of what was asked, and no word of Asked
            known = str(run.path / MEASURED) if self.cluster == MEASURE else self.cluster
            plan = with_asked(plan, self.recipe, known, None, run.plan_file)
        plan.save(run.plan_file)
        return plan

    def _cluster(
        self, run: RunDirectory, ranks: int, measure: Callable[[], list[Readings]]
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
        unlike = differences(cluster.measured, self._here(ranks))
        if found := "; ".join(unlike):
            warn(
                f"{self.cluster} was not measured on what runs here ({found}): its predictions "
                "may be wrong; leave --cluster out to measure"
            )
        return cluster

    def _measured(self, run: RunDirectory, readings: list[Readings]) -> Cluster:
        """Kept in the run directory."""
        from headway.cli.cluster import write_measured

        path = run.path / MEASURED
        warning = write_measured(path, readings)
        if warning:
            warn(warning)
        note(f"plan auto: measured {len(readings)} processes on this machine, kept in {path}")
        return find_cluster(str(path))

    def _here(self, ranks: int) -> dict[str, str]:
        from headway.capture.kernels import device_name
        from headway.launch.preflight import threads_for

        device = device_name(self.device)
        return fingerprint(device=device, ranks=ranks, threads=threads_for(ranks))


@dataclass(frozen=True)
class _Asked:
    """What a recipe asks of the search; the machine comes later."""

    recipe: Recipe
    limits: Limits
    work: Workload
    batch: int
    force: tuple[tuple[str, str], ...]


def _decided(question: Question, asked: _Asked, cluster: Cluster) -> Decision:
    """The fastest plan; without a pipeline where the executor cannot cut the model so."""
    from headway.cli.plan_cut import why_not
    from headway.planner.automatic import decide
    from headway.planner.search import describe

    decision = decide(question, asked.limits, cluster)
    degrees = decision.point.degrees
    why = why_not(asked.recipe, decision.plan, degrees.microbatch)
    if not why:
        return decision
    note(f"plan auto: {describe(degrees)} would be faster, but cannot run: {why}")
    return decide(question, replace(asked.limits, pipeline=False), cluster)


def limits_of(recipe: Recipe) -> Limits:
    """What a recipe leaves open.

    Raises:
        UsageError: It decides itself how it is split.
    """
    from headway.planner.automatic import Limits

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
    plain = recipe.exchange is None or recipe.exchange == Exchange()
    return Limits(microbatch=recipe.microbatch, pipeline=plain)


def sentences(decision: Decision) -> Iterator[str]:
    """What was chosen, what it is expected to cost, and what the next best costs."""
    from headway.planner.search import describe

    point, question = decision.point, decision.outcome.question
    prediction = decision.plan.prediction
    assert prediction is not None
    shares = ", ".join(f"{n} {s / point.seconds:.0%}" for n, s in prediction.parts.items())
    yield (
        f"plan auto: {describe(point.degrees)}{_again(point)}: {format_seconds(point.seconds)} a "
        f"step predicted ({shares}), {format_bytes(point.bytes)} of "
        f"{format_bytes(question.cap)} per device; the fastest of "
        f"{decision.outcome.considered} combinations that run today"
    )
    if not decision.others:
        yield "plan auto: nothing else fits these processes"
        return
    other = decision.others[0]
    yield (
        f"plan auto: next best: {describe(other.degrees)}{_again(other)}, "
        f"{format_seconds(other.seconds)} ({other.seconds / point.seconds - 1:+.0%}): "
        f"{_why(decision, other)}"
    )


def _why(decision: Decision, other: Point) -> str:
    """The part of a step by which another plan is slower most."""
    from headway.planner.binding import parts

    prediction = decision.plan.prediction
    assert prediction is not None
    more = {
        part.name: part.seconds - prediction.parts.get(part.name, 0.0)
        for part in parts(decision.outcome.question, other)
    }
    name = max(more, key=more.__getitem__)
    return f"{format_seconds(max(more[name], 0.0))} more {name}"


def _again(point: Point) -> str:
    number = sum(stage.recompute for stage in point.stages)
    return f", recomputing in {number} stage{'s' * (number > 1)}" if number else ""
