"""single: tensor and sequence parallelism, alone and with FSDP2: what the search lists is seen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from headway.capture import capture
from headway.cluster.presets import of_preset
from headway.cost.machines import machine_of
from headway.cost.network import HierarchicalNetwork
from headway.graph.model_graph import TensorSpec
from headway.graph.operator_fusion import fuse_light_operators
from headway.planner.estimate import segments
from headway.planner.estimate.degrees import Degrees
from headway.planner.estimate.operators import PlanningWorkload, legal_rules, operator_cost
from headway.planner.search.branch_and_bound import PlanSearch
from headway.planner.search.operator_choices import _rules
from headway.planner.search.request import PlanRequest
from headway.planner.traffic.estimate import collective_seconds, collectives_of
from headway.planner.traffic.executor import (
    FullyShardedModule,
    fsdp2_wrapper_calls,
)
from support.call_volumes import call_volumes
from support.collective_recorder import CollectiveRecorder, collective_differences
from support.fake_world import fake_world
from support.sampling import sampled

SAMPLES, LENGTH, WIDTH, HEADS, WIDE = 2, 16, 32, 8, 128
MACHINE = machine_of(of_preset("dgx-a100", nodes=128))


def tensor_shards(
    parameters: Mapping[str, TensorSpec], split: Mapping[str, int], parts: int
) -> Iterator[tuple[str, TensorSpec]]:
    """What a rank of a tensor axis holds: the named dimension of some parameters in parts."""
    for name, spec in parameters.items():
        shape = list(spec.shape)
        if name in split:
            shape[split[name]] //= parts
        yield name, replace(spec, shape=tuple(shape))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        b, t, _ = x.shape
        each = (m(x).view(b, t, -1, WIDTH // HEADS) for m in (self.q, self.k, self.v))
        heads = [one.transpose(1, 2) for one in each]
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.a = Attention()
        self.up, self.down = nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH)

    def forward(self, x):
        x = x + self.a(self.n1(x))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Model(nn.Module):
    """A transformer without embedding, so that splits of the blocks are all there is."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.enter = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.leave = nn.Linear(WIDTH, 8)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


MEGATRON = {"q": "o.0", "k": "o.0", "v": "o.0", "a": "h", "out": "k", "up": "o", "down": "x2"}
SEQUENCE = MEGATRON | {"n1": "x1", "n2": "x1", "leave": "x1"}


def question(devices, *, microbatches=1, data=1, blocks=2):
    with torch.device("meta"):
        graph = fuse_light_operators(capture(Model(blocks), torch.empty(SAMPLES, LENGTH, 6)))
    return PlanRequest(
        work=PlanningWorkload(graph=graph, samples=SAMPLES),
        machine=MACHINE,
        devices=(devices,),
        batch=SAMPLES * microbatches * data,
    )


def by_hand(monkeypatch, axes):
    """Every module is split along the axis given, or not at all."""

    def only(setting, operator):
        axis = axes.get(operator.module.rpartition(".")[2], "")
        found = [rule for rule in legal_rules(setting, operator) if rule.axis == axis]
        return tuple(found[:1])  # the replicated one is the first of those without an axis

    monkeypatch.setattr(segments, "legal_rules", only)


def point_by_hand(asked, degrees):
    engine = PlanSearch(asked)
    return engine, engine.candidate(degrees).planned((0, len(engine.row)))


def arrives(lies, wanted):
    return PrepareModuleInput(
        input_layouts=(lies,), desired_input_layouts=(wanted,), use_local_output=True
    )


def parallel(model, mesh, *, sequence):
    """The same by DTensor, as torch's documentation of tensor parallelism does it."""
    lies = Shard(1) if sequence else Replicate()
    enters = PrepareModuleInput(input_layouts=(lies,), desired_input_layouts=(Replicate(),))
    for number, block in enumerate(model.blocks):
        plan = {
            "a": enters,
            "a.q": ColwiseParallel(), "a.k": ColwiseParallel(), "a.v": ColwiseParallel(),
            "a.out": RowwiseParallel(output_layouts=lies),
            "up": ColwiseParallel(input_layouts=lies),
            "down": RowwiseParallel(output_layouts=lies),
        }  # fmt: skip
        if sequence:
            plan |= {"n1": SequenceParallel(), "n2": SequenceParallel()}
        parallelize_module(block, mesh, plan)
        if sequence and number == 0:
            parallelize_module(block, mesh, arrives(Replicate(), Shard(1)))
    if sequence:
        parallelize_module(model.leave, mesh, SequenceParallel())
    return model


def train(model, microbatches):
    for _ in range(microbatches):
        made = model(torch.randn(SAMPLES, LENGTH, 6))
        (made.to_local() if isinstance(made, DTensor) else made).sum().backward()


def degrees_of(tensor, microbatches=1, data=1, zero=0):
    return Degrees(
        tensor=tensor,
        data=data,
        pipeline=1,
        microbatch=SAMPLES,
        microbatches=microbatches,
        zero=zero,
    )


@pytest.mark.parametrize("tensor", [2, 8])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_tensor_parallelism(monkeypatch, tensor, microbatches):
    by_hand(monkeypatch, MEGATRON)
    asked = question(tensor, microbatches=microbatches)
    (calls,) = collectives_of(*point_by_hand(asked, degrees_of(tensor, microbatches)))
    with fake_world(tensor, rank=1):
        model = parallel(Model(), init_device_mesh("cpu", (tensor,)), sequence=False)
        with CollectiveRecorder() as recorder:
            train(model, microbatches)
    assert list(collective_differences(calls, recorder.seen)) == []
    assert sum(call.count for call in calls) == 8 * microbatches


