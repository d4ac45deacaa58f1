"""A module's forward as a graph of aten calls: torch.export, or make_fx where that fails.

Both run the user's code once with fake tensors. The traced graph takes the model's tensors as
arguments; `Traced` says which argument is which. The functions on single calls turn an fx node
into data: kind, tensors by argument name, attributes, results.
"""

from __future__ import annotations

import io
import logging
import operator
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import annotate, preserve_node_meta
from torch.utils._pytree import tree_flatten, tree_unflatten

from headway.capture.fake_tensors import DataIndependentValues, FakeContext
from headway.graph.model_graph import TensorSpec

_PATH = "module"


@dataclass(frozen=True)
class Traced:
    """A forward.

    Attributes:
        arguments: Its fake tensor by the name of the placeholder.
        names: Logical name of the parameter, buffer or constant behind a placeholder; the others
            are the caller's.
    """

    graph: fx.GraphModule
    arguments: Mapping[str, Any]
    names: Mapping[str, str]


def trace(module: nn.Module, example: tuple[Any, ...], fakes: FakeContext) -> Traced:
    """Trace `module(*example)`, called with fake tensors.

    Raises:
        Exception: What torch.export raised, if neither way succeeds.
    """
    with quiet():
        try:
            return _exported(module, example)
        except Exception as error:
            try:
                return _followed(module, example, fakes)
            except Exception:
                raise error from None


@contextmanager
def quiet() -> Iterator[None]:
    """Without what torch warns, logs and prints while tracing; errors are exceptions."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    nowhere = io.StringIO()
    try:
        with redirect_stdout(nowhere), redirect_stderr(nowhere), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _exported(module: nn.Module, example: tuple[Any, ...]) -> Traced:
    with DataIndependentValues():
        # Not strict: Python itself runs the code, under the mode that is open here.
        program = torch.export.export(module, example, strict=False)
    held = {**program.state_dict, **program.constants}
    leaves = iter(tree_flatten(example)[0])
    arguments: dict[str, Any] = {}
    names: dict[str, str] = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            arguments[spec.arg.name] = next(leaves)
            continue
        target = str(spec.target)
        arguments[spec.arg.name] = held[target] if target in held else module.get_buffer(target)
        names[spec.arg.name] = target
    return Traced(program.graph_module, arguments, names)


def _followed(module: nn.Module, example: tuple[Any, ...], fakes: FakeContext) -> Traced:
    # Before autograd (`pre_dispatch`), where linear layers and attention are still one call.
    state: dict[str, Tensor] = {
        **dict(module.named_parameters()),
        **dict(module.named_buffers()),
    }
    leaves, shape = tree_flatten(example)
    places = [number for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def forward(held: dict[str, Tensor], given: list[Tensor]) -> list[Tensor]:
        filled = list(leaves)
        for place, tensor in zip(places, given, strict=True):
            filled[place] = tensor
        called = torch.func.functional_call(module, held, tree_unflatten(filled, shape))
        return [leaf for leaf in tree_flatten(called)[0] if isinstance(leaf, Tensor)]

    given = [leaves[place] for place in places]
    with fakes.mode, preserve_node_meta(), _marked(module), DataIndependentValues():
        # "real", as the arguments are fake already and would be wrapped once more.
        graph = make_fx(forward, tracing_mode="real", pre_dispatch=True)(state, given)
    placeholders = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    arguments = dict(zip(placeholders, [*state.values(), *given], strict=True))
    # The first placeholders are those of `state`; the rest belongs to the caller.
    names = dict(zip(placeholders, state, strict=False))
    return Traced(graph, arguments, names)


@contextmanager
def _marked(module: nn.Module) -> Iterator[None]:
    """While it lasts, torch.fx writes the path of the running module beside every call."""
    open_: list[Any] = []
    handles = []

    def enter(name: str) -> None:
        open_.append(annotate({_PATH: name}))
        open_[-1].__enter__()

    def leave(*_: Any) -> None:
        open_.pop().__exit__(None, None, None)

    for name, inner in module.named_modules():
        handles.append(inner.register_forward_pre_hook(lambda *_, name=name: enter(name)))
        handles.append(inner.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        # torch calls no forward hook of a module that has raised.
        while open_:
            open_.pop().__exit__(None, None, None)


def module_of(node: fx.Node) -> str:
    """Path of the innermost module in which a call was made; "" where nothing is known."""
    marked = node.meta.get("custom") or {}
    if _PATH in marked:
        return str(marked[_PATH])
    entries = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(entries[-1][0]) if entries else ""  # the last entry is the innermost module
    return path.partition("@")[0]  # "@1": called for the second time


_IGNORED = {"device", "pin_memory", "layout", "memory_format", "generator", "non_blocking"}
"""Arguments that say nothing about what may be split."""


def spec_of(tensor: Tensor) -> TensorSpec:
    return TensorSpec(
        shape=tuple(int(size) for size in tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
    )


def logical_names(called: nn.Module) -> tuple[dict[str, str], dict[str, str]]:
    """For every name of a tensor the first one, and for every tied parameter its first name;
    `called` holds the user's model as its "model"."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in called.named_parameters(remove_duplicate=False):
        bare = name.removeprefix("model.")
        names[name] = first.setdefault(id(parameter), bare)
        if names[name] != bare:
            tied[bare] = names[name]
    return names, tied


