"""How far predicted steps of GPT training are from measured ones: vTrain's runs, Megatron's ten.

    python benchmarks/prediction_vtrain.py ROWS.csv [--across]
    python benchmarks/prediction_vtrain.py ROWS.csv --judge OTHER.csv [--uplink "4x hdr"]

ROWS.csv: vTrain's single-node runs (columns as in `prediction_rows`; MIT licence). At most 72 of
them are fitted, all others predicted. --across: fits that leave whole layer shapes out, with the
rows taken to compute activations again, and not to. OTHER.csv: further rows, only predicted, from
the 72 rows that `StepTable.spread` chooses; nodes joined by `--uplink` (vTrain's, from memory: four
interfaces of 200 Gbit/s). Whether OTHER's steps compute activations again is decided by their
plans (`recomputing_of`), never by their times, and both are printed.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

from headway.cost.device import Array
from prediction_rows import (
    ORDER,
    Rows,
    by,
    line,
    missed,
    ranking,
    read_rows,
    recomputing,
    unheld,
    worst,
)

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from support.calibration import (
    NUMBERS,
    PRIORS,
    Calibration,
    CalibrationOptions,
    StepTable,
    calibrate,
    prediction_intervals,
)
from support.machines import assumed_machine
from support.transformer_formula import Transformer, TransformerSplit, price_transformer

MOST = 72
NODE = 8
"""GPUs of a node."""
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


def megatron() -> tuple[StepTable, Array]:
    heads, hidden, layers, t, p, devices, batch, teraflops, micro, virtual = MEGATRON
    model = Transformer(layers=layers, hidden=hidden, heads=heads, sequence=2048.0)
    d = devices / (t * p)
    split = TransformerSplit(
        tensor=t,
        data=d,
        pipeline=p,
        microbatch=micro,
        microbatches=batch / (d * micro),
        virtual=virtual,
    )
    return StepTable(model=model, split=split), model.flops(batch) / (teraflops * 1e12 * devices)


def korthikanti() -> tuple[StepTable, Array]:
    """Korthikanti et al. 2022, Table 5, with full recomputation, one replica on 8 to 512 GPUs."""
    table = [(6144, 48, 64, 1, 4, 1, 1.42), (12288, 96, 96, 8, 1, 3, 18.13)]
    table += [(20480, 105, 128, 35, 1, 3, 49.05), (25600, 128, 160, 64, 1, 1, 94.42)]
    batch = np.array([4.0, 64.0, 280.0, 512.0])
    hidden, layers, heads, p, micro, virtual, seconds = np.array(table, dtype=float).T
    model = Transformer(layers=layers, hidden=hidden, heads=heads, sequence=2048.0)
    split = TransformerSplit(
        tensor=8.0, pipeline=p, microbatch=micro, microbatches=batch / micro, virtual=virtual
    )
    return StepTable(model=model, split=split), seconds


def mt_nlg() -> StepTable:
    d = np.array([8.0, 10.0, 12.0])
    model = Transformer(layers=105.0, hidden=20480.0, heads=128.0, sequence=2048.0)
    split = TransformerSplit(tensor=8.0, data=d, pipeline=35.0, microbatches=1920.0 / d)
    return StepTable(model=model, split=split)


def fit(steps: StepTable, seconds: Array, rows: Array, uplink: str = "8x hdr") -> Calibration:
    return calibrate(
        steps.take(rows), seconds[rows], assumed_machine("a100", uplink=uplink), PRIORS
    )


def formula(calibration: Calibration, steps: StepTable) -> Array:
    """Predicted as if no shape had been measured."""
    return price_transformer(steps.model, steps.split, calibration.machine).seconds


def scaled(predicted: Array, measured: Array) -> tuple[Array, float]:
    """What is off after one scalar (median of the ratios), and the scalar."""
    factor = float(np.median(measured / predicted))
    return missed(factor * predicted, measured), factor


def random_rows(count: int, seed: int, most: int = MOST) -> tuple[Array, Array]:
    order = np.random.default_rng(seed).permutation(count)
    return order[:most], order[most:]


def single_node(rows: Rows) -> None:
    steps, seconds = rows.steps, rows.seconds
    means, plain = [], []
    for seed in range(SEEDS):
        own, rest = random_rows(len(steps), seed)
        calibration = fit(steps, seconds, own)
        others = steps.take(rest)
        predicted = calibration.predict(others)
        means.append(np.abs(missed(predicted, seconds[rest])).mean())
        plain.append(np.abs(missed(formula(calibration, others), seconds[rest])).mean())
        print(line(f"72 rows at random, seed {seed}", predicted, seconds[rest]))
        print(" " * 35 + ranking(predicted, rows, rest))
    print(f"mean over {SEEDS} seeds: {np.mean(means):.2f} % ({min(means):.2f} to {max(means):.2f})")
    print(f"the same, formula alone: {np.mean(plain):.2f} % ({min(plain):.2f} to {max(plain):.2f})")
    for count in (28, MOST):
        own = np.array(steps.spread(count))
        rest = np.setdiff1d(np.arange(len(steps)), own)
        calibration = fit(steps, seconds, own)
        predicted = calibration.predict(steps.take(rest))
        print(line(f"{count} rows by `spread`", predicted, seconds[rest]))
        print(" " * 35 + ranking(predicted, rows, rest))
    off = missed(formula(calibration, steps.take(rest)), seconds[rest])
    exact = missed(predicted, seconds[rest])
    for name, column in zip(ORDER, rows.columns[:, rest], strict=True):
        values = np.unique(column)
        if len(values) > 1:
            cells = [
                f"{value:.0f}: {np.abs(off[column == value]).mean():.1f} "
                f"({off[column == value].mean():+.1f}), {np.abs(exact[column == value]).mean():.1f}"
                for value in values
            ]
            print(f"  by {name} (formula: error (bias), with shapes: error)  " + "; ".join(cells))


def across_scales(rows: Rows) -> None:
    steps, seconds = rows.steps, rows.seconds
    cuts = {
        "h = 1024, to 2048": rows["hidden"] == 1024,
        "micro-batch 1 to 4, to 8": rows["micro-batch"] <= 4,
        "2 and 4 GPUs, to 8": rows["GPUs"] <= 4,
        "t = 1, 2, 4, to 8": rows["t"] <= 4,
        "t = 1, 2, to 4 and 8": rows["t"] <= 2,
    }
    for label, inside in cuts.items():
        own = np.random.default_rng(1).permutation(np.flatnonzero(inside))[:MOST]
        rest = np.flatnonzero(~inside)
        calibration = fit(steps, seconds, own)
        others = steps.take(rest)
        print(line(f"fitted to {label}", calibration.predict(others), seconds[rest]))
        print(line("  formula alone", formula(calibration, others), seconds[rest]))


def across_shapes(rows: Rows) -> None:
    """Each layer shape (h, b, t) from 72 rows of the others, every shape counted once.

    The heavy ones are bound by the device and not by launches: a rank's share of a layer's work,
    tokens h^2 / t, is a quarter of the largest or more.
    """
    steps, seconds = rows.steps, rows.seconds
    shapes, place = np.unique(steps.shapes(), axis=0, return_inverse=True)
    work = rows["micro-batch"] * rows["hidden"] ** 2 / rows["t"]
    heavy = np.array([work[place.ravel() == k][0] for k in range(len(shapes))])
    heavy = heavy >= heavy.max() / 4
    plain, near = np.zeros(len(shapes)), np.zeros(len(shapes))
    for k in range(len(shapes)):
        rest = place.ravel() == k
        others = np.flatnonzero(~rest)
        own = others[np.array(steps.take(others).spread(MOST))]
        calibration, left = fit(steps, seconds, own), steps.take(np.flatnonzero(rest))
        plain[k] = missed(formula(calibration, left), seconds[rest]).mean()
        near[k] = missed(calibration.predict(left), seconds[rest]).mean()
    for label, off in (("formula", plain), ("with the other shapes", near)):
        size, large = np.abs(off), off[heavy]
        print(
            f"  {label:22} {len(off)} shapes: mean {size.mean():5.2f} % worst {size.max():5.1f}; "
            f"{len(large)} heavy ones: {np.abs(large).mean():5.2f} % bias {large.mean():+5.1f}"
        )


def across(rows: Rows) -> None:
    for how in ("none", "full"):
        taken = Rows(steps=recomputing(rows.steps, how), seconds=rows.seconds, columns=rows.columns)
        print(f"recomputation in the rows: {how}")
        across_shapes(taken)
        across_scales(taken)
        calibration = fit(taken.steps, taken.seconds, np.array(taken.steps.spread(MOST)))
        print(f"  efficiency {calibration.machine.device.efficiency:.3f}")


def extrapolated(steps: StepTable, seconds: Array) -> None:
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
    low, high = prediction_intervals(
        steps.take(own),
        seconds[own],
        assumed_machine("a100"),
        PRIORS,
        plans,
        options=CalibrationOptions(),
    )
    inside = int(((low < measured) & (measured < high)).sum())
    calibration = fit(steps, seconds, own)
    print(f"  measured within the 90 % intervals: {inside} of 10; {calibration.labels(plans)[-1]}")
    plans, measured = korthikanti()
    off = missed(calibration.predict(plans), measured)
    print("22B, 175B, 530B, 1T on 8, 64, 280, 512 GPUs: raw", *(f"{value:+.1f}" for value in off))
    predicted = calibration.predict(mt_nlg())
    after = missed(predicted / predicted[0], MT_NLG / MT_NLG[0])
    off = missed(predicted, MT_NLG)
    print("MT-NLG 530B, 2,240 to 3,360 GPUs: raw", *(f"{value:+.1f}" for value in off))
    print("  after one scalar from the first:", *(f"{value:+.1f}" for value in after[1:]))


def speed(steps: StepTable, seconds: Array) -> None:
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


def recomputing_of(rows: Rows, calibration: Calibration) -> str:
    """Whether these steps compute activations again: "full" where some clearly do not fit into a
    device otherwise (one script makes all rows of so many nodes), else "none", as those fitted."""
    apart = unheld(rows.steps, calibration.machine.device.memory)
    print(f"  {int(apart.sum())} of {len(apart)} steps do not fit without recomputation")
    return "full" if apart.any() else "none"


def judge(path: Path, steps: StepTable, seconds: Array, uplink: str) -> None:
    rows = read_rows(path)
    calibration = fit(steps, seconds, np.array(steps.spread(MOST)), uplink)
    inside = rows["GPUs"] <= NODE
    for where, chosen in (("one node", inside), ("several nodes", ~inside)):
        if chosen.any():
            print(f"{path.name}, on {where}:")
            judged(rows.take(np.flatnonzero(chosen)), calibration)


def judged(rows: Rows, calibration: Calibration) -> None:
    chosen = recomputing_of(rows, calibration)
    for how in sorted(("full", "none"), key=lambda how: how != chosen):
        others = recomputing(rows.steps, how)
        predicted = calibration.predict(others)
        print(line(f"recomputing {how}", predicted, rows.seconds))
        print(line("  formula alone", formula(calibration, others), rows.seconds))
        print("  " + ranking(predicted, rows, np.arange(len(rows.seconds))))
        if how == chosen:
            for name in ("GPUs", "hidden", "t", "d", "p"):
                print(by(name, predicted, rows))
            print("\n".join(worst(predicted, rows)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rows", type=Path)
    parser.add_argument("--across", action="store_true")
    parser.add_argument("--judge", type=Path)
    parser.add_argument("--uplink", default="4x hdr")
    given = parser.parse_args()
    rows = read_rows(given.rows)
    if given.judge:
        judge(given.judge, rows.steps, rows.seconds, given.uplink)
    elif given.across:
        across(rows)
    else:
        single_node(rows)
        extrapolated(rows.steps, rows.seconds)
        speed(rows.steps, rows.seconds)


if __name__ == "__main__":
    main()
