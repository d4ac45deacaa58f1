"""Files that users write (TOML, JSON) become exact frozen types; all problems come at once.

The schema is the dataclass itself (checked by pydantic, which is used here and nowhere else). Each
problem is one line with file, line, dotted key and what to write instead; unknown keys name the
nearest legal key.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from headway.errors import DocumentError

T = TypeVar("T")


def read_document(path: Path, kind: type[T]) -> T:
    """Read a .toml or .json file into the dataclass `kind`.

    Raises:
        DocumentError: The file is missing, is not TOML/JSON, or has any problem; all are listed.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DocumentError(
            "cannot be read", where=str(path), problems=[error.strerror or str(error)]
        ) from None
    try:
        data = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (tomllib.TOMLDecodeError, json.JSONDecodeError) as error:
        raise DocumentError(
            f"is not valid {path.suffix.lstrip('.').upper() or 'JSON'}",
            where=str(path),
            problems=[str(error)],
        ) from None
    return to_type(data, kind, where=str(path), text=text)


def to_type(data: object, kind: type[T], *, where: str, text: str = "") -> T:
    """Check plain data against the dataclass `kind` and build it.

    Args:
        data: What a TOML or JSON parser returned.
        kind: A frozen dataclass whose annotations are the schema.
        where: Name of the document, for messages.
        text: The document's text, to find line numbers; optional.

    Raises:
        DocumentError: With one line per problem.
    """
    try:
        return TypeAdapter(kind, config=_config(kind)).validate_python(data)
    except ValidationError as error:
        problems = [_problem(facts, kind, where, text) for facts in error.errors()]
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise DocumentError(f"{count}:", where=where, problems=problems) from None


def _config(kind: type[object]) -> ConfigDict | None:
    """Strict configuration; dataclasses carry their own (pydantic forbids giving it twice)."""
    return None if dataclasses.is_dataclass(kind) else ConfigDict(extra="forbid")


def document(cls: type[T]) -> type[T]:
    """Class decorator: a frozen keyword-only dataclass that refuses unknown keys in files."""
    cls.__pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[attr-defined]
    return dataclasses.dataclass(frozen=True, kw_only=True)(cls)


def _problem(facts: Mapping[str, Any], kind: type[object], where: str, text: str) -> str:
    path = [str(part) for part in facts["loc"]]
    key = ".".join(path)
    line = find_line(text, path)
    place = f"{where}:{line}" if line else where
    match facts["type"]:
        case "unexpected_keyword_argument" | "extra_forbidden":
            return f"{place}  unknown key {key}{nearest(path[-1], _legal(kind, path[:-1]))}"
        case "missing" | "missing_keyword_only_argument":
            return f"{place}  missing key {key}"
        case "value_error":
            return f"{place}  {key}: {str(facts['msg']).removeprefix('Value error, ')}"
        case _:
            return f"{place}  {key}: {facts['msg']}, not {facts['input']!r}"


def nearest(word: str, legal: Sequence[str]) -> str:
    """The suffix of an "unknown ..." message: the nearest legal names, or all of them."""
    close = difflib.get_close_matches(word, legal, n=2, cutoff=0.6)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    return f"; legal: {', '.join(sorted(legal))}" if legal else ""


def _legal(kind: Any, path: Sequence[str]) -> list[str]:
    """The field names that are legal at a dotted path of nested dataclasses."""
    if not path:
        return [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
    for candidate in (kind, *get_args(kind)):
        if dataclasses.is_dataclass(candidate):
            hints = get_type_hints(candidate)
            if path[0] in hints:
                return _legal(_dataclass_in(hints[path[0]]), path[1:])
        elif path[0].isdigit():
            return _legal(_dataclass_in(kind), path[1:])
    return _legal(kind, path[1:])


def _dataclass_in(hint: Any) -> Any:
    """The dataclass inside `X | None` or `tuple[X, ...]`, or the hint itself."""
    for inner in get_args(hint):
        if dataclasses.is_dataclass(inner):
            return inner
    return hint


def find_line(text: str, path: Sequence[str]) -> int | None:
    """The line of a TOML key (by table header and name), or of a JSON key (by name); 1-based."""
    table: list[str] = []
    best: int | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        header = re.match(r"^\s*\[+([^\]]+)\]+\s*(#.*)?$", line)
        if header:
            table = [part.strip().strip("\"'") for part in header.group(1).split(".")]
            if table == list(path):
                best = number
            continue
        entry = re.match(r"^\s*\"?([A-Za-z0-9_.\-]+)\"?\s*[=:]", line)
        if entry and path:
            full = [*table, *entry.group(1).split(".")]
            if full == list(path[: len(full)]) or (
                text.lstrip().startswith("{") and entry.group(1) == path[-1]
            ):
                return number
    return best
