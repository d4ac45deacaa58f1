"""Measured steps of GPT training from CSV files, and their predictions as printed lines.

Columns are found by name (GPUs, global batch, micro batch, hidden size, heads, layers, sequence,
tensor, data and pipeline degree, time), in any order, beside others; a file without such names is
read as the last eleven columns in that order. Times are milliseconds unless their column says s.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from headway.cost.device import Array

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from support.calibration import StepTable
from support.transformer_formula import Transformer, TransformerSplit, memory_of_transformer

NAMES = {
    "GPUs": r"gpu|device|world",
    "micro-batch": r"micro|\bmbs\b",
    "batch": r"batch|\bgbs\b",
    "hidden": r"hidden|\bh\b",
    "heads": r"heads?\b",
    "layers": r"layers?\b",
    "sequence": r"seq",
    "t": r"tensor|\btp\b|\bmp\b|^t$",
    "d": r"data|\bdp\b|^d$",
    "p": r"pipeline|\bpp\b|^p$",
    "time": r"time|latency|seconds|\bms\b",
}
"""Columns in the order in which they are looked for; a column is taken once."""
ORDER = ("GPUs", "batch", "micro-batch", "hidden", "heads", "layers", "sequence", "t", "d", "p")
SAME = ("GPUs", "batch", "hidden", "heads", "layers", "sequence")
"""What plans must share to be ranked."""
SECONDS = re.compile(r"\(s\)|\bsec|\bs$")
CHUNKS = re.compile(r"virtual|chunk|interleav")
PARAMETERS = re.compile(r"param")
CLEARLY = 1.25
"""Times the memory of a device that a step must need before it is said not to fit."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What a file says.

    Attributes:
        steps: As if nothing were computed again and ZeRO 1 shared the optimiser's state.
        seconds: Measured.
        columns: (10, rows), as `ORDER`.
    """

    steps: StepTable
    seconds: Array
    columns: Array

    def take(self, chosen: Array) -> Rows:
        """Some of them."""
        return Rows(
            steps=self.steps.take(chosen),
            seconds=self.seconds[chosen],
            columns=self.columns[:, chosen],
        )

    def __getitem__(self, name: str) -> Array:
        return np.asarray(self.columns[ORDER.index(name)])


def read_rows(path: Path) -> Rows:
    """The rows of a file.

    Raises:
        SystemExit: A column is missing, or degrees do not multiply to the number of GPUs.
    """
    with path.open(encoding="utf-8-sig", newline="") as file:
        head, *body = [row for row in csv.reader(file) if any(row)]
    found, in_seconds, chunks = _columns(path, head)
    table = {name: np.array([float(row[place]) for row in body]) for name, place in found.items()}
    t, d, p = table["t"], table["d"], table["p"]
    wrong = np.flatnonzero(t * d * p != table["GPUs"])
    if len(wrong):
        raise SystemExit(f"{path}: t d p is not the number of GPUs in row {wrong[0] + 2}")
    model = Transformer(
        layers=table["layers"],
        hidden=table["hidden"],
        heads=table["heads"],
        sequence=table["sequence"],
    )
    split = TransformerSplit(
        tensor=t,
        data=d,
        pipeline=p,
        microbatch=table["micro-batch"],
        microbatches=table["batch"] / (d * table["micro-batch"]),
        virtual=1.0 if chunks is None else np.array([float(row[chunks]) for row in body]),
        recompute="none",
        zero=1.0,
    )
    return Rows(
        steps=StepTable(model=model, split=split),
        seconds=table["time"] / (1.0 if in_seconds else 1e3),
        columns=np.array([table[name] for name in ORDER]),
    )


def _columns(path: Path, head: Sequence[str]) -> tuple[dict[str, int], bool, int | None]:
    """(column of each name, whether times are seconds, column of the chunks per stage)."""
    said = [re.sub(r"[_\-#]+", " ", cell).strip().lower() for cell in head]
    left = [place for place, cell in enumerate(said) if not PARAMETERS.search(cell)]
    chunks = next((place for place in left if CHUNKS.search(said[place])), None)
    left = [place for place in left if place != chunks]
    found = {}
    for name, pattern in NAMES.items():
        place = next((place for place in left if re.search(pattern, said[place])), None)
        if place is not None:
            found[name] = place
            left.remove(place)
    if not found:
        places = range(len(head) - 11, len(head))
        return dict(zip((*ORDER, "time"), places, strict=True)), False, None
    missing = [name for name in NAMES if name not in found]
    if missing:
        raise SystemExit(f"{path}: no column for {', '.join(missing)} among {list(head)}")
    return found, bool(SECONDS.search(said[found["time"]])), chunks


def recomputing(steps: StepTable, how: str) -> StepTable:
    return replace(steps, split=replace(steps.split, recompute=how))


def unheld(steps: StepTable, memory: float) -> Array:
    """Which steps clearly do not fit into `memory` bytes unless activations are computed again."""
    needed = memory_of_transformer(steps.model, recomputing(steps, "none").split).total
    return np.asarray(needed > CLEARLY * memory)


def missed(predicted: Array, measured: Array) -> Array:
    """Per cent."""
    return 100 * (predicted / measured - 1)


def line(label: str, predicted: Array, measured: Array) -> str:
    off = missed(predicted, measured)
    size = np.abs(off)
    return (
        f"{label:34} n {len(off):4}  mean {size.mean():5.2f} %  median {np.median(size):5.2f}  "
        f"95 % {np.quantile(size, 0.95):5.1f}  worst {size.max():5.1f}  bias {off.mean():+5.1f}"
    )


def worst(predicted: Array, rows: Rows, count: int = 5) -> list[str]:
    """The rows that are missed most."""
    off = missed(predicted, rows.seconds)
    return [
        f"  {off[row]:+6.1f} %  {rows.seconds[row]:.3f} s  "
        + ", ".join(f"{name} {rows[name][row]:.0f}" for name in ORDER)
        for row in np.argsort(-np.abs(off))[:count]
    ]


def by(name: str, predicted: Array, rows: Rows) -> str:
    """Mean error and bias for each value of a column."""
    off, column = missed(predicted, rows.seconds), rows[name]
    cells = [
        f"{value:.0f}: {np.abs(off[column == value]).mean():.1f} "
        f"({off[column == value].mean():+.1f}, n {int((column == value).sum())})"
        for value in np.unique(column)
    ]
    return f"  by {name}: " + "; ".join(cells)


def ranks(values: Array) -> Array:
    return np.argsort(np.argsort(values, kind="stable"), kind="stable").astype(float)


def ranking(predicted: Array, rows: Rows, chosen: Array, least: int = 5) -> str:
    """Spearman within (model, batch, GPUs), and how often the true best is among the first two."""
    keys = np.stack([rows[name][chosen] for name in SAME], axis=1)
    measured = rows.seconds[chosen]
    found, hits = [], []
    for key in np.unique(keys, axis=0):
        own = np.flatnonzero((keys == key).all(axis=1))
        if len(own) < least:
            continue
        found.append(np.corrcoef(ranks(predicted[own]), ranks(measured[own]))[0, 1])
        hits.append(int(np.argmin(measured[own])) in np.argsort(predicted[own])[:2])
    if not found:
        return "no groups"
    return (
        f"{len(found)} groups of {least} or more: Spearman mean {np.mean(found):.4f}, "
        f"median {np.median(found):.4f}; true best in the first two {100 * np.mean(hits):.1f} %"
    )
