"""`TrainJob` and `TrainingOutcome`: what a training run is asked to do, and how it ended.

Plain data that crosses process borders; imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from headway.collective.all_reduce.algorithm import AllReduceOptions
from headway.plans import Plan
from headway.plans.exchange import AllReduceName
from headway.run.distributed.launch_env import LaunchEnv

if TYPE_CHECKING:
    from headway.run.distributed.world import World
    from headway.run.recipe.recipe import Recipe
    from headway.run.recipe.sent_recipe import SentRecipe


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """What `train` is asked to do; the same on every rank, and safe to send to a process.

    Attributes:
        recipe: Path of a recipe.toml, "module:function", a bundled workload, or a `Recipe`.
        directory: The run directory; all ranks must see it.
        plan: A plan or its file; None: data parallelism over all ranks.
        find: Called on every rank instead, in the joined world; returns the plan, the same on all
            ranks, or None.
        collective: Put into the plan's exchange, with `carrier`; None: the plan's own.
        replay: The directory of a run that is to be repeated: its last attempt.
        patience_seconds: Declare a rank lost after this long without a heartbeat.
        trace_every: Steps between detailed timelines; the first steps are always traced.
        before_step: Called on every rank before each step with the launch environment and the
            number of the step, from 1; `launch.faults` injects faults there.
        callbacks: Called after those of the recipe; safe to send to a process.
        validate_every: In place of the recipe's, where that has validation data.
        proving: For `headway verify --whole`: what is restored is saved again at once, and a
            checkpoint is written only while later steps change what it holds.
    """

    recipe: str | Recipe | SentRecipe
    directory: Path
    timeout_seconds: float
    patience_seconds: float
    trace_every: int
    overrides: tuple[str, ...] = ()
    plan: Plan | Path | None = None
    find: Callable[[World], Plan | None] | None = None
    collective: AllReduceName | None = None
    carrier: AllReduceOptions | None = None
    resume: bool = False
    replay: Path | None = None
    device: str = "auto"
    before_step: Callable[[LaunchEnv, int], None] | None = None
    callbacks: tuple[object, ...] = ()
    validate_every: int | None = None
    proving: bool = False


@dataclass(frozen=True, kw_only=True)
class TrainingOutcome:
    """How a rank's training ended; the same on every rank.

    Attributes:
        steps: Optimiser steps done since the beginning of the run.
        validation: Of the last validation; None where the recipe has no validation data.
        metrics: Of the last validation, by name.
        best_step: Of the best validation, where the recipe monitors it.
        stopped_by: The signal that stopped the run, or None when it is complete.
        lost: What has died while the others went on; a sentence each.
    """

    steps: int
    loss: float
    validation: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    best_step: int | None = None
    stopped_by: str | None
    lost: tuple[str, ...] = ()
