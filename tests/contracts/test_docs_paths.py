"""pure: every module, file and function that the documentation names exists in the source.

Read from the source text, so that nothing has to be imported. A path may leave out `src/headway/`
where it begins with one of headway's folders; in the README of a room it may be relative to the
room. A bare `name.py` of a page under `docs/` is any file of the repository, or one that the page
itself writes. `path.py:name` and `path.py:Class.method` also name something that the file defines.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SOURCE = ROOT / "src" / "headway"
ROOMS = sorted(init.parent for init in SOURCE.rglob("__init__.py") if init.parent != SOURCE)
PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")),
        *ROOT.glob("docs/**/*.md"),
        *SOURCE.rglob("README.md"),
    ]
)
FOLDERS = "|".join(room.name for room in ROOMS if room.parent == SOURCE)
FULL = re.compile(r"\bsrc/headway/[\w/]+(?:\.py)?")
SHORT = re.compile(rf"`((?:{FOLDERS})/[\w/]*(?:\.py)?)(?::[\w.]+)?`")
LOCAL = re.compile(r"`([\w/]+\.py)(?::[\w.]+)?`")
BARE = re.compile(r"`(\w+\.py)`")
FUNCTION = re.compile(r"`([\w/]+\.py):([A-Za-z_][\w.]*)`")
DOTTED = re.compile(r"\bheadway((?:\.[A-Za-z_]\w*)+)")
FILE_NAMES = ("toml", "json", "csv", "svg", "log", "yaml", "py")


@cache
def definitions(file: Path) -> frozenset[str]:
    """What a file defines or imports, as `name` and as `Class.member`."""
    found: set[str] = set()

    def collect(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(prefix + node.name)
                if isinstance(node, ast.ClassDef):
                    collect(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.Import | ast.ImportFrom):
                found.update(prefix + (alias.asname or alias.name) for alias in node.names)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found.update(prefix + name.id for name in targets if isinstance(name, ast.Name))
            elif isinstance(node, ast.If):  # `if TYPE_CHECKING:`
                collect(node.body, prefix)

    collect(ast.parse(file.read_text(encoding="utf-8")).body, "")
    return frozenset(found)


def is_dotted_name(name: str) -> bool:
    """Whether `headway.a.b.c` is a module, or something that a module defines."""
    parts = name.split(".")[1:]
    folder = SOURCE
    for number, part in enumerate(parts):
        if (folder / part / "__init__.py").exists():
            folder = folder / part
            continue
        module = folder / f"{part}.py"
        rest = parts[number + 1 :]
        if module.exists():
            return not rest or rest[0] in definitions(module)
        return part in definitions(folder / "__init__.py") | {"__version__"}
    return True


@cache
def python_files() -> set[str]:
    """The names of all files with code, wherever they are."""
    folders = ("src", "tests", "benchmarks", "docs")
    return {path.name for folder in folders for path in (ROOT / folder).rglob("*.py")}


def is_path(name: str, page: Path) -> bool:
    """Whether a path of the documentation leads to a file or folder."""
    bases = (ROOT, SOURCE, SOURCE / "..", ROOT / "tests", page.parent)
    return any((base / name).exists() for base in bases)


def unknown(page: Path) -> list[str]:
    """What a page names and the source does not have."""
    text = page.read_text(encoding="utf-8")
    paths = {*FULL.findall(text), *SHORT.findall(text)}
    if page.parent != ROOT and page.is_relative_to(SOURCE):
        paths.update(LOCAL.findall(text))
    found = [path for path in sorted(paths) if not is_path(path, page)]
    if page.parent == ROOT / "docs":
        known = python_files() | set(re.findall(r"^# ([\w/]+\.py)$", text, flags=re.MULTILINE))
        found += [file for file in sorted(set(BARE.findall(text))) if file not in known]
    for path, name in FUNCTION.findall(text):
        files = [base / path for base in (SOURCE, page.parent, ROOT) if (base / path).exists()]
        if files and name not in definitions(files[0]):
            found.append(f"{path}:{name}")
    dotted = sorted({f"headway{rest}" for rest in DOTTED.findall(text)})
    files = tuple(f".{kind}" for kind in FILE_NAMES)
    return found + [
        name for name in dotted if not name.endswith(files) and not is_dotted_name(name)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_docs_name_only_what_the_source_has(page):
    assert unknown(page) == []


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.relative_to(SOURCE)))
def test_each_room_has_a_short_readme(room):
    text = (room / "README.md").read_text(encoding="utf-8")
    assert text.startswith(f"# {room.relative_to(SOURCE)}: ")
    assert 5 <= len(text.splitlines()) <= 20
    for word in ("**In:**", "**Out:**", "**Begin with**"):
        assert word in text, word


def test_names_that_do_not_exist_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "`src/headway/plans/plan.py` `plans/plan.py:Plan` `plans/plan.py:Plan.save` headway.csv\n"
        "headway.plans.Plan headway.errors.PlanError `run/executor.py:Executor.step`\n"
        "`src/headway/absent.py` `plans/absent.py` `plans/plan.py:Absent` headway.plans.absent\n"
        "headway.Recipe headway.absent `run/executor.py:Executor.absent`\n"
    )
    assert unknown(page) == [
        "plans/absent.py",
        "src/headway/absent.py",
        "plans/plan.py:Absent",
        "run/executor.py:Executor.absent",
        "headway.absent",
        "headway.plans.absent",
    ]


@pytest.mark.parametrize("name", ["make_modules", "make_taxonomy"])
def test_a_page_that_is_made_is_that_of_the_source(name):
    """Made again by `python docs/make_modules.py`, `python docs/make_taxonomy.py`."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.PAGE.read_text(encoding="utf-8") == script.page()
