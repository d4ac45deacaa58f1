"""`--emulate` and `--fault`: emulated nodes for a job, and the faults that hit it.

With root, or in a user namespace of our own, nodes are network namespaces with shaped links;
otherwise the exchange itself delays messages, and what cannot be emulated this way is named in a
warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headway.cluster import Cluster, CutLink, Fault, parse_fault, read_cluster
from headway.errors import UsageError
from headway.keywords import users_line
from headway.launch.emulation import (
    ROOT_ADVICE,
    EmulatedCluster,
    Emulation,
    PacedCluster,
    has_root,
    pacing_limits,
)
from headway.launch.namespaces import enter_user_namespace
from headway.launch.preflight import check_processes, check_world
from headway.run.distributed.launch_env import LaunchEnv


@dataclass(frozen=True, kw_only=True)
class EmulationOptions:
    """What the two options ask for.

    Attributes:
        cluster: The nodes to emulate; None: none.
        device: To compute on: nodes are emulated for CPUs only.
    """

    cluster: Cluster | None
    faults: tuple[Fault, ...]
    device: str

    @contextmanager
    def nodes(self) -> Iterator[EmulatedCluster | PacedCluster | None]:
        """The emulated nodes; without root those that the exchange itself can emulate.

        Raises:
            UsageError: There is no root, and a fault that needs it.
        """
        if self.cluster is None:
            yield None
            return
        inside = not has_root()
        if inside:
            # Some kernels and containers forbid it.
            if not enter_user_namespace():
                yield self._without_root()
                return
            warnings.warn(
                "without root the job runs in a user namespace: nothing outside of the emulated "
                "cluster can be reached",
                stacklevel=2,
            )
        with Emulation(self.cluster) as emulated:
            if inside:
                emulated.name_hosts()
            yield emulated

    def _without_root(self) -> PacedCluster:
        assert self.cluster is not None
        cut = next((fault for fault in self.faults if isinstance(fault, CutLink)), None)
        if cut is not None:
            raise UsageError(
                "a link that is emulated inside of the exchange cannot be cut",
                where=f"--fault {str(cut)!r}",
                why="Without root, and where user namespaces are not allowed, there are no real "
                "links.",
                fix=ROOT_ADVICE,
            )
        for text in pacing_limits(self.cluster):
            warnings.warn(text, stacklevel=2)
        return PacedCluster(cluster=self.cluster)


def read_emulation_options(
    emulate: Cluster | str | Path | None, faults: Sequence[str], place: LaunchEnv, device: str
) -> EmulationOptions:
    """Read both options.

    Raises:
        DocumentError: With all problems of the file.
        UsageError: A sentence that is no fault, or a world that has been started already.
    """
    option = "--emulate" if emulate is not None else "--fault"
    # Another launcher has placed its ranks already: they cannot move into the nodes' namespaces.
    if place.found_world and (emulate is not None or faults):
        raise UsageError(
            f"{option} needs processes that headway itself starts",
            why=f"{place.launcher} has started {place.ranks} of them.",
            fix="Start `headway train` alone.",
        )
    if emulate is not None and device == "cuda":
        raise UsageError(
            "nodes are emulated for CPUs only",
            why="GPUs of one machine exchange past the emulated links.",
            fix="Use --device cpu.",
        )
    try:
        found = tuple(parse_fault(text) for text in faults)
    except ValueError as error:
        raise UsageError(str(error), where="--fault") from None
    if isinstance(emulate, str | Path):
        emulate = read_cluster(Path(emulate))
    return EmulationOptions(
        cluster=emulate,
        faults=found,
        # "auto" must not find a GPU, whose exchange would pass the links by.
        device=device if emulate is None else "cpu",
    )


def count_ranks(
    place: LaunchEnv, processes: int | None, default: int, cluster: Cluster | None
) -> int:
    """The number of processes; that of the world which is already there cannot be changed.

    Raises:
        UsageError: Fewer than one, or another number than cluster or world have.
    """
    if not isinstance(processes, int | None):
        raise UsageError(
            f"processes={processes!r} is not a whole number: write processes=2", where=users_line()
        )
    if processes is not None and processes < 1:
        raise UsageError(f"--processes {processes}: at least 1")
    # Always an emulated one, which beside another launcher's world has been refused.
    if cluster is not None:
        if processes not in (None, cluster.ranks):
            raise UsageError(
                f"--processes {processes} contradicts the {cluster.ranks} of the emulated cluster",
                fix="Leave --processes out: the cluster decides.",
            )
        return cluster.ranks
    if place.found_world:
        check_world(place, processes)
        return place.ranks
    check_processes(processes or default)  # here, before anything is made for the run
    return processes or default
