"""ranks: a rank of a pipeline holds its stages only; checkpoints, validation, proofs know it."""

from __future__ import annotations

import shutil
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from headway.checkpoint import storage
from headway.data import Cursor, Loader, as_source
from headway.errors import UsageError
from headway.plans import BatchSplit, PipelinePlan, data_parallel, pipelined
from headway.run.distributed.launch_env import LaunchEnv
from headway.run.distributed.world import World
from headway.run.executor import Executor
from headway.run.step.setup import check_components
from headway.run.strategy.checkpoint import CheckpointInventory
from headway.run.strategy.strategy import Strategy
from headway.run.training.job import TrainJob
from headway.run.training.loop import Training, train
from headway.run.training.stop_request import StopRequest
from headway.verification.compare import compare
from headway.verification.distributed_run import record_in_world
from headway.verification.recording import Recording, VerifyJob
from headway.verification.serial_run import record_serial
from support.commands import events, newest_tensors
from support.ranks import RanksFailed, run_ranks
from support.tiny_models import CLASSES, FEATURES, Points, cross_entropy

DEEP = "support.recipes:deep"
WIDTH = 16


def chain() -> nn.Module:
    """Four parts with parameters of their own."""
    parts = [nn.Linear(FEATURES, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(2))]
    return nn.Sequential(*parts, nn.Linear(WIDTH, CLASSES))


