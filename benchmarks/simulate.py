"""How long it takes to plan a step of 16,384 devices and to play it event by event.

    OMP_NUM_THREADS=1 python benchmarks/simulate.py [175b 1t] [--devices 16384]

Bar: plan and simulate at 16,384 devices within 30 s. (Piper: "minutes" for the plan alone at 2,048;
SimAI and ASTRA-sim: hours for the step.) Building and capturing the model on the meta device is
counted apart. The plan is the fastest that the search finds, which may
have a tensor axis and ZeRO; then one rank is made twice as slow.
"""

from __future__ import annotations

import argparse
import resource
import time
from dataclasses import replace

import torch

from headway.capture import capture
from headway.cluster.presets import of_preset
from headway.cost.machines import machine_of
from headway.graph.operator_fusion import fuse_light_operators
from headway.planner.estimate.degrees import describe_degrees
from headway.planner.estimate.operators import PlanningWorkload
from headway.planner.export.to_simulation import step_of_point
from headway.planner.search.branch_and_bound import find_plans
from headway.planner.search.request import PlanRequest
from headway.simulator.ranks import StepFaults
from headway.simulator.simulation import simulate_training_step
from headway.units import format_bytes, format_seconds
from headway.workloads.transformer import TransformerConfig, TransformerLM

GPT = {"175b": (96, 12288, 96), "1t": (128, 25600, 160)}
"""Layers, width and heads (Narayanan et al. 2021, table 1)."""
SAMPLES = 64
BATCH = 16384
BAR = 30.0


def work_of(name: str) -> tuple[PlanningWorkload, float]:
    layers, width, heads = GPT[name]
    begin = time.perf_counter()
    config = TransformerConfig(
        vocabulary=51200, window=2048, width=width, layers=layers, heads=heads
    )
    with torch.device("meta"):
        model = TransformerLM(config).bfloat16()
        graph = capture(model, torch.empty(SAMPLES, 2048, dtype=torch.int64))
    return PlanningWorkload(
        graph=fuse_light_operators(graph), samples=SAMPLES
    ), time.perf_counter() - begin


class Clock:
    """Seconds since it was made: on the wall, and of this process's processor."""

    def __init__(self) -> None:
        self._wall, self._own = time.perf_counter(), time.process_time()

    @property
    def wall(self) -> float:
        return time.perf_counter() - self._wall

    def __str__(self) -> str:
        return f"{self.wall:.2f} s ({time.process_time() - self._own:.2f} s of processor)"


def run(name: str, devices: int) -> None:
    work, captured = work_of(name)
    start = Clock()
    machine = machine_of(of_preset("dgx-a100", nodes=devices // 8))
    question = PlanRequest(
        work=work, machine=machine, devices=(devices,), batch=BATCH, objective="fastest"
    )
    outcome = find_plans(question)
    planned, middle = str(start), Clock()
    point = outcome.best
    step = step_of_point(point, outcome.search)
    found = simulate_training_step(step)
    simulated, verdict = str(middle), "within" if start.wall <= BAR else "NOT within"
    print(
        f"GPT-{name} on {devices} devices: capture {captured:.1f} s; plan {planned}, simulate "
        f"{simulated}; together {start}, {verdict} {BAR:g} s\n"
        f"   {describe_degrees(point.degrees)}\n"
        f"   priced {format_seconds(point.seconds)}, played {format_seconds(found.seconds)}; "
        f"bubble {found.bubble:.1%}, memory {format_bytes(found.peak)}\n"
        f"   {found.tasks} tasks; {len(found.accounts)} of {found.ranks} ranks"
    )
    again = Clock()
    slow = simulate_training_step(replace(step, faults=StepFaults(slow={devices // 2: 2.0})))
    print(
        f"   with rank {devices // 2} twice as slow: {format_seconds(slow.seconds)}, "
        f"{slow.tasks} tasks, {len(slow.accounts)} ranks in {again}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=["175b"])
    parser.add_argument("--devices", type=int, default=16384)
    given = parser.parse_args()
    for name in given.names:
        run(name, given.devices)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"memory of this process: at most {peak:.2f} GiB")


if __name__ == "__main__":
    main()
