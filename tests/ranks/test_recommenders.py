"""ranks: recommenders are equal to their serial runs; what they reach on published data."""

from __future__ import annotations

import pytest

import headway
from headway.errors import DataError, HeadwayError, MissingExtra
from headway.workloads.recommender.data_sets import adult
from support.monitored import events

pytestmark = pytest.mark.filterwarnings("ignore:.* processes share .* CPU cores")

RANDOM = ["arguments.data=random", "arguments.samples=400",
          "arguments.places=2", "arguments.tables=3", "arguments.batch=24",
          "arguments.validate_every=3"]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "ranks", "settings"),
    [
        ("dlrm", 2, []),
        ("dlrm", 3, ["split.tables=table"]),
        ("dlrm", 2, ["split.tables=hash"]),
        ("dlrm", 2, ["arguments.growing=true"]),
        ("dlrm", 2, ["split.tables=row", "arguments.compress=quotient", "arguments.rows=300"]),
        ("dlrm", 2, ["split.tables=hash", "arguments.compress=mixed", "arguments.rows=300"]),
        ("des-fm", 3, ["split.tables=hash"]),
        ("des-fm", 2, ["split.tables=column", "arguments.field_aware=true"]),
        ("wide-deep", 2, ["split.tables=row"]),
        ("deepfm", 2, ["split.tables=row"]),
        ("dcn", 2, ["split.tables=table"]),
        ("dcn", 2, ["zero=3", "arguments.version=1"]),
    ],
)
@pytest.mark.slow
def test_each_equals_the_serial_run(name, ranks, settings):
    (run,) = headway.verify(name, processes=ranks, steps=3, overrides=[*RANDOM, *settings]).runs
    assert run.comparison.equal, run.comparison.first


def days(folder):
    """Days of Criteo's, of which the last one has one label only: its AUC is no number."""
    folder.mkdir()
    for day in range(3):
        lines = [
            "\t".join([str(int(n % 3 == 0 or day == 2)), *[str(n)] * 13, *[f"{n * day:x}"] * 26])
            for n in range(40)
        ]
        (folder / f"day_{day}").write_text("\n".join(lines) + "\n")
    return ["arguments.data=criteo", f'arguments.path="{folder}"', "arguments.steps=8",
            "arguments.batch=8", "arguments.rows=100", "arguments.validate_every=3"]  # fmt: skip


@pytest.mark.parametrize("data", ["random", "criteo"])
@pytest.mark.slow
def test_metrics_of_a_whole_run_equal_those_of_the_serial_run(data, tmp_path):
    """A stream is resumed, too."""
    given = RANDOM if data == "random" else days(tmp_path / "days")
    (run,) = headway.verify("dlrm", processes=2, steps=4, whole=True, overrides=given).runs
    assert run.comparison.equal
    for name, end in run.whole.items():
        assert end.equal, f"{name}: {end.first}"


def test_random_data_are_recorded_and_learned(tmp_path):
    result = headway.train(
        "des-fm",
        processes=2,
        directory=tmp_path / "run",
        overrides=["arguments.data=random", "arguments.rows=50", "arguments.epochs=6"],
    )
    assert result.metrics["auc"] > 0.75
    assert result.metrics["normalised_entropy"] < 0.9
    assert result.metrics["calibration"] == pytest.approx(1.0, abs=0.2)
    assert "random numbers made from seed 0" in (tmp_path / "run" / "recipe.json").read_text()
    first = events(tmp_path / "run", "validation")[0]
    assert first["metrics"].keys() == {"auc", "normalised_entropy", "calibration"}


@pytest.mark.parametrize(("name", "bar"), [("des-fm", 0.905), ("dlrm", 0.909)])
@pytest.mark.slow
def test_adult_reaches_its_bar_with_any_number_of_ranks(name, bar, tmp_path):
    try:
        adult()
    except (DataError, MissingExtra) as error:
        pytest.skip(f"{error.what}: {error.fix}")
    reached = []
    for ranks, split in ((1, []), (2, ["split.tables=hash"]), (4, [])):
        overrides = ["precision=float64", "arguments.epochs=1", *split]
        directory = tmp_path / str(ranks)
        run = headway.train(name, processes=ranks, directory=directory, overrides=overrides)
        reached.append(run.metrics)
    assert reached[0]["auc"] > bar
    for found in reached[1:]:
        assert found == pytest.approx(reached[0], abs=1e-6)


def test_a_stream_of_lines_names_the_broken_one(tmp_path):
    good = "\t".join(["1", *["2"] * 13, *["0a"] * 26]) + "\n"
    file = tmp_path / "train.txt"
    file.write_text(good * 20 + good.replace("2", "two", 1) + good * 20)
    with pytest.raises(HeadwayError) as caught:
        headway.train(
            "dlrm",
            processes=2,
            directory=tmp_path / "run",
            restarts=0,
            overrides=["arguments.data=criteo", f'arguments.path="{file}"', "arguments.steps=4",
                       "arguments.batch=8", "arguments.rows=100"],
        )  # fmt: skip
    assert "number I1 is 'two'" in str(caught.value)
    assert f"{file}:21" in str(caught.value)
