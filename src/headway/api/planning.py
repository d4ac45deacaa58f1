"""`headway.plan`: from a recipe and a cluster to the frontier of plans, and the chosen one.

Captures the model, searches, and makes the chosen point a `Plan` with its prediction. With
`runnable` the executor tries to cut the model at the chosen plan's stage boundaries; where it
cannot, the search is repeated without pipelines.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

from headway.api.inputs import (
    ClusterInput,
    RecipeInput,
    recipe_reference,
    record_provenance,
    resolve_cluster,
)
from headway.api.plan_request import (
    DeviceCounts,
    TrainingLength,
    build_question,
    device_prices,
    note_unknown_operators,
    parse_search_options,
    training_length,
)
from headway.api.table_planning import TablesOverRanks, find_tables
from headway.cluster import Cluster
from headway.cluster.presets import PRESETS, of_preset
from headway.cost.machines import machine_of
from headway.errors import NothingFits, PlanError, RecipeError, UsageError
from headway.keywords import checks_keywords
from headway.planner.estimate.degrees import describe_degrees
from headway.planner.explain.alternatives import fewer_device_counts
from headway.planner.explain.infeasible import infeasible_error
from headway.planner.export.auto import RecipeLimits
from headway.planner.export.prediction import with_prediction
from headway.planner.guidelines.inexact import InexactPlan, inexact_plans
from headway.planner.search.branch_and_bound import PlanSearch, SearchResult
from headway.planner.search.plan_conversion import missing_in_executor, to_plan
from headway.planner.search.plan_point import Point
from headway.planner.search.request import Objective
from headway.plans import Plan
from headway.plans.plan import unsupported_by_executor
from headway.plans.prediction import Prediction
from headway.units import Price

if TYPE_CHECKING:
    from headway.run.recipe.recipe import Recipe

TABLES = "tables"
"""What `save` calls the plan with tables over ranks."""
_LOG = logging.getLogger("headway")
FoundT = TypeVar("FoundT")


@dataclass(frozen=True, kw_only=True)
class PlanningResult:
    """What a search found.

    Attributes:
        recipe: As it was given; so are `cluster_input` and `nodes`.
        cluster: That the plans are for.
        outcome: The search's own answer: bound, gap, and the tables behind each point.
        currency: Of prices; "" where one is not known.
        length: How long the recipe trains, where prices are known.
        any_devices: Whether no numbers of devices were asked for.
        model: The recipe itself, whose model is cut on trial; None: not at hand.
        overridden: Whether `overrides` have changed it.
        inexact: Plans whose steps do not equal the serial run's, the fastest first, where they were
            asked for; behind them those that cannot be. None of them is ever `chosen`.
        tables: The plan in which a recommender's tables lie over ranks and tiers of memory; None:
            there is none.
        whole_fits: Whether any plan with whole tables fits; where none does, `outcome` is the
            search for the rest of the model.
    """

    recipe: RecipeInput
    cluster: Cluster
    cluster_input: ClusterInput
    nodes: int | None
    outcome: SearchResult
    currency: str
    length: TrainingLength
    capture_seconds: float
    search_seconds: float
    any_devices: bool = False
    model: Recipe | None = None
    overridden: bool = False
    inexact: tuple[InexactPlan, ...] = ()
    tables: TablesOverRanks | None = None
    whole_fits: bool = True

    @property
    def by_tables(self) -> bool:
        """Whether the chosen plan is the one with tables over ranks: no other fits, or none is as
        fast and speed is the objective."""
        if self.tables is None:
            return False
        fast = self.outcome.question.objective in ("fastest", "frontier")
        return not self.whole_fits or (fast and self.tables.seconds < self.chosen.seconds)

    @property
    def frontier(self) -> tuple[Point, ...]:
        """Plans that no other beats in step time (seconds), memory (bytes) and devices at once,
        fastest first; for other objectives than "frontier" those found during the search."""
        return self.outcome.points

    @property
    def chosen(self) -> Point:
        """The point of the frontier that meets the objective best."""
        return self.outcome.best

    @cached_property
    def plan(self) -> Plan:
        """The chosen plan, with its prediction.

        Raises:
            PlanError: It recomputes without a pipeline, which no plan can say yet.
        """
        if self.by_tables and self.tables is not None:
            return self.tables.plan
        return self.plan_of(self.chosen)

    @property
    def prediction(self) -> Prediction:
        """Of the chosen plan: seconds of a step and their parts, bytes of the fullest device."""
        assert self.plan.prediction is not None  # plan_of has put it there
        return self.plan.prediction

    @property
    def missing(self) -> str:
        """What the executor lacks for the chosen plan; "" where it can run it."""
        return "" if self.by_tables else missing_in_executor(self.outcome.search, self.chosen)

    def runs(self, point: Point) -> str:
        """Whether `train` runs a point: "yes", what stands against it, or "not known: " and what
        only the start of training tells.
        """
        if lacks := missing_in_executor(self.outcome.search, point):
            return lacks
        plan, degrees = to_plan(self.outcome, point), point.degrees
        if problems := list(unsupported_by_executor(plan)):
            return ", ".join(problems)
        if refusal := self.recipe_refusal(plan):
            return refusal
        unknown = []
        if degrees.tensor > 1:
            unknown.append("the executor's own split")
        if degrees.pipeline > 1 and (point != self.chosen or self.model is None):
            unknown.append("the cut")
        elif degrees.pipeline > 1 and self._cut_refusal:
            return self._cut_refusal
        elif degrees.pipeline == 1 and degrees.zero:
            unknown.append("state in parts")
        return f"not known: {', '.join(unknown)}" if unknown else "yes"

    def recipe_refusal(self, plan: Plan) -> str:
        """Why the recipe cannot train with a legal plan; "" where nothing is known against it."""
        if refusal := self._component_refusal(plan.ranks):
            return refusal
        if self.model is not None and self.model.norm == "global":
            normed = replace(plan, batch=replace(plan.batch, norm="global"))
            return _refusal(normed.check)
        return ""

    @cached_property
    def _cut_refusal(self) -> str:
        """Why the chosen plan's stages cannot be cut; "" where they can."""
        assert self.model is not None
        return _why_not_cuttable(self.model, self.outcome)

    def _component_refusal(self, ranks: int) -> str:
        """Why a step cannot drive the recipe's optimiser or scheduler on so many ranks; "" where it
        can."""
        if self.model is None:
            return ""
        from headway.run.measure.recipe_model import check_recipe_components  # imports torch

        return _refusal(check_recipe_components, self.model, ranks)

    def plan_of(self, point: Point) -> Plan:
        """The plan of any point of the frontier, with its prediction.

        Raises:
            PlanError: It recomputes without a pipeline, which no plan can say yet.
        """
        found = to_plan(self.outcome, point)
        return with_prediction(found, self.outcome.question, point, self.cluster)

    def save(self, file: str | Path, *, take: str | None = None) -> Plan:
        """Write the chosen plan as a plan.json, with recipe and cluster where they have a name.

        A plan that the executor cannot run is written with a warning: it can be priced and
        simulated all the same.

        Args:
            take: The name of one of the `inexact` plans, or "tables", in the place of the chosen
                one.

        Raises:
            PlanError: As `plan`.
            UsageError: There is no such plan.
        """
        out = Path(file)
        written = self.plan if take is None else self._taken(take)
        # Overrides are part of what was asked, and a plan's file has no field for them.
        recipe = self.model if self.overridden and self.model is not None else self.recipe
        plan = record_provenance(written, recipe, self.cluster_input, self.nodes, out)
        plan.save(out)
        if take is None and self.missing:
            # The file does not say it: which operators a tensor axis splits is not in the plan.
            warnings.warn(
                f"the executor cannot run {out} as it is planned: it lacks {self.missing}; "
                "--runnable looks only for plans that it can run",
                stacklevel=2,
            )
        return plan

    def _taken(self, name: str) -> Plan:
        plans = {one.name: one.plan for one in self.inexact if one.plan is not None}
        if self.tables is not None:
            plans[TABLES] = self.tables.plan
        if name == TABLES and self.tables is None:
            raise UsageError(
                "no tables were placed over ranks",
                where=f"--take {TABLES}",
                why="That is done on devices of one type, for a model with an nn.EmbeddingBag, or "
                "whose tables are at least half of its parameters.",
                fix="Say yourself where they lie: headway train RECIPE --set split.tables=row.",
            )
        if name not in plans:
            raise UsageError(
                f"there is no plan {name}",
                where="--take",
                fix=f"Take one of {', '.join(plans)}." if plans else "Ask for them: --inexact.",
            )
        return plans[name]


