"""The error tree: one class per cause that a user can understand and mend.

    HeadwayError                     exit code
    ├── UsageError              1   the command line or the environment asks the impossible
    │   ├── MissingExtra        1   an optional package is not installed
    │   └── RunDirectoryTaken   1   the run directory already holds another run
    ├── DocumentError           1   a TOML or JSON file: all its problems together
    ├── RecipeError             1   a recipe cannot be found, loaded or used
    ├── DataError               1   data missing, too small, or of the wrong shape
    ├── PlanError               2   a plan that cannot exist: all its problems together
    │   └── NothingFits         2   no plan of a model fits into the devices' memory
    ├── CheckpointError         3   a checkpoint cannot be written or used
    │   ├── CheckpointDamaged   3   sizes or checksums do not match the manifest
    │   └── CheckpointMismatch  3   a sound checkpoint of another model or optimiser
    ├── RunError                3   a run stopped
    │   ├── Diverged            3   the loss is not finite
    │   ├── WorkerFailed        3   an exception in one rank
    │   └── PeerLost            3   another rank vanished in the middle of an exchange
    ├── Stalled                 5   a wait ran into its time-out; names who is missing
    └── NotEqual                4   the split run differs from the serial run

Every error says what happened, where, why (with the numbers) and what to do.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from os import PathLike
from typing import ClassVar

TIMEOUT_SECONDS = 300.0
"""Longest wait for another process before `Stalled`, where nobody says how long."""


class HeadwayError(Exception):
    """Base of all errors that headway raises for its users.

    Args:
        where: File and line, plan node, or rank and step.
        why: The reason, with the numbers.
        fix: What the user can do now.
    """

    code: ClassVar[str] = "HW-1000"
    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, where: str = "", why: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.why = why
        self.fix = fix

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        return "\n  ".join(part for part in (head, self.why, self.fix) if part)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.__dict__.copy()))


NAME_BYTES, PATH_BYTES = 255, 4095
"""What Linux takes as a file's name and as a path."""


def os_reason(error: OSError, path: str | PathLike[str]) -> str:
    """What the system says of a path; of one that is too long the length and the limit."""
    if error.errno != errno.ENAMETOOLONG:
        return error.strerror or str(error)
    text = os.fspath(path)
    longest = max(len(os.fsencode(part)) for part in text.split(os.sep))
    if longest > NAME_BYTES:
        return f"a name of {longest} bytes, and at most {NAME_BYTES} are possible"
    return f"a path of {len(os.fsencode(text))} bytes, and at most {PATH_BYTES} are possible"


def shown_path(path: str | PathLike[str]) -> str:
    """A path for messages: of names that no file can have, the beginning; of a long path, too."""
    parts = os.fspath(path).split(os.sep)
    shown = os.sep.join(
        f"{part[:20]}..." if len(os.fsencode(part)) > NAME_BYTES else part for part in parts
    )
    return f"{shown[:200]}..." if len(os.fsencode(shown)) > PATH_BYTES else shown


def _rebuild(kind: type[HeadwayError], facts: dict[str, object]) -> HeadwayError:
    """Restore an error that crossed a process border (keyword-only constructors do not pickle)."""
    error = kind.__new__(kind)
    Exception.__init__(error, facts["what"])
    error.__dict__.update(facts)
    return error


class UsageError(HeadwayError):
    """The command line or the environment asks for something impossible."""

    code = "HW-1001"


class MissingExtra(UsageError):
    """An optional package is needed and not installed."""

    code = "HW-1002"


class RunDirectoryTaken(UsageError):
    """The run directory already holds another run."""

    code = "HW-1003"


class DocumentError(HeadwayError):
    """A file that the user wrote has problems; `problems` holds one line for each of them."""

    code = "HW-1101"

    def __init__(self, what: str, *, where: str, problems: Sequence[str]) -> None:
        super().__init__(what, where=where, why="\n  ".join(problems))
        self.problems = tuple(problems)


class RecipeError(HeadwayError):
    """A recipe cannot be found, loaded or used."""

    code = "HW-1201"


class DataError(HeadwayError):
    """Data is missing, too small, or of the wrong shape."""

    code = "HW-1301"


class PlanError(HeadwayError):
    """A plan that cannot exist; `problems` holds one line for each reason."""

    code = "HW-2001"
    exit_code = 2

    def __init__(
        self, what: str, *, problems: Sequence[str], where: str = "", fix: str = ""
    ) -> None:
        super().__init__(what, where=where, why="\n  ".join(problems), fix=fix)
        self.problems = tuple(problems)


class NothingFits(PlanError):
    """No plan of a model fits; `planner.explain.infeasible.infeasible_error` says what would."""

    code = "HW-2002"


class CheckpointError(HeadwayError):
    """A checkpoint cannot be written or used."""

    code = "HW-3101"
    exit_code = 3


class CheckpointDamaged(CheckpointError):
    """Sizes or checksums of a checkpoint do not match its manifest."""

    code = "HW-3102"


class CheckpointMismatch(CheckpointError):
    """A sound checkpoint of another model or optimiser."""

    code = "HW-3103"


class RunError(HeadwayError):
    """A run stopped."""

    code = "HW-3001"
    exit_code = 3


class Diverged(RunError):
    """The loss is not finite."""

    code = "HW-3002"


class WorkerFailed(RunError):
    """An exception was raised in one rank."""

    code = "HW-3003"


class PeerLost(RunError):
    """Another rank vanished in the middle of an exchange."""

    code = "HW-3004"


class Stalled(HeadwayError):
    """A wait ran into its time-out; the message names who is missing."""

    code = "HW-5001"
    exit_code = 5


class NotEqual(HeadwayError):
    """The split run differs from the serial run."""

    code = "HW-4001"
    exit_code = 4
