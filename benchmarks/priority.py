"""The exact priority exchange against DDP on shaped links: overlap across the step's border.

    python benchmarks/priority.py ["100 Mbit/s"] [rounds] [sleep|real] [names of candidates]

Two ranks on two emulated nodes (root), 25 layers of 512 x 512 (25 MiB of gradients). With `sleep`
the computation is a calibrated sleep per layer, forward : backward = 1 : 2, as long as one
all-reduce of all gradients takes (the point at which overlap matters most): a claim about overlap,
not about speed of arithmetic. With `real` the layers compute, on larger inputs. Peers in the same
processes and on the same links, in turn: DDP with its defaults, DDP with the best of its bucket
sizes and gradient views. The bound is max(forward + backward, communication).
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import emulated
import headway

LAYERS, WIDTH = 25, 512
CAPS = (1, 2, 5, 10)
STEPS = 8


class Pause(torch.autograd.Function):
    """Takes time in forward and backward, as a layer would."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_seconds = backward
        time.sleep(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_seconds)
        return grad, None, None


class Layer(nn.Module):
    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.times = forward, backward

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.weight
        return Pause.apply(x, *self.times) if any(self.times) else x.tanh()


def build(compute: float) -> nn.Sequential:
    torch.manual_seed(0)
    forward, backward = compute / 3 / LAYERS, compute * 2 / 3 / LAYERS
    return nn.Sequential(*[Layer(forward, backward) for _ in range(LAYERS)])


class WithDDP:
    def __init__(self, model: nn.Module, hook: Any = None, **options: Any) -> None:
        self.model = DistributedDataParallel(model, **options)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        if hook is not None:
            self.model.register_comm_hook(None, hook)

    def step(self, x: Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(x).square().mean().backward()
        self.optimizer.step()

    def finish(self) -> None:
        pass


class WithHeadway:
    def __init__(self, model: nn.Module, **choices: Any) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        self.exchange = headway.Exchange(model, self.optimizer, **choices)

    def step(self, x: Tensor) -> None:
        self.model(x).square().mean().backward()
        self.exchange.step()

    def finish(self) -> None:
        self.exchange.flush()


def measure(one: Any, x: Tensor, steps: int) -> float:
    """Seconds per step in the steady state, as in a long run: two steps before are not counted."""
    dist.barrier()
    for _ in range(2):
        one.step(x)
    start = time.perf_counter()
    for _ in range(steps):
        one.step(x)
    took = (time.perf_counter() - start) / steps
    one.finish()
    dist.barrier()
    return took


def communication(num_bytes: int) -> float:
    """Best of three all-reduces of all gradients."""
    buffer, best = torch.zeros(num_bytes // 4), float("inf")
    for _ in range(3):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(buffer)
        best = min(best, time.perf_counter() - start)
    return best


def real_input(target: float) -> Tensor:
    """As many rows as make forward and backward take `target` seconds."""
    model, rows = build(0.0), 64
    while True:
        x = torch.randn(rows, WIDTH)
        model(x).square().mean().backward()
        start = time.perf_counter()
        model(x).square().mean().backward()
        took = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        if took > target / 3 or rows > 2**17:
            return torch.randn(max(1, int(rows * target / float(took))), WIDTH)
        rows *= 2


def body(world: Any, rounds: int, real: bool, wanted: tuple[str, ...]) -> dict[str, Any]:
    torch.set_num_threads(1)
    wire = communication(LAYERS * WIDTH * WIDTH * 4)
    compute = 0.0 if real else wire
    x = real_input(wire) if real else torch.randn(1, WIDTH)
    alone = build(compute)

    class Alone:
        def step(self, x: Tensor) -> None:
            alone.zero_grad()
            alone(x).square().mean().backward()

        def finish(self) -> None:
            pass

    candidates: dict[str, Any] = {
        "compute alone": Alone(),
        "DDP default": WithDDP(build(compute)),
        **{
            f"DDP {cap} MiB, views": WithDDP(
                build(compute), bucket_cap_mb=cap, gradient_as_bucket_view=True
            )
            for cap in CAPS
        },
        "headway priority": WithHeadway(build(compute), priority=True),
        "DDP default, fp16": WithDDP(build(compute), hook=fp16_compress_hook),
        "DDP 2 MiB, fp16": WithDDP(
            build(compute), hook=fp16_compress_hook, bucket_cap_mb=2, gradient_as_bucket_view=True
        ),
        "headway fp16": WithHeadway(build(compute), bucket="1 MiB", compress="fp16"),
    }
    if wanted:
        candidates = {name: one for name, one in candidates.items() if name in wanted}
    for one in candidates.values():
        measure(one, x, 4)
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, one in candidates.items():
            times[name].append(measure(one, x, STEPS))
    remarks = candidates["headway priority"].exchange.remarks
    return {"wire": wire, "times": times, "remarks": remarks}


def report(found: dict[str, Any], rate: str) -> None:
    times = found["times"]
    medians = {name: statistics.median(values) for name, values in times.items()}
    best = min((name for name in times if "views" in name), key=lambda name: medians[name])
    bound = max(medians["compute alone"], found["wire"])
    print(f"{rate}: all-reduce of 25 MiB {found['wire']:.3f} s; bound {bound:.3f} s")
    for name, values in times.items():
        rounded = [round(value, 3) for value in values]
        print(f"  {name:24} median {medians[name]:.3f}  best {min(values):.3f}  {rounded}")
    own = times["headway priority"]
    for peer, target in (("DDP default", 1.7), (best, 1.2)):
        ratios = [a / b for a, b in zip(times[peer], own, strict=True)]
        print(
            f"  {peer} / headway: median {statistics.median(ratios):.2f}, best / best "
            f"{min(times[peer]) / min(own):.2f} (goal {target})"
        )
    print(
        f"  bound / headway: median {bound / medians['headway priority']:.3f}, best "
        f"{bound / min(own):.3f} (goal 0.92)"
    )
    half = times.get("headway fp16", [])
    goals = {"DDP default": 1.9, "DDP default, fp16": 1.45, "DDP 2 MiB, fp16": 1.0}
    for peer, target in goals.items() if half else ():
        ratios = [a / b for a, b in zip(times[peer], half, strict=True)]
        print(
            f"  {peer} / headway fp16: median {statistics.median(ratios):.2f}, best / best "
            f"{min(times[peer]) / min(half):.2f} (goal {target})"
        )
    print("  " + "; ".join(found["remarks"]))


if __name__ == "__main__":
    rate = sys.argv[1] if len(sys.argv) > 1 else "100 Mbit/s"
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    real = len(sys.argv) > 3 and sys.argv[3] == "real"
    wanted = tuple(sys.argv[4:])
    done = emulated.run(nodes=2, per_node=1, rate=rate, body=body, arguments=(rounds, real, wanted))
    report(done[0], rate)
