"""What an elastic job is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

ELASTIC_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class SshOptions:
    """How other hosts are reached; None: as ssh is configured."""

    port: int | None = None
    identity: str | None = None


@dataclass(frozen=True, kw_only=True)
class ElasticSettings:
    """How many workers there are, and where.

    Attributes:
        start_processes: So many slots must be there before the first workers start.
        min_processes: With fewer slots the job waits for more.
        max_processes: Further slots stay empty; None: no limit.
        script: Command of the shell that prints the hosts; "": they are `hosts`.
        hosts: Slots by name.
        default_slots: Of a host for which the script says no number.
        seconds: Longest wait for slots, and for workers that do not leave a world that is over.
        reset_limit: How many worlds may follow the first; None: no limit.
        cooldown: See `ElasticHosts`.
        interface: At whose address the launcher listens; "": on the way to the first other host.
    """

    start_processes: int
    min_processes: int
    max_processes: int | None = None
    script: str = ""
    hosts: Mapping[str, int] = field(default_factory=dict)
    default_slots: int = 1
    seconds: float = ELASTIC_SECONDS
    reset_limit: int | None = None
    cooldown: tuple[float, float] | None = None
    interface: str = ""
    ssh: SshOptions = field(default_factory=SshOptions)