PARTS = [FEATURES * WIDTH + WIDTH, *2 * [WIDTH * WIDTH + WIDTH], WIDTH * CLASSES + CLASSES]
"""Numbers of each part."""


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def live_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Of everything that a rank keeps between two steps, each storage once."""
    found: list[Tensor] = [*model.parameters(), *model.buffers()]
    found += [p.grad for p in model.parameters() if p.grad is not None]
    found += [v for state in optimizer.state.values() for v in state.values()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}
    return sum(storages.values())


# ---- (a) memory ------------------------------------------------------------------------------

LAYOUTS: dict[str, tuple[int, PipelinePlan, list[list[int]]]] = {
    # ranks of a pipeline, pipeline, for each of them the parts that it holds
    "1f1b": (4, PipelinePlan(microbatches=4, cut=("1", "2", "3")), [[0], [1], [2], [3]]),
    "chimera": (
        4,
        PipelinePlan(schedule="chimera", microbatches=4, cut=("1", "2", "3")),
        [[0, 3], [1, 2], [1, 2], [0, 3]],
    ),
    "two copies": (2, PipelinePlan(microbatches=2, cut=("2",)), [[0, 1], [2, 3]]),
    "chimera of two": (
        2,
        PipelinePlan(schedule="chimera", microbatches=2, cut=("2",)),
        [[0, 1, 2, 3], [0, 1, 2, 3]],
    ),
}


def measured(world: Any) -> list[tuple[int, int, int]]:
    """For each layout: bytes before the first step, bytes after two, how many others are away."""
    found = []
    for stages, pipeline, _ in LAYOUTS.values():
        torch.manual_seed(3)
        model = chain()
        optimizer = adamw(model)
        plan = pipelined(12, processes=world.size, stages=stages, pipeline=pipeline)
        run = Executor(model, optimizer, loss=cross_entropy, plan=plan, world=World.adopt())
        batches = iter(run.batches(Points(), epochs=None))
        run.cut(next(batches))
        early = live_bytes(model, optimizer)
        for _ in range(2):
            run.step(next(batches))
        away = run.strategy.parameters.away
        assert all(torch.isnan(t).all() for t in away)
        found.append((early, live_bytes(model, optimizer), len(away)))
        run.strategy.close()
    return found


def test_a_rank_holds_its_own_stages_only():
    """Parameters, gradients and two moments in float32; two tensors, a step each; 4 bytes away."""
    for rank, results in enumerate(run_ranks(4, measured)):
        for (stages, _, hosted), (early, late, away) in zip(LAYOUTS.values(), results, strict=True):
            parts = hosted[rank % stages]
            numbers = sum(PARTS[part] for part in parts)
            others = 2 * (len(PARTS) - len(parts))
            assert away == others
            assert early == 4 * (numbers + others)
            assert late == 4 * (4 * numbers + 2 * len(parts) + others)


# ---- (b), (c) checkpoints and validation -----------------------------------------------------


def job(directory: Path, steps: int, *changes: str, resume: bool = False) -> TrainJob:
    return TrainJob(
        recipe=DEEP,
        directory=directory,
        overrides=(f"arguments.steps={steps}", *changes),
        resume=resume,
        device="cpu",
        timeout_seconds=60,
        patience_seconds=5,
        trace_every=50,
    )


def train_here(*jobs: TrainJob) -> None:
    """Some runs one after the other, in the world that there is."""
    world = World.adopt()
    for one in jobs:
        with ExitStack() as stack:
            Training(one, world, StopRequest(), stack).run()


STAGES = {
    2: ("stages=2", "pipeline.microbatches=3"),
    4: ("stages=4", "pipeline.schedule='chimera'", "pipeline.microbatches=4"),
}


def several(world: Any, root: Path) -> list[set[str]]:
    """Of 4 ranks: begin with 2 stages; go on from 2 and from 1 with 4, and from 4 with 2.

    Returns what this rank has read.
    """
    read: list[set[str]] = []
    load = storage.load

    def loaded(path: Path, manifest: Any, tensors: Any, **options: Any) -> None:
        read.append(set(tensors))
        load(path, manifest, tensors, **options)

    storage.load = loaded
    train_here(
        job(root / "two", 3, *STAGES[2]),
        job(root / "one-four", 6, *STAGES[4], resume=True),
    )
    if world.rank == 0:
        for name in ("two-one", "two-four"):
            shutil.copytree(root / "two", root / name)
    dist.barrier()
    train_here(
        job(root / "two-four", 5, *STAGES[4], resume=True),
        job(root / "two-four", 6, *STAGES[2], resume=True),
    )
    return read


def same(expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        scale = max(1e-3, float(tensor.abs().max()))
        assert float((tensor - found[name]).abs().max()) < 1e-12 * scale, name


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_checkpoints_go_from_any_stages_to_any_others(tmp_path):
    """All ends equal six steps of one process, and so do the losses on the way."""
    whole = tmp_path / "whole"
    train(LaunchEnv(), job(whole, 6))
    train(LaunchEnv(), job(tmp_path / "one-four", 3))
    reads = run_ranks(4, several, tmp_path, timeout=60)
    train(LaunchEnv(), job(tmp_path / "two-one", 6, resume=True))
    expected = newest_tensors(whole)
    for read in zip(*reads, strict=True):
        assert set().union(*read) == set(expected)
        assert all(len(names) < 0.7 * len(expected) for names in read)
    losses = {e["step"]: e["loss"] for e in events(whole, "step")}
    validations = {e["step"]: e["loss"] for e in events(whole, "validation")}
    assert set(validations) == {3, 6}
    for name in ("one-four", "two-one", "two-four"):
        same(expected, newest_tensors(tmp_path / name))
        found = {e["step"]: e["loss"] for e in events(tmp_path / name, "step")}
        assert found == pytest.approx(losses, rel=1e-12)
        found = {e["step"]: e["loss"] for e in events(tmp_path / name, "validation")}
        assert {step: found[step] for step in validations} == pytest.approx(validations, rel=1e-12)
        shown = {e["step"]: e["text"] for e in events(tmp_path / name, "showcase")}
        assert shown[6] == events(whole, "showcase")[0]["text"]


# ---- what several ranks hold -----------------------------------------------------------------


class Odd(nn.Module):
    """Running statistics, and a layer that only the loss trains and only evaluation uses, early."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.BatchNorm1d(WIDTH))
        self.late = nn.Parameter(torch.ones(WIDTH))
        self.second = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        self.register_buffer("unused", torch.ones(2))
        self.third = nn.Linear(WIDTH, CLASSES)

    def forward(self, x_BF: Tensor) -> Tensor:
        x = self.first(x_BF)
        if not self.training:
            x = x * self.late
        return self.third(self.second(x))


def odd_loss(model: Any, batch: Any) -> Tensor:
    loss = cross_entropy(model, batch)
    return loss + model.late.square().sum() if model.training else loss


