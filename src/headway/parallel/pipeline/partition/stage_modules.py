"""Cut points of a traced model, and the module of each stage between them.

A unit begins with a call that uses parameters and reaches to the next such call, so that a
non-linearity stays with the layer before it. Stages are runs of consecutive units, chosen by
name or by weight (`balanced_partition`, dynamic programming). Execution order, random draws
included, is that of the model.

A value that depends on the model's inputs alone (a mask, rotary angles, a size) is recomputed
by each stage that needs it, because every rank reads the batch; so are sizes of tensors that
enter the stage anyway. Everything else is sent from the stage that makes it to those that use
it. The modules share the model's own objects, and a stage's state_dict has no key that the
model's lacks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence
from torch.utils._pytree import tree_leaves

from headway.documents import nearest
from headway.errors import PlanError
from headway.parallel.pipeline.partition.tracing import Trace, attribute_at, check_branch
from headway.parallel.stages import (
    MODEL_INPUT,
    Stage,
    StageInput,
    StageOutput,
    flatten,
    is_payload,
)


def build_graph_module(
    model: nn.Module, graph: fx.Graph, constants: Mapping[str, Any]
) -> fx.GraphModule:
    """The module of a graph.

    Args:
        graph: Its targets are names in `model`, or of `constants`.
        constants: Tensors and modules that the model does not hold.
    """
    targets = {str(n.target) for n in graph.nodes if n.op in ("call_module", "get_attr")}
    loose = {name: value for name, value in constants.items() if name in targets}
    holder = AttributeSource(model, loose)
    module = fx.GraphModule(holder, graph, class_name=f"StageOf{type(model).__name__}")
    saved = set(model.state_dict(keep_vars=True))
    for name, _ in list(module.named_buffers(remove_duplicate=False)):
        owner, _, key = name.rpartition(".")
        # Only on modules that were made for this one; the model's own keep their buffers as is.
        if name not in saved and _is_new(module.get_submodule(owner), model):
            module.get_submodule(owner).register_buffer(
                key, attribute_at(module, name), persistent=False
            )
    return module


class AttributeSource(nn.Module):
    """Gives out the model's objects and the constants, by name, as if it were the model."""

    def __init__(self, model: nn.Module, constants: Mapping[str, Any]) -> None:
        super().__init__()
        object.__setattr__(self, "_given", (model, dict(constants)))
        self.training = model.training

    def __getattr__(self, name: str) -> Any:
        model, constants = self.__dict__["_given"]
        return constants[name] if name in constants else getattr(model, name)


def _is_new(module: nn.Module, model: nn.Module) -> bool:
    return all(module is not other for other in model.modules())


def tensors_used(
    trace: Trace, targets: Iterable[str], kind: Literal["parameters", "buffers"]
) -> dict[str, Any]:
    """The tensors of some modules and tensors, under their names in the whole model.

    Args:
        targets: Names of modules and tensors in its graph.
        kind: Which tensors. A tied one comes under its first name.
    """
    held: set[int] = set()
    for name in targets:
        found = trace.find(name)
        inside = getattr(found, kind)() if isinstance(found, nn.Module) else [found]
        # By identity, as a tied tensor has several names.
        held.update(map(id, inside))
    return {name: t for name, t in getattr(trace.model, f"named_{kind}")() if id(t) in held}


# Where a traced model can be cut, and where it is: by name, or into parts of even weight.


@dataclass(frozen=True, slots=True)
class ModelUnit:
    """A part of the model that is not cut.

    Attributes:
        name: Of the module with which it begins; "block#2" where a module is called a second time.
        start: Number of its first node in the graph; the first unit begins at 0.
        parameters: How many numbers its calls use.
    """

    name: str
    start: int
    parameters: int


