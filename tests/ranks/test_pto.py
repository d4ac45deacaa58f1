"""ranks: work per layer divided over ranks gives the serial results bit for bit."""

from __future__ import annotations

import math
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from headway.errors import RecipeError
from headway.optim import (
    LAMB,
    LARS,
    ParallelOperator,
    fit_exchange,
    layerwise,
    parallel_norms,
    scale_rates,
)
from headway.optim import layerwise as layerwise_module
from headway.optim.parallel_operator import Division, divide
from headway.plans import ExchangePart, ExchangePlan, data_parallel
from headway.run.executor import Executor
from support.commands import events, headway_here
from support.ranks import ranks, run_ranks
from support.tiny_models import Points, WithUnused, cross_entropy

# -- the division --------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(
    "sizes",
    [(), (5,), (1, 1, 1, 1), (9, 7, 6, 5, 4, 3), (100, 1, 1, 1), tuple(range(1, 60)), (0, 0, 0)],
)
def test_every_item_has_one_owner_and_loads_are_within_grahams_bound(sizes, count):
    owners = divide(sizes, count)
    assert len(owners) == len(sizes)
    assert all(0 <= owner < count for owner in owners)
    loads = [sum(s for s, o in zip(sizes, owners, strict=True) if o == r) for r in range(count)]
    best = max(max(sizes, default=0), -(-sum(sizes) // count))
    assert max(loads) <= (4 / 3) * best + 1e-9
    views = [Division.of(sizes, rank, count) for rank in range(count)]
    assert sorted(item for view in views for item in view.own) == list(range(len(sizes)))
    assert len({(v.owners, v.places, v.most, v.heaviest) for v in views}) == 1
    assert len(set(views[0].places)) == len(sizes)


def test_the_largest_goes_first_and_ties_go_to_the_lower():
    assert divide([3, 9, 3, 4], 2) == (1, 0, 1, 1)
    assert divide([1, 1, 1], 2) == (0, 1, 0)


# -- any function ----------------------------------------------------------------------------------


def statistics(item, counts):
    counts.append(item.numel())
    return torch.stack([item.sum(), item.std(), item.min()])


def parallel_map(world, sizes):
    operator = ParallelOperator(world.group)
    items = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in sizes]
    done, serial = [], []
    found = operator.map(
        lambda item: statistics(item, done), items, [i.numel() for i in items], like=torch.zeros(3)
    )
    expected = [statistics(item, serial) for item in items]
    assert torch.equal(found, torch.stack(expected) if items else torch.zeros(0, 3))
    return sum(done), sum(serial)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_function_per_layer_is_computed_once_and_each_rank_does_its_part(size):
    sizes = [5000, 17, 4000, 33, 2500, 2500, 1200, 900, 640, 64, 320, 128]
    counts = run_ranks(size, parallel_map, sizes)
    total = counts[0][1]
    assert sum(own for own, _ in counts) == total
    assert max(own for own, _ in counts) <= 1.16 * total / size


@pytest.mark.parametrize("sizes", [[], [7], [3, 4]])
def test_fewer_layers_than_ranks(sizes):
    counts = run_ranks(3, parallel_map, sizes)
    assert sum(own for own, _ in counts) == sum(sizes)


# -- LARS and LAMB ---------------------------------------------------------------------------------

SHAPES = [(64, 32), (64,), (300, 40), (8, 3, 3), (1, 50), (5,), (90, 120), (7, 7), (2, 2)]
KINDS = {
    "lars": lambda p: LARS(p, 0.5, weight_decay=0.1, trust=0.02),
    "lamb": lambda p: LAMB(p, 0.05, weight_decay=0.1, clamp=(0.0, 5.0)),
}


def train(kind, dtype, steps, divided, group=None):
    """Weights and state after some steps, the work of the norms, and the optimiser."""
    generator = torch.Generator().manual_seed(4)
    params = [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]
    params.append(nn.Parameter(torch.zeros(6, 6, dtype=dtype)))
    groups = [{"params": params[:4]}, {"params": params[4:], "lr": 0.1, "exclude_1d": False}]
    optimizer = KINDS[kind](groups)
    if divided:
        assert parallel_norms(optimizer, group, always=divided == "always")
    counted = []
    original = layerwise.norms
    layerwise_module.norms = lambda xs: (
        counted.extend(x.numel() + layerwise_module.CALL_ELEMENTS for x in xs) or original(xs)
    )
    for step in range(steps):
        for number, parameter in enumerate(params):
            made = torch.randn(parameter.shape, generator=generator)
            unused = step == 1 and number == 2
            parameter.grad = None if unused else made.to(parameter)
        optimizer.step()
    layerwise_module.norms = original
    state = [v for p in params for v in optimizer.state[p].values() if torch.is_tensor(v)]
    return [*(p.detach() for p in params), *state], sum(counted), optimizer


def divided_training(world, kind, dtype):
    serial, whole, _ = train(kind, getattr(torch, dtype), 4, None)
    own, part, _ = train(kind, getattr(torch, dtype), 4, "always", world.group)
    for number, (one, two) in enumerate(zip(serial, own, strict=True)):
        assert torch.equal(one, two), number
    return part, whole


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_divided_norms_are_the_serial_ones_bit_for_bit(kind, dtype):
    counts = run_ranks(3, divided_training, kind, dtype)
    whole = counts[0][1]
    assert sum(part for part, _ in counts) == whole
    assert max(part for part, _ in counts) <= 0.4 * whole


def automatic(world, slow):
    """A machine on which norms take long divides them, one on which they do not does not."""
    if slow:
        original = layerwise.norms

        def norms(xs):
            time.sleep(0.02)
            return original(xs)

        layerwise.norms = norms
    serial, whole, _ = train("lamb", torch.float32, 10, None)
    own, part, optimizer = train("lamb", torch.float32, 10, "auto", world.group)
    for one, two in zip(serial, own, strict=True):
        assert torch.equal(one, two)
    return optimizer.shared_norms.pays, part, whole


def test_the_division_is_chosen_where_it_pays_alike_on_all_ranks():
    slow = run_ranks(2, automatic, True)
    assert all(pays for pays, _, _ in slow)
    # 2 + 5 steps alone, then 3 divided ones
    assert sum(part for _, part, _ in slow) == pytest.approx(1.7 * slow[0][2], rel=0.05)


def never_pays(world):
    from headway.optim.parallel_operator import SharedNorms

    operator = ParallelOperator(world.group)
    norms = SharedNorms(operator)
    device = torch.device("cpu")
    for _ in range(9):
        assert norms.own([10, 20, 30], device) is None
        with norms.clock(device):
            pass
    return norms.pays


def test_the_division_is_not_chosen_where_it_does_not_pay():
    assert run_ranks(3, never_pays) == [False] * 3


@ranks(2)
def test_other_optimizers_are_left_alone(world):
    weights = [nn.Parameter(torch.ones(2, 2))]
    sgd = torch.optim.SGD(weights, lr=0.1)
    assert not parallel_norms(sgd, world.group)
    assert vars(sgd).get("shared_norms") is None
    lars = LARS(weights, 0.1)
    alone = dist.new_group([world.rank], use_local_synchronization=True)
    assert not parallel_norms(lars, alone)
    assert lars.shared_norms is None
    assert parallel_norms(lars, world.group)
    dist.destroy_process_group(alone)


@ranks(2)
def test_norms_are_divided_only_where_all_ranks_step_alike(world):
    def fits(ranks=2, kind=LAMB, **exchange):
        optimizer = kind([nn.Parameter(torch.ones(2, 2))], 0.1)
        divided = fit_exchange(optimizer, ExchangePlan(**exchange), ranks=ranks, group=world.group)
        assert divided == (getattr(optimizer, "shared_norms", None) is not None)
        return divided

    assert fits()
    assert fits(reduce="adasum")
    assert not fits(ranks=1)
    assert not fits(kind=torch.optim.SGD)
    assert not fits(priority=True)
    assert not fits(reduce="adasum", values="updates")
    assert not fits(parts=(ExchangePart(parameters="*", ranks=((0,), (1,))),))
    scaled = torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1)
    scale_rates(scaled, "linear from 2 samples", batch=4)
    with pytest.raises(RecipeError, match="linearly scaled"):
        fit_exchange(scaled, ExchangePlan(reduce="adasum"), ranks=1)


