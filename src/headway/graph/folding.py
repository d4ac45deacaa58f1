"""Level 0 of the search: views and elementwise operators are folded into their neighbours.

A folded operator computes what its parts computed one after another; FLOPs, bytes, parameters and
saved tensors are the sums. No choice is lost but one: where a product is followed by something that
is not linear, that part is folded into its consumer instead, so that a pending sum stays possible.
Nothing is folded across the border of a repeated block: equal blocks stay equal.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from headway.graph.block import blocks
from headway.graph.join import carries, joined
from headway.graph.model import ModelGraph
from headway.graph.operator import Operator, TensorSpec
from headway.graph.passing import with_passing

_LIGHT = """
_to_copy _unsafe_view add alias chunk clone contiguous detach div dropout expand flatten gelu
hardtanh leaky_relu masked_fill mul neg permute pow relu reshape rsqrt select sigmoid silu slice
split split_with_sizes sqrt square squeeze sub t tanh to transpose unbind unflatten unsqueeze
view where
"""
LIGHT = frozenset(_LIGHT.split())
"""Kinds that are folded."""


def fold(graph: ModelGraph) -> ModelGraph:
    """The graph with light operators folded; values that only lived inside are gone."""
    graph = with_passing(graph)
    state = _Fold(graph)
    for operator in graph.operators:
        if operator.kind in LIGHT and operator.axes.known:
            state.into_producer(operator)
    for operator in reversed(graph.operators):
        if operator.kind in LIGHT and operator.axes.known:
            state.into_consumer(operator)
    return state.result()


class _Fold:
    """Attributes:
    at: The operators that are left, by their place in the original order.
    home: Where an original operator is now, by its name.
    """

    def __init__(self, graph: ModelGraph) -> None:
        self.graph = graph
        self.at = dict(enumerate(graph.operators))
        self.home = {operator.name: place for place, operator in self.at.items()}
        self.maker = dict(graph.producers)
        self.users = {tensor: set(places) for tensor, places in graph.consumers.items()}
        self.segment = [
            n for n, s in enumerate(blocks(graph).segments) for _ in range(s.start, s.stop)
        ]

    def into_producer(self, light: Operator) -> None:
        """Into the latest producer, which alone can have no other way to this operator."""
        place = self.home[light.name]
        light = self.at[place]
        made = [tensor for tensor in light.inputs if tensor in self.maker]
        if not made:
            return
        to = max(self.maker[tensor] for tensor in made)
        between = {tensor for tensor in made if self.maker[tensor] == to}
        if len(between) == 1 and self._alone(tensor := between.pop(), place):
            heavy = self.at[to]
            if carries(heavy, light, tensor):
                self._merge(to, place, heavy, light, tensor, main=heavy)

    def into_consumer(self, light: Operator) -> None:
        """Into the only operator that uses its result."""
        place = self.home[light.name]
        light = self.at[place]
        if light.kind not in LIGHT or len(light.outputs) != 1:
            return
        tensor = light.outputs[0]
        users = self.users.get(tensor, set())
        if len(users) == 1 and self._alone(tensor, to := next(iter(users))):
            self._merge(to, place, light, self.at[to], tensor, main=self.at[to])

    def _alone(self, tensor: str, user: int) -> bool:
        """Whether nothing else reads a tensor."""
        return self.users.get(tensor) == {user} and tensor not in self.graph.outputs

    def _merge(
        self, to: int, gone: int, first: Operator, second: Operator, tensor: str, *, main: Operator
    ) -> None:
        inside = self.segment[to] == self.segment[gone]
        merged = joined(first, second, tensor, main=main) if inside else None
        if merged is None:
            return
        del self.at[gone]
        self.at[to] = merged
        self.home |= dict.fromkeys(merged.parts, to)
        self.maker |= dict.fromkeys(merged.outputs, to)
        for name in (*first.inputs, *second.inputs):
            self._uses(name).discard(gone)
            self._uses(name).add(to)
        self.users.pop(tensor, None)

    def _uses(self, tensor: str) -> set[int]:
        return self.users.setdefault(tensor, set())

    def result(self) -> ModelGraph:
        operators = tuple(operator for _, operator in sorted(self.at.items()))
        return replace(self.graph, operators=operators, values=self._left(operators))

    def _left(self, operators: Iterable[Operator]) -> dict[str, TensorSpec]:
        made = {tensor for operator in operators for tensor in operator.outputs}
        return {name: spec for name, spec in self.graph.values.items() if name in made}
