"""The table of a format's keys, as data: what each may hold, and what becomes of it.

A table answers for every key of a file of its format. The functions that translate take the keys
whose meaning depends on others; the rest has the fate that stands here. `docs/make_migration.py`
writes the tables of docs/migration.md from the same data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from headway.documents import nearest
from headway.migration.configuration_file import KeyPath

Fate = Literal["carried", "adapted", "unneeded", "off", "lost", "unknown"]
FATES: Mapping[Fate, str] = {
    "carried": "carried over",
    "adapted": "carried over, changed",
    "unneeded": "not needed",
    "off": "off",
    "lost": "does not carry over",
    "unknown": "unknown key",
}
"""In words, as they are printed."""

Kind = Literal["whole", "number", "flag", "text", "list", "any"]
KINDS: Mapping[Kind, str] = {
    "whole": "a whole number",
    "number": "a number",
    "flag": "true or false",
    "text": "a text",
    "list": "a list",
    "any": "a value",
}
_YES, _NO = ("true", "yes", "on"), ("false", "no", "off")


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key, or all below it where the name ends with ".*".

    Attributes:
        name: Dotted, as in "zero_optimization.stage".
        fate: What becomes of it where no function has taken it; "carried" and "adapted": one does.
        field: The field of a recipe or plan that it becomes.
        note: Why it is as it is, and what to do instead.
        idle: Values with which it does nothing, so that nothing is lost.
    """

    name: str
    kind: Kind = "any"
    fate: Fate = "unneeded"
    field: str = ""
    note: str = ""
    idle: tuple[object, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Switch:
    """A section that has an effect only where its own key says so.

    Attributes:
        keys: Its names in different versions of the format.
    """

    section: str
    keys: tuple[str, ...] = ("enabled",)
    default: bool = False


@dataclass(frozen=True, kw_only=True)
class KeyTable:
    """All keys of a format.

    Attributes:
        title: The format, for people.
        auto: The word that leaves a value to another program; "": there is none.
        auto_note: Who fills it in, and what to do.
    """

    title: str
    keys: tuple[Key, ...]
    switches: tuple[Switch, ...] = ()
    auto: str = ""
    auto_note: str = ""

    @cached_property
    def _by_name(self) -> Mapping[str, Key]:
        return {key.name: key for key in self.keys}

    def find(self, path: KeyPath) -> Key | None:
        """The key of a path; None: no version of the format that headway knows has it."""
        if any("." in part for part in path):
            return None
        name = ".".join(path)
        if name in self._by_name:
            return self._by_name[name]
        for length in range(len(path), 0, -1):
            if found := self._by_name.get(".".join((*path[:length], "*"))):
                return found
        return None

    def known_at(self, path: Sequence[str]) -> list[str]:
        """The names that may stand in the table at a path."""
        names = (tuple(key.name.split(".")) for key in self.keys)
        depth = len(path)
        return sorted(
            {
                name[depth]
                for name in names
                if len(name) > depth and name[:depth] == tuple(path) and name[depth] != "*"
            }
        )

    def meant(self, path: KeyPath) -> str:
        """The suffix of a message on an unknown key: the nearest known name."""
        for depth in range(len(path)):
            known = self.known_at(path[:depth])
            if path[depth] not in known:
                said = nearest(path[depth], known)
                return said if said.startswith("; did") else ""
        return ""

    def share(self, data: Mapping[str, Any]) -> float:
        """The part of a file's keys at the top that this format has."""
        known = set(self.known_at(()))
        return sum(name in known for name in data) / len(data) if data else 0.0


def normal(kind: Kind, value: Any) -> Any:
    """A value as its kind has it: texts that are numbers are numbers, as the frameworks read them.

    Raises:
        ValueError: It is none of the kind.
    """
    match kind:
        case "flag" if isinstance(value, bool):
            return value
        case "flag" if isinstance(value, str) and value.lower() in (*_YES, *_NO):
            return value.lower() in _YES
        case "text" if isinstance(value, str):
            return value
        # YAML 1.1 reads an unquoted `no` as a truth value.
        case "text" if isinstance(value, bool):
            return "yes" if value else "no"
        case "list" if isinstance(value, list):
            return value
        case "list" if isinstance(value, str):
            return [part.strip() for part in value.split(",") if part.strip()]
        case "whole" | "number":
            return _number(kind, value)
        case "any":
            return value
    raise ValueError


def _number(kind: Kind, value: Any) -> int | float:
    if isinstance(value, str):
        # "5e8" in JSON, and YAML's 1e-5, which has no point and is a text there.
        value = float(value) if len(value) <= 40 else math.nan
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError
    if kind == "number":
        return value
    if value != int(value):
        raise ValueError
    return int(value)
