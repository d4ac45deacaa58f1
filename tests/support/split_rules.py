"""Carries out a rule of `headway.graph.sharding_rules` with numbers, and compares with the whole
operator.

Inputs are split as the rule says, the operator is run on every part, the results are put together;
likewise the gradients. In float64, to 1e-12.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from headway.graph.model_graph import Operator, TensorSpec, parse_index
from headway.graph.sharding_rules import Rule, enumerate_rules, window_input_range


@dataclass(frozen=True)
class At:
    """Where an operator is run: on the whole, or on one part by a rule.

    Attributes:
        rule: None on the whole.
        part: Number of the part.
        shape: Of the result.
    """

    rule: Rule | None
    part: int
    shape: tuple[int, ...]

    def parts(self, *axes):
        """Into how many an axis is split here."""
        return self.rule.parts if self.rule and self.rule.axis in axes else 1

    def pad(self, axis, padding):
        """The padding that is left to the operator: a part's own is filled in before."""
        return padding if self.rule is None or self.rule.axis != axis else 0


@dataclass(frozen=True)
class Sample:
    """A call of one operator.

    Attributes:
        call: From a list of tensors and an `At` to the result.
        tensors: Of the whole.
        fill: What lies outside of an image.
        by_hand: For axes whose parts need more than a call: from (tensors, at) to the result.
        statistics: Axes whose parts exchange numbers: from all parts' tensors to all results.
        no_gradients: Where autograd of a part says nothing.
    """

    call: Callable
    tensors: Sequence[torch.Tensor]
    fill: float = 0.0
    by_hand: dict[str, Callable] = field(default_factory=dict)
    statistics: dict[str, Callable] = field(default_factory=dict)
    no_gradients: bool = False

    def leaf(self, tensor):
        """A copy of which the gradient is wanted, if it can have one."""
        wanted = tensor.is_floating_point() and not self.no_gradients
        return tensor.detach().clone().requires_grad_(wanted)


def whole(sample):
    return sample.call(list(sample.tensors), At(None, 0, ()))


def tuple_of(result):
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def specs(tensors):
    return [TensorSpec(shape=tuple(t.shape), dtype=str(t.dtype)[6:]) for t in tensors]


def check(sample, operator: Operator, parts: int) -> list[Rule]:
    """Carry out all rules; those that were compared.

    Raises:
        AssertionError: A rule is wrong.
    """
    results = tuple_of(whole(sample))
    found = enumerate_rules(operator, specs(sample.tensors), specs(results), parts)
    for rule in found:
        check_rule(sample, operator, rule, parts)
    return list(found)


def check_rule(sample, operator: Operator, rule: Rule, parts: int) -> None:
    """One rule; `parts` for those that do not split."""
    torch.manual_seed(1)
    leaves = [sample.leaf(t) for t in sample.tensors]
    sample_whole = Sample(sample.call, leaves)
    expected = tuple_of(whole(sample_whole))
    pieces = [_pieces(sample, operator, rule, number, parts) for number in range(len(leaves))]
    locals_ = [[p[part][0] for p in pieces] for part in range(parts)]
    runs = _run(sample, rule, locals_, expected, parts)
    for number, (placement, result) in enumerate(zip(rule.outputs, expected, strict=True)):
        _same(_together([r[number] for r in runs], placement), result, f"{rule}: result {number}")
    differentiable = all(e.requires_grad for e in expected)
    exact = rule.axis not in sample.statistics and not {"Pmax", "Pmin"} & set(rule.outputs)
    if sample.no_gradients or not differentiable or not exact:
        return
    upstream = [torch.randn_like(e) for e in expected]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    true = torch.autograd.grad(expected, wanted, upstream, allow_unused=True)
    grads = [_backward(rule, runs[p], locals_[p], upstream, p, parts) for p in range(parts)]
    numbers = [n for n, leaf in enumerate(leaves) if leaf.requires_grad]
    for place, number in enumerate(numbers):
        found = _gathered(
            leaves[number], pieces[number], [g[place] for g in grads], rule.gradients[number]
        )
        _same(found, true[place], f"{rule}: gradient of input {number}")


def _run(sample, rule, locals_, expected, parts):
    shapes = [tuple(_part(e, rule.outputs[n], 0, parts).shape) for n, e in enumerate(expected)]
    if rule.axis in sample.statistics:
        return [tuple_of(r) for r in sample.statistics[rule.axis](locals_)]
    call = sample.by_hand.get(rule.axis, sample.call)
    return [tuple_of(call(t, At(rule, part, shapes[0]))) for part, t in enumerate(locals_)]


