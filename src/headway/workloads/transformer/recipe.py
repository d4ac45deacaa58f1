"""A byte-level language model of Python source code, as recipes.

`recipe` takes every size; `demo` is `recipe` tuned so that two processes of one thread each learn
something that looks like Python in about a minute. Neither knows how the job is split.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from headway.errors import RecipeError
from headway.run.recipe.recipe import Recipe, criterion
from headway.workloads.transformer.data import text_source
from headway.workloads.transformer.model import TransformerConfig, TransformerLM, generate

PROMPT = b"def read(self, name, value=None):\n    if "


def recipe(
    *,
    width: int = 384,
    layers: int = 6,
    heads: int = 6,
    window: int = 256,
    dropout: float = 0.0,
    tied: bool = True,
    batch: int | str = 64,
    microbatch: int | None = None,
    steps: int = 5000,
    learning_rate: float = 1e-3,
    warmup: int = 100,
    weight_decay: float = 0.1,
    validate_every: int = 250,
    validation_samples: int = 512,
    checkpoint_every: int = 500,
    seed: int = 0,
    directory: str | Path | None = None,
) -> Recipe:
    """A transformer on the bytes of the standard library's source files.

    Args:
        width, layers, heads, window, dropout, tied: See `TransformerConfig`.
        batch: Global batch, in samples of `window` bytes or as text ("8192 tokens").
        microbatch: Most samples of one forward pass of one rank.
        learning_rate: The highest one: reached after `warmup` steps, then a cosine to a tenth.
        warmup: Steps in which the learning rate rises linearly.
        weight_decay: Of the matrices; biases and norms are not decayed.
        validation_samples: Windows of a validation, evenly spread over the validation text.
        seed: Decides initial parameters, sample order and dropout.
        directory: Where the text's flat files lie; None: see `text_file`.

    Raises:
        RecipeError: The sizes do not make a model or a schedule.
    """
    if not 0 < warmup < steps:
        raise RecipeError(
            f"warmup of {warmup} steps does not fit {steps} steps",
            fix="choose 0 < warmup < steps",
        )
    try:
        config = TransformerConfig(
            width=width, layers=layers, heads=heads, window=window, dropout=dropout, tied=tied
        )
    except ValueError as error:
        raise RecipeError("the sizes do not make a transformer", why=str(error)) from error
    text = partial(text_source, window=window, directory=directory)
    return Recipe(
        name="transformer",
        model=partial(TransformerLM, config),
        data=partial(text, "train"),
        validation=partial(text, "validation", count=validation_samples),
        loss=criterion(next_byte_loss),
        optimizer=partial(adamw, learning_rate=learning_rate, weight_decay=weight_decay),
        scheduler=partial(warmup_cosine, warmup=warmup, steps=steps),
        batch=batch,
        microbatch=microbatch,
        tokens_per_sample=window,
        stop=f"{steps} steps",
        clip=1.0,
        seed=seed,
        validate_every=validate_every,
        checkpoint_every=checkpoint_every,
        showcase=text_sample,
    )


def demo() -> Recipe:
    """The recipe of `make demo`: 644,224 parameters, 600 steps of 2,048 bytes.

    A serial loop took 135 s of CPU time on one thread of a busy 2.5 GHz Xeon (9,100 bytes/s); the
    validation loss fell from 5.33 to 1.80 nats per byte (7.68 to 2.60 bits).
    """
    return recipe(
        width=128,
        layers=3,
        heads=4,
        window=128,
        # On two ranks one micro-batch of 8 windows each.
        batch=16,
        microbatch=8,
        steps=600,
        learning_rate=3e-3,
        warmup=30,
        validate_every=100,
        validation_samples=256,
        checkpoint_every=200,
    )


def next_byte_loss(logits_BTV: Tensor, target_BT: Tensor) -> Tensor:  # noqa: N803
    """Mean cross-entropy over all positions, in nats per byte."""
    return nn.functional.cross_entropy(logits_BTV.flatten(0, 1), target_BT.flatten())


def adamw(model: nn.Module, *, learning_rate: float, weight_decay: float) -> Optimizer:
    """AdamW that decays the matrices and leaves biases and norms alone."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    # Fused: one kernel for all parameters; a step of the demo is 15 % shorter.
    return AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=True)


def warmup_cosine(optimizer: Optimizer, *, warmup: int, steps: int) -> LRScheduler:
    """Linear rise for `warmup` steps, then a cosine to a tenth at `steps`.

    Made of torch's own schedulers because their state is plain numbers, which a checkpoint holds.
    """
    highest = max(group["lr"] for group in optimizer.param_groups)
    rise = LinearLR(optimizer, start_factor=1 / warmup, total_iters=warmup)
    fall = CosineAnnealingLR(optimizer, T_max=steps - warmup, eta_min=0.1 * highest)
    return SequentialLR(optimizer, [rise, fall], milestones=[warmup])


def text_sample(model: nn.Module) -> str:
    """What the model writes after the start of a method."""
    text = generate(cast(TransformerLM, model), PROMPT, count=400, temperature=0.7, seed=0)
    return text.decode("utf-8", errors="replace").strip("\n")
