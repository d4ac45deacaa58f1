"""Two ranks of one thread with half a sample each, against one rank with all of it; and memory.

    python benchmarks/spatial.py            # times, in pairs: unsplit and split in turn
    python benchmarks/spatial.py memory     # peak of live tensors of a step, 1 to 8 ranks

Rank 1 sleeps while rank 0 runs the unsplit model. Each pair has its ratio; the median is printed.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from headway.parallel.spatial import SpatialContext, halo_exchange
from pairs import torchrun

PAIRS = 9


def block(entering: int, leaving: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv3d(entering, leaving, 3, padding=1, bias=False),
        nn.BatchNorm3d(leaving),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """Three levels of two blocks, as the 3-D U-Net of Cicek et al. with fewer channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList()
        self.up = nn.ModuleList()
        self.mix = nn.ModuleList()
        entering = 1
        for size in sizes:
            self.down.append(nn.Sequential(block(entering, size), block(size, size)))
            entering = size
        for size in reversed(sizes[:-1]):
            self.up.append(nn.ConvTranspose3d(2 * size, size, 2, 2))
            self.mix.append(nn.Sequential(block(2 * size, size), block(size, size)))
        self.last = nn.Conv3d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for number, part in enumerate(self.down):
            x = part(F.max_pool3d(x, 2) if number else x)
            skips.append(x)
        for up, mix, skip in zip(self.up, self.mix, reversed(skips[:-1]), strict=True):
            x = mix(torch.cat([up(x), skip], dim=1))
        return self.last(x)


class Cosmo(nn.Module):
    """CosmoFlow's body (convolution, LeakyReLU, overlapping average pool) and a classifier."""

    def __init__(self, side: int, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        entering = 4
        while side > 8:
            layers += [
                nn.Conv3d(entering, width, 3, padding=1),
                nn.LeakyReLU(0.3),
                nn.AvgPool3d(3, 2, 1),
            ]
            entering, width, side = width, 2 * width, side // 2
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(entering * side**3, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return self.head(y.flatten(1))


def convolution(channels: int, side: int) -> tuple[nn.Module, Tensor, Callable[..., Tensor]]:
    model = nn.Conv3d(channels, channels, 3, padding=1)
    return model, torch.randn(1, channels, side, side, side), lambda m, x: m(x).square().mean()


def unet(width: int, side: int) -> tuple[nn.Module, Tensor, Callable[..., Tensor]]:
    labels = torch.randint(0, 3, (1, side, side, side))
    x = torch.randn(1, 1, side, side, side)
    return UNet(width), x, lambda m, x: F.cross_entropy(m(x), labels)


CASES = {
    "conv3d 8 -> 8 at 48^3": (lambda: convolution(8, 48), 1.6),
    "conv3d 16 -> 16 at 64^3": (lambda: convolution(16, 64), 1.6),
    "U-Net 8, 16, 32 at 48^3": (lambda: unet(8, 48), 1.5),
}


def step(model: nn.Module, x: Any, loss: Callable[..., Tensor], copies: int) -> None:
    """Forward, backward, the sum of gradients, and the update."""
    model.zero_grad()
    (loss(model, x) / copies).backward()
    grads = [p.grad for p in model.parameters()]
    if copies > 1:
        flat = torch.cat([g.flatten() for g in grads])
        dist.all_reduce(flat)
        torch._foreach_copy_(grads, [p.view_as(g) for p, g in zip(
            flat.split([g.numel() for g in grads]), grads, strict=True)])  # fmt: skip
    with torch.no_grad():
        torch._foreach_add_(list(model.parameters()), grads, alpha=-1e-6)


def timed(run: Callable[[], None], *, mine: bool) -> float:
    dist.barrier()
    start = time.perf_counter()
    if mine:
        run()
    dist.barrier()
    return time.perf_counter() - start


def worker() -> None:
    """One of the two ranks."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    first = dist.get_rank() == 0
    for overlap in (False, True):
        # Width: for depth, torch leaves oneDNN (N C D H <= 20,480 on one thread) in half a sample.
        context = SpatialContext.of({-1: dist.group.WORLD}, overlap=overlap)
        for name, (make, target) in CASES.items():
            if overlap and name.startswith("U-Net"):
                continue
            torch.manual_seed(0)
            model, whole, loss = make()
            part = context.split(whole.requires_grad_())
            part.local = part.local.detach().clone().requires_grad_()
            runs = {
                "one": (lambda: step(model, whole, loss, 1), first),  # noqa: B023
                "two": (lambda: step(model, part, loss, context.copies), True),  # noqa: B023
            }
            for run, mine in runs.values():
                timed(run, mine=mine), timed(run, mine=mine)
            pairs, busy = [], {"one": 0.0, "two": 0.0}
            for number in range(PAIRS):
                times = {}
                for key in ("one", "two") if number % 2 else ("two", "one"):
                    before = time.process_time()
                    times[key] = timed(runs[key][0], mine=runs[key][1])
                    busy[key] += time.process_time() - before
                pairs.append((times["one"], times["two"]))
            if first:
                ratio = statistics.median(a / b for a, b in pairs)
                one, two = (min(column) for column in zip(*pairs, strict=True))
                with open(sys.argv[2], "a") as report:
                    print(
                        f"{name}{', overlapped' if overlap else ''}: median of ratios {ratio:.2f}, "
                        f"shortest {1e3 * one:.1f} ms / {1e3 * two:.1f} ms = {one / two:.2f}, "
                        f"processor {busy['one'] / busy['two']:.2f} (target {target})   "
                        f"load {os.getloadavg()[0]:.1f}",
                        file=report,
                    )
    dist.destroy_process_group()


class Live(TorchDispatchMode):
    """The peak of bytes in living storages."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.peak, self.known = 0, 0, set()

    def note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key and key not in self.known:
            self.known.add(key)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.gone, key, storage.nbytes())

    def gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, Tensor):
                self.note(value)
        return result


