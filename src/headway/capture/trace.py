"""A module's forward as calls of aten operators: torch.export, or torch.fx where that fails.

Both run the user's code once with stand-ins. The graph that comes out takes the model's tensors as
arguments; which argument is which is told beside it.
"""

from __future__ import annotations

import io
import logging
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

from headway.capture.fake import Pretence
from headway.capture.known import Known

_PATH = "module"


@dataclass(frozen=True)
class Traced:
    """A forward.

    Attributes:
        graph: With a placeholder for each argument.
        arguments: Its stand-in by the name of the placeholder.
        names: Logical name of the parameter, buffer or constant behind a placeholder; the others
            are the caller's.
        by: "torch.export" or "torch.fx".
    """

    graph: fx.GraphModule
    arguments: Mapping[str, Any]
    names: Mapping[str, str]
    by: str


def trace(module: nn.Module, example: tuple[Any, ...], pretence: Pretence) -> Traced:
    """Follow `module(*example)`.

    Args:
        module: Of stand-ins.
        example: Positional arguments, of stand-ins.
        pretence: Theirs.

    Raises:
        Exception: What torch.export raised, if neither way succeeds.
    """
    with quiet():
        try:
            return _exported(module, example)
        except Exception as error:
            try:
                return _followed(module, example, pretence)
            except Exception:
                raise error from None


@contextmanager
def quiet() -> Iterator[None]:
    """Without what torch warns, logs and prints while tracing; errors are told by exceptions."""
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
    with Known():
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
    return Traced(program.graph_module, arguments, names, "torch.export")


def _followed(module: nn.Module, example: tuple[Any, ...], pretence: Pretence) -> Traced:
    """By make_fx over operators before autograd, which keeps linear layers and attention whole."""
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
    with pretence.mode, preserve_node_meta(), _marked(module), Known():
        graph = make_fx(forward, tracing_mode="real", pre_dispatch=True)(state, given)
    placeholders = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    arguments = dict(zip(placeholders, [*state.values(), *given], strict=True))
    names = dict(zip(placeholders, state, strict=False))
    return Traced(graph, arguments, names, "torch.fx")


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
        while open_:
            open_.pop().__exit__(None, None, None)


def module_of(node: fx.Node) -> str:
    """Path of the innermost module in which a call was made; "" where nothing is known."""
    marked = node.meta.get("custom") or {}
    if _PATH in marked:
        return str(marked[_PATH])
    entries = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(entries[-1][0]) if entries else ""
    return path.partition("@")[0]  # "@1": called for the second time
