"""LARS and LAMB: steps whose length is set layer by layer from two norms.

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

import math
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
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

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
    if isinstance(x, DTensor):
        return _norm_over_ranks(x, dtype)
    norm: Callable[..., Tensor] = torch.linalg.vector_norm
    flat = x.view(-1) if x.is_contiguous() else _flat(x)
    if flat.numel() < 4 * ROW:
        return norm(flat, dtype=dtype)
    whole = flat.numel() - flat.numel() % ROW
    parts = norm(flat[:whole].view(-1, ROW), dim=1, dtype=dtype)
    if whole < flat.numel():
        parts = torch.cat([parts, norm(flat[whole:], dtype=dtype).view(1)])
    return norm(parts, dtype=torch.float64).to(dtype)


def _norm_over_ranks(x: DTensor, dtype: torch.dtype) -> Tensor:
    # Of the local parts: as a whole, a tensor whose sharded dimension is 1 cannot be flattened.
    square = _norm(x.to_local(), dtype).square()
    parts = [Partial() if p.is_shard() else Replicate() for p in x.placements]
    whole = DTensor.from_local(square, x.device_mesh, parts, run_check=False)
    return whole.redistribute(placements=[Replicate()] * len(parts)).sqrt()


def _flat(x: Tensor) -> Tensor:
    # In the order of memory no dense layout needs a copy.
    return x.permute(sorted(range(x.ndim), key=x.stride, reverse=True)).reshape(-1)


CHUNK_ELEMENTS = 2**16
"""256 KiB of float32 a tensor: weight, gradient, state and direction of a chunk fit into a
core's second-level cache. Larger layers are chunks of their own."""

CALL_ELEMENTS = 2**14
"""A norm costs one core 4 us and 0.2 ns per element: the call itself counts for 16 Ki elements."""


@dataclass(slots=True, eq=False)
class LayerStep:
    """One parameter in one step; complex ones as pairs of real numbers.

    Attributes:
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
            # The work of a norm, in elements; a small layer costs its call.
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
        # Layers that are not adapted have the index -1, so they are nobody's own.
        chunks = list(_chunks(layer for layer in layers if layer.index in own))
        directions = [self._direct(chunk) for chunk in chunks]
        rows = torch.empty(len(own), 2, dtype=torch.float64, device=device)
        place = {index: row for row, index in enumerate(sorted(own))}
        for chunk, made in zip(chunks, directions, strict=True):
            rows[[place[index] for index in chunk.indices]] = _measure(chunk, made).to(device)
        table = self.shared_norms.gather(rows)
        # `_direct` advances the state and must not be called twice for a layer.
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
        # In float64 up to here, so that shared and own norms give the same bits.
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
    """Raise a ValueError, as torch's optimisers do, unless low <= value < high."""
    if not low <= value < high:
        limit = "" if high == float("inf") else f" and below {high:g}"
        raise ValueError(f"{name} is {value}; it must be at least {low:g}{limit}")


def _measure(chunk: LayerChunk, directions: Sequence[Tensor]) -> Tensor:
    """Norms of weights and directions, float64 [layers, 2]."""
    return torch.stack([norms(chunk.weights), norms(directions)], dim=1)


