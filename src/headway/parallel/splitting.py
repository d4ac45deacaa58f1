"""A traced graph and the nodes at which stages begin, made into one module for each stage.

A value that depends on the model's inputs alone (a mask, rotary angles, a size) is computed anew by
each stage that needs it, because every rank reads the batch; so are sizes of tensors that enter
the stage anyway. Everything else goes from the stage that makes it to those that use it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from headway.errors import PlanError
from headway.parallel.build import build, used
from headway.parallel.stages import INPUT, Entry, Exit, Stage
from headway.parallel.structure import flatten, is_payload
from headway.parallel.tracing import Trace, expect
from headway.parallel.units import called, targets_of

_SETTINGS = (type(None), bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


Way = Literal["take", "compute", "know"]


def split(trace: Trace, starts: Sequence[int], *, relay: bool = False) -> tuple[Stage, ...]:
    """The stages.

    Args:
        trace: Of the model; its examples are open.
        starts: Number of the node at which each stage begins; the first is 0.
        relay: Values go from stage to stage only, through those that do not need them.

    Raises:
        PlanError: A value that one stage changes in place is used by another afterwards.
    """
    nodes = _Nodes(trace, starts)
    parts = [_Part(number, nodes) for number in range(len(starts))]
    gives = _exits(parts, nodes, relay=relay)
    return tuple(part.finish(gives) for part in parts)


def _exits(
    parts: Sequence[_Part], nodes: _Nodes, *, relay: bool
) -> dict[int, dict[fx.Node, set[int]]]:
    """For each stage: which nodes it gives to which stages, in the order of the graph.

    Sizes and numbers are always relayed: they are not worth an edge.
    """
    found: dict[int, dict[fx.Node, set[int]]] = {part.number: {} for part in parts}
    for part in reversed(parts):
        for node in part.takes:
            if node.op == "placeholder":
                continue
            source = nodes.stage(node)
            if source < part.number - 1 and (relay or nodes.is_small(node)):
                source = part.number - 1
                parts[source].takes[node] = None
            found[source].setdefault(node, set()).add(part.number)
    return {
        number: dict(sorted(gives.items(), key=lambda pair: nodes.order[pair[0]]))
        for number, gives in found.items()
    }


class _Nodes:
    """What is known of the graph's nodes.

    Attributes:
        trace: Of the model.
        order: Number of each node.
        last: Number of the last stage.
        inputs: The placeholders, in the order of the leaves of the call.
        settings: Types and flags that one stage has found and others believe to know.
    """

    def __init__(self, trace: Trace, starts: Sequence[int]) -> None:
        self.trace = trace
        self.order = {node: number for number, node in enumerate(trace.graph.nodes)}
        self.last = len(starts) - 1
        self.inputs = [node for node in trace.graph.nodes if node.op == "placeholder"]
        self.settings: set[fx.Node] = set()
        self._starts = list(starts)
        self._free: dict[fx.Node, bool] = {}
        for node in trace.graph.nodes:
            self._free[node] = self._is_free(node)
        for node in trace.graph.nodes:
            self._check_in_place(node)

    def stage(self, node: fx.Node) -> int:
        """Where a node is computed, if it is not free."""
        if node.op == "output":
            return self.last
        return bisect_right(self._starts, self.order[node]) - 1

    def value(self, node: fx.Node) -> Any:
        return self.trace.examples.value(node)

    def free(self, node: fx.Node) -> bool:
        """Any stage can compute it for itself."""
        return self._free[node]

    def is_setting(self, node: fx.Node) -> bool:
        """A type, a device, a flag: the same for every micro-batch."""
        return node.target is getattr and isinstance(self.value(node), _SETTINGS)

    def is_small(self, node: fx.Node) -> bool:
        """No tensor: a size, a number."""
        if node.op not in ("call_function", "call_method"):
            return False
        leaves, _ = flatten(self.value(node), is_payload)
        return not any(isinstance(leaf, Tensor) for leaf in leaves)

    def _is_free(self, node: fx.Node) -> bool:
        if node.op in ("placeholder", "get_attr"):
            return True
        if node.op not in ("call_function", "call_method") or node.target is expect:
            return False
        if called(node) or mutated(node, self.trace) is not None:
            return False
        if not all(self._may_be_copied(n) or self.is_setting(n) for n in node.all_input_nodes):
            return False
        return not self.trace.examples.draws(node)

    def _may_be_copied(self, node: fx.Node) -> bool:
        """What is computed from a parameter is not: its gradient would arise in two places."""
        held = self.trace.find(str(node.target)) if node.op == "get_attr" else None
        return self._free[node] and not isinstance(held, nn.Parameter)

    def _check_in_place(self, node: fx.Node) -> None:
        victim = mutated(node, self.trace)
        if victim is None:
            return
        late = [
            user
            for user in victim.users
            if self.order[user] > self.order[node] and self.stage(user) != self.stage(node)
        ]
        if late:
            raise PlanError(
                "the model cannot be cut there",
                problems=[
                    f"{node.name} in stage {self.stage(node)} changes {victim.name} in place, "
                    f"and {late[0].name} in stage {self.stage(late[0])} uses it afterwards"
                ],
                fix="Cut elsewhere, or do not work in place (inplace=False, x = x + y).",
            )


def mutated(node: fx.Node, trace: Trace) -> fx.Node | None:
    """The value that a node changes in place, as far as can be seen."""
    if node.op == "call_module":
        in_place = bool(getattr(trace.find(str(node.target)), "inplace", False))
    else:
        name = node.target if isinstance(node.target, str) else node.target.__name__
        in_place = node.op.startswith("call") and name.endswith("_") and not name.endswith("__")
        in_place |= node.kwargs.get("inplace") is True
    first = node.kwargs.get("out") or (node.args[0] if in_place and node.args else None)
    return first if isinstance(first, fx.Node) else None


class _Part:
    """One stage in the making.

    Attributes:
        number: Of the stage.
        takes: Nodes of the whole graph that become arguments: inputs of the model, and values of
            other stages.
    """

    def __init__(self, number: int, nodes: _Nodes) -> None:
        self.number = number
        self.takes: dict[fx.Node, None] = {}
        self._nodes = nodes
        self._graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        self._own = [n for n in nodes.order if not nodes.free(n) and nodes.stage(n) == number]
        self._entering = {
            n
            for node in self._own
            for n in node.all_input_nodes
            if self._is_elsewhere(n) and not nodes.is_small(n)
        }
        for node in self._own:
            self._collect(node)

    # -- what comes from where ---------------------------------------------------------------

    def _is_elsewhere(self, node: fx.Node) -> bool:
        return not self._nodes.free(node) and self._nodes.stage(node) != self.number

    def _way(self, node: fx.Node) -> Way:
        """How this stage gets a value."""
        if node.op == "placeholder":
            return "take"
        if not self._is_elsewhere(node):
            return "compute"
        if self._nodes.is_setting(node):
            return "know"
        return "compute" if self._can_derive(node) else "take"

    def _can_derive(self, node: fx.Node) -> bool:
        """Whether a size can be computed from what enters the stage anyway."""
        nodes = self._nodes
        return nodes.is_small(node) and all(
            n in self._entering or nodes.free(n) or nodes.is_setting(n) or self._can_derive(n)
            for n in node.all_input_nodes
        )

    def _collect(self, node: fx.Node) -> None:
        for n in node.all_input_nodes:
            way = self._way(n)
            if way == "take":
                self.takes[n] = None
            elif way == "know":
                self._nodes.settings.add(n)
            elif n.op != "get_attr":
                self._collect(n)

    # -- the module --------------------------------------------------------------------------

    def finish(self, gives: Mapping[int, Mapping[fx.Node, set[int]]]) -> Stage:
        """The stage.

        Args:
            gives: Of each stage: which node goes to which stages.
        """
        for node in self.takes:
            self._copies[node] = self._graph.placeholder(node.name)
        for node in self._own:
            if node.op != "output":
                self._copy(node)
        self._check_settings()
        own = gives[self.number]
        if self.number < self._nodes.last:
            self._graph.output(tuple(self._copies[node] for node in own))
        else:
            self._copy(self._own[-1])
        return self._stage(gives)

    def _copy(self, node: fx.Node) -> None:
        for n in node.all_input_nodes:
            if n not in self._copies and self._way(n) == "compute":
                self._copy(n)
        # What is only known is no node here: its value stands in the code.
        args: Any = map_arg(node.args, self._here)
        kwargs: Any = map_arg(node.kwargs, self._here)
        copy = self._graph.create_node(node.op, node.target, args, kwargs, name=node.name)
        # Not fx's own "is_wrapped": its code would enter the name into a table of the process.
        copy.meta = {key: node.meta[key] for key in ("module", "where") if key in node.meta}
        self._copies[node] = copy

    def _here(self, node: fx.Node) -> Any:
        return self._copies[node] if node in self._copies else self._nodes.value(node)

    def _check_settings(self) -> None:
        """What other stages believe to know of this one's values."""
        for node in self._nodes.settings:
            value = self._nodes.value(node)
            if node in self._copies and not isinstance(value, torch.device):
                where = str(node.meta.get("where", ""))
                self._graph.call_function(expect, (self._copies[node], value, where))

    def _stage(self, gives: Mapping[int, Mapping[fx.Node, set[int]]]) -> Stage:
        nodes, model = self._nodes, self._nodes.trace.model
        targets = [name for node in self._graph.nodes for name in targets_of(node)]
        takes = []
        for node in self.takes:
            if node.op == "placeholder":
                takes.append(Entry(node.name, INPUT, nodes.inputs.index(node)))
                continue
            source = next(s for s, nodes_ in gives.items() if self.number in nodes_.get(node, ()))
            takes.append(Entry(node.name, source, list(gives[source]).index(node)))
        return Stage(
            number=self.number,
            module=build(model, self._graph, nodes.trace.constants),
            takes=tuple(takes),
            gives=tuple(Exit(n.name, tuple(sorted(t))) for n, t in gives[self.number].items()),
            calls=tuple(name for node in self._graph.nodes if (name := called(node))),
            parameters=used(nodes.trace, targets, "parameters"),
            buffers=used(nodes.trace, targets, "buffers"),
        )
