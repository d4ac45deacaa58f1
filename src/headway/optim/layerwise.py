"""The layer-wise adaptive step of LARS and LAMB: its length is set per layer from two norms.

A layer is one parameter tensor. A step is three things for every layer: a direction, the norms of
weight and direction, and the update by rate x ratio x direction. They are done for a chunk of
layers at a time, so that a chunk stays in a CPU's cache and small layers share the cost of a call.
Dividing the norms over ranks (`parallel_operator`) changes who computes a ratio and never its bits;
`fit_exchange` divides them only where all ranks step together, from the same weights and gradients.

The arithmetic on lists of tensors is the only place that uses the `torch._foreach_*` functions,
which torch documents nowhere, though its own optimizers are made of them; on GPUs a list costs one
kernel instead of one per tensor. `tests/single/test_lars_lamb.py` holds each against its public
counterpart. The result for a tensor does not depend on the list that it is in, so any division of
a list over ranks gives the same bits.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from headway.errors import RecipeError
from headway.optim.lr_scaling import check_scaling
from headway.optim.parallel_operator import ParallelOperator, SharedNorms
from headway.plans import ExchangePlan

ROW = 2**14
"""Elements whose squares are added in one go. torch's float32 norm adds all of them one after the
other in few lanes: its relative error at 10 million elements is 4e-4. With rows of 16 Ki elements,
whose norms are combined in float64, it stays below 3e-7, at the same speed."""

Tensors = Sequence[Tensor]


def add_(xs: Tensors, ys: Tensors, alpha: float = 1.0) -> None:
    """x += alpha * y."""
    torch._foreach_add_(list(xs), list(ys), alpha=alpha)


def shift_(xs: Tensors, numbers: Sequence[float]) -> None:
    """x += number, a number per tensor."""
    torch._foreach_add_(list(xs), list(numbers))


def scale_(xs: Tensors, factor: float | Tensors) -> None:
    """x *= factor: one number, or a tensor of one number for each."""
    torch._foreach_mul_(list(xs), factor if isinstance(factor, float) else list(factor))


def scaled(xs: Tensors, factor: float) -> list[Tensor]:
    """factor * x."""
    return list(torch._foreach_mul(list(xs), factor))


def products(xs: Tensors, numbers: Tensors) -> list[Tensor]:
    """x times a tensor of one number for each."""
    return list(torch._foreach_mul(list(xs), list(numbers)))


def sum_of(xs: Tensors, ys: Tensors, alpha: float) -> list[Tensor]:
    """x + alpha * y."""
    return list(torch._foreach_add(list(xs), list(ys), alpha=alpha))


def lerp_(xs: Tensors, ys: Tensors, weight: float) -> None:
    """x += weight * (y - x)."""
    torch._foreach_lerp_(list(xs), list(ys), weight)


def add_product_(xs: Tensors, ys: Tensors, zs: Tensors, value: float) -> None:
    """x += value * y * z."""
    torch._foreach_addcmul_(list(xs), list(ys), list(zs), value)


def add_quotient_(xs: Tensors, ys: Tensors, zs: Tensors, numbers: Sequence[float]) -> None:
    """x += number * y / z, a number per tensor."""
    torch._foreach_addcdiv_(list(xs), list(ys), list(zs), list(numbers))


def square_roots(xs: Tensors) -> list[Tensor]:
    """The square root of every element."""
    return list(torch._foreach_sqrt(list(xs)))


def norms(xs: Tensors) -> Tensor:
    """Euclidean norms of all tensors, which have one type: float64 [number], on their device.

    Squares of half precision are added in float32.
    """
    if not xs:
        return torch.empty(0, dtype=torch.float64)
    dtype = torch.float64 if xs[0].dtype == torch.float64 else torch.float32
    if xs[0].device.type == "cpu":
        return torch.stack([_norm(x, dtype) for x in xs]).double()
    # A GPU adds in a tree, whose error does not grow so.
    return torch.stack(torch._foreach_norm(list(xs), 2, dtype)).double()


def _norm(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Norms of rows of `ROW` elements, and the norm of these in float64."""
    norm: Callable[..., Tensor] = torch.linalg.vector_norm
    flat = x.view(-1) if x.is_contiguous() else _flat(x)
    if flat.numel() < 4 * ROW:
        return norm(flat, dtype=dtype)
    whole = flat.numel() - flat.numel() % ROW
    parts = norm(flat[:whole].view(-1, ROW), dim=1, dtype=dtype)
    if whole < flat.numel():
        parts = torch.cat([parts, norm(flat[whole:], dtype=dtype).view(1)])
    return norm(parts, dtype=torch.float64).to(dtype)


def _flat(x: Tensor) -> Tensor:
    """All elements in the order of memory, so that no dense layout needs a copy."""
    return x.permute(sorted(range(x.ndim), key=x.stride, reverse=True)).reshape(-1)


# What LARS and LAMB share: a step whose length is set layer by layer from two norms.


CHUNK_ELEMENTS = 2**16
"""256 KiB of float32 a tensor: weight, gradient, state and direction of a chunk fit into a
core's second-level cache. Larger layers are chunks of their own."""

