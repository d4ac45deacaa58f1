"""ranks: each framework that is installed trains as the plain loop does."""

from __future__ import annotations

import os
import sys
import warnings
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.optim import SGD

from headway.comparison.adapter import FrameworkJob
from headway.comparison.environments import find_environment
from headway.comparison.frameworks.plain import PlainLoop
from headway.comparison.frameworks.registry import FRAMEWORKS
from headway.optim.warmup import warmup_then_cosine
from headway.run.recipe.recipe import Recipe, criterion
from headway.workloads.resnet import SMALL, ResNet
from headway.workloads.transformer import TransformerConfig, TransformerLM, adamw, next_byte_loss
from support.ranks import run_ranks

STEPS = 6
BATCH = 8
OWN = sorted(
    name
    for name, framework in FRAMEWORKS.items()
    if not framework.environment and not name.startswith("headway")
)
OTHERS = sorted(name for name, framework in FRAMEWORKS.items() if framework.environment)
EXACT = [name for name in OWN if FRAMEWORKS[name].exact]


def language(double: bool) -> Recipe:
    """Tied weights, weight decay, clipping that acts, and a rate that changes."""
    config = TransformerConfig(vocabulary=17, window=8, width=16, layers=3, heads=2)
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(17, (64, 9), generator=draw)
    return Recipe(
        name="language",
        model=lambda: TransformerLM(config).to(torch.float64 if double else torch.float32),
        data=lambda: torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:]),
        loss=criterion(next_byte_loss),
        optimizer=partial(adamw, learning_rate=0.02, weight_decay=0.1),
        scheduler=partial(warmup_then_cosine, warmup=2, steps=20, end=0.1),
        batch=BATCH,
        stop="20 steps",
        clip=0.2,
    )


def images(double: bool) -> Recipe:
    """Momentum, no clipping; a loss that returns a sum and a count."""
    from dataclasses import replace

    config = replace(SMALL, layers=(1, 1, 1), width=8, classes=5, channels=1)
    dtype = torch.float64 if double else torch.float32
    draw = torch.Generator().manual_seed(2)
    pictures = torch.randn(64, 1, 8, 8, generator=draw, dtype=dtype)
    classes = torch.randint(5, (64,), generator=draw)
    return Recipe(
        name="images",
        model=lambda: ResNet(config).to(dtype),
        data=lambda: torch.utils.data.TensorDataset(pictures, classes),
        loss=lambda model, batch: (
            torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"),
            len(batch[0]),
        ),
        optimizer=lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3),
        batch=BATCH,
        stop="20 steps",
    )


def trained(adapter, job: FrameworkJob) -> list[float | None]:
    """The loss of each step."""
    adapter.start(job)
    adapter.prepare(job)
    batches = job.batches(adapter.reads)
    steps = [adapter.step(next(batches)) for _ in range(STEPS)]
    adapter.close()
    return [None if loss is None else torch.as_tensor(loss).item() for loss in steps]


def serial(make, double: bool) -> list[float]:
    return trained(PlainLoop(), FrameworkJob(recipe=make(double), rank=0, ranks=1))


def train_on_a_rank(world, name, makes, double, packages="", variables=None):
    """The losses of recipes under a framework, one run after another."""
    sys.path += [packages] if packages else []
    os.environ.update(variables or {})
    dist.destroy_process_group()
    found = []
    for number, make in enumerate(makes):
        # torchrun's store, which its processes are told of.
        path = world.directory / f"port-{number}"
        if world.rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            path.with_suffix(".part").write_text(str(store.port))
            path.with_suffix(".part").rename(path)
        while not path.exists():
            pass
        os.environ.update(
            RANK=str(world.rank),
            WORLD_SIZE=str(world.size),
            LOCAL_RANK=str(world.rank),
            LOCAL_WORLD_SIZE=str(world.size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=path.read_text(),
            TORCHELASTIC_USE_AGENT_STORE="True",
        )
        module, _, cls = FRAMEWORKS[name].adapter.partition(":")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of the frameworks are not ours
            adapter = getattr(import_module(module), cls)()
            job = FrameworkJob(recipe=make(double), rank=world.rank, ranks=world.size)
            found.append(trained(adapter, job))
    if "tqdm" in sys.modules and sys.modules["tqdm"].tqdm.monitor is not None:
        sys.modules["tqdm"].tqdm.monitor.exit()  # torch.export shows its progress with it
    return found


def by_step(ranks: list[list[list[float | None]]]) -> list[list[float]]:
    """Recipe by recipe the mean over the ranks that know the loss."""
    runs = []
    for of_ranks in zip(*ranks, strict=True):
        known = [[x for x in step if x is not None] for step in zip(*of_ranks, strict=True)]
        runs.append([sum(step) / len(step) for step in known])
    return runs


@pytest.mark.parametrize("name", EXACT)
def test_torchs_own_train_as_one_process_does(name):
    found = by_step(run_ranks(2, train_on_a_rank, name, (language, images), True))
    for make, losses in zip((language, images), found, strict=True):
        expected = serial(make, True)
        assert len(set(expected)) == STEPS  # or there is nothing to see
        assert losses == pytest.approx(expected, rel=1e-11), make.__name__


def test_a_pipeline_of_three_stages_has_the_shared_weights_in_two():
    """And a group of the first and the last stage, without the middle one."""
    found = by_step(run_ranks(3, train_on_a_rank, "torch-pipelining", (language_of_nine,), True))
    assert found[0] == pytest.approx(serial(language_of_nine, True), rel=1e-11)


def language_of_nine(double: bool) -> Recipe:
    from dataclasses import replace

    return replace(language(double), batch=9)


@pytest.mark.parametrize("name", sorted(set(OWN) - set(EXACT)))
def test_lossy_hooks_train_nearly_so(name):
    losses = by_step(run_ranks(2, train_on_a_rank, name, (language,), False))[0]
    expected = serial(language, False)
    assert losses[0] == pytest.approx(expected[0], rel=1e-6)
    assert losses != pytest.approx(expected, rel=1e-6)
    assert losses == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("size", [1, 2])
def test_others_train_as_one_process_does(name, size):
    folder = os.environ.get("HEADWAY_ENVIRONMENTS")
    environment = find_environment(
        FRAMEWORKS[name].environment, None if folder is None else Path(folder)
    )
    if isinstance(environment, str):
        pytest.skip(environment)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    packages = environment.python.parents[1] / "lib" / version / "site-packages"
    for make in (language, images):
        results = run_ranks(
            size,
            train_on_a_rank,
            name,
            (make,),
            False,
            str(packages),
            dict(environment.variables),
        )
        assert by_step(results)[0] == pytest.approx(serial(make, False), rel=1e-5)
