"""Adagrad with one accumulator for each row of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from headway.errors import UsageError
from headway.keywords import checks_keywords


@checks_keywords
class RowWiseAdagrad(Optimizer):
    """Adagrad (Duchi, Hazan and Singer, JMLR 2011) with the mean over a row's columns.

    For each row r with gradient g: `G[r] += mean(g * g)`, then `row -= lr * g / (sqrt(G[r]) + eps)`.
    A gradient that is sparse (`nn.EmbeddingBag(sparse=True)`), or of a table that grows, changes
    only its rows; of a dense one, a row whose gradient is 0 stays.

    Args:
        params: Parameters of two dimensions, or groups of them, as of any optimiser of torch.
        lr: Learning rate.
        eps: Added to the square root; more than 0.
        initial: What the accumulators begin with.

    Raises:
        UsageError: A value that is not among the legal ones; at the first step, a parameter that
            does not have two dimensions.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 0.01, eps: float = 1e-10, initial: float = 0.0
    ) -> None:
        for name, value, legal in (("lr", lr, lr >= 0), ("eps", eps, eps > 0),
                                   ("initial", initial, initial >= 0)):  # fmt: skip
            if not legal:
                raise UsageError(f"headway.nn.RowWiseAdagrad: {name} is {value}")
        super().__init__(params, {"lr": lr, "eps": eps, "initial": initial})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: torch.nn.Parameter, group: dict[str, Any]) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if parameter.ndim != 2:
            raise UsageError(
                f"headway.nn.RowWiseAdagrad: a parameter is {list(parameter.shape)}",
                why="It has one number for each row, so that parameters must have two dimensions.",
                fix="Give it the tables alone, and the rest of the model another optimiser.",
            )
        if "sum" not in state:
            state["sum"] = parameter.new_full((len(parameter),), group["initial"])
        sums = state["sum"]
        if gradient.is_sparse:
            gradient = gradient.coalesce()
            rows, values = gradient.indices()[0], gradient.values()
            own = sums.index_select(0, rows) + values.square().mean(1)
            sums.index_copy_(0, rows, own)
            change = values / (own.sqrt() + group["eps"]).unsqueeze(1)
            parameter.index_add_(0, rows, change, alpha=-group["lr"])
        else:
            sums.add_(gradient.square().mean(1))
            parameter.addcdiv_(
                gradient, (sums.sqrt() + group["eps"]).unsqueeze(1), value=-group["lr"]
            )
