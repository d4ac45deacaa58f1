"""Faults as data: what happens to a link or a rank, and at which step.

Read from one sentence each: "link a-b 10x slower from step 20", "link a-b 10x slower from step 20
to step 40", "rank 3 2x slower from step 20", "cut link a-b at step 5", "kill rank 3 at step 7". A
step's faults happen before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from headway.cluster.cluster import Cluster
from headway.documents import nearest
from headway.errors import UsageError

_END = r"([A-Za-z0-9_.]+)-([A-Za-z0-9_.]+)"
_SLOW = re.compile(
    rf"link {_END} ([0-9]+(?:\.[0-9]+)?)x slower from step ([0-9]+)(?: to step ([0-9]+))?"
)
_LAG = re.compile(
    r"rank ([0-9]+) (?:([0-9]+(?:\.[0-9]+)?)x slower|slow ([0-9]+(?:\.[0-9]+)?)x)"
    r"(?: from step ([0-9]+)(?: to step ([0-9]+))?)?"
)
_CUT = re.compile(rf"cut link {_END} at step ([0-9]+)")
_KILL = re.compile(r"kill rank ([0-9]+) at step ([0-9]+)")
_LEGAL = (
    'write "link a-b 10x slower from step 20" (also "... to step 40"), "rank 3 2x slower" (also '
    '"... from step 20"), "cut link a-b at step 5" or "kill rank 3 at step 7"'
)


@dataclass(frozen=True, kw_only=True)
class SlowLink:
    """The link between two nodes carries less, from one step on, for ever or until another one.

    Attributes:
        factor: The rate is divided by it.
        until: The first step at the old rate again; None: none.
    """

    ends: tuple[str, str]
    factor: float
    first: int
    until: int | None = None

    def __str__(self) -> str:
        to = "" if self.until is None else f" to step {self.until}"
        return f"link {'-'.join(self.ends)} {self.factor:g}x slower from step {self.first}{to}"


@dataclass(frozen=True, kw_only=True)
class SlowRank:
    """A process computes more slowly, from one step on, for ever or until another one.

    Attributes:
        factor: Its processor's rate is divided by it.
        until: The first step at the old rate again; None: none.
    """

    rank: int
    factor: float
    first: int = 1
    until: int | None = None

    def __str__(self) -> str:
        to = "" if self.until is None else f" to step {self.until}"
        return f"rank {self.rank} {self.factor:g}x slower from step {self.first}{to}"


@dataclass(frozen=True, kw_only=True)
class CutLink:
    """The link between two nodes carries nothing any more: packets vanish, as on a pulled cable."""

    ends: tuple[str, str]
    step: int

    def __str__(self) -> str:
        return f"cut link {'-'.join(self.ends)} at step {self.step}"


@dataclass(frozen=True, kw_only=True)
class KillRank:
    """A process ends at once, without a word (SIGKILL)."""

    rank: int
    step: int

    def __str__(self) -> str:
        return f"kill rank {self.rank} at step {self.step}"


Fault = SlowLink | SlowRank | CutLink | KillRank


def parse_fault(text: str) -> Fault:
    """Read one fault.

    Raises:
        ValueError: The sentence is none of these; says what is legal.
    """
    sentence = " ".join(text.split())
    if match := _LAG.fullmatch(sentence):
        return _slow_rank(text, *match.groups())
    if match := _SLOW.fullmatch(sentence):
        first, second, factor, begin, end = match.groups()
        if not float(factor) > 0:
            raise ValueError(f"{text!r}: 0x slower is no rate; to stop a link, cut it")
        _check_order(text, begin, end)
        fault: Fault = SlowLink(
            ends=(first, second),
            factor=float(factor),
            first=_step(begin, text),
            until=None if end is None else int(end),
        )
    elif match := _CUT.fullmatch(sentence):
        first, second, step = match.groups()
        fault = CutLink(ends=(first, second), step=_step(step, text))
    elif match := _KILL.fullmatch(sentence):
        rank, step = match.groups()
        return KillRank(rank=int(rank), step=_step(step, text))
    else:
        raise ValueError(f"{text!r} is no fault; {_LEGAL}")
    if first == second:
        raise ValueError(f"{text!r}: a link has two different ends")
    return fault


def _slow_rank(
    text: str, rank: str, slower: str | None, slow: str | None, begin: str | None, end: str | None
) -> SlowRank:
    factor = float(slower or slow or 0)
    if factor < 1:
        raise ValueError(f"{text!r}: at least 1x; to stop a rank, kill it")
    first = _step(begin or "1", text)
    _check_order(text, str(first), end)
    return SlowRank(
        rank=int(rank), factor=factor, first=first, until=None if end is None else int(end)
    )


def _check_order(text: str, begin: str, end: str | None) -> None:
    if end is not None and int(end) <= int(begin):
        raise ValueError(f"{text!r}: step {end} does not come after step {begin}")


def _step(number: str, text: str) -> int:
    if int(number) < 1:
        raise ValueError(f"{text!r}: steps count from 1")
    return int(number)


def check_faults(faults: Iterable[Fault], ranks: int, cluster: Cluster | None = None) -> None:
    """Raise unless all of them can happen.

    Raises:
        UsageError: The first fault that names a rank or a node that does not exist, or a link where
            there is none to change.
    """
    for fault in faults:
        where = f"--fault {str(fault)!r}"
        if isinstance(fault, KillRank | SlowRank):
            if fault.rank >= ranks:
                there = f"the ranks are 0 to {ranks - 1}" if ranks > 1 else "rank 0 is the only one"
                raise UsageError(f"there is no rank {fault.rank}: {there}", where=where)
            continue
        if cluster is None:
            raise UsageError(
                "there is no link to change",
                where=where,
                fix="Emulate the nodes: --emulate cluster.toml",
            )
        for name in fault.ends:
            if name not in cluster.names:
                raise UsageError(f"no node {name!r}{nearest(name, cluster.names)}", where=where)
        # A cut needs no rate: its packets vanish.
        if isinstance(fault, SlowLink) and cluster.link(*fault.ends) is None:
            raise UsageError(
                "a link without a rate cannot be made slower",
                where=where,
                fix='Give it one in the cluster file: between = { rate = "1 Gbit/s" }',
            )
