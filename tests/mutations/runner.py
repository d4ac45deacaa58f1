"""Starts the process in which bugs are tried, and collects what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mutations.bugs import Bug

LIMIT = 60.0
"""Seconds for one bug; a verification takes one to three."""
TESTS = Path(__file__).parent.parent


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a trial gave.

    Attributes:
        verdict: "different" (the bug was found), "equal", "error" or "hung".
        said: The verdict in words, or the end of the traceback.
    """

    name: str
    verdict: str
    said: str
    seconds: float


Trial = tuple[Bug | None, str]
"""A bug, or none, and the case to verify."""


def run(
    trials: Sequence[Trial], *, jobs: int, limit: float = LIMIT
) -> Iterator[tuple[Bug | None, Outcome]]:
    """Verify each case with its bug, in processes apart from this one; in the order they end.

    Args:
        jobs: Trials at the same time.
        limit: Seconds until a trial counts as hung.

    Raises:
        RuntimeError: The process that makes the trials has failed.
    """
    bugs = {bug.name: bug for bug, _ in trials if bug}
    request = {
        "trials": [(asdict(bug) if bug else None, case) for bug, case in trials],
        "jobs": jobs,
        "limit": limit,
    }
    path = f"{TESTS.parent / 'src'}{os.pathsep}{TESTS}"
    with subprocess.Popen(
        [sys.executable, "-m", "mutations.trial"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=TESTS,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(request))
        process.stdin.close()
        for line in process.stdout:
            outcome = Outcome(**json.loads(line))
            yield bugs.get(outcome.name), outcome
        if process.wait():
            raise RuntimeError(f"the trials ended with status {process.returncode}")
