"""A graph over a model's modules, made into a module that shares the model's own objects.

torch's `GraphModule` puts every module and tensor of a graph under its old name. Buffers that are
not saved with the model stay so: a stage's state_dict has no key that the whole model's lacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from torch import fx, nn

from headway.parallel.examples import find
from headway.parallel.tracing import Trace


def build(model: nn.Module, graph: fx.Graph, constants: Mapping[str, Any]) -> fx.GraphModule:
    """The module of a graph.

    Args:
        model: The whole model.
        graph: Its targets are names in `model`, or of `constants`.
        constants: Tensors and modules that the model does not hold.
    """
    targets = {str(n.target) for n in graph.nodes if n.op in ("call_module", "get_attr")}
    loose = {name: value for name, value in constants.items() if name in targets}
    holder = Holder(model, loose)
    module = fx.GraphModule(holder, graph, class_name=f"StageOf{type(model).__name__}")
    saved = set(model.state_dict(keep_vars=True))
    for name, _ in list(module.named_buffers(remove_duplicate=False)):
        owner, _, key = name.rpartition(".")
        # Only on modules that were made for this one; the model's own keep their buffers as is.
        if name not in saved and _is_new(module.get_submodule(owner), model):
            module.get_submodule(owner).register_buffer(key, find(module, name), persistent=False)
    return module


class Holder(nn.Module):
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


def used(
    trace: Trace, targets: Iterable[str], kind: Literal["parameters", "buffers"]
) -> dict[str, Any]:
    """The tensors of some modules and tensors, under their names in the whole model.

    Args:
        trace: Of the model.
        targets: Names of modules and tensors in its graph.
        kind: Which tensors. A tied one comes under its first name.
    """
    held: set[int] = set()
    for name in targets:
        found = trace.find(name)
        inside = getattr(found, kind)() if isinstance(found, nn.Module) else [found]
        held.update(map(id, inside))
    return {name: t for name, t in getattr(trace.model, f"named_{kind}")() if id(t) in held}