def memory() -> None:
    """One rank: its peak in a step of CosmoFlow's body, split along the depth."""
    side = 64
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Cosmo(side, 8)
    context = SpatialContext.of({-3: dist.group.WORLD})
    shape = (1, 4, side, side, side)
    received = []
    receive = halo_exchange.AxisMessages.receive

    def counted(flight: halo_exchange.AxisMessages, into: Tensor, peer: int) -> None:
        received.append(into.nbytes)
        receive(flight, into, peer)

    halo_exchange.AxisMessages.receive = counted
    with Live() as live:
        part = context.adopt(torch.randn([b - a for a, b in context.ranges(shape)]), shape)
        loss = model(part).square().mean() / context.copies
        halos = 2 * sum(received[:-1])  # as pieces, and in boxes; the last is the gather
        loss.backward()
    fixed = sum(p.nbytes for p in model.parameters())  # gradients: every rank has all of them
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, (live.peak - fixed, halos))
    if dist.get_rank() == 0:
        with open(sys.argv[2], "a") as report:
            print(*max(found), file=report)
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        {"times": worker, "memory": memory}[sys.argv[1]]()
    elif sys.argv[1:] == ["memory"]:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report"
            for processes in (1, 2, 4, 8):
                torchrun("spatial.py", "memory", str(report), processes=processes)
            rows = [[int(n) for n in line.split()] for line in report.read_text().splitlines()]
        for processes, (peak, halos) in zip((1, 2, 4, 8), rows, strict=True):
            halos = halos if processes > 1 else 0
            share = rows[0][0] / processes + halos
            print(
                f"{processes} ranks: peak of activations {peak / 2**20:.2f} MiB; "
                f"1/{processes} and halos of {halos / 2**20:.2f} MiB: {share / 2**20:.2f} MiB; "
                f"ratio {peak / share:.2f}"
            )
    else:
        print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, torch {torch.__version__}")
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report"
            torchrun("spatial.py", "times", str(report))
            print(report.read_text())
