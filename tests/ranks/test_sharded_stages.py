"""ranks: blocks wrapped by FSDP2 before the cut, pipe x shard = 2 x 2, equal the serial run."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleZBVZeroBubble
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from headway.errors import PlanError
from headway.parallel import Pipeline, PipelineCallbacks, PipelineRanks, StageGradientSync, cut
from headway.schedule.generators.registry import make_schedule
from headway.schedule.lowering import lower
from support.pipelines import assert_equal, numbers_of, points, run_serially
from support.ranks import run_ranks
from support.sampling import sampled
from support.tiny_models import CLASSES, FEATURES, cross_entropy
from support.torch_runtime import TorchPipeline

PIPE, SHARD, COUNT = 2, 2, 4
TABLES = [
    "gpipe", "1f1b", "interleaved", "zb-h1", "interleaved-zero-bubble", "zbv", "dualpipe-v",
    "chimera", "chimera-doubling", "dualpipe",
]  # fmt: skip


class Block(nn.Module):
    """Sizes that 2 does not divide, a parameter of its own, one that is frozen, one never used."""

    def __init__(self, width=7):
        super().__init__()
        self.up = nn.Linear(FEATURES, width)
        self.down = nn.Linear(width, FEATURES)
        self.scale = nn.Parameter(torch.full((FEATURES,), 0.5))
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)
        self.spare = nn.Linear(3, 1)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x))) * self.scale * self.frozen


class Blocks(nn.Module):
    """What is wrapped and, between them, a parameter that is not."""

    def __init__(self, depth=4):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(FEATURES))
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm = nn.LayerNorm(FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        x = x + self.bias
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build():
    torch.manual_seed(0)
    return Blocks().double()


def table_of(name):
    return lower(make_schedule(name, stages=PIPE, microbatches=COUNT), sync="eager")


def batch():
    return points(SHARD * COUNT, dtype=torch.float64)


def wrap(model, mesh, **options):
    for part in (*model.blocks, model.head):
        fully_shard(part, mesh=mesh, **options)
    return model


class Collectives(TorchDispatchMode):
    """Counts the collectives by name, those of FSDP2's hooks among them."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.count[func.overloadpacket.__name__.strip("_").removesuffix("_base")] += 1
        return func(*args, **(kwargs or {}))


def parts_of(world):
    """The mesh, this rank's team, and the ranks of both copies of the pipeline."""
    mesh = init_device_mesh("cpu", (PIPE, SHARD), mesh_dim_names=("pipe", "shard"))
    copies = [tuple(stage * SHARD + shard for stage in range(PIPE)) for shard in range(SHARD)]
    place = mesh.get_local_rank("shard")
    team = PipelineRanks(
        rank=mesh.get_local_rank("pipe"), ranks=copies[place], group=mesh.get_group("pipe")
    )
    return mesh["shard"], team, copies, place


