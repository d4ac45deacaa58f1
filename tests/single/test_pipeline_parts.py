"""single: the parts of the pipeline executor: backward in halves, layouts, versions, proofs."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode

from headway.errors import PlanError, RunError
from headway.parallel import (
    Pipeline,
    PipelineCallbacks,
    PipelineRanks,
    StageCost,
    cut,
    measure_stage_costs,
    measure_unit_seconds,
)
from headway.parallel.pipeline.runtime.p2p import LocalStageLink, MessageFormat
from headway.parallel.pipeline.runtime.stage_execution import input_gradients
from headway.parallel.pipeline.runtime.weight_stashing import LIVE_VERSION, WeightVersionPlan
from headway.parallel.stages import flatten, is_payload
from headway.schedule.generators.registry import make_schedule
from headway.schedule.lowering import completed_sends, lower, matching_action
from headway.schedule.pipeline_schedule import Action, ActionKind, PipelineSchedule, SchedulePipe
from headway.workloads.transformer import TransformerBlock, TransformerConfig, rotation
from support.pipelines import chain, points, run_serially
from support.tiny_models import cross_entropy

# -- backward in halves ----------------------------------------------------------------------------


class Tangled(nn.Module):
    """A tied layer, a branch of parameters alone, an output that does not depend on the input."""

    def __init__(self):
        super().__init__()
        self.tied = nn.Linear(8, 8)
        self.block = TransformerBlock(TransformerConfig(width=8, layers=1, heads=2))
        self.table = nn.Parameter(torch.randn(8))
        self.gain = nn.Parameter(torch.randn(8))
        self.lonely = nn.Linear(8, 3)

    def forward(self, x):
        x = self.tied(x) + (self.table * self.gain).tanh()
        x = self.block(x, rotation(4, 4, like=x)) * self.gain
        return self.tied(x), self.lonely.weight.sum() * torch.ones(2)


def both(model, whole):
    """Gradients of input and parameters, in one go or in halves."""
    torch.manual_seed(2)
    model.zero_grad()
    x = torch.randn(2, 4, 8, requires_grad=True)
    entered = x * 1.0
    edge = get_gradient_edge(entered)
    outputs = model(entered)
    roots = [get_gradient_edge(y) for y in outputs]
    gradients = [torch.randn_like(y) for y in outputs]
    if whole:
        torch.autograd.backward(outputs, gradients)
        return x.grad, {n: p.grad for n, p in model.named_parameters()}
    del outputs
    (found,), rest = input_gradients(roots, gradients, [edge])
    assert all(p.grad is None for p in model.parameters())
    rest.run()
    return found, {n: p.grad for n, p in model.named_parameters()}


def test_two_halves_are_bitwise_the_whole():
    model = Tangled()
    expected, weights = both(model, whole=True)
    found, halves = both(model, whole=False)
    assert torch.equal(found, expected)
    for name, weight in weights.items():
        if weight is None:
            assert halves[name] is None, name
        else:
            assert torch.equal(weight, halves[name]), name
    assert halves["lonely.weight"] is not None


class Multiplications(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "mm" in func.__name__
        return func(*args, **(kwargs or {}))


def test_nothing_is_computed_twice():
    layers = chain(depth=5)
    entered = torch.randn(3, 6, requires_grad=True) * 1.0
    edge = get_gradient_edge(entered)
    y = layers(entered)
    with Multiplications() as first:
        _, rest = input_gradients([get_gradient_edge(y)], [torch.ones_like(y)], [edge])
    with Multiplications() as second:
        rest.run()
    assert (first.count, second.count) == (5, 5)


def test_a_stage_without_inputs_does_all_in_the_second_half():
    weight = torch.ones(3, requires_grad=True)
    y = (weight * 2).sin()
    found, rest = input_gradients([get_gradient_edge(y)], [torch.ones(3)], [])
    assert found == ()
    assert weight.grad is None
    rest.run()
    assert torch.equal(weight.grad, 2 * torch.full((3,), 2.0).cos())


# -- values and layouts ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    x: torch.Tensor
    n: int


class Named(NamedTuple):
    x: torch.Tensor
    flag: bool


VALUES = [
    torch.randn(2, 3),
    (torch.randn(2), [torch.ones(1, dtype=torch.int64), None]),
    {"a": torch.randn(0, 3), "b": (1, 2.5, True, "text")},
    Record(torch.randn(3).requires_grad_(), 7),
    Named(torch.randn(2).to(torch.bfloat16), flag=False),
    torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    torch.randn(2, 6)[:, ::2],
    torch.randn(3, 1).expand(3, 4),
    torch.randn(2, dtype=torch.complex64).conj(),
    torch.tensor(True),
    2**60 + 1,
]


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_a_message_brings_the_value_and_its_strides(value):
    layout, leaves = MessageFormat.of([value])
    packed = layout.pack(leaves)
    buffers = [form.empty(torch.device("cpu")) for form in layout.packed]
    for buffer, tensor in zip(buffers, packed, strict=True):
        assert buffer.shape == tensor.shape
        assert tensor.is_contiguous()
        buffer.copy_(tensor)
    (found,) = layout.structure.rebuild(layout.unpack(buffers))
    assert type(found) is type(value)
    a, structure = flatten(value, is_payload)
    b, other = flatten(found, is_payload)
    assert structure == other
    for x, y in zip(a, b, strict=True):
        if isinstance(x, torch.Tensor):
            assert torch.equal(x, y)
            dense = x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last)
            assert x.stride() == y.stride() or not dense or x.ndim < 4
        else:
            assert x == y
            assert type(x) is type(y)


def test_a_layout_that_changes_without_reason_is_refused():
    link = LocalStageLink("d0: stage 0 to stage 1", ["key", "key", "other"])
    link.give(0, [torch.ones(3)])
    link.give(2, [torch.ones(4)])
    with pytest.raises(RunError, match="what goes over d0: stage 0 to stage 1 has changed"):
        link.give(1, [torch.ones(4)])


# -- what the table proves -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "chimera", "zbv"])
def test_a_message_is_let_go_only_when_it_has_arrived(name):
    schedule = lower(make_schedule(name, stages=4, microbatches=8))
    places = [{a: n for n, a in enumerate(row)} for row in schedule.order]
    proved = 0
    for rank, row in enumerate(schedule.order):
        for position, sent in completed_sends(schedule, rank).items():
            proof = row[position]
            assert proof.kind == ActionKind.RECV
            peer = schedule.pipe_of[proof.pipe].placement[proof.other]
            for earlier in sent:
                assert row[earlier].kind == ActionKind.SEND
                assert earlier < position
                assert (
                    places[peer][matching_action(row[earlier])]
                    < places[peer][matching_action(proof)]
                )
                proved += 1
    sends = sum(a.kind == ActionKind.SEND for _, a in schedule.actions())
    assert proved > sends / 4


def test_only_versions_that_are_still_needed_are_kept():
    text = "F.0 F.1 B.0 STEP F.2 B.1 STEP B.2"
    row = tuple(Action.parse(f"d0.s0.{word}") for word in text.split())
    table = PipelineSchedule(
        name="t", pipes=(SchedulePipe("d0", (0,), (0, 1, 2)),), order=(row,), flush=False
    )
    plan = WeightVersionPlan(table, 0)
    computes = [n for n, a in enumerate(row) if a.kind != ActionKind.STEP]
    assert [plan.version(n) for n in computes] == [0, 0, 0, 1, 0, 1]
    assert [plan.version(n) for n in (3, 6)] == [0, 1]
    assert {n: plan.dropped(n) for n in computes if plan.dropped(n)} == {5: [0], 7: [1]}
    flushed = make_schedule("1f1b", stages=2, microbatches=4)
    plan = WeightVersionPlan(flushed, 0)
    assert {plan.version(n) for n in range(len(flushed.order[0]))} == {LIVE_VERSION}


# -- the executor in one process -------------------------------------------------------------------


def one_rank(stages, count, **recompute):
    """All stages on one rank, micro-batch by micro-batch."""
    row = []
    for m in range(count):
        row += [Action(ActionKind.FORWARD, "d0", s, m) for s in range(stages)]
        row += [Action(ActionKind.BACKWARD, "d0", s, m) for s in reversed(range(stages))]
    pipe = SchedulePipe("d0", (0,) * stages, tuple(range(count)))
    return PipelineSchedule(name="one", pipes=(pipe,), order=(tuple(row),), **recompute)


def alone(model, data, **options):
    stages = cut(model, cross_entropy, data[0], stages=3)
    calls = PipelineCallbacks(loss=cross_entropy, share=lambda value, _: value / len(data))
    return Pipeline(
        stages, one_rank(3, len(data), **options), PipelineRanks(rank=0, ranks=(0,)), calls
    )


@pytest.mark.parametrize(
    "recompute", [{}, {"recompute": (0, 1, 2)}, {"recompute": (0, 2), "blockwise": True}]
)
def test_nothing_of_a_step_is_kept(recompute):
    model, data = chain(), points(3)
    made = []

    def watch(module, inputs, output):
        made.append(weakref.ref(output))

    for module in model:
        module.register_forward_hook(watch)
    pipeline = alone(model, data, **recompute)
    made.clear()
    gc.disable()
    try:
        pipeline.run(data)
        assert len(made) >= 30
        alive = [ref for ref in made if ref() is not None]
        assert alive == []
    finally:
        gc.enable()


def test_one_rank_alone_equals_the_serial_run():
    serial, model = chain(), chain()
    model.load_state_dict(serial.state_dict())
    expected = run_serially(serial, cross_entropy, points(3))
    losses = alone(model, points(3)).run(points(3))
    assert all(torch.equal(losses[m], expected[f"loss {m}"]) for m in range(3))
    for (name, a), b in zip(serial.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name


def test_a_table_that_does_not_fit_is_refused():
    model, data = chain(), points(2)
    stages = cut(model, cross_entropy, data[0], stages=3)
    team, calls = PipelineRanks(rank=0, ranks=(0,)), PipelineCallbacks(loss=cross_entropy)
    with pytest.raises(PlanError, match="it is for 2 stages, and the model has 3"):
        Pipeline(stages, one_rank(2, 2), team, calls)
    synced = lower(make_schedule("gpipe", stages=3, microbatches=2), sync="post")
    with pytest.raises(PlanError, match="nobody was given who sums gradients"):
        Pipeline(stages, synced, team, calls)
    with pytest.raises(ValueError, match="1 micro-batches for a table of 2"):
        Pipeline(stages, one_rank(3, 2), team, calls).run(data[:1])


def test_values_over_several_stages_need_an_edge_in_the_table():
    class Skipping(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

        def forward(self, x):
            first = self.layers[0](x)
            return self.layers[2](self.layers[1](first) + first) + first

    data = [(torch.randn(2, 6), torch.zeros(2, dtype=torch.int64))]
    stages = cut(Skipping(), cross_entropy, data[0], stages=3)
    assert stages.skips == ((0, 2),)
    team, calls = PipelineRanks(rank=0, ranks=(0,)), PipelineCallbacks(loss=cross_entropy)
    with pytest.raises(PlanError, match="does not say that stage 0 gives values to stage 2"):
        Pipeline(stages, one_rank(3, 1), team, calls)


def test_an_error_of_the_users_names_the_cell():
    class Failing(nn.Module):
        when = False

        def forward(self, x):
            if self.when:
                raise RuntimeError("my own")
            return x

    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), Failing(), nn.Linear(6, 4))
    pipeline = alone(model, points(2))
    model[2].when = True
    with pytest.raises(RuntimeError, match="my own") as error:
        pipeline.run(points(2))
    assert error.value.__notes__ == ["rank 0 of the pipeline stands at d0.s1.F.0 (action 2 of 12)"]


def test_what_stages_cost():
    class Slow(nn.Linear):
        def forward(self, x):
            for _ in range(40):
                x = torch.tanh(super().forward(x))
            return x

    model = nn.Sequential(nn.Linear(6, 6), Slow(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))
    model[0].weight.grad = torch.ones(6, 6)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    data = points(1)[0]
    stages = cut(model, cross_entropy, data, at=["1", "2"])
    costs = measure_stage_costs(stages, cross_entropy, data, repeats=9)
    assert all(isinstance(cost, StageCost) for cost in costs)
    assert costs[1].forward > 2 * costs[0].forward
    assert costs[0].input_grad == 0.0
    assert costs[1].input_grad > 0
    assert [cost.message for cost in costs] == [4 * 6 * 4, 4 * 6 * 4, 0]
    assert [cost.weight for cost in costs] == [168, 168, 160]
    assert costs[1].activation > 40 * 4 * 6 * 4
    assert torch.equal(model[0].weight.grad, torch.ones(6, 6))
    assert all(torch.equal(buffers[name], buffer) for name, buffer in model.named_buffers())
    weights = measure_unit_seconds(model, cross_entropy, data, 3)
    assert max(weights, key=weights.__getitem__) == "1"
