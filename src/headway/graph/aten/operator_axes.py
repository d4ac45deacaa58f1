"""The axes of a call, by the index expression that the table of operators names for its kind.

To support another operator, write its function in the module of its family (`contractions`,
`elementwise`), list it here, and name it in `graph.operator_registry`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

from headway.graph.aten import contractions, elementwise
from headway.graph.aten.index_expression import (
    IndexExpression,
    OperatorCall,
    UnsupportedCall,
    axes_from_expression,
)
from headway.graph.model_graph import OperatorAxes
from headway.graph.operator_registry import implement

_FUNCTIONS: tuple[Callable[[OperatorCall], IndexExpression], ...] = (
    contractions.linear, contractions.matmul, contractions.addmm, contractions.einsum,
    contractions.outer, contractions.attention, contractions.convolution,
    contractions.transposed_convolution, contractions.pooling, contractions.adaptive_pooling,
    contractions.upsample, contractions.reduction, contractions.softmax, contractions.row_norm,
    contractions.group_norm, contractions.batch_norm, contractions.embedding,
    contractions.embedding_bag, contractions.index_select, contractions.gather,
    contractions.index, contractions.class_loss, contractions.element_loss,
    elementwise.pointwise, elementwise.factory, elementwise.arange, elementwise.triangle,
    elementwise.reshape, elementwise.permute, elementwise.expand, elementwise.repeat,
    elementwise.split_dimension, elementwise.concatenate, elementwise.pad,
    elementwise.whole_dimension,
)  # fmt: skip
_TABLE = MappingProxyType(
    implement("expression", {function.__name__: function for function in _FUNCTIONS})
)


def axes_of(call: OperatorCall) -> OperatorAxes:
    """The axes of an operator; `known` is false where no rule was found."""
    entry = _TABLE.get(call.kind)
    if entry is None:
        return OperatorAxes(known=False)
    try:
        return axes_from_expression(call, entry(call))
    except (UnsupportedCall, LookupError, ValueError):  # an argument of a form never seen
        return OperatorAxes(known=False)
