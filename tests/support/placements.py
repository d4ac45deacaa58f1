"""Placement problems at random, and their optimum by trying everything."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np

from headway.planner.tables.choices import Form, Held, Option, PlacementProblem

WAYS = ("copies", "table", "column", "row", "grid")


def random_problem(rng, *, tables=None, ranks=None, tiers=None):
    """At most 5 tables x 3 ranks x 5 options, of 1 to 2 forms each; it may have no answer."""
    tables = tables or int(rng.integers(1, 6))
    ranks = ranks or int(rng.integers(1, 4))
    tiers = tiers or int(rng.integers(1, 3))
    options = tuple(
        tuple(_option(rng, way, ranks, tiers) for way in WAYS[: int(rng.integers(1, 6))])
        for _ in range(tables)
    )
    return PlacementProblem(
        names=tuple(f"t{n}" for n in range(tables)),
        options=options,
        tiers=("device", "DRAM")[:tiers],
        capacity=rng.integers(tables, 8 * tables, (tiers, ranks)).astype(float),
        latencies=(float(rng.uniform(0, 2)),),
    )


def _option(rng, way, ranks, tiers):
    pieces = {"copies": ranks, "row": ranks, "table": 1}.get(way, int(rng.integers(1, ranks + 1)))
    forms = tuple(
        Form(
            seconds=rng.uniform(0.5, 10, ranks) / pieces,
            bytes=rng.integers(0, 12, (tiers, ranks)).astype(float),
            fast=n,
            slow=n,
        )
        for n in range(int(rng.integers(1, 3)))
    )
    return Option(
        way=way,
        pieces=pieces,
        ranks=tuple(range(ranks)),
        forms=forms,
        exchange=None if way == "copies" else 0,
    )


def all_held(options):
    """Every way to hold one table."""
    for number, option in enumerate(options):
        for own in combinations(option.ranks, option.pieces):
            for forms in product(range(len(option.forms)), repeat=option.pieces):
                yield Held(option=number, forms=dict(zip(own, forms, strict=True)))


def best_of_all(problem):
    """Seconds of the best placement; None: none fits. Table by table, with what fits so far."""
    best = np.inf
    choices = [
        [(held, *_amounts(problem, n, held)) for held in all_held(options)]
        for n, options in enumerate(problem.options)
    ]

    def extend(number, load, room, late):
        nonlocal best
        if load.max(initial=0.0) + late * problem.latencies[0] >= best:
            return
        if number == len(choices):
            best = load.max(initial=0.0) + late * problem.latencies[0]
            return
        for held, seconds, sizes in choices[number]:
            if (sizes <= room + 1e-9).all():
                causes = problem.options[number][held.option].exchange is not None
                extend(number + 1, load + seconds, room - sizes, late or causes)

    extend(0, np.zeros(problem.ranks), problem.capacity, False)
    return None if best == np.inf else best


def _amounts(problem, number, held):
    one = PlacementProblem(
        names=problem.names[number : number + 1],
        options=problem.options[number : number + 1],
        tiers=problem.tiers,
        capacity=problem.capacity,
        latencies=problem.latencies,
    )
    return one.loads((held,)), one.used((held,))
