"""single: `headway plan` of recommenders: tables over ranks and tiers, beside whole ones."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import headway
from headway import Recipe, criterion
from headway.api.planning import TABLES
from headway.api.recipe_tables import recipe_tables, with_skew, without_tables
from headway.api.recipe_workload import capture_workload
from headway.cli.main import main
from headway.errors import DataError, NothingFits
from headway.optim import RowWiseAdagrad
from headway.plans import Plan

ROWS, COLUMNS, TABLES_OF_MODEL, SAMPLES = 20_000, 16, 8, 512


class Recommender(nn.Module):
    """DLRM's form: bags of ids, a sum over their vectors, dense layers."""

    def __init__(self, rows=ROWS, sparse=False):
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, COLUMNS, mode="sum", sparse=sparse)
            for _ in range(TABLES_OF_MODEL)
        )
        self.top = nn.Linear(TABLES_OF_MODEL * COLUMNS, 1)

    def forward(self, ids):
        vectors = [table(ids[:, n]) for n, table in enumerate(self.tables)]
        return self.top(torch.cat(vectors, dim=1)).squeeze(1)


class Words(nn.Module):
    """Its table is a small part of it."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 64)
        self.layers = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 1))

    def forward(self, ids):
        return self.layers(self.words(ids).mean(1)).squeeze(1)


def recipe(model=Recommender, *, optimizer=torch.optim.Adagrad, ids=None, **more):
    source = torch.Generator().manual_seed(0)
    # Nine tenths of the lookups are of the first twentieth of the rows.
    hot = torch.randint(0, ROWS // 20, (SAMPLES, TABLES_OF_MODEL, 5), generator=source)
    cold = torch.randint(0, ROWS, hot.shape, generator=source)
    chosen = torch.rand(hot.shape, generator=source) < 0.9
    ids = torch.where(chosen, hot, cold) if ids is None else ids
    labels = torch.rand(len(ids), generator=source).round()
    return Recipe(
        name="clicks",
        model=model,
        data=lambda: TensorDataset(ids, labels),
        loss=criterion(nn.BCEWithLogitsLoss()),
        optimizer=lambda model: optimizer(model.parameters(), lr=0.01),
        batch="64 samples",
        stop="2 steps",
        **more,
    )


def cluster(folder, *, memory, nvme="1 GiB", ranks=2):
    path = folder / "cluster.toml"
    tiers = f"""
[[devices.cpu.tiers]]
name = "NVMe"
memory = "{nvme}"
rate = "1 GB/s"
mapped = true
"""
    path.write_text(f"""
