"""Stages that the user has written down: a chain of the model's modules, one list for each stage.

For models whose forward torch.fx cannot follow. Each module is called with what the one before it
returned (a tuple: as several arguments), the first one as the model is. That this is what the model
computes is checked on the example.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx, nn

from headway.errors import PlanError
from headway.parallel.agreement import check_agreement
from headway.parallel.cut import at_call, check_loss, with_unused
from headway.parallel.examples import Examples
from headway.parallel.sharded import settled
from headway.parallel.splitting import split
from headway.parallel.stages import Stages, in_mode
from headway.parallel.standin import Loss, ModelCall
from headway.parallel.tracing import Trace

Chain = Sequence[Sequence[str | nn.Module]]


def cut_by_hand(model: nn.Module, loss: Loss, data: Any, chain: Chain) -> Stages:
    """Make stages of modules that are called one after the other.

    Args:
        model: The whole model.
        loss: As for `cut`.
        data: As for `cut`.
        chain: For each stage its modules: names in the model, modules of it, or others whose
            parameters and buffers are all the model's (a function as a module, a new Sequential).

    Raises:
        PlanError: A module is not the model's, or the chain does not compute what the model does.
        RecipeError: The loss does not call the model exactly once.
    """

    def choose(call: ModelCall) -> Stages:
        with Examples(model) as examples:
            trace, starts = _chain(model, call, chain, examples)
            parts = split(trace, starts)
            examples.forget()
        stages = Stages(model, with_unused(model, parts), call.structure)
        with in_mode(model, not model.training):
            check_agreement(stages, call)
        return check_agreement(stages, call)

    return settled(check_loss(at_call(model, loss, data, choose), loss, data))


def _chain(
    model: nn.Module, call: ModelCall, chain: Chain, examples: Examples
) -> tuple[Trace, list[int]]:
    """The graph of the calls, and the node at which each stage begins."""
    graph = fx.Graph()
    leaves = [graph.placeholder(f"input_{number}") for number in range(len(call.leaves))]
    for node, leaf in zip(leaves, call.leaves, strict=True):
        examples.know(node, leaf)
    args, kwargs = call.arguments(tuple(leaves))
    starts: list[int] = []
    for modules in chain:
        starts.append(len(graph.nodes) if starts else 0)
        for module in modules:
            node = graph.call_module(_name(model, module, examples), tuple(args), kwargs)
            args, kwargs = _results(graph, node, examples), {}
    graph.output(node if len(args) == 1 else tuple(args))
    trace = Trace(model, graph, call, examples.constants, examples, (), {}, {})
    return trace, starts


def _results(graph: fx.Graph, node: fx.Node, examples: Examples) -> list[fx.Node]:
    value = examples.value(node)
    if type(value) not in (tuple, list):
        return [node]
    return [graph.call_function(_item, (node, number)) for number in range(len(value))]


def _item(values: Sequence[Any], number: int) -> Any:
    return values[number]


def _name(model: nn.Module, module: str | nn.Module, examples: Examples) -> str:
    """Of a module in the graph.

    Raises:
        PlanError: It has tensors that the model does not have, or there is none of this name.
    """
    if isinstance(module, str):
        if module not in dict(model.named_modules()):
            raise _stranger(f"there is no module {module}")
        return module
    known: list[str] = [name for name, own in model.named_modules() if own is module]
    if known:
        return known[0]
    held = {id(t) for t in (*model.parameters(), *model.buffers())}
    if any(id(t) not in held for t in (*module.parameters(), *module.buffers())):
        raise _stranger(f"{type(module).__name__} has parameters that the model does not have")
    name = f"by_hand_{len(examples.constants)}"
    examples.constants[name] = module
    return name


def _stranger(problem: str) -> PlanError:
    return PlanError(
        "the stages given by hand are not the model's",
        problems=[problem],
        fix="Give names of its modules, or the modules themselves, in the order of their calls.",
    )