def cut_units(trace: Trace) -> list[ModelUnit]:
    """The units of a traced model, in the order of execution."""
    names = node_labels(trace)
    packed = _packed_between(trace)
    units: list[ModelUnit] = []
    for number, node in enumerate(trace.graph.nodes):
        held = tensors_used(trace, attributes_used(node), "parameters")
        if not held:
            continue
        size = sum(parameter.numel() for parameter in held.values())
        if number in packed and units:
            units[-1] = replace(units[-1], parameters=units[-1].parameters + size)
        else:
            units.append(ModelUnit(names[number], number if units else 0, size))
    return units


def _packed_between(trace: Trace) -> set[int]:
    """Numbers of nodes before which no stage can begin: a packed sequence would be sent there.

    Its size depends on the lengths of the sequences, which differ from micro-batch to micro-batch.
    """
    numbers = {node: number for number, node in enumerate(trace.graph.nodes)}
    found, packed = set[int](), set[fx.Node]()
    for node, number in numbers.items():
        if node.target not in _PACKING and packed.isdisjoint(node.all_input_nodes):
            continue
        with trace.examples.opened():
            leaves = tree_leaves(trace.examples.value(node), _is_packed)
        if any(map(_is_packed, leaves)):
            packed.add(node)
            last = max((numbers[user] for user in node.users), default=number)
            found.update(range(number + 1, last + 1))
    return found


_PACKING = (pack_padded_sequence, pack_sequence)


def _is_packed(value: Any) -> bool:
    return isinstance(value, PackedSequence)


def node_labels(trace: Trace) -> dict[int, str]:
    """Number of a node -> name, of all that call a module or use a parameter directly.

    The n-th call of a module is called "block#n".
    """
    found: dict[int, str] = {}
    times: Counter[str] = Counter()
    for number, node in enumerate(trace.graph.nodes):
        name = called_module(node)
        if name or tensors_used(trace, attributes_used(node), "parameters"):
            name = name or node.name
            times[name] += 1
            found[number] = name if times[name] == 1 else f"{name}#{times[name]}"
    return found


def called_module(node: fx.Node) -> str:
    """The module that a node calls; empty if it calls none."""
    if node.op == "call_module":
        return str(node.target)
    first = node.args[0] if node.op == "call_function" and node.args else None
    if isinstance(first, fx.Node) and first.op == "get_attr" and first.meta.get("module"):
        return str(first.target)  # torch.utils.checkpoint
    return ""


def attributes_used(node: fx.Node) -> list[str]:
    """Names of modules and tensors of the model that a node uses directly."""
    held = [str(n.target) for n in node.all_input_nodes if n.op == "get_attr"]
    return [str(node.target), *held] if node.op == "call_module" else held


def cut_evenly(units: Sequence[ModelUnit], weights: Sequence[float], stages: int) -> list[int]:
    """The nodes at which stages begin, so that the heaviest stage is as light as it can be.

    Args:
        weights: Of each unit, in any measure.
        stages: At most as many as units.
    """
    return [units[first].start for first in balanced_partition(weights, stages)]


def balanced_partition(weights: Sequence[float], parts: int) -> list[int]:
    """First entries of consecutive parts, none empty, whose largest sum is as small as possible.

    Of the ways to do so it takes the one with the smallest sum of squares. Dynamic programming
    over (parts, entries): O(parts x entries^2).

    Raises:
        ValueError: There are fewer entries than parts.
    """
    count = len(weights)
    if not 1 <= parts <= count:
        raise ValueError(f"{count} entries do not make {parts} parts")
    until = [0.0, *accumulate(weights)]
    limit = _solve(until, parts, lambda sum_, best: max(sum_, best))[0]
    slack = limit * (1 + 1e-12)  # sums of the same weights in another order are rounded otherwise

    def squares(sum_: float, best: float) -> float:
        return best + sum_ * sum_ if sum_ <= slack else float("inf")

    return _solve(until, parts, squares)[1]