def odd(
    world: Any, schedule: str
) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor], float, float]:
    """Homes; what this rank holds, before and after validation; its loss; the whole model's."""
    torch.manual_seed(3)
    model = Odd()
    pipeline = PipelinePlan(schedule=schedule, microbatches=2, cut=("second.0",))
    plan = pipelined(12, processes=world.size, stages=2, pipeline=pipeline, precision="float64")
    run = Executor(model, adamw(model), loss=odd_loss, plan=plan, world=World.adopt())
    for batch in run.batches(Points(36)):
        run.step(batch)
    assert run.pipeline is not None
    assert run.pipeline.ownership is not None

    def held() -> dict[str, Tensor]:
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return {
            name: t.detach().clone()
            for name, t in tensors.items()
            if t not in run.strategy.parameters.away
        }

    before = held()
    with run.loader(Points(17), epochs=1) as loader:
        loss, count = run.evaluate(loader)
    assert count == 17
    pieces = BatchSplit(samples=17, microbatch=1)  # more than the table has
    place = {"rank": plan.data_rank(world.rank), "ranks": plan.data_degree}
    with Loader(as_source(Points(17)), pieces, cursor=Cursor(seed=0), epochs=1, **place) as loader:
        assert run.evaluate(loader) == (pytest.approx(loss, rel=1e-12), 17)
    whole = loss
    with run.whole():
        if world.rank == 0:
            model.eval()
            points = Points(17)
            whole = cross_entropy(model, (points.x.double(), points.y)).item()
    return dict(run.pipeline.ownership.holders), before, held(), loss, whole


DRIFTING = {
    (2, "1f1b"): {"late"},
    (4, "chimera"): {
        f"{n}.1.running_{what}" for n in ("first", "second") for what in ("mean", "var")
    },
}


@pytest.mark.parametrize(("size", "schedule"), DRIFTING)
def test_what_several_ranks_hold_becomes_the_owners_before_it_counts(size, schedule):
    results = run_ranks(size, odd, schedule)
    homes = results[0][0]
    assert len(homes["unused"]) == size
    assert all(loss == results[0][3] for *_, loss, _ in results)
    assert results[0][3] == pytest.approx(results[0][4], rel=1e-12)
    drifted = set()
    for rank, (_, before, after, *_) in enumerate(results):
        assert set(before) == set(after) == {n for n, ranks in homes.items() if rank in ranks}
        for name, tensor in after.items():
            owners = results[homes[name][0]][1][name]
            assert torch.equal(tensor, owners), name
            if not torch.equal(before[name], owners):
                drifted.add(name)
    assert drifted == DRIFTING[size, schedule]


# ---- (d) verification ------------------------------------------------------------------------


def recorded(world: Any, target: str, planted: bool) -> None:
    if planted:
        Strategy.clip = lambda self: None  # type: ignore[method-assign]
    one = VerifyJob(recipe=DEEP, overrides=STAGES[4])
    record_in_world(World.adopt(), one, world.directory / "split")
    if world.rank == 0:
        (world.directory / "split").rename(target)


@pytest.mark.slow
def test_a_pipeline_is_proved_on_rank_0_and_a_planted_bug_is_seen(tmp_path):
    record_serial(LaunchEnv(), VerifyJob(recipe=DEEP), tmp_path / "serial")
    serial = Recording.load(tmp_path / "serial")
    for planted in (False, True):
        target = tmp_path / f"split-{planted}"
        run_ranks(4, recorded, str(target), planted)
        comparison = compare(serial, Recording.load(target))
        assert comparison.equal is not planted, str(comparison.first)
        assert {d.kind for d in comparison.differences} >= {"loss", "gradient", "parameter"}
    assert "gradient" in str(comparison.first)


# ---- (e) a save in the background ------------------------------------------------------------

COLLECTIVES = ("all_gather_object", "all_reduce", "broadcast", "send", "recv", "barrier",
               "gather_object", "scatter_object_list", "broadcast_object_list")  # fmt: skip


