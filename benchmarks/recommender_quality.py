"""What each recommender reaches on each published data set.

    python benchmarks/recommender_quality.py
    python benchmarks/recommender_quality.py --processes 1 2 4 --data adult --precision float64
    python benchmarks/recommender_quality.py --processes 2 --tables row

One line for each training: AUC (exact), normalised entropy and calibration of the samples that
validate, and seconds from the command to the end. A data set whose package is not here is left out,
with the command that fetches it. Clicks has 65 positive samples to validate with: its AUC says
little.
"""

from __future__ import annotations

import argparse
import tempfile
import time

import headway
from headway.errors import DataError, MissingExtra
from headway.workloads.recommender.data_sets import DATA_SETS

MODELS = {
    "logistic regression": ("des-fm", ["arguments.width=0"]),
    "fm": ("des-fm", []),
    "field-aware fm": ("des-fm", ["arguments.field_aware=true", "arguments.width=4"]),
    "wide-deep": ("wide-deep", []),
    "deepfm": ("deepfm", []),
    "dcn 1": ("dcn", ["arguments.version=1"]),
    "dcn 2": ("dcn", []),
    "dlrm": ("dlrm", []),
}
EPOCHS = {"adult": 2, "movielens": 2, "flights": 1, "clicks": 3}
BATCH = {"adult": 128, "movielens": 128, "flights": 512, "clicks": 128}


def missing(name: str) -> str | None:
    """Why a data set cannot be loaded, with what to do; None: it can."""
    try:
        DATA_SETS[name]()
    except (DataError, MissingExtra) as error:
        return f"{error.what}: {error.fix}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", nargs="*", default=list(EPOCHS), choices=list(EPOCHS))
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--processes", nargs="*", type=int, default=[1])
    parser.add_argument("--tables", help="how tables are split: row, hash, table")
    parser.add_argument("--precision", default="float32", choices=["float32", "float64"])
    parser.add_argument("--set", nargs="*", default=[], help="further settings of every recipe")
    options = parser.parse_args()
    print(
        f"{'data':10} {'model':20} {'ranks':>5} {'auc':>11} {'entropy':>8} {'calibr.':>8} {'s':>6}"
    )
    for data in options.data:
        if why := missing(data):
            print(f"{data:10} {why}")
            continue
        for model in options.models:
            recipe, settings = MODELS[model]
            for processes in options.processes:
                split = (
                    [f"split.tables={options.tables}"] if options.tables and processes > 1 else []
                )
                start = time.perf_counter()
                with tempfile.TemporaryDirectory() as folder:
                    found = headway.train(
                        recipe,
                        processes=processes,
                        directory=f"{folder}/run",
                        overrides=[
                            f"arguments.data={data}",
                            f"arguments.epochs={EPOCHS[data]}",
                            f"arguments.batch={BATCH[data]}",
                            "arguments.validate_every=0",
                            f"precision={options.precision}",
                            *settings,
                            *split,
                            *options.set,
                        ],
                    ).metrics
                print(
                    f"{data:10} {model:20} {processes:5} {found['auc']:11.8f} "
                    f"{found['normalised_entropy']:8.4f} {found['calibration']:8.4f} "
                    f"{time.perf_counter() - start:6.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
