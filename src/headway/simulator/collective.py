"""A collective program simulated on a network: its time, and the load of every link.

Each rank performs its steps in order. A message begins when both its ends have begun, messages
of one pair of ranks follow each other on their connection, and connections share links max-min
fairly. The time is never below what the busiest link carries over its rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from headway.collective.program.program import (
    CollectiveProgram,
    Combine,
    Copy,
    Place,
    Recv,
    Send,
    Step,
    Wait,
)
from headway.collective.topology import NetworkTopology, Pair
from headway.simulator.engine import TaskProgram, TaskTimes, run_tasks

HOST_RATE = 5e9
"""Bytes per second with which a processor core adds or copies; of the result. Assumed."""


@dataclass(frozen=True, slots=True)
class HostCosts:
    """What a rank itself needs.

    Attributes:
        combine: Bytes per second of sums, of the result.
        copy: Bytes per second of copies.
        overhead: Seconds for each message that is begun.
    """

    combine: float = math.inf
    copy: float = math.inf
    overhead: float = 0.0


FREE_HOST = HostCosts()
"""Nothing but the wires counts."""


@dataclass(frozen=True)
class SimulatedCollective:
    """A program that was played.

    Attributes:
        messages: Number of the flow of each Send that crosses wires.
    """

    program: CollectiveProgram
    wires: NetworkTopology
    element_bytes: int
    seconds: float
    played: TaskTimes
    messages: Mapping[Place, int]

    def loads(self) -> tuple[float, ...]:
        """Bytes that each wire carries."""
        found = [0.0] * len(self.wires.wires)
        for pair, elements in self.program.sent().items():
            for wire in self.wires.way(*pair).wires:
                found[wire] += elements * self.element_bytes
        return tuple(found)

    def busiest(self) -> int | None:
        """The wire that is busy longest; None: nothing crosses one."""
        wires, loads = self.wires.wires, self.loads()
        best = max(range(len(wires)), key=lambda n: loads[n] / wires[n].rate, default=None)
        return best if best is not None and loads[best] else None


def simulate_collective(
    program: CollectiveProgram,
    wires: NetworkTopology,
    element_bytes: int = 4,
    *,
    host: HostCosts = FREE_HOST,
) -> SimulatedCollective:
    """Play a program.

    Args:
        program: One that passes `check_program`.

    Raises:
        PlanError: It sends between ranks that nothing joins, or waits for itself.
    """
    return _CollectiveTasks(program, wires, element_bytes, host).result()


class _CollectiveTasks:
    """Turns steps into tasks of the engine."""

    def __init__(
        self,
        program: CollectiveProgram,
        wires: NetworkTopology,
        element_bytes: int,
        host: HostCosts,
    ) -> None:
        self.source, self.wires, self.bytes, self.host = program, wires, element_bytes, host
        self.tasks = TaskProgram()
        # Wires come first: their numbers in the topology are those of their streams.
        for wire in wires.wires:
            self.tasks.stream(0, "wire", wire.name, rate=wire.rate)
        self.threads = [self.tasks.stream(r, "rank", str(r)) for r in range(program.ranks)]
        self.lanes: dict[Pair, int] = {}
        self.begun: dict[Place, int] = {}
        self.through: dict[Place, int] = {}
        self.messages: dict[Place, int] = {}

    def result(self) -> SimulatedCollective:
        partners = self.source.partners()
        waits = [
            (rank, step, task)
            for rank in range(self.source.ranks)
            for step, task in self._thread(rank)
        ]
        for rank, steps in enumerate(self.source.steps):
            for place, step in enumerate(steps):
                if isinstance(step, Send) and (rank, place) in partners:
                    self._message(rank, place, step, partners[rank, place])
        # Only now: a wait may name a message that the other end's steps have added.
        for rank, step, task in waits:
            self.tasks.need(task, *(self.through[rank, place] for place in step.steps))
        played = run_tasks(self.tasks)
        return SimulatedCollective(
            self.source, self.wires, self.bytes, played.makespan, played, self.messages
        )

    def _thread(self, rank: int) -> list[tuple[Wait, int]]:
        """The steps of a rank, one behind the other; returns its waits."""
        last: tuple[int, ...] = ()
        found = []
        for place, step in enumerate(self.source.steps[rank]):
            task = self.tasks.add(
                type(step).__name__.lower(), (self.threads[rank],), self._seconds(step), last
            )
            last = (task,)
            if isinstance(step, Recv | Send):
                self.begun[rank, place] = task
            elif isinstance(step, Wait):
                found.append((step, task))
        return found

    def _seconds(self, step: Step) -> float:
        if isinstance(step, Combine):
            return step.dst.size * self.bytes / self.host.combine
        if isinstance(step, Copy):
            return step.dst.size * self.bytes / self.host.copy
        return 0.0 if isinstance(step, Wait) else self.host.overhead

    def _message(self, rank: int, place: int, step: Send, other: Place) -> None:
        way = self.wires.way(rank, step.peer)
        before = (self.begun[rank, place], self.begun[other])
        amount = float(step.of.size * self.bytes)
        label = f"{rank} to {step.peer}"
        if way.wires:
            lane = self._lane((rank, step.peer))
            sent = self.tasks.flow("message", lane, way.wires, amount, before, label=label)
            self.messages[rank, place] = sent
        else:
            sent = self.tasks.add("message", (), 0.0, before, label=label)
        self.through[rank, place] = self.through[other] = sent
        # The sender is done when the last byte has left; only the receiver waits for the latency.
        if way.latency:
            self.through[other] = self.tasks.add(
                "latency", (), 0.0, (sent,), delay=way.latency, label=label
            )

    def _lane(self, pair: Pair) -> int:
        if pair not in self.lanes:
            self.lanes[pair] = self.tasks.stream(pair[0], "link", f"{pair[0]} to {pair[1]}")
        return self.lanes[pair]
