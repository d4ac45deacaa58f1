"""The plain serial loop that every split run must equal: one process, all of the global batch.

Written without the executor on purpose: model, loss, backward, clip, step, as in any tutorial. The
only thing it shares with the split run is the meaning of a random number (by sample).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headway.data import Loader, MicroBatch, RankBatch, as_source
from headway.plan import BatchSplit
from headway.run.amounts import resolve_batch
from headway.run.parts import sum_and_count, to_float64
from headway.run.place import Place
from headway.run.randomness import LogicalRandomness, Sites, probe, seed_everything
from headway.run.recipe import Recipe
from headway.run.start import plan_of
from headway.run.training import build_model
from headway.run.training_state import Trained
from headway.run.trees import resize, to_device
from headway.verification.record import Recorder, VerifyJob, build


def record_serial(_: Place, job: VerifyJob, target: Path, *, ranks: int | None = None) -> None:
    """Run the recipe serially in float64 and save the recording to `target`.

    Args:
        _: Alone.
        job: What to record.
        target: The recording.
        ranks: None: every global batch goes through the model in one piece. A number: it goes
            through in the micro-batches that the plan has for so many ranks, one after the other,
            for models whose modules see a batch as a whole (batch normalisation).
    """
    recipe = job.load()
    trained = build(recipe, to_float64(build_model(recipe)))
    recorder = Recorder(trained)
    sites: Sites | None = None
    shares_of_steps = steps_of(recipe, job, *_shares(recipe, job, ranks))
    for step, shares in enumerate(shares_of_steps, 1):
        micros = [micro for share in shares for micro in share.micros]
        sites = sites or probe(trained.model, recipe.loss, data_of(micros[0]), resize)
        loss = _step(recipe, trained, micros, shares[0], sites)
        recorder.take(step, loss, trained.numbers())
    recorder.recording().save(target)


def _shares(recipe: Recipe, job: VerifyJob, ranks: int | None) -> tuple[BatchSplit, int]:
    """How a global batch is cut into micro-batches, and over how many copies."""
    if ranks is None:
        return BatchSplit(samples=resolve_batch(recipe)), 1
    plan = plan_of(recipe, job.plan, ranks)
    return plan.batch, plan.data_degree


def _step(
    recipe: Recipe, trained: Trained, micros: list[MicroBatch], batch: RankBatch, sites: Sites
) -> float:
    """One step; returns the loss."""
    model, start = trained.model, batch.start
    model.zero_grad()  # not the optimiser's alone: all gradients are of this step
    sums, counts = 0.0, 0.0
    for micro in micros:
        seed_everything(recipe.seed, start.epoch, start.position)
        with LogicalRandomness(sites, micro.positions, start.epoch):
            total, count = sum_and_count(recipe.loss(model, data_of(micro)), len(micro.positions))
            (total / batch.samples).backward()
        sums, counts = sums + float(total.detach()), counts + float(count)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(batch.samples / counts)
    if recipe.clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
    trained.optimizer.step()
    if trained.scheduler is not None:
        trained.scheduler.step()
    return sums / counts


def steps_of(
    recipe: Recipe, job: VerifyJob, split: BatchSplit, copies: int
) -> Iterator[tuple[RankBatch, ...]]:
    """The batches of every copy, for each step that is recorded."""
    source = as_source(recipe.data())
    cursor = job.start(recipe, len(source))
    options: dict[str, Any] = {"cursor": cursor, "drop_last": recipe.drop_last}
    with ExitStack() as stack:
        loaders = [
            stack.enter_context(Loader(source, split, rank=copy, ranks=copies, **options))
            for copy in range(copies)
        ]
        yield from islice(zip(*loaders, strict=True), job.steps)


def data_of(micro: MicroBatch) -> object:
    """What a loss gets, in float64."""
    return to_device(micro.data, torch.device("cpu"), torch.float64)
