"""Which ranks of a pipeline hand values over in memory that both share, and how that is opened.

Invariant: both ranks of a pair decide alike, because all of them ask the same about the table and
the machines; pairs open in one order on all ranks, so that nobody waits in a circle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from headway.channel import open_stream
from headway.parallel.row import Team
from headway.schedule import PipelineSchedule

_PER_MICROBATCH = 2
"""Messages of a micro-batch over an edge in one direction, at most (Chimera's halves)."""


def with_streams(
    team: Team,
    schedule: PipelineSchedule,
    together: Callable[[int, int], bool],
    *,
    timeout: float = 300.0,
) -> Team:
    """The team with a stream to each rank it exchanges with and shares memory with; collective.

    Args:
        team: On host memory.
        schedule: With all edges; the streams serve all tables with at most as many micro-batches.
        together: Whether two global ranks are on one machine; the same on all ranks.
        timeout: Seconds that a wait may take.

    Raises:
        PeerLost: Another rank is gone.
        Stalled: It does not come in time.
    """
    own = team.ranks[team.rank]
    streams = dict(team.streams)
    for (a, b), edges in sorted(_pairs(schedule).items()):
        ranks = team.ranks[a], team.ranks[b]
        if own in ranks and together(*ranks):
            peer = ranks[0] if own == ranks[1] else ranks[1]
            ahead = edges * _PER_MICROBATCH * schedule.num_microbatches
            stream = open_stream(peer, ahead=ahead, group=team.group, timeout=timeout)
            if stream is not None:
                streams[peer] = stream
    return replace(team, streams=streams)


def _pairs(schedule: PipelineSchedule) -> Counter[tuple[int, int]]:
    """How many edges there are between each two ranks of a table."""
    found: Counter[tuple[int, int]] = Counter()
    for pipe in schedule.pipes:
        for a, b in schedule.edges:
            source, target = sorted((pipe.placement[a], pipe.placement[b]))
            if source != target:
                found[source, target] += 1
    return found
