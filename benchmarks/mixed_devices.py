"""Eight V100 and eight P100 in one job: what uneven splits gain over even ones, simulated.

    OMP_NUM_THREADS=1 python benchmarks/mixed_devices.py

Rates and memories are datasheets' (fp32), work, parameters and kept activations are those of the
captured model. Assumed: the same share of the peak on both devices, 60 %, and 50 Gbit/s between
the two nodes, over which a ring sums the gradients while backward runs. Whale (Jia et al. 2022)
measured 1.3 to 1.4 times for data parallelism, about 1.2 times for a pipeline of four stages.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from headway.capture import capture
from headway.cluster.datasheets import datasheet_of
from headway.collective.model.link_fit import LinkFit
from headway.graph.model_graph import ModelGraph
from headway.planner.guidelines.layer_parallelism import LayerTimes, windows
from headway.planner.whale.load_balance import (
    DeviceShare,
    algorithm_1,
    proportional,
)
from headway.schedule.generators.registry import make_schedule
from headway.schedule.stage_costs import StageCosts
from headway.schedule.timing import time_schedule
from headway.units import parse_rate
from headway.workloads.transformer import TransformerConfig, TransformerLM

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from support.big_models import ResNet50, ids, meta
from support.water_filling import water_filling, whole_samples
from support.whale_task_graphs import (
    StageBlock,
    StageDevice,
    UnequalStages,
    by_memory,
    cut_by_shares,
    cut_exactly,
    in_flight,
)

EFFICIENCY = 0.6
LINK = parse_rate("50 Gbit/s")
V100 = StageDevice(
    datasheet_of("v100-32gb").peak["fp32"] * EFFICIENCY, datasheet_of("v100-32gb").memory
)
P100 = {
    "P100 PCIe": StageDevice(9.3e12 * EFFICIENCY, 16 * 2.0**30),  # NVIDIA Tesla P100 PCIe datasheet
    "P100 SXM2": StageDevice(
        datasheet_of("p100").peak["fp32"] * EFFICIENCY, datasheet_of("p100").memory
    ),
}
STATE = {"resnet-50": 3, "bert-large": 4}
"""Copies of the parameters: gradients, and the optimiser's one or two."""


def resnet() -> ModelGraph:
    return capture(ResNet50(), meta(1, 3, 224, 224))


def bert() -> ModelGraph:
    config = TransformerConfig(vocabulary=30522, window=128, width=1024, layers=24, heads=16)
    with torch.device("meta"):
        model = TransformerLM(config)
    return capture(model, ids(1, 128))


def parts(graph: ModelGraph) -> Iterator[tuple[str, list[int]]]:
    """Operators of one block, by the path of its module."""
    found: dict[str, list[int]] = {}
    for place, operator in enumerate(graph.operators):
        path = operator.module.split(".")
        found.setdefault(".".join(path[:2]), []).append(place)
    yield from found.items()


def blocks_of(graph: ModelGraph, state: int, samples: int) -> list[StageBlock]:
    """Pieces of the model for a micro-batch; tied parameters count where they are first."""
    seen: set[str] = set()
    blocks = []
    for _, places in parts(graph):
        operators = tuple(graph.operators[place] for place in places)
        new = {p for o in operators for p in o.parameters} - seen
        seen |= new
        blocks.append(
            StageBlock(
                flops=float(samples * sum(o.flops.total for o in operators)),
                weights=float(state * sum(graph.parameters[p].bytes for p in new)),
                activations=float(samples * sum(graph.saved_by(operators).values())),
            )
        )
    return blocks


def data_step(
    blocks: Sequence[StageBlock], devices: Sequence[StageDevice], batches: Sequence[int]
) -> float:
    """Seconds of a step: gradients of a layer are ready when the slowest device has them."""
    link = LinkFit.of_rate(LINK, 100e-6, len(devices))
    slowest = max(b / d.rate for b, d in zip(batches, devices, strict=True))
    times = [
        LayerTimes(
            forward=block.flops * slowest / 3,
            weight_grad=block.flops * slowest / 3,
            input_grad=block.flops * slowest / 3,
            num_bytes=block.weights,
        )
        for block in blocks
    ]
    return windows(times, link, need="update", weights_first=False).step


