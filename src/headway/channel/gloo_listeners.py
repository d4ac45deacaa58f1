"""Gloo's listening sockets accept nothing more once a group's connections are made.

Each of Gloo's groups listens for as long as it lives, authenticates no client, and keeps every
connection that sends eight bytes: a thousand of those use up the open files of a process, and Gloo
aborts it. All connections of a group are made with it. From then on the kernel drops all packets
for the listening socket (socket(7), SO_ATTACH_FILTER). The socket itself stays
Gloo's. Where there is no /proc or no such filter, nothing is done.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# asm-generic/socket.h; Python's socket module lacks the name.
_SO_ATTACH_FILTER = 26
# One instruction of linux/filter.h, "return 0 bytes of the packet": code BPF_RET | BPF_K, two
# jumps, and the constant.
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)


def named_interfaces() -> list[str]:
    """Those that the environment gives to Gloo."""
    return [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]


@contextmanager
def drop_later_connections() -> Iterator[None]:
    """Around what makes process groups: drop all packets for listening sockets opened inside."""
    # Then Gloo connects when a group is first used.
    if os.environ.get("TORCH_GLOO_LAZY_INIT", "0") not in ("", "0"):
        yield
        return
    before = set(_listening())
    yield
    for inode, descriptor in _listening().items():
        if inode not in before:
            _drop_calls(descriptor)


def _listening() -> dict[int, int]:
    """Inode -> descriptor of the TCP sockets of this process that listen."""
    found = {}
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode) and _listens(int(name)):
                    found[status.st_ino] = int(name)
    return found


@contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """A socket object for somebody else's descriptor, which stays open."""
    with socket.socket(fileno=os.dup(descriptor)) as link:
        yield link


def _listens(descriptor: int) -> bool:
    with _borrowed(descriptor) as link:
        tcp = link.family in (socket.AF_INET, socket.AF_INET6)
        return tcp and bool(link.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _drop_calls(descriptor: int) -> None:
    program = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
    # struct sock_fprog: the number of instructions and their address.
    filter_ = struct.pack("HP", 1, ctypes.addressof(program))
    with suppress(OSError), _borrowed(descriptor) as link:
        link.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter_)