def _solve(until: list[float], parts: int, join: object) -> tuple[float, list[int]]:
    """The best value, and the first entry of each part.

    Args:
        until: Sums of the weights before each entry, and of all.
        join: (sum of the last part, value of the parts before) -> value of all.
    """
    assert callable(join)
    count = len(until) - 1
    best = [[float("inf")] * (count + 1) for _ in range(parts + 1)]
    first = [[0] * (count + 1) for _ in range(parts + 1)]
    best[0][0] = 0.0
    for part in range(1, parts + 1):
        # Each part before needs at least one entry, and so does each part behind.
        for end in range(part, count - parts + part + 1):
            for start in range(part - 1, end):
                value = join(until[end] - until[start], best[part - 1][start])
                if value < best[part][end]:
                    best[part][end], first[part][end] = value, start
    starts, end = [], count
    for part in range(parts, 0, -1):
        end = first[part][end]
        starts.append(end)
    return best[parts][count], starts[::-1]


def cut_at(trace: Trace, patterns: Sequence[str]) -> list[int]:
    """The nodes at which stages begin: 0, and the first call of a module for each pattern.

    Args:
        patterns: Names with the wildcards of a shell; one stage more than patterns. "block#2" is
            the second call of a module.

    Raises:
        PlanError: No call matches a pattern, or one comes before that of the pattern before it, or
            a packed sequence would have to be sent.
    """
    names, packed = node_labels(trace), _packed_between(trace)
    starts, problems = [0], []
    # A pattern that matches the first call of all would leave the first stage empty.
    before = min(names, default=0)
    for pattern in patterns:
        found = next((n for n, name in names.items() if _matches(name, pattern)), None)
        if found is None:
            close = nearest(pattern, list(names.values()))
            problems.append(f"the model's forward calls no module {pattern}{close}")
        elif found <= before:
            problems.append(f"{pattern} is called before, or together with, the stage before it")
        elif found in packed:
            problems.append(
                f"a packed sequence would be sent to {pattern}, and its size depends on the lengths"
            )
        else:
            starts.append(found)
            before = found
    if problems:
        raise PlanError(
            "the model cannot be cut there",
            problems=problems,
            fix=f"It calls, in this order: {', '.join(names.values())}.",
        )
    return starts


def _matches(label: str, pattern: str) -> bool:
    """Part by part; a module that is walked into begins with the first of its parts."""
    (name, _, nth), (wanted, _, wanted_nth) = label.partition("#"), pattern.partition("#")
    parts, wishes = name.split("."), wanted.split(".")
    return nth == wanted_nth and len(parts) >= len(wishes) and all(map(fnmatchcase, parts, wishes))


# A traced graph and the nodes at which stages begin, made into one module for each stage.