def executed(kind, always=False, **exchange):
    """Parameters after six steps on all ranks."""
    torch.manual_seed(0)
    model = WithUnused()
    optimizer = KINDS[kind](model.parameters())
    plan = data_parallel(12, processes=dist.get_world_size(), exchange=ExchangePlan(**exchange))
    with Executor(model, optimizer, loss=cross_entropy, plan=plan) as run:
        if always:
            assert parallel_norms(optimizer, always=True)
        for batch in run.batches(Points(), epochs=None):
            run.step(batch)
            if run.steps_done == 6:
                break
        run.flush()
        return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("kind", KINDS)
@ranks(2)
def test_an_executor_steps_with_divided_norms_and_bucket_by_bucket(world, kind):
    expected = executed(kind)
    small = {"bucket": "256 B"}
    for found in (executed(kind, always=True), executed(kind, priority=True, **small)):
        for one, two in zip(expected, found, strict=True):
            assert torch.equal(one, two)


# -- the whole way: a recipe, two ranks, and the verdict ------------------------------------------

TOML = """
name = "large"
batch = "12 samples"
microbatch = 4
stop = "12 steps"
seed = 3
checkpoint_every = 4
scale_rate = "{rule} from 6 samples"

[model]
call = "support.tiny_models:WithUnused"

[data]
call = "support.tiny_models:Points"

[loss]
criterion = "torch.nn:CrossEntropyLoss"

[optimizer]
call = "headway.optim:{kind}"
lr = {lr}
weight_decay = 0.05

[scheduler]
call = "headway.optim:WarmUp"
steps = 4
start = 0.5

[scheduler.then]
call = "torch.optim.lr_scheduler:CosineAnnealingLR"
T_max = 12
"""


@pytest.mark.slow
@pytest.mark.timeout(170)
@pytest.mark.parametrize(
    ("kind", "lr", "rule"), [("LAMB", 0.02, "square_root"), ("LARS", 0.1, "linear")]
)
def test_a_recipe_trains_on_two_ranks_and_is_equal_to_the_serial_run(tmp_path, kind, lr, rule):
    (tmp_path / "recipe.toml").write_text(TOML.format(kind=kind, lr=lr, rule=rule))
    done = headway_here(
        "train", "recipe.toml", "--processes", "2", "--directory", "run", cwd=tmp_path
    )
    assert done.code == 0, done.err
    steps = events(tmp_path / "run", "step")
    assert len(steps) == 12
    factor = 2 if rule == "linear" else 2**0.5
    # What stands beside a step is the rate after it, here of the second one.
    second = lr * factor * 0.625 * (1 + math.cos(math.pi / 12)) / 2
    assert steps[0]["lr"] == pytest.approx(second)
    assert steps[-1]["loss"] < steps[0]["loss"]
    verified = headway_here("verify", "recipe.toml", "--processes", "2", cwd=tmp_path)
    assert verified.code == 0, verified.out + verified.err
    assert "EQUAL" in verified.out
