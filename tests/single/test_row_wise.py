"""single: row-wise Adagrad, dense and sparse, and the rates of DLRM."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from headway.errors import RecipeError
from headway.optim import RowWiseAdagrad, tables_by_row, warmup_hold_decay


def test_five_steps_equal_the_rule_by_loops():
    torch.manual_seed(0)
    table = nn.Parameter(torch.randn(6, 3, dtype=torch.float64))
    expected, sums = table.detach().clone(), [0.0] * 6
    optimizer = RowWiseAdagrad([table], lr=0.1)
    for _ in range(5):
        gradient = torch.randn(6, 3, dtype=torch.float64)
        gradient[2] = 0
        table.grad = gradient.clone()
        optimizer.step()
        for row in range(6):
            sums[row] += sum(float(g) ** 2 for g in gradient[row]) / 3
            for column in range(3):
                expected[row, column] -= 0.1 * gradient[row, column] / (sums[row] ** 0.5 + 1e-10)
    torch.testing.assert_close(table.detach(), expected, rtol=1e-12, atol=1e-14)
    assert optimizer.state[table]["sum"].shape == (6,)


def test_sparse_gradients_give_the_same_also_of_ids_that_come_twice():
    torch.manual_seed(0)
    sparse = nn.EmbeddingBag(7, 3, mode="sum", sparse=True, dtype=torch.float64)
    dense = nn.EmbeddingBag(7, 3, mode="sum", dtype=torch.float64)
    dense.load_state_dict(sparse.state_dict())
    optimizers = [RowWiseAdagrad(m.parameters(), lr=0.1) for m in (sparse, dense)]
    for ids in ([[1, 1], [2, 5]], [[1, 0], [5, 5]], [[3, 3], [3, 3]]):
        for module, optimizer in zip((sparse, dense), optimizers, strict=True):
            optimizer.zero_grad()
            module(torch.tensor(ids)).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(sparse.weight, dense.weight, rtol=1e-12, atol=0)
    assert sparse.weight.grad.is_sparse
    states = [o.state[m.weight]["sum"] for o, m in zip(optimizers, (sparse, dense), strict=True)]
    torch.testing.assert_close(*states)


def test_other_parameters_have_an_accumulator_per_number_as_adagrad():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 1))
    other = copy.deepcopy(model)
    groups = tables_by_row(model)
    assert [(group["by_row"], len(group["params"])) for group in groups] == [(True, 1), (False, 2)]
    optimizer = RowWiseAdagrad(groups, lr=0.1)
    adagrad = torch.optim.Adagrad(other[2].parameters(), lr=0.1)
    for _ in range(3):
        for net, opt in ((model, optimizer), (other, adagrad)):
            opt.zero_grad()
            functional.mse_loss(net(torch.tensor([[1, 2]])), torch.ones(1, 1)).backward()
            opt.step()
            with torch.no_grad():
                net[0].weight.copy_(other[0].weight)  # that of the other does not learn
    torch.testing.assert_close(model[2].weight, other[2].weight)
    torch.testing.assert_close(model[2].bias, other[2].bias)
    assert optimizer.state[model[2].weight]["sum"].shape == (1, 8)


def test_a_saved_state_goes_on():
    torch.manual_seed(0)
    gradients = torch.randn(4, 6, 3)
    table = nn.Parameter(torch.randn(6, 3))
    twin = nn.Parameter(table.detach().clone())
    optimizer = RowWiseAdagrad([table], lr=0.1)
    again = RowWiseAdagrad([twin], lr=0.5)
    for number, gradient in enumerate(gradients):
        table.grad = gradient.clone()
        optimizer.step()
        if number == 1:
            twin.data.copy_(table.data)
            again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        elif number > 1:
            twin.grad = gradient.clone()
            again.step()
    assert torch.equal(table, twin)


def test_only_tables_are_grouped():
    assert [g["by_row"] for g in tables_by_row(nn.Linear(2, 2))] == [False]
    with pytest.raises(RecipeError, match="lr -1"):
        RowWiseAdagrad([nn.Parameter(torch.zeros(1))], lr=-1.0)


def rates(steps, rate=1.0, **arguments):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate)
    scheduler = warmup_hold_decay(optimizer, **arguments)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_rates_rise_hold_and_fall():
    expected = [0.25, 0.5, 0.75, 1, 1, 1, 1, 0.5625, 0.25, 0.0625, 1e-7, 1e-7]
    assert rates(12, warmup=4, hold=2, decay=4) == pytest.approx(expected)
    assert rates(3, warmup=0, hold=0, decay=0) == [1.0, 1.0, 1.0]
    assert rates(4, 0.5, warmup=2, hold=0, decay=0) == [0.25, 0.5, 0.5, 0.5]
    assert rates(2, 0.5, warmup=0, hold=0, decay=1, lowest=0.1) == pytest.approx([0.5, 0.1])
    with pytest.raises(RecipeError, match="decay of -1"):
        rates(1, warmup=0, hold=0, decay=-1)
