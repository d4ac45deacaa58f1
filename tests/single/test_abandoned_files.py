"""single: what a launcher leaves that is killed with all of its processes, and who removes it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from headway.launch import abandoned_files
from headway.launch.abandoned_files import claim, remove_abandoned
from headway.run.distributed.launch_env import machine_identity


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = tmp_path / "pymp-abc"
    (found / "headway-run").mkdir(parents=True)
    claim(found)
    return found


def note_of_a_dead_process(folder: Path, machine: str) -> None:
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    start = abandoned_files._start(child.pid)
    child.wait()
    (folder / abandoned_files._NOTE).write_text(f"{child.pid} {start} {machine}")


def test_that_of_a_dead_launcher_is_removed(folder):
    remove_abandoned()
    assert folder.exists()  # its owner lives
    note_of_a_dead_process(folder, machine_identity())
    remove_abandoned()
    assert not folder.exists()


def test_that_of_another_machine_is_left_alone(folder):
    note_of_a_dead_process(folder, "another machine with the same folder")
    remove_abandoned()
    assert folder.exists()


def test_that_of_a_forkserver_that_listens_is_left_alone(folder, monkeypatch):
    note_of_a_dead_process(folder, machine_identity())
    monkeypatch.chdir(folder)  # a path of a socket is short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("listener-1")
        server.listen()
        monkeypatch.setattr("tempfile.tempdir", "..")
        remove_abandoned()
        assert folder.exists()
    remove_abandoned()
    assert not folder.exists()


def test_ctrl_c_during_the_imports_of_the_command_prints_no_traceback():
    program = """
import os, runpy, signal, sys
class Interrupting:
    def find_spec(self, name, *_):
        if name == "headway.cli.main":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
runpy.run_module("headway", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_what_others_have_put_there_is_neither_awaited_nor_removed(tmp_path, monkeypatch):
    """A pipe that nobody writes to, a link to a note, a link to a folder, an endless file."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    note = abandoned_files._NOTE
    for name in ("pipe", "note", "endless"):
        (tmp_path / f"pymp-{name}").mkdir()
    os.mkfifo(tmp_path / "pymp-pipe" / note)
    target = tmp_path / "elsewhere"
    target.mkdir()
    note_of_a_dead_process(target, machine_identity())
    (tmp_path / "pymp-note" / note).symlink_to(target / note)
    (tmp_path / "pymp-folder").symlink_to(target)
    (tmp_path / "pymp-endless" / note).symlink_to("/dev/zero")
    there = sorted(path.name for path in tmp_path.iterdir())
    remove_abandoned()
    assert sorted(path.name for path in tmp_path.iterdir()) == there
    assert (target / note).exists()
