"""The work of one translation: values of keys, what they became, and what is wrong with them.

A format's function asks for values and says what they became; `Translation.finish` gives every key
that it has not mentioned the fate of the format's table. Problems are collected, so that a file is
refused once, with all of them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.documents import MAX_INTEGER, nearest
from headway.errors import DocumentError
from headway.migration.configuration_file import ConfigurationFile, KeyPath, leaves
from headway.migration.key_table import FATES, KINDS, Fate, Key, KeyTable, normal
from headway.migration.settings import ImportedSettings, settings_of


@dataclass(frozen=True, kw_only=True)
class KeyOutcome:
    """What became of one key.

    Attributes:
        key: Dotted.
        value: As the file has it, shortened; of a default, with the word "default".
        line: Of the file; None: a default of the framework, which the file leaves as it is.
        became: Field and value, as recipe.toml has them: "zero = 2"; "": nothing.
        note: Why, and what to do instead.
    """

    key: str
    value: str
    line: int | None
    fate: Fate
    became: str = ""
    note: str = ""

    def __str__(self) -> str:
        """ "zero = 2", "does not carry over: ..."."""
        said = {"carried": self.became, "adapted": self.became}.get(self.fate, FATES[self.fate])
        return f"{said}: {self.note}" if said and self.note else said or self.note


@dataclass(frozen=True, kw_only=True)
class TranslatedConfiguration:
    """A configuration of another framework in headway's words.

    Attributes:
        rows: Every key of the file, in its order.
        defaults: Of the framework, which the file leaves as they are and which differ from
            headway's.
    """

    path: Path
    title: str
    settings: ImportedSettings
    rows: tuple[KeyOutcome, ...]
    defaults: tuple[KeyOutcome, ...]

    def count(self, fate: Fate) -> int:
        """Keys of the file with this fate."""
        return Counter(row.fate for row in self.rows)[fate]


def shown(value: Any) -> str:
    """A value as TOML has it (as JSON where TOML has no form: null, lists of lists)."""
    return json.dumps(value, default=str, ensure_ascii=False)


class Translation:
    """What a format's function works with.

    Args:
        prefix: In front of the keys of a file inside another one.
        fields: Of the settings; shared with the translation of an inner file.
    """

    def __init__(
        self,
        file: ConfigurationFile,
        table: KeyTable,
        *,
        data: Mapping[str, Any] | None = None,
        prefix: str = "",
        outer: Translation | None = None,
    ) -> None:
        self.file = file
        self.table = table
        self._prefix = prefix
        self.fields: dict[str, Any] = {} if outer is None else outer.fields
        self._said: dict[str, str] = {} if outer is None else outer._said
        self._leaves = dict(leaves(file.data if data is None else data))
        self._values: dict[str, Any] = {}
        self._outcomes: dict[KeyPath, KeyOutcome] = {}
        self._defaults: list[KeyOutcome] = []
        self.inner: dict[KeyPath, Translation] = {}
        self.problems: list[tuple[int, str]] = []
        for path, value in self._leaves.items():
            self._check(path, value)

    def _check(self, path: KeyPath, value: Any) -> None:
        key, name = self.table.find(path), ".".join(path)
        if key is None or self._is_empty(value) or self.is_auto(name):
            return
        try:
            self._values[name] = normal(key.kind, value)
        except (ValueError, OverflowError):
            if not (isinstance(value, dict | list) and key.kind == "any"):
                self.problem(name, f"{_short(value)} is not {KINDS[key.kind]}")

    @staticmethod
    def _is_empty(value: Any) -> bool:
        return value is None or value in ({}, [], "")

    # ---- what the file says -------------------------------------------------------------------

    def value(self, *names: str) -> Any:
        """The value of the first of these keys that has one; None: none, or it is left to others.

        Args:
            names: Those that versions of the format give it.
        """
        return next((self._values[name] for name in names if name in self._values), None)

    def named(self, *names: str) -> str:
        """Which of the names of a key the file has; the first where it has none."""
        return next((name for name in names if tuple(name.split(".")) in self._leaves), names[0])

    def is_auto(self, name: str) -> bool:
        """Whether a value is left to another program."""
        word = self.table.auto
        return bool(word) and self._leaves.get(tuple(name.split("."))) == word

    def has(self, section: str) -> bool:
        """Whether the file has this key or table."""
        parts = tuple(section.split("."))
        return any(path[: len(parts)] == parts for path in self._leaves)

    def below(self, section: str) -> dict[str, Any]:
        """The values directly in a table that are neither empty nor left to others."""
        parts = tuple(section.split("."))
        return {
            path[-1]: self._values.get(".".join(path), value)
            for path, value in self._leaves.items()
            if path[:-1] == parts and not self._is_empty(value) and not self.is_auto(".".join(path))
        }

    def enabled(self, section: str) -> bool:
        """Whether a section with a switch is on."""
        switch = next(s for s in self.table.switches if s.section == section)
        said = self.value(*(f"{section}.{key}" for key in switch.keys))
        return switch.default if said is None else bool(said)

    def whole(self, *names: str, least: int = 1) -> int | None:
        """A whole number of at least `least`; a smaller one is a problem."""
        found = self.value(*names)
        if found is not None and found < least:
            self.problem(self.named(*names), f"{found} is not a whole number of at least {least}")
            return None
        return found if found is None else int(found)

    def positive(self, *names: str) -> float | None:
        """A number from 0 on; a negative one is a problem."""
        found = self.value(*names)
        if found is not None and found < 0:
            self.problem(self.named(*names), f"{found} is not a number of at least 0")
            return None
        return None if found is None else float(found)

    def word(self, name: str, legal: Sequence[str], *, fold: bool = False) -> str | None:
        """One of some words; another one is a problem that names the nearest.

        Args:
            fold: Upper and lower case are the same; the word is returned as `legal` has it.
        """
        found = self.value(name)
        if found is None:
            return None
        for one in legal:
            if one == found or (fold and one.lower() == str(found).lower()):
                return one
        self.problem(name, f"{_short(found)} is none of its values{nearest(str(found), legal)}")
        return None

    # ---- what became of it --------------------------------------------------------------------

    def carry(self, name: str, field: str, value: Any, note: str = "", *, form: str = "") -> None:
        """A key decides a field.

        Args:
            note: Given where the field does not mean just the same; the fate is "adapted" then.
            form: What to show in place of field and value.
        """
        self._set(name, field, value)
        became = form or f"{field} = {shown(value)}"
        self._tell(name, "adapted" if note else "carried", became, note)

    def _set(self, name: str, field: str, value: Any) -> None:
        before = self.fields.get(field, value)
        if before != value:
            other = self._said[field]
            text = f"{field} = {shown(value)} contradicts {other}, which says {shown(before)}"
            self.problem(name, text)
            return
        self.fields[field] = value
        self._said.setdefault(field, name)

    def tell(self, name: str, fate: Fate, note: str, became: str = "") -> None:
        """A key decides no field, and this is why."""
        self._tell(name, fate, became, note)

    def _tell(self, name: str, fate: Fate, became: str, note: str) -> None:
        path = tuple(name.split("."))
        if path in self._leaves:
            self._outcomes[path] = self._outcome(path, fate, became, note)

    def default(self, name: str, value: Any, field: str, note: str = "") -> None:
        """A default of the framework, which the file leaves as it is; says nothing where it does
        not."""
        path = tuple(name.split("."))
        if path not in self._leaves:
            said = f"{shown(value)} (default)"
            row = KeyOutcome(
                key=f"{self._prefix}{name}",
                value=said,
                line=None,
                fate="adapted" if note else "carried",
                became=field,
                note=note,
            )
            self._defaults.append(row)

    def problem(self, name: str, text: str) -> None:
        """Something that the file must not say; it is refused in the end."""
        path = tuple(name.split("."))
        line = next(
            (
                self.file.lines[path[:length]]
                for length in range(len(path), 0, -1)
                if path[:length] in self.file.lines
            ),
            0,
        )
        where = f"{self.file.path}:{line}" if line else str(self.file.path)
        self.problems.append((line, f"{where}  {name}: {text}" if name else f"{where}  {text}"))

    # ---- the end ------------------------------------------------------------------------------

    def finish(self) -> TranslatedConfiguration:
        """The settings and a row for each key.

        Raises:
            DocumentError: The file has problems; all are listed.
        """
        for field, value in self.fields.items():
            # A product of numbers that are legal each.
            if isinstance(value, int) and value > MAX_INTEGER:
                self.problem(self._said.get(field, ""), f"{field} would be {value:.3g}")
        translations = [self, *self.inner.values()]
        problems = [text for t in translations for _, text in sorted(t.problems)]
        if problems:
            problems = list(dict.fromkeys(problems))
            count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
            raise DocumentError(f"{count}:", where=str(self.file.path), problems=problems)
        return TranslatedConfiguration(
            path=self.file.path,
            title=self.table.title,
            settings=settings_of(self.fields),
            rows=tuple(self._rows()),
            defaults=tuple(row for t in translations for row in t._defaults),
        )

    def _rows(self) -> list[KeyOutcome]:
        rows = []
        for path in self._leaves:
            rows.append(self._outcomes.get(path) or self._fate_of_table(path))
            if path in self.inner:
                rows += self.inner[path]._rows()
        return rows

    def _fate_of_table(self, path: KeyPath) -> KeyOutcome:
        key, value, name = self.table.find(path), self._leaves[path], ".".join(path)
        if key is None:
            note = f"no version of {self.table.title} that headway knows has it"
            return self._outcome(path, "unknown", "", note + self.table.meant(path))
        if self._is_empty(value):
            return self._outcome(path, "off", "", "")
        if off := self._switched_off(path):
            return self._outcome(path, "off", "", off)
        if self.is_auto(name):
            instead = f"; {key.field} is the field" if key.field else ""
            return self._outcome(path, "lost", "", self.table.auto_note + instead)
        if self._values.get(name, value) in key.idle:
            return self._outcome(path, "off", "", "")
        if key.fate in ("carried", "adapted"):
            return self._outcome(path, "off", "", _without_effect(key))
        return self._outcome(path, key.fate, "", key.note)

    def _switched_off(self, path: KeyPath) -> str:
        for switch in self.table.switches:
            parts = tuple(switch.section.split("."))
            if path[: len(parts)] == parts and not self.enabled(switch.section):
                return (
                    ""
                    if path[len(parts) :] in {(key,) for key in switch.keys}
                    else (f"{switch.section} is off")
                )
        return ""

    def _outcome(self, path: KeyPath, fate: Fate, became: str, note: str) -> KeyOutcome:
        return KeyOutcome(
            key=f"{self._prefix}{'.'.join(path)}",
            value=_short(self._leaves[path]),
            line=self.file.lines.get(path, 0),
            fate=fate,
            became=became,
            note=note,
        )


def _without_effect(key: Key) -> str:
    return key.note or "it has no effect beside the other keys of this file"


def _short(value: Any) -> str:
    text = shown(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
