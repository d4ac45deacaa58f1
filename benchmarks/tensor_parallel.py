"""Split layers against torch's own, two ranks of one thread each: prints pairs and their median.

    torchrun --standalone --nproc-per-node 2 benchmarks/tensor_parallel.py [--rounds 20]

mlp: forward, backward and SGD of four blocks x + down(gelu(up(norm(x)))), classic, against torch's
DTensor's parallelize_module (ColwiseParallel, RowwiseParallel). zero: the same blocks on the cuboid
(2, 1, 1) against fully_shard of each block. Both models live in the same processes and take turns
step by step; a time is that of the slower rank.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from headway.parallel.split_layers import split_model
from headway.parallel.tensor import ProcessGrid, SplitSettings
from headway.plans.tensor_layout import TensorGrid

TARGETS = {"mlp": 1.0, "zero": 1.05}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Mlp(nn.Module):
    def __init__(self, width: int, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def step_of(model: nn.Module, x: Tensor, scale: float = 1.0) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        (square(model, x) * scale).backward()
        optimizer.step()

    return step


def models(kind: str, x: Tensor, width: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Step of ours, step of torch's."""
    torch.manual_seed(0)
    ours, peer = Mlp(width), Mlp(width)
    peer.load_state_dict(ours.state_dict())
    mesh = init_device_mesh("cpu", (2,))
    if kind == "mlp":
        split_model(ours, ProcessGrid.of(TensorGrid.classic(2)), square, x)
        for block in peer.blocks:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return step_of(ours, x), step_of(peer, x)
    settings = SplitSettings(keep=False)
    split_model(ours, ProcessGrid.of(TensorGrid.cuboid(2, 1, 1)), square, x, settings=settings)
    for block in peer.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(peer, mesh=mesh)
    half = x.chunk(2)[dist.get_rank()]
    return step_of(ours, x), step_of(peer, half)


def timed(step: Callable[[], None]) -> float:
    dist.barrier()
    start = time.perf_counter()
    step()
    seconds = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", choices=TARGETS)
    chosen = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for kind in [chosen.only] if chosen.only else TARGETS:
        x = torch.randn(chosen.rows, chosen.width)
        dist.broadcast(x, 0)
        ours, peer = models(kind, x, chosen.width)
        for _ in range(3):
            timed(ours), timed(peer)
        ratios, times = [], []
        for number in range(chosen.rounds):
            order = (ours, peer) if number % 2 else (peer, ours)
            found = {step: timed(step) for step in order}
            ratios.append(found[ours] / found[peer])
            times.append((found[ours], found[peer]))
        if dist.get_rank() == 0:
            mine, theirs = (1e3 * statistics.median(t) for t in zip(*times, strict=True))
            low, high = statistics.quantiles(ratios, n=4)[::2]
            print(
                f"{kind}: {mine:.1f} ms / {theirs:.1f} ms, median of {len(ratios)} ratios "
                f"{statistics.median(ratios):.3f} (target at most {TARGETS[kind]}), quartiles "
                f"{low:.3f} to {high:.3f}; {chosen.rows} rows, width {chosen.width}, "
                f"load {os.getloadavg()[0]:.1f}, {time.strftime('%Y-%m-%d')}",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
