"""The rendezvous of torch's agent with itself: one machine, no port, nothing pickled.

torch's own handlers open a TCPStore on all interfaces, which asks nobody who he is; that of
"c10d" keeps its state in it as a pickle, so that whoever reaches the port runs code here. A job on
one machine has one agent, which needs a store for itself alone: a HashStore in its memory. The
workers meet in a file of the attempt's private directory (`run.distributed.rendezvous`).

Importing this module imports torch.
"""

from __future__ import annotations

from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, not in __all__
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND = "headway-one-machine"


class OneMachineRendezvous(RendezvousHandler):
    """The only agent of a job meets nobody.

    Args:
        address: What the workers get as MASTER_ADDR: where their own route to the others begins.
    """

    def __init__(self, run_id: str, address: str) -> None:
        self._run_id = run_id
        self._address = address

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        # Nobody listens at the master's address: port 0.
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(self._address, 0))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nobody else could join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    return OneMachineRendezvous(parameters.run_id, parameters.local_addr or "127.0.0.1")


def register() -> str:
    """Make the handler known to torch; returns the name of its backend."""
    rendezvous_handler_registry.register(BACKEND, _create)
    return BACKEND
