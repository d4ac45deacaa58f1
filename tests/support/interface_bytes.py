"""Byte counters of a network interface, for tests and benchmarks."""

from __future__ import annotations

from pathlib import Path

from headway.errors import UsageError
from headway.launch.emulation import INTERFACE


def interface_bytes(interface: str = INTERFACE) -> tuple[int, int]:
    """Bytes that an interface has sent and received, seen from inside of its namespace.

    Raises:
        UsageError: There is no such interface where the calling thread is.
    """
    # A namespace belongs to a thread; /proc/self shows that of the main thread.
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, colon, numbers = line.partition(":")
        if colon and name.strip() == interface:
            fields = numbers.split()
            # Eight columns of what was received, then those of what was sent; bytes are the first
            # of each.
            return int(fields[8]), int(fields[0])
    raise UsageError(f"there is no interface {interface} here")
