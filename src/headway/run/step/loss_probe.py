"""Whether a loss adds up over samples, found before training on a few of them.

A mean over something that differs between samples (labels that are not ignored, words without
padding), and a loss over pairs of samples, are other numbers in each part of a split batch: the
run is then not the serial one, and nothing fails. So the loss of some samples is computed at once
and in parts: sum, count and gradient of the whole must be the sums of those of the parts.

The gradient tells more than the loss: at the start of training all samples have about the same
loss, so that a mean with wrong weights is nearly right, and its gradient is not. Draws belong to
samples (`step.randomness`), batch normalisation uses its running statistics, and nothing changes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from headway.data import MicroBatch
from headway.errors import HeadwayError
from headway.run.recipe.recipe import Loss, sum_and_count
from headway.run.step.batch import map_tensors, resize_batch
from headway.run.step.randomness import (
    LogicalRandomness,
    RandomDraws,
    generators_restored,
    probe_random_draws,
    seed_everything,
    state_restored,
    uncompiled,
)

MOST_SAMPLES = 16
"""Of one probe: it takes no longer than a few small micro-batches."""
MOST_NUMBERS = 4_000_000
"""Elements of the parameters whose gradients are compared, the smallest ones first."""

Sum = tuple[Tensor, float, Sequence[Tensor | None]]


def explain_split_loss(
    model: nn.Module, loss: Loss, micros: Sequence[MicroBatch], prepare: Callable[[Any], Any]
) -> str:
    """What is wrong with a loss whose batch is split, as a sentence; "" where nothing is known.

    Args:
        model: Whole, in training mode; it is left as it was, as are the generators.
        prepare: Moves the data of a micro-batch to the model.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            data, samples = _few_samples(micros)
            apart = _difference(model, loss, prepare(data), samples)
    # What fails here says nothing of the loss; what fails with a whole batch fails in the step.
    except (_CannotTell, HeadwayError, RuntimeError, ValueError, TypeError, LookupError,
            AttributeError, ArithmeticError, AssertionError):  # fmt: skip
        return ""
    if _routes(model):
        return _router_sentence(model)
    return _sentence(data, samples, apart) if apart else ""


MOST_COPIED = 1 << 30
"""Bytes of a model of which a rank that keeps a part makes a whole copy for the probe."""


def whole_copy(model: nn.Module) -> nn.Module | None:
    """A copy for a probe after the model has been sharded; None where that is too much."""
    tensors = (*model.parameters(), *model.buffers())
    if sum(tensor.numel() * tensor.element_size() for tensor in tensors) > MOST_COPIED:
        return None
    try:
        return deepcopy(model)
    except (RuntimeError, TypeError, ValueError, AttributeError):  # not every model can be copied
        return None


class _CannotTell(Exception):
    """The samples cannot be taken apart."""


def _few_samples(micros: Sequence[MicroBatch]) -> tuple[Any, int]:
    """The first samples of a rank, at least two and at most `MOST_SAMPLES`, as one micro-batch."""
    first = micros[0]
    if len(first.positions) > 1:
        samples = min(len(first.positions), MOST_SAMPLES)
        return _cut(first.data, len(first.positions), 0, samples), samples
    # Micro-batches of one sample: several of them, where they can be put together.
    alone = [micro.data for micro in micros[:MOST_SAMPLES] if len(micro.positions) == 1]
    return _together(alone), len(alone)


def _cut(data: Any, samples: int, start: int, stop: int) -> Any:
    """The samples `start` to `stop` of a micro-batch."""

    def part(tensor: Tensor) -> Tensor:
        if tensor.ndim == 0:  # one number for the whole batch
            return tensor
        if tensor.shape[0] != samples:
            raise _CannotTell
        return tensor[start:stop]

    return map_tensors(data, part, texts=lambda texts: type(texts)(texts[start:stop]))


def _together(parts: Sequence[Any]) -> Any:
    """Micro-batches of one sample each as one; all tensors must have the same shapes."""
    flat = [tree_flatten(part) for part in parts]
    if len(parts) < 2 or any(tree != flat[0][1] for _, tree in flat):
        raise _CannotTell
    if not all(isinstance(leaf, Tensor) and leaf.ndim for leaves, _ in flat for leaf in leaves):
        raise _CannotTell
    leaves = [torch.cat(list(group)) for group in zip(*(one for one, _ in flat), strict=True)]
    return tree_unflatten(leaves, flat[0][1])


