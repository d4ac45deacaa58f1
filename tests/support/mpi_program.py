"""Bodies of rank tests under mpiexec: `mpiexec -n 2 python -m support.mpi_program FOLDER NAME...`.

Each rank of MPI is a rank of a gloo world, too, so that bodies find what they find elsewhere; their
parameter `provider` is "mpi".
"""

from __future__ import annotations

import faulthandler
import inspect
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from mpi4py import MPI

from support.ranks import World

PUTS = 20_000
"""Each is several calls of MPI from Python, and the launcher must end in time on a busy machine."""


def main() -> None:
    folder, *names = sys.argv[1:]
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(100, exit=True)
    sys.path.insert(0, str(Path(__file__).parent.parent / "ranks"))
    import test_channel_ranks

    test_channel_ranks.PUTS = PUTS
    method = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=size)
    group = dist.group.WORLD
    assert group is not None
    world = World(rank=rank, size=size, group=group, directory=Path(folder))
    for name in names:
        inspect.unwrap(getattr(test_channel_ranks, name))(world, provider="mpi")
        dist.barrier()
        if rank == 0:
            print(f"{name} passed", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
