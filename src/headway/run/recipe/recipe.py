"""`Recipe`: model, data, loss, optimiser and global batch, without how they are split.

A `Recipe` is plain data and functions; it holds no process group, no rank and no device. Nothing in
the user's model or data set knows about headway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset

from headway.data.source import Source
from headway.errors import RecipeError
from headway.keywords import checks_fields, told_together
from headway.metrics import Statistic, mean
from headway.plans import ExchangePlan, LayerSplit, PipelinePlan, Synchrony
from headway.plans.batch import Norm
from headway.plans.plan import Zero
from headway.run.recipe.accepted_forms import KEYWORDS_OF_OTHERS, accept_fields, as_criterion

Count = Tensor | int | float
Loss = Callable[[nn.Module, Any], Tensor | tuple[Tensor, Count] | tuple[Tensor, Count, Any]]
"""`loss(model, batch)`: the mean over the batch's samples, or a pair (sum, count).

The pair is for losses whose count is not the number of samples (padding, ignored labels): headway
divides the sum over the global batch by the count over the global batch. With a
`headway.data.StatefulSource` the loss returns a third value, the outputs that the source takes.
"""

Metrics = Callable[[nn.Module, Any], Mapping[str, Any]]
"""`metrics(model, batch)`: name -> mean over the batch's samples, or a pair (sum, count).

As a `Loss`, for any number of values: {"accuracy": (right.sum(), right.numel())}. headway adds sums
and counts over all validation samples of all ranks, and divides once. What is no mean, such as AUC,
is a `headway.metrics.Statistic`.
"""

Examples = Source | Dataset[Any] | DataLoader[Any]


@checks_fields(accept_fields, RecipeError, KEYWORDS_OF_OTHERS)
@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training job as the serial run would do it.

    Mistakes are told when it is made, all together (`headway.run.recipe.accepted_forms`).

    Attributes:
        name: Heads the report; of a recipe.toml, it also names the run directory.
        model: Builds the model; called once per process after seeding, so that every rank and
            every plan starts from the same numbers. Or a model: every process begins with a copy.
        weights: What the model starts from, in place of the numbers that `model` gives it: a
            safetensors file, a torch file, or a directory of `save_pretrained`.
        weights_only: Patterns such as "encoder.*": only these tensors are read. Empty: all of the
            model, and nothing else may be in the file.
        data: Builds the training data: a `Source`, any map-style torch `Dataset`, or a torch
            `DataLoader`, which is taken apart; or the data.
        loss: See `Loss`; or a torch criterion, as with `criterion`; or "tokens", the model's
            own over labels that are not ignored (`headway.huggingface`).
        optimizer: Builds the optimiser from the model; or an optimiser class or a partial of one.
        batch: The global batch of one optimiser step: "64 samples", "8192 tokens", or a number of
            samples; of a DataLoader its own, which need not be said again.
        stop: When the run is complete: "300 steps", "2 epochs", "1M samples".
        collate: Makes a batch of a list of samples (padding, dicts); None: torch's
            `default_collate`. Every micro-batch is made of its own samples.
        microbatch: Most samples in one forward pass of one rank; more are accumulated.
        validate_every: Steps between validations; 0: only at the end.
        validation_samples: Most samples of one validation; None: all of them.
        metrics: What is computed of the validation data beside the loss; see `Metrics`.
        monitor: Name of the validation's value that early stopping, the best checkpoint and a
            ReduceLROnPlateau go by: "loss", or one of `metrics`.
        monitor_mode: Whether a smaller ("min") or a larger ("max") value is better.
        early_stopping: Validations without an improvement after which training stops; 0: never.
        keep_best: Save after each validation that is the best so far; this checkpoint stays, beside
            the newest `checkpoint_keep`.
        loggers: Who is told of steps and validations: "csv", "tensorboard", "wandb", "mlflow", or
            functions that return a logger; see `headway.run.training.loggers`. On rank 0 alone.
        callbacks: Objects with some of the moments of `headway.run.training.callbacks`.
        scheduler: Builds a learning-rate scheduler that is stepped after every optimiser step; a
            ReduceLROnPlateau after every validation.
        scale_rate: "linear from 256 samples", "square_root from 256 samples": the optimiser states
            the rates that are good for that batch; they are scaled to `batch`. None: as stated.
        seed: Decides initial parameters, sample order and dropout.
        clip: Largest global norm of the gradients; None: not clipped.
        precision: Arithmetic of the forward pass. "bfloat16" keeps float32 parameters (autocast).
        checkpoint_every: Steps between checkpoints; 0: only at the end.
        checkpoint_keep: How many checkpoints stay on disk.
        workers: Data-loading processes of each rank; 0 reads in the rank's own process.
        drop_last: Leave out the ragged last batch of each epoch.
        tokens_per_sample: Needed where `batch` or `stop` is stated in tokens.
        exchange: How gradients are exchanged, where no plan file says it; None: the default.
        stages: Ranks over which the model is cut as a pipeline, where no plan file says it; the
            rest of the ranks are copies of the pipeline.
        pipeline: Schedule and cut of that pipeline; None: the default.
        shares: Of unequal devices: how much of each batch the ranks (or copies of a pipeline) take,
            in proportion, where no plan file says it; empty: all as much.
        zero: What the ranks keep a part of instead of all, where no plan file says it: 1 the
            optimiser's state, 2 gradients as well, 3 parameters, too.
        shards: Ranks that keep that together; the rest are copies. None: all.
        split: How layers are split by ranks that share their samples, where no plan file says it.
        norm: Over which samples batch normalisation takes its statistics: "local", those of one
            micro-batch; "global", those of the global batch, exactly as the serial run.
        synchrony: Who agrees with whom, and when; None: all ranks at every step.
        showcase: Makes a text from the trained model, shown at the end (a sample, a score).
    """

    name: str
    model: Callable[[], nn.Module]
    data: Callable[[], Examples]
    loss: Loss
    optimizer: Callable[[Any], Optimizer]
    batch: int | str | None = None
    stop: int | str
    weights: str | Path | None = None
    weights_only: tuple[str, ...] = ()
    collate: Callable[[list[Any]], Any] | None = None
    microbatch: int | None = None
    validation: Callable[[], Examples] | None = None
    validate_every: int = 0
    validation_samples: int | None = None
    metrics: Metrics | None = None
    monitor: str = "loss"
    monitor_mode: Literal["min", "max"] = "min"
    early_stopping: int = 0
    keep_best: bool = False
    loggers: tuple[str | Callable[[], Any], ...] = ()
    callbacks: tuple[object, ...] = ()
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    scale_rate: str | None = None
    seed: int = 0
    clip: float | None = None
    precision: Literal["float32", "float64", "bfloat16"] = "float32"
    checkpoint_every: int = 0
    checkpoint_keep: int = 2
    workers: int = 0
    drop_last: bool = False
    tokens_per_sample: int | None = None
    exchange: ExchangePlan | None = None
    stages: int = 1
    pipeline: PipelinePlan | None = None
    shares: tuple[float, ...] = ()
    zero: Zero = 0
    shards: int | None = None
    split: LayerSplit | None = None
    norm: Norm = "local"
    synchrony: Synchrony | None = None
    showcase: Callable[[nn.Module], str] | None = None


