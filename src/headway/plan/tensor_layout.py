"""Where the parts of a split linear layer lie, and what its ranks send each other; pure arithmetic.

Y[M x N] = X[M x K] W[K x N], with M rows (samples x positions), on three kinds of grids:

    classic  p ranks; activations whole, W by columns and then by rows (Megatron; Shoeybi et al.
    2019) cuboid   q_i x q_j x q_l ranks; everything in 1/p parts (Bian et al. 2021, for any cuboid)
    summa    d x q x q ranks; blocks of X and W, W once per depth (Optimus, Tesseract)

An axis of the grid is a letter. A part of a dimension is named by its axes, the major one first:
rows "ij" are cut over i, and each of those pieces over j. Invariant: `MatrixParts` of a result is
what the next layer takes, so that a chain of layers never moves an activation in between.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from headway.errors import PlanError

GridForm = Literal["classic", "cuboid", "summa"]


@dataclass(frozen=True)
class TensorGrid:
    """A grid of ranks that split layers, by the sizes of its axes.

    Attributes:
        form: How a linear layer is carried out.
        sizes: Axis -> ranks along it; the last one's neighbours are neighbouring ranks.
    """

    form: GridForm
    sizes: tuple[tuple[str, int], ...]

    @staticmethod
    def classic(p: int) -> TensorGrid:
        """1-D, activations whole between the layers."""
        return TensorGrid("classic", (("j", p),))

    @staticmethod
    def cuboid(q_i: int, q_j: int, q_l: int) -> TensorGrid:
        """(p, 1, 1) is ZeRO-3; (1, p, 1) is 1-D with activations in parts; (q, q, q) is 3-D."""
        return TensorGrid("cuboid", (("j", q_j), ("l", q_l), ("i", q_i)))

    @staticmethod
    def summa(q: int, depth: int = 1) -> TensorGrid:
        """2-D; with a depth, 2.5-D."""
        return TensorGrid("summa", (("d", depth), ("i", q), ("j", q)))

    @property
    def ranks(self) -> int:
        return math.prod(size for _, size in self.sizes)

    @property
    def axes(self) -> str:
        return "".join(axis for axis, _ in self.sizes)

    def size(self, axes: Iterable[str]) -> int:
        """The number of parts that these axes make."""
        number = 1
        for axis in axes:
            number *= self._size_of[axis]
        return number

    @cached_property
    def _size_of(self) -> dict[str, int]:
        return dict(self.sizes)

    @property
    def resident(self) -> MatrixParts:
        """How activations lie between layers."""
        match self.form:
            case "classic":
                return MatrixParts("", "")
            case "cuboid":
                return MatrixParts("ij", "l")
            case "summa":
                return MatrixParts("di", "j")

    def after(self, x: MatrixParts) -> MatrixParts:
        """How a linear layer's result lies.

        Raises:
            ValueError: No layer takes such an activation.
        """
        if x == self.resident:
            rest = {"classic": MatrixParts("", "j"), "cuboid": MatrixParts("il", "j"), "summa": x}
            return rest[self.form]
        if self.form != "summa" and x == self.after(self.resident):
            return self.resident
        raise ValueError(f"rows {x.rows!r} and columns {x.columns!r} are no layout of {self.form}")


@dataclass(frozen=True)
class MatrixParts:
    """Axes by which the rows and the columns of a matrix are cut; "" where they are whole."""

    rows: str
    columns: str


@dataclass(frozen=True, kw_only=True)
class LinearLayout:
    """One linear layer on a grid.

    Attributes:
        x: Parts of X, M x K.
        m: Rows, M.
        k: Inputs, K.
        n: Outputs, N.
    """

    grid: TensorGrid
    x: MatrixParts
    m: int
    k: int
    n: int

    @property
    def y(self) -> MatrixParts:
        """Parts of Y, M x N."""
        return self.grid.after(self.x)

    @property
    def weight(self) -> MatrixParts:
        """Parts of the weight as torch keeps it: rows are outputs N, columns inputs K."""
        match self.grid.form:
            case "classic":
                return MatrixParts(self.y.columns, self.x.columns)
            case "cuboid":
                return MatrixParts(f"{self.y.columns}i", self.x.columns)
            case "summa":
                return MatrixParts("j", "i")

    @property
    def bias(self) -> str:
        """Axes by which the bias is cut, as are the columns of Y."""
        return self.y.columns

    @property
    def shares(self) -> dict[str, int]:
        """Elements that a rank holds of X, W and Y."""
        return {
            "x": self.m * self.k // self._pieces(self.x),
            "w": self.k * self.n // self._pieces(self.weight),
            "y": self.m * self.n // self._pieces(self.y),
        }

    def _pieces(self, parts: MatrixParts) -> int:
        return self.grid.size(parts.rows + parts.columns)

    @property
    def workspace(self) -> dict[str, int]:
        """Elements that a rank holds for a moment: gathered operands, or two blocks of each."""
        shares, size = self.shares, self.grid.size
        match self.grid.form:
            case "classic":
                return {"x": 0, "w": 0}
            case "cuboid":
                return {"x": shares["x"] * size(self._minor), "w": shares["w"] * size("i")}
            case "summa":
                return {"x": 2 * shares["x"], "w": 2 * shares["w"]}

    @property
    def _minor(self) -> str:
        """The axis over which the rows of a cuboid's X are gathered."""
        return self.x.rows[1:]

    @property
    def forward(self) -> dict[str, int]:
        """Elements that a rank receives in the forward pass, by what travels.

        Cuboid: ((q_j - 1) MK + (q_i - 1) KN + (q_l - 1) MN) / p in all. Summa: (q - 1) / q^2
        (MK / d + KN). Classic: the all-reduce of Y behind a layer cut by rows, 2 (p - 1) / p MN.
        """
        shares, size = self.shares, self.grid.size
        match self.grid.form:
            case "classic":
                return {"y": _all_reduce(size(self.x.columns), shares["y"])}
            case "cuboid":
                return {
                    "x": (size(self._minor) - 1) * shares["x"],
                    "w": (size("i") - 1) * shares["w"],
                    "y": (size(self.x.columns) - 1) * shares["y"],
                }
            case "summa":
                others = size("i") - 1
                return {"x": others * shares["x"], "w": others * shares["w"]}

    def backward(self, *, keep: bool = True, bias: bool = False) -> dict[str, int]:
        """Elements that a rank receives in the backward pass, by what travels.

        Args:
            keep: Gathered operands were kept; if not, they are gathered again (cuboid only).
            bias: The layer has one, and its gradient is summed as well.
        """
        shares, size = self.shares, self.grid.size
        piece = self.n // size(self.bias) if bias else 0
        match self.grid.form:
            case "classic":
                return {"dx": _all_reduce(size(self.y.columns), shares["x"])}
            case "cuboid":
                there = self.forward
                found = {"dy": there["y"], "dx": there["x"], "dw": there["w"]}
                found["db"] = _all_reduce(size("i"), piece)
                return found if keep else found | {"x": there["x"], "w": there["w"]}
            case "summa":
                others, depth = size("i") - 1, size("d")
                found = {
                    "w": others * shares["w"],
                    "dx": others * shares["x"],
                    "x": others * shares["x"],
                    "dw": others * shares["w"] + _all_reduce(depth, shares["w"]),
                }
                return found | {"db": _all_reduce(size("i"), piece) + _all_reduce(depth, piece)}


