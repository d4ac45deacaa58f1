"""ranks: verification says equal for what is equal, and catches every bug that is planted."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from contextlib import contextmanager
from itertools import islice, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from headway.api.verification import verify
from headway.comm.algorithms.method import AllReduce
from headway.comm.exchange.gradient_exchange import GradientExchange, StepExchange
from headway.comm.lanes.buckets import Bucket
from headway.data.loader import Loader
from headway.errors import NotEqual
from headway.plans import BatchSplit, ExchangePlan, data_parallel
from headway.run import executor as executor_module
from headway.run.distributed.launch_env import LaunchEnv
from headway.run.distributed.world import World
from headway.run.executor import Executor
from headway.run.recipe.recipe import Recipe
from headway.run.strategy.strategy import Strategy
from headway.verification.compare import compare
from headway.verification.distributed_run import record_in_world
from headway.verification.recording import Recording, VerifyJob
from headway.verification.serial_run import record_serial
from support.commands import headway_here
from support.ranks import run_ranks
from support.sampling import sampled

STEPS = 4


def job_of(name: str) -> VerifyJob:
    return VerifyJob(recipe=f"support.recipes:{name}", steps=STEPS)


def split(world: Any, name: str, target: str, plant: Callable[[Any], None] | None = None) -> None:
    if plant is not None:
        plant(world)
    record_in_world(World.adopt(), job_of(name), world.directory / "split")
    if world.rank == 0:
        (world.directory / "split").rename(target)


def verdict(tmp_path, name, size=2, plant=None):
    serial, parallel = tmp_path / "serial", tmp_path / "parallel"
    record_serial(LaunchEnv(), job_of(name), serial)
    run_ranks(size, split, name, str(parallel), plant)
    return compare(Recording.load(serial), Recording.load(parallel))


@pytest.mark.parametrize(
    ("name", "size"), sampled([*product(["mlp", "dropout", "unused", "tied"], [1, 2, 3])], 6)
)
def test_right_runs_are_equal(tmp_path, name, size):
    comparison = verdict(tmp_path, name, size)
    assert comparison.equal, str(comparison.first)
    kinds = {d.kind for d in comparison.differences}
    clipped = {"unclipped", "norm"} if name == "mlp" else set()
    assert kinds == {"loss", "gradient", "parameter", "optimizer"} | clipped
    assert {d.step for d in comparison.differences} == {1, 2, 3, 4}


@pytest.mark.parametrize(
    "name", ["attention", "complex_valued", "sparse", "part_of_the_model", "own_mode"]
)
def test_unusual_models_are_equal_too(tmp_path, name):
    comparison = verdict(tmp_path, name)
    assert comparison.equal, str(comparison.first)


def test_complex_numbers_are_compared_in_both_parts(tmp_path):
    serial = tmp_path / "serial"
    record_serial(LaunchEnv(), job_of("complex_valued"), serial)
    wave = Recording.load(serial).tensors["1/parameter/wave"]
    assert wave.dtype == torch.float64
    assert wave.shape[-1] == 2
    assert bool((wave[..., 1] != 0).all())


def test_rounding_is_excused_where_the_gradient_is_rounding_alone():
    def recording(gradient, parameter):
        tensors = {
            "1/gradient/w": torch.tensor(gradient, dtype=torch.float64),
            "1/parameter/w": torch.tensor(parameter, dtype=torch.float64),
        }
        return Recording(tensors, tuple(tensors))

    serial = recording([1.0, 1e-17, 0.0], [1.0, 1.0, 1.0])
    assert compare(serial, recording([1.0, 2e-17, 0.0], [1.0, 1 + 1e-9, 1.0])).equal
    assert not compare(serial, recording([1.0, 2e-17, 0.0], [1.0, 1 + 1e-5, 1.0])).equal
    assert not compare(serial, recording([1.0, 2e-17, 0.0], [1 + 1e-9, 1.0, 1.0])).equal
    assert not compare(serial, recording([1.0, 2e-17, 0.0], [1.0, 1.0, 1 + 1e-9])).equal
    assert compare(serial, recording([1.0, 2e-17, 1e-17], [1.0, 1.0, 1 + 1e-9])).equal
    assert not compare(serial, recording([1.0, 2e-17, 1e-9], [1.0, 1.0, 1 + 1e-9])).equal


def test_a_step_as_large_as_its_neighbours_from_a_small_gradient_carries_its_rounding():
    """Adam's: element 1 has a gradient of 1e-3, of which 1e-12 of the largest is 1e-9."""

    def recording(first, second):
        tensors = {}
        for step, values in enumerate((first, second), start=1):
            tensors[f"{step}/gradient/w"] = torch.tensor([1.0, 1e-3], dtype=torch.float64)
            tensors[f"{step}/parameter/w"] = torch.tensor(values, dtype=torch.float64)
        return Recording(tensors, tuple(tensors))

    serial = recording([1.0, 1.0], [0.9, 0.9])
    assert compare(serial, recording([1.0, 1 + 1e-10], [0.9, 0.9 + 3e-10])).equal
    for wrong in (
        recording([1 + 2e-12, 1.0], [0.9, 0.9]),
        recording([1.0, 1 + 3e-10], [0.9, 0.9]),
        recording([1.0, 1.0], [0.9 + 2e-12, 0.9]),
        recording([1.0, 1.0], [0.9, 0.9 + 5e-10]),
    ):
        assert not compare(serial, wrong).equal


