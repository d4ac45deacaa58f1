"""single: every exported name exists, and every list of exports is sorted and complete."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import headway

SOURCE = Path(headway.__file__).parent
MODULES = sorted(m.name for m in pkgutil.walk_packages([str(SOURCE)], "headway."))
PACKAGES = sorted(path.parent for path in SOURCE.rglob("__init__.py"))


def name_of(package):
    return ".".join(("headway", *package.relative_to(SOURCE).parts))


def test_the_public_names_are_sorted_and_can_be_imported():
    assert headway.__all__ == sorted(set(headway.__all__))
    for name in headway.__all__:
        assert getattr(headway, name) is not None


def test_the_lazy_homes_and_the_type_checkers_imports_agree_with_all():
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("headway")
        for alias in node.names
    }
    assert imported == set(headway.__all__)


PUBLIC = """
    Channel CheckpointDamaged CheckpointError CheckpointMismatch Cluster ComparisonResult DataError
    Diverged
    DocumentError EquivalenceResult Exchange ExchangePlan Executor HeadwayError
    ImportedConfiguration LayerSplit
    MemmapSource MissingExtra NotEqual NothingFits PeerLost PipelinePlan Plan PlanError
    PlanningResult Prediction Recipe RecipeError RunDirectoryTaken RunError SimulationResult
    SimulationScenario Source Stalled StudyResult Timeline TrainingObserver TrainingResult
    UsageError
    VerificationResult WorkerFailed WorkerFigures WorkerScenario compare criterion
    data_parallel import_configuration plan register_backend
    register_comm_hook replicate set_default_strategy simulate split stage study train verify
"""


def test_the_public_surface_is_this_list():
    assert headway.__all__ == PUBLIC.split()
    assert set(dir(headway)) == {*PUBLIC.split(), "__version__"}


def test_every_error_that_users_meet_is_public():
    errors = importlib.import_module("headway.errors")
    kinds = {n for n, kind in vars(errors).items() if isinstance(kind, type) and n[0] != "_"}
    assert {n for n in kinds if issubclass(getattr(errors, n), Exception)} <= set(headway.__all__)


def test_a_public_name_never_hides_a_submodule():
    """Python binds a submodule to its package when it is imported: a function would be gone."""
    modules = {path.stem for path in SOURCE.glob("*.py")}
    folders = {path.name for path in PACKAGES if path.parent == SOURCE}
    assert not (modules | folders) & set(headway.__all__)


@pytest.mark.parametrize("first", ["headway.plans.plan", "headway.planner", "headway.api.planning"])
def test_plan_is_the_function_whatever_is_imported_first(first):
    code = (
        f"import {first}, headway\n"
        "assert callable(headway.plan)\n"
        "import headway.plans.plan, headway.cli.plan.search\n"
        "assert headway.plan is headway.api.planning.plan and headway.plans.Plan is headway.Plan\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Executer'"):
        _ = headway.Executer


def test_every_folder_with_python_files_is_a_package():
    folders = {path.parent for path in SOURCE.rglob("*.py")}
    assert folders == set(PACKAGES)


@pytest.mark.parametrize("module", MODULES)
def test_every_module_imports_and_its_exports_are_right(module):
    if module.endswith("__main__"):
        return
    exports = getattr(importlib.import_module(module), "__all__", None)
    if exports is not None:
        assert list(exports) == sorted(set(exports))
        for name in exports:
            assert hasattr(importlib.import_module(module), name), name


@pytest.mark.parametrize("package", PACKAGES[1:], ids=name_of)
def test_a_package_exports_what_it_imports(package):
    """A name that `__init__.py` takes from its own modules is public, or has no place there."""
    tree = ast.parse((package / "__init__.py").read_text())
    taken = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(name_of(package))
        for alias in node.names
    }
    exports = set(getattr(importlib.import_module(name_of(package)), "__all__", ()))
    assert taken <= exports


def test_the_bare_package_has_docstrings_everywhere():
    for path in SOURCE.rglob("*.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), path
