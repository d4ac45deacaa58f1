"""`headway train --plan auto`: search for the fastest plan on this machine, and say what was found.

The cluster is given, or measured now with as many processes as will train. The plan, with what is
predicted of it, and the measured cluster are kept in the run directory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from headway.cli.console import note, warn
from headway.cli.plan_question import precision_in
from headway.cluster import Cluster, find_cluster
from headway.cluster.fingerprint import differences, fingerprint
from headway.errors import PlanError, UsageError
from headway.plan import Exchange, MemoryPolicy, Plan
from headway.run.directory import RunDirectory
from headway.run.place import Place
from headway.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from headway.launch.emulation import Emulated
    from headway.launch.paced import Paced
    from headway.planner.automatic import Decision, Limits
    from headway.planner.candidate import Point
    from headway.run.recipe import Recipe

AUTO = Path("auto")
"""As the value of --plan."""
MEASURE = "measure"
"""As the value of --cluster."""


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

    def check(self, place: Place) -> None:
        """Refuse a world of another launcher, where each rank would search for itself.

        Raises:
            UsageError: With the two commands that do it.
        """
        if place.found_world:
            raise UsageError(
                f"--plan auto needs processes that headway itself starts; {place.launcher} has "
                f"started {place.ranks}",
                fix="Make the plan first: `headway cluster measure` in the same world, then "
                "`headway plan RECIPE --cluster cluster.toml --runnable --objective fastest --out "
                "plan.json`, and train with --plan plan.json.",
            )

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
            note(f"plan auto: {run.plan_file}, as before")
            return run.plan_file
        try:
            plan = self._decide(run, ranks, emulated)
        except PlanError as error:
            if not self.fallback:
                raise
            warn(f"plan auto: {error.what}; data parallelism instead")
            return None
        run.path.mkdir(parents=True, exist_ok=True)
        plan.save(run.plan_file)
        return run.plan_file

    def _decide(self, run: RunDirectory, ranks: int, emulated: Emulated | Paced | None) -> Plan:
        from headway.cli.optimizer_cost import optimiser_of, with_optimizer
        from headway.cost.presets import machine_of
        from headway.planner.automatic import decide
        from headway.planner.operators import Workload
        from headway.planner.search import Question
        from headway.run.model_graph import annotated_graph_of
        from headway.run.recipe_file import load_recipe

        recipe = load_recipe(self.recipe, self.overrides)
        limits = limits_of(recipe)
        graph, samples, batch, said = annotated_graph_of(self.recipe, self.overrides)
        cluster = self._cluster(run, ranks, emulated)
        question = Question(
            work=Workload(graph=graph, samples=samples, optimiser=optimiser_of(recipe)),
            machine=with_optimizer(machine_of(cluster), cluster, recipe),
            devices=(ranks,),
            batch=batch,
            force=said.forced_choices().force,
            precision=precision_in(recipe.precision),
        )
        decision = decide(question, limits, cluster)
        for sentence in sentences(decision):
            note(sentence)
        return replace(
            decision.plan,
            memory=MemoryPolicy(precision=recipe.precision),
            exchange=recipe.exchange or decision.plan.exchange,
        )

    def _cluster(self, run: RunDirectory, ranks: int, emulated: Emulated | Paced | None) -> Cluster:
        if self.cluster == MEASURE:
            return self._measured(run, ranks, emulated)
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

    def _measured(
        self, run: RunDirectory, ranks: int, emulated: Emulated | Paced | None
    ) -> Cluster:
        """In some ten seconds; kept in the run directory."""
        from headway.cli.cluster import launch_measuring, write_measured

        run.path.mkdir(parents=True, exist_ok=True)
        path = run.path / "cluster.toml"
        warning = write_measured(path, launch_measuring(ranks, self.device, emulated))
        if warning:
            warn(warning)
        note(f"plan auto: measured {ranks} processes on this machine, kept in {path}")
        return find_cluster(str(path))

    def _here(self, ranks: int) -> dict[str, str]:
        from headway.capture.kernels import device_name
        from headway.launch.preflight import threads_for

        device = device_name(self.device)
        return fingerprint(device=device, ranks=ranks, threads=threads_for(ranks))


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
    return f", recomputing in {number} stages" if number else ""
