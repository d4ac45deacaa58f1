"""The one table of operators: what the search may split, and by which rule each executor does it.

A row names operators as torch does, in Python (`cross_entropy`) and in a captured graph
(`cross_entropy_loss`), and says by which rule each of four readers treats them:

- `expression`: the index expression from which the search reads the legal splits (`graph.aten`);
- `layers`: the rule of split layers (`parallel.tensor`);
- `space`: the rule of samples that are split in space (`parallel.spatial`);
- `tables`: the rule of sums over the rows of split tables, while they are pending
  (`parallel.tables`).

"" is an explicit no. Without a `layers` rule the executor leaves the weights around such an
operator whole, or refuses it by name on a grid that cuts every activation; without a `space` rule
it refuses it by name; without a `tables` rule the sums are taken first; without an expression the
search only replicates it. A reader gives its
functions to `implement`, which fails where a rule has no function or a function no rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeVar

Reader = Literal["expression", "layers", "space", "tables"]
_Function = TypeVar("_Function")


@dataclass(frozen=True, slots=True)
class OperatorRules:
    """The rules of an operator, by reader; "" where the reader has none."""

    expression: str
    layers: str
    space: str
    tables: str


_ELEMENTWISE = ("pointwise", "elementwise")
"""Each of these also has its variant in place in both executors: `relu_`."""

# fmt: off
_ROWS: tuple[tuple[str, str, str, str, str], ...] = (
    # names; expression, layers, space, tables
    ("abs acos acosh asin asinh atan atanh bitwise_not ceil celu clamp_max clamp_min clone "
     "contiguous cos cosh detach elu erf erfc exp exp2 expm1 floor frac gelu hardshrink "
     "hardsigmoid hardswish hardtanh invert isfinite isinf isnan leaky_relu log log10 log1p log2 "
     "log_sigmoid logical_not logit logsigmoid mish nan_to_num neg negative positive reciprocal "
     "relu relu6 round rsqrt selu sigmoid sign silu sin sinh softplus softshrink softsign sqrt "
     "square tan tanh tanhshrink threshold _threshold trunc",
     *_ELEMENTWISE, "unary", "function"),
    ("bfloat16 bool cpu cuda double float half int long to type", *_ELEMENTWISE, "unary", ""),
    ("add addcdiv addcmul and atan2 bitwise_and bitwise_or bitwise_xor clamp clip copysign div "
     "divide eq floor_divide floordiv fmod ge gt heaviside iadd idiv imul ipow isub itruediv le "
     "lerp logaddexp logical_and logical_or logical_xor lt masked_fill maximum minimum mod mul "
     "multiply ne or pow radd rdiv remainder rfloordiv rmul rpow rsub rtruediv sub subtract "
     "true_divide truediv type_as where xlogy xor",
     *_ELEMENTWISE, "broadcast", "arithmetic"),
    ("zero_ fill_", "", "elementwise", "unary", ""),
    ("copy_", "", "elementwise", "broadcast", ""),
    # its weights are of channels, which broadcasting would misplace
    ("prelu", "", "", "unary", ""),
    ("prelu_elementwise alias detach_copy lift_fresh_copy _to_copy", "pointwise", "", "", ""),
    ("dropout", "pointwise", "dropout", "dropout", ""),
    ("dropout1d dropout2d dropout3d", "", "", "dropout", ""),
    ("feature_dropout native_dropout", "pointwise", "", "", ""),
    # tensors that are made
    ("empty_like full_like ones_like zeros_like", "factory", "elementwise", "unary", ""),
    ("new_empty new_full new_ones new_zeros", "factory", "local_result", "local_result", ""),
    ("is_complex is_floating_point new_tensor", "", "local_result", "local_result", ""),
    # random numbers are drawn for the part: other ones than of the whole
    ("rand_like randn_like", "factory", "", "", ""),
    ("empty full ones rand randn scalar_tensor zeros", "factory", "", "", ""),
    ("arange linspace", "arange", "", "", ""),
    ("tril triu", "triangle", "triangle", "", ""),
    # products
    ("linear", "linear", "linear", "linear", "linear"),
    ("matmul", "matmul", "matmul", "matmul", "matmul"),
    ("mm bmm", "matmul", "matmul", "", "matmul"),
    ("rmatmul", "", "matmul", "", ""),
    ("mv dot", "matmul", "", "", ""),
    ("addmm", "addmm", "addmm", "", ""),
    ("baddbmm", "addmm", "", "", ""),
    ("einsum", "einsum", "einsum", "", "einsum"),
    ("outer", "outer", "", "", ""),
    ("scaled_dot_product_attention", "attention", "attention", "", ""),
    ("multi_head_attention_forward", "", "multi_head_attention", "", ""),
    # other shapes
    ("view reshape", "reshape", "reshape", "view", "reshape"),
    ("view_as", "reshape", "reshape_as", "", ""),
    ("reshape_as", "", "reshape_as", "", ""),
    ("flatten", "reshape", "flatten", "flatten", "indexing"),
    ("unflatten", "reshape", "unflatten", "", "indexing"),
    ("squeeze", "reshape", "squeeze", "squeeze", "indexing"),
    ("unsqueeze", "reshape", "unsqueeze", "unsqueeze", "indexing"),
    ("_unsafe_view", "reshape", "", "", ""),
    ("permute", "permute", "permute", "permute", "indexing"),
    ("transpose swapaxes swapdims", "permute", "transpose", "transpose", "indexing"),
    ("movedim", "permute", "movedim", "movedim", ""),
    ("moveaxis", "", "movedim", "movedim", ""),
    ("t", "permute", "t", "", ""),
    ("numpy_T", "permute", "", "", ""),
    ("expand broadcast_to", "expand", "expand", "expand", ""),
    ("expand_as", "expand", "", "", ""),
    ("repeat", "repeat", "", "", ""),
    ("repeat_interleave", "", "repeat_interleave", "", ""),
    # parts and joints
    ("chunk", "split_dimension", "chunk", "chunk", "indexing"),
    ("split", "split_dimension", "split", "split", "indexing"),
    ("narrow", "split_dimension", "narrow", "narrow", "indexing"),
    ("select", "split_dimension", "select", "select", "indexing"),
    ("unbind", "split_dimension", "unbind", "", "indexing"),
    ("slice split_with_sizes", "split_dimension", "", "", ""),
    ("getitem", "", "getitem", "getitem", "indexing"),
    ("cat concat", "concatenate", "cat", "cat", "joined"),
    ("concatenate", "", "cat", "cat", "joined"),
    ("stack", "concatenate", "stack", "stack", "joined"),
    ("pad", "pad", "", "pad", ""),
    ("constant_pad_nd", "pad", "", "", ""),
    # along dimensions that the executors want whole
    ("cumsum flip", "whole_dimension", "", "along_whole_dims", ""),
    ("roll sort topk argsort", "whole_dimension", "", "", ""),
    ("cumprod glu normalize softmin", "", "", "along_whole_dims", ""),
    # windows
    ("conv1d conv2d conv3d", "convolution", "", "convolution", ""),
    ("convolution", "convolution", "", "", ""),
    ("conv_transpose1d conv_transpose2d conv_transpose3d",
     "transposed_convolution", "", "transposed_convolution", ""),
    ("max_pool1d max_pool2d max_pool3d", "pooling", "", "max_pool", ""),
    ("max_pool2d_with_indices", "pooling", "", "", ""),
    ("avg_pool1d avg_pool2d avg_pool3d", "pooling", "", "average_pool", ""),
    ("adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d",
     "adaptive_pooling", "", "adaptive_average_pool", ""),
    ("adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d",
     "", "", "adaptive_max_pool", ""),
    ("interpolate", "", "", "interpolate", ""),
    # what `interpolate` calls
    ("upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d "
     "upsample_bilinear2d upsample_trilinear3d", "upsample", "", "", ""),
    # reductions and norms
    ("sum", "reduction", "total", "total", "total"),
    ("mean", "reduction", "mean", "mean", "mean"),
    ("amax amin any all argmax argmin logsumexp",
     "reduction", "along_whole_dims", "along_whole_dims", ""),
    ("var", "reduction", "var", "along_whole_dims", ""),
    ("std norm", "reduction", "", "along_whole_dims", ""),
    ("prod", "", "", "along_whole_dims", ""),
    ("max min", "", "along_whole_dims", "", ""),
    ("softmax", "softmax", "softmax", "along_whole_dims", ""),
    ("log_softmax", "softmax", "log_softmax", "along_whole_dims", ""),
    ("_softmax _log_softmax", "softmax", "", "", ""),
    ("layer_norm", "row_norm", "layer_norm", "layer_norm", ""),
    ("rms_norm", "row_norm", "rms_norm", "", ""),
    ("group_norm", "group_norm", "", "group_norm", ""),
    ("batch_norm", "batch_norm", "", "batch_norm", ""),
    ("instance_norm", "", "", "instance_norm", ""),
    # tables, indexing and losses
    ("embedding", "embedding", "embedding", "", ""),
    ("embedding_bag", "embedding_bag", "", "", ""),
    ("index_select", "index_select", "", "", ""),
    ("gather", "gather", "", "", ""),
    ("index", "index", "", "", ""),
    ("one_hot", "", "", "one_hot", ""),
    ("cross_entropy cross_entropy_loss", "class_loss", "cross_entropy", "class_loss", ""),
    ("nll_loss", "class_loss", "", "class_loss", ""),
    ("nll_loss_nd", "class_loss", "", "", ""),
    ("mse_loss", "element_loss", "mse_loss", "elementwise_loss", ""),
    ("l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits",
     "element_loss", "", "elementwise_loss", ""),
)
# fmt: on

_IN_PLACE = frozenset(["elementwise", "unary", "broadcast"])
"""Rules that carry out a function's variant in place as well."""

