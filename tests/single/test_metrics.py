"""single: AUC, normalised entropy and calibration, and statistics of one's own."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from headway.errors import RecipeError
from headway.metrics import (
    Statistic,
    auc,
    auc_error,
    calibration,
    clicks,
    normalised_entropy,
    together,
)
from headway.run.recipe.recipe import metric_parts
from support.monitored import auc_by_pairs

# Here, because scikit-learn sets environment variables when it is imported.
sklearn_metrics = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")


def drawn(count=400, levels=None, seed=0):
    draw = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(count, generator=draw, dtype=torch.float64)
    if levels is not None:
        logits = (logits * levels).round() / levels
    return logits, (torch.rand(count, generator=draw) < logits.sigmoid()).float()


@pytest.mark.parametrize("levels", [None, 1, 5])
def test_auc_equals_its_definition_and_scikit_learn_also_with_ties(levels):
    for seed in range(5):
        logits, labels = drawn(levels=levels, seed=seed)
        found = auc(logits, labels).value()
        assert found == pytest.approx(auc_by_pairs(logits, labels), abs=1e-14)
        assert found == pytest.approx(sklearn_metrics.roc_auc_score(labels, logits), abs=1e-14)
        parts = [auc(a, b) for a, b in zip(logits.split(70), labels.split(70), strict=True)]
        assert together(parts).value() == found


@pytest.mark.parametrize("bins", [8, 300, 1 << 16])
def test_auc_of_a_histogram_is_wrong_by_less_than_it_says(bins):
    for seed in range(5):
        logits, labels = drawn(seed=seed)
        error = auc_error(logits, labels, bins=bins).value()
        wrong = abs(auc(logits, labels, bins=bins).value() - auc_by_pairs(logits, labels))
        assert wrong <= error + 1e-14
        halves = [auc(logits[s], labels[s], bins=bins) for s in (slice(150), slice(150, None))]
        assert together(halves).value() == auc(logits, labels, bins=bins).value()
    assert (error < 1e-3) == (bins == 1 << 16)


def test_logits_beyond_the_histogram_keep_to_the_outermost_bins():
    logits, labels = torch.tensor([-1e9, -math.inf, 1e9, math.inf]), torch.tensor([0, 0, 1, 1])
    assert auc(logits, labels, bins=4).value() == 1.0


def test_entropy_and_calibration():
    logits, labels = drawn()
    share = labels.double().mean()
    loss = sklearn_metrics.log_loss(labels, logits.sigmoid())
    base = sklearn_metrics.log_loss(labels, torch.full_like(logits, share.item()))
    assert normalised_entropy(logits, labels).value() == pytest.approx(loss / base, rel=1e-12)
    ratio = logits.sigmoid().mean() / share
    assert calibration(logits, labels).value() == pytest.approx(ratio.item(), rel=1e-12)
    always = torch.logit(share).expand(400)
    assert normalised_entropy(always, labels).value() == pytest.approx(1.0, rel=1e-12)
    assert calibration(always, labels).value() == pytest.approx(1.0, rel=1e-12)


def test_nothing_to_tell_apart_is_no_number():
    for labels in (torch.zeros(3), torch.ones(3)):
        for bins in (None, 10):
            assert math.isnan(auc(torch.randn(3), labels, bins=bins).value())
        assert math.isnan(normalised_entropy(torch.randn(3), labels).value())
    for bins in (None, 10):
        broken = torch.tensor([0.0, math.nan])
        assert math.isnan(auc(broken, torch.tensor([0.0, 1.0]), bins=bins).value())
    assert math.isnan(calibration(torch.zeros(3), torch.zeros(3)).value())


def test_all_of_them():
    logits, labels = drawn()
    column = logits[:, None]
    assert clicks(column, labels).keys() == {"auc", "normalised_entropy", "calibration"}
    found = {name: part.value() for name, part in clicks(column, labels, bins=100).items()}
    assert found.keys() == {"auc", "auc_error", "normalised_entropy", "calibration"}
    assert found["auc"] == auc(logits, labels, bins=100).value()
    with pytest.raises(RecipeError, match=r"\[400, 1\] scores and \[399\] labels"):
        clicks(column, labels[1:])


def test_a_statistic_of_ones_own():
    rmse = [
        Statistic(torch.tensor([float(e.square().sum()), len(e)]), lambda s: (s[0] / s[1]).sqrt())
        for e in (torch.tensor([1.0, 2.0]), torch.tensor([3.0]))
    ]
    expected = functional.mse_loss(torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3)).sqrt()
    assert together(rmse).value() == pytest.approx(expected.item())
    assert metric_parts({"rmse": rmse[0]}, 2) == {"rmse": rmse[0]}


def test_parts_that_do_not_fit_together():
    rows = Statistic(torch.zeros(3, 2), torch.sum, "rows")
    for other in (
        Statistic(torch.zeros(3, 2), torch.sum),
        Statistic(torch.zeros(3, 3), torch.sum, "rows"),
    ):
        with pytest.raises(RecipeError, match="parts of a metric do not fit together"):
            together([rows, other])
