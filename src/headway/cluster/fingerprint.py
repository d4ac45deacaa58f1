"""On what a cluster was measured: its numbers are not those of another machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

DATE = "date"


def fingerprint(*, device: str, ranks: int, threads: int) -> dict[str, str]:
    """Of this machine, now.

    Args:
        device: What the ranks compute on, as in the cluster's `devices`.
        ranks: That measure, or will work, at the same time.
        threads: Of each.
    """
    return {
        DATE: str(datetime.now(UTC).date()),
        "torch": _torch(),
        "device": device,
        "processor": _processor(),
        "cores": str(os.cpu_count() or 1),
        "ranks": str(ranks),
        "threads": str(threads),
    }


def differences(measured: Mapping[str, str], here: Mapping[str, str]) -> Iterator[str]:
    """What differs, one phrase each: "torch 2.12.0 there, 2.13.0 here"; a date does not count.

    Nothing is known of what a file does not say, so that it differs.
    """
    for name, value in here.items():
        said = measured.get(name, "nothing said")
        if name != DATE and said != value:
            yield f"{name}: {said} there, {value} here"


def _torch() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return "unknown"


def _processor() -> str:
    """Its model, as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
