"""Flows over wires that share them max-min fairly: what TCP connections come near to.

No flow can get more without taking from one that has no more than it (Bertsekas and Gallager 1992,
section 6.5.2, progressive filling). Chosen over queues per wire because a message that waits for
one wire would then block all others on its way, which no network does. Invariant: no wire ever
carries more than its rate, and of one lane's flows one runs at a time, in the order of arrival.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class _Flow:
    lane: int
    wires: tuple[int, ...]
    left: float
    rate: float = 0.0
    since: float = 0.0
    version: int = 0


class Sharing:
    """All flows at some moment.

    Attributes:
        rates: Of each wire, per second.
        now: Of the last change.
        changed: Whether rates must be found anew before time goes on.
    """

    def __init__(self, rates: Mapping[int, float]) -> None:
        self.rates = rates
        self.now = 0.0
        self._flows: dict[int, _Flow] = {}
        self._on: dict[int, dict[int, None]] = {wire: {} for wire in rates}
        self._lanes: dict[int, deque[tuple[int, _Flow]]] = {}
        self._touched: dict[int, None] = {}

    @property
    def changed(self) -> bool:
        return bool(self._touched)

    def join(self, time: float, number: int, on: Sequence[int], amount: float) -> bool:
        """A flow becomes ready; whether it runs at once.

        Args:
            time: When.
            number: Its name.
            on: Its lane, then its wires.
            amount: What it carries.
        """
        self.now = time
        flow = _Flow(on[0], tuple(on[1:]), amount)
        waiting = self._lanes.setdefault(flow.lane, deque())
        waiting.append((number, flow))
        if len(waiting) == 1:
            self._start(number, flow)
        return len(waiting) == 1

    def ends(self, time: float, number: int, version: int) -> bool:
        """Whether this end of a flow, noted earlier, is still true."""
        flow = self._flows.get(number)
        if flow is None or flow.version != version:
            return False
        self.now = time
        return True

    def leave(self, number: int) -> int | None:
        """A flow ends; the next one of its lane, which begins."""
        flow = self._flows.pop(number)
        for wire in flow.wires:
            del self._on[wire][number]
            self._touched[wire] = None
        waiting = self._lanes[flow.lane]
        waiting.popleft()
        if not waiting:
            return None
        following, next_flow = waiting[0]
        self._start(following, next_flow)
        return following

    def solve(self) -> list[tuple[float, int, int]]:
        """Find the rates of all flows that a change reaches: (end, flow, version) of each."""
        flows = self._reached()
        self._touched.clear()
        found = []
        shares = self._filled(flows)
        for number in flows:
            flow = self._flows[number]
            flow.left = max(0.0, flow.left - flow.rate * (self.now - flow.since))
            flow.since, flow.rate = self.now, shares[number]
            flow.version += 1
            found.append((self.now + flow.left / flow.rate, number, flow.version))
        return found

    def _start(self, number: int, flow: _Flow) -> None:
        flow.since = self.now
        self._flows[number] = flow
        for wire in flow.wires:
            self._on[wire][number] = None
            self._touched[wire] = None

    def _reached(self) -> list[int]:
        """Flows on wires that changed, on wires of those, and so on."""
        wires, seen = list(self._touched), dict.fromkeys(self._touched)
        flows: dict[int, None] = {}
        while wires:
            for number in self._on[wires.pop()]:
                if number in flows:
                    continue
                flows[number] = None
                for wire in self._flows[number].wires:
                    if wire not in seen:
                        seen[wire] = None
                        wires.append(wire)
        return sorted(flows)

    def _filled(self, flows: Sequence[int]) -> dict[int, float]:
        """Progressive filling: the wire with the least for each of its flows fixes them."""
        shares: dict[int, float] = {}
        room = {wire: self.rates[wire] for number in flows for wire in self._flows[number].wires}
        count = {wire: len(self._on[wire]) for wire in room}
        while len(shares) < len(flows):
            tightest = min(count, key=lambda wire: room[wire] / count[wire])
            share = max(room[tightest] / count[tightest], 1e-12 * self.rates[tightest])
            for number in self._on[tightest]:
                if number in shares:
                    continue
                shares[number] = share
                for wire in self._flows[number].wires:
                    room[wire] -= share
                    count[wire] -= 1
                    if not count[wire]:
                        del count[wire]
            count.pop(tightest, None)
        return shares
