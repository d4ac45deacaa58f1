"""Embedding and cross-entropy with the vocabulary cut over an axis; no rank ever has a full row of
logits.

After Shoeybi et al. 2019 (Megatron), section 3. A rank looks up the words that it holds and adds
zeros for the others. The loss of a row needs three numbers of each part: its largest logit, the sum
of exponentials and the logit of the target. Weights of a cuboid are cut once more over i, as those
of a linear layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from headway.capture.fake import is_stand_in
from headway.parallel.tensor.grid import Grid


def words(index: Tensor, weight: Tensor, grid: Grid, axes: str, padding: int | None) -> Tensor:
    """The vectors of the words that this rank has, zeros for the others.

    Args:
        index: int64, any shape.
        weight: [words / parts, width]: this rank's part of the vocabulary.
        grid: The ranks.
        axes: That cut the vocabulary.
        padding: The word, if any, whose vector gets no gradient.

    Returns:
        Pending sum over the axes, [*index.shape, width].
    """
    count = weight.shape[0]
    check_range(index, count * grid.size(axes), "word")
    first = grid.index(axes) * count
    local = index - first
    foreign = (local < 0) | (local >= count)
    own = None if padding is None else padding % (count * grid.size(axes)) - first
    own = own if own is not None and 0 <= own < count else None
    found = torch.nn.functional.embedding(local.masked_fill(foreign, 0), weight, padding_idx=own)
    # A foreign word reads row 0, and gives it no gradient: masked_fill's is zero there.
    return found.masked_fill(foreign.unsqueeze(-1), 0)


@dataclass(frozen=True, eq=False, slots=True)
class Classes:
    """How the classes of logits are cut, and the loss.

    Attributes:
        grid: The ranks.
        axes: That cut the classes.
        smoothing: epsilon: the target is (1 - epsilon) one-hot + epsilon / classes.
        ignored: A target that does not count.
    """

    grid: Grid
    axes: str
    smoothing: float = 0.0
    ignored: int = -100


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, target: Tensor, how: Classes) -> Tensor:
        grid, axes = how.grid, how.axes
        wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        count = wide.shape[-1]
        top = grid.all_reduce_over(wide.amax(-1), axes, largest=True)
        shifted = wide - top.unsqueeze(-1)
        counted = target != how.ignored
        check_range(target.masked_fill(~counted, 0), count * grid.size(axes), "target")
        local = target - grid.index(axes) * count
        mine = (local >= 0) & (local < count)
        local = local.masked_fill(~mine, 0)
        chosen = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(~mine, 0)
        all_of_them = shifted.sum(-1) if how.smoothing else torch.zeros_like(chosen)
        exponentials = shifted.exp_()
        sums = torch.stack([exponentials.sum(-1), chosen, all_of_them])
        total, chosen, all_of_them = grid.all_reduce_over(sums, axes).unbind()
        log_total = total.log()
        classes = count * grid.size(axes)
        loss = log_total - (1 - how.smoothing) * chosen - how.smoothing / classes * all_of_them
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), local, mine, counted)
        ctx.how, ctx.dtype = how, logits.dtype  # type: ignore[attr-defined]
        return loss.masked_fill(~counted, 0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        probabilities, local, mine, counted = ctx.saved_tensors
        how: Classes = ctx.how
        classes = probabilities.shape[-1] * how.grid.size(how.axes)
        g = probabilities - how.smoothing / classes if how.smoothing else probabilities.clone()
        hot = mine.to(g.dtype).mul_(how.smoothing - 1).unsqueeze(-1)
        g.scatter_add_(-1, local.unsqueeze(-1), hot)
        g *= (gradients[0] * counted).unsqueeze(-1)
        return g.to(ctx.dtype), None, None


def split_cross_entropy(logits: Tensor, target: Tensor, how: Classes) -> Tensor:
    """Loss of each row, [rows]; 0 for ignored targets.

    Args:
        logits: [rows, classes / parts].
        target: int64[rows]: whole numbers of classes, the same on the ranks of the axes.
        how: Cut and loss.
    """
    result: Tensor = _Entropy.apply(logits, target, how)  # type: ignore[no-untyped-call]
    return result


def check_range(index: Tensor, count: int, what: str) -> None:
    """What torch says of a number outside of a table; a rank's part alone would not notice.

    On a GPU it would have to wait for the numbers, and is left out.

    Raises:
        IndexError: A number is negative or too large.
    """
    if index.device.type == "cpu" and not is_stand_in(index) and index.numel():
        low, high = torch.aminmax(index)
        if low < 0 or high >= count:
            raise IndexError(f"{what} {int(low if low < 0 else high)} is not among {count}")