def _backward(rule, results, tensors, upstream, part, parts):
    given = []
    for placement, gradient in zip(rule.outputs, upstream, strict=True):
        piece = _part(gradient, placement, part, parts) if placement[0] == "S" else gradient
        given.append(piece / parts if placement == "Pavg" else piece)
    wanted = [t for t in tensors if t.requires_grad]
    return torch.autograd.grad(results, wanted, given, allow_unused=True)


# -- taking apart ----------------------------------------------------------------------------------


def _pieces(sample, operator, rule, number, parts):
    """For every part: the local tensor, and where it was taken from (None: no window)."""
    tensor, placement = sample.tensors[number], rule.inputs[number]
    loop = next((axis for axis in operator.axes.loops if axis.name == rule.axis), None)
    if loop is not None and loop.window and placement[0] == "S":
        dim = next(
            d for d, n in enumerate(parse_index(operator.axes.inputs[number])) if loop.name in n
        )
        return [_window(tensor, dim, loop, part, parts, sample) for part in range(parts)]
    if placement == "P":
        summands = [torch.randn_like(tensor) for _ in range(parts - 1)]
        chunks = [*summands, tensor - sum(summands)]
    elif placement[0] == "S":
        chunks = [_part(tensor, placement, part, parts) for part in range(parts)]
    else:
        chunks = [tensor] * parts
    return [(sample.leaf(chunk), None) for chunk in chunks]


def _window(tensor, dim, loop, part, parts, sample):
    """A part with what it needs of its neighbours, and its share of the padding."""
    window, size, count = loop.window, tensor.shape[dim], loop.size // parts
    low, high = window_input_range(window, part * count, count, size)
    first = part * count * window.stride - window.padding
    last = first + (count - 1) * window.stride + window.dilation * (window.kernel - 1) + 1
    piece = tensor.narrow(dim, low, high - low)
    behind = 2 * (tensor.dim() - dim - 1)
    padded = F.pad(piece, [0] * behind + [low - first, last - high], value=sample.fill)
    return sample.leaf(padded), (dim, first)


def _part(tensor, placement, part, parts):
    """ "S1/3": dimension 1 in `parts` parts within each of 3 groups."""
    if placement[0] != "S":
        return tensor
    dim, groups = _dim(placement)
    shape = tensor.shape
    split = tensor.reshape(*shape[:dim], groups, -1, *shape[dim + 1 :]).chunk(parts, dim + 1)
    assert len(split) == parts
    return split[part].reshape(*shape[:dim], -1, *shape[dim + 1 :])


def _dim(placement):
    dim, _, groups = placement[1:].partition("/")
    return int(dim), int(groups or 1)


# -- putting together ------------------------------------------------------------------------------


def _together(values, placement):
    if placement[0] == "S":
        dim, groups = _dim(placement)
        shape = values[0].shape
        split = [v.reshape(*shape[:dim], groups, -1, *shape[dim + 1 :]) for v in values]
        return torch.cat(split, dim + 1).reshape(*shape[:dim], -1, *shape[dim + 1 :])
    stacked = torch.stack(list(values))
    if placement == "R":
        for value in values:
            _same(value, values[0], "parts of a replicated tensor differ")
        return values[0]
    return {
        "P": lambda: stacked.sum(0),
        "Pavg": lambda: stacked.mean(0),
        "Pmax": lambda: stacked.amax(0),
        "Pmin": lambda: stacked.amin(0),
    }[placement]()


def _gathered(tensor, pieces, gradients, placement):
    """The gradient of the whole; what neighbours lent is added up."""
    if pieces[0][1] is None:
        if all(g is None for g in gradients):
            return None
        return _together(gradients, placement)
    total = torch.zeros_like(tensor)
    for gradient, (_, (dim, first)) in zip(gradients, pieces, strict=True):
        end = min(first + gradient.shape[dim], tensor.shape[dim])
        start = max(first, 0)
        inner = gradient.narrow(dim, start - first, end - start)
        total.narrow(dim, start, end - start).add_(inner)
    return total


def _same(found, expected, what):
    if expected is None or found is None:
        assert found is None or not found.any(), what
        return
    assert found.shape == expected.shape, f"{what}: {found.shape} for {expected.shape}"
    torch.testing.assert_close(
        found, expected, rtol=1e-12, atol=1e-12, msg=lambda m: f"{what}\n{m}"
    )
