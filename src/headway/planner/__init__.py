"""Finds plans: searches tables of pipelines under memory bounds, with proven lower bounds."""

from headway.planner.schedule_search import Budget, Found, search_schedule

__all__ = ["Budget", "Found", "search_schedule"]
