"""Optimisers of other frameworks as calls of torch's and headway's, with the defaults of theirs.

A default that is not said here would silently become torch's: its AdamW decays by 0.01, and
DeepSpeed's by 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway.migration.settings import ImportedCall

ADAMW, ADAM = "torch.optim:AdamW", "torch.optim:Adam"
TORCH_OPTIMIZERS = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adamax", "LBFGS", "NAdam", "RAdam", "RMSprop",
    "Rprop", "SGD", "SparseAdam",
)  # fmt: skip
"""Of `torch.optim`, beside Adam and AdamW, that a name means."""


@dataclass(frozen=True, kw_only=True)
class OptimizerArgument:
    """A keyword argument by its name in the other framework.

    Attributes:
        kind: "number", "flag", "betas" (two numbers).
        name: Of the argument here; "": the same.
        default: The other framework's; None: left out where it is not given.
    """

    kind: str = "number"
    name: str = ""
    default: Any = None


ADAM_ARGUMENTS: Mapping[str, OptimizerArgument] = {
    "lr": OptimizerArgument(default=1e-3),
    "betas": OptimizerArgument(kind="betas", default=[0.9, 0.999]),
    "eps": OptimizerArgument(default=1e-8),
    "weight_decay": OptimizerArgument(default=0.0),
}


def betas(value: Any) -> list[float]:
    """Two numbers from 0 to below 1.

    Raises:
        ValueError: They are not.
    """
    if isinstance(value, list) and len(value) == 2:
        found = [b for b in value if isinstance(b, int | float) and not isinstance(b, bool)]
        if len(found) == 2 and all(0 <= b < 1 for b in found):
            return [float(b) for b in found]
    raise ValueError("is not two numbers from 0 to below 1")


def call_of(call: str, arguments: Mapping[str, Any]) -> ImportedCall:
    """A call with keyword arguments in the order in which they are given."""
    return ImportedCall(call=call, arguments=tuple(arguments.items()))
