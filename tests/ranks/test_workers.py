"""ranks: workers that meet in rounds: local SGD, post-local SGD, DiLoCo, EASGD, D-PSGD."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import headway
from headway.checkpoint.directory import read_manifest, step_path
from headway.data import Cursor
from headway.errors import PlanError
from headway.optim import LARS
from headway.plans import (
    ExchangePlan,
    LayerSplit,
    PipelinePlan,
    Synchrony,
    data_parallel,
    pipelined,
)
from headway.run.distributed.world import World
from headway.verification.whole_run import read_tensor
from support.ranks import run_ranks
from support.sampling import sampled
from support.tiny_models import Sentences, Tied, ignoring_a_word

# Four workers on two cores; see `launch.preflight`.
pytestmark = pytest.mark.filterwarnings("ignore:.* processes share .* CPU cores")

WAYS: dict[str, dict[str, Any]] = {
    "local": {"merge": "mean", "local_steps": 3},
    "post-local": {"merge": "mean", "local_steps": 3, "warm_up": 2},
    "kept": {"merge": "mean", "local_steps": 2, "state": "keep"},
    "reset": {"merge": "mean", "local_steps": 2, "state": "reset"},
    "slow momentum": {
        "merge": "mean", "local_steps": 2, "outer": "momentum", "outer_momentum": 0.6,
        "outer_rate": 0.9,
    },
    "diloco": {
        "merge": "mean", "local_steps": 2, "outer": "nesterov", "outer_momentum": 0.9,
        "outer_rate": 0.7,
    },
    "copies": {"merge": "mean", "local_steps": 3, "copies": 2},
    "int8": {"merge": "mean", "local_steps": 2, "state": "keep", "compress": "int8"},
    "sparse diloco": {
        "merge": "mean", "local_steps": 2, "warm_up": 1, "state": "reset", "copies": 2,
        "compress": "topk:0.2", "outer": "nesterov", "outer_momentum": 0.9, "outer_rate": 0.7,
    },
    "elastic": {"merge": "elastic", "local_steps": 2, "alpha": 0.3, "beta": 0.2},
    "ring": {"merge": "neighbour"},
    "exponential": {"merge": "neighbour", "topology": "exponential", "local_steps": 2},
    "torus": {"merge": "neighbour", "topology": "torus"},
    "weights": {
        "merge": "neighbour",
        "weights": (
            (0.5, 0.5, 0.0, 0.0), (0.25, 0.5, 0.25, 0.0), (0.0, 0.0, 0.5, 0.5),
            (0.25, 0.0, 0.25, 0.5),
        ),
    },
}  # fmt: skip


def data(samples: int = 46) -> TensorDataset:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(samples, 4, generator=draw)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 1))


def recipe(synchrony: Synchrony | None = None, **options: Any) -> headway.Recipe:
    made = {
        "name": "workers", "model": model, "data": data, "loss": nn.MSELoss(),
        "optimizer": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
        "scheduler": lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.5),
        "batch": 10, "stop": "12 steps", "clip": 1.0, "synchrony": synchrony,
    }  # fmt: skip
    return headway.Recipe(**{**made, **options})


@pytest.mark.parametrize("name", sampled(list(WAYS), 4))
def test_every_worker_does_what_one_process_makes_of_it(name: str) -> None:
    """A ragged last batch is among the steps, of six samples for four workers."""
    verdict = headway.verify(recipe(Synchrony(**WAYS[name])), processes=4, steps=6)
    verdict.check()
    assert "all workers equal" in repr(verdict)
    assert not verdict.runs[0].comparison.wrong
    assert len(verdict.runs[0].comparison.differences) > 100


def images() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(46, 2, 8, 8, generator=draw), torch.randn(46, 3, generator=draw)
    )


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))


TIED: dict[str, Any] = {
    "model": Tied, "data": lambda: Sentences(46), "loss": ignoring_a_word,
}  # fmt: skip
NORMALISED: dict[str, Any] = {"model": normalised, "batch": 16, "drop_last": True}
IMAGES: dict[str, Any] = {"model": convolutions, "data": images}
WITHOUT_FLUSH: dict[str, Any] = {"stages": 2, "pipeline": PipelinePlan(schedule="pipedream")}
# How the ranks of a worker share its work: a way of `WAYS`, ranks, and the recipe's options.
INSIDE: dict[str, tuple[str, int, dict[str, Any]]] = {
    "optimiser in parts": ("local", 4, {"zero": 1}),
    "gradients in parts": ("diloco", 4, {"zero": 2}),
    "parameters in parts": ("elastic", 4, {"zero": 3}),
    "three workers in parts": ("exponential", 6, {"zero": 3}),
    "hybrid": ("kept", 8, {"zero": 2, "shards": 2}),
    "stages": ("post-local", 4, {"stages": 2}),
    "small micro-batches": ("diloco", 4, {"stages": 2, "microbatch": 2}),
    "chimera": ("kept", 4, {"stages": 2, "pipeline": PipelinePlan(schedule="chimera")}),
    "stages, elastic": ("elastic", 4, {"stages": 2}),
    "stages, ring": ("ring", 6, {"stages": 2}),
    "tied stages": ("reset", 6, {"stages": 2, **TIED}),
    "stages with statistics": ("ring", 4, {"stages": 2, "microbatch": 4, **NORMALISED}),
    "stages in parts": ("slow momentum", 8, {"stages": 2, "zero": 3}),
    "tied stages in parts": ("elastic", 8, {"stages": 2, "zero": 2, **TIED}),
    "layers": ("diloco", 4, {"split": LayerSplit(tensor=(2,))}),
    "layers, ring": ("ring", 4, {"split": LayerSplit(tensor=(2,))}),
    "layers in parts": ("elastic", 8, {"split": LayerSplit(tensor=(2,)), "zero": 3}),
    "layers of stages": ("local", 8, {"split": LayerSplit(tensor=(2,)), "stages": 2}),
    "samples": ("diloco", 4, {"split": LayerSplit(spatial=(2,)), **IMAGES}),
    "samples of stages": ("ring", 8, {"split": LayerSplit(spatial=(2,)), "stages": 2, **IMAGES}),
}


@pytest.mark.parametrize("name", sampled(list(INSIDE), 3))
def test_workers_may_be_groups_that_hold_a_model_together(name: str) -> None:
    way, ranks, options = INSIDE[name]
    copies = 1 if "zero" not in options else 4 if "shards" in options else 2
    rules = Synchrony(**WAYS[way], copies=copies)
    verdict = headway.verify(recipe(rules, **options), processes=ranks, steps=5)
    verdict.check()
    assert "all workers equal" in repr(verdict)
    assert len(verdict.runs[0].comparison.differences) > 100


def executor(world: World, **words: Any) -> headway.Executor:
    torch.manual_seed(0)
    net = model()
    return headway.Executor(
        net,
        torch.optim.Adam(net.parameters(), lr=0.01),
        loss=headway.criterion(nn.MSELoss()),
        plan=data_parallel(
            10, processes=world.ranks, precision="float64", synchrony=Synchrony(**words)
        ),
        world=world,
    )


def one_model_in_a_validation(world: Any) -> None:
    torch.manual_seed(0)
    net = normalised()
    run = headway.Executor(
        net,
        torch.optim.Adam(net.parameters(), lr=0.01),
        loss=headway.criterion(nn.MSELoss()),
        plan=pipelined(
            16, processes=4, stages=2, precision="float64", synchrony=Synchrony(merge="mean")
        ),
        world=World.adopt(),
    )
    for batch in run.batches(data(), drop_last=True):
        run.step(batch)
    told = run.validate(data())["loss"]
    with run.whole() as whole, torch.no_grad():
        if run.world.rank == 0:
            inputs, targets = (column.double() for column in data().tensors)
            expected = nn.functional.mse_loss(whole.eval()(inputs), targets)
            assert abs(told - float(expected)) < 1e-12
    run.close()


def test_workers_that_have_met_validate_one_model_with_its_statistics() -> None:
    run_ranks(4, one_model_in_a_validation)


DILOCO = WAYS["diloco"]


def trained(run: headway.Executor) -> list[list[float]]:
    run.flush()
    return [p.detach().flatten().tolist() for p in run.model.parameters()]


def all_is_sent(world: Any) -> None:
    ends = []
    for compress in ("none", "topk:1"):
        run = executor(World.adopt(), merge="mean", local_steps=2, state="keep", compress=compress)
        for batch in run.batches(data(), epochs=2):
            run.step(batch)
        run.finish()
        ends.append(torch.cat([p.detach().flatten() for p in run.model.parameters()]))
        run.strategy.close()
    assert torch.allclose(*ends, rtol=0, atol=1e-12)


def test_a_compressor_that_sends_everything_changes_nothing() -> None:
    run_ranks(2, all_is_sent)


WIDE: dict[str, Any] = {
    "merge": "mean", "local_steps": 2, "state": "keep", "compress": "topk:0.1",
}  # fmt: skip


def wide_executor(**words: Any) -> headway.Executor:
    """A layer that is large enough to be compressed."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 300), nn.Tanh(), nn.Linear(300, 1))
    plan = data_parallel(10, processes=2, precision="float64", synchrony=Synchrony(**words))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    return headway.Executor(
        net, optimizer, loss=headway.criterion(nn.MSELoss()), plan=plan, world=World.adopt()
    )


