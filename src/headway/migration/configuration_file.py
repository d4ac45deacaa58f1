"""A configuration file of another framework, read as plain data with the line of each key.

JSON and TOML are read by `headway.documents`. YAML needs PyYAML (the extra "yaml"); what one line
of it could blow up (anchors and aliases) is refused, and a key that stands twice, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headway.documents import MAX_DEPTH, MAX_INTEGER, key_lines, parse_json, parse_toml, read_text
from headway.errors import DocumentError, MissingExtra

MAX_CONFIGURATION_BYTES = 2**18
"""PyYAML reads some 100 kB in a second, and no configuration is larger."""

KeyPath = tuple[str, ...]
Language = Literal["JSON", "TOML", "YAML"]
_SUFFIXES: Mapping[str, Language] = {
    ".json": "JSON",
    ".toml": "TOML",
    ".yaml": "YAML",
    ".yml": "YAML",
}


@dataclass(frozen=True, kw_only=True)
class ConfigurationFile:
    """What a file says, and where.

    Attributes:
        data: Tables, lists, texts, numbers, truth values and None; a YAML date is a date.
        lines: The line (from 1) on which a key begins.
    """

    path: Path
    language: Language
    data: Mapping[str, Any]
    lines: Mapping[KeyPath, int]


def read_configuration(path: Path) -> ConfigurationFile:
    """Read a file by its suffix, or, where that says nothing, by its first sign.

    Raises:
        DocumentError: It cannot be read, is too large, or is not of its language.
        MissingExtra: It is YAML, and PyYAML is not installed.
    """
    text = read_text(path)
    if len(text) > MAX_CONFIGURATION_BYTES:
        size = f"{len(text)} characters; at most {MAX_CONFIGURATION_BYTES}"
        raise DocumentError("is no configuration", where=str(path), problems=[size])
    language = _SUFFIXES.get(path.suffix.lower()) or _language_of(text)
    try:
        if language == "YAML":
            data, lines = parse_yaml(text)
        else:
            data = parse_toml(text) if language == "TOML" else _json(text)
            lines = key_lines(text) if isinstance(data, dict) else {}
        if not isinstance(data, dict):
            raise ValueError(f"it is {_kind(data)}, not a table of keys")
        _check_texts(data)
    except ValueError as error:
        problems = [str(error)]
        raise DocumentError(
            f"is not valid {language}", where=str(path), problems=problems
        ) from None
    return ConfigurationFile(path=path, language=language, data=data, lines=lines)


def _json(text: str) -> Any:
    return parse_json(text, max_integer=MAX_INTEGER)


def _language_of(text: str) -> Language:
    if text.lstrip()[:1] == "{":
        return "JSON"
    try:
        parse_toml(text)
    except ValueError:
        return "YAML"
    return "TOML"


def _kind(value: object) -> str:
    names = {"list": "a list", "str": "a text", "NoneType": "empty"}
    return names.get(type(value).__name__, "a single value")


def _check_texts(value: object) -> None:
    """Refuse half characters (lone surrogates of JSON), which no file could hold again."""
    level: list[object] = [value]
    while level:
        texts = [text for item in level for text in _texts(item)]
        for text in texts:
            if not text.isascii():
                try:
                    text.encode("utf-8")
                except UnicodeEncodeError:
                    raise ValueError("a text has half of a character (a lone surrogate)") from None
        level = [inner for item in level for inner in _inner(item)]


def _texts(value: object) -> list[str]:
    if isinstance(value, dict):
        return list(value)
    return [value] if isinstance(value, str) else []


def _inner(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, list) else []


def leaves(data: Mapping[str, Any], path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Every key that holds no table of its own, in the order of the file; empty tables, too."""
    for name, value in data.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*path, name))
        else:
            yield (*path, name), value


# ---- YAML -------------------------------------------------------------------------------------


def parse_yaml(text: str) -> tuple[Any, dict[KeyPath, int]]:
    """The value of a YAML document, and the line of each key.

    Raises:
        ValueError: It is not YAML, has several documents, an anchor, or is too deep.
        MissingExtra: PyYAML is not installed.
    """
    try:
        import yaml
    except ImportError as error:
        fix = 'pip install "headway[yaml]", or write the same keys as JSON.'
        raise MissingExtra("PyYAML is not installed, which reads YAML", fix=fix) from error
    try:
        _check_events(yaml, text)
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            lines: dict[KeyPath, int] = {}
            return None if node is None else _value(yaml, loader, node, (), lines), lines
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise ValueError(f"{error.problem or error.context}{place}") from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def _check_events(yaml: Any, text: str) -> None:
    """Before anything is built: code that walks a document recursively has a limit."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if getattr(event, "anchor", None):
            line = event.start_mark.line + 1
            raise ValueError(f"it has an anchor or alias, {event.anchor!r} (line {line})")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ValueError(f"tables and lists are nested more than {MAX_DEPTH} deep")


def _value(yaml: Any, loader: Any, node: Any, path: KeyPath, lines: dict[KeyPath, int]) -> Any:
    if isinstance(node, yaml.SequenceNode):
        return [
            _value(yaml, loader, item, (*path, str(number)), lines)
            for number, item in enumerate(node.value)
        ]
    if not isinstance(node, yaml.MappingNode):
        value = loader.construct_object(node)
        if isinstance(value, int) and abs(value) > MAX_INTEGER:
            line = node.start_mark.line + 1
            raise ValueError(f"a whole number has more than 64 bits (line {line})")
        return value
    table: dict[str, Any] = {}
    for key, inner in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise ValueError(f"a key is no text (line {line})")
        name = str(key.value)
        if name in table:
            raise ValueError(f"the same key stands twice: {name} (line {line})")
        lines[(*path, name)] = line
        table[name] = _value(yaml, loader, inner, (*path, name), lines)
    return table
