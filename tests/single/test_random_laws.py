"""single: orders and draws that repeat between epochs, seeds or samples are named."""

from __future__ import annotations

import pytest

from headway.data import order
from headway.errors import NotEqual
from headway.verification.reference import random_laws
from headway.verification.reference.random_laws import check_orders

KEYS = order._keys


@pytest.mark.parametrize("length", [1, 23, 40, 720, 10**6])
@pytest.mark.parametrize("seed", [0, 5, 2**62])
def test_orders_differ(length, seed):
    check_orders(length, seed)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda purpose, seed, epoch, n: KEYS(purpose, seed, epoch % 3, n), "epoch 3"),
        (lambda purpose, seed, epoch, n: KEYS(purpose, seed, epoch & 0xFF, n), "epoch 256"),
        (lambda purpose, seed, epoch, n: KEYS(purpose, 0, epoch, n), "seed 6"),
        (lambda purpose, seed, epoch, n: KEYS(purpose, seed % 2**16, epoch, n), "seed 2147483653"),
    ],
)
def test_an_order_that_comes_again_is_named(monkeypatch, wrong, said):
    monkeypatch.setattr(order, "_keys", wrong)
    with pytest.raises(NotEqual, match=f"same order in .*{said}"):
        check_orders(40, 5)


def test_samples_that_draw_the_same_are_named(monkeypatch):
    monkeypatch.setattr(
        random_laws, "sample_seeds", lambda s, e, a, b: order.sample_seeds(s, e, a // 2, a // 2 + 1)
    )
    with pytest.raises(NotEqual, match="places 0 and 1 draw the same"):
        check_orders(40, 5)
