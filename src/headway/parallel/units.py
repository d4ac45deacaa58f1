"""Where a traced model can be cut, and where it is: by name, or into parts of even weight.

A unit begins with a call that uses parameters and reaches to the next such call, so that a
non-linearity stays with the layer before it. Stages are runs of consecutive units: what is carried
out first in the model is carried out first in the pipeline, random draws included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate

from torch import fx

from headway.documents import nearest
from headway.errors import PlanError
from headway.parallel.build import used
from headway.parallel.tracing import Trace


@dataclass(frozen=True, slots=True)
class Unit:
    """A part of the model that is not cut.

    Attributes:
        name: Of the module with which it begins; "block#2" where a module is called a second time.
        start: Number of its first node in the graph; the first unit begins at 0.
        parameters: How many numbers its calls use.
    """

    name: str
    start: int
    parameters: int


def units_of(trace: Trace) -> list[Unit]:
    """The units of a traced model, in the order of execution."""
    names = labels(trace)
    units: list[Unit] = []
    for number, node in enumerate(trace.graph.nodes):
        held = used(trace, targets_of(node), "parameters")
        if held:
            size = sum(parameter.numel() for parameter in held.values())
            units.append(Unit(names[number], number if units else 0, size))
    return units


def labels(trace: Trace) -> dict[int, str]:
    """Number of a node -> name, of all that call a module or use a parameter directly.

    The n-th call of a module is called "block#n".
    """
    found: dict[int, str] = {}
    times: Counter[str] = Counter()
    for number, node in enumerate(trace.graph.nodes):
        name = called(node)
        if name or used(trace, targets_of(node), "parameters"):
            name = name or node.name
            times[name] += 1
            found[number] = name if times[name] == 1 else f"{name}#{times[name]}"
    return found


def called(node: fx.Node) -> str:
    """The module that a node calls; empty if it calls none."""
    if node.op == "call_module":
        return str(node.target)
    first = node.args[0] if node.op == "call_function" and node.args else None
    if isinstance(first, fx.Node) and first.op == "get_attr" and first.meta.get("module"):
        return str(first.target)  # torch.utils.checkpoint
    return ""


def targets_of(node: fx.Node) -> list[str]:
    """Names of modules and tensors of the model that a node uses directly."""
    held = [str(n.target) for n in node.all_input_nodes if n.op == "get_attr"]
    return [str(node.target), *held] if node.op == "call_module" else held


def cut_evenly(units: Sequence[Unit], weights: Sequence[float], stages: int) -> list[int]:
    """The nodes at which stages begin, so that the heaviest stage is as light as it can be.

    Args:
        units: Of the model.
        weights: Of each unit, in any measure.
        stages: At most as many as units.
    """
    return [units[first].start for first in even_parts(weights, stages)]


def even_parts(weights: Sequence[float], parts: int) -> list[int]:
    """First entries of consecutive parts, none empty, whose largest sum is as small as possible.

    Of the ways to do so it takes the one with the smallest sum of squares. Dynamic programming
    over (parts, entries): O(parts x entries^2).

    Raises:
        ValueError: There are fewer entries than parts.
    """
    count = len(weights)
    if not 1 <= parts <= count:
        raise ValueError(f"{count} entries do not make {parts} parts")
    until = [0.0, *accumulate(weights)]
    limit = _solve(until, parts, lambda sum_, best: max(sum_, best))[0]
    slack = limit * (1 + 1e-12)

    def squares(sum_: float, best: float) -> float:
        return best + sum_ * sum_ if sum_ <= slack else float("inf")

    return _solve(until, parts, squares)[1]


def _solve(until: list[float], parts: int, join: object) -> tuple[float, list[int]]:
    """The best value, and the first entry of each part.

    Args:
        until: Sums of the weights before each entry, and of all.
        parts: How many.
        join: (sum of the last part, value of the parts before) -> value of all.
    """
    assert callable(join)
    count = len(until) - 1
    best = [[float("inf")] * (count + 1) for _ in range(parts + 1)]
    first = [[0] * (count + 1) for _ in range(parts + 1)]
    best[0][0] = 0.0
    for part in range(1, parts + 1):
        for end in range(part, count - parts + part + 1):
            for start in range(part - 1, end):
                value = join(until[end] - until[start], best[part - 1][start])
                if value < best[part][end]:
                    best[part][end], first[part][end] = value, start
    starts, end = [], count
    for part in range(parts, 0, -1):
        end = first[part][end]
        starts.append(end)
    return best[parts][count], starts[::-1]


def cut_at(trace: Trace, patterns: Sequence[str]) -> list[int]:
    """The nodes at which stages begin: 0, and the first call of a module for each pattern.

    Args:
        trace: Of the model.
        patterns: Names with the wildcards of a shell; one stage more than patterns. "block#2" is
            the second call of a module.

    Raises:
        PlanError: No call matches a pattern, or one comes before that of the pattern before it.
    """
    names = labels(trace)
    starts, problems = [0], []
    before = min(names, default=0)
    for pattern in patterns:
        found = next((n for n, name in names.items() if _matches(name, pattern)), None)
        if found is None:
            close = nearest(pattern, list(names.values()))
            problems.append(f"the model's forward calls no module {pattern}{close}")
        elif found <= before:
            problems.append(f"{pattern} is called before, or together with, the stage before it")
        else:
            starts.append(found)
            before = found
    if problems:
        raise PlanError(
            "the model cannot be cut there",
            problems=problems,
            fix=f"It calls, in this order: {', '.join(names.values())}.",
        )
    return starts


def _matches(label: str, pattern: str) -> bool:
    """Part by part; a module that is walked into begins with the first of its parts."""
    (name, _, nth), (wanted, _, wanted_nth) = label.partition("#"), pattern.partition("#")
    parts, wishes = name.split("."), wanted.split(".")
    return nth == wanted_nth and len(parts) >= len(wishes) and all(map(fnmatchcase, parts, wishes))
