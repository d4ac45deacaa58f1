"""The axes of a call, by the index expression that the table of operators names for its kind.

To support another operator, write its function in the module of its family (`contractions`,
`convolutions`, `pointwise`, `reductions`, `views`), and name it in `graph.operator_registry`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

from headway.graph.aten import contractions, convolutions, pointwise, reductions, views
from headway.graph.aten.index_expression import (
    IndexExpression,
    OperatorCall,
    UnsupportedCall,
    axes_from_expression,
)
from headway.graph.model_graph import OperatorAxes
from headway.graph.operator_registry import implement

_FUNCTIONS: dict[str, Callable[[OperatorCall], IndexExpression]] = {
    "pointwise": pointwise.pointwise, "created": pointwise.created, "counted": pointwise.counted,
    "triangle": pointwise.triangle,
    "linear": contractions.linear, "matmul": contractions.matmul,
    "added_product": contractions.added_product, "einsum": contractions.einsum,
    "outer": contractions.outer, "attention": contractions.attention,
    "reshape": views.reshape, "permute": views.permute, "expand": views.expand,
    "repeat": views.repeat, "cut": views.cut, "join": views.join, "pad": views.pad,
    "along": views.along,
    "convolution": convolutions.convolution, "transposed": convolutions.transposed,
    "pooling": convolutions.pooling, "adaptive": convolutions.adaptive,
    "enlarged": convolutions.enlarged,
    "reduction": reductions.reduction, "softmax": reductions.softmax,
    "row_norm": reductions.row_norm, "group_norm": reductions.group_norm,
    "batch_norm": reductions.batch_norm, "embedding": reductions.embedding,
    "embedding_bag": reductions.embedding_bag, "selected": reductions.selected,
    "gathered": reductions.gathered, "indexed": reductions.indexed,
    "class_loss": reductions.class_loss, "element_loss": reductions.element_loss,
}  # fmt: skip
_TABLE = MappingProxyType(implement("expression", _FUNCTIONS))


def axes_of(call: OperatorCall) -> OperatorAxes:
    """The axes of an operator; `known` is false where no rule was found."""
    entry = _TABLE.get(call.kind)
    if entry is None:
        return OperatorAxes(known=False)
    try:
        return axes_from_expression(call, entry(call))
    except (UnsupportedCall, LookupError, ValueError):  # an argument of a form never seen
        return OperatorAxes(known=False)
