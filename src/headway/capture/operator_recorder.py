"""Replays a traced forward with fake tensors and records each operator's cost and memory.

What autograd saves is asked of autograd (`saved_tensors_hooks`), and so is which gradients are
computed. A storage has one name, that of the first tensor in it. What a call needs for a moment
beside its tensors is measured by repeating it alone, forward and backward, while every storage
that appears or goes is counted; calls with equal shapes, strides, types, attributes and wanted
gradients are measured once.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from headway.capture.aten_trace import (
    Traced,
    arguments_of,
    kind_of,
    logical_names,
    module_of,
    name_of,
    outputs_of,
    several,
    spec_of,
    trace,
)
from headway.capture.fake_tensors import FakeContext
from headway.graph.aten.flops import flops_of, kernel_calls, traffic_of
from headway.graph.aten.index_expression import OperatorCall
from headway.graph.aten.operator_axes import axes_of
from headway.graph.model_graph import Footprint, ModelGraph, Operator, Saved, TensorSpec, Work


def _plain(tensors: Sequence[Tensor], needs: Sequence[bool]) -> Footprint:
    bytes_ = sum(t.numel() * t.element_size() for t, n in zip(tensors, needs, strict=True) if n)
    return Footprint(backward=bytes_, gradients=tuple("new" if need else "" for need in needs))


def _key(
    target: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    tensors: Sequence[Tensor],
    needs: Sequence[bool],
    used: Sequence[int],
) -> Hashable:
    """Equal for calls that need the same memory."""
    first: dict[int, int] = {}
    wanted = {id(t): need for t, need in zip(tensors, needs, strict=True)}

    def describe(value: Any) -> Hashable:
        if not isinstance(value, Tensor):
            return repr(value)
        place = first.setdefault(id(value), len(first))
        return (
            tuple(map(int, value.shape)),
            tuple(map(int, value.stride())),
            value.dtype,
            place,
            wanted.get(id(value), False),
        )

    leaves = tuple(describe(leaf) for leaf in tree_leaves((tuple(args), dict(kwargs))))
    names = tuple(kwargs)
    # Autocast changes what is saved; all fake tensors are on the CPU.
    return (target, leaves, names, tuple(used), torch.is_autocast_enabled("cpu"))


class _Meter(TorchDispatchMode):
    """Bytes of the storages that were made while it is on and are still alive.

    Attributes:
        peak: The largest `now` since it was last set.
        serial: A number for every storage alive, by its identity.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self.serial: dict[int, int] = {}
        self._count = 0
        self._watched: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.watch(leaf)
        self.peak = max(self.peak, self.now)
        return result

    def watch(self, tensor: Tensor, *, count: bool = True) -> int:
        """The number of its storage; a new one is counted until it goes."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self.serial:
            size = int(storage.nbytes()) if count else 0
            self._count += 1
            self.serial[key] = self._count
            self.now += size

            def gone(_: Any) -> None:
                self.now -= size
                self.serial.pop(key, None)
                self._watched.pop(key, None)

            self._watched[key] = weakref.ref(storage, gone)
        return self.serial[key]


class _Enter(torch.autograd.Function):
    """A tensor in new memory; its gradient is noted and kept by the probe."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, probe: _Probe, place: int) -> Tensor:
        ctx.probe, ctx.place = probe, place
        return _like(leaf)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.probe.arrived[ctx.place] = gradient
        return None, None, None


