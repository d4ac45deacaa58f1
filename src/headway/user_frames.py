"""Which lines are the user's: files in a traceback that are neither torch's nor headway's.

Every error that names a place in the user's code chooses it here. Imports no torch.
"""

from __future__ import annotations

import importlib.util
import os
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from traceback import FrameSummary

_HEADWAY = f"{Path(__file__).parent}{os.sep}"
# The example models are read as a user's are.
_WORKLOADS = f"{_HEADWAY}workloads{os.sep}"


def is_user_file(file: str) -> bool:
    """Whether a file is code that headway was given: the user's, or of a package that they use."""
    if file.startswith(_WORKLOADS):
        return True
    # Names of generated code, as torch.fx gives them, begin with "<".
    if file.startswith(("<", _HEADWAY, _torch())):
        return False
    return not file.startswith(_folders("stdlib", "platstdlib")) or _in_packages(file)


def is_headway_file(file: str) -> bool:
    """Whether a file is headway's own, and no model of the workloads."""
    return file.startswith(_HEADWAY) and not file.startswith(_WORKLOADS)


def is_torch_file(file: str) -> bool:
    return file.startswith(_torch())


def is_project_file(file: str) -> bool:
    """Whether a file is the user's own: besides, of no installed package or archive of modules."""
    return is_user_file(file) and not _in_packages(file) and not file.endswith(".zip")


def innermost_user_frame(frames: Sequence[FrameSummary]) -> FrameSummary | None:
    """The last frame of a traceback that is the user's; None where none is."""
    return next((frame for frame in reversed(frames) if is_user_file(frame.filename)), None)


@cache
def _torch() -> str:
    # Found without an import: the launcher reads failures without torch.
    spec = importlib.util.find_spec("torch")
    return f"{Path(spec.origin).parent}{os.sep}" if spec and spec.origin else "<"


def _in_packages(file: str) -> bool:
    return file.startswith(_folders("purelib", "platlib"))


@cache
def _folders(*kinds: str) -> tuple[str, ...]:
    return tuple(sorted({f"{sysconfig.get_path(kind)}{os.sep}" for kind in kinds}))