_SETTINGS = (type(None), bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


ValueSource = Literal["take", "compute", "know"]


def split_graph(trace: Trace, starts: Sequence[int], *, relay: bool = False) -> tuple[Stage, ...]:
    """The stages.

    Args:
        trace: Of the model; its examples are open.
        starts: Number of the node at which each stage begins; the first is 0.
        relay: Values go from stage to stage only, through those that do not need them.

    Raises:
        PlanError: A value that one stage changes in place is used by another afterwards.
    """
    nodes = _NodeFacts(trace, starts)
    parts = [_StageBuilder(number, nodes) for number in range(len(starts))]
    gives = _exits(parts, nodes, relay=relay)
    return tuple(part.finish(gives) for part in parts)


def _exits(
    parts: Sequence[_StageBuilder], nodes: _NodeFacts, *, relay: bool
) -> dict[int, dict[fx.Node, set[int]]]:
    """For each stage: which nodes it gives to which stages, in the order of the graph.

    Sizes and numbers are always relayed: they are not worth an edge.
    """
    found: dict[int, dict[fx.Node, set[int]]] = {part.number: {} for part in parts}
    # From the last stage on: a relayed value makes the stage before one that takes it in turn.
    for part in reversed(parts):
        for node in part.takes:
            # Every rank reads the batch by itself.
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


class _NodeFacts:
    """What is known of the graph's nodes.

    Attributes:
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
        # In the graph's order: whether a node is free depends on the nodes that it uses.
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
        if node.op not in ("call_function", "call_method") or node.target is check_branch:
            return False
        victim = mutated_argument(node, self.trace)
        if called_module(node) or (victim is not None and not victim.meta.get("copied")):
            return False
        if not all(self._may_be_copied(n) or self.is_setting(n) for n in node.all_input_nodes):
            return False
        # What is random is drawn once, and in the model's order.
        return not self.trace.examples.draws(node)

    def _may_be_copied(self, node: fx.Node) -> bool:
        # What is computed from a parameter may not: its gradient would arise in two places.
        held = self.trace.find(str(node.target)) if node.op == "get_attr" else None
        return self._free[node] and not isinstance(held, nn.Parameter)

    def _check_in_place(self, node: fx.Node) -> None:
        victim = mutated_argument(node, self.trace)
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


def mutated_argument(node: fx.Node, trace: Trace) -> fx.Node | None:
    """The value that a node changes in place, as far as can be seen."""
    if node.op == "call_module":
        in_place = bool(getattr(trace.find(str(node.target)), "inplace", False))
    else:
        name = node.target if isinstance(node.target, str) else node.target.__name__
        in_place = node.op.startswith("call") and name.endswith("_") and not name.endswith("__")
        in_place |= node.kwargs.get("inplace") is True
    first = node.kwargs.get("out") or (node.args[0] if in_place and node.args else None)
    return first if isinstance(first, fx.Node) else None


class _StageBuilder:
    """One stage in the making.

    Attributes:
        takes: Nodes of the whole graph that become arguments: inputs of the model, and values of
            other stages.
    """

    def __init__(self, number: int, nodes: _NodeFacts) -> None:
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
        # Sizes are made of sizes: without a memory, each would be followed anew on every way to it.
        self._derivable: dict[fx.Node, bool] = {}
        self._collected: set[fx.Node] = set()
        for node in self._own:
            self._collect(node)

    # -- what comes from where ---------------------------------------------------------------

    def _is_elsewhere(self, node: fx.Node) -> bool:
        return not self._nodes.free(node) and self._nodes.stage(node) != self.number

    def _way(self, node: fx.Node) -> ValueSource:
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
        if node not in self._derivable:
            self._derivable[node] = nodes.is_small(node) and all(
                n in self._entering or nodes.free(n) or nodes.is_setting(n) or self._can_derive(n)
                for n in node.all_input_nodes
            )
        return self._derivable[node]

    def _collect(self, node: fx.Node) -> None:
        if node in self._collected:
            return
        self._collected.add(node)
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
            # The last stage returns the model's own output, whatever its form.
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
                self._graph.call_function(check_branch, (self._copies[node], value, where))

    def _stage(self, gives: Mapping[int, Mapping[fx.Node, set[int]]]) -> Stage:
        nodes, model = self._nodes, self._nodes.trace.model
        targets = [name for node in self._graph.nodes for name in attributes_used(node)]
        takes = []
        for node in self.takes:
            if node.op == "placeholder":
                takes.append(StageInput(node.name, MODEL_INPUT, nodes.inputs.index(node)))
                continue
            source = next(s for s, nodes_ in gives.items() if self.number in nodes_.get(node, ()))
            takes.append(StageInput(node.name, source, list(gives[source]).index(node)))
        return Stage(
            number=self.number,
            module=build_graph_module(model, self._graph, nodes.trace.constants),
            takes=tuple(takes),
            gives=tuple(
                StageOutput(n.name, tuple(sorted(t))) for n, t in gives[self.number].items()
            ),
            calls=tuple(name for node in self._graph.nodes if (name := called_module(node))),
            parameters=tensors_used(nodes.trace, targets, "parameters"),
            buffers=tensors_used(nodes.trace, targets, "buffers"),
        )