def test_a_ragged_batch_and_the_next_epoch_are_among_the_steps():
    """40 samples in batches of 12: the third step has 4 samples, the fourth begins an epoch."""
    job = job_of("mlp")
    cursor = job.start(job.load(), lambda epoch: [12, 12, 12, 4])
    assert (cursor.epoch, cursor.position) == (0, 12)


# Each of these plants one bug on every rank; the verdict must name where it shows first.


def no_reduction(_):
    def rounds(self, fused, route):
        yield dist.barrier(async_op=True)

    AllReduce.rounds = rounds


def double_reduction(_):
    original = AllReduce.rounds

    def rounds(self, fused, route):
        dist.all_reduce(fused.gradients)
        yield from original(self, fused, route)

    AllReduce.rounds = rounds


def mean_instead_of_sum(_):
    original = GradientExchange.receive

    def receive(self):
        flights = original(self)
        self.scale(0.5)
        return flights

    GradientExchange.receive = receive


def last_bucket_forgotten(_):
    original = GradientExchange._depart

    def depart(self, bucket):
        if bucket.number == len(self.buckets) - 1:
            bucket.fused.gradients.mul_(2)
        original(self, bucket)

    GradientExchange._depart = depart


def dropout_by_rank(world):
    original = executor_module.seed_everything
    executor_module.seed_everything = lambda *parts: original(*parts, world.rank)


def dropout_by_microbatch(_):
    """Samples are numbered within their micro-batch."""
    original = executor_module.LogicalRandomness
    executor_module.LogicalRandomness = lambda sites, positions, epoch: original(
        sites, range(len(positions)), epoch
    )


def sample_left_out(_):
    original = BatchSplit.share

    def share(self, rank, ranks, samples=None):
        whole = original(self, rank, ranks, samples)
        return whole[1:] if ranks > 1 and rank == 0 and len(whole) > 1 else whole

    BatchSplit.share = share


def sample_taken_twice(_):
    original = BatchSplit.share

    def share(self, rank, ranks, samples=None):
        whole = original(self, rank, ranks, samples)
        return whole if ranks == 1 or rank == 0 else range(whole.start - 1, whole.stop - 1)

    BatchSplit.share = share


def ranks_read_their_own_order(world):
    original = Loader.__init__

    def init(self, source, split, *, rank, ranks, cursor, **options):
        moved = type(cursor)(cursor.seed + world.rank, cursor.epoch, cursor.position)
        original(self, source, split, rank=rank, ranks=ranks, cursor=moved, **options)

    Loader.__init__ = init


def local_mean(_):
    """The loss of a micro-batch is divided by the samples of a full batch, ragged or not."""
    original = Executor.step

    def step(self, batch):
        return original(self, dataclasses.replace(batch, samples=12))

    Executor.step = step
    Strategy.scale = lambda self: self._read_tally() and None


