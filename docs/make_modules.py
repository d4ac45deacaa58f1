"""Writes docs/modules.md: what each module is for, from the first paragraph of its docstring.

python docs/make_modules.py
"""

from __future__ import annotations

import ast
from pathlib import Path

PAGE = Path(__file__).parent / "modules.md"
SOURCE = Path(__file__).parents[1] / "src" / "headway"
HEAD = """# All modules, one line each

Written by `docs/make_modules.py` from the first paragraph of each docstring; a test holds it.
The folders and their order are explained in [ARCHITECTURE.md](../ARCHITECTURE.md), together with a
table of frequent changes. Paths are below `src/headway/`.
"""


def purpose(file: Path) -> str:
    """The first paragraph of a module's docstring, on one line."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n", 1)[0].split())


def page() -> str:
    """The page as it should be."""
    files = [file for file in SOURCE.rglob("*.py") if not file.name.startswith("__")]
    folders = sorted({file.parent for file in files})
    lines = [HEAD]
    for folder in folders:
        name = folder.relative_to(SOURCE).as_posix()
        lines += [f"## {'headway' if name == '.' else name + '/'}", ""]
        here = sorted(file for file in files if file.parent == folder)
        lines += [f"- `{file.name}`: {purpose(file)}" for file in here]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
