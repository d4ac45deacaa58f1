"""The serial loop that split runs are compared with: a page of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headway.data import Cursor, Loader, as_source
from headway.plans import BatchSplit
from headway.run.step.batch import resize_batch, to_device
from headway.run.step.randomness import LogicalRandomness, probe_random_draws, seed_everything
from headway.run.strategy.training_state import TrainingState

Numbers = dict[str, Tensor]


def numbers(model: nn.Module, optimizer: torch.optim.Optimizer, loss: float) -> Numbers:
    """Loss, gradients, parameters, buffers and optimiser state by logical name."""
    return flat(TrainingState(model, optimizer, None).tensors_by_kind(), loss)


def flat(numbers: Mapping[str, Mapping[str, Tensor]], loss: float) -> Numbers:
    """Copies of what `tensors_by_kind` of a strategy or state gives, as "kind name"."""
    found: Numbers = {"loss": torch.tensor(loss, dtype=torch.float64)}
    for kind, tensors in numbers.items():
        found.update({f"{kind} {name}": t.detach().clone() for name, t in tensors.items()})
    return found


def train_serially(
    build: Callable[[], nn.Module],
    data: Any,
    loss: Callable[[nn.Module, Any], Any],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    *,
    batch: int,
    steps: int,
    clip: float | None = None,
    seed: int = 3,
) -> list[Numbers]:
    """`steps` optimiser steps in float64 on whole global batches; what each step left."""
    torch.manual_seed(seed)
    model = build().double().train()
    optimizer = make_optimizer(model)
    history: list[Numbers] = []
    loader = Loader(
        as_source(data), BatchSplit(samples=batch), rank=0, ranks=1, cursor=Cursor(seed=seed)
    )
    sites = None
    with loader:
        for _, part in zip(range(steps), loader, strict=False):
            (micro,) = part.micros
            inputs = to_device(micro.data, torch.device("cpu"), torch.float64)
            sites = sites or probe_random_draws(model, loss, inputs, resize_batch)
            optimizer.zero_grad()
            seed_everything(seed, part.start.epoch, part.start.position)
            with LogicalRandomness(sites, micro.positions, part.start.epoch):
                value = loss(model, inputs)
                mean = value[0] / value[1] if isinstance(value, tuple) else value
                mean.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            history.append(numbers(model, optimizer, float(mean.detach())))
    return history


def largest_error(expected: Numbers, got: Numbers) -> tuple[float, str]:
    """The largest |a - b| / max(1e-3, max |a|) over all tensors, and where; names must be equal."""
    assert set(expected) == set(got), set(expected) ^ set(got)
    worst = (0.0, "")
    for name, a in expected.items():
        scale = max(float(a.double().abs().max()), 1e-3)
        worst = max(worst, (float((a.double() - got[name].double()).abs().max()) / scale, name))
    return worst
