"""What one split linear layer keeps and receives by the formulas of the papers, to compare with."""

from __future__ import annotations

from dataclasses import dataclass

from headway.plans.tensor_layout import MatrixParts, TensorGrid, divisors


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
