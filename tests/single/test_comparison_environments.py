"""single: environments of frameworks: made, kept, repaired, or why not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch

from headway.comparison import environments
from headway.comparison.environments import (
    Installed,
    NotInstalled,
    PinnedPackages,
    environments_of,
    find_environment,
    install_environments,
)
from headway.comparison.frameworks.registry import FRAMEWORKS
from headway.errors import UsageError
from support.patience import patient


def wheel(folder: Path, name: str, version: str, files: dict[str, str]) -> None:
    """A package that pip can install."""
    about = f"{name}-{version}.dist-info"
    texts = files | {
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": "",
    }
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in texts.items():
            archive.writestr(path, text)


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package index of two frameworks: one works, one brings another torch along."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheel(folder, "good", "1.0", {"good.py": "import torch\nSIZE = 3\n"})
    wheel(folder, "greedy", "2.0", {"torch/__init__.py": "__version__ = '1.13'\n", "greedy.py": ""})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    # What the tests run from is no part of an installed headway.
    monkeypatch.delenv("PYTHONPATH", raising=False)
    pinned = {
        "good": PinnedPackages(package="good", version="1.0", module="good"),
        "greedy": PinnedPackages(package="greedy", version="2.0", module="greedy"),
    }
    monkeypatch.setattr(environments, "PINNED", pinned)
    return tmp_path / "environments"


def test_an_environment_has_the_torch_of_headway_and_is_made_once(index):
    assert str(find_environment("good", index)).startswith("not installed: headway compare")
    # What an install that was interrupted leaves.
    (index / "good").mkdir(parents=True)
    (index / "good" / "junk").touch()
    said: list[str] = []
    (made,) = install_environments(["good"], index, said.append)
    assert isinstance(made, Installed), made
    assert (made.version, made.kept) == ("1.0", False)
    assert 1 < made.megabytes < 100
    assert said == ["good: a virtual environment", "good: installing good 1.0"]
    assert not (index / "good" / "junk").exists()
    found = find_environment("good", index)
    assert not isinstance(found, str)
    code = "import good, torch, headway.errors as e; print(good.SIZE, torch.__file__, e.__file__)"
    run = subprocess.run([found.python, "-c", code], capture_output=True, text=True, check=True)
    errors = sys.modules["headway.errors"].__file__
    assert run.stdout.split() == ["3", torch.__file__, errors]
    (again,) = install_environments(["good"], index)
    assert isinstance(again, Installed)
    assert again.kept


def test_one_of_another_making_is_not_used(index):
    place = index / "good"
    place.mkdir(parents=True)
    (place / environments.MARKER).write_text("0123456789abcdef\n3.0\n20.0\n")
    found = find_environment("good", index)
    assert found == (
        "installed for other versions of headway's packages; again: headway compare --install "
        f"good --environments {index}"
    )


def test_a_framework_that_brings_another_torch_is_refused(index):
    (result,) = install_environments(["greedy"], index)
    assert isinstance(result, NotInstalled)
    assert "torch is 1.13" in result.why
    assert isinstance(find_environment("greedy", index), str)


def test_what_pip_says_is_the_reason(index, monkeypatch):
    missing = PinnedPackages(package="absent", version="3.0", module="absent")
    monkeypatch.setattr(environments, "PINNED", {"absent": missing})
    (result,) = install_environments(["absent"], index)
    assert isinstance(result, NotInstalled)
    assert "No matching distribution found for absent==3.0" in result.why
    assert str(index / "absent-install.log") in result.why


def test_a_command_that_takes_too_long_is_ended_with_its_children(index, tmp_path):
    index.mkdir()
    one = environments._Install("good", environments.PINNED["good"], index / "good", print)
    note = tmp_path / "note"
    with pytest.raises(environments._Failed, match="not done after 0 s"):
        one._call(["sh", "-c", f"sleep 30 & echo $! > {note}; wait"], 0.4)
    process = Path(f"/proc/{int(note.read_text())}/stat")
    deadline = time.monotonic() + patient(5)
    # Ended processes are there until somebody has asked how.
    while process.exists() and process.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline


def test_programs_that_are_missing_are_named(index, monkeypatch):
    needs = PinnedPackages(package="good", version="1.0", module="good", commands=("no-such-c++",))
    monkeypatch.setattr(environments, "PINNED", {"good": needs})
    (result,) = install_environments(["good"], index)
    assert result == NotInstalled(name="good", why="no-such-c++ not found, which compiles good")


def test_of_a_compilers_output_the_errors_are_told(tmp_path):
    log = tmp_path / "log"
    log.write_text("a.cc:3: error: C++17 is needed\nmake: *** [all] stopped\nrc 2\n")
    assert environments._last_lines(log, 0) == "a.cc:3: error: C++17 is needed"
    log.write_text("before\none\n\ntwo\n")
    assert environments._last_lines(log, len("before\n")) == "one\ntwo"


def test_locks_of_processes_that_died_are_removed(tmp_path):
    locks = [tmp_path / "extensions" / name / "lock" for name in ("old", "new")]
    for lock in locks:
        lock.parent.mkdir(parents=True)
        lock.touch()
    long_ago = time.time() - 2 * environments.STALE_SECONDS
    os.utime(locks[0], (long_ago, long_ago))
    environments._remove_stale_locks(tmp_path)
    assert [lock.exists() for lock in locks] == [False, True]


def test_names():
    assert environments_of(["deepspeed-zero2", "ddp", "fabric", "deepspeed"]) == [
        "deepspeed",
        "fabric",
    ]
    assert environments_of(["all"]) == list(environments.PINNED)
    with pytest.raises(UsageError, match="no framework 'deepsped' is known"):
        environments_of(["deepsped"])


def test_each_framework_has_its_pins():
    named = {framework.environment for framework in FRAMEWORKS.values()} - {""}
    assert named == set(environments.PINNED)
