"""ranks: workers of several ranks that do not meet in rounds: copies, ZeRO, stages, layers."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from test_free_workers import WAYS, data
from torch import nn

import headway
from headway.checkpoint.directory import read_manifest, step_path
from headway.errors import PlanError
from headway.plans import LayerSplit, PipelinePlan, Synchrony, pipelined
from headway.report.history.reader import read_history
from headway.report.page.workers import workers_section
from headway.run.distributed.world import World
from headway.run.synchrony.worker_group import GroupRun
from headway.run.training.run_directory import RunDirectory
from headway.synchrony.history import History, merged
from headway.verification.recording import FREE_STEPS
from headway.verification.whole_run import read_tensor
from support.ranks import run_ranks
from support.sampling import sampled

pytestmark = pytest.mark.filterwarnings("ignore:.* processes share .* CPU cores")

LAYERS = LayerSplit(tensor=(2,), whole=("4",))
# How the ranks of a worker share its work: ranks of a worker, and the options of a plan.
INSIDE: dict[str, tuple[int, dict[str, Any]]] = {
    "copies": (2, {"copies": 2}),
    "optimiser in parts": (2, {"copies": 2, "zero": 1}),
    "gradients in parts": (2, {"copies": 2, "zero": 2}),
    "parameters in parts": (2, {"copies": 2, "zero": 3}),
    "stages": (2, {"stages": 2}),
    "chimera": (2, {"stages": 2, "pipeline": PipelinePlan(schedule="chimera")}),
    "layers": (2, {"split": LAYERS}),
    "hybrid": (4, {"copies": 4, "zero": 2, "shards": 2}),
    "stages in parts": (4, {"copies": 2, "stages": 2, "zero": 3}),
    "layers in parts": (4, {"copies": 2, "split": LAYERS, "zero": 3}),
    "layers of stages": (4, {"stages": 2, "split": LAYERS}),
}
CASES = [(way, inside) for way in WAYS for inside in INSIDE]
STEPS = 6


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 6), nn.Linear(6, 1)
    )


def rules(way: str, inside: str) -> Synchrony:
    return Synchrony(**WAYS[way], copies=INSIDE[inside][1].get("copies", 1))


def options(inside: str) -> dict[str, Any]:
    return {name: value for name, value in INSIDE[inside][1].items() if name != "copies"}


def recipe(way: str, inside: str, **more: Any) -> headway.Recipe:
    """With everything that a worker does to its gradient: dropout, a clipped norm, a schedule."""
    made: dict[str, Any] = {
        "name": "groups", "model": model, "data": data, "loss": nn.MSELoss(),
        "optimizer": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
        "scheduler": lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.5),
        "batch": 16, "stop": "12 steps", "clip": 0.3, "drop_last": True,
    }  # fmt: skip
    return headway.Recipe(**{**made, **options(inside), "synchrony": rules(way, inside), **more})


@pytest.mark.parametrize(("way", "inside"), sampled(CASES, 4))
def test_a_run_of_groups_is_verified_by_its_history(way: str, inside: str) -> None:
    found = headway.verify(recipe(way, inside), processes=2 * INSIDE[inside][0])
    found.check()
    assert max(one.step for one in found.runs[0].comparison.differences) == FREE_STEPS + 1


@pytest.mark.parametrize(
    ("way", "inside"), sampled([("asynchronous", "copies"), ("elastic", "parameters in parts")], 1)
)
def test_a_single_worker_of_two_ranks_is_verified(way: str, inside: str) -> None:
    headway.verify(recipe(way, inside), processes=2).check()


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))


@pytest.mark.parametrize("inside", sampled(["copies", "parameters in parts", "stages"], 1))
def test_ragged_batches_and_statistics_are_those_of_one_process(inside: str) -> None:
    """Some steps leave a rank, or a whole worker, without samples."""
    ragged = recipe("asynchronous", inside, drop_last=False)
    headway.verify(ragged, processes=2 * INSIDE[inside][0]).check()
    statistics = recipe("elastic", inside, model=normalised)
    headway.verify(statistics, processes=2 * INSIDE[inside][0]).check()


# -- steps one by one --------------------------------------------------------------------------


def executor(words: dict[str, Any], inside: str, optimizer: str = "adam") -> headway.Executor:
    world = World.adopt()
    torch.manual_seed(0)
    net = model()
    made: Any = (
        torch.optim.Adam(net.parameters(), lr=0.01)
        if optimizer == "adam"
        else torch.optim.SGD(net.parameters(), lr=0.05)
    )
    copies = INSIDE[inside][1].get("copies", 1)
    plan = pipelined(
        16, processes=world.ranks, precision="float64",
        synchrony=Synchrony(**words, copies=copies), **{"stages": 1, **options(inside)},
    )  # fmt: skip
    return headway.Executor(
        net, made, loss=headway.criterion(nn.MSELoss()), plan=plan, world=world,
        scheduler=torch.optim.lr_scheduler.StepLR(made, 3, 0.5),
    )  # fmt: skip


def held(run: headway.Executor) -> dict[str, list[float]]:
    """On the first rank of each worker: its parameters."""
    numbers = run.strategy.tensors_by_kind().get("parameter", {})
    return {name: tensor.flatten().tolist() for name, tensor in numbers.items()}


def trained(
    run: headway.Executor, history: History | None = None, *, nap: float = 0.0
) -> tuple[list[Any], History]:
    """The parameters before each step and at the end, and what this rank's holders have handled."""
    group = run.strategy.rounds
    assert isinstance(group, GroupRun)
    if history is not None:
        group.repeat(history)
    seen = []
    for batch in run.batches(data(), epochs=None, drop_last=True):
        if group.worker == run.steps_done % 2:
            time.sleep(nap)
        run.step(batch)
        seen.append(held(run))
        if run.steps_done == STEPS:
            break
    run.finish()
    return [*seen, held(run)], group.history


