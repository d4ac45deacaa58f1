"""A model whose state (ZeRO) is kept in parts, by torch's `fully_shard` (FSDP2).

Every parameter becomes a DTensor of which a rank has some rows; FSDP2 gathers the parameters of a
group of modules before their forward and backward, and sums gradients where they are kept. What
differs between the three degrees is how long a group stays gathered and how often gradients are
summed. Sources: Rajbhandari et al. 2020 (ZeRO), section 5; Zhao et al. 2023 (FSDP).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from headway.errors import PlanError

SHARE = 0.01
"""A module with at least this share of the parameters is gathered by itself,"""
OF_LARGEST = 0.1
"""or with this share of the largest one, as in a model of a thousand equal layers."""
_CONTAINERS = (nn.ModuleList, nn.Sequential)


class ShardedState:
    """A model and its optimiser, sharded in place; collective.

    Args:
        model: Equal on all ranks.
        optimizer: Over its parameters; its groups then hold the sharded ones. None: it follows
            otherwise.
        mesh: Of one dimension, or of two: copies x parts.
        zero: 1 to 3, see `plan.MemoryPolicy`.
        counted: How often each gradient counts in their sum: ranks that share a sample.

    Attributes:
        whole: Parameters that are not sharded, by name: those of no dimension.

    Raises:
        PlanError: The model cannot be sharded.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        mesh: DeviceMesh,
        zero: Literal[1, 2, 3],
        *,
        counted: int = 1,
    ) -> None:
        self.model = model
        self.mesh = mesh
        self.zero = zero
        names = {parameter: name for name, parameter in model.named_parameters()}
        self.whole = {name: p for p, name in names.items() if p.dim() == 0}
        options: dict[str, Any] = {"mesh": mesh, "ignored_params": set(self.whole.values())}
        for module in groups_of(model):
            fully_shard(module, **options, reshard_after_forward=zero == 3)
        try:
            fully_shard(model, **options, reshard_after_forward=False)
        except (ValueError, NotImplementedError) as error:
            raise PlanError(
                f"the state of {type(model).__name__} cannot be kept in parts",
                problems=[str(error)],
                fix="Leave memory.zero (the recipe's zero) at 0.",
            ) from error
        self._parts = [cast(FSDPModule, m) for m in model.modules() if isinstance(m, FSDPModule)]
        for part in self._parts:
            # Gradients are of shares of the global mean: they are summed, not averaged.
            part.set_gradient_divide_factor(float(counted))
            part.set_force_sum_reduction_for_comms(True)
        if optimizer is not None:
            follow_parameters(optimizer, names, dict(model.named_parameters()))

    def begin(self) -> None:
        """A step begins: parameters stay gathered and gradients whole as long as `zero` allows."""
        for part in self._parts:
            part.set_is_last_backward(False)
            part.set_requires_gradient_sync(self.zero > 1, recurse=False)
            part.set_reshard_after_backward(self.zero == 3, recurse=False)

    def arm(self) -> None:
        """The next backward pass is the last one of the step."""
        for part in self._parts:
            part.set_is_last_backward(True)
            part.set_requires_gradient_sync(True, recurse=False)
            part.set_reshard_after_backward(True, recurse=False)

    def sum_whole(self, factor: float) -> None:
        """Sum the gradients of what is not sharded; collective.

        Args:
            factor: They are multiplied by it.
        """
        gradients = [p.grad for p in self.whole.values() if p.requires_grad]
        if all(gradient is None for gradient in gradients):
            return
        found = [torch.zeros(()) if g is None else g.cpu() for g in gradients]
        shared = torch.stack([g.double() for g in found]).to(self.mesh.device_type)
        for group in self.mesh.get_all_groups():
            torch.distributed.all_reduce(shared, group=group)
        for gradient, total in zip(gradients, shared, strict=True):
            if gradient is not None:
                gradient.copy_(total * factor)

    @contextmanager
    def called(self) -> Iterator[None]:
        """Explains what torch says of a module that is used otherwise than by calling it."""
        try:
            yield
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise PlanError(
                "a sharded parameter is used outside of the module that gathers it",
                problems=[str(error).splitlines()[0]],
                fix="Let the loss call model(...) itself, and modules their children as modules; "
                "or leave memory.zero (the recipe's zero) at 0.",
            ) from error


