"""Random plans of small models that `plan` says run today, really trained and verified.

    PYTHONPATH=src:tests python -m support.run_sweep FIRST LAST

prints, for each plan, what the planner says of it, and what is not so: what "yes" is said of trains
and is equal to the serial run; a reason against it is the one that `train` gives.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import numpy as np

import headway
from headway.api.planning import PlanningResult
from headway.errors import HeadwayError, PlanError
from headway.planner.search.plan_point import Point, describe_point
from headway.plans import Plan
from support.plan_sweep import every_plan
from support.planned_models import RECIPES
from support.ranks import warm_up

STEPS = 2
SCHEDULES = ("all", "1f1b", "gpipe,zb-h1", "interleaved", "1f1b,chimera")


@dataclass(frozen=True)
class Asked:
    """A random request: a model on so many local ranks."""

    name: str
    ranks: int
    schedules: str

    @property
    def result(self) -> PlanningResult:
        return headway.plan(
            RECIPES[self.name], "8x-4090", devices=self.ranks, schedules=self.schedules
        )


def request(seed: int) -> Asked:
    """The models in turn, all of them before the first comes again."""
    rng = np.random.default_rng(seed)
    names = list(RECIPES)
    return Asked(
        name=names[seed % len(names)],
        ranks=int(rng.choice([2, 3, 4])),
        schedules=str(rng.choice(SCHEDULES)),
    )


def offers(result: PlanningResult, seed: int, most: int) -> Iterator[tuple[Point, str]]:
    """The chosen plan, those of the table, and others that the search prices, of different kinds;
    with what is said of each were it the chosen one."""
    rng = np.random.default_rng(seed)
    outcome = result.outcome
    others = list(every_plan(outcome.search))
    points = [outcome.best, *outcome.points, *(others[n] for n in rng.permutation(len(others)))]
    seen = set()
    for point in points:
        degrees = point.degrees
        kind = (degrees.tensor, degrees.data, degrees.pipeline, degrees.schedule, degrees.zero)
        # Of a tensor axis "yes" is never said.
        if kind in seen or len(seen) == most or degrees.tensor > 1:
            continue
        seen.add(kind)
        chosen = replace(result, outcome=replace(outcome, points=(point,), chosen=0))
        yield point, chosen.runs(point)


def train(name: str, plan: Plan) -> str:
    """Why `train` refuses a plan; "" where it trains."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = headway.train(RECIPES[name], plan=plan, directory=Path(folder) / "run",
                                   device="cpu")  # fmt: skip
        except HeadwayError as error:
            return "; ".join((f"{type(error).__name__} {error.what}",
                              *getattr(error, "problems", ())))  # fmt: skip
        return "" if result.stopped_by is None else f"stopped by {result.stopped_by}"


SPLIT_BY_NATURE = ("conv", "mean of known", "buffer of all")
"""What they compute depends on the micro-batches: `verify` says so, and is not asked."""


def verify(name: str, plan: Plan) -> str:
    """How a plan differs from the serial run; "" where it does not."""
    if name in SPLIT_BY_NATURE:
        return ""
    try:
        result = headway.verify(RECIPES[name], plan=plan, steps=STEPS)
        result.check()
    except HeadwayError as error:
        return f"{type(error).__name__} {error.what}"
    return ""


def problems(seed: int, most: int) -> Iterator[tuple[str, str]]:
    """(a plan and what is said of it, what is not so) of each plan of a request; "": all is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of more processes than cores
        yield from _problems(seed, most)


def _problems(seed: int, most: int) -> Iterator[tuple[str, str]]:
    asked = request(seed)
    result = asked.result
    for point, said in offers(result, seed, most):
        chosen = replace(result, outcome=replace(result.outcome, points=(point,), chosen=0))
        words = f"{asked.name}, {describe_point(point)}: {said}"
        refused = train(asked.name, chosen.plan)
        if said == "yes" and refused:
            yield words, f"train says {refused}"
        elif said != "yes" and not said.startswith("not known") and said not in refused:
            yield words, f"train says {refused}" if refused else "it trains"
        else:
            yield words, "" if refused else verify(asked.name, chosen.plan)


def main() -> None:
    first, last, *more = map(int, sys.argv[1:])
    logging.getLogger("headway").setLevel(logging.ERROR)
    warm_up()
    for seed in range(first, last):
        begin = perf_counter()
        try:
            for words, wrong in problems(seed, more[0] if more else 4):
                print(f"{seed}: {words} ({perf_counter() - begin:.1f} s)", flush=True)
                if wrong:
                    print(f"    WRONG: {wrong}", flush=True)
        except PlanError as error:
            print(f"{seed}: {request(seed)}: {error.what}", flush=True)


if __name__ == "__main__":
    main()