def live(world: Any, way: str, inside: str, folder: Path) -> list[Any]:
    found, history = trained(executor(WAYS[way], inside), nap=0.02)
    history.save(folder / f"{world.rank}")
    return found


def repeated(world: Any, way: str, inside: str, folder: Path) -> list[Any]:
    told = {rank: History.load(folder / f"{rank}") for rank in range(world.size)}
    return trained(executor(WAYS[way], inside), merged(told))[0]


@pytest.mark.parametrize(
    ("way", "inside"), sampled([case for case in CASES if INSIDE[case[1]][0] == 2], 3)
)
def test_a_live_run_of_groups_is_repeated_bit_by_bit(way: str, inside: str, tmp_path: Path) -> None:
    first = run_ranks(4, live, way, inside, tmp_path, timeout=60)
    assert run_ranks(4, repeated, way, inside, tmp_path, timeout=60) == first
    assert first[0][-1] == first[2][-1]  # both workers end with one model
    assert first[0][-1] != first[0][0]


def by_servers(world: Any, inside: str) -> Any:
    return trained(executor({"topology": "colocated"}, inside, "sgd"), nap=0.01)[0][-1]


def by_one_process(world: Any) -> Any:
    torch.manual_seed(0)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    run = headway.Executor(
        net, optimizer, loss=headway.criterion(nn.MSELoss()), world=World.adopt(),
        plan=pipelined(16, processes=1, stages=1, precision="float64"),
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5),
    )  # fmt: skip
    for batch in run.batches(data(), epochs=None, drop_last=True):
        run.step(batch)
        if run.steps_done == STEPS:
            break
    return held(run)


@pytest.mark.parametrize("inside", sampled(list(INSIDE), 2))
def test_synchronous_servers_of_groups_equal_the_serial_run(inside: str) -> None:
    expected = run_ranks(1, by_one_process)[0]
    found = run_ranks(2 * INSIDE[inside][0], by_servers, inside, timeout=60)
    for one in (found[0], found[INSIDE[inside][0]]):
        assert one.keys() == expected.keys()
        for name, values in expected.items():
            assert one[name] == pytest.approx(values, rel=1e-12, abs=1e-14), name


