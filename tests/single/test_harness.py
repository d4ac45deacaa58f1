"""single: the checks against leaks and the golden files, tested as functions."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from support import leaks, tiny_models
from support.golden import check_golden
from support.without_torch import without_torch


def test_nothing_left_is_no_leak():
    assert leaks.Snapshot().leaks() == []


def test_a_thread_left_behind_is_found_and_named():
    before, stop = leaks.Snapshot(), threading.Event()
    thread = threading.Thread(target=stop.wait, name="sampler")
    thread.start()
    assert before.leaks(patience=0.0) == ["thread sampler"]
    stop.set()
    thread.join()
    assert before.leaks() == []


def test_a_thread_that_is_about_to_end_is_waited_for():
    before = leaks.Snapshot()
    threading.Thread(target=time.sleep, args=(0.2,)).start()
    assert before.leaks(patience=5.0) == []


def test_a_child_process_left_behind_is_found():
    before = leaks.Snapshot()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        found = before.leaks(patience=0.0)
    finally:
        child.kill()
        child.wait()
    assert [line.split(" (")[0] for line in found] == [f"process {child.pid}"]
    assert before.leaks() == []


def test_a_grandchild_whose_parent_has_ended_is_found():
    before = leaks.Snapshot()
    spawn = (
        "from subprocess import DEVNULL, Popen\n"
        "print(Popen(['sleep', '60'], stdout=DEVNULL, stderr=DEVNULL).pid)"
    )
    pid = int(subprocess.run([sys.executable, "-c", spawn], capture_output=True).stdout)
    try:
        found = before.leaks(patience=0.0)
    finally:
        os.kill(pid, 9)
    assert found == [f"process {pid} (sleep 60)"]


def test_a_changed_variable_is_found_and_put_right(monkeypatch):
    monkeypatch.setenv("HEADWAY_TEST_KEPT", "1")
    monkeypatch.setenv("HEADWAY_TEST_CHANGED", "old")
    before = leaks.Snapshot()
    os.environ["HEADWAY_TEST_CHANGED"] = "new"
    os.environ["HEADWAY_TEST_ADDED"] = "x"
    assert before.leaks() == [
        "environment variable HEADWAY_TEST_ADDED: unset -> x",
        "environment variable HEADWAY_TEST_CHANGED: old -> new",
    ]
    assert os.environ["HEADWAY_TEST_CHANGED"] == "old"
    assert "HEADWAY_TEST_ADDED" not in os.environ


def test_another_directory_is_found_and_put_right(tmp_path):
    home = os.getcwd()
    before = leaks.Snapshot()
    os.chdir(tmp_path)
    assert before.leaks() == [f"current directory changed from {home}"]
    assert os.getcwd() == home


def test_an_open_process_group_is_found_and_closed(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    before = leaks.Snapshot()
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    assert before.leaks() == ["default process group of 1 ranks"]
    assert not dist.is_initialized()


def test_a_leak_fails_the_test_that_leaks_and_no_other(tmp_path):
    """The fixture of conftest.py, in a pytest of its own."""
    here = Path(__file__).parent.parent
    shutil.copy(here / "conftest.py", tmp_path)
    (tmp_path / "test_leaky.py").write_text(
        "import os\n"
        "def test_leaks(): os.environ['LEFT_BEHIND'] = '1'\n"
        "def test_clean(): assert 'LEFT_BEHIND' not in os.environ\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(here)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert "environment variable LEFT_BEHIND: unset -> 1" in done.stdout
    assert "2 passed, 1 error" in done.stdout


def test_without_torch_blocks_the_import_and_gives_it_back():
    import torch

    with without_torch():
        with pytest.raises(ImportError, match="torch is blocked"):
            import torch.nn
        with pytest.raises(ImportError, match="torch is blocked"):
            from torch import Tensor  # noqa: F401
    assert sys.modules["torch"] is torch


def test_golden_compares_writes_and_shows_the_difference(tmp_path):
    with pytest.raises(AssertionError, match="there is no golden file a"):
        check_golden("a/b.txt", "one\n", folder=tmp_path, update=False)
    check_golden("a/b.txt", "one\ntwo", folder=tmp_path, update=True)
    check_golden("a/b.txt", "one\ntwo\n", folder=tmp_path, update=False)
    with pytest.raises(AssertionError, match=r"(?s)-two.*\+three"):
        check_golden("a/b.txt", "one\nthree\n", folder=tmp_path, update=False)


@pytest.mark.parametrize("name", tiny_models.ALL)
def test_every_tiny_model_learns_its_tiny_data(name):
    import torch

    build, data = tiny_models.ALL[name]
    torch.manual_seed(0)
    model, examples = build().train(), data()
    batch = torch.utils.data.default_collate([examples[i] for i in range(8)])
    loss = tiny_models.cross_entropy(model, batch)
    loss.backward()
    with_gradient = {n for n, p in model.named_parameters() if p.grad is not None}
    without = {n for n, _ in model.named_parameters()} - with_gradient
    expected = {"spare.weight", "spare.bias", "frozen.weight", "frozen.bias"}
    assert without == (expected if name == "unused" else set())
