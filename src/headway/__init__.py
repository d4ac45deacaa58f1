"""headway: plan, check and run distributed PyTorch training; prove it equal to the serial run.

    found = headway.plan(recipe, "dgx-a100")      # the frontier of plans, and the chosen one
    run = headway.train(recipe, plan=found.plan)  # a run directory and the final losses
    headway.verify(recipe, plan=found.plan).check()
    headway.simulate(found.plan, recipe=recipe, cluster="dgx-a100", fault=["rank 3 slow 2x"])

The public names are listed in `__all__`. Importing `headway` does not import torch: names are
loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.api.planning import PlanningResult, plan
    from headway.api.simulation import SimulationResult, SimulationScenario, simulate
    from headway.api.training import TrainingObserver, TrainingResult, train
    from headway.api.verification import EquivalenceResult, VerificationResult, verify
    from headway.capture.annotations import replicate, set_default_strategy, split, stage
    from headway.channel import Channel
    from headway.cluster import Cluster
    from headway.comm.backend.process_group import register_backend
    from headway.comm.exchange.ddp_hook import register_comm_hook
    from headway.data.source import MemmapSource, Source
    from headway.errors import (
        CheckpointDamaged,
        CheckpointError,
        CheckpointMismatch,
        DataError,
        Diverged,
        DocumentError,
        HeadwayError,
        MissingExtra,
        NotEqual,
        NothingFits,
        PeerLost,
        PlanError,
        RecipeError,
        RunDirectoryTaken,
        RunError,
        Stalled,
        UsageError,
        WorkerFailed,
    )
    from headway.plans import ExchangePlan, LayerSplit, PipelinePlan, Plan, data_parallel
    from headway.plans.prediction import Prediction
    from headway.run.exchange import Exchange
    from headway.run.executor import Executor
    from headway.run.recipe.recipe import Recipe, criterion
    from headway.timeline import Timeline


__version__ = "0.1.0"

_HOMES = {
    "Channel": "headway.channel",
    "CheckpointDamaged": "headway.errors",
    "CheckpointError": "headway.errors",
    "CheckpointMismatch": "headway.errors",
    "Cluster": "headway.cluster",
    "DataError": "headway.errors",
    "Diverged": "headway.errors",
    "DocumentError": "headway.errors",
    "EquivalenceResult": "headway.api.verification",
    "Exchange": "headway.run.exchange",
    "ExchangePlan": "headway.plans",
    "Executor": "headway.run.executor",
    "HeadwayError": "headway.errors",
    "LayerSplit": "headway.plans",
    "MemmapSource": "headway.data.source",
    "MissingExtra": "headway.errors",
    "NotEqual": "headway.errors",
    "NothingFits": "headway.errors",
    "PeerLost": "headway.errors",
    "PipelinePlan": "headway.plans",
    "Plan": "headway.plans",
    "PlanError": "headway.errors",
    "PlanningResult": "headway.api.planning",
    "Prediction": "headway.plans.prediction",
    "Recipe": "headway.run.recipe.recipe",
    "RecipeError": "headway.errors",
    "RunDirectoryTaken": "headway.errors",
    "RunError": "headway.errors",
    "SimulationResult": "headway.api.simulation",
    "SimulationScenario": "headway.api.simulation",
    "Source": "headway.data.source",
    "Stalled": "headway.errors",
    "Timeline": "headway.timeline",
    "TrainingObserver": "headway.api.training",
    "TrainingResult": "headway.api.training",
    "UsageError": "headway.errors",
    "VerificationResult": "headway.api.verification",
    "WorkerFailed": "headway.errors",
    "criterion": "headway.run.recipe.recipe",
    "data_parallel": "headway.plans",
    "plan": "headway.api.planning",
    "register_backend": "headway.comm.backend.process_group",
    "register_comm_hook": "headway.comm.exchange.ddp_hook",
    "replicate": "headway.capture.annotations",
    "set_default_strategy": "headway.capture.annotations",
    "simulate": "headway.api.simulation",
    "split": "headway.capture.annotations",
    "stage": "headway.capture.annotations",
    "train": "headway.api.training",
    "verify": "headway.api.verification",
}

__all__ = [
    "Channel",
    "CheckpointDamaged",
    "CheckpointError",
    "CheckpointMismatch",
    "Cluster",
    "DataError",
    "Diverged",
    "DocumentError",
    "EquivalenceResult",
    "Exchange",
    "ExchangePlan",
    "Executor",
    "HeadwayError",
    "LayerSplit",
    "MemmapSource",
    "MissingExtra",
    "NotEqual",
    "NothingFits",
    "PeerLost",
    "PipelinePlan",
    "Plan",
    "PlanError",
    "PlanningResult",
    "Prediction",
    "Recipe",
    "RecipeError",
    "RunDirectoryTaken",
    "RunError",
    "SimulationResult",
    "SimulationScenario",
    "Source",
    "Stalled",
    "Timeline",
    "TrainingObserver",
    "TrainingResult",
    "UsageError",
    "VerificationResult",
    "WorkerFailed",
    "criterion",
    "data_parallel",
    "plan",
    "register_backend",
    "register_comm_hook",
    "replicate",
    "set_default_strategy",
    "simulate",
    "split",
    "stage",
    "train",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Load a public name from its home on first use (keeps `import headway` free of torch)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'headway' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names, also those that are not loaded yet."""
    return sorted({*__all__, "__version__"})
