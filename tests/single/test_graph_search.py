"""single: graphs of real models are almost trees: the frontier search needs its exact rules only.

Test F7 of the planner: a GPT and a ResNet-50 end in one node by node, edge, merge and contract; an
encoder whose layers share a mask is solved exactly, too. So is forward and backward of a GPT in one
graph, where what is kept ties both together: with buckets, of 6 neighbours however many layers.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from headway.capture import capture
from headway.graph.operator_fusion import fuse_light_operators
from headway.graph.stage_boundaries import input_independent_tensors
from headway.planner.pareto.choice_graph import ChoiceGraph, order_eliminations
from headway.planner.pareto.solve import solve
from headway.workloads.transformer import TransformerConfig, TransformerLM
from support.big_models import Encoder, ResNet50, ids, meta
from support.sampling import sampled

EASY = {"edge", "merge", "contract", "node", "last"}


def choices(graph, count=3):
    """Random costs of `count` choices of every operator, and of pairs that share a tensor."""
    random = np.random.default_rng(5)
    made = graph.producers
    constant = input_independent_tensors(graph)
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


@pytest.mark.parametrize(
    ("name", "folded"), sampled([*product(["gpt", "resnet", "bert"], [False, True])], 3)
)
def test_real_graphs_are_solved_exactly(name, folded):
    graph = fuse_light_operators(captured(name)) if folded else captured(name)
    found = solve(choices(graph), epsilon=0.05)
    rules = {step.rule for step in found.log}
    assert "fix" not in rules
    if name != "bert":
        assert rules <= EASY
    assert max(len(step.neighbours) for step in found.log) <= 3
    assert found.factor <= 1.05 + 1e-9


def joint(layers):
    """Pairs of aten calls that share a tensor, of a loss and its gradients."""
    config = TransformerConfig(vocabulary=64, window=16, width=32, layers=layers, heads=4)
    with torch.device("meta"):
        model = TransformerLM(config)

    def step(state, tokens):
        made = torch.func.functional_call(model, state, (tokens,))
        return torch.autograd.grad(made.logsumexp(-1).sum(), list(state.values()))

    traced = make_fx(step)(dict(model.named_parameters()), ids(2, 16))
    calls = [node for node in traced.graph.nodes if node.op == "call_function"]
    names = [node.name for node in calls]
    shared = [(a.name, n.name) for n in calls for a in n.all_input_nodes if a.name in names]
    return names, shared


@pytest.mark.parametrize("layers", [2, 4])
def test_forward_and_backward_in_one_graph_need_no_guess(layers):
    names, shared = joint(layers)
    order = order_eliminations(shared, dict.fromkeys(names, 3), 3**7)
    assert len(names) > 150 * layers
    assert not order.blocked
    assert {step.rule for step in order.log} <= EASY | {"triangle", "bucket"}
    assert max(len(entry.neighbours) for entry in order.log if entry.rule != "edge") <= 6
