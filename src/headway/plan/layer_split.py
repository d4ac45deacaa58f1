"""How layers are split over ranks that share their samples: tensor and spatial parallelism.

Sources: Shoeybi et al. 2019 (1-D), Xu et al. 2021 (2-D, Optimus), Wang et al. 2021 (2.5-D,
Tesseract), Bian et al. 2021 (3-D); Oyama et al. 2020 (spatial).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from headway.documents import document
from headway.plan.exchange import Exchange
from headway.plan.mesh import Axis, Mesh
from headway.plan.tensor_layout import TensorGrid

TENSOR, SPACE = "tensor", "space"
"""Axes of the mesh; their ranks lie next to each other, those that split tensors innermost."""


@document
class LayerSplit:
    """The decision; the default splits nothing.

    Attributes:
        tensor: Ranks that split linear layers: [p] is 1-D with whole activations between the
            layers, [q, q] 2-D, [i, j, l] a cuboid ([1, p, 1] is 1-D with activations in parts).
        form: "auto": as the number of sizes says; "summa" with [d, q, q]: 2.5-D.
        whole: Names of parameters or modules, or patterns, that are not split.
        spatial: Ranks that split the last dimensions of samples: [2, 2, 1] for depth, height and
            width.
        min_width: See `parallel.spatial.SpatialContext`.
    """

    tensor: tuple[int, ...] = ()
    form: Literal["auto", "classic", "cuboid", "summa"] = "auto"
    whole: tuple[str, ...] = ()
    spatial: tuple[int, ...] = ()
    min_width: int = 1

    def __str__(self) -> str:
        """ "linear layers over 2 x 2 ranks (summa); samples over 2 x 1 x 1 ranks"."""
        found = []
        if self.grid is not None:
            left = f"; whole: {', '.join(self.whole)}" if self.whole else ""
            found.append(f"linear layers over {_by(self.tensor)} ranks ({self.grid.form}){left}")
        if self.spatial:
            found.append(f"the last dimensions of samples over {_by(self.spatial)} ranks")
        return "; ".join(found) or "none"

    @property
    def ranks(self) -> int:
        """That share each sample."""
        return math.prod((*self.tensor, *self.spatial))

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Of the mesh."""
        sizes = ((SPACE, self.spatial), (TENSOR, self.tensor))
        return tuple(Axis(name=name, size=math.prod(found)) for name, found in sizes if found)

    @property
    def grid(self) -> TensorGrid | None:
        """Of the tensor split; None: there is none."""
        match self.tensor, self.form:
            case (), _:
                return None
            case (p,), "auto" | "classic":
                return TensorGrid.classic(p)
            case (q, r), "auto" | "summa" if q == r:
                return TensorGrid.summa(q)
            case (d, q, r), "summa" if q == r:
                return TensorGrid.summa(q, d)
            case (i, j, k), "auto" | "cuboid":
                return TensorGrid.cuboid(i, j, k)
        raise ValueError(f"{list(self.tensor)} are no sizes of a grid of form {self.form}")

    def problems(self, mesh: Mesh, exchange: Exchange) -> Iterator[str]:
        """Why the split cannot be, one line each.

        Args:
            mesh: Of the plan.
            exchange: Of the plan.
        """
        for name, sizes in (("split.tensor", self.tensor), ("split.spatial", self.spatial)):
            if any(size < 1 for size in sizes):
                yield f"{name} is {list(sizes)}; sizes of at least 1"
        try:
            assert self.grid is None or self.grid.ranks
        except ValueError as error:
            yield f"split.tensor: {error}; [p], [q, q], [i, j, l], or [d, q, q] with form summa"
        wanted = {axis.name: axis.size for axis in self.axes}
        for name in (TENSOR, SPACE):
            if mesh.degree(name) != wanted.get(name, 1):
                yield (
                    f"mesh axis {name} has size {mesh.degree(name)}; the split has "
                    f"{wanted.get(name, 1)} ranks"
                )
        if self.tensor and (not exchange.exact or exchange != Exchange(axis=exchange.axis)):
            yield "exchange: with split.tensor gradients are summed exactly; leave it as it is"
        if self.ranks > 1 and exchange.reduce != "mean":
            yield f"exchange.reduce is {exchange.reduce!r}: with a split it can only be 'mean'"


def _by(sizes: tuple[int, ...]) -> str:
    return " x ".join(map(str, sizes))
