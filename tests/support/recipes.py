"""Recipes of tiny models, for tests that go through `module:function`."""

from __future__ import annotations

import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headway import MemmapSource, Recipe, criterion
from support.tiny_models import (
    FEATURES,
    Attention,
    Chain,
    ComplexValued,
    HalfFrozen,
    Images,
    Mlp,
    Points,
    Residual,
    Sentences,
    SparselyEmbedded,
    Tied,
    TinyConv,
    WithDropout,
    WithUnused,
    cross_entropy,
)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def mlp(*, batch: int = 12, microbatch: int | None = 4, steps: int = 8, seed: int = 5) -> Recipe:
    """40 points in batches of 12, so that the fourth batch of an epoch has 4."""
    return Recipe(
        name="mlp",
        model=Mlp,
        data=Points,
        loss=criterion(nn.CrossEntropyLoss()),
        optimizer=adamw,
        scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20),
        batch=batch,
        microbatch=microbatch,
        stop=steps,
        seed=seed,
        clip=0.5,
        validation=lambda: Points(16),
        validate_every=4,
        checkpoint_every=3,
    )


class Wide(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Linear(6, 256), nn.Tanh(), nn.Linear(256, 32), nn.Tanh(), nn.Linear(32, 4)
        )


def _tiny(name: str, model: Any, data: Any) -> Recipe:
    """A recipe in which nothing is special but the model."""
    return Recipe(
        name=name,
        model=model,
        data=data,
        loss=cross_entropy,
        optimizer=adamw,
        batch=12,
        microbatch=4,
        stop=8,
        seed=5,
    )


class Stack(nn.Sequential):
    """Equal blocks between which one tensor passes."""

    def __init__(self) -> None:
        blocks = (
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)
        )
        super().__init__(nn.Linear(6, 64), *blocks, nn.Linear(64, 4))


def stack() -> Recipe:
    """To be planned: large enough that the exchange takes some time."""
    return replace(_tiny("stack", Stack, Points), batch=32)


def dropout() -> Recipe:
    return _tiny("dropout", WithDropout, Points)


def wide() -> Recipe:
    """Large enough that compressors have something to compress."""
    return _tiny("wide", Wide, Points)


def unused() -> Recipe:
    return _tiny("unused", WithUnused, Points)


def tied() -> Recipe:
    return _tiny("tied", Tied, Sentences)


def attention() -> Recipe:
    """The key's bias has no influence: its gradient is rounding, which AdamW makes steps of."""
    return replace(dropout(), name="attention", model=Attention)


def complex_valued() -> Recipe:
    return replace(dropout(), name="complex", model=ComplexValued)


def sparse() -> Recipe:
    return replace(
        tied(),
        name="sparse",
        model=SparselyEmbedded,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )


def part_of_the_model() -> Recipe:
    """Gradients of the rest must neither add up from step to step nor be clipped with."""
    return replace(mlp(), name="part", optimizer=lambda model: adamw(model.second))


def own_mode() -> Recipe:
    """A model that keeps a part of itself in eval mode, by its own train()."""
    return replace(dropout(), name="own-mode", model=HalfFrozen)


