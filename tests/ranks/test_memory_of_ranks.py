"""ranks: what the ranks of a pipeline hold at their peak, beside what the search says of them."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
from torch.optim import SGD, AdamW

from headway.capture import capture
from headway.cluster.presets import of_preset
from headway.cost.machines import machine_of
from headway.cost.memory import OPTIMISER_MEMORY
from headway.graph.operator_fusion import fuse_light_operators
from headway.planner.estimate.operators import PlanningWorkload
from headway.planner.search.branch_and_bound import PlanSearch
from headway.planner.search.plan_conversion import point_of
from headway.planner.search.request import PlanRequest
from headway.plans import PipelinePlan, pipelined
from support.memory_models import CASES
from support.sampling import sampled
from support.tracked import peaks_of_ranks

RULES = {
    "sgd": partial(SGD, lr=0.1, foreach=True),  # as on GPUs, which the plan is for
    "adamw": partial(AdamW, lr=1e-4, foreach=True),
}
CUTS = {
    ("hybrid", 2): ("encoder.layers.1",),
    ("hybrid", 3): ("encoder.layers.0", "encoder.layers.1"),
    ("perceptron", 2): ("2",),
}


@pytest.fixture(scope="module")
def graphs():
    return {name: graph_of(CASES[name]) for name in ("hybrid", "perceptron")}


def graph_of(case):
    return fuse_light_operators(capture(case.make(), case.data, loss=case.loss))


def ratios(graphs, name, stages, microbatches, copies, zero, rule, schedule="1f1b"):
    """Predicted over tracked, of every rank of a copy."""
    samples = len(CASES[name].data[0])
    pipeline = PipelinePlan(
        schedule=schedule,
        microbatches=microbatches,
        cut=CUTS[name, stages],
        shared_memory=False,  # values in memory of one's own, as on GPUs
    )
    plan = pipelined(
        samples * microbatches * copies,
        processes=stages * copies,
        stages=stages,
        pipeline=pipeline,
        zero=zero,
    )
    question = PlanRequest(
        work=PlanningWorkload(
            graph=graphs[name], samples=samples, optimiser=OPTIMISER_MEMORY[rule]
        ),
        machine=machine_of(of_preset("dgx-a100", nodes=1)),
        devices=(plan.ranks,),
        batch=plan.batch.samples,
    )
    point = point_of(plan, PlanSearch(question))
    found = peaks_of_ranks(name, RULES[rule], plan)
    return [point.ranks[rank] / found[rank][0] for rank in range(stages)]


@pytest.mark.parametrize(
    ("stages", "microbatches", "schedule"),
    sampled([(2, 1, "1f1b"), (2, 4, "1f1b"), (3, 5, "1f1b"), (2, 4, "gpipe")], 2),
)
def test_a_rank_of_a_pipeline(graphs, stages, microbatches, schedule):
    """What is kept, gradients that are not there yet, messages under way, samples."""
    found = ratios(graphs, "hybrid", stages, microbatches, 1, 0, "adamw", schedule)
    assert all(0.97 <= ratio <= 1.08 for ratio in found), found


@pytest.mark.parametrize(("zero", "rule"), sampled([*product([0, 1, 3], RULES)], 1))
def test_copies_of_a_stage_whose_weights_fill_it(graphs, zero, rule):
    """Gradients stay whole until SYNC, with any ZeRO; ZeRO 3 gathers in every action. The first
    stage's activation function is priced with the second's layer, into which it is folded."""
    _, last = ratios(graphs, "perceptron", 2, 3, 2, zero, rule)
    assert 0.97 <= last <= 1.08, last
