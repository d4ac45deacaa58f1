"""Trials: `headway.verify` of a case in a process whose sources hold one bug.

Importing torch costs three seconds, verifying a tiny model less than one. So one process imports
torch and headway once and forks a child for each bug. The child forgets the module with the bug and
all modules that import from it, imports them again with the wrong line in place (nothing is written
to disk), and verifies; the ranks that it needs are forked from it.
"""

from __future__ import annotations

import gc
import importlib
import importlib.machinery
import json
import multiprocessing
import os
import pkgutil
import re
import signal
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from multiprocessing import connection
from pathlib import Path
from typing import Any

from mutations.bugs import FOLDERS, Bug
from mutations.runner import Outcome, Trial

DATA_FOLDER = "MUTATION_DATA"
"""Variable with a directory for what the recipes of a trial write: data sets, caches."""
OURS = ("headway", "mutations", "support")


def run_trials(trials: Sequence[Trial], *, jobs: int, limit: float) -> Iterator[Outcome]:
    """Verify each case with its bug (None: as the sources are); outcomes in the order they come.

    Args:
        jobs: Trials at the same time.
        limit: Seconds until a trial counts as hung.
    """
    preload()
    importers = importers_of()
    waiting, running = list(trials), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            trial = _Trial(*waiting.pop(0), importers)
            running[trial.end] = trial
        now = time.monotonic()
        first = min(trial.start for trial in running.values())
        for end in connection.wait(list(running), max(0.0, first + limit - now)):
            yield running.pop(end).outcome()
        for end, trial in list(running.items()):
            if time.monotonic() - trial.start > limit:
                del running[end]
                yield trial.hung()


class _Trial:
    """A child process that verifies, and the end of the pipe at which it reports."""

    def __init__(self, bug: Bug | None, case: str, importers: dict[str, set[str]]) -> None:
        self.name = bug.name if bug else f"no bug: {case}"
        self.start = time.monotonic()
        self.end, theirs = multiprocessing.Pipe(duplex=False)
        self._pid = os.fork()
        if not self._pid:
            os.setpgid(0, 0)
            try:
                theirs.send(attempt(bug, case, importers))
            except BaseException:
                theirs.send(("error", traceback.format_exc()))
            finally:
                os._exit(0)
        theirs.close()

    def outcome(self) -> Outcome:
        try:
            verdict, said = self.end.recv()
        except EOFError:
            verdict, said = "error", "the trial's process has died"
        return self._ended(verdict, said)

    def hung(self) -> Outcome:
        return self._ended("hung", "")

    def _ended(self, verdict: str, said: str) -> Outcome:
        kill_tree(self._pid)
        os.waitpid(self._pid, 0)
        self.end.close()
        return Outcome(
            name=self.name, verdict=verdict, said=said, seconds=time.monotonic() - self.start
        )


def kill_tree(pid: int) -> None:
    """Kill a process and all its descendants; workers have sessions of their own."""
    family, parents = {pid}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    for one in family:
        try:
            os.kill(one, signal.SIGKILL)
        except ProcessLookupError:
            continue


def preload() -> None:
    """Import torch and all of headway that a verification may need."""
    gc.disable()
    sys.meta_path.insert(0, OurFinder())  # type: ignore[arg-type]
    import torch

    torch.set_num_threads(1)
    import_launcher()
    for folder in (*FOLDERS, "verification"):
        package = importlib.import_module(f"headway.{folder}")
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(found.name)
    importlib.import_module("headway.api.verification")
    importlib.import_module("headway.api.training")
    importlib.import_module("mutations.cases")
    # The first optimiser of a process imports torch._dynamo: a second, paid here once.
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    gc.freeze()
    gc.enable()


# ---- the wrong line in place of the right one ------------------------------------------------


def importers_of() -> dict[str, set[str]]:
    """Module -> our modules that import from it, itself or through others, of those loaded."""
    loaded = {name: module for name, module in sys.modules.items() if is_ours(name)}
    direct: dict[str, set[str]] = {name: set() for name in loaded}
    for name, module in loaded.items():
        if module.__file__ is None:
            continue
        for imported in imports_of(Path(module.__file__).read_text(encoding="utf-8")):
            if imported in direct:
                direct[imported].add(name)
    return {name: closure(name, direct) for name in loaded}


def is_ours(name: str) -> bool:
    return name.partition(".")[0] in OURS


IMPORT = re.compile(r"^ *(?:from ([\w.]+) import (\([^)]*\)|.*)|import ([\w.]+))", re.MULTILINE)


