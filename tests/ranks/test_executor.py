"""ranks: the executor on 1 to 4 ranks equals the serial loop in every number of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from headway.errors import Diverged, PlanError, UsageError
from headway.plans import ExchangePlan, data_parallel
from headway.run.distributed.world import World
from headway.run.executor import Executor
from support.ranks import RanksFailed, run_ranks
from support.sampling import sampled
from support.serial import Numbers, largest_error, numbers, train_serially
from support.tiny_models import (
    ALL,
    Mlp,
    Points,
    Sentences,
    SometimesUnused,
    Tied,
    WithDropout,
    cross_entropy,
    ignoring_a_word,
)

SEED = 3


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Checkpointed(nn.Module):
    """Recomputes a part with dropout in backward."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4), nn.Tanh())
        self.outer = nn.Linear(8, 4)

    def forward(self, x):
        return self.outer(checkpoint(self.inner, x, use_reentrant=False))


CASES: dict[str, tuple[Any, Any, Any]] = {
    **{name: (build, data, cross_entropy) for name, (build, data) in ALL.items()},
    "pair": (Tied, Sentences, ignoring_a_word),
    "sometimes": (SometimesUnused, Points, cross_entropy),
    "checkpointed": (Checkpointed, Points, cross_entropy),
}


def split(
    world: Any,
    case: str,
    batch: int,
    microbatch: int | None,
    steps: int,
    clip: float | None = None,
    optimizer: str = "adamw",
    bucket_bytes: int = 300,
    overlap: bool = True,
) -> list[Numbers]:
    build, data, loss = CASES[case]
    torch.manual_seed(SEED)
    model = build().double()
    made = globals()[optimizer](model)
    plan = data_parallel(
        batch,
        processes=world.size,
        microbatch=microbatch,
        precision="float64",
        exchange=ExchangePlan(bucket=str(bucket_bytes), overlap=overlap),
    )
    run = Executor(model, made, loss=loss, plan=plan, clip=clip, seed=SEED, world=World.adopt())
    history = []
    for _, part in zip(range(steps), run.batches(data(), epochs=None), strict=False):
        history.append(numbers(model, made, run.step(part)))
    return history


def check(results: list[list[Numbers]], case: str, batch: int, steps: int, **options: Any) -> None:
    """Every rank holds the serial numbers after every step."""
    build, data, loss = CASES[case]
    make = globals()[options.pop("optimizer", "adamw")]
    expected = train_serially(
        build, data(), loss, make, batch=batch, steps=steps, seed=SEED, **options
    )
    assert len(expected) == steps
    for rank, history in enumerate(results):
        assert len(history) == steps
        for step, (a, b) in enumerate(zip(expected, history, strict=True), start=1):
            error, name = largest_error(a, b)
            assert error < 1e-12, f"rank {rank}, step {step}: {name} differs by {error:.1e}"


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_the_serial_run(case):
    """40 samples in batches of 12: the fourth step is a ragged batch of 4."""
    check(run_ranks(2, split, case, 12, 4, 5), case, 12, 5)


@pytest.mark.parametrize(
    ("case", "size", "batch", "microbatch"),
    sampled(
        [
            (case, *sizes)
            for case in ("dropout", "pair")
            for sizes in ((3, 13, 2), (4, 9, None), (4, 6, 1))
        ],
        3,
    ),
)
def test_batches_that_no_number_of_ranks_divides(case, size, batch, microbatch):
    """40 = 3 x 13 + 1: on the last batch of one sample two of three ranks have no work."""
    check(run_ranks(size, split, case, batch, microbatch, 7), case, batch, 7)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("bucket_bytes", [1, 10_000])
def test_bucket_sizes_and_overlap_change_nothing(bucket_bytes, overlap):
    results = run_ranks(2, split, "unused", 12, 4, 3, bucket_bytes=bucket_bytes, overlap=overlap)
    check(results, "unused", 12, 3)


def test_clipping_and_momentum():
    results = run_ranks(2, split, "mlp", 12, 4, 4, clip=0.05, optimizer="momentum")
    check(results, "mlp", 12, 4, clip=0.05, optimizer="momentum")