CALL_ELEMENTS = 2**14
"""A norm costs one core 4 us and 0.2 ns per element: the call itself counts for 16 Ki elements."""


@dataclass(slots=True, eq=False)
class LayerStep:
    """One parameter in one step; complex ones as pairs of real numbers.

    Attributes:
        weight: The parameter's data.
        gradient: Of the same shape.
        state: The optimiser's state of the parameter.
        group: The parameter's group, with its options.
        adapted: Whether the step's length is set by the norms.
        kind: Layers of one kind may be in one chunk; orders the chunks.
        index: Number among the adapted layers of this step.
    """

    weight: Tensor
    gradient: Tensor
    state: dict[str, Any]
    group: Mapping[str, Any]
    decay: float
    adapted: bool
    kind: tuple[int, bool, float, str, str]
    index: int = -1

    def states(self, key: str) -> Tensor:
        """A tensor of the state in the form of `weight`."""
        return _real(self.state[key])


@dataclass(frozen=True, slots=True)
class LayerChunk:
    """Layers of one kind: of one group, type and device, all adapted or none of them."""

    layers: tuple[LayerStep, ...]

    @property
    def group(self) -> Mapping[str, Any]:
        return self.layers[0].group

    @property
    def adapted(self) -> bool:
        return self.layers[0].adapted

    @property
    def decay(self) -> float:
        return self.layers[0].decay

    @property
    def indices(self) -> list[int]:
        return [layer.index for layer in self.layers]

    @property
    def device(self) -> torch.device:
        return self.layers[0].weight.device

    @property
    def exact(self) -> torch.dtype:
        """Type of the ratios: that of the weights, at least float32."""
        return torch.promote_types(self.layers[0].weight.dtype, torch.float32)

    @property
    def weights(self) -> list[Tensor]:
        return [layer.weight for layer in self.layers]

    @property
    def gradients(self) -> list[Tensor]:
        return [layer.gradient for layer in self.layers]

    def states(self, key: str) -> list[Tensor]:
        return [layer.states(key) for layer in self.layers]


class Layerwise(Optimizer):
    """Base of `LARS` and `LAMB`.

    Options of every param group, beside those of the optimiser:
        adapt: The group's layers get a ratio. False: the plain step, with the group's decay.
        exclude_1d: Parameters with fewer than two dimensions (biases, gains of normalisation
            layers) get the plain step and no decay, as in the experiments of both papers.
    """

    shared_norms: SharedNorms | None = None
    """Who computes the norms; set by `parallel_norms`, not part of the state."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Returns:
            What the closure returns.

        Raises:
            RecipeError: A gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        layers = list(self._layers())
        adapted = [layer for layer in layers if layer.adapted]
        for index, layer in enumerate(adapted):
            layer.index = index
        own = None
        if self.shared_norms is not None and adapted:
            sizes = [layer.weight.numel() + CALL_ELEMENTS for layer in adapted]
            own = self.shared_norms.own(sizes, adapted[0].weight.device)
        if own is None:
            for chunk in _chunks(layers):
                self._move(chunk, self._direct(chunk), None)
        else:
            self._shared_step(layers, set(own))
        return loss

    def _shared_step(self, layers: list[LayerStep], own: set[int]) -> None:
        """Directions and norms of the own layers, one all-gather, then everything else."""
        assert self.shared_norms is not None
        device = next(layer.weight.device for layer in layers if layer.adapted)
        chunks = list(_chunks(layer for layer in layers if layer.index in own))
        directions = [self._direct(chunk) for chunk in chunks]
        rows = torch.empty(len(own), 2, dtype=torch.float64, device=device)
        place = {index: row for row, index in enumerate(sorted(own))}
        for chunk, made in zip(chunks, directions, strict=True):
            rows[[place[index] for index in chunk.indices]] = _measure(chunk, made).to(device)
        table = self.shared_norms.gather(rows)
        for chunk, made in zip(chunks, directions, strict=True):
            self._move(chunk, made, table)
        for chunk in _chunks(layer for layer in layers if layer.index not in own):
            self._move(chunk, self._direct(chunk), table)

    def _move(self, chunk: LayerChunk, directions: Sequence[Tensor], table: Tensor | None) -> None:
        """Update a chunk; its norms are computed where there is no table of all layers' norms."""
        if not chunk.adapted:
            self._update(chunk, directions, None)
            return
        if table is None:
            with self._clock(chunk.device):
                measured = _measure(chunk, directions)
        else:
            measured = table[chunk.indices].to(chunk.device)
        ratios = self._ratios(chunk, *measured.unbind(1)).to(chunk.exact)
        self._update(chunk, directions, ratios.unbind())

    def _clock(self, device: torch.device) -> AbstractContextManager[None]:
        return nullcontext() if self.shared_norms is None else self.shared_norms.clock(device)

    def _layers(self) -> Iterator[LayerStep]:
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse:
                    raise self._sparse(parameter)
                state = self.state[parameter]
                if not state:
                    self._begin(state, parameter, group)
                excluded = group["exclude_1d"] and parameter.ndim < 2
                adapted = group["adapt"] and not excluded
                decay = 0.0 if excluded else float(group["weight_decay"])
                weight = _real(parameter.detach())
                yield LayerStep(
                    weight=weight,
                    gradient=_real(parameter.grad),
                    state=state,
                    group=group,
                    decay=decay,
                    adapted=adapted,
                    kind=(number, adapted, decay, str(weight.dtype), str(weight.device)),
                )

    def _sparse(self, parameter: Tensor) -> RecipeError:
        return RecipeError(
            f"the optimiser {type(self).__name__} takes dense gradients only",
            why=f"A parameter of shape {list(parameter.shape)} has a sparse one; the norm of a "
            "layer is that of all its elements.",
            fix="Use nn.Embedding(..., sparse=False).",
        )

    @abstractmethod
    def _begin(self, state: dict[str, Any], parameter: Tensor, group: Mapping[str, Any]) -> None:
        """Make the state of a parameter that has its first gradient."""

    @abstractmethod
    def _direct(self, chunk: LayerChunk) -> Sequence[Tensor]:
        """Advance the state as far as it needs no ratio; the tensors whose norms are wanted."""

    @abstractmethod
    def _ratios(self, chunk: LayerChunk, weights: Tensor, directions: Tensor) -> Tensor:
        """Trust ratios from the norms of weights and directions; all float64 [layers]."""

    @abstractmethod
    def _update(
        self, chunk: LayerChunk, directions: Sequence[Tensor], ratios: Sequence[Tensor] | None
    ) -> None:
        """Move the weights; no ratios: the plain step."""