def saved_and_resumed(world: Any, inside: str, folder: Path) -> None:
    run, begun = (executor(WAYS["asynchronous"], inside) for _ in range(2))
    for batch in run.batches(data(), epochs=2, drop_last=True):
        run.step(batch)
    run.finish()
    run.save(folder)
    begun.cut(next(iter(begun.loader(data(), drop_last=True))))
    assert begun.resume(folder) == run.steps_done == 4
    found, expected = (one.strategy.tensors_by_kind() for one in (begun, run))
    for kind in ("parameter", "optimizer"):
        mine, theirs = found.get(kind, {}), expected.get(kind, {})  # whole on first ranks
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())
    assert begun.validate(data()) == run.validate(data())
    for batch in begun.batches(data(), epochs=3, drop_last=True):
        begun.step(batch)
    begun.finish()
    assert begun.steps_done == 6


@pytest.mark.parametrize(
    "inside", sampled(["copies", "parameters in parts", "stages", "layers"], 1)
)
def test_a_loop_of_ones_own_saves_and_goes_on(inside: str, tmp_path: Path) -> None:
    """After the end all ranks have their parts of the servers' optimiser."""
    run_ranks(4, saved_and_resumed, inside, tmp_path, timeout=60)


# -- runs --------------------------------------------------------------------------------------


def checkpoint(directory: Path, step: int) -> dict[str, torch.Tensor]:
    path = step_path(directory / "checkpoints", step)
    return {n: read_tensor(path, e) for n, e in read_manifest(path).tensors.items()}


@pytest.mark.parametrize("inside", sampled(["copies", "gradients in parts", "stages", "layers"], 1))
def test_a_training_run_of_groups_is_replayed_and_goes_on_elsewhere(
    inside: str, tmp_path: Path
) -> None:
    """The checkpoint at the end has whole parameters and the servers' optimiser."""
    made = recipe("asynchronous", inside, validation=data)
    first = headway.train(made, processes=4, directory=tmp_path / "first")
    again = headway.train(
        made, processes=4, directory=tmp_path / "again", replay=tmp_path / "first"
    )
    assert (again.loss, again.validation) == (first.loss, first.validation)
    assert len(list((tmp_path / "first" / "history" / "attempt-000").iterdir())) == 2
    saved = checkpoint(tmp_path / "first", 12)
    assert saved["optimizer.0.weight.exp_avg"].shape == saved["model.0.weight"].shape
    other = checkpoint(tmp_path / "again", 12)
    assert saved.keys() == other.keys()
    assert all(torch.equal(saved[name], other[name]) for name in saved)
    for plan in ({}, INSIDE[inside][1]):
        rest = {name: value for name, value in plan.items() if name != "copies"}
        agreed = rules("asynchronous", inside) if plan else None
        longer = recipe(
            "asynchronous", "stages", **{"stages": 1, **rest},
            synchrony=agreed, stop="14 steps",
        )  # fmt: skip
        target = tmp_path / f"longer-{bool(plan)}"
        (target / "checkpoints").mkdir(parents=True)
        source = step_path(tmp_path / "first" / "checkpoints", 12)
        step_path(target / "checkpoints", 12).symlink_to(source.resolve())
        told = headway.train(longer, processes=4 if plan else 1, directory=target, resume=True)
        assert told.steps == 14
        assert abs(told.loss - first.loss) < 1.0


SAVED: dict[str, Any] = {
    "checkpoint_every": 5, "checkpoint_keep": 9, "precision": "float64", "batch": 32,
}  # fmt: skip
SAVING = [case for case in CASES if "backup" not in case[0]]


@pytest.mark.parametrize(("way", "inside"), sampled(SAVING, 2))
def test_checkpoints_of_groups_are_made_on_the_way(way: str, inside: str, tmp_path: Path) -> None:
    """By the first worker alone, whole; a replay makes the same."""
    made, ranks = recipe(way, inside, model=normalised, **SAVED), 2 * INSIDE[inside][0]
    if "split" in INSIDE[inside][1]:
        made = recipe(way, inside, **SAVED)
    headway.train(made, processes=ranks, directory=tmp_path / "first")
    again = tmp_path / "again"
    headway.train(made, processes=ranks, directory=again, replay=tmp_path / "first")
    for step in (5, 10, 12):
        saved, other = checkpoint(tmp_path / "first", step), checkpoint(again, step)
        assert saved.keys() == other.keys()
        assert all(torch.equal(saved[name], other[name]) for name in saved), step
    alone = recipe("servers", "copies", synchrony=None, model=made.model, **SAVED)
    shutil.rmtree(step_path(again / "checkpoints", 12))
    assert headway.train(alone, processes=1, directory=again, resume=True).steps == 12


