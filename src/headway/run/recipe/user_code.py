"""Importing and calling the user's code by "module:function", with errors at the user's line.

Whatever the user's code raises becomes a `RecipeError` that names the user's file and line, never
headway's; the original error is its cause. This module does not import torch; the user's code may.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.machinery
import importlib.util
import inspect
import linecache
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from headway.documents import nearest
from headway.errors import HeadwayError, RecipeError
from headway.user_frames import is_project_file


@contextmanager
def importable_folders(*folders: Path) -> Iterator[None]:
    """Make modules in `folders` importable inside the `with`; sys.path is the same after it."""
    before = sys.path.copy()
    sys.path[:0] = [str(folder) for folder in folders if str(folder) not in sys.path]
    # The import system caches the listing of a folder: a file written since would not be found.
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = before


def split_reference(reference: str, where: str = "") -> tuple[str, str]:
    """Module and attribute of "module:attribute".

    Raises:
        RecipeError: The reference has another form.
    """
    module, colon, name = reference.partition(":")
    if not (module and colon and name):
        raise RecipeError(
            f"{reference!r} is not of the form module:name",
            where=where,
            fix='Write for example "my_module:my_recipe".',
        )
    return module, name


def resolve_reference(reference: str, *, where: str = "") -> Any:
    """The object that "module:attribute" names; imports the module.

    Args:
        reference: "package.module:name" or "module:Class.method".

    Raises:
        RecipeError: The module or the attribute does not exist, or the module raises on import.
    """
    module_name, name = split_reference(reference, where)
    value: Any = _import(module_name, where)
    for part in name.split("."):
        if not hasattr(value, part):
            legal = [word for word in dir(value) if not word.startswith("_")]
            raise _missing_name(module_name, part, legal, where)
        value = getattr(value, part)
    return value


def locate_reference(reference: str, *, where: str = "") -> None:
    """Check, without running any code, that "module:attribute" exists as far as files can tell.

    Raises:
        RecipeError: The module cannot be found, is not Python, or does not define the name.
    """
    module_name, name = split_reference(reference, where)
    tree = _tree(module_name, where)
    if tree is None:
        return
    names = _defined(tree)
    first = name.split(".")[0]
    if names is not None and first not in names:
        raise _missing_name(module_name, first, [n for n in names if not n.startswith("_")], where)


def gives_keyword(reference: str, keyword: str) -> bool:
    """Whether any call in the text of a reference's module gives an argument of this name.

    Raises:
        RecipeError: The module cannot be found, or is not Python.
    """
    tree = _tree(split_reference(reference)[0], "")
    return tree is not None and any(
        isinstance(node, ast.keyword) and node.arg == keyword for node in ast.walk(tree)
    )


def _tree(module_name: str, where: str) -> ast.Module | None:
    """The text of a user's module; None of a library's."""
    spec = _find(module_name)
    if spec is None:
        raise _missing_module(module_name, where)
    if spec.origin is None or not spec.origin.endswith(".py") or not is_project_file(spec.origin):
        return None
    try:
        return ast.parse(Path(spec.origin).read_bytes(), filename=spec.origin)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _not_importable(module_name, error, where) from error


def call_user_function(
    function: Callable[..., Any], *values: Any, where: str = "", **arguments: Any
) -> Any:
    """Call the user's function; what it raises becomes a `RecipeError` at the user's line.

    Raises:
        RecipeError: The arguments do not fit, or the function raises.
    """
    check_arguments(function, values, arguments, where)
    try:
        return function(*values, **arguments)
    except HeadwayError:
        raise
    # `sys.exit` in the user's code would end the program without a word.
    except (Exception, SystemExit) as error:
        place, shown = user_frame(error)
        raise RecipeError(
            f"{describe_value(function)} raised {_reason(error)}",
            where=place or where,
            why=shown,
        ) from error


def check_arguments(
    function: Callable[..., Any], values: tuple[Any, ...], arguments: Mapping[str, Any], where: str
) -> None:
    """Raise unless the function can be called so.

    Raises:
        RecipeError: Names the unknown argument with the nearest legal one, or the missing ones.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some classes written in C show no signature
        return
    kinds = inspect.Parameter
    legal = {
        n: p
        for n, p in signature.parameters.items()
        if p.kind in (kinds.KEYWORD_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    }
    if all(p.kind is not kinds.VAR_KEYWORD for p in signature.parameters.values()):
        for name in arguments:
            if name not in legal:
                raise RecipeError(
                    f"{describe_value(function)} has no argument {name}"
                    f"{nearest(name, list(legal))}",
                    where=where,
                )
    try:
        signature.bind(*values, **arguments)
    except TypeError as error:
        raise RecipeError(
            f"{describe_value(function)}: {error}",
            where=where,
            fix=f"Its signature is {signature}.",
        ) from None


@dataclass(frozen=True)
class UserCall:
    """A call of the user's function that is still to be made; its text form is what was asked for.

    Attributes:
        folders: Importable while the call is made.
    """

    function: Callable[..., Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""
    folders: tuple[Path, ...] = ()

    def __call__(self, *values: Any) -> Any:
        with importable_folders(*self.folders):
            return call_user_function(self.function, *values, where=self.where, **self.arguments)

    def __str__(self) -> str:
        inner = ", ".join(
            f"{key}={value if isinstance(value, UserCall) else repr(value)}"
            for key, value in self.arguments.items()
        )
        return f"{describe_value(self.function)}({inner})"


def describe_value(value: Any) -> str:
    """One readable line for a value of a recipe: "my_module:MyModel(width=4)", "64 samples"."""
    if isinstance(value, UserCall):
        return str(value)
    if isinstance(value, functools.partial):
        return str(UserCall(value.func, value.keywords))
    name = getattr(value, "__qualname__", None)
    if name is None:
        return " ".join(str(value).split())
    code = getattr(value, "__code__", None)
    place = f" ({_short(code.co_filename)}:{code.co_firstlineno})" if "<" in name and code else ""
    return f"{value.__module__}:{name}{place}"


def describe_recipe(recipe: Any, reference: Any) -> dict[str, str]:
    """Every field of a recipe as text, for recipe.json of the run directory.

    Args:
        reference: What named it; "" is written where that was a `Recipe` object, too.
    """
    facts = {
        f.name: describe_value(getattr(recipe, f.name)) for f in fields(recipe) if f.name != "name"
    }
    named = reference if isinstance(reference, str) else ""
    return {"name": recipe.name, "reference": named, **facts}


def user_frame(error: BaseException) -> tuple[str, str]:
    """The innermost place in the user's own code that an error passed, as ("file:line", source).

    Code of the standard library, of installed packages and of headway is not the user's; where
    nothing else was passed, the innermost frame of all is given.
    """
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{_short(error.filename)}:{error.lineno}", (error.text or "").strip()
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if is_project_file(frame.filename)] or list(frames)
    if not theirs:
        return "", ""
    frame = theirs[-1]
    source = frame.line or linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f"{_short(frame.filename)}:{frame.lineno}", source


def user_line(function: Any) -> str:
    """Where a function or class is defined, as "file:line"; "" where that is not known."""
    try:
        return (
            f"{_short(inspect.getsourcefile(function) or '')}:{inspect.getsourcelines(function)[1]}"
        )
    except (TypeError, OSError):
        return ""


def _import(module_name: str, where: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # Missing is the module that was asked for, or a package above it, not one that it imports.
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise _missing_module(module_name, where) from None
        raise _not_importable(module_name, error, where) from error
    except HeadwayError:
        raise
    except (Exception, SystemExit) as error:
        raise _not_importable(module_name, error, where) from error


def _not_importable(module_name: str, error: BaseException, where: str) -> RecipeError:
    place, shown = user_frame(error)
    return RecipeError(
        f"module {module_name} cannot be imported: {_reason(error)}",
        where=place or where,
        why=shown,
    )


def _missing_module(module_name: str, where: str) -> RecipeError:
    return RecipeError(
        f"module {module_name} is not found{nearest(module_name, _modules_nearby())}",
        where=where,
        why="Looked beside the recipe, in the current folder and among the installed packages.",
    )


def _missing_name(module_name: str, name: str, legal: list[str], where: str) -> RecipeError:
    return RecipeError(f"module {module_name} has no {name}{nearest(name, legal)}", where=where)


def _reason(error: BaseException) -> str:
    """Type and text of an error, as Python shows them."""
    return "".join(traceback.format_exception_only(error)[-1:]).strip()


def _modules_nearby() -> list[str]:
    """Names of modules and packages that lie in the folders of the user."""
    found: set[str] = set()
    for path in (Path(folder or ".") for folder in sys.path):
        if is_project_file(str(path.absolute())) and path.is_dir():
            found |= {entry.stem for entry in path.glob("*.py") if entry.stem.isidentifier()}
            found |= {entry.parent.name for entry in path.glob("*/__init__.py")}
    return sorted(found)


def _find(module_name: str) -> importlib.machinery.ModuleSpec | None:
    """The spec of a module; unlike importlib.util.find_spec it imports no parent package."""
    parts = module_name.split(".")
    path: Any = None
    spec = None
    for name in parts:
        # By its last name alone: the full name of a module in a folder without __init__.py would
        # make the finder ask for the parent among the imported modules.
        spec = _top(name) if path is None else importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or [])
    return spec


def _top(name: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ValueError:  # a module such as __main__ that has no spec
        return None


def _defined(tree: ast.Module) -> set[str] | None:
    """Names that a module's text defines; None where the text alone cannot tell."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Import() | ast.ImportFrom():
                names |= {(a.asname or a.name).split(".")[0] for a in node.names}
            case ast.Call(func=ast.Name(id="globals" | "setattr" | "exec")):
                return None
    return None if names & {"*", "__getattr__"} else names


def _short(file: str) -> str:
    """A path below the current folder without that folder."""
    path = Path(file)
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return file
