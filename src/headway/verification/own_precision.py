"""One step of the executor in the recipe's own precision, against the same step without it.

The serial run is in float64, in which autocast, conversions of the data, and the arithmetic of
optimisers in float32 never happen; so are split runs but those of data parallelism. On one rank and
for one micro-batch executor and plain torch make the same operations, so that gradients are equal
to the last bits also there.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from headway.data import Cursor, RankBatch
from headway.data.torch_loader import known_length
from headway.errors import NotEqual
from headway.plans import BatchSplit, data_parallel
from headway.run.distributed.launch_env import LaunchEnv
from headway.run.distributed.world import World
from headway.run.executor import Executor
from headway.run.recipe.recipe import Recipe
from headway.run.recipe.training_data import training_data
from headway.run.step.batch import resize_batch
from headway.run.step.randomness import (
    LogicalRandomness,
    build_model,
    probe_random_draws,
    seed_everything,
)
from headway.run.step.setup import stepped_each_step
from headway.verification.recording import build_training_state
from headway.verification.reference.batches import reference_batches

SAMPLES = 2
"""Few, because only the types of numbers are in question."""
TOLERANCE = 1e-5
"""Of the largest magnitude of a tensor: norms of layers are summed in another order."""

Numbers = Mapping[str, Mapping[str, Tensor]]


def check_own_precision(recipe: Recipe) -> None:
    """Make a step of two samples in the recipe's precision, with the executor and without.

    Raises:
        NotEqual: A loss, gradient, parameter or tensor of the optimiser is another one.
    """
    if recipe.precision == "float64":
        return  # as all else
    source = training_data(recipe)
    split = BatchSplit(samples=min(SAMPLES, known_length(source) or SAMPLES))
    start = Cursor(seed=recipe.seed)
    batches = reference_batches(source, split, 1, start, steps=1, drop_last=False)
    ((batch,),) = batches
    if not all(t.device.type == "cpu" for t in build_model(recipe).parameters()):
        return
    expected, given = _plain_step(recipe, batch), _executed_step(recipe, batch)
    for kind, tensors in expected.items():
        for name, tensor in tensors.items():
            error = _error(tensor, given[kind].get(name))
            if not error <= TOLERANCE:
                raise NotEqual(
                    f"in its own precision, {recipe.precision}, the executor does NOT compute what "
                    f"plain torch does; first difference: step 1, {kind} {name}: "
                    f"relative error {error:.1e}",
                    where=f"{batch.samples} samples, one process",
                )


def _error(a: Tensor, b: Tensor | None) -> float:
    if b is None or a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if not a.numel():
        return 0.0
    one, other = (_widened(t.to_dense()) for t in (a, b))
    # Infinities of a mask are equal, although their difference is no number.
    finite = one.isfinite()
    scale = float(one[finite].abs().max()) if finite.any() else 0.0
    apart = float((one - other).abs()[one != other].max()) if (one != other).any() else 0.0
    return apart / scale if scale else apart


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _executed_step(recipe: Recipe, batch: RankBatch) -> Numbers:
    model = build_model(recipe)
    optimizer = recipe.optimizer(model)
    run = Executor(
        model,
        optimizer,
        loss=recipe.loss,
        plan=data_parallel(batch.samples, processes=1, precision=recipe.precision),
        scheduler=stepped_each_step(recipe.scheduler(optimizer) if recipe.scheduler else None),
        clip=recipe.clip,
        seed=recipe.seed,
        world=World(place=LaunchEnv(), device=torch.device("cpu")),
    )
    loss = run.step(batch)
    numbers = run.strategy.tensors_by_kind()
    found = {"loss": {"loss": torch.tensor(loss, dtype=torch.float64)}, **numbers}
    run.strategy.close()
    return found


def _plain_step(recipe: Recipe, batch: RankBatch) -> Numbers:
    trained = build_training_state(recipe, build_model(recipe), reference=True)
    model, (micro,) = trained.model, batch.micros
    half = recipe.precision == "bfloat16"
    arithmetic: Any = torch.autocast("cpu", dtype=torch.bfloat16) if half else nullcontext()
    with arithmetic:
        sites = probe_random_draws(model, recipe.loss, micro.data, resize_batch)
    seed_everything(recipe.seed, batch.start.epoch, batch.start.position)
    with LogicalRandomness(sites, micro.positions, batch.start.epoch).active():
        with arithmetic:
            value = recipe.loss(model, micro.data)
        total, count = (
            value[:2] if isinstance(value, tuple) else (value * batch.samples, batch.samples)
        )
        (total / batch.samples).backward()
    for parameter in model.parameters():
        if parameter.grad is not None and float(count) != batch.samples:
            parameter.grad.mul_(batch.samples / float(count))
    if recipe.clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
    trained.optimizer.step()
    if (scheduler := stepped_each_step(trained.scheduler)) is not None:
        scheduler.step()  # which may correct a velocity
    loss = float(total.detach()) / float(count)
    return {
        "loss": {"loss": torch.tensor(loss, dtype=torch.float64)},
        **trained.tensors_by_kind(),
    }