def kept(run: headway.Executor) -> dict[str, torch.Tensor]:
    return {
        name: value
        for name, value in run.strategy.exchange_state().items()
        if name.endswith("/residual")
    }


def residuals_survive(world: Any, path: Path) -> None:
    """What was sent and what is kept back are the differences; a checkpoint has both."""
    run = wide_executor(**WIDE)
    for batch in run.batches(data(), epochs=2):
        run.step(batch)
        if run.steps_done == 4:
            run.save(path)
            before = kept(run)
    assert list(before) == ["exchange.difference/0.weight/residual"]
    assert all(value.abs().sum() > 0 for value in before.values())
    begun = wide_executor(**WIDE)
    assert begun.resume(path) == 4
    after = kept(begun)
    assert after.keys() == before.keys()
    assert all(torch.allclose(after[name], before[name], rtol=1e-12) for name in before)
    for batch in begun.batches(data(), epochs=2):
        begun.step(batch)
    begun.finish()
    run.strategy.close()
    begun.strategy.close()


def test_what_is_kept_back_survives_a_checkpoint(tmp_path: Path) -> None:
    run_ranks(2, residuals_survive, tmp_path / "checkpoints")


def resumed_as_uninterrupted(world: Any, path: Path) -> None:
    whole = executor(World.adopt(), **DILOCO)
    for batch in whole.batches(data(), epochs=2):
        whole.step(batch)
        assert whole.met == (whole.steps_done % 2 == 0)
        if whole.steps_done == 6:
            whole.save(path)
    begun = executor(World.adopt(), **DILOCO)
    assert begun.resume(path) == 6
    for batch in begun.batches(data(), epochs=2):
        begun.step(batch)
    assert trained(begun) == trained(whole)


