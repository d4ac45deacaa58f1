"""headway's warm-up, its scaled rates, and the options of its optimisers, worked out again.

Run and reference share these objects, so that a mistake in them makes both wrong alike. While the
reference builds its own, what their constructors were given is noted; the reference then steps by
that. Sources: Goyal et al. 2017, sections 2.1 (linear rule), 2.2 (warm-up) and 3 (momentum
correction); Krizhevsky 2014, section 5 (square-root rule).
"""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from headway.errors import NotEqual
from headway.optim import LAMB, LARS, WarmUp
from headway.run.recipe.recipe import Recipe
from headway.verification.reference.recipes import batch_samples

Groups = list[dict[str, Any]]


class GivenArguments:
    """What constructors were given while `noting` was active."""

    def __init__(self) -> None:
        self._warm_ups: dict[WarmUp, tuple[Mapping[str, Any], Groups]] = {}

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Inside, constructors are watched.

        Raises:
            NotEqual: An optimiser of headway has other options than it was given.
        """
        with (
            _wrapped(LARS, _check_options),
            _wrapped(LAMB, _check_options),
            _wrapped(WarmUp, self._note),
        ):
            yield

    def _note(self, make: Callable[..., None], made: Any, *values: Any, **keys: Any) -> None:
        given = _bound(make, made, values, keys)
        before = [dict(group) for group in given["optimizer"].param_groups]
        make(made, *values, **keys)
        self._warm_ups[made] = given, before

    def published(self, scheduler: LRScheduler | None) -> Any:
        """The scheduler by which the reference steps."""
        if isinstance(scheduler, WarmUp) and scheduler in self._warm_ups:
            return _PublishedWarmUp(scheduler, *self._warm_ups[scheduler])
        return scheduler


@contextmanager
def _wrapped(kind: Any, instead: Callable[..., None]) -> Iterator[None]:
    """Inside, `instead(constructor, object, arguments...)` is what makes objects of a kind."""
    original = kind.__init__

    def make(self: Any, *values: Any, **keys: Any) -> None:
        instead(original, self, *values, **keys)

    kind.__init__ = make
    try:
        yield
    finally:
        kind.__init__ = original


def _bound(
    make: Callable[..., None], made: Any, values: Sequence[Any], keys: Mapping[str, Any]
) -> dict[str, Any]:
    bound = inspect.signature(make).bind(made, *values, **keys)
    bound.apply_defaults()
    return dict(bound.arguments)


def _check_options(
    make: Callable[..., None], made: Any, params: Any, *values: Any, **keys: Any
) -> None:
    given = list(params)
    make(made, given, *values, **keys)
    options = _bound(make, made, (given, *values), keys)
    owns = given if given and isinstance(given[0], dict) else [{}]
    for number, (group, own) in enumerate(zip(made.param_groups, owns, strict=True)):
        for key, default in options.items():
            wanted = own.get(key, default)
            if key not in ("self", "params") and group[key] is not wanted and group[key] != wanted:
                raise NotEqual(
                    f"{type(made).__name__} was given {key} = {wanted}, and steps by {group[key]}",
                    where=f"group {number}",
                )


class _PublishedWarmUp:
    """The rate of the scheduler inside, on its own copy of the groups, times start + (1 - start) t
    / steps. The warm-up itself is stepped for its `state_dict` only."""

    def __init__(self, original: WarmUp, given: Mapping[str, Any], before: Groups) -> None:
        self._original = original
        self._optimizer: Optimizer = given["optimizer"]
        self._steps: int = given["steps"]
        self._start = 1 / max(1, self._steps) if given["start"] is None else given["start"]
        self._begins = self._steps if given["delay"] else 0
        self._velocity: str | None = given["velocity"]
        self._twin = copy.copy(self._optimizer)
        # A rate that is a tensor is changed in place.
        self._twin.param_groups = [
            {key: v.clone() if isinstance(v, Tensor) else v for key, v in group.items()}
            for group in before
        ]
        self._twin._opt_called = True  # else it warns that nobody steps
        self._then = given["then"](self._twin) if given["then"] else None
        self._step = 0
        self._theirs = self._rates()
        self._set()

    def state_dict(self) -> dict[str, Any]:
        return self._original.state_dict()

    def step(self) -> None:
        before, kept = self._rates(), self._velocities()
        self._move(self._theirs)
        self._original.step()
        self._theirs = self._rates()
        self._step += 1
        if self._then is not None and self._step > self._begins:
            self._then.step()
        self._set()
        ratios = [new / old if old else 1.0 for old, new in zip(before, self._rates(), strict=True)]
        for number, velocity, value in kept:
            velocity.copy_(value * ratios[number])

    def _set(self) -> None:
        factor = 1.0
        if self._step < self._steps:
            factor = self._start + (1 - self._start) * self._step / self._steps
        for group, own in zip(self._optimizer.param_groups, self._twin.param_groups, strict=True):
            group |= {key: v for key, v in own.items() if key not in ("lr", "params")}
        self._move([float(own["lr"]) * factor for own in self._twin.param_groups])

    def _move(self, rates: Sequence[float]) -> None:
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _rates(self) -> list[float]:
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def _velocities(self) -> list[tuple[int, Tensor, Tensor]]:
        """Number of the group, velocity, and a copy of it."""
        if self._velocity is None:
            return []
        states = (
            (number, self._optimizer.state.get(parameter, {}).get(self._velocity))
            for number, group in enumerate(self._optimizer.param_groups)
            for parameter in group["params"]
        )
        return [(number, v, v.clone()) for number, v in states if v is not None]


def check_scaled_rates(recipe: Recipe, model: nn.Module, optimizer: Optimizer) -> None:
    """Compare the rates of an optimiser with those of the recipe's author, scaled to the batch.

    Raises:
        NotEqual: A rate is another one.
    """
    if recipe.scale_rate is None:
        return
    match = re.fullmatch(r"(\w+) from ([\d_]+) (\w+)", " ".join(recipe.scale_rate.split()))
    unscaled: Any = getattr(recipe.optimizer, "build", None)
    if match is None or unscaled is None:
        return  # written with a prefix
    rule, reference, unit = match.groups()
    width = (recipe.tokens_per_sample or 1) if unit.startswith("token") else 1
    growth = batch_samples(recipe) * width / int(reference)
    factor = growth if rule == "linear" else math.sqrt(growth)
    for number, (own, group) in enumerate(
        zip(unscaled(model).param_groups, optimizer.param_groups, strict=True)
    ):
        wanted, found = float(own["lr"]) * factor, float(group["lr"])
        if abs(wanted - found) > 1e-12 * abs(wanted):
            raise NotEqual(
                f"the rate is {found:g} in place of {wanted:g}: {own['lr']:g} {recipe.scale_rate}",
                where=f"group {number}",
            )
