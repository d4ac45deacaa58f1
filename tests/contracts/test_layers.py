"""pure: the direction of the imports (import-linter), and that its lists cover every folder."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import grimp

import headway

SOURCE = Path(headway.__file__).parent
ROOT = Path(__file__).parent.parent.parent
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
    "contracts"
]


def contract(words):
    return next(c for c in CONTRACTS if words in c["name"])


def parts():
    """The top-level modules and packages."""
    files = {path.stem for path in SOURCE.glob("*.py")} - {"__init__", "__main__"}
    return files | {path.parent.name for path in SOURCE.glob("*/__init__.py")}


def lines():
    """The layers; brackets mark those that may still be absent."""
    return [
        {p.strip("()") for p in line.split(" : ")} for line in contract("lines below")["layers"]
    ]


def test_imports_go_down_only():
    done = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_folder_has_its_line():
    assert parts() <= set().union(*lines())


def test_the_pure_plane_is_every_line_up_to_the_planner_and_the_report():
    planes = lines()
    start = next(i for i, line in enumerate(planes) if "planner" in line)
    pure = set().union(*planes[start:]) | {"report"}
    rule = contract("never imports torch")
    assert rule["forbidden_modules"] == ["torch"]
    assert {name.removeprefix("headway.") for name in rule["source_modules"]} == pure & parts()


def test_no_part_of_the_library_may_import_a_workload():
    rule = contract("imports a workload")
    assert rule["forbidden_modules"] == ["headway.workloads"]
    listed = {name.removeprefix("headway.") for name in rule["source_modules"]}
    lowest = {"documents", "units", "errors", "user_frames", "cache_folders", "atomic_files"}
    assert parts() - listed == {"workloads", *lowest}


def test_the_executor_does_not_know_how_a_plan_was_found():
    """import-linter cannot forbid folders that do not exist yet; its graph can be asked."""
    graph = grimp.build_graph("headway", cache_dir=None)
    planes = lines()
    start = next(i for i, line in enumerate(planes) if "run" in line)
    end = next(i for i, line in enumerate(planes) if "planner" in line)
    obeying = tuple(f"headway.{part}" for line in planes[start:end] for part in line)
    judging = tuple(f"headway.{part}" for part in ("planner", "simulator", "cost"))
    assert "headway.run" in obeying
    assert "headway.comm" in obeying
    found = [
        f"{importer} imports {imported}"
        for importer in graph.modules
        if importer.startswith(obeying)
        for imported in graph.find_modules_directly_imported_by(importer)
        if imported.startswith(judging)
    ]
    assert found == []
