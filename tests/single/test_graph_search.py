"""single: graphs of real models are almost trees: the frontier search needs its exact rules only.

Test F7 of the planner: a GPT and a ResNet-50 end in one node by node, edge, merge and contract; an
encoder whose layers share a mask is solved exactly, too.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headway.capture import capture
from headway.graph import fold
from headway.graph.cut import constants
from headway.planner.frontier import ChoiceGraph, solve
from headway.workloads.transformer.model import TransformerConfig, TransformerLM
from support.big_models import Encoder, ResNet50, ids, meta

EASY = {"edge", "merge", "contract", "node", "last"}


def choices(graph, count=3):
    """Random costs of `count` choices of every operator, and of pairs that share a tensor."""
    random = np.random.default_rng(5)
    made = graph.producers
    constant = constants(graph)
    nodes = {o.name: random.integers(0, 9, (count, 2)).astype(float) for o in graph.operators}
    edges = {}
    for operator in graph.operators:
        for tensor in operator.inputs:
            if tensor in made and tensor not in constant:
                pair = (graph.operators[made[tensor]].name, operator.name)
                edges[pair] = random.integers(0, 9, (count, count, 2)).astype(float)
    return ChoiceGraph(objectives=("bytes", "seconds"), nodes=nodes, edges=edges)


def captured(name):
    config = TransformerConfig(vocabulary=64, window=16, width=32, layers=12, heads=4)
    with torch.device("meta"):
        model, example = {
            "gpt": lambda: (TransformerLM(config), (ids(2, 16),)),
            "resnet": lambda: (ResNet50(), (meta(2, 3, 64, 64),)),
            "bert": lambda: (Encoder(), (ids(2, 32), meta(2, 32, dtype=torch.bool))),
        }[name]()
    return capture(model, example)


@pytest.mark.parametrize("name", ["gpt", "resnet", "bert"])
@pytest.mark.parametrize("folded", [False, True])
def test_real_graphs_are_solved_exactly(name, folded):
    graph = fold(captured(name)) if folded else captured(name)
    found = solve(choices(graph), epsilon=0.05)
    rules = {step.rule for step in found.log}
    assert "fix" not in rules
    if name != "bert":
        assert rules <= EASY
    assert max(len(step.neighbours) for step in found.log) <= 3
    assert found.factor <= 1.05 + 1e-9
