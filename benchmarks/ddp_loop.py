"""The named peer: a minimal hand-written DistributedDataParallel loop, started by torchrun.

Writes the wall-clock time after every optimiser step, one line each, to the file given.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from language_model import BATCH, LanguageModel, Words, adamw, loss

if __name__ == "__main__":
    target, steps = sys.argv[1], int(sys.argv[2])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(LanguageModel())
    optimizer = adamw(model)
    data = Words()
    loader = DataLoader(data, BATCH // dist.get_world_size(), sampler=DistributedSampler(data))
    stamps = []
    for _, batch in zip(range(steps), loader, strict=False):
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        value.item()
        stamps.append(time.time())
    if dist.get_rank() == 0:
        with open(target, "w") as file:
            file.write("\n".join(map(repr, stamps)))
    dist.destroy_process_group()
