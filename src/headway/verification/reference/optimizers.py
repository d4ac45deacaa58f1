"""LARS and LAMB written a second time, as their papers have them: one parameter after the other.

The reference steps by these, so that a mistake in `headway.optim` is a difference. Sources: You,
Gitman and Ginsburg 2017, algorithm 1, and Goyal et al. 2017, equation 10 (momentum correction); You
et al. 2020, algorithm 2. All other optimisers are torch's or the user's, and step as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from headway.errors import NotEqual
from headway.optim import LAMB, LARS, WarmUp
from headway.optim.warmup import warmup_then_cosine

Update = Callable[[Tensor, Mapping[str, Any], dict[str, Any]], None]


def step_as_published(optimizer: Optimizer) -> Optimizer:
    """Let `optimizer.step` make the published update; before a scheduler wraps it."""
    for kind, update in ((LARS, _lars), (LAMB, _lamb)):
        if isinstance(optimizer, kind):
            # Bound, as schedulers want the method that they wrap.
            optimizer.step = MethodType(_step_by(update), optimizer)  # type: ignore[method-assign]
    return optimizer


def check_warm_up(scheduler: WarmUp) -> None:
    """Hold the factors of a gradual warm-up (Goyal et al. 2017, section 2.2) against its line.

    Raises:
        NotEqual: A factor is another one.
    """
    steps, start = scheduler.steps, scheduler.start
    for step in range(steps + 2):
        wanted = 1.0 if step >= steps else start + (1 - start) / steps * step
        if abs(scheduler.factor(step) - wanted) > 1e-12:
            raise NotEqual(
                f"the factor of the warm-up is {scheduler.factor(step):g} in place of {wanted:g}",
                where=f"step {step} of {steps}",
            )


CURVES = ((40, None, 0.1), (30, 6, 0.0), (7, 0, 0.5), (25, 1, 0.02))
"""Steps, warm-up and end, with which `warmup_then_cosine` is asked for its rates."""


def check_warm_up_then_cosine() -> None:
    """Hold the rates of the warm-up with a cosine behind it against their formula.

    Up: a line from 1 / warm-up of the rate (Goyal et al. 2017, section 2.2). Down: half a cosine to
    the lowest rate (Loshchilov and Hutter 2017, equation 5).

    Raises:
        NotEqual: A rate is another one.
    """
    rates = (0.5, 0.125)
    for steps, warmup, end in CURVES:
        groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in rates]
        optimizer = torch.optim.SGD(groups, lr=1.0)
        optimizer.step()  # else a scheduler warns that nobody steps
        scheduler = warmup_then_cosine(optimizer, steps=steps, warmup=warmup, end=end)
        rise = steps // 10 if warmup is None else warmup
        lowest = end * max(rates)
        for step in range(steps + 1):
            for rate, group in zip(rates, optimizer.param_groups, strict=True):
                if step < rise:
                    wanted = rate * (1 / rise + (1 - 1 / rise) * step / rise)
                else:
                    turn = math.cos(math.pi * (step - rise) / max(1, steps - rise))
                    wanted = lowest + (rate - lowest) * (1 + turn) / 2
                if abs(float(group["lr"]) - wanted) > 1e-12:
                    raise NotEqual(
                        f"the rate of the warm-up with a cosine is {group['lr']:g} in place of "
                        f"{wanted:g}",
                        where=f"step {step} of {steps}",
                    )
            optimizer.step()  # torch warns where none precedes that of the scheduler
            scheduler.step()


def _step_by(update: Update) -> Callable[[Optimizer], None]:
    @torch.no_grad()
    def step(optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    update(parameter, group, optimizer.state[parameter])

    return step


def _lars(parameter: Tensor, group: Mapping[str, Any], state: dict[str, Any]) -> None:
    weight, gradient = _real(parameter), _real(parameter.grad)
    adapted, decay = _rules(parameter, group)
    length, slope = float(weight.norm()), float(gradient.norm())
    below = slope + decay * length
    # Where the formula has no value: a weight of norm 0 would never move.
    ratio = group["trust"] * length / below if adapted and length > 0 and below > 0 else 1.0
    direction = ratio * (gradient + decay * weight)
    rate, momentum = float(group["lr"]), float(group["momentum"])
    if not momentum:
        weight -= rate * direction
        return
    velocity = _real(state.setdefault("momentum_buffer", torch.zeros_like(parameter)))
    velocity *= momentum
    if group["momentum_correction"]:
        # The buffer holds v / rate: a new rate acts on all of it.
        velocity += direction
        weight -= rate * velocity
    else:
        velocity += rate * direction
        weight -= velocity


def _lamb(parameter: Tensor, group: Mapping[str, Any], state: dict[str, Any]) -> None:
    weight, gradient = _real(parameter), _real(parameter.grad)
    adapted, decay = _rules(parameter, group)
    first, second = group["betas"]
    if not state:
        state |= {"step": 0, "exp_avg": torch.zeros_like(parameter)}
        state["exp_avg_sq"] = torch.zeros_like(parameter)
    state["step"] += 1
    mean, square = _real(state["exp_avg"]), _real(state["exp_avg_sq"])
    mean.copy_(first * mean + (1 - first) * gradient)
    square.copy_(second * square + (1 - second) * gradient**2)
    biases = [1 - beta ** state["step"] for beta in (first, second)]
    one, two = biases if group["bias_correction"] else (1.0, 1.0)
    direction = (mean / one) / ((square / two).sqrt() + group["eps"]) + decay * weight
    length, turn = float(weight.norm()), float(direction.norm())
    if group["clamp"] is not None:
        low, high = group["clamp"]
        length = min(max(length, low), high)
    ratio = length / turn if adapted and length > 0 and turn > 0 else 1.0
    weight -= float(group["lr"]) * ratio * direction


def _rules(parameter: Tensor, group: Mapping[str, Any]) -> tuple[bool, float]:
    """Whether a layer gets a ratio, and its decay."""
    small = group["exclude_1d"] and parameter.ndim < 2
    return group["adapt"] and not small, 0.0 if small else float(group["weight_decay"])


def _real(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    found = tensor.detach()
    return torch.view_as_real(found) if found.is_complex() else found
