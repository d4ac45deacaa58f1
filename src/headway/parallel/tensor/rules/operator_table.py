"""The rules of split layers, as the table of operators names them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from headway.graph.operator_registry import implement
from headway.parallel.tensor.rules import layers, products, reductions, views
from headway.parallel.tensor.rules.dropout import dropout
from headway.parallel.tensor.split_tensor import OperatorRule, elementwise

_FUNCTIONS: dict[str, OperatorRule] = {
    "elementwise": elementwise, "dropout": dropout,
    "embedding": layers.embedding, "layer_norm": layers.layer_norm, "rms_norm": layers.rms_norm,
    "cross_entropy": layers.cross_entropy, "mse_loss": layers.mse_loss,
    "linear": products.linear, "addmm": products.addmm, "matmul": products.matmul,
    "einsum": products.einsum, "attention": products.attention, "heads": products.heads,
    "of_both": reductions.of_both, "triangle": reductions.triangle, "total": reductions.total,
    "mean": reductions.mean, "var": reductions.var, "extreme": reductions.extreme,
    "softmax": reductions.softmax, "log_softmax": reductions.log_softmax,
    "reshape": views.reshape, "reshape_as": views.reshape_as, "flatten": views.flatten,
    "unflatten": views.unflatten, "squeeze": views.squeeze, "unsqueeze": views.unsqueeze,
    "transpose": views.transpose, "turned": views.turned, "permute": views.permute,
    "movedim": views.movedim, "expand": views.expand, "repeat_interleave": views.repeat_interleave,
    "chunk": views.chunk, "split": views.split, "unbind": views.unbind, "select": views.select,
    "narrow": views.narrow, "getitem": views.getitem, "cat": views.cat, "stack": views.stack,
}  # fmt: skip

LAYER_RULES: Mapping[str, OperatorRule] = MappingProxyType(implement("layers", _FUNCTIONS))
"""Name of a function of torch -> its rule."""
