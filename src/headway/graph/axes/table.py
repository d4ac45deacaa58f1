"""The table: kind of operator to the function that writes its index expression."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

from headway.graph.axes import contractions, pointwise, rows, views, windows
from headway.graph.axes.form import Call, Form, Unsupported, build
from headway.graph.operator import Axes

_ENTRIES: tuple[tuple[str, Callable[[Call], Form]], ...] = (
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
    ("conv1d conv2d conv3d convolution", windows.convolution),
    ("conv_transpose1d conv_transpose2d conv_transpose3d", windows.transposed),
    ("max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d", windows.pooling),
    ("max_pool2d_with_indices", windows.pooling),
    ("adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d", windows.adaptive),
    ("upsample_nearest1d upsample_nearest2d upsample_nearest3d", windows.enlarged),
    ("upsample_linear1d upsample_bilinear2d upsample_trilinear3d", windows.enlarged),
    ("sum mean amax amin any all argmax argmin var std logsumexp norm", rows.reduction),
    ("softmax log_softmax _softmax _log_softmax", rows.softmax),
    ("layer_norm rms_norm", rows.row_norm),
    ("group_norm", rows.group_norm),
    ("batch_norm", rows.batch_norm),
    ("embedding", rows.embedding),
    ("embedding_bag", rows.embedding_bag),
    ("index_select", rows.selected),
    ("gather", rows.gathered),
    ("index", rows.indexed),
    ("cross_entropy_loss nll_loss nll_loss_nd", rows.class_loss),
    ("mse_loss l1_loss smooth_l1_loss huber_loss", rows.element_loss),
    ("binary_cross_entropy binary_cross_entropy_with_logits", rows.element_loss),
)
_TABLE = MappingProxyType({kind: entry for kinds, entry in _ENTRIES for kind in kinds.split()})


def known_kinds() -> tuple[str, ...]:
    """All kinds of the table, sorted."""
    return tuple(sorted(_TABLE))


def axes_of(call: Call) -> Axes:
    """The axes of an operator; `known` is false where no rule was found."""
    entry = _TABLE.get(call.kind)
    if entry is None:
        return Axes(known=False)
    try:
        return build(call, entry(call))
    except (Unsupported, LookupError, ValueError):  # an argument of a form never seen
        return Axes(known=False)
