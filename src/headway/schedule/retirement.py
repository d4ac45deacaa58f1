"""When a message that was sent is known to have arrived, so that its memory can be let go.

torch's point-to-point operations cannot be asked whether they are done, only waited for. But the
table knows: once this rank has received something that the other one sent after it had received our
message, that message has arrived, and waiting for it costs nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace

from headway.schedule import Action, Kind, PipelineSchedule

Place = dict[Action, int]


def retirements(schedule: PipelineSchedule, rank: int) -> dict[int, list[int]]:
    """For each RECV of a rank, by position, the SENDs before it that it proves to have arrived.

    Args:
        schedule: A lowered table.
        rank: Whose row.
    """
    row = schedule.order[rank]
    places = [{action: n for n, action in enumerate(other)} for other in schedule.order]
    answers = {peer: _answers(schedule, rank, peer, places) for peer in range(schedule.ranks)}
    found: dict[int, list[int]] = {}
    for position, action in enumerate(row):
        if action.kind != Kind.SEND:
            continue
        peer = schedule.pipe_of[action.pipe].placement[action.other]
        taken = places[peer].get(opposite(action))
        if taken is None:
            continue
        sent, received = answers[peer]
        # The first thing received here of all that the other one sends after it.
        later = received[bisect_right(sent, taken) :]
        proof = min((p for p in later if p > position), default=None)
        if proof is not None:
            found.setdefault(proof, []).append(position)
    return found


def _answers(
    schedule: PipelineSchedule, rank: int, peer: int, places: list[Place]
) -> tuple[list[int], list[int]]:
    """Positions of a peer's SENDs to a rank, and of the RECVs there."""
    pairs = [
        (position, places[rank][opposite(action)])
        for position, action in enumerate(schedule.order[peer])
        if action.kind == Kind.SEND
        and schedule.pipe_of[action.pipe].placement[action.other] == rank
        and opposite(action) in places[rank]
    ]
    return [sent for sent, _ in pairs], [received for _, received in pairs]


def opposite(action: Action) -> Action:
    """The RECV of a SEND, and the other way round."""
    kind = Kind.RECV if action.kind == Kind.SEND else Kind.SEND
    return replace(action, kind=kind, stage=action.other, other=action.stage)