def groups_of(model: nn.Module) -> list[nn.Module]:
    """The modules that are gathered by themselves: elements of lists and sequences, the outermost
    that have `SHARE` of the parameters, or `OF_LARGEST`, and share none with the rest of the model.
    """
    sizes = {p: p.numel() for p in model.parameters()}
    users: dict[Tensor, int] = {}
    for module in model.modules():
        for parameter in dict.fromkeys(module.parameters(recurse=False)):
            users[parameter] = users.get(parameter, 0) + 1

    def found(module: nn.Module) -> Iterator[tuple[nn.Module, int]]:
        for child in module.children():
            container = isinstance(child, _CONTAINERS)
            block = isinstance(module, nn.ModuleList) and not isinstance(child, nn.ModuleList)
            if not block and (container or not isinstance(module, nn.Sequential)):
                yield from found(child)
                continue
            own = list(child.parameters())
            alone = all(_uses(child, p) == users[p] for p in own)
            if alone and own:
                yield child, sum(sizes[p] for p in own)

    each = dict(found(model))
    least = min(SHARE * sum(sizes.values()), OF_LARGEST * max(each.values(), default=0))
    return [module for module, size in each.items() if size >= least]


def _uses(module: nn.Module, parameter: Tensor) -> int:
    """Modules inside that hold a parameter."""
    return sum(
        any(p is parameter for p in part.parameters(recurse=False)) for part in module.modules()
    )


def follow_parameters(
    optimizer: Optimizer,
    names: Mapping[nn.Parameter, str],
    now: Mapping[str, nn.Parameter],
    held: Callable[[str, Tensor], Tensor] | None = None,
) -> None:
    """Let an optimiser hold the new parameters in place of the old, with what it has of them.

    Args:
        optimizer: Its groups and state are changed.
        names: Old parameter -> logical name.
        now: Logical name -> new parameter.
        held: (name, something of a parameter's shape) -> this rank's part; None: by `split_as`.
    """
    for group in optimizer.param_groups:
        old = group["params"]
        group["params"] = [now[names[parameter]] for parameter in old]
        for parameter, new in zip(old, group["params"], strict=True):
            state = optimizer.state.pop(parameter, None)
            if state:
                own = partial(held, names[parameter]) if held else partial(split_as, new)
                optimizer.state[new] = {
                    key: own(value) if _alike(value, new) else value for key, value in state.items()
                }


def _alike(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape and value.dim() > 0


def split_as(parameter: Tensor, value: Tensor) -> Tensor:
    """This rank's part of something that it has whole, where it has a part of a parameter."""
    if not isinstance(parameter, DTensor):
        return value
    mesh = parameter.device_mesh
    everywhere = [Replicate()] * mesh.ndim
    found = DTensor.from_local(value, mesh, everywhere, run_check=False)
    return found.redistribute(placements=parameter.placements)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank; collective where it is kept in parts."""
    if not isinstance(tensor, DTensor):
        return tensor
    placements = list(tensor.placements)
    for dim in reversed(range(len(placements))):  # torch warns of several dims at once
        placements[dim] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


def square_of_norm(gradients: dict[str, Tensor]) -> Tensor:
    """The square of the norm of all gradients, float64, to which every element counts once.

    Collective: all ranks have the same names.
    """
    total = torch.zeros((), dtype=torch.float64)
    spread: dict[tuple[DeviceMesh, tuple[int, ...]], Tensor] = {}
    for gradient in gradients.values():
        part = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        square = torch.linalg.vector_norm(part).double().square()
        if not isinstance(gradient, DTensor):
            total += square.cpu()
            continue
        dims = tuple(n for n, p in enumerate(gradient.placements) if isinstance(p, Shard))
        key = (gradient.device_mesh, dims)
        spread[key] = spread.get(key, torch.zeros((), dtype=torch.float64)) + square.cpu()
    for (mesh, dims), square in spread.items():
        shared = square.to(mesh.device_type)
        for dim in dims:
            torch.distributed.all_reduce(shared, group=mesh.get_group(dim))
        total += shared.cpu()
    return total
