"""How long the search for a plan takes, and how much memory.

    OMP_NUM_THREADS=1 python benchmarks/plan_search.py [39b resnet inception 175b 1000] [--fastest]

Building and capturing the model on the meta device is counted apart. Bars: GPT-39B on 64 devices
5 s (Alpa 2,393 s), 175B on 1,024 10 s, 1,000 layers on 1,024 10 s, ResNet-50 on 64 1 s (FlexFlow
158 s), Inception-v3 on 64 2 s (FlexFlow 1,278 s).
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path

import torch

from headway.capture import capture
from headway.cluster.presets import of_preset
from headway.cost.machines import machine_of
from headway.graph.model_graph import ModelGraph
from headway.graph.operator_fusion import fuse_light_operators
from headway.planner.estimate.degrees import describe_degrees
from headway.planner.estimate.operators import PlanningWorkload
from headway.planner.search.branch_and_bound import find_plans
from headway.planner.search.request import PlanRequest
from headway.units import format_bytes, format_seconds
from headway.workloads.transformer import TransformerConfig, TransformerLM

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

GPT = {"39b": (48, 8192, 64, 1536, 64), "175b": (96, 12288, 96, 1536, 1024)}
"""Layers, width, heads, batch and devices."""
GPT["1000"] = (1000, 4096, 32, 1024, 1024)
SAMPLES = 64


def gpt(layers: int, width: int, heads: int) -> ModelGraph:
    config = TransformerConfig(
        vocabulary=51200, window=2048, width=width, layers=layers, heads=heads
    )
    with torch.device("meta"):
        model = TransformerLM(config).bfloat16()
        return capture(model, torch.empty(SAMPLES, 2048, dtype=torch.int64))


def resnet() -> ModelGraph:
    from support.big_models import ResNet50

    with torch.device("meta"):
        return capture(ResNet50(), torch.empty(SAMPLES, 3, 224, 224))


def inception() -> ModelGraph:
    from inception import InceptionV3

    with torch.device("meta"):
        return capture(InceptionV3(), torch.empty(SAMPLES, 3, 299, 299))


PICTURES = {"resnet": resnet, "inception": inception}
NAMES = ("39b", "resnet", "inception", "175b", "1000")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="MODEL", help=f"of {', '.join(NAMES)}; all")
    parser.add_argument("--fastest", action="store_true", help="the fastest plan, no frontier")
    asked = parser.parse_args()
    if unknown := [name for name in asked.names if name not in NAMES]:
        parser.error(f"no model {', '.join(unknown)}; there are {', '.join(NAMES)}")
    objective = "fastest" if asked.fastest else "frontier"
    for name in asked.names or NAMES:
        begin = time.perf_counter()
        if name in PICTURES:
            graph, batch, devices = PICTURES[name](), 4096, 64
        else:
            *shape, batch, devices = GPT[name]
            graph = gpt(*shape)
        captured = time.perf_counter()
        work = PlanningWorkload(graph=fuse_light_operators(graph), samples=SAMPLES)
        folded = time.perf_counter()
        machine = machine_of(of_preset("dgx-a100", nodes=devices // 8))
        question = PlanRequest(
            work=work, machine=machine, devices=(devices,), batch=batch, objective=objective
        )
        used = time.process_time()
        outcome = find_plans(question)
        used, done = time.process_time() - used, time.perf_counter()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(
            f"{name} on {devices}, {objective}: capture {captured - begin:.1f} s, fold "
            f"{folded - captured:.1f} s, search {done - folded:.2f} s ({used:.2f} s of "
            f"processor); {outcome.considered} "
            f"combinations, {outcome.opened} opened, {len(outcome.points)} plans, gap "
            f"{outcome.gap:.1%}; {peak:.2f} GiB at most"
        )
        for point in outcome.points[:6]:
            print(
                f"   {format_seconds(point.seconds)}, {format_bytes(point.bytes)}: "
                f"{describe_degrees(point.degrees)}"
            )


if __name__ == "__main__":
    main()
