"""Random samples with a rule in them: ids as skewed as real ones, labels that can be learned.

The probability of a label is a logistic function of the numbers, of a weight for each id, and of
the products of random vectors of the ids: what a factorisation machine can represent.
"""

from __future__ import annotations

import numpy as np
import torch

from headway.data.source import TensorSource
from headway.errors import RecipeError
from headway.workloads.recommender.click_data import ClickData, Field

VALIDATES = 5
"""Every fifth sample."""


def planted(
    samples: int = 20_000,
    *,
    tables: int = 8,
    rows: int = 1000,
    places: int = 1,
    numbers: int = 4,
    skew: float = 1.1,
    share: float = 0.25,
    seed: int = 0,
) -> ClickData:
    """Samples of a rule.

    Args:
        tables: Fields of ids.
        rows: Of each table.
        places: Ids of each field.
        skew: Exponent of Zipf's law: the k-th most frequent id has a share in proportion to
            k^-skew. 0: all are as frequent.
        share: Of positive labels, about.

    Raises:
        RecipeError: A size is not positive.
    """
    if min(samples, tables, rows, places, numbers) < 1 or skew < 0:
        raise RecipeError("samples, tables, rows, places and numbers must be at least 1, skew 0")
    draw = np.random.default_rng(seed)
    dense = draw.standard_normal((samples, numbers), dtype=np.float32)
    shares = np.arange(1, rows + 1) ** -skew
    # Each table has another order of its ids, so that frequent ones do not lie together.
    order = np.stack([draw.permutation(rows) for _ in range(tables)])
    rank = draw.choice(rows, (samples, tables, places), p=shares / shares.sum())
    ids = order[np.arange(tables)[:, None], rank]
    field = np.arange(tables)[:, None]
    score = dense @ draw.standard_normal(numbers) / 2
    score += draw.standard_normal((tables, rows))[field, ids].sum((1, 2)) / np.sqrt(tables * places)
    vectors = draw.standard_normal((tables, rows, 4))[field, ids].sum(2) / np.sqrt(places)
    pairs = (vectors.sum(1) ** 2 - (vectors**2).sum(1)).sum(1) / 2
    score += pairs / tables
    # The quantile of the scores that leaves the share above it, so that about as many are positive.
    score -= np.quantile(score, 1 - share)
    labels = draw.random(samples) < 1 / (1 + np.exp(-2 * score))
    whole = (dense, ids.reshape(samples, -1), labels.astype(np.float32))
    later = np.arange(samples) % VALIDATES == VALIDATES - 1
    training, validation = (
        TensorSource(*(torch.from_numpy(part[chosen]) for part in whole))
        for chosen in (~later, later)
    )
    return ClickData(
        f"random numbers made from seed {seed}",
        tuple(f"number {n}" for n in range(numbers)),
        tuple(Field(f"table {n}", rows, places) for n in range(tables)),
        training,
        validation,
    )
