"""Splitting the layers of the user's model over a process grid; its code stays as it is.

Begin with `split_model`. `split_inference` finds out what can be split, `parameters` says how
modules hold their parts.
"""

from headway.parallel.split_layers.parameters import ParameterPlacement
from headway.parallel.split_layers.split_inference import SplitDecisions, infer_split
from headway.parallel.split_layers.split_model import (
    SplitModel,
    apply_split_decisions,
    split_model,
)

__all__ = [
    "ParameterPlacement",
    "SplitDecisions",
    "SplitModel",
    "apply_split_decisions",
    "infer_split",
    "split_model",
]
