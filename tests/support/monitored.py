"""Recipes with metrics, a monitor and callbacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import TensorDataset

import headway
from headway.metrics import Statistic, auc


def points(count: int, seed: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=draw)
    return TensorDataset(x, (x.sum(1) + torch.randn(count, generator=draw) > 0).long())


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def metrics(model: nn.Module, batch: Any) -> dict[str, Any]:
    """A share of samples, a mean, one that counts only some of the samples, and statistics."""
    x, y = batch
    scores = model(x)
    right = scores.argmax(1) == y
    return {
        "accuracy": (right.sum(), right.numel()),
        "margin": (scores[:, 0] - scores[:, 1]).abs().mean(),
        "recall": (right[y == 1].sum(), (y == 1).sum()),
        "auc": auc(scores[:, 1] - scores[:, 0], y),
        "largest": Statistic(scores.abs(), torch.max, "rows"),
    }


def doubled(model: nn.Module, batch: Any) -> dict[str, Any]:
    """Wrong where samples are spread: depends on how many are in a micro-batch."""
    found = metrics(model, batch)
    return {**found, "margin": found["margin"] * len(batch[0])}


def twice(model: nn.Module, batch: Any) -> dict[str, Any]:
    return {**metrics(model, batch), **metrics(model, batch)}


def otherwise(model: nn.Module, batch: Any) -> dict[str, Any]:
    return {"accuracy": model(input=batch[0]).mean()}


def parameters(model: nn.Module, batch: Any) -> dict[str, Any]:
    return {**metrics(model, batch), "size": sum(p.numel() for p in model.parameters())}


METRICS = {f.__name__: f for f in (doubled, twice, otherwise, parameters)}


def sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def plateau(optimizer: torch.optim.Optimizer) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer, mode="max", factor=0.5, patience=1)


class Writer:
    """Writes the moments of a rank into the run directory, and counts steps across restarts."""

    def __init__(self) -> None:
        self.steps = 0

    def _note(self, run: Any, moment: str) -> None:
        with (Path(run.directory) / f"moments-{run.rank}").open("a") as file:
            file.write(f"{moment} {run.step}\n")

    def on_train_start(self, run: Any) -> None:
        self._note(run, "start")

    def on_step_end(self, run: Any) -> None:
        self.steps += 1
        assert run.loss > 0
        assert run.lr > 0

    def on_validation_end(self, run: Any) -> None:
        self._note(run, "validation")
        assert run.validation.keys() == {
            *("loss", "accuracy", "margin", "recall", "auc", "largest")
        }

    def on_checkpoint(self, run: Any) -> None:
        self._note(run, "checkpoint")

    def on_train_end(self, run: Any) -> None:
        self._note(run, f"end of {self.steps}")

    def on_exception(self, run: Any, error: BaseException) -> None:
        self._note(run, type(error).__name__)

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


class Stopper:
    def on_step_end(self, run: Any) -> None:
        if run.rank == run.executor.world.ranks - 1 and run.step == 3:
            run.stop()


class Failing:
    def on_step_end(self, run: Any) -> None:
        if run.step == 2:
            raise ValueError("no room in the callback")


def recipe(what: str = "") -> headway.Recipe:
    """Stops early after a while, with a ReduceLROnPlateau on the way."""
    callbacks: tuple[object, ...] = (Writer(),)
    if what in ("Stopper", "Failing"):
        callbacks += (Stopper() if what == "Stopper" else Failing(),)
    return headway.Recipe(
        name="monitored",
        model=model,
        data=lambda: points(30, 1),
        loss=headway.criterion(nn.CrossEntropyLoss()),
        optimizer=sgd,
        batch=8,
        stop=60,
        validation=lambda: points(13, 2),
        validate_every=3,
        checkpoint_every=3,
        checkpoint_keep=1,
        metrics=METRICS.get(what, metrics),
        monitor="accuracy",
        monitor_mode="max",
        early_stopping=4,
        keep_best=True,
        scheduler=plateau,
        callbacks=callbacks,
    )


def value_of(model: nn.Module) -> dict[str, float]:
    """The metrics of the whole validation data, worked out at once."""
    x, y = points(13, 2).tensors
    scores = model(x.double())
    right = scores.argmax(1) == y
    return {
        "accuracy": right.double().mean().item(),
        "margin": (scores[:, 0] - scores[:, 1]).abs().mean().item(),
        "recall": right[y == 1].double().mean().item(),
        "auc": auc_by_pairs(scores[:, 1] - scores[:, 0], y),
        "largest": scores.abs().max().item(),
    }


def auc_by_pairs(scores: Tensor, labels: Tensor) -> float:
    """By its definition."""
    above = scores[labels == 1][:, None] - scores[labels == 0]
    return ((above > 0).double() + (above == 0).double() / 2).mean().item()


def events(directory: Path, kind: str) -> list[dict[str, Any]]:
    rows = map(json.loads, (directory / "events.jsonl").read_text().splitlines())
    return [row for row in rows if row["event"] == kind]


def double_loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x.double()), y)


def double_metrics(model: nn.Module, batch: Any) -> dict[str, Any]:
    return metrics(model, (batch[0].double(), batch[1]))
