"""ranks: runs that read a torch DataLoader equal the serial run, which reads in its own way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import headway
from headway.data.sampler_order import SamplerOrder
from headway.errors import DataError
from headway.run.distributed.launch_env import LaunchEnv
from headway.run.distributed.world import World
from headway.verification.compare import compare
from headway.verification.distributed_run import record_in_world
from headway.verification.recording import Recording, VerifyJob
from headway.verification.serial_run import record_serial
from support.ranks import run_ranks

NAMES = ["collated", "weighted", "streamed_loader", "shuffled", "in_order", "seeded"]
NAMES += ["with_replacement", "unbounded_dropping", "endless"]


def job_of(name: str) -> VerifyJob:
    return VerifyJob(recipe=f"support.loader_recipes:{name}")


def verdicts(tmp_path, names, reverse=False):
    run_ranks(2, keeping, names, str(tmp_path), reverse)
    for name in names:
        record_serial(LaunchEnv(), job_of(name), tmp_path / f"{name}.serial")
        serial, parallel = (Recording.load(tmp_path / f"{name}.{e}") for e in ("serial", "split"))
        yield name, compare(serial, parallel)


def keeping(world: Any, names: list[str], folder: str, reverse: bool) -> None:
    if reverse:
        drawn = SamplerOrder._pass

        def reversed_pass(order: SamplerOrder, epoch: int) -> Any:
            places, ends = drawn(order, epoch)
            return places[::-1].copy(), ends

        SamplerOrder._pass = reversed_pass  # type: ignore[method-assign]
    for name in names:
        record_in_world(World.adopt(), job_of(name), world.directory / name)
        if world.rank == 0:
            (world.directory / name).rename(f"{folder}/{name}.split")


QUICK = ["by_length", "streamed", "unbounded"]


@pytest.mark.parametrize("names", [QUICK, pytest.param(NAMES, marks=pytest.mark.slow)])
def test_every_kind_of_loader_is_equal(tmp_path, names):
    for name, comparison in verdicts(tmp_path, names):
        assert comparison.equal, f"{name}: {comparison.first}"


@pytest.mark.slow
def test_a_run_that_orders_its_samples_otherwise_is_not(tmp_path):
    for name, comparison in verdicts(tmp_path, ["weighted", "by_length"], reverse=True):
        assert not comparison.equal, name


def unequal(world: Any) -> list[str]:
    said = []
    for name in ("unseeded", "split_by_rank", "other_ends"):
        with pytest.raises(DataError) as caught:
            record_in_world(World.adopt(), job_of(name), world.directory / "none")
        said.append(str(caught.value))
    return said


def test_ranks_that_draw_another_order_are_named():
    for order, first, end in run_ranks(2, unequal):
        assert "ranks 0 and 1 do not have the same order of FromTheClock" in order
        assert "ranks 0 and 1 do not have the same first sample of SplitByRank" in first
        assert "ranks 0 and 1 do not have the same end of OtherEnds" in end


def of_other_lengths(world: Any) -> str:
    x = torch.randn(20 + world.rank, 3)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    run = headway.Executor(
        model, torch.optim.SGD(model.parameters()), loss=torch.nn.MSELoss(), batch=4,
        world=World.adopt(),
    )  # fmt: skip
    first = next(iter(run.batches(TensorDataset(x, x[:, :1]))))
    with pytest.raises(DataError) as caught:
        run.step(first)
    assert run.steps_done == 0
    return str(caught.value)


def test_ranks_whose_data_have_other_lengths_are_named():
    """A list of files that differs, for example; the order of the samples would differ, too."""
    for said in run_ranks(2, of_other_lengths):
        assert "ranks 0 and 1 do not have the same number of samples: 20 and 21" in said


def test_a_stop_in_samples_counts_the_batches_of_a_stream_as_they_come(tmp_path):
    recipe, ends = "support.loader_recipes:unbounded_samples", []
    for stop, resume in (("52 samples", False), ("77 samples", True), ("77 samples", True)):
        result = headway.train(
            recipe, processes=2, directory=tmp_path / "run", resume=resume,
            overrides=[f"stop={stop}"], device="cpu",
        )  # fmt: skip
        ends.append(result.steps)
    # 12 + 12 + 12 + 4 + 12 and so on: whole batches would be 5 and 7 steps.
    assert ends == [5, 8, 8]
