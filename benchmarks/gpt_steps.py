"""Steps of DDP and of `headway.Executor` in turn: the GPT of `headway compare --paper`.

    torchrun --nproc-per-node 2 benchmarks/gpt_steps.py --steps 100 --buckets 25

Both models live in the same processes and take turns step by step, so that what disturbs the
machine disturbs both; ratios are of neighbouring steps. `--buckets` adds Executors with buckets of
other sizes, in MiB.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import headway
from headway.workloads.transformer import recipe

BATCH, WINDOW, WARM = 16, 128, 4
RECIPE = recipe(width=256, layers=4, heads=4, window=WINDOW)
Step = Callable[[], float]


def model_and_optimizer() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = RECIPE.model()
    return model, RECIPE.optimizer(model)


def random_bytes() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        *(torch.randint(0, 256, (4096, WINDOW), generator=generator) for _ in range(2))
    )


def ddp_step(data: TensorDataset) -> Step:
    model, optimizer = model_and_optimizer()
    wrapped = DistributedDataParallel(model)
    own = BATCH // dist.get_world_size()
    batches = iter(DataLoader(data, own, sampler=DistributedSampler(data)))

    def step() -> float:
        optimizer.zero_grad()
        loss = RECIPE.loss(wrapped, next(batches))
        assert isinstance(loss, Tensor)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def headway_step(data: TensorDataset, bucket: str | None) -> Step:
    model, optimizer = model_and_optimizer()
    plan = headway.data_parallel(BATCH, processes=dist.get_world_size())
    if bucket is not None:
        plan = replace(plan, exchange=replace(plan.exchange, bucket=f"{bucket} MiB"))
    run = headway.Executor(model, optimizer, loss=RECIPE.loss, plan=plan)
    batches = run.batches(data, epochs=None, drop_last=True)
    return lambda: float(run.step(next(batches)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--buckets", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    data = random_bytes()
    steps = {"DDP": ddp_step(data), "headway": headway_step(data, None)}
    for bucket in filter(None, options.buckets.split(",")):
        steps[f"headway, {bucket} MiB"] = headway_step(data, bucket)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(WARM + options.steps):
        for name in list(steps)[:: 1 if number % 2 else -1]:
            dist.barrier()
            start = time.perf_counter()
            steps[name]()
            if number >= WARM:
                times[name].append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        for name, found in times.items():
            ratios = [peer / own for peer, own in zip(times["DDP"], found, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(
                f"{name:16s} {statistics.median(found) * 1e3:6.1f} ms, DDP's step over it "
                f"{middle:.3f} ({low:.3f}, {high:.3f})"
            )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
