"""single: a table over memory and a mapped file is the table in memory, wherever its rows lie."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from headway.channel.mapped_memory import (
    file_of,
    into_file,
    large_tensors_in_files,
    mapped_tensor,
)
from headway.errors import DataError, PlanError, RunError
from headway.parallel.tables.tiered_rows import TieredRows

ROWS, COLUMNS = 500, 6


def batches(steps: int, seed: int = 0, rows: int = ROWS) -> list[Tensor]:
    """Ids of which most are among the first twentieth of the rows."""
    random = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(steps):
        frequent = torch.randint(rows // 20, (50,), generator=random)
        rare = torch.randint(rows, (10,), generator=random)
        found.append(torch.cat([frequent, rare])[torch.randperm(60, generator=random)])
    return found


def trained(rows: TieredRows, steps: list[Tensor], *, ahead: bool) -> Tensor:
    """Some update that needs the old values, by hand; the whole table afterwards."""
    for number, ids in enumerate(steps):
        source, slots = rows.rows_of(ids)
        if ahead and number + 1 < len(steps):
            rows.ahead(steps[number + 1])
        source[slots].square().sum().backward()
        gradient, source.grad = source.grad, None
        assert gradient is not None
        used = slots.unique()
        state = rows.cache("sum")
        state[used] += gradient[used].square()
        rows.cache("")[used] -= 0.1 * gradient[used] / (state[used].sqrt() + 1e-10)
        rows.end_step()
    rows.settle()
    return rows.homes[""].clone()


def in_memory(weight: Tensor, steps: list[Tensor]) -> tuple[Tensor, Tensor]:
    weight, state = weight.clone(), torch.zeros_like(weight)
    for ids in steps:
        leaf = weight.clone().requires_grad_()
        leaf[ids].square().sum().backward()
        assert leaf.grad is not None
        state += leaf.grad.square()
        weight -= 0.1 * leaf.grad / (state.sqrt() + 1e-10)
    return weight, state


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("hot", ["70 rows", "20 %", "100 %", "17 KiB"])
def test_a_table_over_tiers_is_the_table(hot: str, ahead: bool) -> None:
    torch.manual_seed(0)
    weight, steps = torch.randn(ROWS, COLUMNS, dtype=torch.float64), batches(150)
    rows = TieredRows("t", weight.clone(), hot, state={"sum": torch.zeros_like(weight)})
    expected, state = in_memory(weight, steps)
    # Sums of gradients may have another order in a batch that is looked up elsewhere.
    torch.testing.assert_close(trained(rows, steps, ahead=ahead), expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(rows.homes["sum"], state, rtol=1e-13, atol=1e-13)
    rows.close()


def test_frequent_rows_stay_in_memory() -> None:
    weight = torch.zeros(ROWS, COLUMNS)
    rows = TieredRows("t", weight, "70 rows", state={"sum": torch.zeros_like(weight)})
    steps = batches(400)
    trained(rows, steps[:200], ahead=True)
    before = rows.brought
    trained(rows, steps[200:], ahead=True)
    # Ten rare ids a step are away, but for those that lie among what memory holds anyway.
    assert 200 * 7 < rows.brought - before < 200 * 10.5
    later = [ids.add(250) % ROWS for ids in batches(700, seed=1)]  # others become frequent
    trained(rows, later[:500], ahead=True)
    before = rows.brought
    trained(rows, later[500:], ahead=True)
    assert rows.brought - before < 200 * 10.5
    rows.close()


def test_rows_that_are_known_to_be_frequent_are_not_brought() -> None:
    rows = TieredRows("t", torch.zeros(ROWS, COLUMNS), "100 rows", first=torch.arange(25))
    assert rows.brought == 25
    with torch.no_grad():
        rows.rows_of(torch.arange(25))
    assert rows.brought == 25


def test_where_rows_lie_does_not_depend_on_timing() -> None:
    found = []
    for _ in range(2):
        rows = TieredRows("t", torch.ones(ROWS, 2), "80 rows", state={"sum": torch.zeros(ROWS, 2)})
        trained(rows, batches(120), ahead=True)
        found.append((rows.brought, rows._row.clone()))
        rows.close()
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def test_evaluation_looks_up_more_rows_than_memory_holds() -> None:
    weight = torch.randn(ROWS, COLUMNS)
    rows = TieredRows("t", weight.clone(), "40 rows")
    with torch.no_grad():
        for ids in torch.arange(ROWS).split(30):
            source, slots = rows.rows_of(ids)
            assert torch.equal(source[slots], weight[ids])
    assert rows.brought == ROWS


def test_several_lookups_of_a_step_keep_their_rows() -> None:
    weight = torch.randn(ROWS, COLUMNS)
    rows = TieredRows("t", weight.clone(), "60 rows")
    _, first = rows.rows_of(torch.arange(30))
    source, second = rows.rows_of(torch.arange(100, 130))
    assert torch.equal(source[first], weight[:30])
    assert torch.equal(source[second], weight[100:130])
    with pytest.raises(PlanError) as refused:
        rows.rows_of(torch.arange(200, 207))
    assert "the step needs 7 more, 287 B" in str(refused.value)
    rows.end_step()
    source, third = rows.rows_of(torch.arange(200, 207))
    assert torch.equal(source[third], weight[200:207])


def test_a_restored_table_is_read_again() -> None:
    rows = TieredRows("t", torch.zeros(ROWS, COLUMNS), "40 rows")
    rows.rows_of(torch.arange(20))
    rows.end_step()
    rows.homes[""].fill_(3)
    rows.reload()
    source, slots = rows.rows_of(torch.arange(10, 40))
    assert bool((source[slots] == 3).all())


def test_an_id_outside_the_table_is_named() -> None:
    rows = TieredRows("emb.weight", torch.zeros(10, 2), "5 rows")
    for wrong in (-1, 10):
        with pytest.raises(DataError, match=r"emb\.weight") as refused:
            rows.rows_of(torch.tensor([3, wrong]))
        assert f"id {wrong} " in str(refused.value)


def test_too_small_a_memory_says_how_much_is_missing() -> None:
    with pytest.raises(PlanError) as refused:
        TieredRows("t", torch.zeros(1000, 4), "4000 B")
    assert "1.01 KiB are missing" in str(refused.value)


def test_a_full_disk_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(RunError) as refused:
        mapped_tensor((1 << 44, 64), torch.float64, str(tmp_path))
    assert "are missing" in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_a_directory_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="No such file"):
        mapped_tensor((4, 4), torch.float32, str(tmp_path / "none"))


LAWS: list[Callable[[nn.Embedding], object]] = [
    lambda table: None,
    lambda table: nn.init.uniform_(table.weight, -0.1, 0.1),
    lambda table: nn.init.xavier_normal_(table.weight),
    lambda table: table.weight.data.mul_(0.5),
]


@pytest.mark.parametrize("law", LAWS)
def test_a_model_that_is_made_in_files_has_the_same_values(
    law: Callable[[nn.Embedding], object],
) -> None:
    def made() -> tuple[nn.Embedding, nn.Linear, torch.optim.Optimizer]:
        torch.manual_seed(3)
        table, layer = nn.Embedding(3001, 7, padding_idx=5), nn.Linear(3, 4)
        law(table)
        parameters = [*table.parameters(), *layer.parameters()]
        return table, layer, torch.optim.Adagrad(parameters, initial_accumulator_value=0.25)

    table, layer, optimizer = made()
    with large_tensors_in_files(above=3001 * 28):
        mapped, small, other = made()
    assert torch.equal(mapped.weight, table.weight)
    assert torch.equal(small.weight, layer.weight)
    assert isinstance(mapped.weight, nn.Parameter)
    assert mapped.weight.requires_grad
    state = other.state[mapped.weight]["sum"]
    assert torch.equal(state, optimizer.state[table.weight]["sum"])
    assert file_of(mapped.weight) is not None
    assert file_of(state) is not None
    assert file_of(small.weight) is None
    assert into_file(mapped.weight).data_ptr() == mapped.weight.data_ptr()
