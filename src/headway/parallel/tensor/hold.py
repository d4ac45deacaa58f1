"""A model whose modules hand out their parameters as parts; its code, names and structure stay.

Each module's class is replaced by one derived from it that answers `self.weight` with what the
rules work on: a split tensor, or a whole one. `parameters()` and `state_dict()` see the parameters
as they are held. The model itself also cuts its inputs by samples where the grid wants activations
in parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from headway.parallel.tensor.context import Context
from headway.parallel.tensor.exchange import taken
from headway.parallel.tensor.split_tensor import WHOLE, Cut, SplitTensor
from headway.plan.tensor_layout import Need, check_needs


class Held:
    """Before a module's own class: parameters on demand."""

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)  # type: ignore[misc]
        if isinstance(value, nn.Parameter):
            keys, context = self.__dict__["_headway_split"]
            return context.parameter(value, keys.get(name))
        return value


class Entered(Held):
    """The model itself: its inputs are cut by samples."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        context: Context = self.__dict__["_headway_split"][1]
        args, kwargs = by_samples(context, args, kwargs)
        if context.ahead is not None:
            context.ahead.begin()
        return super().__call__(*args, **kwargs)  # type: ignore[misc]


def hold(
    model: nn.Module,
    context: Any,
    keys: Mapping[str, Any] | None = None,
    *,
    root: type[Held] | None = Entered,
) -> None:
    """Replace the classes of the model's modules, but for those where that has been done.

    Args:
        model: Changed in place; its own class is replaced as well.
        context: Answers for parameters: `context.parameter(parameter, key)`.
        keys: Logical name of a parameter -> what the context wants to know.
        root: Of the model itself, whose inputs are cut; None: it only uses modules of the model's.
    """
    classes: dict[type, type] = {}
    for prefix, module in model.named_modules():
        if "_headway_split" in module.__dict__:
            continue
        own = {
            name: (keys or {}).get(f"{prefix}.{name}".lstrip("."))
            for name, _ in module.named_parameters(recurse=False, remove_duplicate=False)
        }
        module.__dict__["_headway_split"] = own, context
        kind = type(module)
        base: type = root if module is model and root else Held
        if module is model or kind not in classes:
            made = type(kind.__name__, (base, kind), {"__module__": kind.__module__})
            if module is not model:
                classes[kind] = made
            module.__class__ = made
        else:
            module.__class__ = classes[kind]


def by_samples(
    context: Context, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the model with every tensor cut by samples, along dimension 0.

    Those are samples along which the first tensor's dimension 0 runs; a tensor with another size
    there is left whole.

    Raises:
        PlanError: The number of samples is not divisible.
    """
    grid = context.grid
    axes = "".join(axis for axis in grid.plan.resident.rows if grid.size(axis) > 1)
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.ndim]
    if not axes or not tensors:
        return args, kwargs
    samples = tensors[0].shape[0]
    check_needs(grid.plan, [Need(axes, samples, "samples of a micro-batch")])

    def cut(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.ndim or x.shape[0] != samples:
            return x
        cuts = (Cut(axes), *(WHOLE,) * (x.ndim - 1))
        return SplitTensor(taken(x, grid, axes, 0), x.shape, cuts, context)

    return tuple(map(cut, args)), {key: cut(x) for key, x in kwargs.items()}
