"""pure: no file of the library is long; the list of exceptions can only shrink."""

from __future__ import annotations

from pathlib import Path

import headway

SOURCE = Path(headway.__file__).parent
LIMIT = 400
EXCEPTIONS: dict[str, int] = {}
"""Path below src/headway -> the number of lines it may have. Remove entries; never add or raise."""


def lengths():
    return {
        str(path.relative_to(SOURCE)): len(path.read_text(encoding="utf-8").splitlines())
        for path in SOURCE.rglob("*.py")
    }


def test_no_file_is_longer_than_the_limit():
    long = {name: n for name, n in lengths().items() if n > EXCEPTIONS.get(name, LIMIT)}
    assert long == {}


def test_every_exception_is_still_needed():
    found = lengths()
    assert [name for name in EXCEPTIONS if found.get(name, 0) <= LIMIT] == []


def test_the_list_of_exceptions_has_not_grown():
    assert len(EXCEPTIONS) <= 0
