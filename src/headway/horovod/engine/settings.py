"""Settings that Horovod reads from variables of the environment, with the defaults of here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headway.errors import TIMEOUT_SECONDS, UsageError


@dataclass(frozen=True, kw_only=True)
class HorovodSettings:
    """How operations are collected, and how long ranks wait for each other.

    Attributes:
        cycle_seconds: How long an operation that nobody waits for may stay behind for others to
            join it (HOROVOD_CYCLE_TIME, there in milliseconds).
        fusion_bytes: The largest buffer in which tensors travel together
            (HOROVOD_FUSION_THRESHOLD); 0: each travels alone.
        flush_bytes: Operations that are ready leave without further delay from so many bytes on.
        stall_warning_seconds: After so long the coordinator warns of ranks that are missing
            (HOROVOD_STALL_CHECK_TIME_SECONDS; 0, or HOROVOD_STALL_CHECK_DISABLE=1: never).
        stall_error_seconds: After so long the operation fails, or all of them where rank 0 does not
            answer (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS; 0: never).
        start_seconds: For all ranks to arrive in `init` (HOROVOD_START_TIMEOUT).
        transfer_seconds: For one transfer among ranks that are all there
            (HOROVOD_GLOO_TIMEOUT_SECONDS).
        timeline: Where rank 0 writes a trace from the start on (HOROVOD_TIMELINE); "": nowhere.
            DYNAMIC, with which Horovod allows `start_timeline`, is no file.
        mark_cycles: With a mark for each message of the coordinator
            (HOROVOD_TIMELINE_MARK_CYCLES).
    """

    # In a step of a model of 75 tensors rank 0's thread woke 61 times at 5 ms, and 36 times at 20.
    cycle_seconds: float = 0.02
    # Two thirds of the flushes of a model of 40 MB are then as large as this.
    flush_bytes: int = 8 * 2**20
    fusion_bytes: int = 64 * 2**20
    stall_warning_seconds: float = 60.0
    stall_error_seconds: float = 1800.0
    start_seconds: float = TIMEOUT_SECONDS
    transfer_seconds: float = TIMEOUT_SECONDS
    timeline: str = ""
    mark_cycles: bool = False

    @classmethod
    def of(cls, variables: Mapping[str, str]) -> HorovodSettings:
        """Read the variables.

        Raises:
            UsageError: One is no number.
        """
        default = cls()
        watched = variables.get("HOROVOD_STALL_CHECK_DISABLE", "0") in ("", "0")
        warning = _number(
            variables, "HOROVOD_STALL_CHECK_TIME_SECONDS", default.stall_warning_seconds
        )
        fusion = int(_number(variables, "HOROVOD_FUSION_THRESHOLD", default.fusion_bytes))
        cycle = _number(variables, "HOROVOD_CYCLE_TIME", default.cycle_seconds * 1e3)
        timeline = variables.get("HOROVOD_TIMELINE", "")
        return cls(
            cycle_seconds=cycle / 1e3,
            fusion_bytes=fusion,
            flush_bytes=min(default.flush_bytes, fusion),
            stall_warning_seconds=warning if watched else 0.0,
            stall_error_seconds=_number(
                variables, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", default.stall_error_seconds
            ),
            start_seconds=_number(variables, "HOROVOD_START_TIMEOUT", default.start_seconds),
            transfer_seconds=_number(
                variables, "HOROVOD_GLOO_TIMEOUT_SECONDS", default.transfer_seconds
            ),
            timeline="" if timeline == "DYNAMIC" else timeline,
            mark_cycles=variables.get("HOROVOD_TIMELINE_MARK_CYCLES", "0") not in ("", "0"),
        )


def _number(variables: Mapping[str, str], name: str, default: float) -> float:
    text = variables.get(name, "")
    try:
        found = float(text) if text else default
    except ValueError:
        found = -1.0
    if 0 <= found < float("inf"):
        return found
    raise UsageError(
        f"the environment variable {name} is no number from 0 on: {text!r}",
        fix=f"Unset {name} or correct it.",
    )