@checks_keywords
def plan(
    recipe: RecipeInput,
    cluster: ClusterInput,
    *,
    nodes: int | None = None,
    objective: Objective = "frontier",
    memory: str | int | None = None,
    devices: DeviceCounts | None = None,
    price: str | Price | None = None,
    force: Sequence[str] = (),
    schedules: str | None = None,
    runnable: bool = False,
    time_limit: str | float | None = None,
    overrides: Sequence[str] = (),
    inexact: bool = False,
) -> PlanningResult:
    """Find the plans that nothing beats in step time, memory and devices, and choose one.

    Args:
        recipe: A `Recipe`, "module:function", the path of a recipe.toml, or a bundled workload's
            name; its model is captured, not built in memory.
        cluster: A `Cluster`, the path of a cluster.toml, or a preset such as "dgx-a100"; its
            devices may be of several types.
        nodes: Of a preset; by default 1.
        objective: What the chosen plan is best in: "fastest" (also of "frontier"),
            "fewest-devices" or "cheapest"; where no price is known, device-hours.
        memory: Bytes of a device that may be used, or as in "80 GiB"; by default all of it.
        devices: 8, (6, 12), "8", "6,12" or "1..64" (powers of two, and both ends); by default the
            cluster's, or fewer where they meet the objective as well; of several types each whole
            or not at all.
        price: Of a device, as in "2.5 USD/h"; by default the cluster's.
        force: What modules must do: "blocks.*=split", "head=replicate", "head=split:o" (an axis of
            the operator), "blocks.8=stage" (a stage begins there).
        schedules: Of pipelines, as in "1f1b,gpipe,zb-h1"; "all" takes longer. By default 1f1b; with
            `runnable` and the objective "fastest" all that the executor runs.
        runnable: Look only for plans that the executor can run, without a tensor axis.
        time_limit: Of the search in seconds, or as in "10 s"; then the best so far is the answer.
        overrides: "key=value" changes to the recipe.
        inexact: Price plans as well whose steps do not equal the serial run's: local SGD, D-PSGD,
            asynchronous and bounded servers. They stand beside the others; the choice is the same.

    Returns:
        The frontier, the chosen plan, and its prediction.

    Raises:
        UsageError: Options that cannot be read, or no such preset.
        RecipeError: The recipe cannot be used.
        DocumentError: A file has problems; all are listed.
        PlanError: The model cannot be captured, or the request cannot be planned.
        NothingFits: No plan is within the memory; the error names the changes that would help.
    """
    options = parse_search_options(
        devices=devices,
        memory=memory,
        price=price,
        force=force,
        objective=objective,
        runnable=runnable,
        schedules=schedules,
        time_limit=time_limit,
    )
    found = resolve_cluster(cluster, nodes)
    from headway.api.recipe_workload import capture_workload  # imports torch

    begin = perf_counter()
    captured = capture_workload(recipe_reference(recipe), overrides)
    captured_at = perf_counter()
    note_unknown_operators(captured.work)
    said = captured.annotations
    options = replace(options, force=options.force + said.force, tensor=said.tensor)
    question = build_question(options, captured, found)

    def search(limits: RecipeLimits) -> SearchResult:
        try:
            outcome = PlanSearch(question, limits.allow).run()
            if not question.devices or options.counts is not None:
                return outcome
            # Nobody has asked for all devices: some of them may be faster or cheaper than all.
            counts = fewer_device_counts(outcome)
            if not counts:
                return outcome
            return PlanSearch(replace(question, devices=counts), limits.allow).run()
        except NothingFits:
            # Only a preset says how further nodes are joined: a file that describes one node
            # has no links between nodes, so that more devices can be offered, but not priced.
            wider = None
            if isinstance(cluster, str) and cluster in PRESETS:
                wider = machine_of(of_preset(cluster, nodes=2)).network
            raise infeasible_error(question, wider) from None

    tables = find_tables(captured, options, found)
    try:
        if runnable:
            outcome = search_cuttable(search, lambda one: one, RecipeLimits(), captured.recipe)
        else:
            outcome = search(RecipeLimits())  # no limits: an ordinary search
        fits = True
    except NothingFits:
        if isinstance(tables, NothingFits):
            raise tables from None
        if tables is None:
            raise
        outcome, fits = tables.outcome, False
    _warn_of_split_loss(captured.recipe, outcome, captured.batch)
    prices = device_prices(options, found)
    result = PlanningResult(
        recipe=recipe,
        cluster=found,
        cluster_input=cluster,
        nodes=nodes,
        outcome=outcome,
        currency=next((price.currency for price in prices.values()), ""),
        # Without a price nothing is told of the whole run, and the data need not be opened.
        length=training_length(captured.recipe) if prices else TrainingLength(),
        capture_seconds=captured_at - begin,
        search_seconds=perf_counter() - captured_at,
        any_devices=options.counts is None,
        model=captured.recipe,
        overridden=bool(overrides),
        tables=None if isinstance(tables, NothingFits) else tables,
        whole_fits=fits,
    )
    return replace(result, inexact=_priced_inexact(result)) if inexact else result


