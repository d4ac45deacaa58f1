"""ranks: `Executor.save` and `resume`, its precision, and the weights that it starts from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import headway
from headway.checkpoint.store import CheckpointWarning
from headway.errors import CheckpointDamaged, CheckpointMismatch, UsageError
from headway.plans import data_parallel
from headway.plans.plan import pipelined
from headway.run.distributed.world import World
from support.ranks import run_ranks

KILLED, STEPS = 5, 12


def data() -> TensorDataset:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(30, 4, generator=draw)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def executor(ranks: int, zero: int = 0, world: World | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Dropout(0.2), nn.Tanh(),
                          nn.Linear(6, 1))  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    plan = options.pop("plan", None) or data_parallel(8, processes=ranks, zero=zero)
    return headway.Executor(
        model, optimizer, loss=headway.criterion(nn.MSELoss()), plan=plan, scheduler=scheduler,
        precision="float64", world=world, **options,
    )  # fmt: skip


def trained(run: Any) -> dict[str, Tensor]:
    with run.whole() as model:
        if run.world.rank > 0:
            return {}
        return {name: t.detach().clone() for name, t in model.state_dict().items()}


def begin(world: Any, path: Path, zero: int) -> None:
    """Steps up to the kill, in the middle of an epoch."""
    run = executor(world.size, zero, World.adopt())
    assert run.resume(path) == 0
    for batch in run.batches(data(), epochs=3):
        run.step(batch)
        run.save(path, keep=1)
        if run.steps_done == KILLED:
            return


def go_on(world: Any, path: Path, zero: int, stages: int) -> dict[str, Tensor]:
    plan = pipelined(8, processes=world.size, stages=stages) if stages > 1 else None
    run = executor(world.size, zero, World.adopt(), plan=plan)
    if stages > 1:
        with pytest.raises(UsageError, match=r"run\.cut\(next"):
            run.resume(path)
        run.cut(next(iter(run.batches(data()))))
    assert run.resume(path) == KILLED
    for batch in run.batches(data(), epochs=3):
        run.step(batch)
    assert run.steps_done == STEPS
    assert run.scheduler.last_epoch == STEPS
    return trained(run)


def uninterrupted() -> dict[str, Tensor]:
    run = executor(1)
    for batch in run.batches(data(), epochs=3):
        run.step(batch)
    return trained(run)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param((2, 0), (3, 3, 1), marks=pytest.mark.slow),
        ((2, 3), (1, 0, 1)),
        pytest.param((1, 0), (2, 0, 2), marks=pytest.mark.slow),
    ],
)
def test_a_resumed_loop_ends_as_one_that_was_never_interrupted(before, after, tmp_path):
    """With other numbers of ranks, sharded state, stages."""
    ranks, zero = before
    run_ranks(ranks, begin, tmp_path / "saved", zero)
    assert len(list((tmp_path / "saved").iterdir())) == 1
    ranks, zero, stages = after
    found = run_ranks(ranks, go_on, tmp_path / "saved", zero, stages)[0]
    for name, value in uninterrupted().items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=name)


def passes(run: Any, count: int, stop: int = 0) -> list[int]:
    """The steps of each pass of a loop over epochs, up to the step `stop`."""
    steps = []
    for _ in range(count):
        before = run.steps_done
        for batch in run.batches(data()):
            run.step(batch)
            if run.steps_done == stop:
                return steps
        steps.append(run.steps_done - before)
    return steps


@pytest.mark.parametrize(
    ("saved", "left"),
    [
        (3, [1, 4, 4]),
        (4, [0, 4, 4]),  # at the end of an epoch
        (6, [0, 2, 4]),
        (12, [0, 0, 0]),
    ],
)
def test_a_loop_over_epochs_goes_on_where_it_was(tmp_path, saved, left):
    """`for epoch in range(3): for batch in run.batches(data)`, as it stands in the README."""
    run = executor(1)
    passes(run, 3, stop=saved)
    run.save(tmp_path)
    run = executor(1)
    assert run.resume(tmp_path) == saved
    assert passes(run, 3) == left
    for name, value in uninterrupted().items():
        torch.testing.assert_close(trained(run)[name], value, rtol=0, atol=0, msg=name)


def test_back_to_a_checkpoint_in_the_same_process(tmp_path):
    run = executor(1)
    passes(run, 3, stop=2)
    run.save(tmp_path)
    passes(run, 1)
    assert run.resume(tmp_path) == 2
    assert passes(run, 1) == [10]  # the rest of epoch 0, and epochs 1 and 2
    for name, value in uninterrupted().items():
        torch.testing.assert_close(trained(run)[name], value, rtol=0, atol=0, msg=name)


def test_a_loop_until_a_step_skips_no_sample_after_resuming(tmp_path):
    run = executor(1)
    passes(run, 3, stop=6)
    run.save(tmp_path)
    run = executor(1)
    run.resume(tmp_path)
    while run.steps_done < STEPS:
        passes(run, 1)
    for name, value in uninterrupted().items():
        torch.testing.assert_close(trained(run)[name], value, rtol=0, atol=0, msg=name)


def test_another_seed_or_model_is_refused(tmp_path):
    run = executor(1)
    run.step(next(iter(run.batches(data()))))
    run.save(tmp_path)
    with pytest.raises(CheckpointMismatch, match="with seed 0, the Executor has 5"):
        executor(1, seed=5).resume(tmp_path)
    (file,) = tmp_path.rglob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.warns(CheckpointWarning), pytest.raises(CheckpointDamaged):
        executor(1).resume(tmp_path)


def test_the_precision_is_that_which_is_asked_for():
    for precision, dtype in [("float64", torch.float64), ("bfloat16", torch.bfloat16)]:
        seen: list[torch.dtype] = []

        def loss(model: nn.Module, batch: Any, seen: list[torch.dtype] = seen) -> Tensor:
            found = model(batch[0])
            seen.append(found.dtype)
            return found.float().mean()

        model = nn.Linear(4, 1)
        run = headway.Executor(
            model, torch.optim.SGD(model.parameters()), loss=loss, batch=4, precision=precision
        )
        run.step(next(iter(run.batches(data()))))
        assert seen[-1] == dtype
        assert run.plan.memory.precision == precision


class Log(list[int]):
    """What a stream has read, and all copies of it."""

    def __deepcopy__(self, _: Any) -> Log:
        return self


class Waves:
    """A shuffled stream without a length that remembers its place, and notes what it reads."""

    def __init__(self) -> None:
        self.epoch, self.place = 0, 0
        self.places = Log()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(61, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        while self.place < 61:
            x = torch.randn(4, generator=torch.Generator().manual_seed(order[self.place]))
            self.places.append(self.place)
            self.place += 1
            yield x, x.sum().sin()[None]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def stream_until(world: Any, path: Path, killed: int) -> None:
    run = executor(world.size, world=World.adopt())
    for batch in run.batches(Waves(), epochs=3):
        run.step(batch)
        if run.steps_done == killed:
            run.save(path)
            return


def stream_on(world: Any, path: Path, killed: int) -> tuple[list[int], dict[str, Tensor]]:
    run, waves = executor(world.size, world=World.adopt()), Waves()
    assert run.resume(path) == killed
    for batch in run.batches(waves, epochs=3):
        run.step(batch)
    assert run.steps_done == 3 * 8  # the last batch of an epoch has 5 samples
    return waves.places, trained(run)


# 13: in the second epoch.
@pytest.mark.parametrize("killed", [13, pytest.param(5, marks=pytest.mark.slow)])
def test_a_stream_resumes_from_its_own_state(tmp_path, killed):
    """Bit for bit, on as many ranks; on others to rounding."""
    expected = run_ranks(2, stream_whole)[0]
    run_ranks(2, stream_until, tmp_path, killed)
    for ranks in (2, 3):
        for places, found in run_ranks(ranks, stream_on, tmp_path, killed):
            assert 8 <= places[0] >= killed % 8 * 8 - 32, "begun again"
            assert found.keys() <= expected.keys()
            for name, tensor in found.items():
                exact = {"rtol": 0, "atol": 0 if ranks == 2 else 1e-12}
                torch.testing.assert_close(tensor, expected[name], **exact)


def stream_whole(world: Any) -> dict[str, Tensor]:
    run = executor(world.size, world=World.adopt())
    for batch in run.batches(Waves(), epochs=3):
        run.step(batch)
    return trained(run)
