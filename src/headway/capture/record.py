"""Runs a traced forward with stand-ins and notes of every call what a planner needs to know.

What autograd keeps is asked of autograd itself (`saved_tensors_hooks`), and so is which gradients
are computed. Invariant: a storage has one name, that of the first tensor that lies in it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from headway.capture.calls import (
    arguments_of,
    kind_of,
    name_of,
    outputs_of,
    several,
    spec_of,
)
from headway.capture.footprint import Footprints
from headway.capture.trace import Traced, module_of
from headway.graph import (
    Call,
    Footprint,
    Operator,
    Saved,
    TensorSpec,
    Work,
    axes_of,
    calls_of,
    flops_of,
    traffic_of,
)


@dataclass
class Recording:
    """What was found.

    Attributes:
        operators: In the order of execution.
        values: Specs of what they make.
    """

    operators: list[Operator] = field(default_factory=list)
    values: dict[str, TensorSpec] = field(default_factory=dict)


class Recorder:
    """Plays a graph of calls, nested ones included.

    Args:
        traced: The forward.
        named: Name of the tensor behind each placeholder.
        parameters: Those among them that are parameters.
        mode: The context of the stand-ins.
    """

    def __init__(
        self, traced: Traced, named: Mapping[str, str], parameters: frozenset[str], mode: Any
    ) -> None:
        self.traced = traced
        self.parameters = parameters
        self._weights = set(parameters)
        self.found = Recording()
        self._named = named
        self._mode = mode
        self._owner: dict[int, str] = {}
        self._storages: list[Any] = []  # alive, so that their identities stay unique
        self._saved: list[Any] = []
        self._taken: set[str] = set(named.values())
        self._unknown: dict[int, tuple[Any, Any, Any]] = {}
        self._footprints = Footprints()

    def run(self) -> tuple[str, ...]:
        """Play it; the names of the results."""
        arguments = [self.traced.arguments[n.name] for n in _placeholders(self.traced.graph)]
        names = [self._named.get(n.name) for n in _placeholders(self.traced.graph)]
        for name, value in zip(names, arguments, strict=True):
            if isinstance(value, Tensor) and name is not None:
                self._own(value, name)
        hooks = saved_tensors_hooks(self._pack, _unpack)
        with self._mode, torch.enable_grad(), hooks:
            _, results = self._play(self.traced.graph, arguments, names, "")
        self._measure()
        return tuple(name for name in tree_leaves(results) if isinstance(name, str))

    # -- one graph -----------------------------------------------------------------------------

    def _play(
        self, graph: fx.GraphModule, arguments: Sequence[Any], names: Sequence[Any], within: str
    ) -> tuple[Any, Any]:
        """Values and names of the results."""
        values: dict[fx.Node, Any] = {}
        named: dict[fx.Node, Any] = {}
        for node, value, name in zip(_placeholders(graph), arguments, names, strict=True):
            values[node], named[node] = value, name
        for node in graph.graph.nodes:
            if node.op == "get_attr":
                values[node] = _attribute(graph, str(node.target))
                named[node] = self._constant(values[node], str(node.target))
            elif node.op == "call_function":
                self._call(graph, node, values, named, within)
            elif node.op == "output":
                return _filled(node.args[0], values), _filled(node.args[0], named)
        return None, None

    def _constant(self, value: Any, name: str) -> str | None:
        if not isinstance(value, Tensor):
            return None
        key = id(value.untyped_storage())
        if key not in self._owner:
            self._own(value, name)
            self.found.values.setdefault(name, spec_of(value))
        return self._owner[key]

    def _call(
        self,
        graph: fx.GraphModule,
        node: fx.Node,
        values: dict[fx.Node, Any],
        named: dict[fx.Node, Any],
        within: str,
    ) -> None:
        target: Any = node.target
        args, kwargs = _filled(node.args, values), _filled(node.kwargs, values)
        if target is operator.getitem:
            values[node] = args[0][args[1]]
            named[node] = _part_of(named[node.args[0]], args[1])  # type: ignore[index]
        elif nested := _nested(args):
            inner, given = nested
            path = _path(node) or within
            with _context(target, args):
                values[node], named[node] = self._play(
                    inner,
                    [args[n] for n in given],
                    [name_of(node.args[n], named) for n in given],
                    path,
                )
        elif isinstance(target, torch._ops.OpOverload):
            self._operator(node, target, args, kwargs, values, named, within)
        else:
            values[node] = target(*args, **kwargs)
            named[node] = None

    # -- one call ------------------------------------------------------------------------------

    def _operator(
        self,
        node: fx.Node,
        target: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        values: dict[fx.Node, Any],
        named: dict[fx.Node, Any],
        within: str,
    ) -> None:
        tensors, attributes = arguments_of(target, node, args, kwargs, named)
        before = {id(tensor.untyped_storage()) for _, _, tensor in tensors}
        specs = tuple(spec_of(tensor) for _, _, tensor in tensors)
        self._saved = []
        result = target(*args, **kwargs)
        values[node] = result
        name = self._free(node.name)
        outputs = outputs_of(name, node, result)
        named[node] = (
            {n: outputs[n][0] for n in outputs}
            if several(result)
            else (outputs[0][0] if outputs else None)
        )
        made = [value for _, value in outputs.values()]
        if not made:
            return
        kept = any(value.requires_grad for value in made)
        needs = tuple(kept and bool(tensor.requires_grad) for _, _, tensor in tensors)
        view = all(id(m.untyped_storage()) in before for m in made)
        mutable = bool(target._schema.is_mutable)
        for tensor_name, value in outputs.values():
            self.found.values[tensor_name] = spec_of(value)
            self._own(value, tensor_name)
        given = [tensor for _, _, tensor in tensors]
        footprint = self._footprints.of(target, args, kwargs, given, needs, list(outputs))
        call = Call(
            kind=kind_of(target),
            roles=tuple(role for role, _, _ in tensors),
            inputs=specs,
            outputs=tuple(spec_of(value) for value in made),
            attributes=attributes,
        )
        inputs = tuple(tensor_name for _, tensor_name, _ in tensors)
        self._add(
            call,
            name,
            inputs,
            tuple(n for n, _ in outputs.values()),
            needs,
            view=view and not mutable,
            module=_path(node) or within,
            footprint=footprint,
        )
        if (not self.found.operators[-1].axes.known or call.kind == "einsum") and not mutable:
            self._unknown[len(self.found.operators) - 1] = (target, args, kwargs)

    def _add(
        self,
        call: Call,
        name: str,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        needs: tuple[bool, ...],
        *,
        view: bool,
        module: str,
        footprint: Footprint,
    ) -> None:
        trained = tuple(tensor in self._weights for tensor in inputs)
        if inputs and all(trained):  # a weight in another type or shape is still a weight
            self._weights.update(outputs)
        self.found.operators.append(
            Operator(
                name=name,
                kind=call.kind,
                inputs=inputs,
                roles=call.roles,
                outputs=outputs,
                parameters=tuple(dict.fromkeys(t for t in inputs if t in self.parameters)),
                module=module,
                axes=axes_of(call),
                flops=flops_of(call, needs, trained),
                traffic=traffic_of(call, needs, trained, view=view),
                saved=tuple(self._kept(name)),
                footprint=footprint,
                attributes=call.attributes,
                calls=calls_of(call),
            )
        )

    def _measure(self) -> None:
        """FLOPs of operators without a formula, as torch counts them; backward is twice that.

        On the meta device, where torch takes fewer operators as one kernel.
        """
        for place, (target, args, kwargs) in self._unknown.items():
            found = self.found.operators[place]
            if found.flops.total:
                continue
            args, kwargs = tree_map_only(Tensor, _on_meta, (args, kwargs))
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                target(*args, **kwargs)
            count = counter.get_total_flops()
            work = Work(forward=count, input_gradient=2 * count if found.saved else 0)
            self.found.operators[place] = replace(found, flops=work)

    def _free(self, name: str) -> str:
        """A name that no tensor has; graphs inside of graphs begin to count anew."""
        found, count = name, 0
        while found in self._taken:
            count += 1
            found = f"{name}_{count}"
        self._taken.add(found)
        return found

    # -- storages ------------------------------------------------------------------------------

    def _own(self, tensor: Tensor, name: str) -> None:
        storage = tensor.untyped_storage()
        if id(storage) not in self._owner:
            self._owner[id(storage)] = name
            self._storages.append(storage)

    def _pack(self, tensor: Tensor) -> Tensor:
        self._saved.append(tensor.untyped_storage())
        return tensor

    def _kept(self, name: str) -> Iterator[Saved]:
        seen: set[int] = set()
        for number, storage in enumerate(self._saved):
            if id(storage) in seen:
                continue
            seen.add(id(storage))
            if id(storage) not in self._owner:
                self._owner[id(storage)] = f"{name}/{number}"
                self._storages.append(storage)
            yield Saved(name=self._owner[id(storage)], bytes=storage.nbytes())


def _unpack(tensor: Tensor) -> Tensor:
    return tensor


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _path(node: fx.Node) -> str:
    """In the user's model, which is called "model" inside of what is traced."""
    return module_of(node).removeprefix("model").lstrip(".")


def _placeholders(graph: fx.GraphModule) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def _attribute(graph: fx.GraphModule, path: str) -> Any:
    found: Any = graph
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _filled(argument: Any, by_node: Mapping[fx.Node, Any]) -> Any:
    return fx.node.map_arg(argument, lambda node: by_node.get(node))


def _nested(args: tuple[Any, ...]) -> tuple[fx.GraphModule, list[int]] | None:
    """The graph among the arguments of a higher-order operator, and the places of its own."""
    for place, argument in enumerate(args):
        if isinstance(argument, fx.GraphModule):
            return argument, list(range(place + 1, len(args)))
    return None


def _context(target: Any, args: tuple[Any, ...]) -> Any:
    """torch.no_grad() or torch.autocast() around a part of the forward."""
    if "set_grad_enabled" in str(target):
        return torch.set_grad_enabled(bool(args[0]))
    if "autocast" in str(target):
        device, dtype, enabled = args[:3]
        return torch.autocast(device, dtype=dtype, enabled=enabled)
    return nullcontext()


def _part_of(names: Any, place: Any) -> Any:
    """The name of one of several results; None where nobody reads it."""
    if isinstance(names, dict):
        return names.get(place)
    return names[place] if several(names) else None
