"""Row-wise Adagrad: one accumulator per row of a table in place of one per number.

The rule of DLRM's tables: G_r += mean over the columns of g_rc^2; row r -= lr g_r / (sqrt(G_r) +
eps). A table of D columns has 1 / D of Adagrad's state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from headway.errors import RecipeError


class RowWiseAdagrad(Optimizer):
    """Adagrad with one accumulator per row.

    Gradients are dense or sparse (`nn.Embedding(..., sparse=True)`). Of a sparse one, equal rows
    are added first, as the rule is not linear; only rows that it names change, as rows with a
    gradient of zeros do not change either.

    Args:
        params: Parameters or groups. A group with "by_row": False, and a parameter of less than two
            dimensions, has one accumulator per number, which is Adagrad.
        lr: The rate.
        eps: Added to the root.

    Raises:
        RecipeError: A number is negative.
    """

    def __init__(
        self, params: ParamsT, lr: float = 0.01, *, eps: float = 1e-10, by_row: bool = True
    ) -> None:
        if lr < 0 or eps < 0:
            raise RecipeError(
                f"RowWiseAdagrad with lr {lr} and eps {eps}", why="Neither is negative."
            )
        super().__init__(params, {"lr": lr, "eps": eps, "by_row": by_row})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def row_squares(self, parameter: Tensor, squares: Tensor) -> Tensor:
        """[n]: the mean of each of n rows of squared gradients [n, ...] of a parameter.

        Where ranks hold columns of rows, this is where they meet.
        """
        return squares.flatten(1).mean(1)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        by_row = group["by_row"] and parameter.dim() > 1
        state = self.state[parameter]
        if not state:
            # By rows also where a rank has none of a table, and no columns.
            state["sum"] = parameter.new_zeros(parameter.shape[: 1 if by_row else None])
        sums: Tensor = state["sum"]
        rate, eps = group["lr"], group["eps"]
        if gradient.is_sparse:
            gradient = gradient.coalesce()
            rows, gradient = gradient.indices()[0], gradient.values()
            squares = self._squares(parameter, gradient, by_row)
            sums.index_add_(0, rows, squares)
            step = gradient / _beside(sums.index_select(0, rows).sqrt() + eps, gradient)
            parameter.index_add_(0, rows, step.mul_(-rate))
            return
        sums.add_(self._squares(parameter, gradient, by_row))
        step = gradient / _beside(sums.sqrt() + eps, gradient)
        parameter.sub_(step.mul_(rate))

    def _squares(self, parameter: Tensor, gradient: Tensor, by_row: bool) -> Tensor:
        squares = gradient.square()
        return self.row_squares(parameter, squares) if by_row else squares


def _beside(of_rows: Tensor, gradient: Tensor) -> Tensor:
    """A number per row in the shape of its rows, or one per number as it is."""
    return of_rows.reshape(of_rows.shape + (1,) * (gradient.dim() - of_rows.dim()))


def tables_by_row(model: nn.Module) -> list[dict[str, Any]]:
    """Groups for `RowWiseAdagrad`: tables by row, all other parameters by number."""
    tables = {id(table) for table in _tables(model.modules())}
    # `parameters` gives a table that two modules share once.
    both: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in model.parameters():
        both[id(parameter) in tables].append(parameter)
    groups = [{"params": found, "by_row": by_row} for by_row, found in both.items()]
    return [group for group in groups if group["params"]]


def _tables(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    for module in modules:
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            yield module.weight
