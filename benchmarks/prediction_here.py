"""Predicted against measured step time of five models on this machine, two processes.

    python benchmarks/prediction_here.py [--rounds 3] [--seconds 12] [--steps 6]
        [--models prediction_models ...] [--kinds data,pipe]

Two ranks take turns: they measure the machine as `headway cluster measure -n 2` does, then train
some steps of each model, with data parallelism and as a pipeline, and so on, so that both see the
machine in the same states: its pace changes by a fifth within minutes. Each measurement alone
prices every plan; the prediction of a plan is the median over the rounds, its measured time the
median over the steps of all rounds. None of the models is in the measurement. Beside the five there
are `prediction_others`, held out from nearly all work on the prices, `prediction_small`, of a few
milliseconds, and `prediction_fresh`, written last and run once. Ctrl-C and SIGTERM end with what is
known after a whole round.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from statistics import fmean, median
from typing import Any, NoReturn

import numpy as np
import torch

from headway.api.recipe_workload import with_measured_optimizer
from headway.cluster import Cluster
from headway.cost.cluster_fit import cluster_of_readings
from headway.cost.machines import machine_of
from headway.data import RankBatch
from headway.planner.estimate.operators import PlanningWorkload
from headway.planner.explain.step_parts import step_parts
from headway.planner.search.branch_and_bound import PlanSearch
from headway.planner.search.plan_conversion import point_of
from headway.planner.search.plan_point import Point
from headway.planner.search.request import PlanRequest
from headway.plans import PipelinePlan, Plan, data_parallel, pipelined
from headway.run.distributed.world import World
from headway.run.executor import Executor
from headway.run.measure.cluster import measure_in
from headway.run.measure.recipe_model import recipe_graph
from headway.run.recipe.factory import load_recipe
from headway.run.step.setup import find_world
from headway.units import format_seconds

MODELS = "prediction_models"
PLANS = ("data", "pipe")
_MOST_STEPS, _SECONDS = 40, 0.4
HERE = Path(__file__).parent


@dataclass
class Job:
    """One plan of one model.

    Attributes:
        point: As each round's measurement prices it, with the parts of its step.
        times: Of each counted step: its seconds, those of reading, and of kinds of instructions.
    """

    reference: str
    kind: str
    run: Executor
    batches: Iterator[RankBatch]
    predicted: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    times: list[dict[str, float]] = field(default_factory=list)

    def step(self) -> dict[str, float]:
        start = time.perf_counter()
        batch = next(self.batches)
        begun = time.perf_counter()
        self.run.step(batch)
        found = {"step": time.perf_counter() - start, "data": begun - start}
        for span in self.run.record.spans:
            found[span.kind] = found.get(span.kind, 0.0) + span.end - span.start
        return found


def references_of(models: list[str]) -> Iterator[str]:
    """Recipes: all of a module, or some of it."""
    for model in models:
        module, _, names = model.partition(":")
        for name in names.split(",") if names else import_module(module).NAMES:
            yield f"{module}:{name}"


def steps_of(job: Job, least: int) -> int:
    """Of a round: more of short ones."""
    return max(least, min(_MOST_STEPS, int(_SECONDS / job.predicted[-1][0])))


def plan_of(kind: str, batch: int) -> Plan:
    """Data parallel, or a pipeline of two stages with four micro-batches."""
    if kind == "data":
        return data_parallel(batch, processes=2)
    pipeline = PipelinePlan(schedule="1f1b", microbatches=4)
    return pipelined(batch, processes=2, stages=2, pipeline=pipeline)


@cache
def captured(reference: str) -> tuple[PlanningWorkload, int]:
    graph, samples, batch, _ = recipe_graph(reference)
    return PlanningWorkload(graph=graph, samples=samples), batch


def engine_of(reference: str, cluster: Cluster) -> PlanSearch:
    work, batch = captured(reference)
    machine = with_measured_optimizer(machine_of(cluster), cluster, load_recipe(reference))
    return PlanSearch(
        PlanRequest(work=work, machine=machine, devices=(2,), batch=batch, tensor=(1,), zero=(0,))
    )


def priced(plan: Plan, engine: PlanSearch) -> tuple[float, dict[str, float]]:
    point = point_of(plan, engine)
    return point.seconds, {part.name: part.seconds for part in step_parts(engine.question, point)}


def with_cut(plan: Plan, engine: PlanSearch) -> Plan:
    """With the cut that the cost model takes: what is priced is what runs."""
    if plan.pipe_degree == 1:
        return plan
    point: Point = point_of(plan, engine)
    cut = tuple(engine.row[stage.start].module for stage in point.stages[1:])
    return replace(plan, pipeline=replace(plan.pipeline, cut=cut))


def job_of(reference: str, kind: str, cluster: Cluster, world: World) -> Job:
    """Ready to run; both ranks make the same, as the measurement is the same for both."""
    recipe, engine = load_recipe(reference), engine_of(reference, cluster)
    plan = with_cut(plan_of(kind, engine.question.batch), engine)
    torch.manual_seed(recipe.seed)
    model = recipe.model()
    run = Executor(
        model, recipe.optimizer(model), loss=recipe.loss, plan=plan, clip=recipe.clip, world=world
    )
    return Job(reference, kind, run, iter(run.batches(recipe.data(), epochs=None)))


def work(asked: argparse.Namespace) -> None:
    """One rank."""
    torch.set_num_threads(1)
    world, jobs = find_world(), list[Job]()
    references, kinds = list(references_of(asked.models)), asked.kinds.split(",")
    stamp = f"{time.strftime('%Y-%m-%d')}, torch {torch.__version__}"
    for number in range(asked.rounds):
        start = time.perf_counter()
        cluster = cluster_of_readings(measure_in(world, asked.seconds), stamp)
        measured = time.perf_counter() - start
        if not jobs:
            jobs = [job_of(r, kind, cluster, world) for r in references for kind in kinds]
        cold = 3 if number == 0 else 1
        for job in jobs:
            job.predicted.append(priced(job.run.plan, engine_of(job.reference, cluster)))
            world.barrier("the next plan")
            for step in range(steps_of(job, asked.steps) + cold):
                found = job.step()
                if step >= cold:
                    job.times.append(found)
        if world.rank == 0:
            seconds = time.perf_counter() - start
            print(f"round {number}: measured in {measured:.0f} of {seconds:.0f} s", flush=True)
            told = [(j.reference, j.kind, j.predicted, j.times) for j in jobs]
            asked.found.write_text(json.dumps(told))


def processor_seconds() -> float:
    """Of the whole machine since it started."""
    words = Path("/proc/stat").read_text().split("\n")[0].split()[1:9]
    ticks = list(map(int, words))
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def ranked(values: list[float]) -> np.ndarray:
    return np.argsort(np.argsort(values)).astype(float)


def summary(rows: list[Any]) -> None:
    """Signed errors of each plan, their mean sizes, and the rank correlation."""
    table: list[tuple[str, str, float, float, float]] = []
    for reference, kind, predicted, times in rows:
        expected = median(seconds for seconds, _ in predicted)
        steps = [found["step"] for found in times]
        middle, quartile = median(steps), float(np.quantile(steps, 0.25))
        module, _, name = reference.partition(":")
        table.append((module, kind, expected, middle, quartile))
        names = dict.fromkeys(name for _, found in predicted for name in found)
        said = {n: median(found.get(n, 0.0) for _, found in predicted) for n in names}
        names = dict.fromkeys(name for found in times for name in found if name != "step")
        seen = {n: median(found.get(n, 0.0) for found in times) for n in names}
        print(
            f"{name:12s} {kind:5s} predicted {format_seconds(expected):8s} "
            f"measured {format_seconds(middle):8s} {expected / middle - 1:+6.1%}   quartile "
            f"{format_seconds(quartile):8s} {expected / quartile - 1:+6.1%}"
        )
        for found in (said, seen):
            shown = [f"{k} {format_seconds(v)}" for k, v in found.items() if v > 1e-4]
            print(f"{'':18s} ({', '.join(shown)})")
    for module in dict.fromkeys(row[0] for row in table):
        own = [row for row in table if row[0] == module]
        for place, name in ((3, "median"), (4, "quartile")):
            errors = [(row[1], abs(row[2] / row[place] - 1.0)) for row in own]
            means = {k: fmean(e for kind, e in errors if kind == k) for k in dict(errors)}
            each = ", ".join(f"{kind} {error:.1%}" for kind, error in means.items())
            whole = fmean(error for _, error in errors)
            print(f"{module}: mean error, {name}: {whole:.1%} ({each})")
        pair = [ranked([row[n] for row in own]) for n in (2, 3)]
        print(f"{module}: rank correlation: {float(np.corrcoef(*pair)[0, 1]):.3f}")


def stopped(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def main() -> None:
    words = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    words.add_argument("--rounds", type=int, default=3)
    words.add_argument("--seconds", type=float, default=12.0)
    words.add_argument("--steps", type=int, default=6)
    words.add_argument("--models", nargs="+", default=[MODELS], help="MODULE or MODULE:NAME,NAME")
    words.add_argument("--kinds", default=",".join(PLANS), help="of plans")
    words.add_argument(
        "--found", type=Path, default=Path(tempfile.gettempdir(), f"prediction-{os.getpid()}.json")
    )
    asked = words.parse_args()
    os.chdir(HERE)
    sys.path.insert(0, str(HERE))
    if "RANK" in os.environ:
        work(asked)
        os._exit(0)  # models of ten plans are not gathered again
    signal.signal(signal.SIGTERM, stopped)
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    place |= {"MASTER_PORT": str(20000 + os.getpid() % 20000), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, *sys.argv[1:], "--found", str(asked.found)]
    start, busy, before = time.monotonic(), processor_seconds(), sum(os.times()[:4])
    ranks = [
        subprocess.Popen(command, env={**os.environ, **place, "RANK": str(r), "LOCAL_RANK": str(r)})
        for r in range(2)
    ]
    with suppress(KeyboardInterrupt):
        for rank in ranks:
            rank.wait()
    for rank in ranks:
        rank.kill()
        rank.wait()
    own = os.times()
    used = processor_seconds() - busy - sum(own[:4]) + before
    cores = used / (time.monotonic() - start)
    print(f"{time.strftime('%Y-%m-%d %H:%M')}, torch {torch.__version__}, others {cores:.2f} cores")
    if asked.found.is_file():
        summary(json.loads(asked.found.read_text()))


if __name__ == "__main__":
    main()
