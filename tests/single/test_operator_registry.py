"""single: the search and both executors read one table of operators."""

from __future__ import annotations

import pytest
import torch

from headway.errors import PlanError
from headway.graph.aten import operator_axes
from headway.graph.operator_registry import OPERATORS, implement
from headway.parallel.operator_rules import RULES
from headway.parallel.spatial import SpatialAxis, SpatialContext

READERS = {"expression": operator_axes._TABLE, **RULES}


@pytest.mark.parametrize("reader", READERS)
def test_a_reader_has_what_the_table_says_and_no_more(reader):
    said = {name for name, row in OPERATORS.items() if getattr(row, reader)}
    table = set(READERS[reader])
    assert said <= table
    in_place = {name.removesuffix("_") for name in table - said}
    assert in_place <= said, "a variant in place of an operator that is none of the table's"


def test_an_executor_does_no_operator_that_the_table_lacks():
    assert {*RULES["layers"], *RULES["space"]} <= {*OPERATORS, *(f"{name}_" for name in OPERATORS)}


@pytest.mark.parametrize(
    "functions", [{}, {"linear": 1}, dict.fromkeys(["no rule", *RULES["layers"]], 1)]
)
def test_a_missing_function_or_rule_is_named(functions):
    with pytest.raises(LookupError, match="layers: a rule or its function is missing"):
        implement("layers", functions)


ONE_ARGUMENT = [
    name for name, row in OPERATORS.items()
    if row.space == "unary" and row.expression == "pointwise" and callable(getattr(torch, name, 0))
    and name not in ("clamp_max", "clamp_min", "threshold", "bitwise_not", "invert")
]  # fmt: skip


@pytest.mark.parametrize("name", ONE_ARGUMENT)
def test_an_elementwise_function_of_a_part_is_the_part_of_its_result(name):
    context = SpatialContext(axes={-1: SpatialAxis(size=2, rank=1)})
    whole = torch.rand(2, 3, 8) + 1.0
    if name in ("logit", "atanh", "acos", "asin"):
        whole = whole - 1.0
    func = getattr(torch, name)
    found = func(context.split(whole))
    assert torch.equal(found.local, func(whole[..., 4:]))
    assert found.shape == whole.shape


def test_a_function_of_no_row_is_refused_by_its_name():
    context = SpatialContext(axes={-1: SpatialAxis(size=2, rank=1)})
    x = context.split(torch.rand(2, 3, 8))
    with pytest.raises(
        PlanError,
        match=r"sort cannot be carried out on a tensor of shape \(2, 3, 8\)",
    ):
        x.sort(1)