@pytest.mark.parametrize("tensor", [2, 8])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_sequence_parallelism(monkeypatch, tensor, microbatches):
    by_hand(monkeypatch, SEQUENCE)
    asked = question(tensor, microbatches=microbatches)
    # Without latency, by which a sum of few bytes is cheaper than a reduce-scatter and a gather.
    network = changed(MACHINE.network, latency=0.0)
    asked = replace(asked, machine=replace(MACHINE, network=network))
    (calls,) = collectives_of(*point_by_hand(asked, degrees_of(tensor, microbatches)))
    with fake_world(tensor, rank=1):
        model = parallel(Model(), init_device_mesh("cpu", (tensor,)), sequence=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with CollectiveRecorder() as recorder:
            train(model, microbatches)
            optimizer.step()
    assert list(collective_differences(calls, recorder.seen)) == []


SPLIT = {
    f"{module}.{kind}": dim
    for module, dim in (("a.q", 0), ("a.k", 0), ("a.v", 0), ("up", 0), ("a.out", 1), ("down", 1))
    for kind in ("weight", "bias")
    if dim == 0 or kind == "weight"
}


def specs_of(module):
    return {
        name: TensorSpec(shape=tuple(p.shape), dtype="float32")
        for name, p in module.named_parameters()
    }


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("data", [4, 128])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_fully_shard_of_tensor_parallel_blocks(monkeypatch, data, microbatches):
    """Both together on 32 and on 1,024 ranks: the lists of both are all there is; where parts are
    equal, what the search prices as ZeRO 3 is all there is, too."""
    tensor = 8
    by_hand(monkeypatch, MEGATRON)
    asked = question(tensor * data, microbatches=microbatches, data=data)
    degrees = degrees_of(tensor, microbatches, data, zero=3)
    (priced,) = collectives_of(*point_by_hand(asked, degrees))
    plain = Model()
    own = {n: s for n, s in specs_of(plain).items() if not n.startswith("blocks")}
    groups = [FullyShardedModule(parameters=own)] + [
        FullyShardedModule(parameters=dict(tensor_shards(specs_of(block), SPLIT, tensor)))
        for block in plain.blocks
    ]
    listed = fsdp2_wrapper_calls(groups, data, microbatches=microbatches)
    with fake_world(tensor * data, rank=1):
        mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("data", "tensor"))
        model = parallel(Model(), mesh["tensor"], sequence=False)
        for block in model.blocks:
            fully_shard(block, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"], reshard_after_forward=True)
        with CollectiveRecorder() as recorder:
            train(model, microbatches)
    split = [call for call in priced if call.axis == "tensor"]
    assert list(collective_differences([*split, *listed], recorder.seen)) == []
    if data == 4:
        sizes = {kind: size for kind, (_, size) in call_volumes(priced).items()}
        assert sizes == {kind: size for kind, (_, size) in call_volumes([*split, *listed]).items()}
    else:
        assert sum(call.beside for call in listed) > 0


@pytest.mark.parametrize(
    ("recompute", "degrees"),
    sampled([*product([(), (0,)], [degrees_of(8), degrees_of(2, 3), degrees_of(4, 2, 2)])], 3),
)
def test_what_is_listed_is_what_is_priced(degrees, recompute):
    """With the choices of the search itself: the cost model's seconds of the list are what a stage
    takes longer than on links that cost nothing."""
    asked = question(degrees.devices, microbatches=degrees.microbatches, data=degrees.data)
    asked = replace(asked, force=(("blocks.*", "split"),))
    engine = PlanSearch(asked)
    point = engine.candidate(degrees).planned((0, len(engine.row)), recompute)
    free = PlanSearch(
        replace(
            asked,
            machine=replace(MACHINE, network=changed(MACHINE.network, latency=0.0, rate=1e30)),
        )
    )
    setting = free.tables_of(degrees.tensor, degrees.microbatch).setting
    tables = engine.tables_of(degrees.tensor, degrees.microbatch)
    (stage,) = point.stages
    forward = backward = 0.0
    for operator, rule in _rules(tables, point, stage):
        one, two = operator_cost(setting, operator, rule, ())[:2].tolist()
        forward, backward = forward + one, backward + two
    compute = (2 if recompute else 1) * forward + backward
    (calls,) = collectives_of(engine, point)
    passes = [c for c in calls if c.axis == "tensor" and c.phase != "gradients"]
    assert passes
    listed = collective_seconds(passes, MACHINE.network, degrees) / degrees.microbatches
    assert listed == pytest.approx(stage.seconds - compute, rel=1e-9)


def changed(network, **numbers):
    return HierarchicalNetwork(
        tuple(
            replace(level, link=replace(level.link, **numbers), message=None)
            for level in network.levels
        )
    )


@pytest.mark.parametrize(("zero", "tensor"), sampled([*product(range(4), [1, 4])], 4))
def test_what_is_listed_of_gradients_is_what_is_priced(zero, tensor):
    """Hidden or not: buckets, units, and what follows them."""
    degrees = degrees_of(tensor, 3, 8, zero=zero)
    asked = question(degrees.devices, microbatches=3, data=8)
    engine = PlanSearch(asked)
    point = engine.candidate(degrees).planned((0, len(engine.row)))
    (calls,) = collectives_of(engine, point)
    sums = [call for call in calls if call.axis == "data" or call.phase == "gradients"]
    listed = collective_seconds(sums, MACHINE.network, degrees)
    assert listed == pytest.approx(point.exchange + point.hidden, rel=1e-9)
