"""How far predicted steps of GPT training are from measured ones: vTrain's runs, Megatron's ten.

    python benchmarks/prediction_vtrain.py ROWS.csv [--judge OTHER.csv] [--uplink "8x hdr"]

ROWS.csv: vTrain's single-node runs (GPUs, global batch, micro batch, hidden size, heads, layers,
sequence, tensor, data and pipeline degree, milliseconds; MIT licence). At most 72 of them are
fitted, all others predicted. OTHER.csv: further rows in the same columns (or with the model's size
in front), only predicted, from the 72 rows that `Steps.spread` chooses; nodes joined by `--uplink`
(vTrain's, from memory: four interfaces of 200 Gbit/s).
"""

from __future__ import annotations

import argparse
import csv
import time
from pathlib import Path

import numpy as np

from headway.cost.calibration import NUMBERS, Calibration, Options, calibrate, intervals
from headway.cost.device import Array
from headway.cost.presets import PRIORS, assumed
from headway.cost.steps import Steps
from headway.cost.transformer import Split, Transformer, price_transformer

MOST = 72
SEEDS = 8
# Narayanan et al. 2021, Table 1: heads, h, L, t, p, GPUs, batch, TFLOP/s per GPU; micro-batch and
# chunks per stage from Megatron-LM's examples/sc21/run_table_1.sh.
MEGATRON = np.array(
    [
        (24, 2304, 24, 1, 1, 32, 512, 137, 16, 1),
        (32, 3072, 30, 2, 1, 64, 512, 138, 16, 1),
        (32, 4096, 36, 4, 1, 128, 512, 142, 16, 1),
        (48, 6144, 40, 8, 1, 256, 1024, 135, 8, 1),
        (64, 8192, 48, 8, 2, 512, 1536, 138, 4, 1),
        (80, 10240, 60, 8, 4, 1024, 1792, 140, 2, 3),
        (96, 12288, 80, 8, 8, 1536, 2304, 148, 2, 2),
        (128, 16384, 96, 8, 16, 1920, 2160, 155, 1, 2),
        (128, 20480, 105, 8, 35, 2520, 2520, 163, 1, 3),
        (160, 25600, 128, 8, 64, 3072, 3072, 163, 1, 1),
    ],
    dtype=float,
).T

MT_NLG = np.array([60.1, 50.2, 44.4])
"""Seconds on 2,240, 2,800 and 3,360 GPUs: Smith et al. 2022."""


