"""What a run begins with: its world, its plan, and checks of the user's objects.

The world is the process group that the program has made, else the one that the launcher's variables
describe; the plan is the one given, one in a file, or data parallelism over all ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from headway.errors import PlanError, RecipeError, UsageError
from headway.keywords import told_together, users_line
from headway.nn import DynamicTable
from headway.plans import Plan, data_parallel, pipelined
from headway.plans.plan import check_executable
from headway.plans.tables import TableSplit
from headway.run.distributed.launch_env import LaunchEnv
from headway.run.distributed.world import World
from headway.run.recipe.accepted_forms import WRAPPERS, as_loss, with_article, written_name
from headway.run.recipe.batch_units import resolve_batch
from headway.run.recipe.recipe import Loss, Recipe
from headway.run.recipe.schema import Precision
from headway.run.step.memory import is_storage_released
from headway.units import counted


def find_world() -> World:
    """The process group that the program has made, else what the launcher prepared."""
    if dist.is_available() and dist.is_initialized():
        return World.adopt()
    return World.join(LaunchEnv.here(), device="auto")


def resolve_plan(
    plan: Plan | str | Path | None,
    batch: int | None,
    ranks: int,
    precision: Precision | None = None,
) -> Plan:
    """The plan given, as an object or a file, or data parallelism for a batch.

    Args:
        precision: In place of the plan's; None: the plan's.

    Raises:
        PlanError: It cannot exist, or is for another number of processes.
        UsageError: Not exactly one of `plan` and `batch` is given.
    """
    if (plan is None) == (batch is None):
        raise UsageError(
            "an Executor needs exactly one of plan and batch",
            fix="Write Executor(model, optimizer, loss=loss, batch=64) or plan='plan.json'.",
        )
    if batch is not None:
        if isinstance(batch, bool) or not isinstance(batch, int):
            raise UsageError(
                f"Executor: batch={batch!r} is not a number of samples: write batch=64",
                where=users_line(),
            )
        return data_parallel(batch, processes=ranks, precision=precision or "float32")
    found = plan if isinstance(plan, Plan) else Plan.load(Path(str(plan)))
    found.check()
    if found.ranks != ranks:
        raise PlanError(
            "this plan is for another number of processes",
            problems=[
                f"the plan has {counted(found.ranks, 'rank')}; {counted(ranks, 'process')} run"
            ],
            fix=f"Start {counted(found.ranks, 'process')}, or make a plan for {ranks}.",
        )
    if precision is None:
        return found
    return replace(found, memory=replace(found.memory, precision=precision))


def with_growing_tables(plan: Plan, model: nn.Module) -> Plan:
    """The plan, saying of each table of the model that grows that its keys are dealt to ranks.

    Raises:
        PlanError: The plan cannot be carried out with such tables, or means one that there is not.
    """
    fixed = tuple(split for split in plan.split.tables if split.way != "grow")
    names = [n for n, module in model.named_modules() if isinstance(module, DynamicTable)]
    given = {split.tables for split in plan.split.tables if split.way == "grow"}
    if unknown := sorted(given - set(names)):
        raise PlanError(
            "the plan means tables that grow, and the model has other ones",
            problems=[f"split.tables: {name} is no headway.nn.DynamicTable" for name in unknown],
            fix='Leave out split.tables with way = "grow": the executor finds these tables itself.',
        )
    if not names:
        return plan
    grows = tuple(TableSplit(tables=name, way="grow") for name in names)
    found = replace(plan, split=replace(plan.split, tables=(*fixed, *grows)))
    try:
        found.check()
        check_executable(found)
    except PlanError as error:
        raise PlanError(
            f"this plan cannot train {', '.join(names)}: a table that grows is dealt to the ranks "
            "as split.tables is",
            problems=error.problems,
            fix="Use data parallelism, or ZeRO for the rest of the model.",
        ) from None
    return found


def recipe_plan(recipe: Recipe, given: Plan | Path | None, ranks: int) -> Plan:
    """A plan, the one in a file, or data parallelism over all ranks as the recipe wants it.

    Raises:
        PlanError: The plan is for another global batch than the recipe's.
    """
    samples = resolve_batch(recipe)
    if given is None:
        return pipelined(
            samples,
            processes=ranks,
            microbatch=recipe.microbatch,
            precision=recipe.precision,
            exchange=recipe.exchange,
            stages=recipe.stages,
            pipeline=recipe.pipeline,
            shares=recipe.shares,
            zero=recipe.zero,
            shards=recipe.shards,
            split=recipe.split,
            norm=recipe.norm,
            synchrony=recipe.synchrony,
        )
    plan = given if isinstance(given, Plan) else Plan.load(given)
    if plan.batch.samples != samples:
        raise PlanError(
            "the plan is for another recipe",
            where=str(given) if isinstance(given, Path) else "",
            problems=[f"batch: {plan.batch.samples} in the plan, {samples} in the recipe"],
            fix="Change batch.samples of the plan, or the batch of the recipe.",
        )
    if recipe.norm == "global" and plan.batch.norm == "local":
        # What the model computes is the recipe's; a plan says how.
        plan = replace(plan, batch=replace(plan.batch, norm="global"))
        plan.check()
    return plan


def check_components(
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler | None,
    ranks: int,
    tables: Sequence[TableSplit] = (),
) -> None:
    """Refuse what a step cannot drive.

    Args:
        tables: Those of the plan, whose gradients are not summed over the ranks.

    Raises:
        RecipeError: One is of another kind, the optimiser wants a closure, the scheduler wants a
            number, or the optimiser holds parameters of something other than the model.
        UsageError: The model is not whole.
    """
    problems = [*_component_problems(model, optimizer, scheduler)]
    if problems:
        raise told_together("Executor or Exchange", problems, RecipeError)
    for name, parameter in model.named_parameters():
        if is_storage_released(parameter):
            raise UsageError(
                f"the model is not whole: this rank has no memory for {name}",
                why="It was a stage of a pipeline; Executor.close makes it whole on rank 0 only.",
                fix="Build the model anew, and give it the weights of rank 0.",
            )
    kind = type(optimizer).__name__
    if wanted := _required(type(optimizer).step):
        raise RecipeError(
            f"the optimiser {kind} cannot be used: its step needs {wanted}",
            why="It computes the loss several times per step; a step here computes it once.",
            fix="Use an optimiser whose step() needs nothing, such as AdamW or SGD.",
        )
    sparse_only = isinstance(optimizer, torch.optim.SparseAdam) and ranks > 1
    if sparse_only and (other := _not_in_tables(model, optimizer, tables)):
        raise RecipeError(
            f"the optimiser {kind} cannot be used by {counted(ranks, 'process')} for {other}",
            why="It takes sparse gradients only; they are summed over the ranks as dense ones.",
            fix="Use another optimiser, or one process, or split its tables: "
            "LayerSplit(tables='row'). nn.Embedding(sparse=True) itself is fine.",
        )
    if scheduler is not None and (wanted := _required(type(scheduler).step)):
        raise RecipeError(
            f"the scheduler {type(scheduler).__name__} cannot be used: its step needs {wanted}",
            why="Schedulers are stepped after every optimiser step, by its number alone.",
            fix="Leave it out of the Executor, and call scheduler.step(run.validate(data)['loss']) "
            "yourself; a Recipe steps a ReduceLROnPlateau after each validation.",
        )
    known = set(model.parameters())
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in known:
                raise RecipeError(
                    f"group {number} of the optimiser {kind} holds a parameter of shape "
                    f"{list(parameter.shape)} that the model does not have",
                    why="Only gradients of the model's parameters are summed over the ranks.",
                    fix="Register it on the model (a loss with parameters: as a submodule).",
                )


def _not_in_tables(model: nn.Module, optimizer: Optimizer, splits: Sequence[TableSplit]) -> str:
    """A parameter of the optimiser that no split of tables means; "" if there is none."""
    modules = (m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    looked_up = {module.weight for module in modules}
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        split = parameter in looked_up and any(s.matches(name) for s in splits)
        if parameter in held and not split:
            return name
    return ""


def usable_loss(loss: Any) -> Loss:
    """A loss of (model, batch), from one or from a criterion.

    Raises:
        RecipeError: With what to write.
    """
    try:
        return cast("Loss", as_loss(loss))
    except ValueError as error:
        raise told_together("Executor", [f"loss: {error}"], RecipeError) from None


def _component_problems(model: Any, optimizer: Any, scheduler: Any) -> Iterator[str]:
    """What is of another kind, a sentence each."""
    if not isinstance(model, nn.Module):
        call = "model=Net()" if callable(model) else "model=torch.nn.Linear(4, 2)"
        yield f"model: {with_article(model)} cannot be used: write for example {call}"
    elif type(model).__name__ in WRAPPERS:
        yield f"model: {type(model).__name__} does what headway does itself: write model.module"
    if isinstance(optimizer, list | tuple):
        yield (
            f"optimizer: {with_article(optimizer)} of {len(optimizer)}: write one with a parameter "
            "group for each"
        )
    elif not isinstance(optimizer, Optimizer):
        name = written_name(optimizer) if isinstance(optimizer, type) else "torch.optim.AdamW"
        given = "the class itself" if isinstance(optimizer, type) else with_article(optimizer)
        yield f"optimizer: {given} cannot be used: write {name}(model.parameters(), lr=1e-3)"
    if scheduler is not None and not hasattr(type(scheduler), "step"):
        yield (
            f"scheduler: {with_article(scheduler)} cannot be used: write for example "
            "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)"
        )
    elif isinstance(scheduler, type):
        yield f"scheduler: the class itself: write {written_name(scheduler)}(optimizer, ...)"


def stepped_each_step(scheduler: LRScheduler | None) -> LRScheduler | None:
    """The scheduler where it follows the number of steps; None for one that follows a metric."""
    return None if isinstance(scheduler, ReduceLROnPlateau) else scheduler


def _required(method: Callable[..., Any]) -> str:
    """The arguments that a method cannot do without, as text."""
    _, *rest = inspect.signature(method).parameters.values()
    fixed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return ", ".join(
        p.name for p in rest if p.default is inspect.Parameter.empty and p.kind not in fixed
    )