class Counting(torch.optim.AdamW):
    """Has state that is no tensor: an update depends on how many there were."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        with torch.no_grad():
            for parameter in (p for group in self.param_groups for p in group["params"]):
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["updates"] = state.get("updates", 0) + 1
                    parameter.mul_(1 - 0.01 / state["updates"])


def deep(*, steps: int = 6) -> Recipe:
    """Cut into stages it has a skip, a layer in two stages, dropout, and ragged batches."""

    def showcase(model: nn.Module) -> str:
        return f"{float(model(torch.ones(1, FEATURES, dtype=torch.float64)).sum()):.10f}"

    return Recipe(
        name="deep",
        model=Residual,
        data=Points,
        loss=cross_entropy,
        optimizer=lambda model: Counting(model.parameters(), lr=0.01, weight_decay=0.1),
        scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20),
        batch=12,
        stop=steps,
        seed=5,
        clip=0.5,
        precision="float64",
        validation=lambda: Points(17),
        validate_every=3,
        checkpoint_every=3,
        showcase=showcase,
    )


class Trap:
    """Something that happens once, at a step of a rank: the file `path` says that it has.

    Args:
        path: "" for no trap; else a file that does not exist yet.
        rank: Where.
        step: At which call.
    """

    def __init__(self, path: str, rank: int, step: int) -> None:
        self.path, self.rank, self.step, self.calls = path, rank, step, 0

    def sprung(self) -> bool:
        self.calls += 1
        here = int(os.environ.get("RANK", "0"))
        if not self.path or here != self.rank or self.calls != self.step:
            return False
        if Path(self.path).exists():
            return False
        Path(self.path).touch()
        return True


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DyingAdam(torch.optim.AdamW):
    """Dies between the update of the first parameters and the rest."""

    trap: Trap

    def step(self, closure: Any = None) -> Any:
        if self.trap.sprung():
            kill()
        return super().step(closure)


class DyingPoints(Points):
    trap: Trap

    def __getitem__(self, index: int) -> Any:
        if self.trap.sprung():
            kill()
        return super().__getitem__(index)


class Bad(nn.Module):
    """An Mlp with dropout whose forward pass can be made to misbehave."""

    def __init__(self, trap: Trap, what: str, pause: float) -> None:
        super().__init__()
        self.inner = WithDropout(16)
        self.trap, self.what, self.pause = trap, what, pause

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            time.sleep(self.pause)
        y: torch.Tensor = self.inner(x)
        if self.training and self.trap.sprung():
            match self.what:
                case "kill":
                    kill()
                case "raise":
                    raise ValueError("the sky is falling")
                case "nan":
                    return y * float("nan")
                case "backward":
                    y.register_hook(lambda _: kill())
                case "delete":
                    for _ in range(3):  # rank 0 may just write into it
                        shutil.rmtree("run", ignore_errors=True)
                case "exit":
                    os._exit(0)
                case "collective":
                    Path(self.trap.path).unlink()  # in every attempt
                    torch.distributed.all_reduce(torch.ones(1000))
                case "hang":
                    time.sleep(1000)
        return y


def trapped(
    *,
    what: str = "",
    path: str = "",
    rank: int = 0,
    at: int = 1,
    steps: int = 20,
    every: int = 3,
    pause: float = 0.0,
    workers: int = 0,
    precision: str = "float32",
    batch: int = 12,
) -> Recipe:
    """Trains for `steps` unless the trap is sprung (the first two calls are the probe's)."""
    trap = Trap(path, rank, at)
    DyingAdam.trap = trap if what == "optimizer" else Trap("", 0, 0)
    DyingPoints.trap = trap if what == "data" else Trap("", 0, 0)
    elsewhere = what in ("recipe", "optimizer", "data")
    inside = Trap("", 0, 0) if elsewhere else trap
    if what == "recipe" and trap.sprung():
        kill()
    return Recipe(
        name="trapped",
        model=lambda: Bad(inside, what, pause),
        data=DyingPoints,
        loss=cross_entropy,
        optimizer=lambda model: DyingAdam(model.parameters(), lr=0.01),
        scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 30),
        batch=batch,
        stop=steps,
        checkpoint_every=every,
        seed=11,
        workers=workers,
        precision=precision,
    )


def from_file(*, path: str, steps: int = 400) -> Recipe:
    """Trains on a memory-mapped file that may vanish meanwhile."""

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        time.sleep(0.02)
        words, targets = batch
        return nn.functional.cross_entropy(model(words).flatten(0, 1), targets.flatten())

    return Recipe(
        name="from-file",
        model=lambda: nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 256)),
        data=lambda: MemmapSource(path, window=8),
        loss=loss,
        optimizer=adamw,
        batch=4,
        stop=steps,
        checkpoint_every=3,
    )


def large(*, steps: int = 40, every: int = 2) -> Recipe:
    """Checkpoints of about 3 MiB, for a small disk."""

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        time.sleep(0.02)
        return cross_entropy(model, batch)

    return Recipe(
        name="large",
        model=lambda: nn.Sequential(nn.Linear(6, 30_000), nn.Tanh(), nn.Linear(30_000, 4)),
        data=Points,
        loss=loss,
        optimizer=adamw,
        batch=4,
        stop=steps,
        checkpoint_every=every,
        checkpoint_keep=20,
    )


def normalised() -> Recipe:
    """Batch normalisation sees micro-batches: the split run is not the serial one."""
    return Recipe(
        name="normalised",
        model=lambda: TinyConv(batch_norm=True),
        data=Images,
        loss=cross_entropy,
        optimizer=adamw,
        batch=12,
        stop=4,
        seed=5,
    )


def normalised_globally() -> Recipe:
    # A bias in front of a normalisation has a gradient of rounding alone, which Adam would enlarge.
    return replace(
        normalised(),
        norm="global",
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    )


def late(*, words: bool = False) -> Recipe:
    """For schedules without a flush: nothing is clipped, and no layer is in two stages.

    Args:
        words: The loss is a sum with a count of its own.
    """

    def counted(model: nn.Module, batch: Any) -> Any:
        target = batch[1].masked_fill(batch[1] == 1, -100)
        total = nn.functional.cross_entropy(model(batch[0]), target, reduction="sum")
        return total, (target != -100).sum()

    return Recipe(
        name="late",
        model=Chain,
        data=Points,
        loss=counted if words else cross_entropy,
        optimizer=adamw,
        scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20),
        batch=12,
        stop=4,
        seed=5,
    )


def late_words() -> Recipe:
    return late(words=True)
