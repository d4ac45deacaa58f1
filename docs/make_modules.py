"""Writes docs/modules.md: what each module is for, and the public names that it defines.

python docs/make_modules.py
"""

from __future__ import annotations

import ast
from pathlib import Path

PAGE = Path(__file__).parent / "modules.md"
SOURCE = Path(__file__).parents[1] / "src" / "headway"
HEAD = """# All modules: what each is for, and what it defines

Written by `docs/make_modules.py` from the first paragraph of each docstring, with the module's
public classes, functions and constants in the order of the file; a test holds it.
The folders and their order are explained in [ARCHITECTURE.md](../ARCHITECTURE.md), together with a
table of frequent changes. Paths are below `src/headway/`.
"""


def purpose(tree: ast.Module) -> str:
    """The first paragraph of a module's docstring, on one line."""
    text = ast.get_docstring(tree) or ""
    return " ".join(text.split("\n\n", 1)[0].split())


def definitions(tree: ast.Module) -> list[str]:
    """The public classes, functions, constants and types that a module defines, in its order."""
    names: list[str] = []
    for node in tree.body:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                names.append(name)
            case ast.Assign(value=ast.Call(func=ast.Name(id="TypeVar"))):
                continue
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                names.append(name)
    return [name for name in names if not name.startswith("_")]


def entry(file: Path) -> str:
    """A module's item in the list."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    names = ", ".join(f"`{name}`" for name in definitions(tree))
    return f"- `{file.name}`: {purpose(tree)}" + (f"\n  Defines {names}." if names else "")


def page() -> str:
    """The page as it should be."""
    files = [file for file in SOURCE.rglob("*.py") if not file.name.startswith("__")]
    folders = sorted({file.parent for file in files})
    lines = [HEAD]
    for folder in folders:
        name = folder.relative_to(SOURCE).as_posix()
        lines += [f"## {'headway' if name == '.' else name + '/'}", ""]
        here = sorted(file for file in files if file.parent == folder)
        lines += [entry(file) for file in here]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
