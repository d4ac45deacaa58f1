"""When and how links are measured while training: who sends to whom, how much, how often.

Pairs of ranks send to each other in rounds, each rank with one partner, so that every link is alone
with its probe. Measuring may cost a small share of the time, or what has been lost because
exchanges take longer than they did. Invariant: what a `Watch` decides depends on numbers that all
ranks share.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.collective.packing.graph import LinkGraph

SHARE = 0.005
"""Of the time that measuring may take."""
BURST = 0.1
"""Of a message: what shaped links let pass at once, about 10 ms of their rate."""
_SECONDS = 0.1
"""Of a message, at the known rate: many latencies long, and longer than a rank is kept waiting for
its processor."""
_LEAST, _MOST = 64 * 1024, 16 * 2**20
_USUAL = 1.5
"""Longer exchanges than this, times what is usual, count as lost time."""
_PATIENCE = 16.0
_VOTE_SECONDS, _MOST_STEPS = 0.5, 1000
"""Between two moments at which ranks compare their clocks; a sum of three numbers."""

Pairs = tuple[tuple[int, int], ...]


def pairings(links: LinkGraph) -> tuple[Pairs, ...]:
    """Rounds of pairs (i < j) in which every two ranks that a link joins meet once: n - 1 rounds of
    n / 2 pairs, for odd n with one rank at rest (the circle method of tournaments)."""
    n = links.ranks + links.ranks % 2
    seats = [*range(n)]
    joined = {*links.links}
    rounds = []
    for _ in range(n - 1):
        facing = zip(seats[: n // 2], reversed(seats[n // 2 :]), strict=True)
        pairs = tuple(pair for a, b in facing if (pair := (min(a, b), max(a, b))) in joined)
        rounds += [pairs] * bool(pairs)
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return tuple(rounds)


def probe_bytes(rate: float) -> int:
    """Of the message by which a link of this rate, bytes per second, is measured."""
    return round(min(max(rate * _SECONDS, _LEAST), _MOST))


def probe_seconds(links: LinkGraph) -> float:
    """What all rounds take on links that are what they were."""
    return sum(
        max(
            probe_bytes(rate) / rate
            for i, j in pairs
            for rate in (links.rates[i][j], links.rates[j][i])
        )
        for pairs in pairings(links)
    )


@dataclass(slots=True)
class Watch:
    """Decides at votes whether to measure; every rank has one, and all are alike.

    Attributes:
        cost: Seconds of the last measurement; before the first one what is expected.
        patience: Grows with every measurement that changes nothing, up to 16; then it takes so many
            times longer, or so many times the lost time, to the next one.
        usual: Seconds of a step's exchange for which the training thread stands still.
        lost: Seconds beyond that, since the last measurement.
        since: Seconds since the last measurement.
    """

    cost: float
    patience: float = 1.0
    usual: float | None = None
    lost: float = 0.0
    since: float = 0.0

    def vote(self, steps: int, seconds: float, exposed: float) -> bool:
        """Whether to measure now.

        Args:
            steps: Since the last vote.
            seconds: For which they took, on the slowest rank.
            exposed: Of these the slowest rank stood still in the exchange.
        """
        level = exposed / steps
        if self.usual is None:
            self.usual = level
        self.lost += steps * max(0.0, level - _USUAL * self.usual)
        self.usual = min(self.usual, level)
        self.since += seconds
        price = self.patience * self.cost
        return self.since * SHARE >= price or self.lost >= price

    def measured(self, cost: float, *, changed: bool) -> None:
        """A measurement has been made.

        Args:
            cost: Seconds, on the slowest rank.
            changed: Another program has come of it.
        """
        self.patience = 1.0 if changed else min(_PATIENCE, 2 * self.patience)
        self.cost = cost
        self.usual, self.lost, self.since = None, 0.0, 0.0


def steps_to_vote(seconds: float) -> int:
    """Steps until ranks compare their clocks again: about half a second of them.

    Args:
        seconds: Of a step, on the slowest rank.
    """
    return max(1, min(_MOST_STEPS, round(_VOTE_SECONDS / seconds))) if seconds else _MOST_STEPS
