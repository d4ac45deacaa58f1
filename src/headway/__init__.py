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
    from headway.api.comparison import ComparisonResult as ComparisonResult
    from headway.api.comparison import compare as compare
    from headway.api.migration import ImportedConfiguration as ImportedConfiguration
    from headway.api.migration import import_configuration as import_configuration
    from headway.api.planning import PlanningResult as PlanningResult
    from headway.api.planning import plan as plan
    from headway.api.simulation import SimulationResult as SimulationResult
    from headway.api.simulation import SimulationScenario as SimulationScenario
    from headway.api.simulation import simulate as simulate
    from headway.api.study import StudyResult as StudyResult
    from headway.api.study import study as study
    from headway.api.training import TrainingObserver as TrainingObserver
    from headway.api.training import TrainingResult as TrainingResult
    from headway.api.training import train as train
    from headway.api.verification import EquivalenceResult as EquivalenceResult
    from headway.api.verification import VerificationResult as VerificationResult
    from headway.api.verification import verify as verify
    from headway.api.worker_simulation import WorkerFigures as WorkerFigures
    from headway.api.worker_simulation import WorkerScenario as WorkerScenario
    from headway.capture.annotations import replicate as replicate
    from headway.capture.annotations import set_default_strategy as set_default_strategy
    from headway.capture.annotations import split as split
    from headway.capture.annotations import stage as stage
    from headway.channel import Channel as Channel
    from headway.cluster import Cluster as Cluster
    from headway.comm.backend.process_group import register_backend as register_backend
    from headway.comm.exchange.ddp_hook import register_comm_hook as register_comm_hook
    from headway.data.source import MemmapSource as MemmapSource
    from headway.data.source import Source as Source
    from headway.errors import CheckpointDamaged as CheckpointDamaged
    from headway.errors import CheckpointError as CheckpointError
    from headway.errors import CheckpointMismatch as CheckpointMismatch
    from headway.errors import DataError as DataError
    from headway.errors import Diverged as Diverged
    from headway.errors import DocumentError as DocumentError
    from headway.errors import HeadwayError as HeadwayError
    from headway.errors import MissingExtra as MissingExtra
    from headway.errors import NotEqual as NotEqual
    from headway.errors import NothingFits as NothingFits
    from headway.errors import PeerLost as PeerLost
    from headway.errors import PlanError as PlanError
    from headway.errors import RecipeError as RecipeError
    from headway.errors import RunDirectoryTaken as RunDirectoryTaken
    from headway.errors import RunError as RunError
    from headway.errors import Stalled as Stalled
    from headway.errors import UsageError as UsageError
    from headway.errors import WorkerFailed as WorkerFailed
    from headway.plans import ExchangePlan as ExchangePlan
    from headway.plans import LayerSplit as LayerSplit
    from headway.plans import PipelinePlan as PipelinePlan
    from headway.plans import Plan as Plan
    from headway.plans import data_parallel as data_parallel
    from headway.plans.prediction import Prediction as Prediction
    from headway.run.exchange import Exchange as Exchange
    from headway.run.executor import Executor as Executor
    from headway.run.recipe.recipe import Recipe as Recipe
    from headway.run.recipe.recipe import criterion as criterion
    from headway.timeline import Timeline as Timeline


__version__ = "0.1.0"

_NAMES = {
    "headway.api.comparison": "ComparisonResult compare",
    "headway.api.migration": "ImportedConfiguration import_configuration",
    "headway.api.planning": "PlanningResult plan",
    "headway.api.simulation": "SimulationResult SimulationScenario simulate",
    "headway.api.study": "StudyResult study",
    "headway.api.training": "TrainingObserver TrainingResult train",
    "headway.api.verification": "EquivalenceResult VerificationResult verify",
    "headway.api.worker_simulation": "WorkerFigures WorkerScenario",
    "headway.capture.annotations": "replicate set_default_strategy split stage",
    "headway.channel": "Channel",
    "headway.cluster": "Cluster",
    "headway.comm.backend.process_group": "register_backend",
    "headway.comm.exchange.ddp_hook": "register_comm_hook",
    "headway.data.source": "MemmapSource Source",
    "headway.errors": (
        "CheckpointDamaged CheckpointError CheckpointMismatch DataError Diverged DocumentError "
        "HeadwayError MissingExtra NotEqual NothingFits PeerLost PlanError RecipeError "
        "RunDirectoryTaken RunError Stalled UsageError WorkerFailed"
    ),
    "headway.plans": "ExchangePlan LayerSplit PipelinePlan Plan data_parallel",
    "headway.plans.prediction": "Prediction",
    "headway.run.exchange": "Exchange",
    "headway.run.executor": "Executor",
    "headway.run.recipe.recipe": "Recipe criterion",
    "headway.timeline": "Timeline",
}
"""The public names by the module in which they are."""
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Load a public name from its home on first use (keeps `import headway` free of torch)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'headway' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names, also those that are not loaded yet."""
    return sorted({*__all__, "__version__"})
