"""This machine: memory, cores, how busy they are, and the fingerprint for measured cluster files.

The fingerprint (processor, torch, date) travels with the fitted file, because its numbers are not
those of another machine.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def memory_bytes() -> int:
    """The memory that all processes here share: the machine's, or its container's limit."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # Of cgroup v2; "max" where the container has no limit.
    container = Path("/sys/fs/cgroup/memory.max")
    text = container.read_text().strip() if container.is_file() else ""
    return min(machine, int(text)) if text.isdigit() else machine


def cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cores_in_use(seconds: float = 0.2) -> float:
    """Cores that are busy while this process does nothing; 0.0 where the system does not say."""
    before = _jiffies()
    time.sleep(seconds)
    after = _jiffies()
    if before is None or after is None or after[1] == before[1]:
        return 0.0
    share = (after[0] - before[0]) / (after[1] - before[1])
    return share * (os.cpu_count() or 1)


def _jiffies() -> tuple[int, int] | None:
    """(Busy, all) ticks of all cores since the machine started."""
    # Guest times, behind these eight numbers, are part of the user time.
    try:
        ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    # Numbers 3 and 4 are idle time and waiting for input or output.
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


DATE = "date"


def fingerprint(*, device: str, ranks: int, threads: int) -> dict[str, str]:
    """Of this machine, now.

    Args:
        device: What the ranks compute on, as in the cluster's `devices`.
        ranks: That measure, or will work, at the same time.
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


def fingerprint_differences(measured: Mapping[str, str], here: Mapping[str, str]) -> Iterator[str]:
    """What differs, one phrase each: "torch 2.12.0 there, 2.13.0 here"; a date does not count.

    Nothing is known of what a file does not say, so that it differs.
    """
    for name, value in here.items():
        said = measured.get(name, "nothing said")
        if name != DATE and said != value:
            yield f"{name}: {said} there, {value} here"


def _torch() -> str:
    try:
        # From its metadata: importing torch takes a second, and the pure plane has no torch.
        return version("torch")
    except PackageNotFoundError:
        return "unknown"


def _processor() -> str:
    """Its model, as the system names it."""
    try:
        # `platform.processor` says nothing on many Linux systems.
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
