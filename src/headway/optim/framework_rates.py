"""Learning rates of other frameworks, step by step as they have them, as schedulers of torch.

`headway import` names them in recipes. The factor of step t = 0, 1, ... is what the optimiser's own
rate is multiplied by; `deepspeed_factor` and `torchtitan_factor` are plain arithmetic.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Literal

from headway.errors import RecipeError

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

Decay = Literal["constant", "linear", "cosine"]


def deepspeed_factor(
    step: int,
    *,
    warmup: int,
    shape: Literal["log", "linear"],
    start: float,
    decay: Decay,
    steps: int,
    end: float,
) -> float:
    """The factor of DeepSpeed's WarmupLR, WarmupDecayLR and WarmupCosineLR (0.19).

    With k = t - 1, as its schedulers take their first step after the first update, W warm-up steps
    and T in all, g(k) = ln(k + 1) / ln W ("log") or k / W ("linear") while k < W, then 1
    ("constant"), (T - k) / (T - W) ("linear"), or the half cosine of (k - W + 1) / (T - W). The
    factor is start + (1 - start) g, and after the warm-up of "cosine" end + (1 - end) g.
    """
    warmup = max(2, warmup)
    k = step - 1
    if k < 0:
        # The first update has the lowest rate; of WarmupCosineLR 0.
        return 0.0 if decay == "cosine" else start
    if k < warmup:
        rise = math.log(k + 1) / math.log(warmup) if shape == "log" else k / warmup
        return start + (1 - start) * rise
    if decay == "cosine":
        progress = min(1.0, (k - warmup + 1) / max(1, steps - warmup))
        return max(0.0, end + (1 - end) * (1 + math.cos(math.pi * progress)) / 2)
    fall = 1.0 if decay == "constant" else max(0.0, (steps - k) / max(1, steps - warmup))
    return start + (1 - start) * fall


def deepspeed_rates(
    optimizer: Optimizer,
    *,
    warmup: int = 1000,
    shape: Literal["log", "linear"] = "log",
    start: float = 0.0,
    decay: Decay = "constant",
    steps: int | None = None,
    end: float = 0.0,
) -> LRScheduler:
    """DeepSpeed's schedules with a warm-up.

    Args:
        warmup: Steps upwards; DeepSpeed takes at least 2.
        start: The lowest factor, warmup_min_lr / warmup_max_lr or warmup_min_ratio.
        decay: "constant": WarmupLR; "linear": WarmupDecayLR; "cosine": WarmupCosineLR.
        steps: Of the whole training; without effect for "constant".
        end: Of "cosine": the last factor, cos_min_ratio.

    Raises:
        RecipeError: A number is out of its range, or `steps` is missing.
    """
    if warmup < 1 or (decay != "constant" and (steps is None or steps < 1)):
        raise RecipeError(
            f"deepspeed_rates with warmup {warmup}, decay {decay} and steps {steps} cannot be",
            why='warmup is at least 1; decay "linear" and "cosine" need the steps of the training.',
        )
    return _scheduler(
        optimizer,
        partial(
            deepspeed_factor,
            warmup=warmup,
            shape=shape,
            start=start,
            decay=decay,
            steps=steps or 0,
            end=end,
        ),
    )


def torchtitan_factor(
    step: int,
    *,
    steps: int,
    warmup: int,
    decaying: int,
    shape: Literal["linear", "sqrt", "cosine"],
    end: float,
) -> float:
    """The factor of torchtitan's warm-up, stable phase and decay.

    Up along (t + 1) / W while t < W; 1 for S = T + 1 - W - D steps; then, with
    p = (t + 1 - W - S) / D, end + (1 - end) (1 - p | 1 - sqrt(p) | (1 + cos(pi p)) / 2). The step
    that is added to T keeps the last rate above 0.
    """
    if step < warmup:
        return (step + 1) / warmup
    flat = warmup + steps + 1 - warmup - decaying
    if step < flat:
        return 1.0
    progress = min(1.0, (step + 1 - flat) / decaying)
    fall = {
        "linear": 1 - progress,
        "sqrt": 1 - math.sqrt(progress),
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
    }[shape]
    return end + (1 - end) * fall


def torchtitan_rates(
    optimizer: Optimizer,
    *,
    steps: int,
    warmup: int = 200,
    decay_ratio: float | None = None,
    shape: Literal["linear", "sqrt", "cosine"] = "linear",
    end: float = 0.0,
) -> LRScheduler:
    """torchtitan's schedule: warm-up, stable, decay.

    Args:
        steps: Of the whole training.
        decay_ratio: The part of them in which the rate decays; None: all after the warm-up.
        end: The factor that the decay goes down to (min_lr_factor).

    Raises:
        RecipeError: A number is out of its range.
    """
    if steps < 1 or not 0 <= warmup <= steps or not 0 <= (decay_ratio or 0.0) <= 1:
        raise RecipeError(
            f"torchtitan_rates of {steps} steps with warmup {warmup} and decay_ratio {decay_ratio} "
            "cannot be",
            why="warmup is at most the steps; decay_ratio is a part of them, from 0 to 1.",
        )
    decaying = steps - warmup
    if decay_ratio is not None:
        decaying = min(decaying, round(steps * decay_ratio))
    return _scheduler(
        optimizer,
        partial(
            torchtitan_factor, steps=steps, warmup=warmup, decaying=decaying, shape=shape, end=end
        ),
    )


def _scheduler(optimizer: Optimizer, factor: partial[float]) -> LRScheduler:
    from torch.optim.lr_scheduler import LambdaLR

    return LambdaLR(optimizer, factor)
