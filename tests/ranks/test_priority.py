"""ranks: the priority exchange across the step's border equals the serial run, at any timing."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from headway.comm.tuning import autotuning
from headway.errors import Diverged, RunError
from headway.plans import ExchangePlan, data_parallel
from headway.run.distributed.world import World
from headway.run.executor import Executor
from support.ranks import run_ranks
from support.sampling import sampled
from support.serial import Numbers, largest_error, numbers, train_serially
from support.tiny_models import (
    ALL,
    Points,
    Sentences,
    SometimesUnused,
    Tied,
    cross_entropy,
    ignoring_a_word,
)

SEED = 3
STEPS = 9


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def grouped(model):
    biases = [p for n, p in model.named_parameters() if p.ndim < 2]
    weights = [p for n, p in model.named_parameters() if p.ndim >= 2]
    groups = [{"params": biases, "lr": 0.02}, {"params": weights, "weight_decay": 0.1}]
    return torch.optim.NAdam(groups, lr=0.01)


OPTIMIZERS = {
    "adamw": adamw,
    "momentum": momentum,
    "grouped": grouped,
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01, centered=True),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.05),
    "foreach": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, foreach=True),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
}


class Strays(nn.Module):
    """Parameters that are used without a call of the module that owns them."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.head = nn.Linear(8, 4)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(8)) for _ in range(2)])

    def forward(self, x):
        x = torch.tanh(self.first(x)) * self.scales[0] + self.scales[1]
        return F.linear(x, self.head.weight, self.head.bias)


CASES: dict[str, tuple[Any, Any, Any]] = {
    **{name: (build, data, cross_entropy) for name, (build, data) in ALL.items()},
    "pair": (Tied, Sentences, ignoring_a_word),
    "strays": (Strays, Points, cross_entropy),
    "sometimes": (SometimesUnused, Points, cross_entropy),
}


def split(
    world: Any,
    case: str,
    batch: int,
    microbatch: int | None = None,
    *,
    optimizer: str = "adamw",
    chunk: str = "64",
    credit: int = 2,
    clip: float | None = None,
    jitter: float = 0.0,
    scheduled: bool = False,
) -> list[Numbers]:
    """What every third step left."""
    build, data, loss = CASES[case]
    torch.manual_seed(SEED)
    model = build().double()
    made = OPTIMIZERS[optimizer](model)
    scheduler = torch.optim.lr_scheduler.StepLR(made, 1, 0.8) if scheduled else None
    plan = data_parallel(
        batch,
        processes=world.size,
        microbatch=microbatch,
        precision="float64",
        exchange=ExchangePlan(priority=True, chunk=chunk, credit=credit),
    )
    shaken(model, random.Random(world.rank), jitter)
    run = Executor(
        model, made, loss=loss, plan=plan, clip=clip, seed=SEED, world=World.adopt(),
        scheduler=scheduler,
    )  # fmt: skip
    assert (run.strategy.exchange.crossing is None) == (clip is not None)
    history = []
    for step, part in zip(range(1, STEPS + 1), run.batches(data(), epochs=None), strict=False):
        value = run.step(part)
        if step % 3 == 0:
            run.flush()
            history.append(numbers(model, made, value))
    run.strategy.close()
    return history


def shaken(model, draw, jitter):
    """Ranks and layers take different, random times."""
    if jitter:
        for module in model.modules():
            module.register_forward_hook(lambda *_: time.sleep(draw.random() * jitter))
        for parameter in model.parameters():
            parameter.register_hook(lambda _: time.sleep(draw.random() * jitter))


def check(results: list[list[Numbers]], case: str, batch: int, **options: Any) -> None:
    """Every rank holds the serial numbers after every third step."""
    build, data, loss = CASES[case]
    make = OPTIMIZERS[options.pop("optimizer", "adamw")]
    whole = train_serially(
        build, data(), loss, make, batch=batch, steps=STEPS, seed=SEED, **options
    )
    expected = [
        {name: value for name, value in step.items() if not name.startswith("gradient ")}
        for step in whole[2::3]
    ]
    for rank, history in enumerate(results):
        assert len(history) == len(expected) == 3
        for step, (a, b) in enumerate(zip(expected, history, strict=True), start=1):
            got = {name: value for name, value in b.items() if not name.startswith("gradient ")}
            error, name = largest_error(a, got)
            assert error < 1e-12, f"rank {rank}, step {3 * step}: {name} differs by {error:.1e}"


@pytest.mark.parametrize("case", sampled([*CASES], 3))
def test_two_ranks_equal_the_serial_run(case):
    """The first steps are measured and awaited, then the exchange is re-arranged."""
    check(run_ranks(2, split, case, 12), case, 12)


@pytest.mark.parametrize("optimizer", sampled([*OPTIMIZERS], 3))
def test_every_optimiser_is_stepped_in_slices(optimizer):
    found = run_ranks(2, split, "mlp", 12, optimizer=optimizer)
    check(found, "mlp", 12, optimizer=optimizer)


@pytest.mark.parametrize(
    ("case", "credit", "chunk"),
    sampled(
        [
            (case, credit, chunk)
            for case in ("dropout", "sometimes")
            for credit, chunk in ((1, "32"), (3, "200"), (4, "1 MiB"))
        ],
        2,
    ),
)
def test_neither_chunks_nor_credit_nor_timing_change_anything(case, credit, chunk):
    found = run_ranks(3, split, case, 13, 2, chunk=chunk, credit=credit, jitter=0.004)
    check(found, case, 13)


