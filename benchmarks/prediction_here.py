"""Predicted against measured step time of five models on this machine, two processes.

    python benchmarks/prediction_here.py [--rounds 2] [--out runs.json]

Measures the machine (`headway cluster measure -n 2`), prices for each model data parallelism and a
pipeline with that file alone, and trains each plan for some steps. None of the models is in the
measurement. The measurement is repeated in front of every round and the runs come in between, so
that both see the machine in the same state. A plan's prediction is the median over the rounds'
files, its measured time the median over the rounds of the median of a round's steps: files say what
usually is. The lower quartile is printed beside it. What ran while other programs used more than
a fifth of a core is repeated once. Ctrl-C ends with what is known.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from headway.cli.optimizer_cost import with_optimizer
from headway.cluster import find_cluster
from headway.cost.presets import machine_of
from headway.plan import Pipeline, Plan, data_parallel, pipelined
from headway.planner.binding import parts
from headway.planner.operators import Workload
from headway.planner.planned import point_of
from headway.planner.search import Question, Search
from headway.run.model_graph import graph_of
from headway.run.recipe_file import load_recipe
from headway.units import format_seconds

MODELS = ("mlp", "transformer", "cnn", "unet", "dlrm")
HERE = Path(__file__).parent
HEADWAY = (sys.executable, "-m", "headway")
WARM = 3
"""Steps of a run that do not count."""
PLANS = ("data", "pipe")
QUIET, TRIES = 0.2, 2
"""Cores that others may use meanwhile."""
MARK = "HEADWAY_PREDICTION_HERE"
"""In the environment of everything that a benchmark starts."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One plan of one model in one round; seconds."""

    model: str
    plan: str
    predicted: float
    parts: dict[str, float]
    quartile: float
    middle: float
    others: float
    measured: dict[str, float]