def _priced_inexact(result: PlanningResult) -> tuple[InexactPlan, ...]:
    """The inexact plans, with what the recipe has against them."""

    def judged(one: InexactPlan) -> InexactPlan:
        if one.plan is None or one.lacks:
            return one
        return replace(one, lacks=result.recipe_refusal(one.plan))

    return tuple(map(judged, inexact_plans(result.outcome.question, result.cluster)))


def _warn_of_split_loss(recipe: Recipe, outcome: SearchResult, batch: int) -> None:
    """Say where the chosen plan splits a batch whose loss does not add up; of small models only."""
    from headway.run.measure.recipe_model import (  # imports torch
        LOSS_SAMPLES,
        TRIAL_FLOPS,
        explain_recipe_loss,
    )

    work = outcome.question.work
    small = work.graph.flops.total * LOSS_SAMPLES / work.samples <= TRIAL_FLOPS
    if small and batch >= LOSS_SAMPLES and outcome.best.degrees.microbatch < batch:
        doubt = explain_recipe_loss(recipe)
        if doubt:
            warnings.warn(doubt, stacklevel=3)


def search_cuttable(
    search: Callable[[RecipeLimits], FoundT],
    outcome_of: Callable[[FoundT], SearchResult],
    limits: RecipeLimits,
    recipe: Recipe,
) -> FoundT:
    """The answer of a search; without pipelines where the executor cannot cut the model as the
    chosen plan says.

    The cut is tried on the answer alone: following a model's forward takes seconds, and nearly all
    models can be cut wherever the search proposes.

    Raises:
        PlanError: Without pipelines nothing fits.
    """
    found = search(limits)
    outcome = outcome_of(found)
    degrees = outcome.best.degrees
    if degrees.pipeline == 1:
        return found
    why = _why_not_cuttable(recipe, outcome)
    if not why:
        return found
    _LOG.info("%s would be chosen, but cannot run: %s", describe_degrees(degrees), why)
    try:
        return search(replace(limits, pipeline=False))
    except NothingFits:
        raise PlanError(
            "no plan that the executor can run fits",
            problems=[why, "without a pipeline nothing fits"],
            fix="Change the model so that its forward can be followed, or allow more memory.",
        ) from None


def _why_not_cuttable(recipe: Recipe, outcome: SearchResult) -> str:
    """Why the executor cannot cut a recipe's model as the chosen plan says; "" where it can."""
    from headway.run.measure.recipe_model import (  # imports torch
        TRIAL_FLOPS,
        check_stage_boundaries,
    )

    work, samples = outcome.question.work, outcome.best.degrees.microbatch
    small = work.graph.flops.total * samples / work.samples <= TRIAL_FLOPS
    at = to_plan(outcome, outcome.best).pipeline.cut
    return _refusal(check_stage_boundaries, recipe, at, samples, numbers=small)


def _refusal(check: Callable[..., None], *args: object, **named: object) -> str:
    """What a check says; "" where it passes."""
    try:
        check(*args, **named)
    except (PlanError, RecipeError) as error:
        return "; ".join((error.what, *getattr(error, "problems", ())))
    return ""