def diverging(world):
    torch.manual_seed(SEED)
    model = nn.Linear(6, 4).double()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    def loss(model, batch):
        value = cross_entropy(model, batch)
        return value * float("nan") if world.rank == 1 else value

    run = Executor(model, momentum(model), loss=loss, batch=8, world=World.adopt())
    with pytest.raises(Diverged, match="nan") as caught:
        run.step(next(iter(run.batches(Points(dtype=torch.float64)))))
    assert "step 1" in caught.value.where
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_a_loss_that_is_not_finite_on_one_rank_stops_all_before_the_update():
    run_ranks(2, diverging)


def votes(world):
    model = nn.Linear(6, 4)
    run = Executor(model, momentum(model), loss=cross_entropy, batch=8, world=World.adopt())
    seen = []
    for number, batch in enumerate(run.batches(Points())):
        run.wants_stop = world.rank == 1 and number == 2
        run.step(batch)
        seen.append(run.record.votes)
    return seen


def test_one_ranks_wish_to_stop_reaches_all_in_the_same_step():
    assert run_ranks(3, votes) == [[0, 0, 1, 0, 0]] * 3


def thawed(world):
    """A parameter is frozen at first and trained from the second step on."""
    torch.manual_seed(SEED)
    model = Mlp()
    model.first.requires_grad_(False)
    run = Executor(model, momentum(model), loss=cross_entropy, batch=8, world=World.adopt())
    for number, batch in enumerate(run.batches(Points())):
        model.first.requires_grad_(number > 0)
        run.step(batch)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_parameters_that_are_thawed_later_are_exchanged():
    first, second = run_ranks(2, thawed)
    (alone,) = run_ranks(1, thawed)
    for name, value in first.items():
        assert torch.equal(value, second[name])
        torch.testing.assert_close(value, alone[name])


def different_start(world):
    torch.manual_seed(world.rank)
    model = nn.Linear(6, 4)
    message = "start from different numbers in weight and 1 more"
    if world.rank == 0:
        with pytest.warns(UserWarning, match=message):
            Executor(model, momentum(model), loss=cross_entropy, batch=8, world=World.adopt())
    else:
        Executor(model, momentum(model), loss=cross_entropy, batch=8, world=World.adopt())
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_ranks_that_start_from_different_numbers_are_made_alike():
    first, second = run_ranks(2, different_start)
    assert all(torch.equal(first[name], second[name]) for name in first)


def different_models(world):
    model = nn.Linear(6, 4 + world.rank)
    Executor(model, momentum(model), loss=cross_entropy, batch=8, world=World.adopt())


def test_ranks_with_different_models_are_refused():
    with pytest.raises(RanksFailed, match="rank 1 has another model than rank 0"):
        run_ranks(2, different_models)


def test_exactly_one_of_plan_and_batch():
    model = nn.Linear(6, 4)
    with pytest.raises(UsageError, match="exactly one of plan and batch"):
        Executor(model, momentum(model), loss=cross_entropy)


def test_a_plan_for_another_number_of_processes_is_refused(tmp_path):
    model = nn.Linear(6, 4)
    path = tmp_path / "plan.json"
    data_parallel(8, processes=4).save(path)
    with pytest.raises(PlanError, match="4 ranks; 1 process"):
        Executor(model, momentum(model), loss=cross_entropy, plan=path)


def bytes_sent(world):
    """The records name every bucket that was exchanged, with its size, and the time it took."""
    torch.manual_seed(SEED)
    model = WithDropout().double()
    plan = data_parallel(8, processes=world.size, exchange=ExchangePlan(bucket="200"))
    run = Executor(model, momentum(model), loss=cross_entropy, plan=plan, world=World.adopt())
    run.step(next(iter(run.batches(Points(dtype=torch.float64)))))
    flights = run.record.flights
    assert all(0 < f.ready <= f.sent <= f.received for f in flights)
    return [f"bucket {f.bucket}: {f.num_bytes} B" for f in flights], run.record.seconds("wait")


def test_every_bucket_is_on_the_timeline():
    for labels, waited in run_ranks(2, bytes_sent):
        assert labels == [f"bucket {n}: {size} B" for n, size in enumerate([32, 256, 64, 384])]
        assert waited > 0