def ran(*words: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """A command of headway, and how many cores others used meanwhile."""
    ended, seconds = threading.Event(), [0.0]
    watch = threading.Thread(target=_watch, args=(ended, seconds))
    start = time.monotonic()
    watch.start()
    marked = {**os.environ, MARK: "1"}
    done = subprocess.run(
        [*HEADWAY, *words], cwd=HERE, env=marked, capture_output=True, text=True, check=False
    )
    ended.set()
    watch.join()
    return done, seconds[0] / (time.monotonic() - start)


def _watch(ended: threading.Event, seconds: list[float]) -> None:
    """Adds up the processor seconds of all processes that do not carry the mark."""
    before = _others()
    while not ended.wait(0.5):
        now = _others()
        seconds[0] += sum(max(0.0, spent - before.get(p, 0.0)) for p, spent in now.items())
        before = now


def _others() -> dict[str, float]:
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (
                folder.name == str(os.getpid())
                or MARK.encode() in (folder / "environ").read_bytes()
            ):
                continue
            words = (folder / "stat").read_text().rpartition(")")[2].split()
            found[folder.name] = sum(map(int, words[11:13])) / os.sysconf("SC_CLK_TCK")
    return found


def plan_of(kind: str, batch: int) -> Plan:
    """Data parallel, or a pipeline of two stages with four micro-batches."""
    if kind == "data":
        return data_parallel(batch, processes=2)
    pipeline = Pipeline(schedule="1f1b", microbatches=4)
    return pipelined(batch, processes=2, stages=2, pipeline=pipeline)


def engine_of(model: str, cluster: Path) -> Search:
    reference = f"prediction_models:{model}"
    graph, samples, batch = graph_of(reference)
    found = find_cluster(str(cluster))
    machine = with_optimizer(machine_of(found), found, load_recipe(reference))
    work = Workload(graph=graph, samples=samples)
    return Search(
        Question(work=work, machine=machine, devices=(2,), batch=batch, tensor=(1,), zero=(0,))
    )


def measured(folder: Path) -> tuple[float, float, dict[str, float]]:
    """(lower quartile, median) of the steps, and the medians of the parts of rank 0."""
    lines = (folder / "ranks" / "rank-00000.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["event"] == "rank_step"][WARM:]
    seconds = [row["seconds"] for row in rows]
    names = ("compute", "exposed", "update", "data")
    found = {name: median(row[name] for row in rows) for name in names}
    return float(np.quantile(seconds, 0.25)), median(seconds), found


def one(model: str, kind: str, cluster: Path, folder: Path) -> Row | None:
    """Train a plan and price it; None where the model cannot be cut."""
    engine = engine_of(model, cluster)
    path = folder / f"{model}-{kind}.json"
    plan = plan_of(kind, engine.question.batch)
    point = point_of(plan, engine)
    if kind == "pipe":  # the cut that was priced is the one that runs
        cut = tuple(engine.row[stage.start].module for stage in point.stages[1:])
        plan = replace(plan, pipeline=replace(plan.pipeline, cut=cut))
        point = point_of(plan, engine)
    plan.save(path)
    for _ in range(TRIES):
        run = folder / f"run-{model}-{kind}-{time.monotonic_ns()}"
        train = ("train", f"prediction_models:{model}", "-n", "2", "--plan", str(path))
        done, others = ran(*train, "-d", str(run))
        if done.returncode or others < QUIET:
            break
    if done.returncode:
        print(f"{model} {kind}: {done.stderr.strip().splitlines()[-3:]}", flush=True)
        return None
    quartile, middle, found = measured(run)
    return Row(
        model=model,
        plan=kind,
        predicted=point.seconds,
        parts={part.name: part.seconds for part in parts(engine.question, point)},
        quartile=quartile,
        middle=middle,
        others=others,
        measured=found,
    )


def ranked(values: list[float]) -> np.ndarray:
    return np.argsort(np.argsort(values)).astype(float)


def summary(rows: list[Row]) -> dict[str, Any]:
    """Signed errors of each plan, their mean sizes, and the rank correlation."""
    table = []
    for model in MODELS:
        for kind in PLANS:
            same = [row for row in rows if (row.model, row.plan) == (model, kind)]
            if not same:
                continue
            predicted, quartile, middle = (
                median(getattr(row, name) for row in same)
                for name in ("predicted", "quartile", "middle")
            )
            table.append((model, kind, predicted, quartile, middle))
            shown = ", ".join(f"{k} {format_seconds(v)}" for k, v in same[-1].parts.items())
            found = ", ".join(f"{k} {format_seconds(v)}" for k, v in same[-1].measured.items())
            print(
                f"{model:12s} {kind:5s} predicted {format_seconds(predicted):8s} measured "
                f"{format_seconds(middle):8s} {predicted / middle - 1:+6.1%}   quartile "
                f"{format_seconds(quartile):8s} {predicted / quartile - 1:+6.1%}   others "
                f"{max(row.others for row in same):.2f} cores\n"
                f"{'':18s} ({shown})\n{'':18s} ({found})"
            )
    facts: dict[str, Any] = {}
    for name, place in (("median", 4), ("quartile", 3)):
        errors = {(r[0], r[1]): r[2] / r[place] - 1.0 for r in table}
        for kind in PLANS:
            some = [abs(e) for (_, k), e in errors.items() if k == kind]
            if some:
                facts[f"{kind}, {name}"] = fmean(some)
        facts[f"all, {name}"] = fmean(map(abs, errors.values()))
    pair = [ranked([row[n] for row in table]) for n in (2, 4)]
    facts["rank correlation"] = float(np.corrcoef(*pair)[0, 1])
    return facts


def main() -> None:
    words = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    words.add_argument("--rounds", type=int, default=2)
    words.add_argument("--plans", default=",".join(PLANS))
    words.add_argument("--out", type=Path)
    asked = words.parse_args()
    os.chdir(HERE)
    sys.path.insert(0, str(HERE))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch, suppress(KeyboardInterrupt):
        folder = Path(scratch)
        for number in range(asked.rounds):
            cluster = folder / f"cluster-{number}.toml"
            for _ in range(TRIES):
                done, others = ran("cluster", "measure", "-n", "2", "--out", str(cluster))
                done.check_returncode()
                print(f"round {number}, measured, others {others:.2f} cores", flush=True)
                if others < QUIET:
                    break
            for kind in asked.plans.split(","):
                for model in MODELS:
                    row = one(model, kind, cluster, folder)
                    rows += [row] if row else []
                    if row and asked.out:
                        asked.out.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    print(f"{time.strftime('%Y-%m-%d')}, {asked.rounds} rounds, load {os.getloadavg()[0]:.1f}")
    facts = summary(rows)
    for name, value in facts.items():
        print(f"{name}: {value:.3f}" if "rank" in name else f"mean error of {name}: {value:.1%}")


if __name__ == "__main__":
    main()
