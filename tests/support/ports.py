"""A port that nobody uses, and that nobody else will be given before the test binds it."""

from __future__ import annotations

import random
import socket

# Below the ephemeral ports of Linux (32768 up): the system gives none of these to a connection of
# another test, which a port that was bound as 0 and closed again can be.
PORTS = range(20_000, 32_000)


def free_port() -> int:
    """On this machine, on all of its addresses."""
    draw = random.SystemRandom()  # tests seed the other generator alike
    while True:
        port = draw.choice(PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port