OPERATORS: Mapping[str, OperatorRules] = MappingProxyType(
    {name: OperatorRules(*rules) for names, *rules in _ROWS for name in names.split()}
)
"""Name of an operator -> its rules."""


_EXPRESSIONS_IN_LAYERS = frozenset(row.expression for row in OPERATORS.values() if row.layers)
"""Index expressions of operators that split layers have a rule for."""


def splits_in_layers(kind: str) -> bool:
    """Whether split layers can execute an operator of a captured graph in parts."""
    row = OPERATORS.get(kind)
    if row is None:
        return False
    # Each rank creates positions and masks whole and takes its part: no rule is needed.
    created = row.expression in ("factory", "arange")
    # A captured graph has names of its own (`_softmax`), which no executor meets: they count as
    # what they were captured from, an operator with the same index expression.
    only_captured = not row.layers and not row.space
    return (
        bool(row.layers) or created or (only_captured and row.expression in _EXPRESSIONS_IN_LAYERS)
    )


def implement(reader: Reader, functions: Mapping[str, _Function]) -> dict[str, _Function]:
    """A reader's table: name of an operator -> the function that is its rule.

    Args:
        functions: Name of a rule -> its function.

    Raises:
        LookupError: A rule has no function, or a function no operator.
    """
    rules = {name: rule for name, row in OPERATORS.items() if (rule := str(getattr(row, reader)))}
    # Both ways: a function without a row would be a rule that nothing can reach.
    if missing := set(rules.values()) ^ set(functions):
        raise LookupError(f"{reader}: a rule or its function is missing: {sorted(missing)}")
    variants = {f"{name}_": rule for name, rule in rules.items() if rule in _IN_PLACE}
    # A row of its own, as `zero_` has, comes before a variant.
    return {name: functions[rule] for name, rule in (variants | rules).items()}
