"""single: models whose tables lie over tiers train as those in memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, SparseAdam

from headway.parallel.tables.tiered_table import row_state
from support.tiered_models import Make, differences

MAKERS: dict[str, Make] = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "adagrad": lambda p: Adagrad(p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.2),
    "sparse adam": lambda p: SparseAdam(p, lr=0.1),
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("hot", ["110 rows", "100 %"])
def test_training_over_tiers_is_the_serial_run(maker: str, hot: str) -> None:
    found, brought = differences(MAKERS[maker], "row", hot, sparse=maker == "sparse adam")
    assert len(found) == 3 * {"sgd": 1, "adagrad": 2, "sparse adam": 3}[maker]
    assert max(found.values()) < 1e-12, found
    assert brought > 3 * 60


@pytest.mark.parametrize(
    ("maker", "kept"),
    [
        (lambda p: SGD(p, lr=1.0), {}),
        (lambda p: Adagrad(p, initial_accumulator_value=0.5), {"sum": 0.5}),
        (lambda p: SparseAdam(p), {"exp_avg": 0.0, "exp_avg_sq": 0.0}),
    ],
)
def test_what_an_optimiser_keeps_for_a_row_is_found_by_trial(
    maker: Make, kept: dict[str, float]
) -> None:
    table = nn.Parameter(torch.zeros(5, 3))
    found = row_state(maker([table]), table)
    assert {key: value.tolist() for key, value in found.items()} == {
        key: [value] * 3 for key, value in kept.items()
    }
