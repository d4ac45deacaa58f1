"""The recipe `mlp` with a mistake in what training does around its steps."""

from __future__ import annotations

import torch

from headway.data import Cursor
from headway.run.executor import Executor
from headway.run.recipe.recipe import Recipe
from headway.run.strategy import training_state
from support.recipes import mlp


def forgets_a_moment() -> Recipe:
    """A resumed run begins with Adam's first moments at zero."""
    original = training_state._restore_optimizer

    def restore(optimizer, names, facts, tensors, away):
        kept = {
            name: torch.zeros_like(value) if name.endswith(".exp_avg") else value
            for name, value in tensors.items()
        }
        original(optimizer, names, facts, kept, away)

    training_state._restore_optimizer = restore
    return mlp()


def skips_samples() -> Recipe:
    """A resumed run goes on a sample too late."""
    original = Cursor.from_dict

    def from_dict(facts):
        return original({**facts, "position": facts["position"] + 1})

    Cursor.from_dict = staticmethod(from_dict)
    return mlp()


def counts_twice() -> Recipe:
    """A micro-batch counts twice in the validation."""
    original = Executor._sums

    def sums(self, batch):
        found = original(self, batch)
        found[0] += float(self._sum_and_count(batch.micros[0])[0]) if batch.micros else 0.0
        return found

    Executor._sums = sums
    return mlp()
