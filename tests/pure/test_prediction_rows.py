"""pure: measured steps are read from columns in any order, and told apart by their memory."""

from __future__ import annotations

import csv
import importlib
from pathlib import Path

import numpy as np
import pytest

from support.machines import assumed_machine
from support.transformer_formula import price_transformer

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PUBLISHED = [
    *("# GPUs", "global batch", "micro batch", "hidden size", "attention heads", "# layers"),
    *("sequence length", "tensor parallelism", "data parallelism", "pipeline parallelism"),
    "iteration time (ms)",
]
ROWS = np.array(
    [
        (64, 64, 1, 6144, 48, 40, 2048, 8, 8, 1, 2500.0),
        (64, 128, 2, 6144, 48, 40, 2048, 8, 2, 4, 8100.0),
        (128, 64, 1, 12288, 96, 96, 2048, 8, 1, 16, 24000.0),
        (512, 256, 2, 12288, 96, 96, 2048, 8, 8, 8, 18000.0),
    ]
)


@pytest.fixture
def rows_of(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("prediction_rows")


def write(path: Path, head, table) -> Path:
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file).writerows([head, *table])
    return path


def test_columns_by_name_in_any_order_or_by_place(rows_of, tmp_path):
    plain = rows_of.read_rows(write(tmp_path / "plain.csv", PUBLISHED, ROWS))
    size = [18.4, 18.4, 175.0, 175.0]
    in_front = write(
        tmp_path / "sized.csv",
        ["# Parameters (B)", *PUBLISHED],
        np.column_stack([size, ROWS]),
    )
    gpus, batch, micro, hidden, heads, layers, sequence, t, d, p, ms = ROWS.T
    others = {
        "nodes": gpus / 8,
        "num_gpus": gpus,
        "tp": t,
        "pp": p,
        "dp": d,
        "gbs": batch,
        "mbs": micro,
        "seq_len": sequence,
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "iteration_time_s": ms / 1e3,
        "tflops": gpus,
    }
    mixed = write(tmp_path / "mixed.csv", list(others), np.column_stack(list(others.values())))
    unnamed = write(tmp_path / "unnamed.csv", list("abcefgijkqz"), ROWS)
    for path in (in_front, mixed, unnamed):
        found = rows_of.read_rows(path)
        assert np.array_equal(found.columns, plain.columns), path.name
        assert found.seconds == pytest.approx(plain.seconds)
    assert plain.seconds.tolist() == [2.5, 8.1, 24.0, 18.0]
    assert plain.steps.split.batch.tolist() == [64, 128, 64, 256]
    assert plain["p"].tolist() == [1, 4, 16, 8]
    chunks = write(
        tmp_path / "chunks.csv",
        [*PUBLISHED, "virtual pipeline"],
        np.column_stack([ROWS, [1, 2, 3, 3]]),
    )
    assert rows_of.read_rows(chunks).steps.split.virtual.tolist() == [1, 2, 3, 3]


def test_what_cannot_be_read_is_named(rows_of, tmp_path):
    with pytest.raises(SystemExit, match="no column for heads"):
        rows_of.read_rows(
            write(tmp_path / "few.csv", PUBLISHED[:4] + PUBLISHED[5:], np.delete(ROWS, 4, axis=1))
        )
    wrong = ROWS.copy()
    wrong[1, 9] = 8
    with pytest.raises(SystemExit, match="not the number of GPUs in row 3"):
        rows_of.read_rows(write(tmp_path / "wrong.csv", PUBLISHED, wrong))


def test_lines_and_what_does_not_fit(rows_of, tmp_path):
    found = rows_of.read_rows(write(tmp_path / "plain.csv", PUBLISHED, ROWS))
    apart = rows_of.unheld(found.steps, assumed_machine("a100").device.memory)
    assert apart.tolist() == [False, False, False, True]
    assert rows_of.recomputing(found.steps, "full").split.recompute == "full"
    predicted = found.seconds * np.array([1.0, 1.1, 0.8, 1.0])
    assert "mean  7.50 %" in rows_of.line("here", predicted, found.seconds)
    assert "worst  20.0" in rows_of.line("here", predicted, found.seconds)
    assert rows_of.by("GPUs", predicted, found).endswith(
        "64: 5.0 (+5.0, n 2); 128: 20.0 (-20.0, n 1); 512: 0.0 (+0.0, n 1)"
    )
    first, *_ = rows_of.worst(predicted, found)
    assert first.startswith("   -20.0 %  24.000 s  GPUs 128, batch 64,")


def test_the_best_of_a_group_is_ranked(rows_of, tmp_path):
    plans = [(8, 2, 4), (8, 4, 2), (8, 8, 1), (4, 16, 1), (4, 4, 4)]
    table = [(64, 128, 1, 6144, 48, 40, 2048, t, d, p, 1.0) for t, d, p in plans]
    found = rows_of.read_rows(write(tmp_path / "group.csv", PUBLISHED, table))
    priced = price_transformer(
        found.steps.model, found.steps.split, assumed_machine("a100")
    ).seconds
    made = rows_of.Rows(steps=found.steps, seconds=priced, columns=found.columns)
    every = np.arange(5)
    assert "Spearman mean 1.0000" in rows_of.ranking(priced, made, every)
    assert "Spearman mean -1.0000" in rows_of.ranking(-priced, made, every)
    assert rows_of.ranking(priced[:4], made, every[:4]) == "no groups"
