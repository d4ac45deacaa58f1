"""Which rule answers for which function of torch; an unknown function is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from headway.errors import PlanError
from headway.parallel.spatial import interpolation, norms, pointwise, pooling, reductions, views
from headway.parallel.spatial.convolution import (
    CONV,
    TRANSPOSED,
    convolution,
    transposed_convolution,
)
from headway.parallel.spatial.pointwise import modifies_in_place
from headway.parallel.spatial.spatial_tensor import (
    SpatialTensor,
    gather,
    qualified_torch_name,
    unsupported_operator,
)


def _windows() -> dict[Callable[..., Any], Callable[..., Any]]:
    found: dict[Callable[..., Any], Callable[..., Any]] = {}
    for count in (1, 2, 3):
        found[CONV[count]] = convolution
        found[TRANSPOSED[count]] = transposed_convolution
        for name, rule in (
            ("max_pool", pooling.MAX_POOL),
            ("avg_pool", pooling.AVERAGE_POOL),
            ("adaptive_avg_pool", pooling.ADAPTIVE_AVERAGE_POOL),
            ("adaptive_max_pool", pooling.ADAPTIVE_MAX_POOL),
        ):
            found[getattr(F, f"{name}{count}d")] = rule[count]
            if hasattr(torch, f"{name}{count}d"):
                found[getattr(torch, f"{name}{count}d")] = rule[count]
    return found


SPATIAL_RULES: Mapping[Callable[..., Any], Callable[..., Any]] = {
    **pointwise.rules(),
    **views.rules(),
    **reductions.rules(),
    **interpolation.rules(),
    **_windows(),
    F.batch_norm: norms.batch_norm,
    F.group_norm: norms.group_norm,
    F.instance_norm: norms.instance_norm,
    F.layer_norm: norms.layer_norm,
}
"""torch.relu, torch.Tensor.relu and torch.nn.functional.relu are different functions."""


def dispatch_torch_function(
    func: Callable[..., Any],
    found: Sequence[SpatialTensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """What a function of torch gives; whole samples are gathered where no rule can work on them.

    Args:
        found: The split tensors among its arguments.

    Raises:
        PlanError: There is no rule, and a tensor lies in parts of space.
    """
    rule = SPATIAL_RULES.get(func)
    try:
        if rule is None:
            raise unsupported_operator(qualified_torch_name(func), found[0])
        return rule(*args, **kwargs)
    except PlanError:
        if modifies_in_place(func, kwargs) or not all(x.by_samples for x in found):
            raise
    return func(*map(_whole, args), **{key: _whole(value) for key, value in kwargs.items()})


def _whole(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_whole, value))
    return gather(value)
