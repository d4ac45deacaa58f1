"""Link graphs for tests: random ones for tree packing, and a mesh with one slow link."""

from __future__ import annotations

from itertools import combinations

import numpy as np

from headway.collective.topology import LinkGraph

SLOW_MESH = """
nodes = 4
fabric = "mesh"
between = { rate = "100 Mbit/s" }

[[links]]
nodes = ["a", "b"]
rate = "10 Mbit/s"
"""
"""A cluster.toml."""


def random_graph(seed, ranks=None, *, largest=8):
    """Integer rates for odd seeds, real ones for even seeds; joined in both directions."""
    random = np.random.default_rng(seed)
    n = ranks or int(random.integers(3, largest + 1))
    rates = {
        (i, j): float(random.integers(1, 5)) if seed % 2 else float(random.uniform(0.05, 10))
        for i in range(n)
        for j in range(n)
        if i != j and (abs(i - j) == 1 or random.random() < 0.5)
    }
    return LinkGraph.of(n, rates, both=False)


def islands(count, size, *, inside, across):
    """Full meshes of fast links, and one slow link between the ranks of the same place in each."""
    links = {
        (i, j): inside if i // size == j // size else across
        for i, j in combinations(range(count * size), 2)
        if i // size == j // size or i % size == j % size
    }
    return LinkGraph.of(count * size, links)