nodes = 1
processes = {ranks}
[[levels]]
name = "node"
nodes = 1
rate = "1 GB/s"
latency = "50 us"
[devices.cpu]
peak = {{ fp32 = "50 GFLOP/s" }}
memory = "{memory}"
memory_rate = "8 GB/s"
{tiers if nvme else ""}""")
    return str(path)


def by_row(parameters, lr):
    *tables, _, _ = parameters
    return RowWiseAdagrad([{"params": tables, "by_row": True}], lr=lr)


# -- the tables of a model ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "element", "row", "sparse"),
    [
        (torch.optim.SGD, 0, 0, True),
        (torch.optim.Adagrad, 4, 0, True),
        (torch.optim.AdamW, 12, 0, False),  # every row decays: a dense gradient, too
        (by_row, 0, 4, True),
    ],
)
def test_the_state_of_a_table_is_found_by_steps(optimizer, element, row, sparse):
    made = recipe(optimizer=optimizer)
    captured = capture_workload(made)
    found = recipe_tables(made, captured.work.graph, captured.work.samples)
    assert [table.table for table in found] == [f"tables.{n}.weight" for n in range(8)]
    for table in found:
        assert (table.rows, table.columns, table.bag, table.pooled) == (ROWS, COLUMNS, 5, True)
        assert (table.element_state, table.row_state, table.sparse) == (element, row, sparse)


def test_a_table_that_is_used_otherwise_is_none():
    class Tied(Words):
        def forward(self, ids):
            hidden = self.words(ids).mean(1)
            return (hidden @ self.words.weight.T).sum(1)

    made = recipe(Tied, ids=torch.zeros(SAMPLES, 6, dtype=torch.int64))
    captured = capture_workload(made)
    assert recipe_tables(made, captured.work.graph, captured.work.samples) == ()


def test_the_model_without_tables_keeps_the_rest():
    made = recipe()
    rest = capture_workload(without_tables(made, ["tables.3.weight"])).work.graph
    assert rest.parameters["tables.3.weight"].shape == (1, COLUMNS)
    assert rest.parameters["tables.2.weight"].shape == (ROWS, COLUMNS)


def test_the_skew_is_that_of_the_data():
    made = recipe()
    captured = capture_workload(made)
    tables = recipe_tables(made, captured.work.graph, captured.work.samples)
    for table in with_skew(made, tables):
        assert table.skew is not None
        assert table.skew.lookups == 5 * SAMPLES
        assert table.skew.share(ROWS // 20) > 0.85
        assert table.bag == 5
    wrong = recipe(ids=torch.full((SAMPLES, TABLES_OF_MODEL, 5), ROWS))
    with pytest.raises(DataError, match="id 20000 is outside a table of 20000 rows"):
        with_skew(wrong, tables)


# -- plans -------------------------------------------------------------------------------------


def test_tables_that_fit_no_device_make_a_plan_over_ranks(tmp_path):
    # 8 tables x 1.22 MiB, twice with Adagrad's state: 19.5 MiB, and gradients.
    found = headway.plan(recipe(), cluster(tmp_path, memory="14 MiB", nvme=""))
    assert found.by_tables
    assert not found.whole_fits
    assert found.tables is not None
    plan = found.plan
    assert len(plan.split.tables) == 8
    assert all(split.way == "copies" or split.ranks for split in plan.split.tables)
    assert plan.data_degree == plan.ranks == 2
    assert plan.prediction is not None
    assert plan.prediction.seconds == pytest.approx(sum(plan.prediction.parts.values()))
    assert plan.prediction.bytes == found.tables.bytes <= 14 * 2**20
    out = tmp_path / "plan.json"
    found.save(out)
    assert Plan.load(out).split.tables == plan.split.tables


def test_cold_rows_lie_in_a_file_where_memory_is_short(tmp_path):
    found = headway.plan(recipe(), cluster(tmp_path, memory="5 MiB", ranks=1))
    assert found.by_tables
    assert any(split.hot.endswith(" rows") for split in found.plan.split.tables)
    held = found.tables.placement.loads[0]
    assert held.used["device"] + found.tables.point.bytes <= 5 * 2**20
    assert held.used["NVMe"] > 0


def test_where_nothing_fits_the_missing_memory_is_named(tmp_path):
    with pytest.raises(NothingFits) as caught:
        headway.plan(recipe(), cluster(tmp_path, memory="4 MiB", nvme="2 MiB"))
    said = str(caught.value)
    assert "the tables do not fit" in said
    assert "more of NVMe needed; it has 2 MiB" in said


def test_whole_tables_stay_where_they_are_faster(tmp_path):
    found = headway.plan(recipe(), cluster(tmp_path, memory="4 GiB"), objective="fastest")
    assert found.whole_fits
    assert found.tables is not None
    assert found.by_tables == (found.tables.seconds < found.chosen.seconds)
    out = tmp_path / "plan.json"
    assert found.save(out, take=TABLES).split.tables


def test_a_model_with_small_tables_is_planned_as_before(tmp_path):
    ids = torch.zeros(SAMPLES, 6, dtype=torch.int64)
    found = headway.plan(recipe(Words, ids=ids), cluster(tmp_path, memory="4 GiB"))
    assert found.tables is None


# -- the command -------------------------------------------------------------------------------


def test_the_command_prints_draws_and_writes_the_placement(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    where = cluster(tmp_path, memory="1 MiB")
    sizes = ["--set", "arguments.data=random", "--set", "arguments.rows=2000"]
    words = ["plan", "dlrm", "--cluster", where, *sizes]
    assert main([*words, "--out", "plan.json", "--tables-svg", "tables.svg"]) == 0
    out = capsys.readouterr().out
    assert "no plan with whole tables fits" in out
    assert "tables over 2 ranks: step" in out
    assert "chosen, as no plan with whole tables fits" in out
    assert "binds: rank" in out
    assert "of 2,000 rows" not in out
    assert out.count("2,000 x 16") == 8
    assert "rank 1" in (tmp_path / "tables.svg").read_text()
    assert len(Plan.load(tmp_path / "plan.json").split.tables) == 8
    assert main([*words, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)["tables"]
    assert data["chosen"]
    assert len(data["placement"]["tables"]) == 8
