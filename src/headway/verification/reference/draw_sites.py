"""Where a model draws random numbers, found a second time, and that looking for it changes nothing.

Run and reference ask the same probe. Here the model is called with two samples and with four, not
with two and three, and the draws are found by another path: an operator has drawn where the state
of the generator is another one afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from headway.errors import NotEqual
from headway.run.step.randomness import RandomDraws

NOT_CUT = ("randperm",)
"""Operators whose result mixes the samples, which a probe cannot cut."""


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Hold a model, and the generators, after something against what they were before.

    Raises:
        NotEqual: A parameter, buffer, gradient or generator has another value.
    """
    before = _held(model)
    yield
    after = _held(model)
    wrong = [name for name in {**before, **after} if not _same(before.get(name), after.get(name))]
    if wrong:
        raise NotEqual(f"the probe of the model's random draws changes {wrong[0]}")


def _held(model: nn.Module) -> dict[str, Tensor]:
    found = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    found |= {name: tensor.detach().clone() for name, tensor in model.named_buffers()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[f"the gradient of {name}"] = parameter.grad.detach().to_dense().clone()
    for name, module in model.named_modules():
        found[f"the mode of {name or 'the model'}"] = torch.tensor(module.training)
    found["torch's generator"] = torch.get_rng_state()
    found["numpy's generator"] = torch.from_numpy(np.random.get_state()[1].astype(np.int64))  # type: ignore[index]
    found["Python's generator"] = torch.tensor(hash(random.getstate()))
    return found


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one.shape != other.shape:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


class _Watch(TorchDispatchMode):
    """Shapes of what comes out of operators that move torch's generator; None: not moved."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: list[tuple[int, ...] | None] = []
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or given.get("generator") is not None:
            return func(*args, **given)
        before = torch.default_generator.get_state()
        out = func(*args, **given)
        moved = not torch.equal(before, torch.default_generator.get_state())
        (first, *_), _ = tree_flatten(out)
        self.shapes.append(tuple(first.shape) if moved else None)
        self.names.append(func.__name__)
        return out


def check_sites(
    model: nn.Module, loss: Callable[[nn.Module, Any], Any], data: Any, found: RandomDraws
) -> None:
    """Compare the draws that the probe has found with those of a model called with 2 and 4 samples.

    Raises:
        NotEqual: There are others, or the samples lie otherwise in them.
    """
    watched = []
    for count in (2, 4):
        with _restored(model), torch.compiler.set_stance("force_eager"), _Watch() as watch:
            try:
                loss(model, tree_map(lambda value, n=count: _repeated(value, n), data))
            except Exception:
                return  # batches that are more than samples; the probe has its doubts of them
        watched.append(watch)
        if not found.forward and not any(watch.shapes):
            return
    two, four = watched
    if len(two.shapes) != len(four.shapes):
        return
    if len(found.forward) != len(two.shapes):
        raise NotEqual(
            f"the probe finds {len(found.forward)} random draws in a forward pass of the model, "
            f"which makes {len(two.shapes)}"
        )
    rows = zip(found.forward, two.shapes, four.shapes, two.names, strict=True)
    for number, (site, small, large, name) in enumerate(rows):
        wanted = _layout(small, large)
        given = site.draws, site.dim, site.block if site.dim is not None else 1
        if wanted is not None and wanted != given and not name.startswith(NOT_CUT):
            raise NotEqual(
                f"random draw {number} of the model ({name}) gives {list(small or ())} for two "
                f"samples: they lie along dimension {wanted[1]} in {wanted[2]} each, and not, as "
                f"the probe says, along {given[1]} in {given[2]}"
            )


Layout = tuple[bool, int | None, int]
"""Whether something was drawn, along which dimension samples lie, how many entries each has."""


def _layout(small: tuple[int, ...] | None, large: tuple[int, ...] | None) -> Layout | None:
    """From the shapes with two samples and with four; None: it cannot be told."""
    if small is None or large is None:
        return (False, None, 1) if small is large else None
    if len(small) != len(large):
        return None
    changed = [dim for dim, sizes in enumerate(zip(small, large, strict=True)) if len({*sizes}) > 1]
    if not changed:
        return True, None, 1
    (dim, *more) = changed
    if more or large[dim] != 2 * small[dim] or small[dim] % 2:
        return None
    return True, dim, small[dim] // 2


def _repeated(value: Any, samples: int) -> Any:
    """The first sample of a tensor, so many times."""
    if not isinstance(value, Tensor) or not value.ndim:
        return value
    return torch.cat([value[:1]] * samples)


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Leave buffers and generators as they were."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
