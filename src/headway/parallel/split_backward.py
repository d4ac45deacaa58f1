"""Backward in two halves: the gradients of a stage's inputs first, those of its weights later.

`input_gradients` runs the graph from the outputs to the inputs and notes what arrives at every node
from which a branch to weights goes off; `WeightGradients` starts again from there, so that nothing
is computed twice (zero-bubble pipelines, Qi et al. 2023, section 2). Only torch.autograd's public
interface to the graph is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

Gradients = Sequence[Tensor | None]


@dataclass(slots=True)
class _Start:
    """A node on the way to the inputs, from which a branch to weights goes off.

    Attributes:
        node: Whose backward makes the branch's gradient.
        weights: At the ends of the branch.
        gradients: What arrived at the node; None: nothing did.
    """

    node: Node
    weights: dict[int, Tensor]
    gradients: Gradients | None = None

    def note(self, gradients: Gradients) -> None:
        self.gradients = gradients

    def replace(self, gradients: Gradients) -> Any:
        return self.gradients

    def edges(self) -> tuple[list[GradientEdge], list[Tensor]]:
        given = [(i, g) for i, g in enumerate(self.gradients or ()) if g is not None]
        return [GradientEdge(self.node, i) for i, _ in given], [g for _, g in given]


@dataclass(slots=True)
class WeightGradients:
    """What is left of a backward pass after the gradients of the inputs.

    Attributes:
        groups: Starts; no weight is in two groups.
        roots: In place of groups: where a whole backward begins, of a stage without inputs.
        gradients: Of `roots`.
    """

    groups: list[list[_Start]] = field(default_factory=list)
    roots: Sequence[GradientEdge] = ()
    gradients: Gradients = ()

    def run(self) -> None:
        """Add the gradients to `.grad` of the weights, once; frees the graph."""
        if self.roots:
            torch.autograd.backward(self.roots, self.gradients)
            self.roots = self.gradients = ()
        while self.groups:
            _run(self.groups.pop())  # from the end: groups of several first


def input_gradients(
    roots: Sequence[GradientEdge], gradients: Gradients, inputs: Sequence[GradientEdge]
) -> tuple[Gradients, WeightGradients]:
    """The gradients of a stage's inputs, and what is to be done for its weights later.

    Args:
        roots: Of the stage's outputs.
        gradients: Of the outputs.
        inputs: Of the inputs; all of one node. None: all is done later.

    Returns:
        One gradient for each input (None: it has none), and the rest.
    """
    if not inputs:
        return (), WeightGradients(roots=roots, gradients=gradients)
    starts = _find_starts([root.node for root in roots], inputs[0].node)
    hooks = [start.node.register_prehook(start.note) for start in starts]
    try:
        found = torch.autograd.grad(
            roots,
            inputs,
            gradients,
            retain_graph=True,
            allow_unused=True,
        )
    finally:
        for hook in hooks:
            hook.remove()
    _add_roots(starts, roots, gradients)
    return found, WeightGradients(_group([s for s in starts if s.gradients is not None]))


def _find_starts(roots: Sequence[Node], end: Node) -> list[_Start]:
    """All nodes between the outputs and the inputs, or outputs, with branches to weights."""
    after: dict[Node, list[Node]] = {end: []}
    before: dict[Node, list[Node]] = {}
    waiting = [node for node in roots if node is not end]
    while waiting:
        node = waiting.pop()
        if node in after:
            continue
        after[node] = [n for n, _ in node.next_functions if n is not None]
        for n in after[node]:
            before.setdefault(n, []).append(node)
        waiting += after[node]
    on_way, waiting = {end}, [end]
    while waiting:
        for node in before.get(waiting.pop(), ()):
            if node not in on_way:
                on_way.add(node)
                waiting.append(node)
    starts = []
    for node in after:
        branches = [n for n in after[node] if n not in on_way] if node in on_way else []
        weights = _weights(branches, after)
        if weights and node is not end:
            starts.append(_Start(node, weights))
    lone = [node for node in dict.fromkeys(roots) if node not in on_way]
    return starts + [_Start(node, _weights([node], after)) for node in lone]


def _weights(branches: list[Node], after: dict[Node, list[Node]]) -> dict[int, Tensor]:
    """The leaves behind some nodes, by id."""
    found: dict[int, Tensor] = {}
    seen, waiting = set(branches), list(branches)
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)  # of a node that adds to .grad
        if leaf is not None:
            found[id(leaf)] = leaf
        for n in after[node]:
            if n not in seen:
                seen.add(n)
                waiting.append(n)
    return found


def _add_roots(starts: list[_Start], roots: Sequence[GradientEdge], gradients: Gradients) -> None:
    """Outputs that do not depend on the inputs: no hook has seen their gradients."""
    silent = {start.node: start for start in starts if start.gradients is None}
    for root, gradient in zip(roots, gradients, strict=True):
        start = silent.get(root.node)
        if start is not None and gradient is not None:
            known = list(start.gradients or ())
            known += [None] * (root.output_nr + 1 - len(known))
            known[root.output_nr] = gradient
            start.gradients = known


def _group(starts: Sequence[_Start]) -> list[list[_Start]]:
    """Starts that share a weight together; groups of several last: they need the others' graph."""
    groups: list[list[_Start]] = []
    home: dict[int, list[_Start]] = {}
    for start in starts:
        group = [start]
        for other in {id(home[w]): home[w] for w in start.weights if w in home}.values():
            group = other + group
            groups.remove(other)
        groups.append(group)
        home.update({weight: group for member in group for weight in member.weights})
    return sorted(groups, key=len)


def _run(group: list[_Start]) -> None:
    edges: list[GradientEdge] = []
    gradients: list[Tensor] = []
    weights: dict[int, Tensor] = {}
    for start in group:
        for part, whole in zip(start.edges(), (edges, gradients), strict=True):
            whole += part  # type: ignore[operator]
        weights.update(start.weights)
    hooks = []
    several = len(group) > 1
    if several:  # one start lies on the way of another: what comes from there has been seen
        hooks = [start.node.register_prehook(_replacing(start)) for start in group]
    try:
        inputs = list(weights.values())
        torch.autograd.backward(edges, gradients, retain_graph=several, inputs=inputs)
    finally:
        for hook in hooks:
            hook.remove()


def _replacing(start: _Start) -> Callable[[Any], Any]:
    seen = tuple(start.gradients or ())
    return lambda _: seen
