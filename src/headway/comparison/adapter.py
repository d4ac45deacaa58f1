"""What a framework has to bring along to be compared: a class with four methods.

    class Mine(FrameworkAdapter):
        def start(self, job): ...       # meet the other processes
        def prepare(self, job): ...     # the model and its optimiser, as the framework wants them
        def step(self, batch): ...      # one optimiser step; the loss of this process's samples
        def close(self): ...            # leave in order

    headway compare RECIPE --with ddp,my_module:Mine

Each process makes one object of the class and calls the methods in this order, `step` once for each
global batch. An adapter is written as the framework's own documentation recommends; what its
methods add to those of `frameworks.plain.PlainLoop` is what a user has to change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from headway.data import Cursor, Loader
from headway.data.source import Source
from headway.plans import BatchSplit, Plan
from headway.run.recipe.batch_units import resolve_batch
from headway.run.recipe.recipe import Recipe, sum_and_count
from headway.run.recipe.training_data import training_data
from headway.run.step.randomness import build_model
from headway.run.step.setup import stepped_each_step

Reads = Literal["its share", "the whole batch", "by itself"]
_DROPOUT_KINDS = ("drop", "stochasticdepth")
"""In the names of the classes whose probability is `p`: torch's, torchvision's and timm's."""


@dataclass(frozen=True, kw_only=True)
class FrameworkJob:
    """What an adapter builds from: a recipe, and this process's place among the others.

    The variables of torchrun (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) are set.

    Attributes:
        recipe: As the user wrote it.
        rank: Of this process.
        ranks: How many processes there are.
        plan: Of headway; None: data parallelism.
        shares: Into how many the serial reference cuts each batch.
        dropout: As the model has it; else it is off, and frameworks that draw differently have
            equal losses.
    """

    recipe: Recipe
    rank: int
    ranks: int
    plan: Plan | None = None
    shares: int = 1
    dropout: bool = True

    @property
    def batch(self) -> int:
        """Samples of the global batch."""
        return resolve_batch(self.recipe)

    def model(self) -> nn.Module:
        """The model in training mode; every process gets the same numbers."""
        model = build_model(self.recipe)
        if not self.dropout:
            turn_off_dropout(model)
        return model

    def optimizer(self, model: nn.Module) -> Optimizer:
        """The recipe's optimiser of a model, wrapped or not."""
        return self.recipe.optimizer(model)

    def scheduler(self, optimizer: Optimizer) -> LRScheduler | None:
        """The recipe's scheduler, to be stepped after every optimiser step; None: it has none."""
        made = None if self.recipe.scheduler is None else self.recipe.scheduler(optimizer)
        return stepped_each_step(made)

    def loss(self, model: Any, batch: Any) -> Tensor:
        """The mean loss of a batch, a scalar; `model` is called as the recipe's loss does it."""
        total, count = sum_and_count(self.recipe.loss(model, batch), num_samples(batch))
        return total / count

    def data(self) -> Source:
        """The training data."""
        return training_data(self.recipe)

    def batches(self, reads: Reads) -> Iterator[Any]:
        """This process's part of each global batch, in the recipe's order, without an end."""
        whole = reads == "the whole batch"
        loader = Loader(
            self.data(),
            BatchSplit(samples=self.batch),
            rank=0 if whole else self.rank,
            ranks=1 if whole else self.ranks,
            cursor=Cursor(seed=self.recipe.seed),
            # A ragged batch has unequal shares, of which the frameworks take unequal means.
            drop_last=True,
            workers=self.recipe.workers,
        )
        with loader:
            for batch in loader:
                yield batch.micros[0].data


class FrameworkAdapter(Protocol):
    """A framework, in one process of a comparison.

    Attributes:
        exact: Whether it computes what the plain loop computes, but for rounding.
        reads: What `step` is given: this process's share of each global batch, all of it, or None,
            where the framework reads the data itself.
    """

    exact: ClassVar[bool]
    reads: ClassVar[Reads]

    def start(self, job: FrameworkJob) -> None:
        """Meet the other processes."""
        ...

    def prepare(self, job: FrameworkJob) -> None:
        """Build model and optimiser, and wrap them."""
        ...

    def step(self, batch: Any) -> Tensor | float | None:
        """One optimiser step.

        Returns:
            The mean loss of the samples that this process had; None: another process knows it.
        """
        ...

    def close(self) -> None:
        """Leave the others in order."""
        ...


def num_samples(batch: Any) -> int:
    """The length of dimension 0 of a batch's first tensor.

    Raises:
        ValueError: There is no tensor.
    """
    for leaf in torch.utils._pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return len(leaf)
    raise ValueError("a batch without a tensor")


def turn_off_dropout(model: nn.Module) -> None:
    """Set every probability of dropout to 0.

    It is `p` of a dropout module, or a number above 0 and up to 1 whose name contains "drop"
    ("attn_dropout", "drop_prob"), of a module or of the configuration that it holds, as in
    Hugging Face's models. A probability that is written into `forward` stays.
    """
    for module in model.modules():
        if any(part in type(module).__name__.lower() for part in _DROPOUT_KINDS):
            _zero(module, "p")
        for holder in (module, getattr(module, "config", None)):
            for name in [name for name in getattr(holder, "__dict__", ()) if "drop" in name]:
                _zero(holder, name)


def _zero(holder: object, name: str) -> None:
    value = getattr(holder, name, None)
    if isinstance(value, float) and 0 < value <= 1:
        with suppress(AttributeError):  # a frozen configuration; modules have numbers of their own
            setattr(holder, name, 0.0)
