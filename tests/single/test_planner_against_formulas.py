"""single: what the search prices against the formulas that were fitted to measured GPT steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headway.capture import capture
from headway.graph.operator_fusion import fuse_light_operators
from headway.planner.estimate.degrees import Degrees
from headway.planner.estimate.operators import PlanningWorkload
from headway.planner.search.branch_and_bound import PlanSearch
from headway.planner.search.request import PlanRequest
from headway.workloads.transformer import TransformerConfig, TransformerLM
from support import transformer_formula as formulas
from support.big_models import ids
from support.machines import fitted_machine
from support.sampling import sampled
from support.transformer_formula import Transformer, TransformerSplit, price_transformer

MACHINE = replace(fitted_machine("a100"), whole_head=1.0)
"""Without the factor for logits that no axis splits, of which nobody knows the reason."""
LAYERS, VOCABULARY = 8, 51200
SHAPES = {"narrow": (1024, 16, 1024), "wide": (4096, 32, 2048)}
PLANS = [  # t, d, p, m, b
    (1, 1, 1, 1, 1),
    (1, 1, 1, 1, 4),
    (1, 1, 1, 4, 8),
    (2, 1, 1, 1, 4),
    (4, 1, 1, 1, 4),
    (8, 1, 1, 1, 8),
    (1, 8, 1, 1, 4),
    (1, 1, 2, 8, 4),
    (1, 1, 4, 16, 4),
    (1, 4, 2, 8, 2),
    (4, 2, 4, 8, 4),
]
MOST = {"wide": 0.12, "narrow": 0.32}
"""Deviation of the seconds that is explained by what is left out: see `test_a_step`."""


def loss(model, data):
    return torch.nn.functional.cross_entropy(model(data[0]).flatten(0, 1), data[1].flatten())


@pytest.fixture(scope="module", params=SHAPES)
def shape(request):
    hidden, heads, sequence = SHAPES[request.param]
    config = TransformerConfig(
        vocabulary=VOCABULARY, window=sequence, width=hidden, layers=LAYERS, heads=heads
    )
    with torch.device("meta"):
        model = TransformerLM(config).bfloat16()
        graph = fuse_light_operators(
            capture(model, (ids(16, sequence), ids(16, sequence)), loss=loss)
        )
    shape = Transformer(
        layers=float(LAYERS), hidden=float(hidden), heads=float(heads), sequence=float(sequence)
    )
    return request.param, PlanningWorkload(graph=graph, samples=16), shape


def fused(model, split, machine):
    """Attention in one kernel, as `scaled_dot_product_attention` does it: its work alone."""
    rows = split.microbatch * model.heads / split.tensor
    work = 4.0 * rows * model.sequence**2 * (model.hidden / model.heads)
    forward = work / machine.device.rate(machine.dtype)
    return forward, 2.0 * forward


def both(shape, plan, monkeypatch):
    """(the search's point, the formulas' step) of Megatron's even cut without recomputation."""
    _, work, model = shape
    monkeypatch.setattr(formulas, "_attention", fused)
    t, d, p, m, b = plan
    question = PlanRequest(
        work=work,
        machine=MACHINE,
        devices=(t * d * p,),
        batch=d * m * b,
        memory=np.inf,
        force=(("blocks.*", "split"),) if t > 1 else (),
    )
    engine = PlanSearch(question)
    degrees = Degrees(tensor=t, data=d, pipeline=p, microbatch=b, microbatches=m, order="tdp")
    sizes = [unit.stop - unit.start for unit in engine.row]
    blocks = [n for n, size in enumerate(sizes) if size > max(sizes) / 2]
    assert len(blocks) == LAYERS
    borders = [0, *(blocks[LAYERS // p * stage] for stage in range(1, p)), len(engine.row)]
    point = engine.candidate(degrees).planned(borders, buckets=(np.inf,), overlap=False)
    split = TransformerSplit(
        tensor=float(t),
        data=float(d),
        pipeline=float(p),
        microbatch=float(b),
        microbatches=float(m),
        recompute="none",
    )
    return point, price_transformer(model, split, MACHINE)


@pytest.mark.parametrize("plan", sampled(PLANS, 9), ids=str)
def test_a_step(shape, plan, monkeypatch):
    """A unit or a factor of 1.5 anywhere breaks this.

    What is left: the formulas stream masks, copies of q, k and v and biases that this model has
    not; the search splits the norms along the sequence where that is cheaper.
    """
    point, step = both(shape, plan, monkeypatch)
    deviation = point.seconds / float(step.seconds) - 1
    print(shape[0], plan, f"{deviation:+.1%}", point.seconds, float(step.seconds))
    assert abs(deviation) < MOST[shape[0]]
