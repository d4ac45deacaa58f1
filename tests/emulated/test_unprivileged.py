"""emulated: who is not root gets the same nodes in a user namespace, or the exchange waits."""

from __future__ import annotations

import contextlib
import os
import shutil
import site
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import headway
from headway.api import emulation
from headway.api.emulation import read_emulation_options
from headway.errors import UsageError
from headway.launch.emulation import PacedCluster
from headway.launch.namespaces import enter_user_namespace
from headway.run.distributed.launch_env import LaunchEnv
from support.commands import HERE, command, events
from support.emulated import needs_root
from support.patience import patient

pytestmark = needs_root

CLUSTER = 'nodes = 2\nbetween = { rate = "100 Mbit/s" }\n'
NOBODY = 65534


def nobodys_python() -> str | None:
    """An interpreter of this version that others than root may run."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for name in (sys.executable, f"/usr/bin/{version}", shutil.which(version)):
        if name is None:
            continue
        with contextlib.suppress(OSError):
            done = subprocess.run([name, "-c", "import ctypes"], user=NOBODY, capture_output=True)
            if done.returncode == 0:
                return name
    return None


@pytest.fixture
def folder():
    """A directory that belongs to nobody; pytest's own are closed to others."""
    with tempfile.TemporaryDirectory(prefix="headway-nobody-") as name:
        os.chown(name, NOBODY, NOBODY)
        yield Path(name)


def as_nobody(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    python = nobodys_python()
    if python is None:
        pytest.skip("there is no interpreter that others than root may run")
    paths = [str(HERE), str(Path(headway.__file__).parent.parent), *site.getsitepackages()]
    variables = {
        "PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    return subprocess.run(
        [python, *words], cwd=folder, env=variables, user=NOBODY, group=NOBODY, extra_groups=[],
        capture_output=True, text=True, timeout=patient(150),
    )  # fmt: skip


ALLOWED = """
import sys
from headway.launch.namespaces import become_root_inside
sys.exit(0 if enter_user_namespace() else 7)
"""


@pytest.mark.slow
def test_nobody_trains_on_emulated_nodes(folder):
    (folder / "cluster.toml").write_text(CLUSTER)
    if as_nobody(folder, "-c", ALLOWED).returncode == 7:
        pytest.skip("this system gives user namespaces no rights")
    done = as_nobody(
        folder, "-m", "headway", "train", "support.recipes:large", "-d", "run",
        "--set", "arguments.steps=4", "--set", "arguments.every=100",
        "--emulate", "cluster.toml", "--fault", "link a-b 20x slower from step 4",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "in a user namespace" in done.stderr
    assert "c10d" not in done.stderr
    seconds = [event["seconds"] for event in events(folder / "run", "step")]
    assert len(seconds) == 4
    assert seconds[3] > 1.7
    assert min(seconds[1:3]) < 1.2
    assert (folder / "run" / "events.jsonl").stat().st_uid == NOBODY


def test_a_process_with_threads_stays_as_it_is(folder):
    program = (
        "import os, sys, threading\n"
        "from headway.launch.namespaces import enter_user_namespace\n"
        "wait = threading.Event()\n"
        "threading.Thread(target=wait.wait).start()\n"
        "moved = enter_user_namespace()\n"
        "wait.set()\n"
        "sys.exit(7 if not moved and os.geteuid() != 0 else 0)\n"
    )
    assert as_nobody(folder, "-c", program).returncode == 7


def test_a_failed_try_leaves_the_process_as_it_is(monkeypatch):
    """Root can, so the commands must not be found: only the child has moved."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("headway.launch.namespaces._alone", lambda: True)
    before = os.readlink("/proc/self/ns/net")
    assert not enter_user_namespace()
    assert os.readlink("/proc/self/ns/net") == before


# ---- neither root nor user namespaces ---------------------------------------------------------


@pytest.fixture
def powerless(monkeypatch):
    monkeypatch.setattr(emulation, "has_root", lambda: False)
    monkeypatch.setattr(emulation, "enter_user_namespace", lambda: False)


def test_the_exchange_is_paced_and_a_warning_says_what_that_is(tmp_path, powerless):
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER)
    found = read_emulation_options(path, ["link a-b 2x slower from step 3"], LaunchEnv(), "auto")
    assert found.device == "cpu"
    told = pytest.warns(UserWarning, match="emulated inside of the exchange")
    with told as caught, found.nodes() as nodes:
        assert nodes == PacedCluster(cluster=found.cluster)
    assert "a 100 Mbit/s, b 100 Mbit/s" in str(caught[0].message)


POWERLESS = """
import sys
from headway.cli.main import main
from headway.api import emulation

if __name__ == "__main__":
    emulation.has_root = emulation.enter_user_namespace = lambda: False
    sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_the_steps_take_as_long_as_the_link_would(tmp_path):
    """1.3 MB of gradients leave each node in a step: 1.06 s at 10 Mbit/s, 2.1 s at half of it."""
    (tmp_path / "powerless.py").write_text(POWERLESS)
    (tmp_path / "cluster.toml").write_text(CLUSTER.replace("100 Mbit/s", "10 Mbit/s"))
    done = command(
        sys.executable, "powerless.py", "train", "support.recipes:large", "-d", "run",
        "--set", "arguments.steps=4", "--set", "arguments.every=100",
        "--emulate", "cluster.toml", "--fault", "link a-b 2x slower from step 4", cwd=tmp_path,
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "without root the nodes are emulated inside of the exchange" in done.err
    seconds = [event["seconds"] for event in events(tmp_path / "run", "step")]
    parameters = 6 * 30_000 + 30_000 + 30_000 * 4 + 4
    least = 4 * parameters / 1.25e6
    assert min(seconds[1:3]) >= 0.95 * least
    assert min(seconds[1:3]) < 1.9 * least
    assert seconds[3] >= 0.95 * 2 * least


def test_a_cut_needs_real_links(tmp_path, powerless):
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER)
    found = read_emulation_options(path, ["cut link a-b at step 3"], LaunchEnv(), "auto")
    with pytest.raises(UsageError, match="cannot be cut") as caught, found.nodes():
        pass
    assert "sudo" in caught.value.fix