def read_rows(path: Path) -> tuple[Steps, Array, Array]:
    """(steps, seconds, the columns)."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        table = [[float(cell) for cell in row[-11:]] for row in list(csv.reader(file))[1:] if row]
    columns = np.array(table).T
    devices, batch, micro, hidden, heads, layers, sequence, t, d, p, milliseconds = columns
    del devices
    model = Transformer(layers=layers, hidden=hidden, heads=heads, sequence=sequence)
    split = Split(tensor=t, data=d, pipeline=p, microbatch=micro, microbatches=batch / (d * micro))
    return Steps(model=model, split=split), milliseconds / 1e3, columns


def megatron() -> tuple[Steps, Array]:
    heads, hidden, layers, t, p, devices, batch, teraflops, micro, virtual = MEGATRON
    model = Transformer(layers=layers, hidden=hidden, heads=heads, sequence=2048.0)
    d = devices / (t * p)
    split = Split(
        tensor=t,
        data=d,
        pipeline=p,
        microbatch=micro,
        microbatches=batch / (d * micro),
        virtual=virtual,
    )
    return Steps(model=model, split=split), model.flops(batch) / (teraflops * 1e12 * devices)


def mt_nlg() -> Steps:
    d = np.array([8.0, 10.0, 12.0])
    model = Transformer(layers=105.0, hidden=20480.0, heads=128.0, sequence=2048.0)
    split = Split(tensor=8.0, data=d, pipeline=35.0, microbatches=1920.0 / d)
    return Steps(model=model, split=split)


def fit(steps: Steps, seconds: Array, rows: Array, uplink: str = "8x hdr") -> Calibration:
    return calibrate(steps.take(rows), seconds[rows], assumed("a100", uplink=uplink), PRIORS)


def formula(calibration: Calibration, steps: Steps) -> Array:
    """Predicted as if no shape had been measured."""
    return price_transformer(steps.model, steps.split, calibration.machine).seconds


def missed(predicted: Array, measured: Array) -> Array:
    return 100 * (predicted / measured - 1)


def line(label: str, predicted: Array, measured: Array) -> str:
    off = missed(predicted, measured)
    size = np.abs(off)
    return (
        f"{label:34} n {len(off):4}  mean {size.mean():5.2f} %  median {np.median(size):5.2f}  "
        f"95 % {np.quantile(size, 0.95):5.1f}  worst {size.max():5.1f}  bias {off.mean():+5.1f}"
    )


def scaled(predicted: Array, measured: Array) -> tuple[Array, float]:
    """What is off after one scalar (median of the ratios), and the scalar."""
    factor = float(np.median(measured / predicted))
    return missed(factor * predicted, measured), factor


def ranks(values: Array) -> Array:
    return np.argsort(np.argsort(values, kind="stable"), kind="stable").astype(float)


def ranking(predicted: Array, columns: Array, rows: Array, least: int = 5) -> str:
    """Spearman within (model, batch, GPUs), and how often the true best is among the first two."""
    devices, batch, _, hidden, heads, layers, sequence = columns[:7, rows]
    keys = np.stack([devices, batch, hidden, heads, layers, sequence], axis=1)
    measured = columns[10, rows]
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


def random_rows(count: int, seed: int, most: int = MOST) -> tuple[Array, Array]:
    order = np.random.default_rng(seed).permutation(count)
    return order[:most], order[most:]


def single_node(steps: Steps, seconds: Array, columns: Array) -> None:
    means, plain = [], []
    for seed in range(SEEDS):
        own, rest = random_rows(len(steps), seed)
        calibration = fit(steps, seconds, own)
        others = steps.take(rest)
        predicted = calibration.predict(others)
        means.append(np.abs(missed(predicted, seconds[rest])).mean())
        plain.append(np.abs(missed(formula(calibration, others), seconds[rest])).mean())
        print(line(f"72 rows at random, seed {seed}", predicted, seconds[rest]))
        print(" " * 35 + ranking(predicted, columns, rest))
    print(f"mean over {SEEDS} seeds: {np.mean(means):.2f} % ({min(means):.2f} to {max(means):.2f})")
    print(f"the same, formula alone: {np.mean(plain):.2f} % ({min(plain):.2f} to {max(plain):.2f})")
    for count in (28, MOST):
        own = np.array(steps.spread(count))
        rest = np.setdiff1d(np.arange(len(steps)), own)
        calibration = fit(steps, seconds, own)
        predicted = calibration.predict(steps.take(rest))
        print(line(f"{count} rows by `spread`", predicted, seconds[rest]))
        print(" " * 35 + ranking(predicted, columns, rest))
    off = missed(formula(calibration, steps.take(rest)), seconds[rest])
    exact = missed(predicted, seconds[rest])
    names = ("GPUs", "batch", "micro-batch", "hidden", "heads", "layers", "sequence", "t", "d", "p")
    for name, column in zip(names, columns[:10, rest], strict=True):
        values = np.unique(column)
        if len(values) > 1:
            cells = [
                f"{value:.0f}: {np.abs(off[column == value]).mean():.1f} "
                f"({off[column == value].mean():+.1f}), {np.abs(exact[column == value]).mean():.1f}"
                for value in values
            ]
            print(f"  by {name} (formula: error (bias), with shapes: error)  " + "; ".join(cells))


def across_scales(steps: Steps, seconds: Array, columns: Array) -> None:
    devices, _, micro, hidden, _, _, _, t = columns[:8]
    cuts = {
        "h = 1024, to 2048": hidden == 1024,
        "micro-batch 1 to 4, to 8": micro <= 4,
        "2 and 4 GPUs, to 8": devices <= 4,
        "t = 1, 2, 4, to 8": t <= 4,
        "t = 1, 2, to 4 and 8": t <= 2,
    }
    for label, inside in cuts.items():
        own = np.random.default_rng(1).permutation(np.flatnonzero(inside))[:MOST]
        rest = np.flatnonzero(~inside)
        calibration = fit(steps, seconds, own)
        others = steps.take(rest)
        print(line(f"fitted to {label}", calibration.predict(others), seconds[rest]))
        print(line("  formula alone", formula(calibration, others), seconds[rest]))


def extrapolated(steps: Steps, seconds: Array) -> None:
    plans, measured = megatron()
    for label, own in (
        ("72 by `spread`", np.array(steps.spread(MOST))),
        ("seed 0", random_rows(len(steps), 0)[0]),
        ("seed 1", random_rows(len(steps), 1)[0]),
    ):
        calibration = fit(steps, seconds, own)
        predicted = calibration.predict(plans)
        off, (after, factor) = missed(predicted, measured), scaled(predicted, measured)
        print(
            f"Megatron's ten, {label}: raw {np.abs(off).mean():.1f} %, to {np.abs(off).max():.1f};"
            f" after x{factor:.3f} {np.abs(after).mean():.1f} %, to {np.abs(after).max():.1f}"
        )
        print("  each, raw: " + " ".join(f"{value:+.1f}" for value in off))
    own = np.array(steps.spread(MOST))
    low, high = intervals(
        steps.take(own), seconds[own], assumed("a100"), PRIORS, plans, options=Options()
    )
    inside = int(((low < measured) & (measured < high)).sum())
    calibration = fit(steps, seconds, own)
    print(f"  measured within the 90 % intervals: {inside} of 10; {calibration.labels(plans)[-1]}")
    predicted = calibration.predict(mt_nlg())
    after = missed(predicted / predicted[0], MT_NLG / MT_NLG[0])
    off = missed(predicted, MT_NLG)
    print("MT-NLG 530B, 2,240 to 3,360 GPUs: raw", *(f"{value:+.1f}" for value in off))
    print("  after one scalar from the first:", *(f"{value:+.1f}" for value in after[1:]))


def speed(steps: Steps, seconds: Array) -> None:
    own = np.array(steps.spread(MOST))
    start = time.perf_counter()
    calibration = fit(steps, seconds, own)
    middle = time.perf_counter()
    many = steps.take(np.arange(100_000) % len(steps))
    calibration.predict(many)
    end = time.perf_counter()
    print(f"fit of 72 rows {middle - start:.2f} s; 100,000 plans priced in {end - middle:.2f} s")
    names = [prior.name for prior in PRIORS]
    values = {name: float(f"{NUMBERS[name][0](calibration.machine):.4g}") for name in names}
    print("fitted (72 by `spread`):", values)


def judge(path: Path, steps: Steps, seconds: Array, uplink: str) -> None:
    others, measured, columns = read_rows(path)
    calibration = fit(steps, seconds, np.array(steps.spread(MOST)), uplink)
    predicted = calibration.predict(others)
    print(line(f"{path.name}, {uplink}", predicted, measured))
    print(line("  formula alone", formula(calibration, others), measured))
    print("  " + ranking(predicted, columns, np.arange(len(others))))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rows", type=Path)
    parser.add_argument("--judge", type=Path)
    parser.add_argument("--uplink", default="4x hdr")
    given = parser.parse_args()
    steps, seconds, columns = read_rows(given.rows)
    if given.judge:
        judge(given.judge, steps, seconds, given.uplink)
        return
    single_node(steps, seconds, columns)
    across_scales(steps, seconds, columns)
    extrapolated(steps, seconds)
    speed(steps, seconds)


if __name__ == "__main__":
    main()