def check_range(name: str, value: float, low: float, high: float = float("inf")) -> None:
    """Raise unless low <= value < high.

    Raises:
        ValueError: As torch's optimisers do.
    """
    if not low <= value < high:
        limit = "" if high == float("inf") else f" and below {high:g}"
        raise ValueError(f"{name} is {value}; it must be at least {low:g}{limit}")


def _measure(chunk: LayerChunk, directions: Sequence[Tensor]) -> Tensor:
    """Norms of weights and directions, float64 [layers, 2]."""
    return torch.stack([norms(chunk.weights), norms(directions)], dim=1)


def _chunks(layers: Iterable[LayerStep]) -> Iterator[LayerChunk]:
    """Neighbours of one kind, on a CPU about `CHUNK_ELEMENTS` together, on a GPU all of them."""
    ordered = sorted(layers, key=attrgetter("kind"))
    for _, members in groupby(ordered, key=attrgetter("kind")):
        taken: list[LayerStep] = []
        size = 0
        for layer in members:
            on_cpu = layer.weight.device.type == "cpu"
            if taken and on_cpu and size + layer.weight.numel() > CHUNK_ELEMENTS:
                yield LayerChunk(tuple(taken))
                taken, size = [], 0
            taken.append(layer)
            size += layer.weight.numel()
        yield LayerChunk(tuple(taken))


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def parallel_norms(
    optimizer: Optimizer,
    group: dist.ProcessGroup | None = None,
    *,
    always: bool = False,
) -> bool:
    """Divide the norms of an optimiser over the ranks of a group where that pays; collective.

    Weights and gradients must be the same on all these ranks when `step` is called, as they are
    after a synchronous exchange; not where ranks make local steps of their own (Adasum of updates,
    local SGD), nor where layers are summed in different groups of ranks. All ranks must step
    together, and no other thread may use the group: an optimiser that is stepped bucket by bucket
    beside other exchanges is to be left alone.

    Args:
        optimizer: Any optimiser; those without layer-wise norms stay as they are.
        group: The ranks; None: all.
        always: Divide even where it does not pay, and without measuring.

    Returns:
        Whether the optimiser has norms to divide and there is more than one rank.
    """
    if not isinstance(optimizer, Layerwise) or dist.get_world_size(group) < 2:
        return False
    optimizer.shared_norms = SharedNorms(ParallelOperator(group), always=always)
    return True


# Makes an optimiser fit an exchange: refuses a rate that does not, divides norms where it may.


def fit_exchange(
    optimizer: Optimizer,
    exchange: ExchangePlan,
    *,
    ranks: int,
    group: dist.ProcessGroup | None = None,
) -> bool:
    """Check the optimiser's rates against the exchange, and divide its norms if it has some.

    They stay whole with `priority` (slices step in another thread), with `values = "updates"` (each
    rank steps from gradients of its own) and with node groups (weights differ between groups).

    Args:
        ranks: That take part; 1: nothing is divided.
        group: The ranks that may share the norms; None: all.

    Returns:
        Whether norms may be divided; in the first steps it is measured whether that pays.

    Raises:
        RecipeError: See `check_scaling`.
    """
    check_scaling(optimizer, exchange.reduce)
    alike = exchange.values == "gradients" and all(part.ranks is None for part in exchange.parts)
    if ranks < 2 or exchange.priority or not alike:
        return False
    return parallel_norms(optimizer, group)
