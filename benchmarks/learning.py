"""Trains a recipe in pieces: a machine that is shared lends a few minutes at a time."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import nn

import headway
from headway import Recipe
from headway.data import Cursor, Source
from headway.run.step.randomness import build_model


def train(
    recipe: Recipe, data: Source, steps: int, *, state: Path, seconds: float
) -> tuple[nn.Module, int]:
    """Go on where `state` says, for so many seconds or up to so many steps; save what is reached.

    Returns:
        The model, and the steps that it has been trained.
    """
    model = build_model(recipe)
    optimizer = recipe.optimizer(model)
    scheduler = recipe.scheduler(optimizer) if recipe.scheduler else None
    cursor, done, used, last = Cursor(seed=recipe.seed), 0, 0.0, 0.0
    if state.exists():
        saved = torch.load(state, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        if scheduler is not None:
            scheduler.load_state_dict(saved["scheduler"])
        cursor, done, used = Cursor.from_dict(saved["cursor"]), saved["steps"], saved["seconds"]
    with headway.Executor(
        model, optimizer, loss=recipe.loss, batch=int(recipe.batch), seed=recipe.seed,
        scheduler=scheduler,
    ) as run:  # fmt: skip
        start, losses = time.perf_counter(), []
        for batch in run.batches(data, epochs=None, cursor=cursor):
            last = time.perf_counter() - start
            if done == steps or last > seconds:
                break
            losses.append(run.step(batch))
            cursor, done = batch.after, done + 1
            if len(losses) % 50 == 0:
                print(
                    f"step {done}: mean loss of 50 steps {sum(losses[-50:]) / 50:.4f}", flush=True
                )
    torch.save(
        {
            "model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": done,
            "scheduler": scheduler.state_dict() if scheduler else {}, "seconds": used + last,
            "cursor": cursor.to_dict(),
        },
        state,
    )  # fmt: skip
    print(f"{done} of {steps} steps, {used + last:.0f} s in all, threads {torch.get_num_threads()}")
    return model, done
