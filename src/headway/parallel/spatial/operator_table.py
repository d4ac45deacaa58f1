"""The rules of samples that are split in space, as the table of operators names them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from headway.graph.operator_registry import implement
from headway.parallel.spatial import (
    convolution,
    interpolation,
    norms,
    pointwise,
    pooling,
    reductions,
    views,
)

SpatialRule = Callable[..., Any]
_OF_FUNCTIONS: dict[str, SpatialRule] = {
    "unary": pointwise.unary, "broadcast": pointwise.broadcast, "of_both": pointwise.of_both,
    "along_whole_dims": pointwise.along_whole_dims, "dropout": interpolation.dropout,
    "entrywise_loss": reductions.entrywise_loss, "class_loss": reductions.class_loss,
    "max_pool": pooling.max_pool, "average_pool": pooling.average_pool,
    "adaptive_average_pool": pooling.adaptive_average_pool,
    "adaptive_max_pool": pooling.adaptive_max_pool,
}  # fmt: skip
"""Rules of several functions: they take the function before its arguments."""

_OF_ONE: dict[str, SpatialRule] = {
    "permute": views.permute, "transpose": views.transpose, "movedim": views.movedim,
    "unsqueeze": views.unsqueeze, "squeeze": views.squeeze, "view": views.view,
    "flatten": views.flatten, "chunk": views.chunk, "split": views.split, "narrow": views.narrow,
    "select": views.select, "index": views.index, "cat": views.cat, "stack": views.stack,
    "expand": views.expand, "pad": views.pad,
    "total": reductions.total, "mean": reductions.mean, "one_hot": reductions.one_hot,
    "interpolate": interpolation.interpolate, "linear": interpolation.linear,
    "matmul": interpolation.matmul,
    "convolution": convolution.convolution,
    "transposed_convolution": convolution.transposed_convolution,
    "batch_norm": norms.batch_norm, "group_norm": norms.group_norm,
    "instance_norm": norms.instance_norm, "layer_norm": norms.layer_norm,
}  # fmt: skip
"""Rules of a single function, which take its arguments alone."""


def _arguments(rule: SpatialRule, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return rule(*args, **kwargs)


SPATIAL_RULES: Mapping[str, SpatialRule] = MappingProxyType(
    implement(
        "space",
        _OF_FUNCTIONS | {name: partial(_arguments, rule) for name, rule in _OF_ONE.items()},
    )
)
"""Name of a function of torch -> its rule, which takes the function and its arguments."""
