"""The one table of rules: kind of split, then name of a function of torch -> its rule.

Which rule an operator has under which kind of split is said by its row in
`graph.operator_registry`; here the rules get their functions. Every rule takes the context, the
function of torch and the arguments of that function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from headway.graph.operator_registry import implement
from headway.parallel import layout_rules
from headway.parallel.spatial import pointwise_and_reductions as spatial
from headway.parallel.spatial import windows
from headway.parallel.split_tensor import OperatorRule, SplitKind
from headway.parallel.tables import table_rules
from headway.parallel.tensor.rules import alignment, layers


def _by_name(*rules: Callable[..., Any]) -> dict[str, OperatorRule]:
    """Rules that take the arguments of torch's function alone, under their own names."""

    def full(rule: Callable[..., Any]) -> OperatorRule:
        return lambda context, func, *args, **kwargs: rule(*args, **kwargs)

    return {rule.__name__: full(rule) for rule in rules}


_BOTH: dict[str, OperatorRule] = {
    "along_whole_dims": layout_rules.along_whole_dims, "dropout": layout_rules.dropout,
    "local_result": layout_rules.local_result,
    **_by_name(
        layout_rules.chunk, layout_rules.expand, layout_rules.flatten, layout_rules.getitem,
        layout_rules.movedim, layout_rules.narrow, layout_rules.permute, layout_rules.select,
        layout_rules.split, layout_rules.squeeze, layout_rules.stack, layout_rules.total,
        layout_rules.transpose, layout_rules.unsqueeze,
    ),
}  # fmt: skip

_LAYERS: dict[str, OperatorRule] = {
    "elementwise": alignment.elementwise,
    "embedding": layers.embedding, "layer_norm": layers.layer_norm, "rms_norm": layers.rms_norm,
    "cross_entropy": layers.cross_entropy, "mse_loss": layers.mse_loss, "mean": layers.mean,
    "var": layers.var, "softmax": layers.softmax,
    "log_softmax": partial(layers.softmax, logarithm=True),
    "linear": layers.linear, "addmm": layers.addmm, "matmul": layers.matmul,
    "einsum": layers.einsum, "attention": layers.attention,
    "multi_head_attention": layers.multi_head_attention,
    "reshape": alignment.reshape, "repeat_interleave": alignment.repeat_interleave,
    "triangle": alignment.triangle, "cat": alignment.cat,
    **_by_name(
        layout_rules.reshape_as, layout_rules.t, layout_rules.unbind, layout_rules.unflatten
    ),
}  # fmt: skip

_SPACE: dict[str, OperatorRule] = {
    "unary": spatial.unary, "broadcast": spatial.broadcast,
    "elementwise_loss": spatial.elementwise_loss, "class_loss": spatial.class_loss,
    "max_pool": windows.max_pool, "average_pool": windows.average_pool,
    "adaptive_average_pool": windows.adaptive_average_pool,
    "adaptive_max_pool": windows.adaptive_max_pool,
    **_by_name(
        spatial.batch_norm, spatial.cat, spatial.group_norm, spatial.instance_norm,
        spatial.layer_norm, spatial.linear, spatial.matmul, spatial.mean, spatial.one_hot,
        spatial.pad, spatial.view, windows.convolution, windows.interpolate,
        windows.transposed_convolution,
    ),
}  # fmt: skip

_TABLES: dict[str, OperatorRule] = {
    "function": table_rules.function, "arithmetic": table_rules.arithmetic,
    "linear": table_rules.linear, "matmul": table_rules.matmul, "total": table_rules.total,
    "mean": table_rules.mean, "reshape": table_rules.reshape, "indexing": table_rules.indexing,
    "joined": table_rules.joined, "einsum": table_rules.einsum,
}  # fmt: skip

RULES: Mapping[SplitKind, Mapping[str, OperatorRule]] = MappingProxyType({
    "layers": implement("layers", _BOTH | _LAYERS),
    "space": implement("space", _BOTH | _SPACE),
    "tables": implement("tables", _TABLES),
})  # fmt: skip
