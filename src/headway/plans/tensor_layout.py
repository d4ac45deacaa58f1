"""Where the parts of a split linear layer lie, and what its ranks send each other; pure arithmetic.

Y[M x N] = X[M x K] W[K x N], with M rows (samples x positions), on three kinds of grids:

    classic  p ranks; activations whole, W by columns, then by rows (Megatron, Shoeybi et al. 2019)
    cuboid   q_i x q_j x q_l ranks; everything in 1/p parts (Bian et al. 2021, for any cuboid)
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
        # Layers alternate: the second of a pair leads back (in Megatron by columns, then by rows).
        if self.form != "summa" and x == self.after(self.resident):
            return self.resident
        raise ValueError(f"rows {x.rows!r} and columns {x.columns!r} are no layout of {self.form}")


@dataclass(frozen=True)
class MatrixParts:
    """Axes by which the rows and the columns of a matrix are cut; "" where they are whole."""

    rows: str
    columns: str


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
        # What the other axes leave of each size; the axis must divide all of these.
        sizes = [n.size // math.gcd(n.size, grid.size(set(n.axes) - {axis})) for n in needs
                 if axis in n.axes]  # fmt: skip
        legal = divisors(math.gcd(*sizes)) if sizes else ()
        if legal and grid.size(axis) > 1:
            found.append(f"{axis} of {', '.join(map(str, legal))}")
    return "; ".join(found) or "none"