def whole(numbers):
    """Gathered; collective over the shards."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value)
        for name, value in sorted(numbers.items())
    }


def pipelined(world, names, executor, options):
    mesh, team, copies, place = parts_of(world)
    data = batch()[place::SHARD]
    found, notes = {}, {}
    for name in names:
        model, table = wrap(build(), mesh, **options), table_of(name)
        stages = cut(model, cross_entropy, data[0], stages=table.stages)
        sums = StageGradientSync(stages, table, team, copies=copies)
        calls = PipelineCallbacks(
            loss=cross_entropy,
            share=lambda value, _: value / len(batch()),
            sync=sums,
            step=lambda _: None,
        )
        pipeline = executor(stages, table, team, calls)
        hosted = sorted({stage for _, stage in table.hosted(team.rank)})
        for _ in range(2):
            model.zero_grad()
            with Collectives() as collectives:
                losses = pipeline.run(data)
            assert all(isinstance(p, DTensor) for p in model.blocks.parameters())
        wrapped = sum(isinstance(m, FSDPModule) for n in hosted for m in stages[n].module.modules())
        assert collectives.count["reduce_scatter"] == len(hosted), collectives.count
        assert collectives.count["allgather"] == wrapped, collectives.count
        own = {name for stage in hosted for name in stages[stage].parameters}
        numbers = {k: v for k, v in numbers_of(model).items() if k.split()[-1] in own}
        found[name] = {
            **{f"loss {SHARD * m + place}": value for m, value in losses.items()},
            **whole(numbers),
        }
        notes[name] = pipeline.remarks
    return found, notes


def check(names, executor, **options):
    expected = run_serially(build(), cross_entropy, batch())
    found = run_ranks(PIPE * SHARD, pipelined, names, executor, options, timeout=60)
    for name in names:
        assert_equal(expected, [of_rank[0][name] for of_rank in found], 1e-12)
        assert all(of_rank[1][name] for of_rank in found)


def test_every_schedule_equals_the_serial_run_with_one_sum_for_a_stage_and_step():
    check(sampled([*TABLES], 4), Pipeline)


@pytest.mark.slow
def test_so_it_does_with_the_setting_that_is_unsafe_elsewhere():
    check(sampled(["1f1b", "zb-h1", "zbv", "chimera"], 2), Pipeline, reshard_after_forward=True)


@pytest.mark.slow
def test_so_it_does_on_torchs_runtime():
    check(["1f1b", "zb-h1", "zbv", "chimera"], TorchPipeline, reshard_after_forward=True)


def some(world):
    """Evaluation, mixed precision, recomputation, and what is refused; one start for all."""
    mesh, team, copies, place = parts_of(world)
    data = batch()[place::SHARD]
    model, table = wrap(build(), mesh), table_of("1f1b")
    stages = cut(model, cross_entropy, data[0], stages=table.stages)
    assert all(isinstance(p, DTensor) for p in model.blocks.parameters()), "after the cut"

    def pipeline(stages, table, **options):
        given = {"copies": copies, **options}
        sums = StageGradientSync(stages, table, team, **given)
        share = {"share": lambda value, _: value / len(batch())}
        return Pipeline(
            stages,
            table,
            team,
            PipelineCallbacks(loss=cross_entropy, sync=sums, step=lambda _: None, **share),
        )

    def refused(*args, **options):
        with pytest.raises(PlanError) as error:
            pipeline(*args, **options)
        return list(error.value.problems)

    losses = pipeline(stages, table).evaluate(data[:3])
    assert all(isinstance(p, DTensor) for p in model.blocks.parameters()), "after evaluation"
    bare = make_schedule("1f1b", stages=PIPE, microbatches=COUNT)
    flushless = lower(make_schedule("pipedream", stages=PIPE, microbatches=COUNT), sync="eager")
    said = {
        "no sync": refused(stages, bare),
        "no flush": refused(stages, flushless),
        "no copies": refused(stages, table, copies=None),
    }
    with pytest.raises(PlanError, match="gathers its parameters around its forward"):
        cut(fully_shard(build(), mesh=mesh), cross_entropy, data[0], stages=2)
    with pytest.raises(PlanError, match=r"uses head\.weight outside of the module that"):
        cut(wrap(Peeking().double(), mesh), cross_entropy, data[0], stages=2)
    return {f"loss {SHARD * m + place}": v for m, v in losses.items()}, said, mixed(world, mesh)


class Peeking(Blocks):
    def forward(self, x):
        return super().forward(x) + self.head.weight.sum()


def mixed(world, mesh):
    """Gradients in bfloat16 are summed in the type of the shards; hidden ones are refused."""
    _, team, copies, place = parts_of(world)
    data, table = batch()[place::SHARD], table_of("zb-h1")
    data = [(x.bfloat16(), y) for x, y in data]

    def pipeline(**policy):
        model = wrap(build().float(), mesh, mp_policy=MixedPrecisionPolicy(**policy))
        model.bias.data, model.norm = model.bias.data.bfloat16(), nn.Identity()
        stages = cut(model, cross_entropy, data[0], stages=2)
        sums = StageGradientSync(stages, table, team, copies=copies)
        calls = PipelineCallbacks(loss=cross_entropy, sync=sums, step=lambda _: None)
        return Pipeline(stages, table, team, calls)

    bf16 = torch.bfloat16
    with pytest.raises(PlanError, match=r"in torch.bfloat16 that it reduces in torch.float32"):
        pipeline(param_dtype=bf16, reduce_dtype=torch.float32)
    made = pipeline(param_dtype=bf16)
    made.run(data)
    own = made.stages[team.rank].parameters
    return {n: p.grad.dtype for n, p in own.items() if isinstance(p.grad, DTensor)}


def test_evaluation_mixed_precision_and_refusals():
    found = run_ranks(PIPE * SHARD, some, timeout=60)
    model = build().eval()
    expected = {f"loss {m}": cross_entropy(model, batch()[m]) / 8 for m in range(6)}
    assert_equal({k: v.detach() for k, v in expected.items()}, [losses for losses, _, _ in found])
    for rank, (_, said, kinds) in enumerate(found):
        stage = rank // SHARD
        sync = "the table has no SYNC of it: lower(..., sync='eager')"
        assert said["no sync"] == [f"stage {stage} is wrapped by fully_shard, and {sync}"]
        flush = "it has no flush, and fully_shard keeps one version of the weights"
        assert said["no flush"] == [flush]
        assert said["no copies"] == [
            "fully_shard splits their parameters over copies of the pipeline"
        ]
        assert set(kinds.values()) == {torch.float32}


# -- what torch's own schedules do: the reason for `hold` ------------------------------------------


def layers():
    torch.manual_seed(0)
    parts = [
        nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, FEATURES))
        for _ in range(2 * PIPE)
    ]
    parts[-1].append(nn.Linear(FEATURES, CLASSES))
    return nn.Sequential(*parts).double()


def torchs_own(world, reshard):
    """Torch's ZBV on stages wrapped in and out; the gradients of this rank's stages."""
    mesh, team, _, place = parts_of(world)
    model, data = layers(), batch()[place::SHARD]
    numbers = [team.rank, 2 * PIPE - 1 - team.rank]
    for number in numbers:
        for layer in model[number]:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model[number], mesh=mesh, reshard_after_forward=reshard)
        for part in model[number].modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(1.0)
    stages = [
        PipelineStage(model[n], n, 2 * PIPE, torch.device("cpu"), group=team.group) for n in numbers
    ]
    loss = nn.CrossEntropyLoss(reduction="sum")
    schedule = ScheduleZBVZeroBubble(stages, COUNT, loss_fn=loss, scale_grads=False)
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    inputs = (x,) if 0 in numbers else ()
    schedule.step(*inputs, **({"target": y} if 2 * PIPE - 1 in numbers else {}))
    found = {f"{n}.{key}": p.grad for n in numbers for key, p in model[n].named_parameters()}
    held = whole({name: g for name, g in found.items() if g is not None})
    return {name: held.get(name) for name in found}


def wrong(reshard):
    model = layers()
    x, y = (torch.cat(parts) for parts in zip(*batch(), strict=True))
    nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    found = run_ranks(PIPE * SHARD, torchs_own, reshard, timeout=60)
    return {
        name
        for of_rank in found
        for name, g in of_rank.items()
        if g is None or float((g - expected[name]).abs().max()) > 1e-9
    }


@pytest.mark.slow
def test_torchs_own_split_backward_still_loses_gradients_of_resharded_blocks():
    """Once this fails, torch has mended it, and `hold` need not keep blocks gathered for it."""
    assert wrong(True)
    assert not wrong(False)
