"""Reading files that another process may still be writing, or was killed while writing.

A damaged line or file costs that line or file, never the report; every loss except the half-written
end of a file is named in a note.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The JSON objects of a file with one object per line.

    Returns:
        The objects, and notes about lines that could not be read. A missing file has no lines.
    """
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return [], []
    except OSError as error:
        return [], [f"{path.name}: cannot be read ({error.strerror or error})"]
    *whole, rest = text.split("\n")
    rows: list[dict[str, Any]] = []
    damaged: list[int] = []
    for number, line in enumerate(whole, start=1):
        if not line.strip():
            continue
        row = _object(line)
        if row is None:
            damaged.append(number)
            row = _salvage(line)
        if row is not None:
            rows.append(row)
    last = _object(rest)
    if last is not None:
        rows.append(last)
    return rows, _notes(path, damaged)


def read_object(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The JSON object in a file; empty where the file is missing or damaged (with a note)."""
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return {}, []
    except OSError as error:
        return {}, [f"{path.name}: cannot be read ({error.strerror or error})"]
    value = _object(text)
    return (value, []) if value is not None else ({}, [f"{path.name}: is not a JSON object"])


def read_objects(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The JSON objects of a file that holds a list of them, or one; none where it is missing."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return [], []
    except (OSError, ValueError, RecursionError):
        return [], [f"{path.name}: is not a list of JSON objects"]
    found = value if isinstance(value, list) else [value]
    return [row for row in found if isinstance(row, dict)], []


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _salvage(line: str) -> dict[str, Any] | None:
    """What the next writer appended to the half line of a killed one, if that is what happened."""
    start = line.rfind('{"event"')
    return _object(line[start:]) if start > 0 else None


def _notes(path: Path, damaged: list[int]) -> list[str]:
    if not damaged:
        return []
    if len(damaged) == 1:
        return [f"{path.name}: line {damaged[0]} is damaged"]
    return [f"{path.name}: {len(damaged)} lines are damaged, the first is line {damaged[0]}"]
