"""Gradual warm-up around any other scheduler (cosine, say), and the momentum correction.

Goyal et al. 2017, section 2.2: the rate grows by the same amount in every step until it is that of
the schedule. Section 3: a velocity that absorbs the rate, v = m v + lr g and w = w - v (equation
10), must be multiplied by new / old when the rate changes, or it goes on with steps of the old
length. The inner scheduler sees its own rates only, so any scheduler can be inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, ReduceLROnPlateau

from headway.errors import RecipeError
from headway.optim.layerwise import LARS


class WarmUp(LRScheduler):
    """Multiplies the rates of another scheduler by a factor that grows to 1.

    The factor of step t = 0, 1, ... is start + (1 - start) t / steps, and 1 from step `steps` on.
    It is the outermost scheduler. A rate that is changed by hand is kept, as by torch's own ones.

    Args:
        steps: Optimiser steps of the warm-up; 0: none.
        start: The first factor; None: 1 / steps. With a rate scaled k times, 1 / k begins with the
            rate of the reference run, as Goyal et al. do.
        then: Makes the scheduler inside; None: the rates stay as they are.
        delay: The scheduler inside begins after the warm-up. False: with it, so that its milestones
            are steps of the whole run, as in the paper.
        velocity: Key of the optimiser's state that holds a velocity which absorbs the rate; it is
            corrected whenever a rate changes. torch's SGD and headway's LARS need none.

    Raises:
        RecipeError: A number is out of its range, the scheduler inside cannot be stepped by number
            alone, or the optimiser's velocity does not absorb the rate.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        steps: int,
        *,
        start: float | None = None,
        then: Callable[[Optimizer], LRScheduler] | None = None,
        delay: bool = False,
        velocity: str | None = None,
    ) -> None:
        if steps < 0 or not 0 <= (start or 0.0) <= 1:
            raise RecipeError(
                f"a warm-up of {steps} steps that starts at {start} cannot be",
                why="steps is at least 0; start is a part of the rate, from 0 to 1.",
            )
        if velocity is not None:
            _check_velocity(optimizer)
        self.steps = steps
        self.start = start if start is not None else 1 / max(1, steps)
        self.delay = delay
        self.velocity = velocity
        self._then = None if then is None else _checked(then(optimizer))
        self._rates = _rates(optimizer)
        self._factor = 1.0
        super().__init__(optimizer)  # takes the first step: the rates of step 0

    def factor(self, step: int) -> float:
        """What the rates of optimiser step `step`, counted from 0, are multiplied by."""
        if step >= self.steps:
            return 1.0
        return self.start + (1 - self.start) * step / self.steps

    def get_lr(self) -> list[float | Tensor]:
        """The rates of step `last_epoch`; called by `step` alone."""
        self._uncover()
        begins = self.steps if self.delay else 0
        # Its constructor has set the rates of step 0, so the first call comes one step after its
        # beginning.
        if self._then is not None and self.last_epoch > begins:
            self._then.step()
        self._rates = _rates(self.optimizer)
        self._factor = self.factor(self.last_epoch)
        return [rate * self._factor for rate in self._rates]

    def step(self, epoch: int | None = None) -> None:
        """Set the rates of the next optimiser step."""
        before = _rates(self.optimizer)
        super().step(epoch)
        if self.velocity is not None:
            correct_momentum(self.optimizer, before, key=self.velocity)

    def _uncover(self) -> None:
        """Give the groups the rates without the factor, which is what the inner scheduler knows."""
        # A rate that is not what was set was changed by hand: it is kept, without the factor.
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            live = float(group["lr"])
            by_hand = live != rate * self._factor and self._factor > 0
            _set(group, live / self._factor if by_hand else rate)

    def state_dict(self) -> dict[str, Any]:
        """Plain values, with the state of the scheduler inside under "then"."""
        state = {k: v for k, v in self.__dict__.items() if k not in ("optimizer", "_then")}
        return {**state, "then": None if self._then is None else self._then.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = dict(state_dict)
        inner = state.pop("then")
        self.__dict__.update(state)
        if self._then is not None and inner is not None:
            self._then.load_state_dict(inner)


@torch.no_grad()
def correct_momentum(
    optimizer: Optimizer, before: Sequence[float], *, key: str = "momentum_buffer"
) -> None:
    """v *= new / old in every group whose rate has changed (Goyal et al. 2017, section 3).

    Call it after the rates were changed and before the next step. `torch.optim.SGD` needs none: its
    form, u = m u + g and w = w - lr u (equation 9), applies the new rate to the whole velocity by
    itself, and correcting it would be wrong; it is refused.

    Args:
        optimizer: One whose velocity absorbs the rate.
        before: The rate of every group before the change. After a rate of 0 the velocity is 0, and
            stays so.
        key: The velocity's key in the optimiser's state.

    Raises:
        RecipeError: The optimiser's velocity does not absorb the rate.
    """
    _check_velocity(optimizer)
    for group, old in zip(optimizer.param_groups, before, strict=True):
        new = float(group["lr"])
        if new == old or old == 0:
            continue
        for parameter in group["params"]:
            velocity = optimizer.state.get(parameter, {}).get(key)
            if isinstance(velocity, Tensor):
                velocity.mul_(new / old)


def _check_velocity(optimizer: Optimizer) -> None:
    """torch's own optimisers, and LARS unless told otherwise, multiply by the rate at the end."""
    kind = type(optimizer)
    absorbs = not kind.__module__.startswith(("torch.optim.", "headway.optim."))
    if isinstance(optimizer, LARS):
        absorbs = not any(group["momentum_correction"] for group in optimizer.param_groups)
    if not absorbs:
        raise RecipeError(
            f"the momentum of {kind.__name__} needs no correction",
            why="Its velocity does not contain the rate: a new one acts on all of it at once.",
            fix="Leave velocity out.",
        )


def _checked(scheduler: LRScheduler) -> LRScheduler:
    if isinstance(scheduler, ReduceLROnPlateau) or not isinstance(scheduler, LRScheduler):
        raise RecipeError(
            f"{type(scheduler).__name__} cannot follow a warm-up",
            why="It must be a scheduler of torch that is stepped by its number alone.",
            fix="Use one that follows a curve, such as CosineAnnealingLR.",
        )
    return scheduler


def _rates(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def _set(group: dict[str, Any], rate: float) -> None:
    # A tensor rate stays the same tensor, as torch's schedulers keep it.
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def warmup_then_cosine(
    optimizer: Optimizer, *, steps: int, warmup: int | None = None, end: float = 0.0
) -> LRScheduler:
    """Up along a line, then down along a cosine: the rates of the example trainings.

    Args:
        steps: Of the whole training, warm-up included.
        warmup: Steps upwards; None: a tenth of `steps`.
        end: The rate after `steps`, as a share of the highest group's.
    """
    rise = steps // 10 if warmup is None else warmup
    lowest = end * max(group["lr"] for group in optimizer.param_groups)
    fall = partial(CosineAnnealingLR, T_max=max(1, steps - rise), eta_min=lowest)
    return WarmUp(optimizer, rise, then=fall, delay=True)


def warmup_hold_decay(
    optimizer: Optimizer, *, warmup: int, hold: int, decay: int, lowest: float = 1e-7
) -> LRScheduler:
    """Up along a line, as it is, then down along a parabola: the rates of DLRM's trainings.

    The factor of step t = 0, 1, ... is (t + 1) / warmup, then 1 for `hold` steps, then
    ((decay - n) / decay)^2 in the n-th step behind them, and after `decay` such steps it stays.

    Args:
        warmup: Steps upwards.
        hold: Steps at the full rate.
        decay: Steps downwards; 0: the rate stays.
        lowest: No rate falls below it.

    Raises:
        RecipeError: A number is negative.
    """
    if min(warmup, hold, decay) < 0 or lowest < 0:
        raise RecipeError(
            f"a warm-up of {warmup}, a hold of {hold} and a decay of {decay} steps to {lowest}",
            why="All of these are at least 0.",
        )
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    return LambdaLR(
        optimizer, [partial(_rise_hold_fall, rate, warmup, hold, decay, lowest) for rate in rates]
    )


def _rise_hold_fall(
    rate: float, warmup: int, hold: int, decay: int, lowest: float, step: int
) -> float:
    if step < warmup:
        return (step + 1) / warmup
    fallen = min(max(0, step - warmup - hold), decay)
    factor = ((decay - fallen) / decay) ** 2 if decay else 1.0
    return max(factor, min(1.0, lowest / rate)) if rate else factor
