"""`headway schedule ...` in this process, as fixtures."""

from __future__ import annotations

import json

import pytest

from headway.cli.main import main


@pytest.fixture
def run(capsys):
    """Runs a command; returns exit code, standard output, standard error."""

    def call(*words):
        code = main(["schedule", *map(str, words)])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


@pytest.fixture
def facts(run):
    def call(*words):
        code, out, err = run(*words, "--json")
        assert code == 0, err
        return json.loads(out)

    return call
