"""Makes the pictures of the documentation that are not a command's own.

    headway demo --directory runs/demo
    python docs/make_images.py runs/demo [runs/study]

images/pipelines.svg: some pipeline schedules on one time axis. images/simulate.svg: the step of
docs/simulate.md. images/tree-packing.svg: packings of a DGX-1V. images/table-placement.svg: tables
as large as Criteo's on Zion. images/segmentation.png: made tubes with planted errors.
images/run.svg, where a run is given: two pictures of its report, the loss and one step of every
rank. images/batch-study.svg, where a study is given: that of docs/batch-study.md.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy.ndimage import binary_closing, distance_transform_edt

from headway.cli.schedule.figures import ScheduleCosts, evaluate_schedule
from headway.cluster import of_preset
from headway.collective.program.program import CollectiveTask
from headway.cost.machines import machine_of
from headway.floodfill.tubes import make_tubes
from headway.planner.collective_algorithm import parse_wires, price_programs
from headway.planner.estimate.operators import PlanningWorkload
from headway.planner.export.to_simulation import step_of_plan
from headway.planner.search.branch_and_bound import PlanSearch
from headway.planner.search.request import PlanRequest
from headway.planner.tables.costs import tier_machine
from headway.planner.tables.demand import TableDemand
from headway.planner.tables.placement import place_over_tiers
from headway.planner.tables.skew import measure_skew
from headway.plans import pipelined
from headway.plans.pipeline import PipelinePlan
from headway.report.history.reader import read_history
from headway.report.page.study import study_section
from headway.report.pictures.canvas import stack_svg
from headway.report.pictures.collective_programs import programs_svg
from headway.report.pictures.pipeline_schedule import schedule_svg
from headway.report.pictures.segmentation import segmentation_picture
from headway.report.pictures.simulated_steps import simulated_steps_svg as simulated
from headway.report.pictures.step_timeline import representative_step, timeline_picture
from headway.report.pictures.table_placement import tables_picture
from headway.report.pictures.training_curves import loss_picture
from headway.run.measure.recipe_model import recipe_graph
from headway.schedule.generators.registry import make_schedule
from headway.simulator.ranks import StepFaults
from headway.simulator.simulation import simulate_training_step
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
    return stack_svg([("Loss", loss), (f"Step {step} on {ranks} ranks", timeline)])


def schedules_picture() -> str:
    """Schedules of as many micro-batches as ranks."""
    shown = [
        evaluate_schedule(make_schedule(name, stages=RANKS, microbatches=RANKS), ScheduleCosts())
        for name in SCHEDULES
    ]
    heading = f"{RANKS} ranks, {RANKS} micro-batches, backward twice as long as forward"
    return stack_svg([(heading, schedule_svg(shown))])


def simulated_picture() -> str:
    """The plan of docs/simulate.md: one pipeline of it as planned, and with a slow rank."""
    machine = machine_of(of_preset("p3.16xlarge", nodes=2))
    graph, samples, batch, _ = recipe_graph("headway.workloads.transformer:recipe")
    plan = pipelined(batch, processes=16, stages=4, pipeline=PipelinePlan(microbatches=4))
    work = PlanningWorkload(graph=graph, samples=samples)
    question = PlanRequest(work=work, machine=machine, devices=(16,), batch=batch)
    step, _ = step_of_plan(plan, PlanSearch(question))
    slow = replace(step, faults=StepFaults(slow={3: 2.0}))
    return simulated(
        [
            ("as planned", simulate_training_step(step)),
            ("rank 3 slow 2x", simulate_training_step(slow)),
        ]
    )


def packing_picture() -> str:
    """Packed trees of an all-reduce and of a broadcast on the NVLinks of a DGX-1V."""
    wires, parts = parse_wires("dgx-1v"), []
    for op in ("all_reduce", "broadcast"):
        size = 2**26  # 256 MiB in float32
        priced, _ = price_programs(CollectiveTask.of(op, 8, size), wires, names=("trees",))
        best = priced[0]
        parts.append((f"{op}, 256 MiB", programs_svg("", [best])))
    return stack_svg(parts)


def segmentation_of_tubes() -> bytes:
    """A volume of tubes, of which a body is cut in two and two are made one."""
    tubes = make_tubes((48, 96, 96), seed=2)
    z = 24
    segments = tubes.labels.copy()
    largest = 1 + np.argsort(-np.bincount(tubes.labels[z].ravel())[1:])
    body = tubes.labels == largest[0]
    segments[body & (np.indices(body.shape)[2] > np.median(np.nonzero(body[z])[1]))] += 1000
    other = segments == largest[1]
    near = distance_transform_edt(~other[z])
    rows = [(near[segments[z] == one].min(), one) for one in largest[2:8]]
    both = other | (segments == min(rows)[1])
    # Over the membrane between them.
    segments[binary_closing(both, iterations=3) & ((segments == 0) | both)] = largest[1]
    return segmentation_picture({z: (tubes.image[z], tubes.labels[z], segments[z])})


def tables_of_clicks() -> str:
    """Twelve tables of 430 GiB, whose rows are looked up by Zipf's law, on the preset zion."""
    draw = np.random.default_rng(0)
    demands = []
    for number, rows in enumerate(np.geomspace(2e3, 6e8, 12)):
        ids = np.minimum(draw.zipf(1.2, 400_000), int(rows)) - 1
        demands.append(
            TableDemand(
                table=f"tables.{number}",
                rows=int(rows),
                columns=128,
                bag=float((1, 20, 5)[number % 3]),
                row_state=4.0,
                skew=measure_skew([ids], int(rows)),
            )
        )
    machine = tier_machine(of_preset("zion"))
    placed = place_over_tiers(demands, machine, samples=2048, seconds=20.0)
    return tables_picture(placed, title="12 tables on zion")


def study_picture(directory: Path) -> str:
    """The pictures of a study of batch sizes and rates."""
    section = study_section(directory)
    assert section is not None
    return stack_svg(section.pictures)


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / "pipelines.svg").write_text(schedules_picture(), encoding="utf-8")
    (IMAGES / "simulate.svg").write_text(simulated_picture(), encoding="utf-8")
    (IMAGES / "tree-packing.svg").write_text(packing_picture(), encoding="utf-8")
    (IMAGES / "table-placement.svg").write_text(tables_of_clicks(), encoding="utf-8")
    (IMAGES / "segmentation.png").write_bytes(segmentation_of_tubes())
    if sys.argv[1:]:
        (IMAGES / "run.svg").write_text(picture(Path(sys.argv[1])), encoding="utf-8")
    if sys.argv[2:]:
        drawn = study_picture(Path(sys.argv[2]))
        (IMAGES / "batch-study.svg").write_text(drawn, encoding="utf-8")
