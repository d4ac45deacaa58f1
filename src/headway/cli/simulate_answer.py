"""What `headway simulate` says: a step before and after changes, in words and as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from headway.simulator.ranks import NO_FAULTS
from headway.simulator.simulated import INSIDE, Account, Simulated
from headway.simulator.step import HOST
from headway.units import format_bytes, format_seconds

WORDS = {
    "messages": "messages between stages",
    "sums": "sums of gradients",
    "scatters": "scattering of gradients (ZeRO)",
    "gathers": "gathering of parameters (ZeRO)",
    INSIDE: "collectives of the tensor axis",
    HOST: "what the host does beside kernels",
    "forward": "forward",
    "backward": "backward",
    "update": "update",
}
SAME = 5e-4
"""Shares below this are equal to what is printed."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A step on some hardware.

    Attributes:
        name: "as planned", "changed".
        step: Played.
        price: Seconds that the search says; None: it has no price, or there are faults.
        caps: Bytes of a device that may be used, by type.
        kinds: The type of each rank's device; empty: there is one.
    """

    name: str
    step: Simulated
    price: float | None
    caps: Mapping[str, float]
    kinds: tuple[str, ...] = ()

    def cap(self, rank: int) -> float:
        """Bytes of a rank's device that may be used."""
        return self.caps[self.kinds[rank]] if self.kinds else next(iter(self.caps.values()))

    @property
    def groups(self) -> dict[str, list[Account]]:
        """The ranks that were played, by type of device; under "" where there is one."""
        found: dict[str, list[Account]] = {}
        for account in self.step.accounts:
            found.setdefault(self.kinds[account.rank] if self.kinds else "", []).append(account)
        return found


def table(scenarios: Sequence[Scenario]) -> Iterator[str]:
    """A column for each scenario, and the difference."""
    kinds = list(dict.fromkeys(kind for s in scenarios for kind in s.step.exposed))
    rows = [("", *(s.name for s in scenarios)), ("step", *(_step(s) for s in scenarios))]
    rows.append(("bubble", *(f"{s.step.bubble:.1%}" for s in scenarios)))
    rows.append(("exposed communication", *(_exposed(s.step) for s in scenarios)))
    rows += [
        (f"  {WORDS[kind]}", *(format_seconds(s.step.exposed.get(kind, 0.0)) for s in scenarios))
        for kind in kinds
    ]
    rows += [
        (f"{kind} computes", *(_computing(s.groups[kind], s.step) for s in scenarios))
        for kind in dict.fromkeys(scenarios[0].kinds)
    ]
    rows.append(("memory of the fullest rank", *(format_bytes(s.step.peak) for s in scenarios)))
    if len(scenarios) == 2:
        before, after = (s.step for s in scenarios)
        more = {
            "step": _than(after.seconds, before.seconds),
            "memory of the fullest rank": _than(after.peak, before.peak),
            "exposed communication": _than(
                sum(after.exposed.values()), sum(before.exposed.values())
            ),
        }
        rows = [(*row, more.get(row[0], "")) for row in rows]
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        yield "  ".join(cells).rstrip()


def _step(scenario: Scenario) -> str:
    return format_seconds(scenario.step.seconds)


def _exposed(step: Simulated) -> str:
    return format_seconds(sum(step.exposed.values()))


def _computing(accounts: Sequence[Account], step: Simulated) -> str:
    """Which share of the step some ranks compute, on the average."""
    busy = sum(account.count * sum(account.busy.values()) for account in accounts)
    return f"{busy / sum(account.count for account in accounts) / step.seconds:.1%}"


def _than(after: float, before: float) -> str:
    if abs(after - before) <= SAME * before:
        return "equal"
    return f"{after / before - 1:+.1%}" if before else "new"


def sentences(
    scenarios: Sequence[Scenario], change: Sequence[str], fault: Sequence[str]
) -> Iterator[str]:
    """The same for people."""
    if len(scenarios) == 2:
        yield f"changed: {'; '.join([*change, *fault])}"
    for scenario in scenarios:
        prefix = f"{scenario.name}: " if len(scenarios) > 1 else ""
        yield prefix + _decided(scenario.step)
        if scenario.price is not None:
            yield f"{prefix}{_priced(scenario)}"
        yield from (f"{prefix}{line}" for line in _fullest(scenario))
    last = scenarios[-1].step
    played = len(last.accounts)
    if played < last.ranks:
        yield f"{played} of {last.ranks} ranks were played, the others behave alike"
    else:
        yield f"all {played} ranks were played"
    if scenarios[-1].step.work.faults != NO_FAULTS and _unmoved(scenarios):
        yield "no part of the step uses what is faulty"


def _fullest(scenario: Scenario) -> Iterator[str]:
    """Of each type of devices."""
    for kind, accounts in scenario.groups.items():
        fullest = max(accounts, key=lambda account: account.peak)
        cap = scenario.cap(fullest.rank)
        over = "; this does not fit" if fullest.peak > cap else ""
        yield (
            f"rank {fullest.rank} is the fullest{f' {kind}' if kind else ''}, "
            f"{format_bytes(fullest.peak)} of {format_bytes(cap)} ({fullest.peak / cap:.1%}){over}"
        )


def _unmoved(scenarios: Sequence[Scenario]) -> bool:
    return scenarios[0].step.seconds == scenarios[-1].step.seconds


def _decided(step: Simulated) -> str:
    shares = sorted(step.decided.items(), key=lambda item: -item[1])
    words = [f"{WORDS[kind]} {seconds / step.seconds:.1%}" for kind, seconds in shares]
    return f"the chain that decides the step is {', '.join(words)}"


def _priced(scenario: Scenario) -> str:
    assert scenario.price is not None
    said = format_seconds(scenario.price)
    than = _than(scenario.step.seconds, scenario.price)
    return f"the formulas of the search say {said}; the events take " + (
        "the same" if than == "equal" else f"{than}"
    )


def facts(scenarios: Sequence[Scenario]) -> dict[str, object]:
    """All figures as plain data."""
    return {
        "scenarios": [
            {
                "name": scenario.name,
                "seconds": scenario.step.seconds,
                "priced": scenario.price,
                "bubble": scenario.step.bubble,
                "exposed": scenario.step.exposed,
                "peak": scenario.step.peak,
                "allowed": scenario.caps if scenario.kinds else scenario.cap(0),
                "decided": scenario.step.decided,
                "path": [asdict(leg) for leg in scenario.step.path],
                "ranks": [
                    asdict(account) | ({"device": kind} if kind else {})
                    for kind, accounts in scenario.groups.items()
                    for account in accounts
                ],
            }
            for scenario in scenarios
        ]
    }