def _chunks(layers: Iterable[LayerStep]) -> Iterator[LayerChunk]:
    """Neighbours of one kind, on a CPU about `CHUNK_ELEMENTS` together, on a GPU all of them."""
    ordered = sorted(layers, key=attrgetter("kind"))  # groupby takes neighbours
    for _, members in groupby(ordered, key=attrgetter("kind")):
        taken: list[LayerStep] = []
        size = 0
        for layer in members:
            # A GPU has no such cache: one kernel for all layers is best there.
            on_cpu = layer.weight.device.type == "cpu"
            if taken and on_cpu and size + layer.weight.numel() > CHUNK_ELEMENTS:
                yield LayerChunk(tuple(taken))
                taken, size = [], 0
            taken.append(layer)
            size += layer.weight.numel()
        yield LayerChunk(tuple(taken))


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class LARS(Layerwise):
    """Layer-wise adaptive rate scaling: SGD with momentum and a rate of its own for each layer.

    You, Gitman and Ginsburg 2017, "Large Batch Training of Convolutional Networks", algorithm 1:
        lambda = eta |w| / (|g| + beta |w|);  v = m v + gamma lambda (g + beta w);  w = w - v
    with gamma the global rate, eta the trust, beta the weight decay.

    The ratio is 1 where the formula has none: for a weight of norm 0 (it would never move), and
    where |g| + beta |w| is 0 (the step is 0 anyway).

    In the paper the velocity v absorbs the rate, so that after a change of gamma it still holds
    steps of the old one. Goyal et al. 2017, section 3, equation 10, multiply m by gamma_new /
    gamma_old then. `momentum_correction` does exactly that in every step, by storing u = v / gamma:
    u = m u + lambda (g + beta w);  w = w - gamma u, which is also defined where gamma is 0.

    Args:
        params: Parameters or param groups; every option may differ from group to group.
        trust: eta; the relative change of a layer in one step is about gamma eta.
        momentum_correction: See above; False: algorithm 1 as printed.

    Raises:
        ValueError: A number is out of its range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        adapt: bool = True,
        exclude_1d: bool = True,
        momentum_correction: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust": trust,
            "adapt": adapt,
            "exclude_1d": exclude_1d,
            "momentum_correction": momentum_correction,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        # Here and not in the constructor: a group that is added later has options of its own.
        group = {**self.defaults, **param_group}
        check_range("lr", float(group["lr"]), 0)
        check_range("momentum", group["momentum"], 0, 1)
        check_range("weight_decay", group["weight_decay"], 0)
        check_range("trust", group["trust"], 0)
        super().add_param_group(param_group)

    def _begin(self, state: dict[str, Any], parameter: Tensor, group: Mapping[str, Any]) -> None:
        if group["momentum"]:
            state["momentum_buffer"] = torch.zeros_like(
                parameter, memory_format=torch.preserve_format
            )

    def _direct(self, chunk: LayerChunk) -> Sequence[Tensor]:
        return chunk.gradients

    def _ratios(self, chunk: LayerChunk, weights: Tensor, directions: Tensor) -> Tensor:
        # The directions of LARS are gradients.
        below = directions + chunk.decay * weights
        defined = (weights > 0) & (below > 0)
        trust = float(chunk.group["trust"])
        # The inner `where` keeps zeros out of the quotient, which is not used there.
        return (trust * weights / below.where(defined, 1.0)).where(defined, 1.0)

    def _update(
        self, chunk: LayerChunk, directions: Sequence[Tensor], ratios: Sequence[Tensor] | None
    ) -> None:
        group = chunk.group
        rate = float(group["lr"])
        steps = _steps(chunk, directions, ratios)
        if not group["momentum"]:
            add_(chunk.weights, steps, -rate)
            return
        velocities = chunk.states("momentum_buffer")
        scale_(velocities, float(group["momentum"]))
        # With the correction the buffer holds v / gamma, so that a new rate acts on all of it.
        inside, outside = (1.0, rate) if group["momentum_correction"] else (rate, 1.0)
        add_(velocities, steps, inside)
        add_(chunk.weights, velocities, -outside)


def _steps(
    chunk: LayerChunk, gradients: Sequence[Tensor], ratios: Sequence[Tensor] | None
) -> Sequence[Tensor]:
    # In as few passes over memory as possible.
    if not chunk.decay:
        return gradients if ratios is None else products(gradients, ratios)
    steps = sum_of(gradients, chunk.weights, chunk.decay)
    if ratios is not None:
        scale_(steps, ratios)
    return steps


class LAMB(Layerwise):
    """Layer-wise adaptive moments: Adam whose step has, layer by layer, the length of the weights.

    You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes",
    algorithm 2:
        m = b1 m + (1 - b1) g;      v = b2 v + (1 - b2) g^2
        r = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
        x = x - lr phi(|x|) / |r + lambda x| (r + lambda x)
    Without clamp, every adapted layer moves by exactly lr |x|.

    The ratio phi(|x|) / |r + lambda x| is 1 where it has no use: where phi(|x|) is 0 (the weight
    would never move) and where |r + lambda x| is 0 (the step is 0 anyway).

    Args:
        params: Parameters or param groups; every option may differ from group to group.
        weight_decay: lambda, in the direction and so in its norm.
        clamp: phi(z) = min(max(z, low), high) with these two numbers; None: phi(z) = z.
        bias_correction: The divisions by 1 - b^t; False leaves them out.

    Raises:
        ValueError: A number is out of its range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.001,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        clamp: tuple[float, float] | None = None,
        bias_correction: bool = True,
        adapt: bool = True,
        exclude_1d: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "clamp": clamp,
            "bias_correction": bias_correction,
            "adapt": adapt,
            "exclude_1d": exclude_1d,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        group = {**self.defaults, **param_group}
        check_range("lr", float(group["lr"]), 0)
        check_range("eps", group["eps"], 0)
        check_range("weight_decay", group["weight_decay"], 0)
        for name, beta in zip(("betas[0]", "betas[1]"), group["betas"], strict=True):
            check_range(name, beta, 0, 1)
        if group["clamp"] is not None:
            low, high = group["clamp"]
            check_range("clamp[0]", low, 0)
            check_range("clamp[1]", high, low)
        super().add_param_group(param_group)

    def _begin(self, state: dict[str, Any], parameter: Tensor, group: Mapping[str, Any]) -> None:
        state["step"] = 0
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)

    def _direct(self, chunk: LayerChunk) -> Sequence[Tensor]:
        group = chunk.group
        first, second = group["betas"]
        means, squares = chunk.states("exp_avg"), chunk.states("exp_avg_sq")
        lerp_(means, chunk.gradients, 1 - first)
        scale_(squares, float(second))
        add_product_(squares, chunk.gradients, chunk.gradients, 1 - second)
        # One root and one quotient per element: with s = sqrt(1 - b2^t) and c = s / (1 - b1^t),
        # r = c m / (sqrt(v) + eps s).
        corrections = [_advance(layer) for layer in chunk.layers]
        below = square_roots(squares)
        shift_(below, [group["eps"] * root for _, root in corrections])
        directions = scaled(chunk.weights, chunk.decay)
        factors = [root / bias for bias, root in corrections]
        add_quotient_(directions, means, below, factors)
        return directions

    def _ratios(self, chunk: LayerChunk, weights: Tensor, directions: Tensor) -> Tensor:
        if chunk.group["clamp"] is not None:
            weights = weights.clamp(*chunk.group["clamp"])
        defined = (weights > 0) & (directions > 0)
        return (weights / directions.where(defined, 1.0)).where(defined, 1.0)

    def _update(
        self, chunk: LayerChunk, directions: Sequence[Tensor], ratios: Sequence[Tensor] | None
    ) -> None:
        if ratios is not None:
            scale_(directions, ratios)
        add_(chunk.weights, directions, -float(chunk.group["lr"]))


def _advance(layer: LayerStep) -> tuple[float, float]:
    """Count the step t of a layer; 1 - b1^t and sqrt(1 - b2^t), or 1 and 1 if not wanted."""
    layer.state["step"] += 1
    if not layer.group["bias_correction"]:
        return 1.0, 1.0
    first, second = layer.group["betas"]
    step = layer.state["step"]
    return 1 - first**step, math.sqrt(1 - second**step)


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
        always: Divide even where it does not pay, and without measuring.

    Returns:
        Whether the optimiser has norms to divide and there is more than one rank.
    """
    if not isinstance(optimizer, Layerwise) or dist.get_world_size(group) < 2:
        return False
    optimizer.shared_norms = SharedNorms(ParallelOperator(group), always=always)
    return True


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

    Returns:
        Whether norms may be divided; in the first steps it is measured whether that pays.

    Raises:
        RecipeError: See `check_scaling`.
    """
    check_scaling(optimizer, exchange.reduce)
    # Then weights and gradients are the same on all ranks.
    equal = exchange.values == "gradients" and all(part.ranks is None for part in exchange.parts)
    if ranks < 2 or exchange.priority or not equal:
        return False
    return parallel_norms(optimizer, group)
