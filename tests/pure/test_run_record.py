"""pure: what a run records of its surroundings: versions, and the commit of the user's folder."""

from __future__ import annotations

import subprocess

from headway.run.training.run_directory import RunDirectory, describe_environment


def described():
    return describe_environment(torch_version="0", device="cpu", backend="none")


def test_the_commit_of_the_current_folder_is_recorded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def git(*words):
        own = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(["git", *own, *words], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    assert "git" not in described()
    git("init", "-q")
    assert "git" not in described()  # no commit yet
    (tmp_path / "train.py").write_text("1")
    git("add", "train.py")
    git("commit", "-qm", "first")
    (tmp_path / "notes.txt").write_text("not git's")
    assert described()["git"] == git("rev-parse", "HEAD")
    (tmp_path / "train.py").write_text("2")
    assert described()["git"] == f"{git('rev-parse', 'HEAD')}, with changes"


def test_the_recipe_file_takes_what_is_known_late(tmp_path):
    run = RunDirectory(tmp_path)
    run.recipe_file.write_text('{"name": "a"}')
    run.add_to_recipe({"optimizer options": "SGD: lr 0.1"})
    assert '"name": "a"' in run.recipe_file.read_text()
    assert "lr 0.1" in run.recipe_file.read_text()
