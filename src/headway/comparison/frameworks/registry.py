"""The frameworks that headway knows, each with its adapter."""

from __future__ import annotations

from dataclasses import dataclass

_ROOM = "headway.comparison.frameworks"
PLAIN = f"{_ROOM}.plain:PlainLoop"
"""The loop that the others change."""


@dataclass(frozen=True, kw_only=True)
class Framework:
    """A framework.

    Attributes:
        name: As `--with` has it.
        adapter: "module:Class".
        what: In a sentence.
        environment: The name of its environment; "": that of headway, with torch alone.
        least: The fewest processes with which it makes sense.
        exact: Whether it computes what one process computes, but for rounding.
    """

    name: str
    adapter: str
    what: str
    environment: str = ""
    least: int = 1
    exact: bool = True


FRAMEWORKS = {
    framework.name: framework
    for framework in (
        Framework(name="ddp", adapter=f"{_ROOM}.ddp:Ddp", what="torch's DistributedDataParallel"),
        Framework(
            name="headway",
            adapter=f"{_ROOM}.headway_executor:HeadwayExecutor",
            what="headway's data parallelism, with default settings",
        ),
        Framework(
            name="headway-auto",
            adapter=f"{_ROOM}.headway_executor:HeadwayExecutor",
            what="headway by the plan that its search has chosen",
        ),
    )
}