def accumulation_lost(_):
    """Only the last micro-batch counts."""
    original = Strategy.arm

    def arm(self):
        for parameter in self._trained.values():
            if parameter.grad is not None:
                parameter.grad.zero_()
        original(self)

    Strategy.arm = arm


def clipped_before_the_exchange(_):
    original = Strategy.send

    def send(self):
        torch.nn.utils.clip_grad_norm_(self._trained.values(), self._setup.clip)
        original(self)

    GradientExchange.arm = lambda self: None
    Strategy.send = send


def stale_gradients(_):
    original = StepExchange.begin

    def begin(self):
        old = [b.fused.gradients.clone() for b in self.buckets]
        original(self)
        self._old = old

    def receive(self, original=GradientExchange.receive):
        flights = original(self)
        for bucket, old in zip(self.buckets, self._old, strict=True):
            bucket.fused.gradients.add_(old, alpha=0.1)
        return flights

    StepExchange.begin = begin
    GradientExchange.receive = receive


def scheduler_twice(_):
    original = Strategy.update

    def update(self):
        original(self)
        if self._setup.scheduler is not None:
            self._setup.scheduler.step()

    Strategy.update = update


def no_scheduler(_):
    def update(self):
        self._setup.optimizer.step()

    Strategy.update = update


def zeros_for_unused(_):
    Bucket.used = property(lambda self: [True for _ in self.names])


def not_clipped(_):
    Strategy.clip = lambda self: None


def float32_gradients(_):
    original = GradientExchange.receive

    def receive(self):
        flights = original(self)
        for bucket in self.buckets:
            bucket.fused.buffer.copy_(bucket.fused.buffer.float().double())
        return flights

    GradientExchange.receive = receive


def wrong_on_another_rank(world):
    """Rank 0 holds the right sums."""
    original = GradientExchange.receive

    def receive(self, *args, **kwargs):
        flights = original(self, *args, **kwargs)
        if world.rank == 1:
            self.buckets[-1].fused.gradients[0] += 1.0
        return flights

    GradientExchange.receive = receive


def ends_early(world):
    """The loader gives three batches in place of four."""
    original = Executor.loader

    @contextmanager
    def loader(self, *args, **kwargs):
        with original(self, *args, **kwargs) as batches:
            yield islice(batches, 3)

    Executor.loader = loader


PLANTED = [
    (no_reduction, "mlp", "step 1, unclipped second"),
    (wrong_on_another_rank, "tied", "step 1, gradient"),
    (ends_early, "mlp", "step 4, loss loss: the split run has none"),
    (double_reduction, "mlp", "step 1, unclipped second"),
    (mean_instead_of_sum, "mlp", "step 1, unclipped second"),
    (last_bucket_forgotten, "tied", "step 1, gradient"),
    (dropout_by_rank, "dropout", "step 1, loss"),
    (dropout_by_microbatch, "dropout", "step 1, loss"),
    (sample_left_out, "mlp", "step 1, loss"),
    (sample_taken_twice, "mlp", "step 1, loss"),
    (ranks_read_their_own_order, "mlp", "step 1, loss"),
    (local_mean, "unused", "step 3, gradient second"),
    (accumulation_lost, "mlp", "step 1, unclipped second"),
    (clipped_before_the_exchange, "mlp", "step 3, unclipped second"),
    (stale_gradients, "mlp", "step 2, unclipped second"),
    (scheduler_twice, "mlp", "step 2, parameter"),
    (no_scheduler, "mlp", "step 2, parameter"),
    (zeros_for_unused, "unused", "step 1, gradient spare"),
    (not_clipped, "mlp", "step 1, gradient second"),
    (float32_gradients, "mlp", "step 1, unclipped second"),
]


@pytest.mark.parametrize(("plant", "name", "where"), PLANTED, ids=[p[0].__name__ for p in PLANTED])
def test_a_planted_bug_is_caught_where_it_shows_first(tmp_path, plant, name, where):
    comparison = verdict(tmp_path, name, 2, plant)
    assert not comparison.equal
    assert str(comparison.first).startswith(where), str(comparison.first)


