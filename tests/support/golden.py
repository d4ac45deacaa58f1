"""Golden files: what a text looked like when somebody last looked at it.

    check_golden("plan/explain.txt", explain(plan))

compares with `tests/golden/plan/explain.txt`; `pytest --update-golden` writes the file instead, and
the change is read in review.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "golden"
VARIABLE = "HEADWAY_UPDATE_GOLDEN"
"""Set by conftest.py when pytest got --update-golden; a variable reaches the ranks, too."""


def check_golden(
    name: str, text: str, *, folder: Path = FOLDER, update: bool | None = None
) -> None:
    """Compare `text` with the golden file `name`.

    Args:
        name: Path below `tests/golden`, with suffix.
        text: What the code made; a final line break is added where it lacks one.
        folder: Where the files are.
        update: Write instead of comparing; None: as the command line says.

    Raises:
        AssertionError: With a unified diff, or because the file does not exist.
    """
    __tracebackhide__ = True
    path = folder / name
    text = text if text.endswith("\n") else text + "\n"
    if VARIABLE in os.environ if update is None else update:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return
    if not path.exists():
        raise AssertionError(f"there is no golden file {name}; write it with --update-golden")
    old = path.read_text(encoding="utf-8")
    if old != text:
        lines = difflib.unified_diff(
            old.splitlines(), text.splitlines(), f"golden/{name}", "now", lineterm="", n=2
        )
        raise AssertionError("\n".join(["differs from the golden file", *lines]))
