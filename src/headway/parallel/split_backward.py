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
        weights: At the ends of the branch, by id.
        level: How many other starts may lie between it and the inputs.
        gradients: What arrived at the node; None: nothing did.
    """

    node: Node
    weights: dict[int, Tensor]
    level: int
    gradients: Gradients | None = None

    def note(self, gradients: Gradients) -> None:
        self.gradients = gradients


@dataclass(slots=True)
class _Task:
    """One pass of the engine: from some edges to some weights.

    Attributes:
        edges: Where it begins.
        gradients: Of the edges.
        weights: Where it ends.
        replaced: Starts of which some lie on the way of others: what comes from there was noted.
        retain: Other tasks need parts of the same graph.
    """

    edges: list[GradientEdge]
    gradients: list[Tensor]
    weights: list[Tensor]
    replaced: Sequence[_Start] = ()
    retain: bool = False

    def run(self) -> None:
        hooks = [start.node.register_prehook(_replacing(start)) for start in self.replaced]
        try:
            torch.autograd.backward(
                self.edges, self.gradients, retain_graph=self.retain, inputs=self.weights
            )
        finally:
            for hook in hooks:
                hook.remove()


@dataclass(slots=True)
class WeightGradients:
    """What is left of a backward pass after the gradients of the inputs.

    Attributes:
        tasks: The last one first.
        roots: In place of tasks: where a whole backward begins, of a stage without inputs.
        gradients: Of `roots`.
    """

    tasks: list[_Task] = field(default_factory=list)
    roots: Sequence[GradientEdge] = ()
    gradients: Gradients = ()

    def run(self) -> None:
        """Add the gradients to `.grad` of the weights, once; frees the graph."""
        if self.roots:
            torch.autograd.backward(self.roots, self.gradients)
            self.roots = self.gradients = ()
        while self.tasks:
            self.tasks.pop().run()


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
    if not inputs or not roots:
        return (), WeightGradients(roots=roots, gradients=gradients)
    graph = _Graph([root.node for root in roots], inputs[0].node)
    starts = graph.starts()
    hooks = [start.node.register_prehook(start.note) for start in starts]
    try:
        found = torch.autograd.grad(roots, inputs, gradients, retain_graph=True, allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    given = [(r, g) for r, g in zip(roots, gradients, strict=True) if g is not None]
    apart = [(r, g) for r, g in given if r.node not in graph.on_way]
    tasks = _tasks([start for start in starts if start.gradients is not None])
    if apart:  # outputs that do not depend on the inputs: no hook has seen their gradients
        edges, weights = [root for root, _ in apart], graph.weights([r.node for r, _ in apart])
        tasks.append(_Task(edges, [g for _, g in apart], list(weights.values()), retain=True))
    return found, WeightGradients(tasks)


class _Graph:
    """The part of autograd's graph that belongs to a stage.

    Args:
        roots: Nodes of the outputs.
        end: Node of the inputs.

    Attributes:
        on_way: The nodes between the outputs and the inputs, both included.
    """

    def __init__(self, roots: Sequence[Node], end: Node) -> None:
        self._end = end
        self._after: dict[Node, list[Node]] = {end: []}
        self._before: dict[Node, list[Node]] = {}
        waiting = list(roots)
        while waiting:
            node = waiting.pop()
            if node not in self._after:
                after = [n for n, _ in node.next_functions if n is not None]
                self._after[node] = after
                for n in after:
                    self._before.setdefault(n, []).append(node)
                waiting += after
        self.on_way = {end}
        waiting = [end]
        while waiting:
            fresh = [n for n in self._before.get(waiting.pop(), ()) if n not in self.on_way]
            self.on_way.update(fresh)
            waiting += fresh

    def weights(self, nodes: list[Node]) -> dict[int, Tensor]:
        """The leaves behind some nodes, by id."""
        found: dict[int, Tensor] = {}
        seen, waiting = set(nodes), list(nodes)
        while waiting:
            node = waiting.pop()
            leaf = getattr(node, "variable", None)  # of a node that adds to .grad
            if leaf is not None:
                found[id(leaf)] = leaf
            fresh = [n for n in self._after[node] if n not in seen]
            seen.update(fresh)
            waiting += fresh
        return found

    def starts(self) -> list[_Start]:
        """The nodes on the way with branches to weights, from the inputs on."""
        found = []
        level = {self._end: 0}
        left = {n: sum(m in self.on_way for m in self._after[n]) for n in self.on_way}
        waiting = [self._end]
        while waiting:
            node = waiting.pop()
            branches = [n for n in self._after[node] if n not in self.on_way]
            weights = self.weights(branches) if branches else {}
            if weights:
                found.append(_Start(node, weights, level[node]))
            above = level[node] + bool(weights)
            for n in self._before.get(node, ()):
                level[n] = max(level.get(n, 0), above)
                left[n] -= 1
                if not left[n]:
                    waiting.append(n)
        return found


def _tasks(starts: Sequence[_Start]) -> list[_Task]:
    """Starts of one level together: none lies on the way of another. Last ones first.

    Starts that share a weight are a task of their own, whose engine pass covers all between them.
    """
    users: dict[int, list[_Start]] = {}
    for start in starts:
        for weight in start.weights:
            users.setdefault(weight, []).append(start)
    tied = _joined([together for together in users.values() if len(together) > 1])
    inside = {id(start) for group in tied for start in group}
    levels: dict[int, list[_Start]] = {}
    for start in starts:
        if id(start) not in inside:
            levels.setdefault(start.level, []).append(start)
    plain = [_task(levels[level]) for level in sorted(levels)]
    return plain + [_task(group, tied=True) for group in tied]


def _joined(tied: Sequence[list[_Start]]) -> list[list[_Start]]:
    """Groups with a start in common as one."""
    groups: list[list[_Start]] = []
    for together in tied:
        ids = {id(start) for start in together}
        touched = [g for g in groups if any(id(start) in ids for start in g)]
        groups = [g for g in groups if all(g is not t for t in touched)]
        merged = {id(start): start for group in (*touched, together) for start in group}
        groups.append(list(merged.values()))
    return groups


def _task(starts: Sequence[_Start], *, tied: bool = False) -> _Task:
    task = _Task([], [], [], replaced=starts if tied else (), retain=tied)
    weights: dict[int, Tensor] = {}
    for start in starts:
        for number, gradient in enumerate(start.gradients or ()):
            if gradient is not None:
                task.edges.append(GradientEdge(start.node, number))
                task.gradients.append(gradient)
        weights.update(start.weights)
    task.weights = list(weights.values())
    return task


def _replacing(start: _Start) -> Callable[[Any], Any]:
    noted = tuple(start.gradients or ())
    return lambda _: noted
