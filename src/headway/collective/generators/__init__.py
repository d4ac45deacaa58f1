"""Generators of collective programs: name(collective, *, options) -> CollectiveProgram.

Each refuses with a PlanError what it makes no sense for; what each makes passes `check_program`.
"""

from headway.collective.generators.direct import direct
from headway.collective.generators.hierarchical import hierarchical
from headway.collective.generators.recursive_halving import halving_doubling
from headway.collective.generators.rings import ring
from headway.collective.generators.trees import chain, servers, star, trees, two_level

__all__ = [
    "chain",
    "direct",
    "halving_doubling",
    "hierarchical",
    "ring",
    "servers",
    "star",
    "trees",
    "two_level",
]
