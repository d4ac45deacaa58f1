"""The context of split layers: the grid, the settings, and parameters whose cut is undecided.

Code outside of split layers never meets a split tensor: one that is cut along no dimension is a
plain tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headway.parallel.split_tensor import (
    ATTRIBUTES_OF_PART,
    WHOLE_DIMENSION,
    DimensionCut,
    SplitContext,
    SplitTensor,
    TorchFunctionOperand,
)
from headway.parallel.tensor.grid import (
    ProcessGrid,
    WeightPrefetch,
    gather_from_ranks,
    local_slice,
    reduce_from_ranks,
)


@dataclass(frozen=True, kw_only=True)
class SplitSettings:
    """How split layers are carried out.

    Attributes:
        keep: A cuboid's gathered operands are kept for backward; if not, gathered again.
        chunks: Pieces in which a cuboid scatters the sums of a product, each while the next one
            is computed.
        ahead: A cuboid's next weight is gathered while this layer computes.
    """

    keep: bool = True
    chunks: int = 1
    ahead: bool = True


class LayerContext(SplitContext):
    """The grid of the split layers of one model.

    It is no dataclass, so that messages of a pipeline take it for a constant.

    Args:
        companions: Names of weights whose input other weights take as well.

    Attributes:
        infers: It decides what is split, and nothing is computed.
        ahead: Gathers the next layer's weight.
    """

    kind = "layers"
    remedy = "Call .full_tensor() on it before, or name this part of the model in whole=[...]."
    infers = False
    ahead: WeightPrefetch | None = None

    def __init__(
        self,
        grid: ProcessGrid,
        settings: SplitSettings,
        companions: frozenset[str] = frozenset(),
    ) -> None:
        self.grid, self.settings, self.companions = grid, settings, companions

    @property
    def classic(self) -> bool:
        return self.grid.plan.form == "classic"

    def attribute(self, x: SplitTensor, name: str) -> Any:
        """Transposes alone are known."""
        if name in ("T", "mT"):
            return x.transpose(-2, -1)
        raise AttributeError(f"a split tensor has no {name}")

    def wrap(
        self,
        local: Tensor,
        cuts: Sequence[Any],
        origins: frozenset[str] = frozenset(),
    ) -> Any:
        real = tuple(self.without_unit_axes(cut) for cut in cuts)
        if all(cut is WHOLE_DIMENSION for cut in real):
            return local
        shape = [n * self.grid.size(cut.axes) for n, cut in zip(local.shape, real, strict=True)]
        return SplitTensor(local, torch.Size(shape), real, self, origins)

    def without_unit_axes(self, cut: DimensionCut) -> DimensionCut:
        """Without the axes that have one rank."""
        axes = "".join(axis for axis in cut.axes if self.grid.size(axis) > 1)
        if not axes:
            return WHOLE_DIMENSION
        # Only the first axis cuts within blocks (`local_slice`); without it the blocks are whole.
        return DimensionCut(axes, cut.blocks if axes[0] == cut.axes[0] else 1)

    def gather(self, x: SplitTensor) -> Tensor:
        local = x.local
        for dim, cut in enumerate(x.cuts):
            local = gather_from_ranks(local, self.grid, cut.axes, dim, cut.blocks)
        return local

    def local_part(self, whole: Tensor, cuts: Sequence[Any]) -> Tensor:
        for dim, cut in enumerate(cuts):
            if cut.axes:
                whole = local_slice(whole, self.grid, cut.axes, dim, cut.blocks)
        return whole

    def sum_over_ranks(self, local: Tensor, cuts: Sequence[Any]) -> Tensor:
        return reduce_from_ranks(local, self.grid, "".join(cut.axes for cut in cuts))


@dataclass(frozen=True, eq=False)
class UndecidedParameter(TorchFunctionOperand):
    """While a split is inferred, a parameter of which it is still open how it is cut.

    Attributes:
        name: Its logical name.
        context: Decides it (`model.split_inference.InferenceContext`).
    """

    name: str
    tensor: Tensor
    context: Any

    def __getattr__(self, name: str) -> Any:
        # These do not depend on the decision; whatever else is asked takes the parameter whole.
        if name in ATTRIBUTES_OF_PART or name in ("shape", "ndim"):
            return getattr(self.tensor, name)
        return getattr(self.context.resolve(self), name)


def resolve(parameter: Any) -> Any:
    """A parameter that is used as it is: an undecided one stays whole."""
    if isinstance(parameter, UndecidedParameter):
        return parameter.context.resolve(parameter)
    return parameter


def describe_cuts(cuts: Sequence[DimensionCut]) -> str:
    """ "[over j, whole]"."""
    return f"[{', '.join(map(str, cuts))}]"


def cuts_of(x: Any) -> tuple[DimensionCut, ...]:
    """One for each dimension, of a plain tensor as well."""
    return x.cuts if isinstance(x, SplitTensor) else (WHOLE_DIMENSION,) * x.ndim


def local_of(x: Any) -> Tensor:
    found: Tensor = x.local if isinstance(x, SplitTensor) else x
    return found
