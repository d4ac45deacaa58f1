"""Calls with misspelt or missing arguments, answered in one sentence with the nearest legal name.

`checks_keywords` decorates the public functions and classes. Python's own TypeError names neither
the nearest argument nor, of several mistakes, more than one.
"""

from __future__ import annotations

import functools
import inspect
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from headway.documents import nearest
from headway.errors import HeadwayError, UsageError
from headway.user_frames import innermost_user_frame

F = TypeVar("F", bound=Callable[..., Any])

Check = Callable[[Mapping[str, Any]], tuple[Mapping[str, Any], Sequence[str]]]
"""From the arguments that are given to those that are used, and a sentence for each problem."""
_NOTHING: Mapping[str, str] = {}


def checks_keywords(target: F) -> F:
    """Decorator of a function or class: wrong arguments are a `UsageError` at the caller's line."""
    return _checked(target, UsageError, None)


def checks_fields(
    check: Check, error: type[HeadwayError], meant: Mapping[str, str]
) -> Callable[[F], F]:
    """As `checks_keywords`, with a check of the values; all problems are told together.

    Args:
        meant: By names that other libraries have: what to write here.
    """
    return lambda target: _checked(target, error, check, meant)


def users_line() -> str:
    """The line of the user's that is being executed, as "file:line"; "" where there is none."""
    frame = innermost_user_frame(traceback.extract_stack())
    return f"{frame.filename}:{frame.lineno}" if frame else ""


def told_together(
    name: str, problems: Sequence[str], error: type[HeadwayError], *, where: str = ""
) -> HeadwayError:
    """One error for all problems of a call."""
    where = where or users_line()
    if len(problems) == 1:
        return error(f"{name}: {problems[0]}", where=where)
    what = f"{name}: {len(problems)} arguments cannot be used"
    return error(what, where=where, why="\n  ".join(problems))


def _checked(
    target: F, error: type[HeadwayError], check: Check | None, meant: Mapping[str, str] = _NOTHING
) -> F:
    kind = isinstance(target, type)
    called: Callable[..., Any] = vars(target)["__init__"] if kind else target
    signature = inspect.signature(target)
    name = f"headway.{target.__name__}"

    @functools.wraps(called)
    def call(*values: Any, **named: Any) -> Any:
        if check is not None:
            accepted, wrong = check(named)
            problems = [*_mistakes(signature, values[kind:], named, meant), *wrong]
            if problems:
                raise told_together(name, problems, error)
            return called(*values, **accepted)
        try:
            return called(*values, **named)
        except TypeError:
            # Looked for only now: calls that are right cost nothing.
            if problems := _mistakes(signature, values[kind:], named):
                raise told_together(name, problems, error) from None
            raise

    if not kind:
        return cast("F", call)
    setattr(target, "__init__", call)  # noqa: B010 - mypy knows no class here
    return target


def _mistakes(
    signature: inspect.Signature,
    values: tuple[Any, ...],
    named: Mapping[str, Any],
    meant: Mapping[str, str] = _NOTHING,
) -> list[str]:
    """Unknown, missing and surplus arguments, a sentence each."""
    kinds = inspect.Parameter
    parameters = signature.parameters
    legal = [p.name for p in parameters.values() if p.kind is not kinds.POSITIONAL_ONLY]
    found = []
    if all(p.kind is not kinds.VAR_KEYWORD for p in parameters.values()):
        found = [
            f"there is no argument {name}"
            + (f": write {meant[name]}" if name in meant else nearest(name, legal))
            for name in named
            if name not in legal
        ]
    by_position = [
        p
        for p in parameters.values()
        if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    ]
    taken = {p.name for p in by_position[: len(values)]}
    fixed = (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
    missing = [
        p.name
        for p in parameters.values()
        if p.default is p.empty and p.kind not in fixed and p.name not in {*taken, *named}
    ]
    # A misspelt name is one mistake, not two: its sentence has the right one.
    told = " ".join(found)
    missing = [name for name in missing if not re.search(rf"\b{name}\b", told)]
    if missing:
        many = "arguments are" if len(missing) > 1 else "argument is"
        written = ", ".join(f"{name}=..." for name in missing)
        found.append(f"{len(missing)} {many} missing: write {written}")
    surplus = len(values) > len(by_position)
    if surplus and all(p.kind is not kinds.VAR_POSITIONAL for p in parameters.values()):
        first = next((n for n in legal if n not in {p.name for p in by_position}), "name")
        nameless = (
            "1 argument has" if len(by_position) == 1 else f"{len(by_position)} arguments have"
        )
        found.append(f"at most {nameless} no name: write {first}=... and so on")
    if twice := [name for name in named if name in taken]:
        found.append(f"{', '.join(twice)} is given twice")
    return found
