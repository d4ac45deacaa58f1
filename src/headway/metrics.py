"""Metrics of validation data that are no mean over samples: AUC, normalised entropy, your own.

A recipe's `metrics` returns a `Statistic` where a mean, or a pair (sum, count), does not do:

    def metrics(model, batch):
        logits = model(batch[0])
        return clicks(logits, batch[1])  # auc, normalised_entropy, calibration

headway puts the parts of all validation samples of all ranks together and calls `final` once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from headway.errors import RecipeError

WIDEST = 16.0
"""Of a histogram: logits beyond it lie in the outermost bins (a probability of 1e-7)."""


@dataclass(frozen=True)
class Statistic:
    """What a part of the validation samples contributes to a metric, and how the metric is made.

    Attributes:
        part: "sum": any shape, the same for every part. "rows": [n, ...], a row per sample say.
        final: Called once with all parts together, float64; returns the metric.
        join: "sum": the parts are added. "rows": they are put one below the other, in no certain
            order, and all ranks hold all of them: 16 bytes per sample for two numbers.
    """

    part: Tensor
    final: Callable[[Tensor], Tensor | float]
    join: Literal["sum", "rows"] = "sum"

    def value(self) -> float:
        """The metric of this part alone."""
        return float(self.final(self.part.double()))


def together(parts: Sequence[Statistic]) -> Statistic:
    """The statistic of several parts.

    Raises:
        RecipeError: They do not fit together.
    """
    check_fit([(part.join, part.part.shape) for part in parts])
    first, tensors = parts[0], [part.part.double() for part in parts]
    whole = torch.cat(tensors) if first.join == "rows" else sum(tensors[1:], start=tensors[0])
    return Statistic(whole, first.final, first.join)


def check_fit(kinds: Sequence[tuple[str, Sequence[int]]]) -> None:
    """Check that parts, of which `join` and shape are given, fit together.

    Raises:
        RecipeError: They do not.
    """
    different = {(join, tuple(shape[join == "rows" :])) for join, shape in kinds}
    if len(different) > 1:
        each = " and ".join(sorted(f"{list(shape)} ({join})" for join, shape in kinds))
        raise RecipeError(
            f"parts of a metric do not fit together: {each}",
            fix='Give parts of one shape; of "rows" the first dimension may differ.',
        )


def mean(total: Any, count: Any) -> Statistic:
    """total / count over all samples; NaN where nothing is counted."""
    return Statistic(torch.tensor([float(total), float(count)], dtype=torch.float64), _quotient)


def auc(scores: Tensor, labels: Tensor, *, bins: int | None = None) -> Statistic:
    """Area under the ROC curve: how often a positive sample has the greater score; ties count half.

    Args:
        scores: Any shape; greater means more likely. With `bins` they are logits.
        labels: Of as many samples; positive above 0.5.
        bins: None: exact, 16 bytes per validation sample on each rank. Otherwise a histogram of so
            many bins over logits from -16 to 16: pairs that share a bin count half, which is wrong
            by `auc_error` at most.

    Returns:
        The statistic; its value is NaN if all labels are equal or a score is NaN.

    Raises:
        RecipeError: There are not as many labels as scores.
    """
    scores, labels = _flat(scores, labels)
    if bins is None:
        return Statistic(torch.stack((scores, labels), dim=1), _exact_area, "rows")
    return Statistic(_histogram(scores, labels, bins), _area)


def auc_error(scores: Tensor, labels: Tensor, *, bins: int) -> Statistic:
    """By how much `auc` with as many bins can be wrong: half of the pairs that share a bin."""
    return Statistic(_histogram(*_flat(scores, labels), bins), _shared_pairs)


def normalised_entropy(logits: Tensor, labels: Tensor) -> Statistic:
    """Mean log loss, divided by that of the share of positives alone (He et al. 2014, section 2).

    Below 1 is better than predicting the share of positives for every sample.

    Returns:
        The statistic; its value is NaN if all labels are equal.

    Raises:
        RecipeError: There are not as many labels as logits.
    """
    logits, labels = _flat(logits, labels)
    loss = functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
    return Statistic(torch.stack((loss, labels.sum(), labels.new_tensor(len(labels)))), _relative)


def calibration(logits: Tensor, labels: Tensor) -> Statistic:
    """Mean predicted probability over mean label: 1 is right, 1.1 predicts ten per cent too many.

    Returns:
        The statistic; its value is NaN if no label is positive.

    Raises:
        RecipeError: There are not as many labels as logits.
    """
    logits, labels = _flat(logits, labels)
    return mean(logits.sigmoid().sum(), labels.sum())


def clicks(logits: Tensor, labels: Tensor, *, bins: int | None = None) -> dict[str, Statistic]:
    """The metrics of a model of clicks: "auc", "normalised_entropy", "calibration".

    Args:
        bins: See `auc`; with it there is "auc_error", too.

    Raises:
        RecipeError: There are not as many labels as logits.
    """
    found = {
        "auc": auc(logits, labels, bins=bins),
        "normalised_entropy": normalised_entropy(logits, labels),
        "calibration": calibration(logits, labels),
    }
    return found if bins is None else {**found, "auc_error": auc_error(logits, labels, bins=bins)}


def _flat(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    # [N, 1] and [N] would be broadcast to N x N pairs.
    if scores.numel() != labels.numel():
        raise RecipeError(
            f"{list(scores.shape)} scores and {list(labels.shape)} labels",
            why="Every sample has one of each.",
        )
    return scores.detach().flatten().double(), labels.detach().flatten().double()


def _quotient(sums: Tensor) -> float:
    return float(sums[0] / sums[1]) if sums[1] else math.nan


def _relative(sums: Tensor) -> float:
    loss, positives, samples = sums.tolist()
    if not 0 < positives < samples:
        return math.nan
    share = positives / samples
    entropy = -share * math.log(share) - (1 - share) * math.log(1 - share)
    return float(loss / samples / entropy)


def _histogram(logits: Tensor, labels: Tensor, bins: int) -> Tensor:
    """[2, bins + 1]: negative and positive samples by logit; the last column counts NaN."""
    if bins < 1:
        raise RecipeError(f"a histogram of {bins} bins", fix="Give bins=4096, say.")
    scaled = (logits.clamp(-WIDEST, WIDEST) + WIDEST) * (bins / (2 * WIDEST))
    places = scaled.nan_to_num(bins).long().clamp(max=bins - 1)
    places = torch.where(logits.isnan(), bins, places)
    places = places + (labels > 0.5) * (bins + 1)
    return torch.bincount(places, minlength=2 * (bins + 1)).view(2, bins + 1).double()


def _exact_area(rows: Tensor) -> float:
    scores, labels = rows[:, 0], rows[:, 1] > 0.5
    if not len(scores) or scores.isnan().any():
        return math.nan
    levels, place = scores.unique(return_inverse=True)
    count = partial(torch.bincount, minlength=len(levels))
    return _pairs(count(place[~labels]), count(place[labels]))


def _area(counts: Tensor) -> float:
    return math.nan if counts[:, -1].any() else _pairs(*counts[:, :-1])


def _pairs(negative: Tensor, positive: Tensor) -> float:
    """Of counts by rising score [levels]: the share of pairs in the right order."""
    negative, positive = negative.double(), positive.double()
    below = negative.cumsum(0) - negative
    pairs = float(negative.sum() * positive.sum())
    return float((positive * (below + negative / 2)).sum()) / pairs if pairs else math.nan


def _shared_pairs(counts: Tensor) -> float:
    negative, positive = counts[:, :-1]
    pairs = float(negative.sum() * positive.sum())
    return float((negative * positive).sum()) / 2 / pairs if pairs else math.nan
