"""Checks a recipe reference in milliseconds, without torch and without the user's code.

A reference is a path to a .toml file, "module:function", or the short name of a bundled workload.
`check_recipe` finds wrong keys and amounts, missing modules, and names that a module does not
define.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from headway.documents import find_line, nearest
from headway.errors import DocumentError, RecipeError, shown_path
from headway.run.recipe.schema import (
    AnyRecipe,
    DataTable,
    LossTable,
    RecipeCall,
    RecipeDocument,
    RecipeReference,
    given_keys,
    nested_calls,
    read_recipe,
    reference_recipe,
)
from headway.run.recipe.user_code import (
    gives_keyword,
    importable_folders,
    locate_reference,
    split_reference,
)

WORKLOADS = "headway.workloads"


@dataclass(frozen=True, kw_only=True)
class CheckedRecipe:
    """A recipe that was found and checked, and not yet built.

    Attributes:
        document: The checked document; for a function, the document that stands for it.
        name: The run's name, as far as it is known without running the user's code.
        folders: Where the user's modules are looked for, before the installed packages.
        keys: Of [exchange], [pipeline] and [synchrony], the keys that are given; the rest is
            the function's.
    """

    reference: str
    document: AnyRecipe
    name: str
    file: Path | None
    folders: tuple[Path, ...]
    keys: Mapping[str, tuple[str, ...]]

    @property
    def hides_synchrony(self) -> bool:
        """Whether only the recipe's function, once called, tells who agrees with whom, and the
        document or the text of the function's module says something of it."""
        if not isinstance(self.document, RecipeReference):
            return False
        with importable_folders(*self.folders):
            return self.document.synchrony is not None or gives_keyword(
                self.document.recipe, "synchrony"
            )

    def where(self, key: str) -> str:
        """The place of a table or key, for messages: "recipe.toml:12"."""
        if self.file is None:
            return ""
        line = find_line(self.file.read_text(encoding="utf-8"), key.split("."))
        return f"{self.file}:{line}" if line else str(self.file)


def check_recipe(reference: str, overrides: Sequence[str] = ()) -> CheckedRecipe:
    """Find and check a recipe without running the user's code.

    Raises:
        RecipeError: Nothing has this name, or one thing that it names does not exist.
        DocumentError: The file or the overrides have problems; all are listed.
    """
    checked = _find(reference, overrides)
    with importable_folders(*checked.folders):
        _locate_all(checked)
    return checked


def workload_names() -> list[str]:
    """The short names of the bundled workloads."""
    spec = importlib.util.find_spec(WORKLOADS)
    if spec is None or spec.submodule_search_locations is None:
        return []
    places = [Path(place) for place in spec.submodule_search_locations]
    files = (file for place in places for file in place.glob("*.py"))
    # "des-fm" is the module des_fm.
    return sorted({file.stem.replace("_", "-") for file in files if file.stem != "__init__"})


def _find(reference: str, overrides: Sequence[str]) -> CheckedRecipe:
    path, here = Path(reference), Path.cwd()
    # Not `Path.is_file`, which raises where a name is too long for a file.
    if path.suffix == ".toml" or os.path.isfile(path):
        _refuse_other_files(path)
        document = read_recipe(path, overrides)
        folders = tuple(dict.fromkeys((path.resolve().parent, here)))
        name = document.name or _name_of(document)
        return CheckedRecipe(
            reference=reference,
            document=document,
            name=name,
            file=path,
            folders=folders,
            keys=given_keys(path, overrides),
        )
    target = reference if ":" in reference else _workload(reference)
    split_reference(target)
    found = reference_recipe(target, overrides)
    return CheckedRecipe(
        reference=reference,
        document=found,
        name=found.name or (_name_of(found) if ":" in reference else reference),
        file=None,
        folders=(here,),
        keys=given_keys(None, overrides),
    )


def _refuse_other_files(path: Path) -> None:
    if path.suffix != ".toml" and os.path.isfile(path):
        fix = "Write a recipe.toml, or name a function."
        if path.suffix == ".py":
            fix = f"Name its function that returns a Recipe, for example {path.stem}:recipe"
        raise RecipeError("is not a .toml file", where=str(path), fix=fix)
    if not os.path.exists(path):
        close = nearest(path.name, [file.name for file in path.parent.glob("*.toml")])
        raise RecipeError(f"there is no such file{close}", where=shown_path(path))


def _workload(name: str) -> str:
    legal = workload_names()
    if name.replace("_", "-") in legal:
        return f"{WORKLOADS}.{name.replace('-', '_')}:recipe"
    raise RecipeError(
        f"no recipe is called {name!r}{nearest(name, legal)}",
        why="A recipe is a path to a .toml file, module:function, or a bundled workload's name.",
    )


def _name_of(document: AnyRecipe) -> str:
    """A name for the run: the function's, or its module's where the function says nothing."""
    assert isinstance(document, RecipeReference)
    module, _, function = document.recipe.partition(":")
    parts = [part for part in module.split(".") if part != "recipe"] or ["run"]
    name = parts[-1] if function in {"recipe", "main"} else function
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name)


def _locate_all(checked: CheckedRecipe) -> None:
    errors = []
    for key, reference in _references(checked.document):
        try:
            locate_reference(reference, where=checked.where(key))
        except RecipeError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise DocumentError(
            f"{len(errors)} problems:",
            where=str(checked.file or checked.reference),
            problems=[f"{error.where}  {error.what}" for error in errors],
        )


def _references(document: AnyRecipe) -> Iterator[tuple[str, str]]:
    """Every "module:name" of a document, with its dotted key."""
    if isinstance(document, RecipeReference):
        yield "recipe", document.recipe
    for part in fields(document):
        table = getattr(document, part.name)
        if isinstance(table, RecipeCall | DataTable | LossTable):
            for key in ("call", "criterion"):
                reference = getattr(table, key, None)
                if reference is not None:
                    yield f"{part.name}.{key}", reference
        cache = table.cache if isinstance(table, DataTable) else None
        for key in ("prepare", "augment") if cache else ():
            reference = getattr(cache, key)
            if reference is not None:
                yield f"{part.name}.cache.{key}", reference
    if document.pipeline is not None and document.pipeline.by_hand:
        yield "pipeline.by_hand", document.pipeline.by_hand
    if isinstance(document, RecipeDocument) and document.scheduler is not None:
        yield from _nested("scheduler", document.scheduler)


def _nested(key: str, table: RecipeCall) -> Iterator[tuple[str, str]]:
    for name, inner in nested_calls(table.arguments).items():
        yield f"{key}.{name}.call", inner.call
        yield from _nested(f"{key}.{name}", inner)
