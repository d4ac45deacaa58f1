"""single: what the search leaves out without cutting would have found nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headway.capture import capture
from headway.cluster.presets import of_preset
from headway.cost.machines import machine_of
from headway.graph.operator_fusion import fuse_light_operators
from headway.planner.estimate.operators import PlanningWorkload
from headway.planner.search.branch_and_bound import PlanSearch
from headway.planner.search.candidate import PlanCandidate
from headway.planner.search.request import PlanRequest
from headway.workloads.transformer import TransformerConfig, TransformerLM
from support.big_models import ids


@pytest.fixture(scope="module")
def question():
    config = TransformerConfig(vocabulary=512, window=32, width=128, layers=18, heads=4)
    with torch.device("meta"):
        graph = fuse_light_operators(capture(TransformerLM(config), ids(16, 32)))
    return PlanRequest(
        work=PlanningWorkload(graph=graph, samples=16),
        machine=machine_of(of_preset("dgx-a100", nodes=1)),
        devices=(8,),
        batch=16,
        tensor=(1, 2),
        zero=(0, 3),
        schedules=("1f1b", "interleaved"),
    )


def asked(question):
    """Of every combination under several caps and known times the fastest plan."""
    engine, found = PlanSearch(question), []
    for degrees in (one.degrees for one in engine.combinations()):
        if degrees.pipeline == 1:
            continue
        candidate = engine.candidate(degrees)
        seconds, least = candidate.bound()
        for factor in (1.0, 1.5, 2.5, 30.0):
            for known in (np.inf, 1.2 * seconds):
                point = candidate.fastest(factor * least, known)
                found.append(None if point is None else (point.seconds, point.bytes, point.stages))
    return found


@pytest.mark.slow
def test_nothing_is_lost(question, monkeypatch):
    """Neither by counting room, nor by short stages first, nor by what 1F1B takes at least."""
    left_out = []
    enough = PlanCandidate._enough
    monkeypatch.setattr(
        PlanCandidate, "_enough", lambda *args: left_out.append(enough(*args)) or left_out[-1]
    )
    short = asked(question)
    assert 0.1 < np.mean(left_out) < 0.9
    monkeypatch.setattr(PlanCandidate, "_enough", lambda *args: True)
    monkeypatch.setattr(PlanCandidate, "_at_least", lambda *args: 0.0)
    monkeypatch.setattr(PlanCandidate, "_widths", (0,))
    assert asked(question) == short
    assert 0.1 < np.mean([one is not None for one in short]) < 0.9