def name_of(argument: Any, named: Mapping[fx.Node, Any]) -> Any:
    return named.get(argument) if isinstance(argument, fx.Node) else None


def several(result: Any) -> bool:
    return isinstance(result, tuple | list)


def outputs_of(name: str, node: fx.Node, result: Any) -> dict[int, tuple[str, Tensor]]:
    """The tensors among the results that somebody uses, by their place."""
    if not several(result):
        return {0: (name, result)} if isinstance(result, Tensor) else {}
    # Whoever takes the tuple whole (an output, say) uses all of it.
    used = {u.args[1] for u in node.users if u.target is operator.getitem and u.users}
    whole = any(user.target is not operator.getitem for user in node.users)
    return {
        n: (f"{name}.{n}", value)
        for n, value in enumerate(result)
        if isinstance(value, Tensor) and (whole or n in used)
    }


def kind_of(target: Any) -> str:
    namespace, _, name = str(target._schema.name).partition("::")
    bare = name[:-1] if name.endswith("_") and not name.endswith("__") else name
    return bare if namespace == "aten" else f"{namespace}::{bare}"


def arguments_of(
    target: Any,
    node: fx.Node,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    named: Mapping[fx.Node, Any],
) -> tuple[list[tuple[str, str, Tensor]], dict[str, Any]]:
    """Tensors as (argument, name, fake tensor), and everything else as plain data."""
    tensors: list[tuple[str, str, Tensor]] = []
    attributes: dict[str, Any] = {}
    # Only the schema knows the names of positional arguments.
    for number, argument in enumerate(target._schema.arguments):
        if number < len(args):
            value, given = args[number], node.args[number]
        elif argument.name in kwargs:
            value, given = kwargs[argument.name], node.kwargs[argument.name]
        else:
            continue
        if isinstance(value, Tensor):
            tensors.append((argument.name, str(name_of(given, named)), value))
        elif several(value) and any(isinstance(v, Tensor) for v in value):
            listed = zip(value, given, strict=True)  # type: ignore[arg-type]
            tensors += [
                (f"{argument.name}.{n}", str(name_of(g, named)), v)
                for n, (v, g) in enumerate(listed)
                if isinstance(v, Tensor)
            ]
        elif value is not None and argument.name not in _IGNORED:
            attributes[argument.name] = _plain(value)
    return tensors, attributes


def _plain(value: Any) -> Any:
    """As JSON can write it; infinite numbers and types as texts."""
    if isinstance(value, bool | str):
        return value
    if isinstance(value, int | torch.SymInt):
        return int(value)
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value)
    if several(value):
        return [_plain(inner) for inner in value]
    return str(value).removeprefix("torch.")