def _difference(model: nn.Module, loss: Loss, data: Any, samples: int) -> float:
    """By how much the loss of all samples is not that of its parts; 0 within rounding."""
    with _NoCollectives():
        sites = probe_random_draws(model, loss, data, resize_batch)
    if samples < 2 or sites.doubts:
        raise _CannotTell
    watched, narrow = _watched(model), _NarrowestType()

    def passed(start: int, stop: int) -> Sum:
        part = _cut(data, samples, start, stop)
        return _pass(model, loss, part, range(start, stop), sites, watched)

    # Uneven parts: halves may happen to have as many labels.
    ends = sorted({0, max(1, samples // 4), samples // 2, samples})
    with _unchanged(model), _NoCollectives(), narrow:
        whole = passed(0, samples)
        parts = [passed(*pair) for pair in pairwise(ends)]
    # Rounding moves sums by some eps; a wrong count of one label in ten thousand by more than this.
    # Of a model that computes with 16 bits no more can be told.
    tolerance = narrow.eps**0.5
    errors = [
        _apart(whole[0], [part[0] for part in parts]),
        abs(whole[1] - sum(part[1] for part in parts)) / max(abs(whole[1]), 1.0),
        _gradients_apart(whole[2], [part[2] for part in parts]),
    ]
    return max((error for error in errors if not error <= tolerance), default=0.0)


def _watched(model: nn.Module) -> list[nn.Parameter]:
    """The parameters whose gradients are looked at."""
    found, size = list[nn.Parameter](), 0
    for parameter in sorted(model.parameters(), key=lambda p: p.numel()):
        if parameter.requires_grad and (not found or size + parameter.numel() <= MOST_NUMBERS):
            found.append(parameter)
            size += parameter.numel()
    return found


def _pass(
    model: nn.Module,
    loss: Loss,
    data: Any,
    positions: Sequence[int],
    sites: RandomDraws,
    watched: Sequence[nn.Parameter],
) -> Sum:
    """Sum and count of the loss of some samples, and the sum's gradients."""
    seed_everything(0)
    with LogicalRandomness(sites, positions, 0):
        total, count = sum_and_count(loss(model, data), len(positions))
        found: Sequence[Tensor | None] = [None] * len(watched)
        if total.requires_grad:
            # Not `backward`, which would leave gradients and run the hooks of an exchange.
            found = torch.autograd.grad(total, watched, allow_unused=True)
    return total.detach(), float(count), found


def _apart(whole: Tensor, parts: Sequence[Tensor]) -> float:
    if not bool(torch.isfinite(whole)):
        raise _CannotTell  # with any split
    together = torch.stack([part.double() for part in parts])
    scale = max(float(whole.abs()), float(together.abs().max()))
    apart = float((whole.double() - together.sum()).abs())
    return apart / scale if scale else apart


def _gradients_apart(
    whole: Sequence[Tensor | None], parts: Sequence[Sequence[Tensor | None]]
) -> float:
    """The norm of what is between the gradient and the sum of the parts, in that of the largest."""
    squares, sizes = 0.0, [0.0] * len(parts)
    for number, gradient in enumerate(whole):
        own = [None if part[number] is None else _dense(part[number]) for part in parts]
        rest = None if gradient is None else _dense(gradient)
        for place, one in enumerate(own):
            if one is not None:
                sizes[place] += _square(one)
                rest = -one if rest is None else rest - one
        squares += 0.0 if rest is None else _square(rest)
    scale = max(sizes)
    return float((squares / scale) ** 0.5) if scale else 0.0


def _dense(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.to_dense() if gradient.is_sparse else gradient


def _square(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor)) ** 2


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Normalisation with running statistics; afterwards model and generators are as before.

    Raises:
        _CannotTell: Normalisation keeps none: each batch has its own, whatever the loss does.
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    if any(norm.running_mean is None and norm.training for norm in norms):
        raise _CannotTell
    trained = [norm for norm in norms if norm.training]
    with uncompiled(), state_restored(model), generators_restored():
        try:
            for norm in trained:
                norm.training = False
            yield
        finally:
            for norm in trained:
                norm.training = True


class _NoCollectives(TorchDispatchMode):
    """Inside, nothing is exchanged: other ranks do not probe, and would take it for something else.

    A loss that gathers what other ranks have (a contrastive one) cannot be told from one rank.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if "c10d" in func.namespace:
            raise _CannotTell
        return func(*args, **(kwargs or {}))


class _NarrowestType(TorchDispatchMode):
    """Notes the fewest bits with which anything is computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.eps = torch.finfo(torch.float64).eps

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
                self.eps = max(self.eps, torch.finfo(value.dtype).eps)
        return out


def _sentence(data: Any, samples: int, apart: float) -> str:
    found = (
        f"the loss depends on how a batch is split: that of {samples} samples is not put together "
        f"from those of its parts (relative difference {apart:.1e}), so this run is not exactly "
        "the serial one"
    )
    if isinstance(data, Mapping) and "labels" in data:
        return f'{found}; write loss="tokens", which counts the labels that are not ignored (-100)'
    return (
        f"{found}; return (losses.sum(), count) and not losses.mean(), where count is what the "
        "mean is over: labels that are not ignored, words without padding"
    )


def _router_sentence(model: nn.Module) -> str:
    return (
        f"the router's loss of {type(model).__name__} is a product of means over all tokens of a "
        "micro-batch, and depends on how a batch is split, so this run is not exactly the serial "
        "one; set output_router_logits=False in the model's configuration for an exact loss"
    )


def _routes(model: nn.Module) -> bool:
    """Whether a mixture of experts adds its router's loss, by the names of `transformers`."""
    config = getattr(model, "config", None)
    return bool(
        getattr(config, "output_router_logits", False)
        and getattr(config, "router_aux_loss_coef", 0)
    )
