"""What a checkpoint must hold beside tensors, found a second time: rates, scheduler, cursor.

A fact is recorded as a number under its path, so that a wrong one is named as a tensor is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from headway.data import Cursor
from headway.run.strategy.training_state import TrainingState


def facts_of(trained: TrainingState, cursor: Cursor) -> dict[str, Any]:
    """The facts of a serial run between two steps."""
    names: dict[Tensor, str] = {p: name for name, p in trained.model.named_parameters()}
    groups, scalars = [], {}
    for group in trained.optimizer.param_groups:
        members = [names[parameter] for parameter in group["params"]]
        values = {key: _plain(value) for key, value in group.items() if key != "params"}
        groups.append({"names": members, "values": values})
    for parameter, state in trained.optimizer.state.items():
        scalars[names[parameter]] = {k: v for k, v in state.items() if not isinstance(v, Tensor)}
    scheduler = trained.scheduler
    return {
        "optimizer": {"groups": groups, "scalars": scalars},
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "cursor": {"seed": cursor.seed, "epoch": cursor.epoch, "position": cursor.position},
    }


def numbers_of(facts: Mapping[str, Any]) -> dict[str, Tensor]:
    """Path -> number; what is no finite number is a part of its path."""
    found = {}
    for path, value in _leaves(facts, ""):
        number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
        name = path if number else f"{path} = {value!r}"
        found[name] = torch.tensor(float(value) if number else 0.0, dtype=torch.float64)
    return found


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _leaves(value[key], f"{path}.{key}".lstrip("."))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{number}]")
    else:
        yield path, value


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
