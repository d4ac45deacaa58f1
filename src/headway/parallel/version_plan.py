"""Which weights each action of a row uses, known from the table before anything runs.

A version has to be kept only if an action behind the STEP that ends it still uses it; all others
run on the live parameters, so that tables with a flush pay nothing.
"""

from __future__ import annotations

from headway.parallel.versions import LIVE
from headway.schedule import Action, Kind, PipelineSchedule
from headway.schedule.action import COMPUTE, NONE

Key = tuple[str, int]


class VersionPlan:
    """Of one rank's row.

    Args:
        schedule: The table.
        rank: Whose row.
    """

    def __init__(self, schedule: PipelineSchedule, rank: int) -> None:
        newest: dict[Key, int] = {}
        self._used: dict[int, int] = {}
        self._ended: dict[int, int] = {}
        self._last: dict[tuple[Key, int], int] = {}
        self._end: dict[tuple[Key, int], int] = {}
        forward: dict[tuple[Key, int], int] = {}
        self._row = schedule.order[rank]
        for position, action in enumerate(self._row):
            key = action.pipe, action.stage
            now = newest.setdefault(key, 0)
            if action.kind == Kind.STEP:
                self._ended[position] = now
                self._end[key, now] = position
                newest[key] = now + 1
            elif action.kind in COMPUTE:
                if action.kind == Kind.FORWARD:
                    given = now if action.version == NONE else action.version
                    forward[key, action.microbatch] = given
                version = forward[key, action.microbatch]
                self._used[position] = version
                self._last[key, version] = position

    def version(self, position: int) -> int:
        """Of the weights that a compute action uses."""
        action, version = self._row[position], self._used[position]
        return version if self._is_kept(action, version) else LIVE

    def ended(self, position: int) -> int:
        """The version that a STEP ends; LIVE if nothing uses it any more."""
        action, version = self._row[position], self._ended[position]
        return version if self._is_kept(action, version) else LIVE

    def dropped(self, position: int) -> list[int]:
        """Versions of a compute action's stage that nothing uses behind it."""
        action, version = self._row[position], self._used[position]
        last = self._last[(action.pipe, action.stage), version] == position
        return [version] if last and self._is_kept(action, version) else []

    def _is_kept(self, action: Action, version: int) -> bool:
        key = (action.pipe, action.stage), version
        return self._last.get(key, NONE) > self._end.get(key, len(self._row))
