"""What modules are forced to do, checked against a model before anything is searched.

Invariant: what is returned the search can obey: every pattern means modules with parameters, and
each degree of the tensor axis is legal for all of it. Source: the words are Whale's `replicate`,
`split` and `stage` (Jia et al. 2022).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from headway.documents import nearest
from headway.errors import PlanError
from headway.planner.borders import forced_starts
from headway.planner.meant import forcible
from headway.planner.operators import Setting, Workload, check_force
from headway.planner.question import Question
from headway.planner.row import units

KINDS = ("replicate", "split", "stage")
WORDS = ("replicate", "split", "split:tensor", "split:AXIS", "stage")
Forced = tuple[tuple[str, str], ...]


def parse_force(words: Sequence[str]) -> tuple[Forced, list[str]]:
    """Of "MODULES=HOW" the pairs, and what is wrong with the others, one line each."""
    found, problems = [], []
    for word in words:
        pattern, sign, how = word.rpartition("=")
        kind, colon, axis = how.partition(":")
        if not sign or not pattern:
            problems.append(f"--force {word}: write MODULES=HOW, as in blocks.*=split")
        elif kind not in KINDS:
            hint = nearest(kind, KINDS)
            problems.append(f"--force {word}: nothing is called {kind!r}{hint}")
        elif colon and (kind != "split" or not axis):
            problems.append(f"--force {word}: write one of {', '.join(WORDS)}")
        else:
            found.append((pattern, how))
    seen = {pattern: how for pattern, how in found if how != "stage"}
    problems += [
        f"--force {pattern}={how}: {pattern}={seen[pattern]} is forced, too"
        for pattern, how in found
        if how != "stage" and seen[pattern] != how
    ]
    return tuple(dict.fromkeys(found)), problems


def on_modules(work: Workload, force: Forced) -> tuple[Forced, list[str]]:
    """The same with a module standing for all that it holds; and which patterns mean nothing. A
    stage begins at one module, where one tensor crosses."""
    names = _names(work)
    found, problems = [], []
    for pattern, how in force:
        if how == "stage" or any(fnmatchcase(name, pattern) for name in names):
            found.append((pattern, how))
        elif any(fnmatchcase(name, f"{pattern}.*") for name in names):
            found.append((f"{pattern}.*", how))
        else:
            hint = _nearest(pattern, names)
            problems.append(
                f"--force {pattern}={how}: no module with parameters has this name{hint}"
            )
    try:
        forced_starts(found, units(work))
    except PlanError as error:
        problems += [f"--force {problem}" for problem in error.problems]
    return tuple(found), problems


def _names(work: Workload) -> list[str]:
    found = (forcible(o) for o in work.graph.operators if o.parameters)
    return list(dict.fromkeys(name for names in found for name in names))


def _nearest(pattern: str, names: Sequence[str]) -> str:
    """Of modules, and of what they lie in."""
    outer = {name.rsplit(".", n)[0] for name in names for n in range(name.count(".") + 1)}
    legal = sorted({*names, *outer})
    hint = nearest(pattern.removesuffix(".*"), legal)
    if not hint.startswith("; legal"):
        return hint
    tops = sorted({name.split(".")[0] for name in names})
    return f"; legal: {', '.join(tops)}"


def obeyable(question: Question, degrees: Sequence[int]) -> tuple[Question, list[str]]:
    """The question with those degrees of the tensor axis that what is forced allows.

    Args:
        question: With `force`.
        degrees: That may be taken, ascending.

    Returns:
        The question, and the problems where none is left.
    """
    above = [t for t in degrees if t > 1]
    force = tuple(pair for pair in question.force if pair[1] != "stage")
    if not force or not above:
        return question, list(_alone(question))
    legal, problems = [], []
    for t in above:
        setting = Setting(
            work=question.work,
            machine=question.machine,
            tensor=t,
            samples=question.work.samples,
            force=force,
        )
        try:
            check_force(setting)
        except PlanError as error:
            problems += [f"--force {problem}" for problem in error.problems]
        else:
            legal.append(t)
    replicated = all(how == "replicate" for _, how in force)
    if replicated and 1 in degrees:
        legal.insert(0, 1)
    return replace(question, tensor=tuple(legal)), [] if legal else problems


def _alone(question: Question) -> Iterator[str]:
    for pattern, how in question.force:
        if how.startswith("split"):
            yield f"--force {pattern}={how}: without a tensor axis nothing is split; more devices?"
