"""single: words of a user about parts of a model are the choices that one would force by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import headway
from headway.capture import capture
from headway.capture.annotations import annotations_of, building
from headway.cli.plan.output import report_data
from headway.cluster.presets import of_preset
from headway.cost.machines import machine_of
from headway.errors import PlanError
from headway.graph.annotations import Annotations
from headway.graph.operator_fusion import fuse_light_operators
from headway.planner.estimate.operators import PlanningWorkload
from headway.planner.search.branch_and_bound import find_plans
from headway.planner.search.plan_conversion import to_plan
from headway.planner.search.request import PlanRequest, resolve_force
from headway.planner.traffic.estimate import collectives_of
from support.annotations import replicate_module as replicate_at
from support.planning import planning_result

WIDTH, CLASSES = 64, 4096


class Classifier(nn.Module):
    """A small backbone and a head of many classes, as a user annotates them."""

    def __init__(self, annotated=True):
        super().__init__()
        if annotated:
            with headway.replicate(4):
                self.backbone = self.layers()
            with headway.split(4):
                self.head = nn.Linear(WIDTH, CLASSES)
        else:
            self.backbone = self.layers()
            self.head = nn.Linear(WIDTH, CLASSES)

    @staticmethod
    def layers():
        return nn.Sequential(nn.Linear(16, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())

    def forward(self, x):
        return self.head(self.backbone(x)).sum(-1)


class Stacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(16, WIDTH), nn.ReLU())
        with headway.stage():
            self.second = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.third = nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.third(self.second(self.first(x)))


def planned(build, choices=None, **changed):
    """The plan as JSON, by the annotations of a model or by choices."""
    with torch.device("meta"), building():
        model = build()
        choices = choices or annotations_of(model).forced_choices()
        work = PlanningWorkload(
            graph=fuse_light_operators(capture(model, torch.empty(16, 16))), samples=16
        )
    force, problems = resolve_force(work, choices.force)
    assert not problems
    question = PlanRequest(
        work=work,
        machine=machine_of(of_preset("dgx-a100", nodes=1)),
        devices=(4,),
        batch=16,
        force=force,
        tensor=choices.tensor,
        objective="fastest",
    )
    outcome = find_plans(replace(question, **changed))
    return json.dumps(report_data(planning_result(outcome)), sort_keys=True), outcome


def by_hand(*force, tensor=None):
    choices = Annotations().forced_choices()
    return replace(choices, force=force, tensor=tensor)


def test_annotations_plan_what_forcing_by_hand_plans():
    """W7: the same JSON, byte for byte; and another one without."""
    said, outcome = planned(Classifier)
    forced, _ = planned(
        lambda: Classifier(annotated=False),
        by_hand(("backbone", "replicate"), ("head", "split"), tensor=(4,)),
    )
    assert said == forced
    free, _ = planned(lambda: Classifier(annotated=False), by_hand(("head", "replicate")))
    assert said != free
    assert outcome.best.degrees.tensor == 4


def test_a_stage_begins_where_it_is_said():
    said, outcome = planned(Stacked)
    forced, _ = planned(Stacked, by_hand(("second", "stage")))
    assert said == forced
    starts = to_plan(outcome, outcome.best).pipeline.cut
    assert any(name.startswith("second") for name in starts)


class Defaulted(nn.Module):
    def __init__(self):
        super().__init__()
        headway.set_default_strategy(headway.replicate(4))
        self.backbone = Classifier.layers()
        with headway.split(4):
            self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.head(self.backbone(x)).sum(-1)


def test_a_default_holds_for_all_that_is_not_annotated():
    said, _ = planned(Defaulted)
    forced, _ = planned(
        lambda: Classifier(annotated=False),
        by_hand(("head", "split"), ("*", "replicate"), tensor=(4,)),
    )
    assert said == forced
    with building():
        assert annotations_of(Classifier()).default is None  # that of another model is forgotten


def test_contexts_mark_parts_and_change_nothing_else():
    torch.manual_seed(0)
    marked = Classifier()
    torch.manual_seed(0)
    plain = Classifier(annotated=False)
    assert marked.state_dict().keys() == plain.state_dict().keys()
    x = torch.randn(3, 16)
    assert torch.equal(marked(x), plain(x))
    said = annotations_of(marked)
    assert [str(one) for one in said.forced] == ["backbone=replicate:4", "head=split:4"]
    inside = nn.Sequential(marked)
    assert [one.module for one in annotations_of(inside).forced] == ["0.backbone", "0.head"]


def test_nesting_is_refused_where_it_is_written():
    with pytest.raises(PlanError) as caught, headway.replicate(4), headway.split(2):
        pass
    assert list(caught.value.problems) == ["split(2) inside of replicate(4)"]
    with headway.split(2):
        pass  # the contexts above are closed


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        with headway.split(2):
            self.inner = MODELS.pop()


MODELS: list[nn.Module] = []


def test_an_annotated_part_in_another_one_is_refused():
    MODELS.append(Classifier())
    with pytest.raises(PlanError) as caught:
        annotations_of(Outer())
    assert list(caught.value.problems) == [
        "inner.backbone=replicate:4 stands inside of inner=split:2",
        "inner.head=split:4 stands inside of inner=split:2",
    ]


def test_an_error_inside_of_a_context_marks_nothing():
    model = nn.Module()

    def build():
        with headway.split(2):
            model.part = nn.Linear(2, 2)
            raise KeyError

    with pytest.raises(KeyError):
        build()
    assert annotations_of(model).forced == ()


@pytest.mark.parametrize("devices", [0, -1, 1.5, True])
def test_no_such_number_of_devices(devices):
    with pytest.raises(PlanError, match="make no sense"):
        headway.split(devices)


def test_no_stage_is_a_default():
    with pytest.raises(PlanError, match="make no sense"):
        headway.set_default_strategy(headway.stage())


def test_what_asks_for_different_numbers_does_not_go_together():
    said = Annotations((replicate_at("a", 4), replace(replicate_at("b", 2), strategy="split")))
    with pytest.raises(PlanError) as caught:
        said.forced_choices()
    assert list(caught.value.problems) == ["a=replicate:4", "b=split:2"]
    only = Annotations((replicate_at("a", 4), replicate_at("b", 2))).forced_choices()
    assert only.tensor == (1,)  # copies of the model


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH, bias=False)
        self.two = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.two(torch.relu(self.one(x)))


def gathers(second):
    """Collectives of forward between and behind two matrices, the first cut by its outputs."""
    force = (("one", "split:o"), ("two", second))
    with torch.device("meta"):
        graph = fuse_light_operators(capture(Pair(), torch.empty(16, WIDTH)))
    outcome = find_plans(
        PlanRequest(
            work=PlanningWorkload(graph=graph, samples=16),
            machine=machine_of(of_preset("dgx-a100", nodes=1)),
            devices=(2,),
            batch=16,
            tensor=(2,),
            force=force,
            objective="fastest",
        )
    )
    calls = [c for stage in collectives_of(outcome.search, outcome.best) for c in stage]
    return [c.kind for c in calls for _ in range(c.count) if c.phase == "forward"]


def test_a_gather_is_fused_away_where_the_dimensions_match():
    """W5: what is cut by its outputs enters the next one cut by its inputs as it lies; else it is
    gathered once."""
    assert "all_gather" not in gathers("split:x1")
    assert gathers("replicate").count("all_gather") == 1