@pytest.mark.parametrize("inside", sampled([n for n in INSIDE if INSIDE[n][0] == 2], 1))
def test_synchronous_groups_go_on_from_one_as_if_nothing_had_been(
    inside: str, tmp_path: Path
) -> None:
    """Equal to the serial run, too: parameters and the optimiser's state."""
    made = recipe("servers", inside, **SAVED, clip=None)
    headway.train(made, processes=4, directory=tmp_path / "run")
    whole = checkpoint(tmp_path / "run", 12)
    for step in (10, 12):
        shutil.rmtree(step_path(tmp_path / "run" / "checkpoints", step))
    headway.train(made, processes=4, directory=tmp_path / "run", resume=True)
    found = checkpoint(tmp_path / "run", 12)
    alone = recipe("servers", "copies", synchrony=None, **SAVED, clip=None)
    headway.train(alone, processes=1, directory=tmp_path / "alone")
    for expected in (whole, checkpoint(tmp_path / "alone", 12)):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-13, msg=name)


class Stops:
    """One rank asks for a stop: its worker ends after the next step, the other one at the end."""

    def on_step_end(self, run: Any) -> None:
        if run.step == 4 and run.executor.world.rank == 1:
            run.stop()


@pytest.mark.parametrize("inside", sampled(["copies", "parameters in parts", "stages"], 1))
def test_a_group_that_is_stopped_saves_its_step_and_all_go_on(inside: str, tmp_path: Path) -> None:
    """The optimiser of an elastic worker is the worker's own: it is saved, and taken up again."""
    made = recipe("elastic", inside, callbacks=[Stops()])
    found = headway.train(made, processes=4, directory=tmp_path / "run")
    assert (found.steps, found.stopped_by) == (5, "another rank")
    saved = checkpoint(tmp_path / "run", 5)
    assert float(saved["optimizer.4.bias.step"]) == 5
    whole = headway.train(
        recipe("elastic", inside), processes=4, directory=tmp_path / "run", resume=True
    )
    assert whole.steps == 12
    assert float(checkpoint(tmp_path / "run", 12)["optimizer.4.bias.step"]) == 12


class SlowAtTheEnd:
    """The second worker sleeps before its last step, longer than any exchange may take."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_step_end(self, run: Any) -> None:
        if run.step == 11 and run.executor.world.rank >= 2:
            time.sleep(self.seconds)


@pytest.mark.slow
def test_no_time_out_ends_a_group_because_another_worker_is_slow(tmp_path: Path) -> None:
    made = recipe("asynchronous", "copies", callbacks=[SlowAtTheEnd(9.0)])
    found = headway.train(made, processes=4, directory=tmp_path / "run", timeout="4 s")
    assert found.steps == 12


@pytest.mark.parametrize(("inside", "rank"), sampled([("copies", 1), ("copies", 2)], 1))
def test_the_death_of_one_rank_ends_the_run_and_is_named(
    inside: str, rank: int, tmp_path: Path
) -> None:
    with pytest.raises(headway.HeadwayError, match=f"rank {rank}") as raised:
        headway.train(
            recipe("asynchronous", inside, stop="40 steps"), processes=4,
            directory=tmp_path / "run", faults=[f"kill rank {rank} at step 7"], restarts=0,
        )  # fmt: skip
    assert "killed" in str(raised.value)


def test_the_ranks_of_a_group_are_shown_as_one_worker(tmp_path: Path) -> None:
    headway.train(recipe("bounded", "copies"), processes=4, directory=tmp_path / "run")
    section = workers_section(read_history(tmp_path / "run"))
    assert section is not None
    assert section.sentence == "2 workers (kind=bounded, delay_bound=1, copies=2)"
    assert [row[:3] for row in section.rows] == [("0", "12", "96"), ("1", "12", "96")]
    assert len(RunDirectory(tmp_path / "run").events("stop")) == 1


def test_parts_of_state_need_ranks_that_keep_them() -> None:
    with pytest.raises(PlanError, match="workers of one rank"):
        headway.train(recipe("asynchronous", "stages", stages=1, zero=2), processes=2)
