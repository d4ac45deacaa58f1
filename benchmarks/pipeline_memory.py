"""What each rank of a pipeline holds: counted bytes and resident sets, after two steps of AdamW.

    torchrun --nproc-per-node 4 benchmarks/pipeline_memory.py

The model has 12 linear layers of 2048 x 2048, 201 MB in float32. Counted are parameters, buffers,
gradients and the optimiser's state, each storage once.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from headway import Executor, criterion
from headway.plans import PipelinePlan, pipelined

WIDTH, LAYERS, MB = 2048, 12, 1e6


def counted(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def resident(field: str) -> int:
    """VmRSS: now; VmHWM: the peak; in bytes."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(found[1]) if found else 0


def main() -> None:
    torch.set_num_threads(1)
    start = resident("VmRSS")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters())
    draw = torch.randn(16, WIDTH)
    plan = pipelined(8, processes=4, stages=4, pipeline=PipelinePlan(microbatches=4))
    run = Executor(model, optimizer, loss=criterion(nn.MSELoss()), plan=plan)
    for batch in run.batches(TensorDataset(draw, draw)):
        run.step(batch)
    run.flush()
    kept = counted(model, optimizer)
    row = [kept, resident("VmRSS") - start, resident("VmHWM") - start]
    rows: list[list[int]] = [[]] * 4
    dist.all_gather_object(rows, row)
    if run.world.rank == 0:
        print(
            "rank   counted MB   resident MB   peak MB   (resident above the start of the script)"
        )
        for rank, values in enumerate(rows):
            print(f"{rank:4}" + "".join(f"{value / MB:13.0f}" for value in values))


if __name__ == "__main__":
    main()