def data_parallel(name: str, graph: ModelGraph, kind: str, batch: int) -> None:
    devices = [V100] * 8 + [P100[kind]] * 8
    blocks = blocks_of(graph, 1, 1)
    fixed = float(STATE[name] * graph.parameter_bytes)
    shares = [
        DeviceShare(
            rate=device.rate,
            memory=device.memory,
            scaled=float(batch * graph.saved_bytes),
            fixed=fixed,
        )
        for device in devices
    ]
    even = data_step(blocks, devices, [batch // 16] * 16)
    print(f"  {name}, {kind}, batch {batch}: even {batch // 16} each, {even * 1e3:.0f} ms")
    for label, loads in (
        ("Algorithm 1", algorithm_1(shares).loads),
        ("water filling", water_filling(shares).loads),
    ):
        batches = whole_samples(loads, batch, shares)
        step = data_step(blocks, devices, batches)
        busy = batches[0] * 16 / batch * even / step
        print(
            f"    {label:14s} {batches[0]:3d} and {batches[-1]:3d}: {step * 1e3:5.0f} ms, "
            f"{even / step:.2f} times; V100 busy {busy:.2f} times as much"
        )
    ideal = proportional(shares)
    print(f"    limit without exchange and rounding {1 / 16 / ideal[-1]:.2f}")


def pipeline_step(stages: UnequalStages, microbatches: int) -> float:
    costs = StageCosts(
        forward=tuple(s / 3 for s in stages.seconds),
        input_grad=tuple(s / 3 for s in stages.seconds),
        weight_grad=tuple(s / 3 for s in stages.seconds),
        activation=(1.0,) * len(stages.seconds),
    )
    table = make_schedule("1f1b", stages=len(stages.seconds), microbatches=microbatches)
    return time_schedule(table, costs).makespan


def pipeline(graph: ModelGraph, kind: str, samples: int, microbatches: int) -> None:
    """Four stages on two V100 and two P100, twice."""
    unordered = [V100, P100[kind]] * 2
    devices = [unordered[i] for i in by_memory(unordered)]
    blocks = blocks_of(graph, STATE["bert-large"], samples)
    held = in_flight(4, microbatches)
    alike = [StageDevice(1.0, 1e18)] * 4
    ends = cut_exactly(blocks, alike, held).ends
    edges = (0, *ends)
    even = UnequalStages(
        ends,
        tuple(
            sum(block.flops for block in blocks[a:b]) / device.rate
            for a, b, device in zip(edges, ends, devices, strict=False)
        ),
        (),
    )
    before = pipeline_step(even, microbatches)
    print(
        f"  bert-large, 2 V100 and 2 {kind}, {microbatches} micro-batches of {samples}: even "
        f"{[b - a for a, b in zip(edges, ends, strict=False)]} blocks, {before * 1e3:.0f} ms"
    )
    for label, cut in (("by shares", cut_by_shares), ("exact", cut_exactly)):
        found = cut(blocks, devices, held)
        edges = (0, *found.ends)
        step = pipeline_step(found, microbatches)
        left = min(d.memory - b for d, b in zip(devices, found.bytes, strict=True))
        print(
            f"    {label:9s} {[b - a for a, b in zip(edges, found.ends, strict=False)]} blocks: "
            f"{step * 1e3:.0f} ms, {before / step:.2f} times; least memory left "
            f"{left / 2**30:.1f} GiB"
        )


def main() -> None:
    graphs = {"resnet-50": resnet(), "bert-large": bert()}
    for name, graph in graphs.items():
        print(
            f"{name}: {graph.flops.total / 1e9:.1f} GFLOP and {graph.saved_bytes / 2**20:.0f} MiB "
            f"kept per sample, {graph.parameter_bytes / 2**20:.0f} MiB of parameters"
        )
    print("data parallel, 8 V100 and 8 P100")
    for kind in P100:
        data_parallel("resnet-50", graphs["resnet-50"], kind, 1024)
        data_parallel("bert-large", graphs["bert-large"], kind, 512)
    print("pipeline of four stages")
    for kind in P100:
        pipeline(graphs["bert-large"], kind, 8, 16)


if __name__ == "__main__":
    main()
