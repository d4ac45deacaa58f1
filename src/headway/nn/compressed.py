"""Tables with fewer numbers than rows times width, in the place of `nn.EmbeddingBag`.

Shi et al. 2020, "Compositional Embeddings Using Complementary Partitions"; Ginart et al. 2021,
"Mixed Dimension Embeddings".

Names of shapes: N bags, K ids of a bag, D width of a vector.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from headway.errors import UsageError

# ruff: noqa: N803, N806 (shape suffixes)

Join = Literal["mult", "add", "concat"]


class QuotientRemainderBag(nn.Module):
    """Row i is made of row i // c of one table and row i mod c of another.

    Args:
        rows: Ids are below it.
        width: D.
        remainders: c: the tables have rows / c and c rows.
        join: "mult" or "add": of two vectors of D, elementwise; "concat": of D / 2, one behind the
            other.

    Raises:
        UsageError: There is no such join, a size is not positive, or an odd width is to be halved.
    """

    def __init__(self, rows: int, width: int, *, remainders: int = 4, join: Join = "mult") -> None:
        super().__init__()
        halves = join == "concat"
        if join not in get_args(Join) or min(rows, width, remainders) < 1 or (halves and width % 2):
            raise UsageError(
                f"QuotientRemainderBag({rows}, {width}, remainders={remainders}, join={join!r})",
                why=f"Sizes are positive, join is {', '.join(get_args(Join))}, and with concat "
                "the width is even.",
            )
        self.remainders, self.join = remainders, join
        own = width // 2 if halves else width
        self.quotient = nn.Embedding(math.ceil(rows / remainders), own)
        self.remainder = nn.Embedding(remainders, own)
        bound = 1 / math.sqrt(rows)
        nn.init.uniform_(self.quotient.weight, -bound, bound)
        # Of a product one factor begins near 1, or its gradients would be too small to learn by.
        middle = 1.0 if join == "mult" else 0.0
        nn.init.uniform_(self.remainder.weight, middle - bound, middle + bound)

    def forward(self, ids_NK: Tensor, per_sample_weights: Tensor | None = None) -> Tensor:
        """The sum [N, D] of the rows of each bag.

        Args:
            per_sample_weights: What each row is multiplied by, [N, K]; None: 1.
        """
        q_NKD = self.quotient(torch.div(ids_NK, self.remainders, rounding_mode="floor"))
        r_NKD = self.remainder(ids_NK % self.remainders)
        match self.join:
            case "mult":
                rows_NKD: Tensor = q_NKD * r_NKD
            case "add":
                rows_NKD = q_NKD + r_NKD
            case _:
                rows_NKD = torch.cat((q_NKD, r_NKD), dim=-1)
        if per_sample_weights is not None:
            rows_NKD = rows_NKD * per_sample_weights[..., None]
        return rows_NKD.sum(1)


class ProjectedBag(nn.Module):
    """A table of narrow rows, and a layer that widens their sum.

    Args:
        rows: Ids are below it.
        narrow: Width of the rows.
        width: D.
    """

    def __init__(self, rows: int, narrow: int, width: int) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(rows, narrow, mode="sum")
        self.widen = nn.Linear(narrow, width, bias=False)
        bound = 1 / math.sqrt(rows)
        nn.init.uniform_(self.table.weight, -bound, bound)
        nn.init.xavier_uniform_(self.widen.weight)

    def forward(self, ids_NK: Tensor, per_sample_weights: Tensor | None = None) -> Tensor:
        """The sum [N, D] of the rows of each bag; see `QuotientRemainderBag.forward`."""
        result: Tensor = self.widen(self.table(ids_NK, per_sample_weights=per_sample_weights))
        return result


def mixed_width(rows: int, fewest: int, width: int, power: float) -> int:
    """Width of the rows of a table: width (fewest / rows)^power, as a power of two.

    Args:
        fewest: Rows of the smallest table, which has the whole width.
        power: 0: all tables have it; DLRM's experiments have 0.3.
    """
    exact = width * (fewest / rows) ** power
    return min(width, max(1, 1 << round(math.log2(exact)))) if exact > 1 else 1
