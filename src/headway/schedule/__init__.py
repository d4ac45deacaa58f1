"""Pipeline schedules as tables of actions: generators, check, timing, lowering, CSV."""

from headway.schedule.action import Action, Kind
from headway.schedule.costs import StageCosts
from headway.schedule.pipeline import Pipe, PipelineSchedule

__all__ = ["Action", "Kind", "Pipe", "PipelineSchedule", "StageCosts"]
