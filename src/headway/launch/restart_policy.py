"""The restart policy: whether a failed job is started again, and when it gives up.

A policy has no state and no effect: from the facts of all attempts so far it returns a decision,
which `launch_local` carries out.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.errors import HeadwayError, RunError, WorkerFailed
from headway.run.distributed.failure_record import FailureRecord, root_cause


@dataclass(frozen=True, kw_only=True)
class AttemptFacts:
    """How an attempt ended.

    Attributes:
        results: What the entry returned, by rank; None where a rank returned nothing.
        silent: Ranks that left neither a result nor a failure.
        unfinished: Those of them that had begun.
        deaths: Ranks that ended without a report -> exit status where known (negative: a signal).
        messages: What torch kept of the exception of a rank that has recorded none; "": nothing.
        trouble: What ended the attempt, if it was none of the ranks; a sentence without its dot.
        progress_before: The newest checkpoint (its step) when the attempt began; -1: none.
    """

    attempt: int
    results: tuple[Any, ...] = ()
    silent: tuple[int, ...] = ()
    unfinished: tuple[int, ...] = ()
    records: tuple[FailureRecord, ...] = ()
    deaths: Mapping[int, int | None] = field(default_factory=dict)
    messages: Mapping[int, str] = field(default_factory=dict)
    trouble: str = ""
    progress_before: int = -1
    progress_after: int = -1
    stop: str | None = None


@dataclass(frozen=True)
class Stop:
    """End the job; with `error`, or in order (None)."""

    error: HeadwayError | None = None


RESTARTS = 3
"""In a row without a new checkpoint, before a job is given up."""


@dataclass(frozen=True)
class RestartPolicy:
    """Restart after a kill from outside; stop after errors, which would only recur.

    Attributes:
        limit: Give up after this many restarts in a row without progress; 0: never restart.
        goal: What progress is, as in "no new checkpoint (newest: step 3)".
        unit: Of its number.
        relief: What takes less memory, and how to go on.
    """

    limit: int = RESTARTS
    goal: str = "checkpoint"
    unit: str = "step"
    relief: str = "a smaller micro-batch or fewer processes; then rerun with --resume"

    def decide(self, history: Sequence[AttemptFacts]) -> Stop | None:
        """Judge the last attempt of `history`; None: restart all workers."""
        last = history[-1]
        root = root_cause(last.records)
        if root is not None:
            return Stop(root.error())
        if last.stop is not None:
            return Stop()
        if last.progress_after < last.progress_before:
            return Stop(_vanished(last))
        # An exit of its own would only recur; a negative status is a signal from outside.
        for rank, status in sorted(last.deaths.items()):
            if status is not None and status >= 0:
                return Stop(_mute(rank, status, last.messages.get(rank, "")))
        if self._fruitless(history) >= self.limit:
            return Stop(self._exhausted(history))
        # Once it may be chance; twice in a row is the code.
        if len(history) > 1 and aborted(last) and aborted(history[-2]):
            return Stop(_crash(last, explain_deaths(last)))
        return None

    def _fruitless(self, history: Sequence[AttemptFacts]) -> int:
        """The number of restarts at the end of the history without a new checkpoint."""
        count = 0
        # The first attempt is no restart.
        for facts in reversed(history[1:]):
            if facts.progress_after > facts.progress_before:
                break
            count += 1
        return count

    def _exhausted(self, history: Sequence[AttemptFacts]) -> HeadwayError:
        last = history[-1]
        if aborted(last):
            return _crash(last, explain_deaths(last))
        if self.limit == 0:
            why = "Restarts are switched off (limit 0)."
        else:
            state = f"{self.unit} {last.progress_after}" if last.progress_after >= 0 else "none"
            why = f"{self.limit} restarts in a row brought no new {self.goal} (newest: {state})."
        return WorkerFailed(
            explain_deaths(last),
            where=f"attempt {last.attempt}",
            why=why,
            fix=f"If the kernel's out-of-memory killer did it (see dmesg), use {self.relief}.",
        )


def explain_deaths(facts: AttemptFacts) -> str:
    """One sentence: which rank died, and by which signal."""
    if facts.trouble:
        return facts.trouble
    known = {rank: status for rank, status in facts.deaths.items() if status is not None}
    # The others of a rank that has died are ended by SIGTERM, and may be seen first.
    for rank, status in sorted(known.items(), key=lambda one: (one[1] == -signal.SIGTERM, one[0])):
        how = "crashed with" if status in _OWN else "was killed by"
        return f"rank {rank} {how} {signal_name(-status)}"
    for rank in sorted(facts.deaths):
        return f"rank {rank} died without a word"
    lost = [record.rank for record in facts.records]
    return f"rank {min(lost)} lost its peers" if lost else "the workers ended without a word"


_OWN = {-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGFPE, -signal.SIGILL}


def aborted(facts: AttemptFacts) -> bool:
    """Whether a rank was ended by a signal that a process sends itself when its code is wrong."""
    return any(status in _OWN for status in facts.deaths.values())


def _vanished(facts: AttemptFacts) -> HeadwayError:
    return RunError(
        f"the checkpoint of step {facts.progress_before} has been deleted during the run",
        where=f"attempt {facts.attempt}",
        why=f"{explain_deaths(facts)}, and the workers have nothing to go on from.",
        fix="Start again, with a run directory that nobody deletes.",
    )


def _crash(facts: AttemptFacts, what: str) -> HeadwayError:
    return WorkerFailed(
        what,
        where=f"attempt {facts.attempt}",
        why="Its own code, or that of a library, did it; its message and stack are above. Gloo "
        "aborts so where ranks call different collectives.",
        fix="Set TORCH_DISTRIBUTED_DEBUG=DETAIL to have collectives compared, and restarts to 0.",
    )


def signal_name(number: int) -> str:
    """ "SIGKILL" of 9; numbers without a name stay numbers."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _mute(rank: int, status: int, message: str) -> HeadwayError:
    if message:
        return WorkerFailed(
            f"the process ended with exit code {status} outside of the training",
            where=f"rank {rank}",
            why=message,
            fix="Look at the output above, too; then rerun with --resume.",
        )
    return WorkerFailed(
        f"the process ended with exit code {status} and left no error",
        where=f"rank {rank}",
        why="Something in it called sys.exit or os._exit.",
        fix="Look at the output above; let the code raise an exception instead.",
    )
