"""The registry of operators: aten kind to the function that writes its index expression.

To support another operator, write its function in the module of its family (`contractions`,
`convolutions`, `pointwise`, `reductions`, `views`) and add its kind to the table here.
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

_ENTRIES: tuple[tuple[str, Callable[[OperatorCall], IndexExpression]], ...] = (
    (pointwise.NONLINEAR, pointwise.pointwise),
    (" ".join(pointwise.LINEAR), pointwise.pointwise),
    (pointwise.CREATED, pointwise.created),
    ("arange linspace", pointwise.counted),
    ("tril triu", pointwise.triangle),
    ("linear", contractions.linear),
    ("matmul mm bmm mv dot", contractions.matmul),
    ("addmm baddbmm", contractions.added_product),
    ("einsum", contractions.einsum),
    ("outer", contractions.outer),
    ("scaled_dot_product_attention", contractions.attention),
    ("view reshape flatten unflatten squeeze unsqueeze view_as _unsafe_view", views.reshape),
    ("permute transpose t swapaxes swapdims movedim numpy_T", views.permute),
    ("expand expand_as broadcast_to", views.expand),
    ("repeat", views.repeat),
    ("slice narrow select split split_with_sizes chunk unbind", views.cut),
    ("cat concat stack", views.join),
    ("pad constant_pad_nd", views.pad),
    ("flip roll cumsum sort topk argsort", views.along),
    ("conv1d conv2d conv3d convolution", convolutions.convolution),
    ("conv_transpose1d conv_transpose2d conv_transpose3d", convolutions.transposed),
    ("max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d", convolutions.pooling),
    ("max_pool2d_with_indices", convolutions.pooling),
    ("adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d", convolutions.adaptive),
    ("upsample_nearest1d upsample_nearest2d upsample_nearest3d", convolutions.enlarged),
    ("upsample_linear1d upsample_bilinear2d upsample_trilinear3d", convolutions.enlarged),
    ("sum mean amax amin any all argmax argmin var std logsumexp norm", reductions.reduction),
    ("softmax log_softmax _softmax _log_softmax", reductions.softmax),
    ("layer_norm rms_norm", reductions.row_norm),
    ("group_norm", reductions.group_norm),
    ("batch_norm", reductions.batch_norm),
    ("embedding", reductions.embedding),
    ("embedding_bag", reductions.embedding_bag),
    ("index_select", reductions.selected),
    ("gather", reductions.gathered),
    ("index", reductions.indexed),
    ("cross_entropy_loss nll_loss nll_loss_nd", reductions.class_loss),
    ("mse_loss l1_loss smooth_l1_loss huber_loss", reductions.element_loss),
    ("binary_cross_entropy binary_cross_entropy_with_logits", reductions.element_loss),
)
_TABLE = MappingProxyType({kind: entry for kinds, entry in _ENTRIES for kind in kinds.split()})


def known_kinds() -> tuple[str, ...]:
    """All kinds of the table, sorted."""
    return tuple(sorted(_TABLE))


def axes_of(call: OperatorCall) -> OperatorAxes:
    """The axes of an operator; `known` is false where no rule was found."""
    entry = _TABLE.get(call.kind)
    if entry is None:
        return OperatorAxes(known=False)
    try:
        return axes_from_expression(call, entry(call))
    except (UnsupportedCall, LookupError, ValueError):  # an argument of a form never seen
        return OperatorAxes(known=False)