def _all_reduce(ranks: int, elements: int) -> int:
    """Received by each rank: a reduce-scatter and an all-gather of 1/ranks parts."""
    return 2 * (ranks - 1) * elements // ranks


def optimal_data_groups(ranks: int, rows: int, outputs: int) -> int:
    """G data groups of P/G ranks that exchange least for a linear layer of N outputs.

    cost(G) = 2 K (m/G) (1 - G/P) + 2 K N (G - 1) / P: gather and reduce-scatter of activations in a
    group, all-reduce of the group's weights over the groups; K is left out. Its minimum over the
    reals is G* = sqrt(P m / N) (Das et al. 2016). Equal costs: the smaller G.
    """
    return min(divisors(ranks), key=lambda g: (elements_exchanged(g, ranks, rows, outputs), g))


def elements_exchanged(groups: int, ranks: int, rows: int, outputs: int) -> float:
    """cost(G) / K, in elements per rank and step."""
    inside = 2 * rows / groups * (1 - groups / ranks)
    return inside + 2 * outputs * (groups - 1) / ranks


def divisors(number: int) -> tuple[int, ...]:
    return tuple(n for n in range(1, number + 1) if number % n == 0)


@dataclass(frozen=True)
class AxisDivisor:
    """A number that axes must divide.

    Attributes:
        what: Whose it is: "blocks.0.attention: heads".
    """

    axes: str
    size: int
    what: str


def check_divisibility(grid: TensorGrid, needs: Sequence[AxisDivisor]) -> None:
    """Refuse a grid that does not divide what it has to.

    Raises:
        PlanError: With each size that is not a multiple, and the legal degrees.
    """
    bad = [need for need in needs if need.size % grid.size(need.axes)]
    if not bad:
        return
    problems = []
    for need in bad:
        legal = ", ".join(map(str, divisors(need.size)))
        axes = " x ".join(f"{a} = {grid.size(a)}" for a in need.axes if grid.size(a) > 1)
        problems.append(f"{need.what}: {need.size} over {axes}; legal degrees: {legal}")
    raise PlanError(
        "the model cannot be split so",
        problems=list(dict.fromkeys(problems)),
        where=f"tensor grid {grid.form} " + " x ".join(f"{a}={n}" for a, n in grid.sizes),
        fix=f"Degrees that suit all of it: {_common(grid, needs)}."
        + whole_layers_hint(
            [name for name, named, _ in (n.what.partition(": ") for n in bad) if named]
        ),
    )


def whole_layers_hint(names: Sequence[str]) -> str:
    """What a user may type to leave layers whole; "" of none."""
    if not names:
        return ""
    modules = (name.rpartition(".")[0] or name for name in names)
    alike = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", module) for module in modules)
    said = json.dumps([*alike])
    return f" Or leave these layers whole: --set 'split.whole={said}', in Python whole={said}."


def _common(grid: TensorGrid, needs: Sequence[AxisDivisor]) -> str:
    """For a single axis all degrees; else, for each axis, those with the others as they are."""
    found = []
    for axis, _ in grid.sizes:
        sizes = [n.size // math.gcd(n.size, grid.size(set(n.axes) - {axis})) for n in needs
                 if axis in n.axes]  # fmt: skip
        legal = divisors(math.gcd(*sizes)) if sizes else ()
        if legal and grid.size(axis) > 1:
            found.append(f"{axis} of {', '.join(map(str, legal))}")
    return "; ".join(found) or "none"
