"""The loss of a rank: who, how it was noticed, and the error that says so.

A verdict is given once for the whole job, by rank 0 (or by those whom rank 0 has left), and
travels as JSON. Exactly one rank tells it to the user: the others only note that they followed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from headway.errors import HeadwayError, PeerLost, Stalled
from headway.run.failure import speak_for_all
from headway.run.meeting import name_ranks
from headway.run.peer import Identity, Peer

Kind = Literal["silent", "gone", "failed"]
Spread = Literal["", "node", "host"]
"""How machines are named: not at all (there is one), by number, by host name."""
_RESUME = "Then go on with --resume."


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Why the job cannot go on.

    Attributes:
        kind: "silent": nothing was heard for too long; "gone": the connection was closed without a
            word; "failed": the rank said so itself.
        ranks: Who is lost.
        what: See `HeadwayError`, as are `why` and `fix`.
        first: This rank has found it out itself.
        speaks: This rank tells it to the user.
        frozen: Process ids on this machine of silent ranks, which nobody else would end.
    """

    kind: Kind
    ranks: tuple[int, ...]
    what: str
    why: str = ""
    fix: str = ""
    first: bool = field(default=False, compare=False)
    speaks: bool = field(default=False, compare=False)
    frozen: tuple[int, ...] = field(default=(), compare=False)

    def error(self, where: str = "") -> HeadwayError:
        """The error to raise: silence is a wait without an end, the rest is a lost peer.

        Args:
            where: "step 17".
        """
        kind = Stalled if self.kind == "silent" and self.first else PeerLost
        error = kind(self.what, where=where, why=self.why, fix=self.fix)
        return speak_for_all(error) if self.speaks else error

    def message(self) -> dict[str, Any]:
        """The verdict for the other ranks."""
        return {name: asdict(self)[name] for name in ("kind", "ranks", "what", "why", "fix")}

    @classmethod
    def heard(cls, verdict: Mapping[str, Any]) -> Loss:
        """The verdict of another rank."""
        kind: Kind = verdict["kind"]
        return cls(
            kind=kind,
            ranks=tuple(int(rank) for rank in verdict["ranks"]),
            what=str(verdict["what"]),
            why=str(verdict["why"]),
            fix=str(verdict["fix"]),
        )


def silent(peers: Collection[Peer], own: Identity, now: float, spread: Spread) -> Loss:
    """Nothing is heard of some ranks.

    Args:
        peers: Their connections.
        own: This rank.
        now: `time.monotonic` seconds.
        spread: How machines are named.
    """
    seconds = min(now - peer.heard for peer in peers)
    names = name_places((_known(peer) for peer in peers), spread)
    to_hub = own.rank != 0
    if to_hub:
        what = f"{names} cannot be reached from {name_places([own], spread)}"
        why = f"Nothing has been heard of it for {seconds:.0f} s. "
    else:
        have = "has" if len(peers) == 1 else "have"
        what = f"{names} {have} not been heard of for {seconds:.0f} s"
        why = ""
    answers = {peer.answers() for peer in peers}
    why += _reason(answers)
    words = [_last_words(peer) for peer in peers if peer.doing[0]]
    return Loss(
        kind="silent",
        ranks=tuple(sorted(_known(peer).rank for peer in peers)),
        what=what,
        why="\n  ".join([why, *words[:4]]),
        fix="Look at these processes, their machine and its link. Code that holds Python's lock "
        f"for long needs more --patience. {_RESUME}",
        first=True,
        speaks=not to_hub or _speaks_for_node(own, _known(next(iter(peers)))),
        frozen=tuple(
            _known(peer).pid
            for peer in peers
            if peer.is_here(own.machine) and peer.answers() is not False
        ),
    )


def gone(peer: Peer, own: Identity, spread: Spread) -> Loss:
    """A connection was closed without a word."""
    lost = _known(peer)
    return Loss(
        kind="gone",
        ranks=(lost.rank,),
        what=f"{name_places([lost], spread)} vanished",
        why="Its connection was closed without a word: the process was killed, or it crashed.",
        fix="Its own error, or the signal that killed it (see dmesg), is the cause. " + _RESUME,
        first=True,
        speaks=own.rank == 0 or _speaks_for_node(own, lost),
    )


def failed(rank: Identity, text: str, spread: Spread) -> Loss:
    """A rank has said that it ends with an error; it tells that itself."""
    return Loss(
        kind="failed",
        ranks=(rank.rank,),
        what=f"{name_places([rank], spread)} failed: {text}",
        fix="Its own error is the cause.",
    )


def name_places(ranks: Iterable[Identity], spread: Spread) -> str:
    """ "rank 1"; in a job of several machines "rank 1 on node-a and ranks 2 and 3 on node-b"."""
    known = sorted(ranks, key=lambda identity: identity.rank)
    if not spread:
        return name_ranks(identity.rank for identity in known)
    places: dict[str, list[int]] = {}
    for identity in known:
        place = identity.host if spread == "host" else f"node {identity.node}"
        places.setdefault(place, []).append(identity.rank)
    return " and ".join(f"{name_ranks(ranks)} on {place}" for place, ranks in places.items())


def spread_of(ranks: Iterable[Identity]) -> Spread:
    """How machines are to be named in a job of these ranks."""
    known = list(ranks)
    if len({identity.host for identity in known}) > 1:
        return "host"
    return "node" if len({identity.node for identity in known}) > 1 else ""


def _reason(answers: set[bool | None]) -> str:
    if answers == {False}:
        return "What is sent there is not acknowledged: the network is cut, or the machine is down."
    if answers == {True}:
        return (
            "The machine answers, the process does not: it was stopped, it swaps, or its code "
            "holds Python's lock."
        )
    return "It was killed or stopped, or its network is cut."


def _last_words(peer: Peer) -> str:
    return f"The last that rank {_known(peer).rank} said: {peer.doing[0]}."


def _speaks_for_node(own: Identity, hub: Identity) -> bool:
    """Of those whom rank 0 has left, the first of each machine tells it there."""
    return own.local_rank == (1 if own.node == hub.node else 0)


def _known(peer: Peer) -> Identity:
    assert peer.identity is not None
    return peer.identity
