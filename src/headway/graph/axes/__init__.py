"""Which axes an operator has: one table from kinds to index expressions.

What the table does not know may only be replicated, and is named (`ModelGraph.unknown`).
"""

from headway.graph.axes.form import Call
from headway.graph.axes.table import axes_of, known_kinds

__all__ = ["Call", "axes_of", "known_kinds"]
