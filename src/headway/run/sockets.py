"""The connections that torch's own threads hold, and how to break them.

A thread that waits inside gloo cannot be interrupted, but a connection that ends lets it go: torch
raises there as if the peer had died. Only what was opened since a moment and does not belong to a
socket object of Python is touched. Linux only; elsewhere there is nothing to break.
"""

from __future__ import annotations

import gc
import os
import socket
from contextlib import suppress


def open_sockets() -> dict[int, str]:
    """File descriptor -> identity of every socket of this process; empty where that is unknown."""
    found: dict[int, str] = {}
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{name}")
                if target.startswith("socket:"):
                    found[int(name)] = target
    return found


def break_connections(kept: frozenset[str]) -> int:
    """End all connections of foreign code that are not among `kept`; returns how many.

    Args:
        kept: Identities of sockets that are left alone.
    """
    # Not isinstance: it asks objects for their __class__, which runs code of lazy ones.
    of_python = {
        thing.fileno() for thing in gc.get_objects() if issubclass(type(thing), socket.socket)
    }
    broken = 0
    for number, identity in open_sockets().items():
        if identity in kept or number in of_python:
            continue
        with suppress(OSError):
            copy = socket.socket(fileno=os.dup(number))
            try:
                copy.getpeername()  # raises where it is not connected: a listening one stays
                copy.shutdown(socket.SHUT_RDWR)
                broken += 1
            finally:
                copy.close()
    return broken
