"""Layers split over ranks in one, two, two and a half, or three dimensions; the user's model
unchanged.
"""

from headway.parallel.tensor.context import Settings
from headway.parallel.tensor.grid import Grid
from headway.parallel.tensor.home import Home
from headway.parallel.tensor.linear import Turn, by_inputs, by_outputs, cuboid_linear
from headway.parallel.tensor.norm import split_norm
from headway.parallel.tensor.split import Split, obey, split
from headway.parallel.tensor.split_tensor import Cut, SplitTensor
from headway.parallel.tensor.summa import summa_linear
from headway.parallel.tensor.survey import survey
from headway.parallel.tensor.survey_run import Decisions
from headway.parallel.tensor.vocabulary import split_cross_entropy

__all__ = [
    "Cut",
    "Decisions",
    "Grid",
    "Home",
    "Settings",
    "Split",
    "SplitTensor",
    "Turn",
    "by_inputs",
    "by_outputs",
    "cuboid_linear",
    "obey",
    "split",
    "split_cross_entropy",
    "split_norm",
    "summa_linear",
    "survey",
]