def overlapping(world: Any, planted: bool) -> int:
    """Every save but the last lasts until the next step has gathered; how many calls met one."""
    met = []
    gathered = threading.Condition()
    here = World.adopt()
    save, agree = storage.save, CheckpointInventory.agree
    saves, gatherings = [], []

    def watch(name: str) -> None:
        original = getattr(dist, name)

        def call(*args: Any, group: Any = None, **rest: Any) -> Any:
            thread = threading.current_thread()
            saving = any(t.name == "headway-checkpoint" for t in threading.enumerate())
            if thread is threading.main_thread():
                met.append(saving)
                if saving and group is here.side_group:
                    raise AssertionError(f"{name} on a group that a save is using")
            elif group is not here.side_group:
                raise AssertionError(f"a save uses another group: {name}")
            return original(*args, group=group, **rest)

        setattr(dist, name, call)

    def slowly(*args: Any, **options: Any) -> None:
        saves.append(1)
        if len(saves) < 4:
            with gathered:  # the first step gathers twice: once to reserve the room for saves
                assert gathered.wait_for(lambda: len(gatherings) > len(saves) + 1, 20)
        save(*args, **options)

    def told(self: CheckpointInventory, *args: Any) -> Any:
        if planted:
            dist.barrier(group=here.side_group)
        result = agree(self, *args)
        with gathered:
            gatherings.append(1)
            gathered.notify_all()
        return result

    for name in COLLECTIVES:
        watch(name)
    storage.save, CheckpointInventory.agree = slowly, told
    with ExitStack() as stack:
        one = job(world.directory / "run", 4, *STAGES[2], "checkpoint_every=1")
        Training(one, here, StopRequest(), stack).run()
    return sum(met)


def test_a_save_and_the_next_step_never_use_one_group():
    assert min(run_ranks(2, overlapping, False)) >= 3
    with pytest.raises(RanksFailed, match="barrier on a group that a save is using"):
        run_ranks(2, overlapping, True)


# ---- who goes on with the model --------------------------------------------------------------


def used_afterwards(world: Any) -> dict[str, Tensor]:
    torch.manual_seed(3)
    model = chain()
    model.register_buffer("seen", torch.ones(3), persistent=False)
    optimizer = adamw(model)
    pipeline = PipelinePlan(microbatches=2, cut=("2",))
    plan = pipelined(12, processes=world.size, stages=2, pipeline=pipeline)
    with Executor(model, optimizer, loss=cross_entropy, plan=plan, world=World.adopt()) as run:
        for batch in run.batches(Points()):
            run.step(batch)
        with pytest.raises(UsageError, match="its state_dict cannot be used here"):
            model.state_dict()
        with run.whole():
            if world.rank == 0:
                assert not any(torch.isnan(t).any() for t in model.state_dict().values())
        assert all(torch.isnan(t).all() for t in run.strategy.parameters.away)
        for batch in run.batches(Points()):
            run.step(batch)
    with pytest.raises(UsageError, match="optimiser's state of its own stages"):
        optimizer.state_dict()
    with pytest.raises(UsageError, match="optimiser's state of its own stages"):
        optimizer.step()
    if world.rank == 0:
        model(Points().x)
        return dict(model.state_dict())
    with pytest.raises(UsageError, match="its forward cannot be used here"):
        model(Points().x)
    with pytest.raises(UsageError, match="its state_dict cannot be used here"):
        model.state_dict()
    with pytest.raises(UsageError, match="this rank has no memory for 0"):
        check_components(model, optimizer, None, 2)
    return {}


def serially() -> dict[str, Tensor]:
    torch.manual_seed(3)
    model = chain()
    plan = data_parallel(12, processes=1)
    run = Executor(
        model, adamw(model), loss=cross_entropy, plan=plan, world=World.join(LaunchEnv())
    )
    for _ in range(2):
        for batch in run.batches(Points()):
            run.step(batch)
    return dict(model.state_dict())


def test_after_close_the_model_is_whole_on_rank_0_and_refused_elsewhere():
    first, *others = run_ranks(2, used_afterwards)
    assert others == [{}]
    for name, tensor in serially().items():
        torch.testing.assert_close(first[name], tensor, rtol=1e-4, atol=1e-6)
