"""Predicted against measured: how well the model of the exchange foretells a step.

    python benchmarks/exchange_model.py ["100 Mbit/s"] [rounds] [compute / communication ...]

Two ranks on two emulated nodes (root), the 25 layers of priority.py with calibrated sleeps. The
link is fitted by probes, the computation is timed alone; from these numbers `collective.predict`
foretells the step of DDP with several bucket sizes and of headway's exchanges, before they run.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

import torch
from torch import nn

import emulated
from headway.collective.compression import parse_compression
from headway.collective.model.bucket_cost import ExchangeNetwork, ExchangeScheme
from headway.collective.model.gradient_buckets import backward_order, ddp_buckets
from headway.collective.model.link_fit import LinkFit
from headway.collective.model.scheme_ranking import (
    TYPICAL_COMPRESSOR_SPEEDS,
    GradientLayer,
    gradient_moments,
    predict_exchange,
)
from headway.comm.tuning.autotuning import probe_link
from priority import LAYERS, WIDTH, WithDDP, WithHeadway, build, measure

MIB = 2**20
DDP = {"DDP default": 25, "DDP 5 MiB": 5, "DDP 2 MiB": 2}
OWN: dict[str, tuple[dict[str, Any], ExchangeScheme]] = {
    "headway, fitted": ({"bucket": "auto"}, ExchangeScheme()),
    "headway, fitted, fp16": (
        {"bucket": "auto", "compress": "fp16"},
        ExchangeScheme(compression=parse_compression("fp16")),
    ),
    "headway, priority": ({"bucket": "auto", "priority": True}, ExchangeScheme(priority=True)),
}


class Alone:
    """No exchange at all."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def step(self, x: torch.Tensor) -> None:
        self.model.zero_grad()
        self.model(x).square().mean().backward()

    def finish(self) -> None:
        pass


def foretell(compute: float, link: LinkFit) -> dict[str, float]:
    """Seconds of a step of each, from the time of the computation and the link."""
    layers = [
        GradientLayer(
            name=str(i),
            shapes=((WIDTH, WIDTH),),
            forward=compute / 3 / LAYERS,
            backward=compute * 2 / 3 / LAYERS,
        )
        for i in range(LAYERS)
    ]
    network = ExchangeNetwork.flat(link)
    sizes = [layer.num_bytes for layer in layers]
    order = backward_order(gradient_moments(layers)[0])
    found = {}
    for name, cap in DDP.items():
        buckets = ddp_buckets(sizes, order, (MIB, cap * MIB))
        found[name] = predict_exchange(
            ExchangeScheme(), layers, network, TYPICAL_COMPRESSOR_SPEEDS, buckets=buckets
        ).step
    for name, (_, scheme) in OWN.items():
        found[name] = predict_exchange(scheme, layers, network, TYPICAL_COMPRESSOR_SPEEDS).step
    return found


def body(world: Any, rounds: int, ratio: float) -> dict[str, Any]:
    x = torch.randn(1, WIDTH)
    link = probe_link(torch.device("cpu"))
    compute = ratio * link.seconds(LAYERS * WIDTH * WIDTH * 4)
    candidates: dict[str, Any] = {"compute alone": Alone(build(compute))}
    for name, cap in DDP.items():
        candidates[name] = WithDDP(
            build(compute), bucket_cap_mb=cap, gradient_as_bucket_view=cap < 25
        )
    for name, (choices, _) in OWN.items():
        candidates[name] = WithHeadway(build(compute), **choices)
    for one in candidates.values():
        measure(one, x, 6)
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, one in candidates.items():
            times[name].append(measure(one, x, 5))
    return {"link": link, "times": times}


def report(found: dict[str, Any], ratio: float) -> None:
    times = found["times"]
    compute = statistics.median(times.pop("compute alone"))
    print(f"compute / communication {ratio:g}: compute {compute:.3f} s; {found['link'].explain()}")
    print(f"  {'':24}{'predicted':>10}{'median':>10}{'best':>10}{'measured / predicted':>24}")
    predicted = foretell(compute, found["link"])
    for name, values in times.items():
        median, best = statistics.median(values), min(values)
        print(
            f"  {name:24}{predicted[name]:>10.3f}{median:>10.3f}{best:>10.3f}"
            f"{median / predicted[name]:>24.3f}"
        )


if __name__ == "__main__":
    rate = sys.argv[1] if len(sys.argv) > 1 else "100 Mbit/s"
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    for ratio in [float(text) for text in sys.argv[3:]] or [1.0]:
        done = emulated.run(nodes=2, per_node=1, rate=rate, body=body, arguments=(rounds, ratio))
        report(done[0], ratio)
