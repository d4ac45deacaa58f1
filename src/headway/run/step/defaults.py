"""The world and the plan of a run, where the user did not give them.

The world is the process group that the program has made, else the one that the launcher's variables
describe; the plan is the one given, one in a file, or data parallelism over all ranks.
"""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from headway.errors import PlanError, UsageError
from headway.plans import Plan, data_parallel, pipelined
from headway.run.distributed.launch_env import LaunchEnv
from headway.run.distributed.world import World
from headway.run.recipe.batch_units import resolve_batch
from headway.run.recipe.recipe import Recipe


def find_world() -> World:
    """The process group that the program has made, else what the launcher prepared."""
    if dist.is_available() and dist.is_initialized():
        return World.adopt()
    return World.join(LaunchEnv.here(), device="auto")


def resolve_plan(plan: Plan | str | Path | None, batch: int | None, ranks: int) -> Plan:
    """The plan given, as an object or a file, or data parallelism for a batch.

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
        return data_parallel(batch, processes=ranks)
    found = plan if isinstance(plan, Plan) else Plan.load(Path(str(plan)))
    found.check()
    if found.ranks != ranks:
        raise PlanError(
            "this plan is for another number of processes",
            problems=[f"the plan has {found.ranks} ranks; {ranks} processes run"],
            fix=f"Start {found.ranks} processes, or make a plan for {ranks}.",
        )
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
        )
    plan = given if isinstance(given, Plan) else Plan.load(given)
    if plan.batch.samples != samples:
        raise PlanError(
            "the plan is for another recipe",
            where=str(given) if isinstance(given, Path) else "",
            problems=[f"batch: {plan.batch.samples} in the plan, {samples} in the recipe"],
            fix="Change batch.samples of the plan, or the batch of the recipe.",
        )
    return plan
