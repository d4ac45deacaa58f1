"""The planted bugs as data: which line of which file becomes which, and what must be said of it.

A bug is an entry of one of the TOML files beside this one. Nothing here imports torch or headway.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, fields
from difflib import SequenceMatcher
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE.parent.parent / "src" / "headway"
FOLDERS = ("comm", "parallel", "run", "optim", "data", "checkpoint", "collective", "synchrony")


@dataclass(frozen=True, kw_only=True)
class Bug:
    """One line that is wrong.

    Attributes:
        name: Of the bug, in a few words; unique.
        family: The name of the file it is listed in: what kind of plan it is about.
        file: Below src/headway.
        old: Text that occurs exactly once in the file; lines around the wrong one make it unique.
        new: What stands there instead; differs in one line.
        case: The recipe and plan that reach the line; see `mutations.cases`.
        says: Regular expression that the verdict must contain: the tensor, bucket or law.
        survives: Why the bug is not found today; empty: it is.
    """

    name: str
    family: str
    file: str
    old: str
    new: str
    case: str
    says: str
    survives: str = ""

    @property
    def path(self) -> Path:
        return SOURCES / self.file

    @property
    def module(self) -> str:
        """The dotted name of the file."""
        parts = ("headway", *Path(self.file).with_suffix("").parts)
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def source(self) -> str:
        """The file with the bug in it."""
        return self.path.read_text(encoding="utf-8").replace(self.old, self.new)

    def problems(self) -> list[str]:
        """What is wrong with the entry itself, or with the source that it is about."""
        found = []
        if Path(self.file).parts[0] not in FOLDERS:
            found.append(f"{self.file} is in none of {', '.join(FOLDERS)}")
        if not self.path.exists():
            return [*found, f"there is no src/headway/{self.file}"]
        count = self.path.read_text(encoding="utf-8").count(self.old)
        if count != 1:
            found.append(f"the old text occurs {count} times in src/headway/{self.file}")
        if changed_lines(self.old, self.new) != 1:
            found.append("old and new text do not differ in exactly one line")
        try:
            compile(self.source(), self.file, "exec", dont_inherit=True)
        except SyntaxError as error:
            found.append(f"the new text is no Python: {error}")
        try:
            re.compile(self.says)
        except re.error as error:
            found.append(f"`says` is no regular expression: {error}")
        return found


def changed_lines(old: str, new: str) -> int:
    """How many lines were changed, added or removed."""
    steps = SequenceMatcher(None, old.splitlines(), new.splitlines(), autojunk=False).get_opcodes()
    return sum(max(b - a, d - c) for tag, a, b, c, d in steps if tag != "equal")


def read_bugs(folder: Path = HERE) -> list[Bug]:
    """All bugs, by family and in the order of the files.

    Raises:
        ValueError: An entry has an unknown key, lacks one, or a name stands twice.
    """
    known = {field.name for field in fields(Bug)} - {"family"}
    found: dict[str, Bug] = {}
    for path in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(path.read_text(encoding="utf-8"))["bug"]:
            where = f"{path.name}, {entry.get('name', entry)}"
            if unknown := set(entry) - known:
                raise ValueError(f"{where}: unknown {', '.join(sorted(unknown))}")
            if missing := known - {"survives"} - set(entry):
                raise ValueError(f"{where}: without {', '.join(sorted(missing))}")
            bug = Bug(family=path.stem, **entry)
            if bug.name in found:
                raise ValueError(f"{where}: the name stands twice")
            found[bug.name] = bug
    return list(found.values())
