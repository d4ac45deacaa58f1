"""The critical path of a timed table: the chain of actions that decides the makespan.

Invariant: along the path every action starts the moment its predecessor ends (or, over the network,
arrives). Of paths of equal length the one with most messages is taken, because it is the first to
grow when messages take time: this gives the counts C_f and C_b of Chimera's performance model
(SC'21, section 3.4).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headway.schedule.action import Action
from headway.schedule.timing import Run, Timer
from headway.schedule.wiring import Sync, Wiring

_MOMENT = 1e-9


@dataclass(slots=True)
class _Chains:
    """For each event: the most messages on a longest path to it, and the event before it.

    A message that queued for its link was held up by the message before it on that link.
    """

    wiring: Wiring
    run: Run
    best: dict[int, tuple[int, int]] = field(default_factory=dict)
    last_of_rank: dict[int, int] = field(default_factory=dict)
    last_of_link: dict[int, int] = field(default_factory=dict)
    last_of_lane: dict[int, int] = field(default_factory=dict)
    syncs: dict[int, Sync] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.syncs = {sync.event: sync for sync in self.wiring.syncs}

    def add_cell(self, cell: int) -> None:
        start, rank = self.run.starts[cell], self.wiring.ranks[cell]
        before = [*self.wiring.needs[cell]]
        if rank in self.last_of_rank:
            before.append(self.last_of_rank[rank])
        self.best[cell] = self._best_of(before, start, rank)
        self.last_of_rank[rank] = cell
        for message in self.wiring.sends[cell]:
            left = self.run.at[message.event] - message.latency
            messages, origin = self.best[cell][0], cell
            queued = self.last_of_link.get(message.link)
            if queued is not None and left - message.wire > self._late(self.run.at[cell]):
                messages, origin = self.best[queued][0], queued
            self.best[message.event] = (messages, origin)
            self.last_of_link[message.link] = message.event

    def add_sync(self, event: int) -> None:
        sync = self.syncs[event]
        lanes = [self.last_of_lane[rank] for rank in sync.ranks if rank in self.last_of_lane]
        start = self.run.sync_starts[event]
        self.best[event] = self._best_of([*sync.cells, *lanes], start, -1)
        for rank in sync.ranks:
            self.last_of_lane[rank] = event

    def _best_of(self, before: list[int], start: float, rank: int) -> tuple[int, int]:
        """Of the events that end when something starts on a rank."""
        found = (0, -1)
        for event in before:
            if self._late(self.run.at[event]) >= start:
                crossed = rank >= 0 and self._rank(event) != rank
                found = max(found, (self.best[event][0] + crossed, event))
        return found

    def _late(self, time: float) -> float:
        return time + _MOMENT * max(1.0, time)

    def _rank(self, event: int) -> int:
        """Of a cell; -1 for what arrives from elsewhere."""
        return self.wiring.ranks[event] if event < len(self.wiring.ranks) else -1


def critical_path(timer: Timer, run: Run) -> tuple[tuple[int, Action], ...]:
    """The actions, with their ranks, that decide the makespan, from first to last.

    Args:
        timer: Of the table.
        run: One of its runs, which was not stuck.
    """
    chains = _Chains(timer.wiring, run)
    cells = len(timer.wiring.actions)
    for event in run.done:
        if event < cells:
            chains.add_cell(event)
        else:
            chains.add_sync(event)
    if not chains.best:
        return ()
    end = max(run.at)
    last = [
        (*chains.best[event], event) for event in run.done if chains._late(run.at[event]) >= end
    ]
    path, event = [], max(last)[2]
    while event >= 0:
        if event < cells:
            path.append((timer.wiring.ranks[event], timer.wiring.actions[event]))
        event = chains.best[event][1]
    return tuple(reversed(path))
