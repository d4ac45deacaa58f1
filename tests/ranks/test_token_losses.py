"""ranks: a model's own mean over labels is exact by loss="tokens", however the batch is split."""

from __future__ import annotations

import json

import pytest

from headway.errors import NotEqual
from support.commands import events, headway_here


@pytest.mark.parametrize(
    "words",
    [
        ("labelled", "-n", "2", "--set", "microbatch=3"),
        ("masked", "-n", "2", "--set", "zero=3"),
        pytest.param(("labelled", "-n", "2", "--set", "stages=2"), marks=pytest.mark.slow),
    ],
    ids=lambda words: words[-1],
)
def test_the_mean_over_labels_equals_the_serial_run(tmp_path, words):
    name, *rest = words
    done = headway_here(
        "verify", f"support.labelled_models:{name}", *rest, "--steps", "2", "--json", cwd=tmp_path
    )
    assert done.code == 0, done.out + done.err
    (facts,) = json.loads(done.out)
    assert facts["equal"]
    assert max(facts["errors"].values()) < 1e-12


def test_the_usual_line_is_not_and_training_says_so_first(tmp_path):
    mean = "support.labelled_models:mean_of_labels"
    done = headway_here("train", mean, "-n", "2", "--directory", "run", cwd=tmp_path)
    assert done.code == 0, done.err
    said = [event["text"] for event in events(tmp_path / "run", "warning")]
    assert sum('write loss="tokens"' in text for text in said) == 1, said
    done = headway_here("verify", mean, "-n", "2", "--steps", "2", cwd=tmp_path)
    assert done.code == NotEqual.exit_code