def test_a_resumed_run_ends_as_an_uninterrupted_one(tmp_path: Path) -> None:
    run_ranks(2, resumed_as_uninterrupted, tmp_path / "checkpoints")


# Each kind of meeting, and what of it a checkpoint between two of them must hold.
KEPT: dict[str, dict[str, Any]] = {
    **{name: WAYS[name] for name in ("local", "kept", "reset", "elastic", "ring")},
    "slow momentum": {**WAYS["slow momentum"], "local_steps": 3},
    "diloco": {**WAYS["diloco"], "local_steps": 3, "state": "keep"},
    "neighbours now and then": WAYS["exponential"],
}
# Ranks, and how those of a worker share its work.
SHARED: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (3, {}),
    "parts": (4, {"zero": 3, "copies": 2}),
    "stages": (4, {"stages": 2}),
    "layers": (4, {"split": LayerSplit(tensor=(2,))}),
}


def settled() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))


def whole_batch(net: nn.Module, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(net(inputs), targets.expand(-1, 2))


def another(way: str, shared: str) -> headway.Executor:
    _, options = SHARED[shared]
    torch.manual_seed(0)
    net = settled() if shared != "layers" else nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    copies = options.get("copies", 1)
    rest = {name: value for name, value in options.items() if name != "copies"}
    plan = pipelined(
        24, processes=torch.distributed.get_world_size(), precision="float64",
        synchrony=Synchrony(**KEPT[way], copies=copies), **{"stages": 1, **rest},
    )  # fmt: skip
    run = headway.Executor(
        net,
        torch.optim.Adam(net.parameters(), lr=0.02),
        loss=whole_batch,
        plan=plan,
        world=World.adopt(),
    )
    run.cut(next(iter(run.loader(data(), drop_last=True))))
    return run


def held(run: headway.Executor) -> dict[str, list[float]]:
    """What this rank has of its worker: parameters, buffers, the optimiser's state.

    Copies of a model go on with the statistics of the first of them.
    """
    found = run.strategy.tensors_by_kind()
    first = run.plan.worker_ranks(run.world.rank)[0] == run.world.rank
    return {
        f"{kind} {name}": tensor.flatten().tolist()
        for kind, tensors in found.items()
        for name, tensor in tensors.items()
        if kind != "gradient" and (first or kind != "buffer")
    }


def interrupted_at_every_step(world: Any, path: Path, way: str, shared: str) -> None:
    """Each of seven steps is the last one before a new process: all numbers stay the same."""
    whole = another(way, shared)
    begun, differed = another(way, shared), False
    loader = whole.loader(data(), drop_last=True, epochs=None)
    for step, batch in zip(range(1, 8), loader, strict=False):
        whole.step(batch)
        begun.step(batch)
        differed |= not begun.met
        begun.save(path / str(step))
        before = begun
        begun = another(way, shared)
        assert begun.resume(path / str(step)) == step
        before.finish()
        assert begun.met == whole.met
        mine, expected = held(begun), held(whole)
        assert mine.keys() == expected.keys()
        for name, values in expected.items():
            assert mine[name] == pytest.approx(values, abs=1e-12), (step, name)
    assert differed
    whole.finish()
    begun.finish()
    mine, expected = held(begun), held(whole)
    for name, values in expected.items():
        assert mine[name] == pytest.approx(values, abs=1e-12), name


@pytest.mark.parametrize(
    ("way", "shared"), sampled([(way, shared) for way in KEPT for shared in SHARED], 2)
)
def test_a_checkpoint_between_meetings_holds_each_worker(
    way: str, shared: str, tmp_path: Path
) -> None:
    run_ranks(SHARED[shared][0], interrupted_at_every_step, tmp_path, way, shared, timeout=90)


def others_go_on(world: Any, path: Path) -> None:
    """Two plain ranks, and two workers by other rules, begin with the mean of two workers."""
    run = executor(World.adopt(), merge="mean", local_steps=3, outer="momentum")
    for batch in run.batches(data()):
        run.step(batch)
        break
    assert not run.met
    own = torch.cat([p.detach().flatten() for p in run.model.parameters()])
    torch.distributed.all_reduce(own)
    run.save(path)
    for words in ({}, {"merge": "elastic", "beta": 0.2, "alpha": 0.3}):
        other = executor(World.adopt(), **words)
        assert other.resume(path) == 1
        assert other.met
        mean = torch.cat([p.detach().flatten() for p in other.model.parameters()])
        torch.testing.assert_close(mean, own / 2, rtol=0, atol=1e-15)
        for batch in other.batches(data()):
            other.step(batch)
        other.finish()
    run.finish()


def one_has_no_samples(world: Any, path: Path) -> None:
    first, second = (executor(World.adopt(), **{**WAYS["kept"], "copies": 1}) for _ in range(2))
    last_of_epoch = Cursor(seed=0, epoch=0, position=10)
    for batch in first.batches(data(12), cursor=last_of_epoch):
        first.step(batch)
    first.save(path)
    assert second.resume(path) == 1
    assert bool(second.optimizer.state) == (second.world.rank < 2)
    first.finish()
    second.finish()


def test_a_worker_without_samples_has_no_state_of_another_one(tmp_path: Path) -> None:
    run_ranks(3, one_has_no_samples, tmp_path)


@pytest.mark.parametrize("inside", sampled([{}, {"zero": 1}], 1))
def test_norms_of_layers_are_those_of_each_worker(inside: dict[str, Any]) -> None:
    """LARS divides them over ranks that have one model: those of other workers have others."""
    rules = Synchrony(merge="mean", local_steps=3, state="keep", copies=2)
    made = recipe(rules, optimizer=lambda m: LARS(m.parameters(), lr=0.1), **inside)
    headway.verify(made, processes=4, steps=6).check()


class StopAfter:
    """Asks for a stop after a step, once."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, run: Any) -> None:
        if run.step == self.step:
            run.stop()


@pytest.mark.parametrize("way", sampled(["kept", "elastic", "ring", "diloco"], 1))
def test_training_that_is_stopped_goes_on_as_if_it_was_not(way: str, tmp_path: Path) -> None:
    ends = {}
    rules = Synchrony(**{**WAYS[way], "local_steps": 3 if way == "diloco" else 2})
    for name in ("whole", "stopped"):
        stops = [StopAfter(4)] if name == "stopped" else []
        # A stop is agreed on at two meetings: somewhere behind step 4.
        made = recipe(rules, precision="float64", callbacks=stops)
        result = headway.train(made, processes=2, directory=tmp_path / name)
        if stops:
            assert 4 <= result.steps < 12
            headway.train(
                recipe(rules, precision="float64"),
                processes=2, directory=tmp_path / name, resume=True,
            )  # fmt: skip
        checkpoint = step_path(tmp_path / name / "checkpoints", 12)
        manifest = read_manifest(checkpoint)
        ends[name] = {n: read_tensor(checkpoint, e) for n, e in manifest.tensors.items()}
    assert ends["whole"].keys() == ends["stopped"].keys()
    for name, tensor in ends["whole"].items():
        torch.testing.assert_close(ends["stopped"][name], tensor, rtol=0, atol=1e-12)


def test_other_plans_go_on_from_the_mean_of_the_models(tmp_path: Path) -> None:
    run_ranks(2, others_go_on, tmp_path)


def test_training_saves_and_validates_when_workers_have_met(tmp_path: Path) -> None:
    plan = Synchrony(merge="mean", local_steps=4)
    made = recipe(plan, checkpoint_every=3, validate_every=5, validation=data)
    headway.train(made, processes=2, directory=tmp_path / "run")
    kept = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir() if p.is_dir())
    assert [name[-2:] for name in kept] == ["09", "12"]
    text = (tmp_path / "run" / "events.jsonl").read_text()
    validated = [line for line in text.splitlines() if '"validation"' in line]
    assert [int(line.split('"step": ')[1].split(",")[0]) for line in validated] == [8, 12]


@pytest.mark.parametrize(
    ("words", "options", "told"),
    [
        ({"merge": "mean"}, WITHOUT_FLUSH, "without a flush stages are updated"),
        ({"merge": "mean"}, {"exchange": ExchangePlan(priority=True)}, "priority with workers"),
        ({"merge": "mean", "topology": "master"}, {}, "taken by an all-reduce"),
        (
            {"kind": "asynchronous", "copies": 2},
            {"exchange": ExchangePlan(compress="int8")},
            "inside a worker gradients are summed exactly",
        ),
        ({"merge": "penalty", "kind": "soft_bounded"}, {}, "synchrony"),
    ],
)
def test_what_is_not_run_is_refused_by_name(
    words: dict[str, Any], options: dict[str, Any], told: str
) -> None:
    with pytest.raises(PlanError, match="cannot run this plan") as raised:
        headway.train(recipe(Synchrony(**words), **options), processes=4)
    assert told in str(raised.value)