@pytest.mark.slow
def test_the_command_prints_a_table_and_a_verdict(tmp_path):
    done = headway_here("verify", "support.recipes:mlp", "-n", "1,2", "--steps", "3", cwd=tmp_path)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].split()[:5] == ["processes", "loss", "gradient", "parameter", "buffer"]
    assert [line.split()[0] for line in lines[1:3]] == ["1", "2"]
    assert all(line.endswith("equal") for line in lines[1:3])
    assert lines[3].startswith("EQUAL to the serial run (3 steps,")


def test_a_plan_of_the_users_own_is_proved_in_float64(tmp_path):
    plan = tmp_path / "plan.json"
    data_parallel(12, processes=2, microbatch=2, exchange=ExchangePlan(overlap=False)).save(plan)
    done = headway_here("verify", "support.recipes:mlp", "--plan", str(plan), cwd=tmp_path)
    assert done.code == 0, done.err
    assert done.out.splitlines()[1].split()[0] == "2"
    assert done.out.splitlines()[1].endswith("equal")


def test_a_plan_with_priority_is_proved_with_its_gradients(tmp_path):
    plan = tmp_path / "plan.json"
    exchange = ExchangePlan(priority=True, chunk="200")
    data_parallel(12, processes=3, microbatch=2, exchange=exchange).save(plan)
    done = headway_here(
        "verify", "support.recipes:tied", "--plan", str(plan), "--json", "--steps", "6",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.code == 0, done.err
    (facts,) = json.loads(done.out)
    assert facts["equal"]
    assert set(facts["errors"]) >= {"loss", "gradient", "parameter", "optimizer"}


def test_the_command_exits_with_4_and_names_the_first_difference(tmp_path):
    done = headway_here("verify", "support.recipes:normalised", "-n", "1,2", cwd=tmp_path)
    assert done.code == NotEqual.exit_code == 4
    first, second = done.out.splitlines()[1:3]
    assert first.endswith("equal")
    assert second.endswith("DIFFERENT")
    assert "HW-4001 2 processes: the split run is NOT the serial run" in done.err
    assert "first difference: step 1, loss loss" in done.err
    assert "Traceback" not in done.err


def test_running_statistics_of_copies_equal_the_serial_run_over_the_microbatches(tmp_path):
    words = ("--set", "microbatch=3", "--microbatches", "--steps", "2", "--json")
    done = headway_here("verify", "support.recipes:normalised", "-n", "2", *words, cwd=tmp_path)
    assert done.code == 0, done.out + done.err
    (facts,) = json.loads(done.out)
    assert facts["equal"]
    assert facts["errors"]["buffer"] < 1e-12


@pytest.mark.slow
def test_a_pipeline_with_batch_normalisation_equals_the_serial_run_over_its_microbatches(tmp_path):
    words = ("verify", "support.recipes:normalised", "-n", "2", "--set", "stages=2")
    done = headway_here(*words, "--microbatches", cwd=tmp_path)
    assert done.code == 0, done.out + done.err
    assert "equal" in done.out.splitlines()[1]
    assert done.out.splitlines()[1].split()[4] != "-"  # running statistics are among the tensors
    assert headway_here(*words, cwd=tmp_path).code == NotEqual.exit_code


def test_own_precision_is_proved_where_nobody_has_set_the_number_of_threads(monkeypatch):
    """A norm sums its gradient in as many parts as it has threads: as many here as on the ranks."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    draw = torch.Generator().manual_seed(0)
    samples = torch.randn(200, 64, 32, generator=draw)
    recipe = Recipe(
        name="norm",
        model=lambda: nn.Sequential(
            nn.Linear(32, 64), nn.LayerNorm(64), nn.AdaptiveAvgPool2d((1, 64)), nn.Flatten(),
            nn.Linear(64, 2),
        ),
        data=TensorDataset(samples, torch.randint(0, 2, (200,), generator=draw)),
        loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.AdamW,
        batch=50,
        stop=4,
    )  # fmt: skip
    (run,) = verify(recipe, processes=2).runs
    assert run.own_precision is not None
    assert run.own_precision.equal, run.own_precision.wrong
