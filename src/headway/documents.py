"""Files that users write (TOML, JSON) become exact frozen types; all problems come at once.

The schema is the dataclass itself (checked by pydantic, which is used here and for single values of
a schema, and nowhere else). Each problem is one line with file, line, dotted key and what to write
instead; unknown keys name the nearest legal key. Nothing is converted in silence: the text "5", the
number 5.0 and true are not the whole number 5.

`parse_toml` and `parse_json` are the parsers of all of headway: what is too deep, too large or too
long for the code behind them is a ValueError here, and no RecursionError or endless loop there.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import UnionType
from typing import (
    Annotated,
    Any,
    TypeVar,
    Union,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import ConfigDict, TypeAdapter, ValidationError

from headway.errors import DocumentError, os_reason, shown_path

T = TypeVar("T")

_KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "a text",
    "bool_type": "true or false",
    "none_required": "null",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a table",
    "dataclass_type": "a table",
}
"""What pydantic's type errors mean, in the words of the files."""

_MISSING = ("missing", "missing_keyword_only_argument")
_UNKNOWN = ("unexpected_keyword_argument", "extra_forbidden")


MAX_BYTES = 256 * 2**20
"""Of a document; /dev/zero has no end."""
MAX_DEPTH = 100
"""Levels of tables and lists. Python's own limit is about 1000 calls, pydantic's 200 levels."""
MAX_INTEGER = 2**63 - 1
"""Largest whole number in a file that users write, as TOML 1.0 has it."""


def read_document(path: Path, kind: type[T]) -> T:
    """Read a .toml or .json file into the dataclass `kind`.

    Raises:
        DocumentError: The file is missing, is not TOML/JSON, or has any problem; all are listed.
    """
    toml = path.suffix.lower() == ".toml"
    text = read_text(path)
    try:
        data = parse_toml(text) if toml else parse_json(text, max_integer=MAX_INTEGER)
    except ValueError as error:
        language = "TOML" if toml else "JSON"
        raise DocumentError(
            f"is not valid {language}", where=str(path), problems=[str(error)]
        ) from None
    return to_type(data, kind, where=str(path), text=text)


def read_text(path: Path) -> str:
    """The text of a file that a user wrote.

    Raises:
        DocumentError: It cannot be read, is no UTF-8, or has more than `MAX_BYTES`.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES // 2**20} MiB")
        return content.decode("utf-8")
    except (OSError, ValueError) as error:
        reason = os_reason(error, path) if isinstance(error, OSError) else str(error)
        raise DocumentError("cannot be read", where=shown_path(path), problems=[reason]) from None


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML document.

    Raises:
        TOMLDecodeError: It is not TOML; a ValueError.
        ValueError: It is too deep, or has a whole number of more than 64 bits.
    """
    # tomllib takes time that grows with the square of the parts of a dotted key.
    for number, line in enumerate(text.splitlines(), start=1):
        if _LONG_KEY.match(line):
            raise ValueError(f"{_too_deep()} (line {number})")
    try:
        data = tomllib.loads(text)
    except RecursionError:
        raise ValueError(_too_deep()) from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:  # Python's own limit for long integers, which advises programmers
        raise ValueError(_too_large(MAX_INTEGER)) from None
    check_limits(data, max_integer=MAX_INTEGER)
    return data


def parse_json(text: str | bytes, *, max_integer: int | None = None) -> Any:
    """The value of a JSON document.

    Args:
        max_integer: Largest magnitude of a whole number; None: whatever Python reads.

    Raises:
        ValueError: It is not JSON or not UTF-8, too deep, has a key twice, or a number too large.
    """
    try:
        data = json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError(_too_deep()) from None
    except ValueError as error:
        if str(error).startswith("Exceeds the limit"):  # for long integers; see `parse_toml`
            raise ValueError(_too_large(MAX_INTEGER)) from None
        raise
    check_limits(data, max_integer=max_integer)
    return data


def check_limits(data: object, *, max_integer: int | None = None) -> None:
    """Refuse plain data that recursive code could not walk, or that has numbers too large.

    Raises:
        ValueError: More than `MAX_DEPTH` levels, or a whole number beyond `max_integer`.
    """
    # Level by level, because a recursive check would fail of what it is to find.
    level: list[Any] = [data]
    for _ in range(MAX_DEPTH + 1):
        if max_integer is not None and any(_is_beyond(item, max_integer) for item in level):
            raise ValueError(_too_large(max_integer))
        level = [inner for item in level for inner in _items_of(item)]
        if not level:
            return
    raise ValueError(_too_deep())


