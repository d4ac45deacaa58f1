"""Started by torchrun from step_time.py: steps of a DDP loop and of `headway train`, in turn.

Both models live in the same two processes and take turns step by step, so that what disturbs the
machine disturbs both. headway's step is the one of its training loop, with data, events and
journal; the peer's is the loop of ddp_loop.py.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from headway.run.distributed.world import World
from headway.run.training.job import TrainJob
from headway.run.training.loop import StopRequest, Training
from language_model import BATCH, LanguageModel, Words, adamw, loss

WARM = 4


def timed(step: object) -> float:
    """Seconds of one step, from all ranks ready to this rank done."""
    dist.barrier()
    start = time.perf_counter()
    step()  # type: ignore[operator]
    return time.perf_counter() - start


if __name__ == "__main__":
    folder, count = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)

    model = DistributedDataParallel(LanguageModel())
    optimizer = adamw(model)
    data = Words()
    sampler = DistributedSampler(data)
    batches = iter(DataLoader(data, BATCH // dist.get_world_size(), sampler=sampler))

    def peer() -> None:
        batch = next(batches)
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        value.item()

    with ExitStack() as stack, StopRequest() as stop:
        job = TrainJob(
            recipe="language_model:recipe",
            directory=folder / "run",
            device="cpu",
            timeout_seconds=300,
            patience_seconds=5,
            trace_every=50,
        )
        training = Training(job, World.adopt(), stop, stack)
        training.prepare()
        training.begin()

        def product() -> None:
            training.step()

        for _ in range(WARM):
            timed(peer), timed(product)
        pairs = []
        for number in range(count):
            order = (product, peer) if number % 2 else (peer, product)
            times = {step: timed(step) for step in order}
            pairs.append((times[product], times[peer]))
    if dist.get_rank() == 0:
        (folder / "pairs.json").write_text(json.dumps(pairs))
    dist.destroy_process_group()
