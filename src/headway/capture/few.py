"""A model with stacks of equal blocks, captured with four blocks of each.

torch.export follows every block anew; 1,000 of them took minutes. Invariant: the graph is that of
the whole model, or there is none. That few blocks stand for all is not assumed: the whole model is
walked through (`capture.walk`), and its code must leave no trace in the modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from headway.capture.calls import logical_names, spec_of
from headway.capture.fake import Pretence
from headway.capture.stacks import Found, find_stacks, shortened, signature
from headway.capture.trace import quiet
from headway.capture.walk import Home, Walk, carried_out, check_alike
from headway.graph import ModelGraph
from headway.graph.extend import KEPT, Whole, extend

Called = Callable[..., Any]
"""(pretence, modules that are not carried out) -> what is called with the data; it holds the user's
model, of stand-ins, as its `model`."""
Tracer = Callable[[Any, tuple[Any, ...], Pretence], ModelGraph]


def by_few_blocks(
    model: nn.Module, example: Any, called_with: Called, trace: Tracer
) -> ModelGraph | None:
    """The graph; None where there are no stacks, or their blocks are not treated alike.

    Args:
        model: The user's.
        example: Its data.
        called_with: Makes what is traced.
        trace: Makes the graph of that.
    """
    try:
        stacks = find_stacks(model)
        return _by_few_blocks(stacks, example, called_with, trace) if stacks else None
    except Exception:  # of the user's code with fewer blocks, too: the whole model will tell
        return None


def _by_few_blocks(
    stacks: tuple[Found, ...], example: Any, called_with: Called, trace: Tracer
) -> ModelGraph | None:
    pretence = Pretence()
    spared = [
        block
        for found in stacks
        for place, block in enumerate(found.blocks)
        if not carried_out(place, len(found.blocks))
    ]
    called = called_with(pretence, spared)
    data = (pretence.tree(example),)
    stacks = tuple(found.inside(called.model) for found in stacks)
    before = signature(called.model)
    with quiet():
        stacks = _walked(called, stacks, data, pretence)
    if signature(called.model) != before:  # the code leaves something behind
        return None
    paths = _paths(called.model)
    with shortened(stacks):
        short = trace(called, data, pretence)
        few = _paths(called.model)
        registered = tuple(_bare(called.named_buffers()))
    parameters = _bare(called.named_parameters())
    return extend(
        short,
        Whole(
            stacks=tuple(found.stack for found in stacks),
            paths={name: paths[key].pop(0) for key, names in few.items() for name in names},
            parameters={name: spec_of(tensor) for name, tensor in parameters.items()},
            buffers={name: spec_of(b) for name, b in _bare(called.named_buffers()).items()},
            registered=registered,
            tied=logical_names(called)[1],
            frozen=tuple(name for name, p in parameters.items() if not p.requires_grad),
        ),
    )


def _walked(
    called: Any, stacks: tuple[Found, ...], data: tuple[Any, ...], pretence: Pretence
) -> tuple[Found, ...]:
    """The stacks in the order in which they are called.

    Raises:
        DiffersError: Their blocks are not treated alike.
    """
    names = _bare(called.named_parameters()) | _bare(called.named_buffers())
    walks = []
    for all_ in (False, True):
        blocks = [f.blocks if all_ else (*f.blocks[: KEPT - 1], f.blocks[-1]) for f in stacks]
        walk = Walk(blocks, _homes(names, blocks, data), pretence)
        with shortened(() if all_ else stacks):
            walk.run(lambda: called(*data))
        walks.append(walk)
    check_alike(*walks)
    return tuple(stacks[number] for number in walks[0].order)


def _homes(
    names: dict[str, Tensor], blocks: Iterable[Iterable[nn.Module]], data: tuple[Any, ...]
) -> dict[int, Home]:
    """Of what the model holds and is given, by identity."""
    found = {id(t): Home(-1, 0, ("model", name)) for name, t in names.items()}
    for number, stack in enumerate(blocks):
        for place, block in enumerate(stack):
            inside = [*block.named_parameters(), *block.named_buffers()]
            found |= {id(t): Home(number, place, ("block", name)) for name, t in inside}
    leaves = (leaf for leaf in tree_leaves(data) if isinstance(leaf, Tensor))
    return found | {id(leaf): Home(-1, 0, ("given", n)) for n, leaf in enumerate(leaves)}


def _bare(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """By logical name: those of the user's model without the name that it has here."""
    return {name.removeprefix("model."): tensor for name, tensor in named}


def _paths(model: nn.Module) -> dict[int, list[str]]:
    """All names of each module, by identity."""
    found: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found.setdefault(id(module), []).append(name)
    return found
