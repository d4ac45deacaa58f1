"""Callbacks: the user's own code at six moments of `headway train`.

A callback is any object with one or more of the methods below; Keras, Lightning and transformers
have the same moments. All ranks call them, in the order of the recipe, so that a callback may use
collectives; one that writes files asks for `run.rank == 0`. An object with `state_dict` and
`load_state_dict` goes through checkpoints (rank 0's state counts).

    on_train_start(run)         before the first step of this attempt
    on_step_end(run)            after each optimiser step
    on_validation_end(run)      `run.validation` has the new values
    on_checkpoint(run)          a checkpoint has been copied, and is being written
    on_train_end(run)           the last checkpoint is on disk; not after an exception
    on_exception(run, error)    an exception ends this rank

`headway verify` calls no callback. `headway.TrainingObserver` is something else: it watches a run
from the process that has started it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from headway.documents import nearest
from headway.errors import RecipeError
from headway.run.recipe.user_code import describe_value

if TYPE_CHECKING:
    from headway.run.executor import Executor

_LOG = logging.getLogger("headway")

Moment = Literal[
    "on_train_start",
    "on_step_end",
    "on_validation_end",
    "on_checkpoint",
    "on_train_end",
    "on_exception",
]
MOMENTS: tuple[Moment, ...] = get_args(Moment)


@dataclass
class RunView:
    """What a callback sees of the run.

    Attributes:
        executor: Model, optimiser, `whole()` and so on; `executor.flush()` before parameters are
            read.
        loss: Of the last step's global batch.
        lr: Of the optimiser's first group.
        rate: Samples per second of the last step.
        validation: Name -> value of the last validation; "loss", and the recipe's metrics.
        best_step: Of the best validation so far, where the recipe monitors it.
    """

    executor: Executor
    directory: Path
    steps: int
    loss: float = float("nan")
    lr: float = float("nan")
    rate: float = float("nan")
    validation: Mapping[str, float] = field(default_factory=dict)
    best_step: int | None = None
    stopping: bool = False

    @property
    def rank(self) -> int:
        """Of this process."""
        return self.executor.world.rank

    @property
    def step(self) -> int:
        """Optimiser steps that have been made."""
        return self.executor.steps_done

    def stop(self) -> None:
        """Stop all ranks after the next step, in order and with a checkpoint; one rank's call is
        enough."""
        self.stopping = True


class Callbacks:
    """The loggers' callback and those of a recipe, called one after the other."""

    def __init__(self, callbacks: Iterable[object]) -> None:
        self._callbacks = tuple(callbacks)
        for each in self._callbacks:
            check_callback(each)

    def call(self, moment: Moment, *values: Any) -> None:
        """Call what the callbacks have for a moment."""
        for each in self._callbacks:
            method = getattr(each, moment, None)
            if method is not None:
                method(*values)

    def failed(self, run: RunView, error: BaseException) -> None:
        """The moment on_exception; what a callback raises there is logged, the error goes on."""
        try:
            self.call("on_exception", run, error)
        except Exception:
            _LOG.exception("a callback failed in on_exception")

    def states(self) -> list[Any]:
        """The states of the callbacks, None of one that has none; empty if none has one."""
        found = [getattr(each, "state_dict", None) for each in self._callbacks]
        return [None if get is None else get() for get in found] if any(found) else []

    def restore(self, states: list[Any]) -> None:
        """Restore what `states` returned.

        Raises:
            RecipeError: The recipe has other callbacks with a state than the one that was saved.
        """
        if len(states) != len(self._callbacks):
            raise RecipeError(
                f"the checkpoint has the state of {len(states) - 1} callbacks, the recipe has "
                f"{len(self._callbacks) - 1}",
                fix="Resume with the callbacks of the recipe that was saved.",
            )
        for each, state in zip(self._callbacks, states, strict=True):
            if state is not None:
                each.load_state_dict(state)  # type: ignore[attr-defined]


def check_callback(given: object) -> None:
    """Check that an object has moments, and no misspelt one.

    Raises:
        RecipeError: It has none, or a method on_... that nothing calls.
    """
    if isinstance(given, type):
        raise RecipeError(
            f"the callback {given.__name__} is a class",
            fix=f"Write callbacks=({given.__name__}(),).",
        )
    names = [name for name in dir(given) if name.startswith("on_")]
    for name in names:
        if name not in MOMENTS:
            raise RecipeError(
                f"the callback {describe_value(given)} has {name}, which nothing calls"
                f"{nearest(name, list(MOMENTS))}",
                why=f"The moments are {', '.join(MOMENTS)}.",
            )
    if not names:
        raise RecipeError(
            f"{describe_value(given)} is no callback: it has none of the moments",
            why=f"They are {', '.join(MOMENTS)}.",
            fix="Add a method such as on_step_end(self, run).",
        )
