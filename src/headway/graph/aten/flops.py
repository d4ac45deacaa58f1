"""FLOPs and bytes of one operator, forward and for both gradients, by formulas on shapes.

FLOPs follow torch.utils.flop_counter: contractions only, 2 for a multiply-add, attention as two
products forward and four backward (kernels that recompute the scores do a fifth), causal masks
not subtracted. Bytes: every operand is read once, every result written once. A view moves
nothing, but the gradient of a tensor of which it is a part is first filled with zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from headway.graph.aten.index_expression import OperatorCall
from headway.graph.model_graph import TensorSpec, Work

LOOKUP_KINDS = ("embedding", "embedding_bag", "index_select", "gather", "index")
"""They read only the rows that are selected."""
SLICING_KINDS = ("select", "slice", "narrow")
"""Views of a part, whose backward makes a gradient of the whole."""
RECURRENT_LAYERS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
"""Recurrent layers: cells, called for one place of a sequence after the other."""
RECURRENT_CELLS = ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")


def flops_of(call: OperatorCall, needs: Sequence[bool], trained: Sequence[bool]) -> Work:
    """FLOPs of an operator.

    Args:
        needs: For each input, whether backward computes its gradient.
        trained: For each input, whether it is a parameter.
    """
    if call.kind == "scaled_dot_product_attention":
        return _attention(call, needs, trained)
    if (
        call.kind in (*RECURRENT_LAYERS, *RECURRENT_CELLS) and "input" in call.roles
    ):  # none of a packed sequence
        return _recurrent(call, needs, trained)
    forward, factors = _product(call)
    gradients = [0, 0]
    for role, wanted, weight in zip(call.roles, needs, trained, strict=True):
        if wanted and role in factors:
            gradients[weight] += forward
    return Work(forward=forward, input_gradient=gradients[0], weight_gradient=gradients[1])


def _product(call: OperatorCall) -> tuple[int, tuple[str, ...]]:
    """FLOPs of a product of two tensors, and the names of its two factors."""
    kind = call.kind
    if kind == "linear":
        return 2 * call.outputs[0].elements * call.shape("input")[-1], ("input", "weight")
    if kind in ("matmul", "mm", "bmm", "mv", "dot"):
        inner = call.shape("self")[-1]
        return 2 * call.outputs[0].elements * inner, call.roles
    if kind in ("addmm", "baddbmm"):
        factors = call.roles[1:]
        return 2 * call.outputs[0].elements * call.shape(factors[0])[-1], factors
    if kind.startswith("conv"):
        backwards = "transpose" in kind or bool(call.attributes.get("transposed"))
        # Of a transposed convolution every input, not every output, meets the whole kernel.
        points = math.prod(call.shape("input") if backwards else call.result)
        return 2 * points * math.prod(call.shape("weight")[1:]), ("input", "weight")
    if kind == "einsum" and len(call.inputs) == 2:
        return _einsum(call), call.roles
    return 0, ()


def kernel_calls(call: OperatorCall) -> int:
    """How often an operator calls its kernel: a recurrent layer for each place and direction."""
    if call.kind not in RECURRENT_LAYERS or "input" not in call.roles:
        return 1
    shape, own = call.shape("input"), call.attributes
    places = shape[-2] if own.get("batch_first") or len(shape) == 2 else shape[0]
    return places * int(own.get("num_layers", 1)) * (1 + bool(own.get("bidirectional")))


def _recurrent(call: OperatorCall, needs: Sequence[bool], trained: Sequence[bool]) -> Work:
    """Two products for each cell, of which backward makes both gradients."""
    matrices = [
        spec
        for spec, role in zip(call.inputs, call.roles, strict=True)
        if len(spec.shape) == 2 and role.startswith(("params", "w_"))
    ]
    rows = math.prod(call.shape("input")[:-1])
    forward = 2 * rows * sum(spec.elements for spec in matrices)
    asked = [weight for weight, wanted in zip(trained, needs, strict=True) if wanted]
    return Work(
        forward=forward,
        # Whichever gradient is asked for needs those of all states.
        input_gradient=forward * bool(asked),
        weight_gradient=forward * any(asked),
    )


def _einsum(call: OperatorCall) -> int:
    """Twice the number of products; letters of one operand alone are added up before."""
    left, _, right = str(call.value("equation")).replace(" ", "").partition("->")
    first, second = left.split(",")
    sizes = dict(zip(first + second, call.inputs[0].shape + call.inputs[1].shape, strict=False))
    used = set(right) | (set(first) & set(second))
    if not set(first) & set(second) - set(right):
        return 0  # an outer product: nothing is added up, torch multiplies
    return 2 * math.prod(sizes[letter] for letter in used)


def _attention(call: OperatorCall, needs: Sequence[bool], trained: Sequence[bool]) -> Work:
    """Scores q k^T and their product with v; backward dV, dP, and from dP dQ and dK."""
    query, keys, width = call.shape("query"), call.shape("key")[-2], call.shape("value")[-1]
    scores = 2 * math.prod(query) * keys
    values = 2 * math.prod(query[:-1]) * keys * width
    wanted = {role for role, need in zip(call.roles, needs, strict=True) if need}
    backward = scores * len(wanted & {"query", "key"}) + values * ("value" in wanted)
    # dP = dO v^T precedes both dQ and dK, and is computed once for them.
    backward += values if wanted & {"query", "key"} else 0
    return Work(forward=scores + values, input_gradient=backward)


def traffic_of(
    call: OperatorCall, needs: Sequence[bool], trained: Sequence[bool], *, view: bool
) -> Work:
    """Bytes that an operator reads and writes.

    Args:
        needs: For each input, whether backward computes its gradient.
        trained: For each input, whether it is a parameter.
        view: The result is the memory of an input.
    """
    result = sum(spec.bytes for spec in call.outputs)
    if view:
        # The whole gradient is filled with zeros, then that of the part is read and written.
        cut = call.kind in SLICING_KINDS and needs[0]
        return Work(input_gradient=call.inputs[0].bytes + 2 * result if cut else 0)
    weights = sum(s.bytes for s, is_weight in zip(call.inputs, trained, strict=True) if is_weight)
    read = [spec for spec, is_weight in zip(call.inputs, trained, strict=True) if not is_weight]
    inputs = sum(spec.bytes for spec in read)
    rows = _rows(call) if call.kind in LOOKUP_KINDS else 0
    if call.kind in LOOKUP_KINDS:
        moved = sum(spec.bytes for spec in read if not spec.floating) + rows + result
    else:
        moved = inputs + weights + result
    gradients = [0, 0]
    for spec, wanted, is_weight in zip(call.inputs, needs, trained, strict=True):
        gradients[is_weight] += spec.bytes if wanted else 0
    # Without weights (a product of activations) the other operand is read again.
    other = weights or inputs
    if call.kind in LOOKUP_KINDS and gradients[1]:
        gradients[1] += 2 * rows  # each row that was read is added to its place
    return Work(
        forward=moved,
        input_gradient=result + other + gradients[0] if gradients[0] else 0,
        weight_gradient=result + inputs + gradients[1] if gradients[1] else 0,
    )


def parameter_traffic(kind: str, own: float, traffic: Work) -> Work:
    """Bytes of parameters among those that an operator moves: as many, however many samples.

    Args:
        kind: Of the operator; of a table, forward reads rows alone, which samples choose.
        own: Bytes of its parameters.
    """
    return Work(
        forward=0 if kind in LOOKUP_KINDS else min(int(own), traffic.forward),
        input_gradient=min(int(own), traffic.input_gradient),
        weight_gradient=min(int(own), traffic.weight_gradient),
    )


def _rows(call: OperatorCall) -> int:
    """Bytes of the rows that are read from a table."""
    if call.kind != "embedding_bag":
        return sum(spec.bytes for spec in call.outputs)
    table: TensorSpec = call.inputs[call.roles.index("weight")]
    return math.prod(call.shape("indices")) * table.shape[1] * table.itemsize
