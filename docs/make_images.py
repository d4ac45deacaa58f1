"""Makes the pictures of the documentation that are not a command's own.

    headway demo --directory runs/demo
    python docs/make_images.py runs/demo

images/pipelines.svg: some pipeline schedules on one time axis. images/simulate.svg: the step of
docs/simulate.md. images/tree-packing.svg: packings of a DGX-1V. images/run.svg, where a run is
given: two pictures of its report, the loss and one step of every rank.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from headway.cli.schedule_costs import Costs
from headway.cli.schedule_figures import figures
from headway.cluster import of_preset
from headway.collective.task import Collective
from headway.cost.presets import machine_of
from headway.plan import pipelined
from headway.plan.pipeline import Pipeline
from headway.planner.operators import Workload
from headway.planner.played import step_of_plan
from headway.planner.programs import price_programs, wires_of
from headway.planner.search import Question, Search
from headway.report.collective_picture import Drawn, programs_svg
from headway.report.curves import loss_picture
from headway.report.history import read_history
from headway.report.lanes import representative_step, timeline_picture
from headway.report.schedule_picture import picture_svg
from headway.report.simulated import picture as simulated
from headway.report.stacked import stack
from headway.run.model_graph import graph_of
from headway.schedule.named import make_schedule
from headway.simulator.ranks import Faults
from headway.simulator.simulated import simulate
from headway.timeline import Timeline

IMAGES = Path(__file__).parent / "images"
SCHEDULES = ("gpipe", "1f1b", "interleaved", "chimera", "chimera-split")
RANKS = 4


def picture(run: Path) -> str:
    """The README's picture of a run that is long enough to have a traced step."""
    history = read_history(run)
    step = representative_step(history)
    spans = [span for span in history.timeline.spans if span.node == f"step {step}"]
    loss, timeline = loss_picture(history), timeline_picture(Timeline(tuple(spans)))
    assert loss is not None
    assert timeline is not None
    ranks = len({span.rank for span in spans})
    return stack([("Loss", loss), (f"Step {step} on {ranks} ranks", timeline)])


def schedules_picture() -> str:
    """Schedules of as many micro-batches as ranks."""
    shown = [
        figures(make_schedule(name, stages=RANKS, microbatches=RANKS), Costs())
        for name in SCHEDULES
    ]
    heading = f"{RANKS} ranks, {RANKS} micro-batches, backward twice as long as forward"
    return stack([(heading, picture_svg(shown))])


def simulated_picture() -> str:
    """The plan of docs/simulate.md: one pipeline of it as planned, and with a slow rank."""
    machine = machine_of(of_preset("p3.16xlarge", nodes=2))
    graph, samples, batch = graph_of("headway.workloads.transformer.recipe:recipe")
    plan = pipelined(batch, processes=16, stages=4, pipeline=Pipeline(microbatches=4))
    work = Workload(graph=graph, samples=samples)
    question = Question(work=work, machine=machine, devices=(16,), batch=batch)
    step, _ = step_of_plan(plan, Search(question))
    slow = replace(step, faults=Faults(slow={3: 2.0}))
    return simulated([("as planned", simulate(step)), ("rank 3 slow 2x", simulate(slow))])


def packing_picture() -> str:
    """Packed trees of an all-reduce and of a broadcast on the NVLinks of a DGX-1V."""
    wires, parts = wires_of("dgx-1v"), []
    for op in ("all_reduce", "broadcast"):
        size = 2**26  # 256 MiB in float32
        priced, _ = price_programs(Collective.of(op, 8, size), wires, names=("trees",))
        best = priced[0]
        weights = sum(weight for _, weight in best.trees)
        drawn = Drawn(
            best.name,
            best.seconds,
            best.program.traffic(4).sent,
            tuple((parents, weight / weights) for parents, weight in best.trees),
        )
        heading = f"{op}, 256 MiB"
        parts.append((heading, programs_svg("", [drawn], best.least, wires.names)))
    return stack(parts)


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / "pipelines.svg").write_text(schedules_picture(), encoding="utf-8")
    (IMAGES / "simulate.svg").write_text(simulated_picture(), encoding="utf-8")
    (IMAGES / "tree-packing.svg").write_text(packing_picture(), encoding="utf-8")
    if sys.argv[1:]:
        (IMAGES / "run.svg").write_text(picture(Path(sys.argv[1])), encoding="utf-8")
