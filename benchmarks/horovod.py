"""Steps of `headway.horovod` and of torch's DDP, in turn in the same processes.

    python benchmarks/horovod.py                  # 10 M parameters on 2 processes of this machine
    python benchmarks/horovod.py --rounds 20 --processes 3

Both train the language model of `language_model.py` with AdamW on the same batches; a round is some
steps of each, in alternating order. Printed are the medians of a step's wall time and of the
processor time of one rank, the median of the ratios of rounds, and that the losses are equal. With
`--idle`, the processor time of a rank that waits a second for another one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent


def measure(rounds: int, steps: int, fp16: bool) -> None:
    """On each rank."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import headway.horovod as hvd
    from language_model import BATCH, LanguageModel, Words, adamw, loss

    dist.init_process_group("gloo")
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    data = Words()

    def batches() -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        place = iter(range(rank * BATCH // size, len(data), BATCH))

        def take() -> tuple[torch.Tensor, torch.Tensor]:
            start = next(place)
            rows = [data[n] for n in range(start, start + BATCH // size)]
            words, targets = zip(*rows, strict=True)
            return torch.stack(words), torch.stack(targets)

        return take

    def stepper(distribute: Callable[..., tuple[torch.nn.Module, torch.optim.Optimizer]]):  # noqa: ANN202
        torch.manual_seed(0)
        model, optimizer = distribute(LanguageModel())
        take = batches()

        def step() -> float:
            batch = take()
            optimizer.zero_grad()
            value = loss(model, batch)
            value.backward()
            optimizer.step()
            return value.item()

        return step

    def by_ddp(model: torch.nn.Module) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = DistributedDataParallel(model)
        return model, adamw(model)

    def by_hvd(model: torch.nn.Module) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        compression = hvd.Compression.fp16 if fp16 else hvd.Compression.none
        return model, hvd.DistributedOptimizer(
            adamw(model), model.named_parameters(), compression=compression
        )

    ways = {"DDP": stepper(by_ddp), "hvd": stepper(by_hvd)}
    walls: dict[str, list[float]] = {name: [] for name in ways}
    cpus: dict[str, list[float]] = {name: [] for name in ways}
    losses: dict[str, float] = {}
    for number in range(rounds + 1):
        for name in (ways, dict(reversed(ways.items())))[number % 2]:
            dist.barrier()
            begun, used = time.perf_counter(), time.process_time()
            for _ in range(steps):
                losses[name] = ways[name]()
            walls[name].append((time.perf_counter() - begun) / steps)
            cpus[name].append((time.process_time() - used) / steps)
    if rank == 0:
        for name in ways:
            print(
                f"{name}: {statistics.median(walls[name][1:]):.4f} s a step, "
                f"{statistics.median(cpus[name][1:]):.4f} s of processor, loss {losses[name]:.6f}"
            )
        for what, kept in (("wall", walls), ("processor", cpus)):
            ratios = [h / d for h, d in zip(kept["hvd"][1:], kept["DDP"][1:], strict=True)]
            print(
                f"{what}: hvd / DDP median {statistics.median(ratios):.3f}, "
                f"range {min(ratios):.3f} to {max(ratios):.3f} of {len(ratios)} rounds"
            )
    hvd.shutdown()
    dist.destroy_process_group()


def idle(seconds: float) -> None:
    """On each rank: rank 0 comes late to an all-reduce."""
    import torch

    import headway.horovod as hvd

    hvd.init()
    hvd.barrier()
    used = time.process_time()
    if hvd.rank() == 0:
        time.sleep(seconds)
    hvd.allreduce(torch.ones(10))
    print(f"rank {hvd.rank()}: {time.process_time() - used:.4f} s of processor in {seconds:g} s")
    begun = time.perf_counter()
    for _ in range(500):
        hvd.allreduce(torch.ones(10))
    if hvd.rank() == 0:
        print(f"an all-reduce of 10 values: {(time.perf_counter() - begun) * 2:.3f} ms")
    hvd.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--fp16", action="store_true")
    parser.add_argument("--idle", action="store_true")
    given = parser.parse_args()
    if "RANK" not in os.environ:
        sys.exit(
            subprocess.run(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                    *("--nproc-per-node", str(given.processes), str(HERE / "horovod.py")),
                    *sys.argv[1:],
                ],
                env={"OMP_NUM_THREADS": "1", **os.environ},
                check=False,
            ).returncode
        )
    if given.idle:
        idle(1.0)
    else:
        measure(given.rounds, given.steps, given.fp16)