class _Exit(torch.autograd.Function):
    """Makes the gradient with which the backward of a result begins, and keeps no hold of it."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, probe: _Probe, place: int) -> Tensor:
        ctx.probe, ctx.place = probe, place
        ctx.meta = (tuple(result.shape), result.dtype)
        return torch.empty((), dtype=result.dtype)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        shape, dtype = ctx.meta
        made = torch.empty(shape, dtype=dtype)
        meter = ctx.probe.meter
        ctx.probe.begun[ctx.place] = meter.watch(made)
        # Every result comes by here; the last one sets the mark.
        ctx.probe.start = meter.peak = meter.now
        return made, None, None


def _like(tensor: Tensor, device: str = "cpu") -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _same(tensor: Any) -> Any:
    return tensor


class _Probe:
    """One call, repeated.

    Attributes:
        arrived: Gradients of inputs, by place.
        begun: Numbers of the storages of results' gradients, by place.
        start: Bytes when the operator's own backward began.
    """

    def __init__(
        self, tensors: Sequence[Tensor], needs: Sequence[bool], used: Sequence[int]
    ) -> None:
        self.tensors, self.needs, self.used = tensors, needs, used
        self.meter = _Meter()
        self.arrived: dict[int, Tensor] = {}
        self.begun: dict[int, int] = {}
        self.start = 0

    def ask(
        self, target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Footprint:
        """Forward, then backward."""
        # Hooks of its own, or the recorder's would note the tensors that the probe saves.
        with saved_tensors_hooks(_same, _same):
            entered = self._enter()
            whole = (tuple(args), dict(kwargs))
            given, named = tree_map_only(Tensor, lambda t: entered[id(t)], whole)
            # What enters is there before the call.
            places = [self.meter.watch(entered[id(t)], count=False) for t in self.tensors]
            with self.meter:
                result = target(*given, **named)
            results = list(result) if isinstance(result, tuple | list) else [result]
            kept = [results[place] for place in self.used]
            del result, results, given, named  # or they would count as alive
            forward = self.meter.peak - self.meter.now
            aliases, seen = [], list(places)
            for value in kept:
                number = self.meter.watch(value)
                aliases.append(seen.index(number) if number in seen else -1)
                seen.append(number)
            # Before backward, so that what nobody has saved can go.
            entered.clear()
            return self._footprint(forward, tuple(aliases), self._backward(kept))

    def _enter(self) -> dict[int, Tensor]:
        entered: dict[int, Tensor] = {}
        for place, (tensor, need) in enumerate(zip(self.tensors, self.needs, strict=True)):
            # A tensor that is given twice enters once.
            if id(tensor) in entered:
                continue
            fresh = _like(tensor)
            if need:
                fresh = _Enter.apply(fresh.requires_grad_(), self, place)  # type: ignore[no-untyped-call]
            entered[id(tensor)] = fresh
        return entered

    def _backward(self, kept: list[Tensor]) -> int:
        """Bytes above those at its beginning."""
        ends = [
            _Exit.apply(value, self, place)  # type: ignore[no-untyped-call]
            for place, value in enumerate(kept)
            if value.requires_grad
        ]
        if not ends or not any(self.needs):
            return 0
        # One backward pass for all results, as in the model.
        # Of one type, which torch.stack wants.
        total = torch.stack([end.float() if end.is_floating_point() else end for end in ends]).sum()
        with self.meter:
            total.backward()
        return self.meter.peak - self.start

    def _footprint(self, forward: int, aliases: tuple[int, ...], backward: int) -> Footprint:
        gradients, seen = [], dict[int, str]()
        for place, number in self.begun.items():
            seen.setdefault(number, f"out{place}")
        for place in range(len(self.tensors)):
            arrived = self.arrived.get(place)
            if arrived is None:
                gradients.append("")
                continue
            number = self.meter.watch(arrived)
            gradients.append(seen.get(number, "new"))
            seen.setdefault(number, f"in{place}")
        own = all(alias < 0 for alias in aliases)
        return Footprint(
            aliases=() if own else aliases,
            forward=forward,
            backward=backward,
            gradients=tuple(gradients) if any(gradients) else (),
        )


class OperatorRecorder:
    """Runs a graph of calls with fake tensors, nested graphs included.

    Args:
        named: Name of the tensor behind each placeholder.
        parameters: Those among them that are parameters.
    """

    def __init__(
        self, traced: Traced, named: Mapping[str, str], parameters: frozenset[str], mode: Any
    ) -> None:
        self.traced = traced
        self.parameters = parameters
        self._weights = set(parameters)
        self.operators: list[Operator] = []
        self.values: dict[str, TensorSpec] = {}
        self._named = named
        self._mode = mode
        self._owner: dict[int, str] = {}
        self._storages: list[Any] = []  # alive, so that their identities stay unique
        self._saved: list[Any] = []
        self._taken: set[str] = set(named.values())
        self._unknown: dict[int, tuple[Any, Any, Any]] = {}
        self._footprints: dict[Hashable, Footprint] = {}

    def run(self) -> tuple[str, ...]:
        """Run it; returns the names of the results."""
        arguments = [self.traced.arguments[n.name] for n in _placeholders(self.traced.graph)]
        names = [self._named.get(n.name) for n in _placeholders(self.traced.graph)]
        for name, value in zip(names, arguments, strict=True):
            if isinstance(value, Tensor) and name is not None:
                self._own(value, name)
        hooks = saved_tensors_hooks(self._pack, _same)
        with self._mode, torch.enable_grad(), hooks:
            _, results = self._play(self.traced.graph, arguments, names, "")
        self._measure()
        return tuple(name for name in tree_leaves(results) if isinstance(name, str))

    def _play(
        self, graph: fx.GraphModule, arguments: Sequence[Any], names: Sequence[Any], within: str
    ) -> tuple[Any, Any]:
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
        # Constants that share memory share a name.
        if key not in self._owner:
            self._own(value, name)
            self.values.setdefault(name, spec_of(value))
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
        # `_pack` fills it while the call runs.
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
        # Under no_grad inputs may want gradients that nobody computes.
        kept = any(value.requires_grad for value in made)
        needs = tuple(kept and bool(tensor.requires_grad) for _, _, tensor in tensors)
        # A view is a result in memory that was there before the call.
        # What works in place is no view, although its result lies in old memory: it moves bytes.
        view = all(id(m.untyped_storage()) in before for m in made)
        mutable = bool(target._schema.is_mutable)
        for tensor_name, value in outputs.values():
            self.values[tensor_name] = spec_of(value)
            self._own(value, tensor_name)
        given = [tensor for _, _, tensor in tensors]
        footprint = self._footprint(target, args, kwargs, given, needs, list(outputs))
        call = OperatorCall(
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
        # The formula for einsum has two operands; torch counts the others.
        if (not self.operators[-1].axes.known or call.kind == "einsum") and not mutable:
            self._unknown[len(self.operators) - 1] = (target, args, kwargs)

    def _footprint(
        self,
        target: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        tensors: Sequence[Tensor],
        needs: Sequence[bool],
        used: Sequence[int],
    ) -> Footprint:
        """What a call needs for a moment; calls with equal keys are measured once.

        Args:
            tensors: The tensors among the arguments, in the order of the graph's inputs.
            needs: For each of them, whether backward computes its gradient.
            used: The places of the results that are kept.
        """
        key = _key(target, args, kwargs, tensors, needs, used)
        if key not in self._footprints:
            try:
                found = _Probe(tensors, needs, used).ask(target, args, kwargs)
            except Exception:  # an operator that cannot be repeated alone: its own tensors count
                found = _plain(tensors, needs)
            self._footprints[key] = found
        return self._footprints[key]

    def _add(
        self,
        call: OperatorCall,
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
        self.operators.append(
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
                calls=kernel_calls(call),
            )
        )

    def _measure(self) -> None:
        """FLOPs of operators without a formula, as torch counts them; backward is twice that."""
        for place, (target, args, kwargs) in self._unknown.items():
            found = self.operators[place]
            if found.flops.total:
                continue
            # On the meta device, where torch takes fewer operators as one kernel.
            args, kwargs = tree_map_only(Tensor, lambda t: _like(t, "meta"), (args, kwargs))
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                target(*args, **kwargs)
            count = counter.get_total_flops()
            work = Work(forward=count, input_gradient=2 * count if found.saved else 0)
            self.operators[place] = replace(found, flops=work)

    def _free(self, name: str) -> str:
        # Nested graphs number their nodes from 0 again.
        found, count = name, 0
        while found in self._taken:
            count += 1
            found = f"{name}_{count}"
        self._taken.add(found)
        return found

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


def record_graph(called: nn.Module, data: tuple[Any, ...], fakes: FakeContext) -> ModelGraph:
    """Trace `called(*data)`, replay it, and give the user's model as a graph.

    Args:
        called: Of fake tensors; it holds the user's model as its "model".

    Raises:
        Exception: What torch.export or the model raised.
    """
    traced = trace(called, data, fakes)
    logical, tied = logical_names(called)
    named = {}
    for placeholder in traced.arguments:
        target = traced.names.get(placeholder)
        if target is None:
            named[placeholder] = placeholder
        else:
            named[placeholder] = logical.get(target, target.removeprefix("model."))
    parameters = {
        name.removeprefix("model."): parameter for name, parameter in called.named_parameters()
    }
    recorder = OperatorRecorder(traced, named, frozenset(parameters), fakes.mode)
    outputs = recorder.run()
    made = {tensor for operator in recorder.operators for tensor in operator.outputs}
    held = {
        named[placeholder]: spec_of(value)
        for placeholder, value in traced.arguments.items()
        if isinstance(value, Tensor) and placeholder in traced.names
    }
    return ModelGraph(
        operators=tuple(recorder.operators),
        values={name: spec for name, spec in recorder.values.items() if name in made},
        inputs={
            named[placeholder]: spec_of(value)
            for placeholder, value in traced.arguments.items()
            if isinstance(value, Tensor) and placeholder not in traced.names
        },
        outputs=outputs,
        parameters={name: spec_of(parameter) for name, parameter in parameters.items()},
        buffers={name: spec for name, spec in held.items() if name not in parameters}
        # Constants of the code: no operator makes them.
        | {name: spec for name, spec in recorder.values.items() if name not in made},
        tied=tied,
        frozen=tuple(name for name, p in parameters.items() if not p.requires_grad),
    )


def _path(node: fx.Node) -> str:
    # The user's model is called "model" inside of what is traced.
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
