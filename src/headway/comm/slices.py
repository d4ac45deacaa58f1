"""The user's optimiser, bucket by bucket: the same class, hyper-parameters and state, in slices.

Nothing of an optimiser is written again (BytePS's flaw). For each bucket there is a shadow: an
optimiser of the user's class whose parameters share storage with the model's and whose gradients
are the bucket's views. State lives in the original's `state`, so that its `state_dict` is whole;
hyper-parameters are those that the original had when the step was released. Invariant: stepping
every slice once changes what one `step()` of the original would have changed, for every optimiser
that treats parameters one by one (all of torch.optim that take no closure).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from headway.comm.buckets import Bucket
from headway.errors import RunError

Settings = list[dict[str, Any]]


class _Slice:
    """The shadow of one bucket."""

    def __init__(self, original: Optimizer, bucket: Bucket, groups: Mapping[Tensor, int]) -> None:
        self.bucket = bucket
        self.shadows = [parameter.detach() for parameter in bucket.parameters]
        members: dict[int, list[Tensor]] = {}
        for parameter, shadow in zip(bucket.parameters, self.shadows, strict=True):
            members.setdefault(groups[parameter], []).append(shadow)
        self.numbers = list(members)
        self.optimizer = _like(original)
        self.optimizer.param_groups = [
            {**_settings(original.param_groups[number]), "params": params}
            for number, params in members.items()
        ]

    def link(self, original: Optimizer) -> None:
        """Use the state that the original has; none where a parameter has not been stepped yet."""
        self.optimizer.state.clear()
        for parameter, shadow in zip(self.bucket.parameters, self.shadows, strict=True):
            if parameter in original.state:
                self.optimizer.state[shadow] = original.state[parameter]

    def step(self, original: Optimizer, settings: Settings, used: Sequence[bool]) -> None:
        for number, group in zip(self.numbers, self.optimizer.param_groups, strict=True):
            group.update(settings[number])
        for shadow, view, wanted in zip(self.shadows, self.bucket.views, used, strict=True):
            shadow.grad = view if wanted else None
        self.optimizer.step()
        for parameter, shadow in zip(self.bucket.parameters, self.shadows, strict=True):
            if parameter not in original.state and shadow in self.optimizer.state:
                original.state[parameter] = self.optimizer.state[shadow]

    def changed_settings(self, settings: Settings) -> bool:
        """Whether the optimiser has written into its groups: then it cannot be cut."""
        return any(
            _settings(group) != settings[number]
            for number, group in zip(self.numbers, self.optimizer.param_groups, strict=True)
        )


class OptimizerSlices:
    """One shadow per bucket.

    Args:
        original: The user's optimiser; its `step()` is never called with gradients.
        buckets: Disjoint; parameters of the optimiser in no bucket are not stepped.

    Raises:
        RunError: A bucket holds a parameter that the optimiser does not have.
    """

    def __init__(self, original: Optimizer, buckets: Sequence[Bucket]) -> None:
        self._original = original
        groups = {
            parameter: number
            for number, group in enumerate(original.param_groups)
            for parameter in group["params"]
        }
        self._slices: dict[int, _Slice] = {}
        for bucket in buckets:
            known = [parameter in groups for parameter in bucket.parameters]
            if all(known):
                self._slices[bucket.number] = _Slice(original, bucket, groups)
            elif any(known):
                raise RunError(
                    f"the optimiser has some parameters of bucket {bucket.number} and not others",
                    fix="Give the optimiser all parameters that require gradients, or freeze the "
                    "others with requires_grad_(False).",
                )
        self._settings: Settings = []
        self._state: object = None
        self._checked = False

    def release(self) -> None:
        """Take the hyper-parameters of this step; called by the training thread."""
        self._settings = [_settings(group) for group in self._original.param_groups]
        if self._state is not self._original.state:  # the first time, or after load_state_dict
            self._state = self._original.state
            for one in self._slices.values():
                one.link(self._original)

    def step(self, bucket: Bucket, used: Sequence[bool]) -> None:
        """Step the parameters of one bucket with the gradients that its buffer holds.

        Args:
            bucket: After its exchange.
            used: Which of its parameters any rank has used; the others are left alone.

        Raises:
            RunError: The optimiser keeps state in its parameter groups.
        """
        one = self._slices.get(bucket.number)
        if one is None or not any(used):
            return
        one.step(self._original, self._settings, used)
        if not self._checked:
            self._checked = True
            if one.changed_settings(self._settings):
                raise RunError(
                    f"{type(self._original).__name__} cannot step bucket by bucket",
                    why="It counts or keeps state in its parameter groups.",
                    fix="Set exchange.priority = false in the plan.",
                )


def homes(optimizer: Optimizer) -> set[nn.Parameter]:
    """The parameters that an optimiser steps."""
    return {p for group in optimizer.param_groups for p in group["params"]}


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


def _like(original: Optimizer) -> Optimizer:
    """An optimiser of the same class with empty state and no hooks; attributes are shared.

    `copy.copy` goes through the optimiser's own __getstate__, which leaves out hooks, and leaves
    out attributes of subclasses, which are put back here. "step" there is the wrapper that a
    learning-rate scheduler has laid around the original.
    """
    shadow = copy.copy(original)
    for name, value in vars(original).items():
        if name not in vars(shadow) and name != "step":
            setattr(shadow, name, value)
    shadow.state = type(original.state)(dict)
    return shadow
