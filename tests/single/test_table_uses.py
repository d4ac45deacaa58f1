"""single: what a model does with tables that are to be split, besides looking up in them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from headway.errors import PlanError
from headway.parallel.tables import split_tables, taken
from headway.plans import LayerSplit, data_parallel
from headway.plans.tables import TableSplit, place_tables
from headway.run.strategy.split_tables import place_model_tables, table_modules
from headway.run.strategy.table_uses import check_uses

IDS = torch.tensor([[0, 3], [2, 2]])


class Scaled(nn.Embedding):
    """As language models have it: the rows times a number."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        return super().forward(input) * 3.0

    def halves(self, ids: Tensor) -> Tensor:
        return self(ids) / 2


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = Scaled(5, 4), nn.EmbeddingBag(7, 4, sparse=True)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (lambda m, x: sum(p.pow(2).sum() for p in m.parameters()), ["items", "users"]),
        (lambda m, x: (x @ m.users.weight.T).sum(), ["users"]),
        (lambda m, x: m.items.weight[0].mean(), ["items"]),
        (lambda m, x: (x @ m.users(torch.arange(5)).T).sum(), []),
    ],
)
def test_a_loss_may_look_up_and_do_nothing_else(
    other: Callable[[Two, Tensor], Tensor], named: list[str]
) -> None:
    model = Two()
    tables = {model.users.weight: "users", model.items.weight: "items"}
    found = model.users(IDS).sum(1) + model.items(IDS)
    loss = found.square().sum() + other(model, found)
    if not named:
        check_uses(loss, tables)
        return
    with pytest.raises(PlanError) as error:
        check_uses(loss, tables)
    assert [line.split(":")[0] for line in error.value.problems] == named
    assert '{tables = "NAME", way = "dense"}' in str(error.value)


def test_a_class_of_the_users_own_keeps_what_it_does() -> None:
    torch.manual_seed(0)
    model = Two()
    wanted = model.users(IDS).detach(), model.users.halves(IDS).detach()
    split_tables(model, place_tables([TableSplit()], {"users.weight": (5, 4)}, ranks=1))
    assert isinstance(model.users, Scaled)
    found = taken(model.users(IDS)), taken(model.users.halves(IDS))
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


def test_a_weight_made_of_other_parameters_is_no_table() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Embedding(5, 4)))
    assert table_modules(model) == {}


@pytest.mark.parametrize(
    ("patterns", "problem"),
    [
        (("*", "users"), "split.tables.1: 'users' counts for no table, as split.tables.0 ('*')"),
        (("users", "*"), ""),
        (("users", "items", "*"), ""),  # whatever is left
        (("users", "user*"), ""),
    ],
)
def test_a_pattern_behind_a_wider_one_is_refused(patterns: tuple[str, ...], problem: str) -> None:
    tables = tuple(TableSplit(tables=pattern, way="row") for pattern in patterns)
    plan = data_parallel(4, processes=2, split=LayerSplit(tables=tables))
    if not problem:
        assert set(place_model_tables(plan, Two(), None)) >= {"users.weight"}
        return
    with pytest.raises(PlanError) as error:
        place_model_tables(plan, Two(), None)
    assert error.value.problems[0].startswith(problem)
