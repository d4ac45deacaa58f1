"""Which ports processes listen on, as Linux's kernel says in /proc.

`listening(pids)` are (address, port) of their sockets, in one network namespace: that of the first.
"""

from __future__ import annotations

import ipaddress
import os
import select
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

_LISTEN = "0A"


def _address(text: str) -> str:
    """An address as in /proc/net/tcp and tcp6: words of 32 bits in the machine's byte order."""
    raw = bytes.fromhex(text)
    words = b"".join(raw[start : start + 4][::-1] for start in range(0, len(raw), 4))
    found = ipaddress.ip_address(words)
    mapped = getattr(found, "ipv4_mapped", None)
    return str(mapped or found)


def sockets_of(pid: int) -> Iterator[str]:
    """The inodes of its sockets."""
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith("socket:["):
                    yield target[8:-1]


def listening(pids: Iterable[int]) -> set[tuple[str, int]]:
    """Where these processes listen."""
    every = list(pids)
    own = {inode for pid in every for inode in sockets_of(pid)}
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{every[0]}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and fields[9] in own:
                address, _, port = fields[1].rpartition(":")
                found.add((_address(address), int(port, 16)))
    return found


def beyond_the_loopback(found: Iterable[tuple[str, int]]) -> set[tuple[str, int]]:
    """Those of `listening` that other machines can reach."""
    return {place for place in found if not ipaddress.ip_address(place[0]).is_loopback}


def descendants(pid: int) -> list[int]:
    """A process and all that it has started, and those that these have."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, ValueError, IndexError):
                # proc(5): behind the command's name, which may hold brackets, state and parent.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = int(fields[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def listening_anywhere(pid: int) -> set[tuple[str, int]]:
    """Where a process and its descendants listen, each in its own network namespace."""
    found: set[tuple[str, int]] = set()
    for one in descendants(pid):
        with suppress(OSError):
            found |= listening([one])
    return found


def answering(places: Iterable[tuple[str, int]], seconds: float = 0.3) -> set[tuple[str, int]]:
    """Those of `listening` that take a connection."""
    calls = {}
    poll = select.poll()
    for place in places:
        link = socket.socket(socket.AF_INET6 if ":" in place[0] else socket.AF_INET)
        link.setblocking(False)
        link.connect_ex(place)
        poll.register(link, select.POLLOUT)
        calls[link.fileno()] = place, link
    found = set()
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        for number, _ in poll.poll(1000 * left):
            place, link = calls[number]
            poll.unregister(number)
            if not link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                found.add(place)
    for _, link in calls.values():
        link.close()
    return found


def reachable_sockets(pid: int) -> set[str]:
    """What others can speak to: from other machines over TCP and UDP, from other users of this one
    over Unix sockets that are abstract or in a folder that they can enter."""
    own = set(sockets_of(pid))
    found = {f"tcp {place}" for place in beyond_the_loopback(listening([pid]))}
    for name in ("udp", "udp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            address, _, port = fields[1].rpartition(":")
            place = (_address(address), int(port, 16))
            # 07: not connected; one that is hears its peer alone.
            if fields[3] == "07" and fields[9] in own and beyond_the_loopback([place]):
                found.add(f"udp {place}")
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        # Number, references, protocol, flags, type, state, inode; a name only where it has one.
        *_, inode, path = [*line.split(None, 7), ""][:8]
        if path and inode in own and (path.startswith("@") or _may_enter(Path(path).parent)):
            found.add(f"unix {path}")
    return found


def _may_enter(folder: Path) -> bool:
    """Whether other users can reach what is in a folder."""
    with suppress(OSError):
        return all(part.stat().st_mode & 0o011 for part in (folder, *folder.parents))
    return False


class SocketWatch:
    """Notes on a thread what `reachable_sockets` says of this process and all below it.

    Attributes:
        reachable: All that was seen.
        watched: The processes that had any socket.
    """

    def __init__(self) -> None:
        self.reachable: set[str] = set()
        self.watched: set[int] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="socket watch")

    def __enter__(self) -> SocketWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(0.01):
            for pid in descendants(os.getpid()):
                with suppress(OSError):
                    if listening([pid]):
                        self.watched.add(pid)
                    self.reachable |= reachable_sockets(pid)
