"""The table of operator rules for split tensors, by the name of the torch function."""

from __future__ import annotations

from headway.parallel.tensor.rules import dropout, layers, products, reductions, views
from headway.parallel.tensor.split_tensor import OperatorRule, elementwise

_ELEMENTWISE = """
abs add and bfloat16 bool clamp clamp_max clamp_min clone contiguous cos cosh cpu detach div double
elu eq erf exp exp2 expm1 float floor_divide floordiv ge gelu gt half hardswish hardtanh iadd imul
int invert isfinite isinf isnan isub itruediv le leaky_relu lerp log log1p log2 logical_and
logical_not logical_or logsigmoid long lt masked_fill maximum minimum mish mod mul multiply
nan_to_num ne neg
negative ones_like or pow radd rdiv reciprocal relu relu6 remainder rmul round rpow
rsqrt rsub rtruediv selu sigmoid sign silu sin sinh softplus sqrt square sub subtract tan tanh to
true_divide truediv type type_as where xor zeros_like
"""


def operator_rules() -> dict[str, OperatorRule]:
    """Function's name -> rule; a name with "_" works in place."""
    rules: dict[str, OperatorRule] = {}
    for name in _ELEMENTWISE.split():
        rules[name] = rules[f"{name}_"] = elementwise
    for module in (dropout, layers, products, reductions, views):
        rules |= module.RULES
    return rules
