"""The layers of a captured model, as the guidelines of Das et al. see them.

Invariant: the FLOPs of a layer per sample are those of its operator (without the input gradient,
where nobody needs it).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from headway.cost.guidelines.das import Layer
from headway.graph import ModelGraph, Operator, TensorSpec


def layers_of(graph: ModelGraph) -> tuple[Layer, ...]:
    """Convolutions and linear layers with weights, in the order of execution.

    The positions of a sequence count as its output map; how many there are is told by the FLOPs,
    since what was folded into an operator may have another shape than its product. Samples are the
    first dimension of the graph's first input. A convolution in groups is left out: its volumes
    follow other formulas.
    """
    samples = next((spec.shape[0] for spec in graph.inputs.values() if spec.shape), 1)
    found = (_layer(operator, samples, *graph.specs(operator)) for operator in graph.operators)
    return tuple(layer for layer in found if layer is not None)


def _layer(
    operator: Operator,
    samples: int,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
) -> Layer | None:
    by_role = dict(zip(operator.roles, zip(operator.inputs, inputs, strict=True), strict=True))
    if "weight" not in by_role or by_role["weight"][0] not in operator.parameters:
        return None
    weight, result = by_role["weight"][1], outputs[0]
    # what was folded into an operator in front of it has given its input another role
    others = (spec for role, (_, spec) in by_role.items() if role not in ("weight", "bias"))
    source = next(others, weight)
    positions = operator.flops.forward // (2 * math.prod(weight.shape) * max(1, samples))
    kernel, output, arrived = (1, 1), (positions, 1), (positions, 1)
    match operator.kind:
        case "linear":
            pass
        case "conv2d" if weight.shape[1] == source.shape[1]:
            kernel = (weight.shape[2], weight.shape[3])
            arrived = (source.shape[2], source.shape[3])
            if math.prod(result.shape[2:]) == positions and len(result.shape) == 4:
                output = (result.shape[2], result.shape[3])
        case _:
            return None
    return Layer(
        ifm=weight.shape[1],
        ofm=weight.shape[0],
        kernel=kernel,
        output=output,
        input=arrived,
        first=not operator.flops.input_gradient,
        element=weight.itemsize,
        name=operator.name,
    )
