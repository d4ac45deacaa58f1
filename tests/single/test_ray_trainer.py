"""single: what `headway.ray.trainer` refuses, with and without Ray; test_ray.py trains on it."""

from __future__ import annotations

import sys

import pytest

import headway.ray
from headway.errors import MissingExtra, UsageError


def test_without_ray_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray.train", None)
    with pytest.raises(MissingExtra, match=r"needs the package ray") as caught:
        headway.ray.trainer("support.recipes:mlp", processes=2, directory=tmp_path / "run")
    assert caught.value.fix == "pip install 'headway[ray]'"


def test_a_relative_directory_is_answered_with_the_absolute_one(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="runs/points is relative") as caught:
        headway.ray.trainer("support.recipes:mlp", processes=2, directory="runs/points")
    assert str(tmp_path / "runs/points") in caught.value.fix