def imports_of(source: str) -> Iterator[str]:
    """Names of modules that a source may import; some are of functions in modules."""
    for package, names, module in IMPORT.findall(source):
        yield package or module
        yield from (f"{package}.{name}" for name in re.findall(r"\w+", names))


def closure(name: str, direct: dict[str, set[str]]) -> set[str]:
    found, fresh = {name}, {name}
    while fresh:
        fresh = set().union(*(direct[one] for one in fresh)) - found
        found |= fresh
    return found


CODE: dict[str, types.CodeType] = {}
"""Of our modules, compiled once for all trials: a child imports dozens of them again."""


class OnceCompiledLoader(SourceFileLoader):
    """Loads a module of ours from the code that the first import of it has compiled."""

    def get_code(self, fullname: str) -> types.CodeType:
        if fullname not in CODE:
            code = super().get_code(fullname)
            assert code is not None
            CODE[fullname] = code
        return CODE[fullname]


class OurFinder:
    """Finds our modules where they are found as ever."""

    def find_spec(self, name: str, path: Any, target: object = None) -> ModuleSpec | None:
        if not is_ours(name):
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = OnceCompiledLoader(spec.loader.name, spec.loader.path)
        return spec


class BuggyLoader(SourceFileLoader):
    """Loads a module from a text in place of its file."""

    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> types.CodeType:
        code = compile(self._source, self.path, "exec", dont_inherit=True)
        assert isinstance(code, types.CodeType)
        return code


class BuggyFinder:
    """Finds the one module with the bug; the others are found as ever."""

    def __init__(self, bug: Bug) -> None:
        self._bug = bug

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name != self._bug.module:
            return None
        loader = BuggyLoader(name, str(self._bug.path), self._bug.source())
        return importlib.util.spec_from_file_location(name, self._bug.path, loader=loader)


def plant(bug: Bug, importers: dict[str, set[str]]) -> None:
    """Import the module of the bug again, with the bug, and all that import from it."""
    sys.meta_path.insert(0, BuggyFinder(bug))  # type: ignore[arg-type]
    again = importers[bug.module]
    for name in again:
        forgotten = sys.modules.pop(name)
        package, _, own = name.rpartition(".")
        # Else `from package import module` would find the old one there.
        if vars(sys.modules.get(package, forgotten)).get(own) is forgotten:
            delattr(sys.modules[package], own)
    if again & importers_of_launcher:
        import_launcher()
    for name in sorted(again):
        importlib.import_module(name)


importers_of_launcher = {"headway.launch.local", "headway.launch.forkserver"}


# ---- verification in the child ----------------------------------------------------------------


def attempt(bug: Bug | None, case: str, importers: dict[str, set[str]]) -> tuple[str, str]:
    """Verdict on a case with a bug, and what was said."""
    if bug:
        plant(bug, importers)
    with tempfile.TemporaryDirectory(prefix="headway-mutation-") as folder:
        os.environ[DATA_FOLDER] = folder
        log = os.open(Path(folder) / "log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        errors = importlib.import_module("headway.errors")
        cases = importlib.import_module("mutations.cases")
        try:
            cases.CASES[case].verify().check()
        except errors.NotEqual as error:
            return "different", str(error)
        except errors.HeadwayError as error:
            return "error", str(error)
        return "equal", ""


def import_launcher() -> None:
    """Import the launcher of workers, and have it fork them from this process."""
    forkserver = importlib.import_module("headway.launch.forkserver")
    forkserver.start_forkserver = lambda *_, **__: None
    local = importlib.import_module("headway.launch.local")
    local.start_forkserver = forkserver.start_forkserver
    local.run_attempt = run_attempt


def run_attempt(job: Any, processes: int, **_: Any) -> Any:
    """In place of `headway.launch.local.run_attempt`: forks workers from here, without an agent."""
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_work, args=(job, n, processes)) for n in range(processes)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    own = {rank: worker.exitcode for rank, worker in enumerate(workers)}
    statuses = {rank: status for rank, status in own.items() if status}
    local = importlib.import_module("headway.launch.local")
    return local._ending(job, processes, statuses, own, None)


def _work(job: Any, rank: int, processes: int) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    importlib.import_module("headway.launch.worker").run_worker(job)
    os._exit(0)


def main() -> None:
    """Trials read from standard input as JSON; each outcome is a line of JSON."""
    request = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w")
    trials = [(Bug(**bug) if bug else None, case) for bug, case in request["trials"]]
    for outcome in run_trials(trials, jobs=request["jobs"], limit=request["limit"]):
        out.write(json.dumps(asdict(outcome)) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