def _items_of(value: object) -> Sequence[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else ()


def _is_beyond(value: object, limit: int) -> bool:
    return isinstance(value, int) and not -limit - 1 <= value <= limit


def _too_deep() -> str:
    return f"tables and lists are nested more than {MAX_DEPTH} deep"


def _too_large(limit: int) -> str:
    return f"a whole number has more than {limit.bit_length() + 1} bits"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; TOML forbids a key that stands twice, JSON's parser would keep the last."""
    table = dict(pairs)
    if len(table) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = sorted(key for key, count in counts.items() if count > 1)
        raise ValueError(f"the same key stands twice: {', '.join(twice[:MOST_LISTED])}")
    return table


def to_type(data: object, kind: type[T], *, where: str, text: str = "") -> T:
    """Check plain data against the dataclass `kind` and build it.

    Args:
        data: What a TOML or JSON parser returned.
        kind: A frozen dataclass whose annotations are the schema.
        text: The document's text, to find line numbers; optional.

    Raises:
        DocumentError: With one line per problem.
    """
    try:
        return _validate(data, kind)
    except ValidationError as error:
        problems = _problems(error, data, kind, where, text)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise DocumentError(f"{count}:", where=where, problems=problems) from None


def _validate(data: object, kind: type[T]) -> T:
    """Strict where the data is plain; a TOML date has no JSON form, so it is checked as it is."""
    hashable: Any = kind
    adapter = _adapter(hashable)
    try:
        plain = json.dumps(data)
    except (TypeError, ValueError):
        return cast("T", adapter.validate_python(data))
    # As JSON: pydantic's strict mode takes a list for a tuple there, and nowhere else.
    return cast("T", adapter.validate_json(plain, strict=True))


@lru_cache(maxsize=64)
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Made once: 25 ms for a plan, which is checked several times in every rank."""
    return TypeAdapter(kind, config=_config(kind))


def _config(kind: type[object]) -> ConfigDict | None:
    """Strict configuration; dataclasses carry their own (pydantic forbids giving it twice)."""
    return None if dataclasses.is_dataclass(kind) else ConfigDict(extra="forbid")


@dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,)
)
def document(cls: type[T]) -> type[T]:
    """Class decorator: a frozen keyword-only dataclass that refuses unknown keys in files."""
    cls.__pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[attr-defined]
    return dataclasses.dataclass(frozen=True, kw_only=True)(cls)


# ---- what is wrong, in words ------------------------------------------------------------------


def _problems(
    error: ValidationError, data: object, kind: type[object], where: str, text: str
) -> list[str]:
    """One line per key that is wrong, in the order of the file; a union is one problem."""
    by_path: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for facts in error.errors():
        by_path.setdefault(_path(facts, data), []).append(facts)
    lines = key_lines(text)
    found = [
        (_locate(lines, path) or 0, _sentence(path, several, kind))
        for path, several in by_path.items()
    ]
    found.sort(key=lambda problem: problem[0])
    return [f"{where}:{line}  {text}" if line else f"{where}  {text}" for line, text in found]


def _path(facts: Mapping[str, Any], data: Any) -> tuple[str, ...]:
    """Where the problem is, without the names that pydantic gives to the branches of a union."""
    path: list[str] = []
    missing = facts["type"] in _MISSING
    for number, part in enumerate(facts["loc"], start=1):
        last = number == len(facts["loc"])
        if isinstance(data, dict) and (part in data or (missing and last)):
            data = data.get(part)
        elif isinstance(data, list | tuple) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            continue
        path.append(str(part))
    return tuple(path)


def _sentence(path: tuple[str, ...], several: list[Mapping[str, Any]], kind: type[object]) -> str:
    key, facts = ".".join(path), several[0]
    if facts["type"] in _UNKNOWN:
        return f"unknown key {key}{nearest(path[-1], _legal(kind, path[:-1]))}"
    if facts["type"] in _MISSING:
        return f"missing key {key}"
    said = f"{key}: " if key else ""
    wrong = [_KINDS.get(f["type"]) or f.get("ctx", {}).get("expected") for f in several]
    if None not in wrong:
        return f"{said}{_shown(facts['input'])} is not {' or '.join(dict.fromkeys(wrong))}"
    return said + " or ".join(dict.fromkeys(_message(f) for f in several))


def _message(facts: Mapping[str, Any]) -> str:
    if facts["type"] in ("value_error", "assertion_error"):
        return str(facts["ctx"]["error"])
    return f"{facts['msg']}, not {_shown(facts['input'])}"


def _shown(value: object) -> str:
    """A value as files write it, shortened."""
    text = json.dumps(value, default=repr, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


MOST_LISTED = 20
"""Names that a message lists when none of them is near."""


def nearest(word: str, legal: Sequence[str]) -> str:
    """The suffix of an "unknown ..." message: the nearest legal names, or all if they are few."""
    close = difflib.get_close_matches(word, legal, n=2, cutoff=0.6)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    return f"; legal: {', '.join(sorted(legal))}" if 0 < len(legal) <= MOST_LISTED else ""


def _legal(hint: Any, path: Sequence[str]) -> list[str]:
    """The field names that are legal at a path, through unions, lists and tables of dataclasses."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return list(dict.fromkeys(name for branch in inner for name in _legal(branch, path)))
    if origin is Annotated:
        return _legal(inner[0], path)
    if dataclasses.is_dataclass(hint):
        if not path:
            return [field.name for field in dataclasses.fields(hint) if field.init]
        return _legal(get_type_hints(hint).get(path[0]), path[1:])
    if origin is dict and path:
        return _legal(inner[1], path[1:])
    if inner and path and path[0].isdigit():
        uniform = len(inner) == 1 or inner[-1] is Ellipsis
        return _legal(inner[0 if uniform else min(int(path[0]), len(inner) - 1)], path[1:])
    return []


# ---- where it stands --------------------------------------------------------------------------


def find_line(text: str, path: Sequence[str]) -> int | None:
    """The line (from 1) of a key in TOML or JSON text, or of the nearest table around it.

    Args:
        path: The dotted key in parts; the parts of a list are "0", "1", ...
    """
    return _locate(key_lines(text), path)


def _locate(lines: Mapping[tuple[str, ...], int], path: Sequence[str]) -> int | None:
    for length in range(len(path), 0, -1):
        if tuple(path[:length]) in lines:
            return lines[tuple(path[:length])]
    return None


def key_lines(text: str) -> dict[tuple[str, ...], int]:
    """The line (from 1) on which each key of a valid TOML or JSON document begins."""
    lines: dict[tuple[str, ...], int] = {}
    for path, number in _json_keys(text) if text.lstrip()[:1] == "{" else _toml_keys(text):
        # The first line counts: [a.b] and [a.c] both name a.
        lines.setdefault(path, number)
    return lines


_JSON_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|[{}\[\],\n]|[^\s{}\[\],":]+')


def _json_keys(text: str) -> Iterator[tuple[tuple[str, ...], int]]:
    number, stack = 1, list[str | int | None]()  # per level: key, index, or None before a key
    for match in _JSON_TOKEN.finditer(text):
        token = match.group()
        if token == "\n":
            number += 1
        elif token in "}]":
            stack.pop()
        elif token == "," and stack:
            # The next place of a list, or in a table a key that is still to come.
            stack[-1] = stack[-1] + 1 if isinstance(stack[-1], int) else None
        elif token.startswith('"') and stack and stack[-1] is None:
            stack[-1] = json.loads(token)
            yield tuple(map(str, stack)), number
        else:
            if stack and isinstance(stack[-1], int):
                yield tuple(map(str, stack)), number
            if token in "{[":
                stack.append(None if token == "{" else 0)


_TOML_NAME = r"""(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')"""
_TOML_KEY = rf"{_TOML_NAME}(?:\s*\.\s*{_TOML_NAME})*"
_LONG_KEY = re.compile(rf"\s*\[?\[?\s*(?:{_TOML_NAME}\s*\.\s*){{{MAX_DEPTH}}}")
_TOML_HEADER = re.compile(rf"^\s*(\[\[?)\s*({_TOML_KEY})\s*\]")
_TOML_ENTRY = re.compile(rf"^\s*({_TOML_KEY})\s*=")


def _toml_keys(text: str) -> Iterator[tuple[tuple[str, ...], int]]:
    table: tuple[str, ...] = ()
    arrays: dict[tuple[str, ...], int] = {}  # [[array]] -> index of its newest table
    quote = ""  # of the text over several lines in which this line begins
    for number, line in enumerate(text.splitlines(), start=1):
        header, entry = _TOML_HEADER.match(line), _TOML_ENTRY.match(line)
        if quote:
            quote = "" if quote in line else quote
            continue
        if header:
            table = _toml_table(_toml_names(header.group(2)), header.group(1) == "[[", arrays)
            yield from ((table[: end + 1], number) for end in range(len(table)))
        elif entry:
            path = table
            for name in _toml_names(entry.group(1)):
                path = (*path, name)
                yield path, number
        # An odd number of them leaves a text open.
        quote = next((q for q in ('"""', "'''") if line.count(q) % 2), "")


def _toml_table(
    names: Sequence[str], several: bool, arrays: dict[tuple[str, ...], int]
) -> tuple[str, ...]:
    """The path of a [table] or of the next [[table]], with the indices of the lists on the way."""
    path: tuple[str, ...] = ()
    for last, name in enumerate(names, start=1 - len(names)):  # `last` is 0 at the last name
        path = (*path, name)
        if several and last == 0:
            arrays[path] = arrays.get(path, -1) + 1
        if path in arrays:
            path = (*path, str(arrays[path]))
    return path


def _toml_names(key: str) -> list[str]:
    return [name.strip("\"'") for name in re.findall(_TOML_NAME, key)]
