"""Every test starts and ends with a clean process, and every skip says why.

`--update-golden` rewrites the golden files. A test fails that leaves behind a process, a thread, a
changed environment variable, an open process group or another current directory. Tests in `pure/`
run with the import of torch blocked.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from support import golden, leaks, sampling
from support.patience import patient
from support.without_torch import without_torch

os.environ[leaks.MARK] = str(os.getpid())
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; the ranks share the cores
# Every command would compile all of headway again, a second of processor time each.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # what a shell does to jobs in its background
    signal.signal(signal.SIGINT, signal.default_int_handler)

SLOW_PER_DAY = 4
"""Of more than a hundred: each has its turn within a month, and a run stays short."""

hypothesis.settings.register_profile(
    "headway", deadline=None, derandomize=True, max_examples=100, print_blob=False
)
hypothesis.settings.load_profile("headway")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write the golden files instead of comparing"
    )
    parser.addoption(
        "--all-cases", action="store_true", help="every case of enumerations, not a sample"
    )
    parser.addoption("--case-seed", help="the sample of enumerations; default: of the day")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Of `-n auto`: more than cores, as a fifth of the time tests wait for clocks and links."""
    return (os.cpu_count() or 1) * 3 // 2


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--update-golden"):
        os.environ[golden.VARIABLE] = "1"
    if sampling.VARIABLE not in os.environ:  # a worker of xdist has the seed of its controller
        seed = config.getoption("--case-seed") or sampling.seed_of_today()
        os.environ[sampling.VARIABLE] = sampling.ALL if config.getoption("--all-cases") else seed


def pytest_collection(session: pytest.Session) -> None:
    """Collecting makes a million objects that stay: to look for garbage among them again and again
    takes a fifth of its time, and much of every later search.
    """
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the slow tests a few run today; the others are skipped, and say so. A file alone runs
    whole."""
    slow = sorted(item.nodeid for item in items if item.get_closest_marker("slow"))
    alone = len({item.path for item in items}) == 1
    today = set(slow if alone else sampling.sampled(slow, SLOW_PER_DAY))
    for item in items:
        if item.get_closest_marker("slow") and item.nodeid not in today:
            item.add_marker(pytest.mark.skip(reason="slow: runs on other days and in test-all"))


def pytest_report_header() -> str:
    return f"case seed: {os.environ[sampling.VARIABLE]} (repeat with --case-seed)"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """The limit of a test, stretched on a slow or busy machine before pytest-timeout reads it."""
    marker = item.get_closest_marker("timeout")
    limit = marker.args[0] if marker else item.config.getini("timeout")
    if limit:  # "" where a pytest runs without this project's settings
        item.add_marker(pytest.mark.timeout(patient(float(limit))), append=False)
    return (yield)


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    """Fails a test that leaks; the state is put right for the next one."""
    before = leaks.Snapshot()
    yield
    found = before.leaks()
    if found:
        pytest.fail("this test left behind:\n  " + "\n  ".join(found), pytrace=False)


@pytest.fixture(autouse=True)
def _pure_means_without_torch(request: pytest.FixtureRequest) -> Iterator[None]:
    """Blocks `import torch` while a test of `pure/` runs."""
    if Path(request.path).parent.name == "pure":
        with without_torch():
            yield
    else:
        yield
