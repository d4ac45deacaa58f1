"""The plain serial loop that every split run must equal: one process, the whole global batch.

Written without the executor on purpose: model, loss, backward, clip, step, as in any tutorial. The
only thing it shares with the split run is the meaning of a random number (by sample).
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from headway.data import Loader, as_source
from headway.plan import BatchSplit
from headway.run.amounts import resolve_batch
from headway.run.parts import sum_and_count, to_float64
from headway.run.place import Place
from headway.run.randomness import LogicalRandomness, probe, seed_everything
from headway.run.training import build_model
from headway.run.trees import resize, to_device
from headway.verification.record import Recorder, VerifyJob, build


def record_serial(_: Place, job: VerifyJob, target: Path) -> None:
    """Run the recipe serially in float64 and save the recording to `target`."""
    recipe = job.load()
    trained = build(recipe, to_float64(build_model(recipe)))
    model, optimizer, scheduler = trained.model, trained.optimizer, trained.scheduler
    recorder = Recorder(trained)
    source = as_source(recipe.data())
    cursor = job.start(recipe, len(source))
    whole = BatchSplit(samples=resolve_batch(recipe))
    sites = None
    with Loader(
        source, whole, rank=0, ranks=1, cursor=cursor, drop_last=recipe.drop_last
    ) as loader:
        for step, batch in zip(range(1, job.steps + 1), loader, strict=False):
            (micro,) = batch.micros
            data = to_device(micro.data, torch.device("cpu"), torch.float64)
            sites = sites or probe(model, recipe.loss, data, resize)
            model.zero_grad()  # not the optimiser's alone: all gradients are of this step
            seed_everything(recipe.seed, batch.start.epoch, batch.start.position)
            with LogicalRandomness(sites, micro.positions, batch.start.epoch):
                total, count = sum_and_count(recipe.loss(model, data), len(micro.positions))
                loss = total / count
                loss.backward()
            if recipe.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            recorder.take(step, float(loss.detach()), trained.numbers())
    recorder.recording().save(target)