def test_a_clipped_norm_waits_for_all_gradients():
    check(run_ranks(2, split, "mlp", 12, clip=0.05), "mlp", 12, clip=0.05)


def scheduled(world):
    return split(world, "mlp", 12, optimizer="momentum", scheduled=True)


def test_the_rate_is_that_of_the_step_and_not_of_its_successor():
    """The scheduler moves on while updates of the step are still under way."""
    (alone,) = run_ranks(1, scheduled_alone)
    for history in run_ranks(2, scheduled):
        for a, b in zip(alone, history, strict=True):
            common = {k: v for k, v in a.items() if k.startswith("parameter ")}
            error, name = largest_error(common, {k: b[k] for k in common})
            assert error < 1e-12, name


def scheduled_alone(world):
    build, data, loss = CASES["mlp"]
    torch.manual_seed(SEED)
    model = build().double()
    made = momentum(model)
    scheduler = torch.optim.lr_scheduler.StepLR(made, 1, 0.8)
    plan = data_parallel(12, processes=1, precision="float64")
    run = Executor(
        model, made, loss=loss, plan=plan, seed=SEED, world=World.adopt(), scheduler=scheduler
    )
    history = []
    for step, part in zip(range(1, STEPS + 1), run.batches(data(), epochs=None), strict=False):
        value = run.step(part)
        if step % 3 == 0:
            history.append(numbers(model, made, value))
    return history


def many_steps(run, count):
    for _, part in zip(range(count), run.batches(Points(), epochs=None), strict=False):
        run.step(part)


class Late(nn.Module):
    """From call `late` on, the head is used without a call of its module."""

    def __init__(self, late):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.head = nn.Linear(8, 4)
        self.calls, self.late = 0, late

    def forward(self, x):
        self.calls += 1
        x = torch.tanh(self.first(x))
        if self.calls >= self.late:
            return F.linear(x, self.head.weight, self.head.bias)
        return self.head(x)


def reads_late(world):
    model = Late(late=1000)
    plan = data_parallel(12, processes=world.size, exchange=ExchangePlan(priority=True))
    run = Executor(model, adamw(model), loss=cross_entropy, plan=plan, world=World.adopt())
    many_steps(run, 1)  # probes of the first batch call the model, too, on rank 0 more often
    model.late = model.calls + 8
    with pytest.raises(RunError, match=r"head\.(weight|bias) was read while its update may"):
        many_steps(run, 20)
    assert 3 < run.steps_done < 15
    run.flush()
    run.strategy.close()


def test_a_parameter_that_was_read_too_early_stops_the_run():
    run_ranks(2, reads_late)


def diverges(world):
    torch.manual_seed(SEED)
    model = nn.Linear(6, 4)
    plan = data_parallel(12, processes=world.size, exchange=ExchangePlan(priority=True))
    run = Executor(model, adamw(model), loss=cross_entropy, plan=plan, world=World.adopt())
    batches = run.batches(Points(), epochs=None)
    for _ in range(6):
        run.step(next(batches))
    run.flush()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    bad = next(batches)
    for micro in bad.micros:
        if world.rank == 1:
            micro.data[0].fill_(float("nan"))
    with pytest.raises(Diverged):
        run.step(bad)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name
    run.step(next(batches))  # the user may go on
    run.strategy.close()


def test_a_loss_that_is_not_finite_updates_nothing():
    run_ranks(2, diverges)


class CountsInItsGroups(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        return super().step(closure)


def cannot_be_cut(world):
    model = nn.Linear(6, 4)
    made = CountsInItsGroups(model.parameters(), lr=0.1)
    plan = data_parallel(12, processes=world.size, exchange=ExchangePlan(priority=True))
    run = Executor(model, made, loss=cross_entropy, plan=plan, world=World.adopt())
    with pytest.raises(RunError, match="CountsInItsGroups cannot step bucket by bucket"):
        many_steps(run, 3)
    run.strategy.exchange.close()


def test_an_optimiser_that_keeps_state_in_its_groups_is_refused():
    run_ranks(2, cannot_be_cut)


def flights(world):
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)], nn.Linear(64, 4))
    plan = data_parallel(
        12, processes=world.size, exchange=ExchangePlan(priority=True, chunk="8 KiB")
    )
    autotuning.PROFILED_STEPS = (1, 2)

    def loss(model, batch):
        return cross_entropy(model, (batch[0].repeat(1, 11)[:, :64], batch[1]))

    run = Executor(model, adamw(model), loss=loss, plan=plan, world=World.adopt())
    for _, part in zip(range(8), run.batches(Points(), epochs=None), strict=False):
        run.step(part)
    found = run.record.flights
    names = [name for flight in found for name in flight.parameters]
    run.strategy.close()
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    for flight in found:
        assert 0 < flight.ready <= flight.sent <= flight.received <= flight.applied
    return [flight.parameters for flight in found]


def test_every_bucket_tells_when_it_was_ready_sent_received_and_applied():
    first, second = run_ranks(2, flights)
    assert first == second
