"""Rules: what each function of torch does with split tensors.

`operator_table.LAYER_RULES` has all of them by the function's name. A rule takes the
context, the function and its arguments, and raises `RuleRefused` for what it cannot do.
"""