def criterion(function: Callable[[Any, Any], Tensor]) -> Loss:
    """A torch criterion as a `Loss`, for data that yields (input, target).

    Args:
        function: For example `nn.CrossEntropyLoss()`: (output, target) -> mean over the samples.
            Its mean must weigh every sample equally; for losses that ignore some labels write a
            `Loss` that returns (sum, count).

    Raises:
        RecipeError: Its reduction is not the mean.
    """
    try:
        return as_criterion(function)
    except ValueError as error:
        raise told_together("headway.criterion", [str(error)], RecipeError) from None


def sum_and_count(value: Any, samples: int) -> tuple[Tensor, Tensor | float]:
    """What a loss returned, as a sum and what it is a sum over.

    Args:
        value: A mean over the samples, a pair (sum, count), or that and outputs.

    Raises:
        RecipeError: It is none of these.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        return value * samples, float(samples)
    if isinstance(value, tuple) and len(value) in (2, 3):
        total, count = value[:2]
        if isinstance(total, Tensor) and total.numel() == 1 and _is_count(count):
            return total, count
    raise RecipeError(
        f"the loss returned {_described(value)}",
        why="It must return the mean over the samples of the batch, a tensor with one number, or a "
        "pair (sum, count).",
        fix="For example loss.mean(), or (loss.sum(), mask.sum()).",
    )


def give_outputs(value: Any, absorb: Callable[[Any], None] | None) -> None:
    """Hand the outputs that a loss has returned to the source that waits for them, if one does.

    Raises:
        RecipeError: It waits, and the loss has returned none.
    """
    if absorb is None:
        return
    if not (isinstance(value, tuple) and len(value) == 3):
        raise RecipeError(
            f"the loss returned {_described(value)}, without the outputs that the data need",
            why="The next example of a stateful source depends on what the network makes of the "
            "last one.",
            fix="Return (sum, count, outputs).",
        )
    absorb(tree_map(_on_host, value[2]))


def _on_host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value


def check_trains(loss: Tensor) -> None:
    """Before backward.

    Raises:
        RecipeError: The loss depends on no parameter that is trained.
    """
    if not loss.requires_grad:
        raise RecipeError(
            "the loss depends on no parameter that is trained",
            why="All parameters are frozen, or the loss was detached: by .detach(), .item(), "
            "argmax or torch.no_grad().",
            fix="Train a parameter (requires_grad_(True)), and return what was computed of the "
            "model's output.",
        )


def metric_parts(values: Any, samples: int) -> dict[str, Statistic]:
    """What metrics returned, as statistics by name.

    Raises:
        RecipeError: A value is no mean, no pair and no statistic, or metrics have no names.
    """
    if not isinstance(values, Mapping):
        raise RecipeError(
            f"metrics returned {_described(values)}, not a dictionary",
            fix='For example {"accuracy": (right.sum(), right.numel())}.',
        )
    return {str(name): _metric_part(name, value, samples) for name, value in values.items()}


def _metric_part(name: Any, value: Any, samples: int) -> Statistic:
    if name == "loss":
        raise RecipeError(
            "metrics returned a value named loss, which is the recipe's loss",
            fix="Give it another name.",
        )
    if isinstance(value, Statistic):
        return value
    if _is_count(value):
        return mean(float(value) * samples, samples)
    if isinstance(value, tuple) and len(value) == 2 and _is_count(value[0]) and _is_count(value[1]):
        return mean(*value)
    raise RecipeError(
        f"the metric {name} is {_described(value)}",
        why="It must be the mean over the samples of the batch, a pair (sum, count), or a "
        "headway.metrics.Statistic.",
        fix=f'For example {{"{name}": (right.sum(), right.numel())}}.',
    )


def _is_count(count: Any) -> bool:
    return count.numel() == 1 if isinstance(count, Tensor) else isinstance(count, int | float)


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(map(_described, value)) or 'nothing'}"
    return "None" if value is None else f"a {type(value).__name__}"
