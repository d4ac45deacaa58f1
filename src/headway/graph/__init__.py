"""The model as data: operators, what may be split, what it costs, repeated blocks, cuts."""

from headway.graph.axes import Call, axes_of, known_kinds
from headway.graph.block import Blocks, Segment, blocks
from headway.graph.cut import Cut, cuts
from headway.graph.folding import fold
from headway.graph.model import ModelGraph, read_graph
from headway.graph.operator import Axes, Axis, Footprint, Operator, Saved, TensorSpec, Window, Work
from headway.graph.rule import Rule, rules
from headway.graph.work import calls_of, flops_of, traffic_of

__all__ = [
    "Axes",
    "Axis",
    "Blocks",
    "Call",
    "Cut",
    "Footprint",
    "ModelGraph",
    "Operator",
    "Rule",
    "Saved",
    "Segment",
    "TensorSpec",
    "Window",
    "Work",
    "axes_of",
    "blocks",
    "calls_of",
    "cuts",
    "flops_of",
    "fold",
    "known_kinds",
    "read_graph",
    "rules",
    "traffic_of",
]
