"""Pipelines at work: the user's model cut into stages, and the executor of every schedule."""

from headway.parallel.agreement import run_stages
from headway.parallel.by_hand import cut_by_hand
from headway.parallel.cut import cut, list_units
from headway.parallel.measure import StageCost, measure, weigh_units
from headway.parallel.pipeline import Pipeline
from headway.parallel.row import Calls, Sync, Team
from headway.parallel.stage_sums import StageSums
from headway.parallel.stages import Entry, Exit, Stage, Stages
from headway.parallel.standin import ModelCall, record_call
from headway.parallel.streams import with_streams
from headway.parallel.units import even_parts

__all__ = [
    "Calls",
    "Entry",
    "Exit",
    "ModelCall",
    "Pipeline",
    "Stage",
    "StageCost",
    "StageSums",
    "Stages",
    "Sync",
    "Team",
    "cut",
    "cut_by_hand",
    "even_parts",
    "list_units",
    "measure",
    "record_call",
    "run_stages",
    "weigh_units",
    "with_streams",
]
