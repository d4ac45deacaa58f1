"""How long the search takes on 64 GPUs of two types.

    OMP_NUM_THREADS=1 python benchmarks/mixed_search.py [fastest] [frontier]

GPT-39B (48 layers of 8192) on 32 A100 of 80 GB and 32 V100 of 16 GB, batch 1536; capture apart.
Bar: 20 s (Metis 600 s and a profile of 19 minutes).
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

from headway.cluster.presets import of_preset
from headway.cost.machines import machine_of
from headway.graph.operator_fusion import fuse_light_operators
from headway.planner.estimate.operators import PlanningWorkload
from headway.planner.search.branch_and_bound import find_plans
from headway.planner.search.plan_point import describe_devices, describe_point
from headway.planner.search.request import DeviceGroup, PlanRequest
from headway.units import format_bytes, format_seconds
from plan_search import GPT, SAMPLES, gpt

COUNTS = {"a100": 32, "v100": 32}
OBJECTIVES = ("fastest", "frontier")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = ", ".join(OBJECTIVES)
    parser.add_argument("objectives", nargs="*", metavar="OBJECTIVE", help=f"{known}; else both")
    asked = parser.parse_args().objectives
    if unknown := [word for word in asked if word not in OBJECTIVES]:
        parser.error(f"no objective {', '.join(unknown)}; there are {known}")
    *shape, batch, _ = GPT["39b"]
    work = PlanningWorkload(graph=fuse_light_operators(gpt(*shape)), samples=SAMPLES)
    new, old = (machine_of(of_preset(name, nodes=4)) for name in ("dgx-a100", "p3.16xlarge"))
    machines = {"a100": new, "v100": replace(old, network=new.network)}
    for objective in asked or OBJECTIVES:
        groups = tuple(
            DeviceGroup(kind=kind, machine=machines[kind], count=n) for kind, n in COUNTS.items()
        )
        question = PlanRequest(
            machine=groups[0].machine, groups=groups, work=work, batch=batch, objective=objective
        )
        begin, used = time.perf_counter(), time.process_time()
        found = find_plans(question)
        print(
            f"{objective}: {time.perf_counter() - begin:.1f} s, {time.process_time() - used:.1f} s "
            f"of processor; {found.considered} combinations, {found.opened} opened, "
            f"{len(found.points)} plans, gap {found.gap:.1%}"
        )
        for point in found.points[:5]:
            print(
                f"   {format_seconds(point.seconds)}, {format_bytes(point.bytes)}, "
                f"{describe_devices(point)}: {describe_point(point)}; units "
                f"{[stage.stop - stage.start for stage in point.stages]}"
            )


if __name__ == "__main__":
    main()
