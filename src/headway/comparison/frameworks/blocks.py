"""The repeated blocks of a model: where its user would cut or shard it."""

from __future__ import annotations

from torch import nn


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The children of the model's largest list of modules, by their names in the model.

    A user knows them; here it is the `ModuleList` or `Sequential` that holds the most parameters,
    and of two that hold the same, the longer one (a list with one entry is never it).

    Raises:
        ValueError: The model has no list of two or more modules with parameters.
    """
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1
    }
    sizes = {name: (num_parameters(module), len(module)) for name, module in lists.items()}
    if not any(count for count, _ in sizes.values()):
        raise ValueError(
            f"{type(model).__name__} has no nn.ModuleList and no nn.Sequential of two or more "
            "modules with parameters, so that there are no blocks to cut it at"
        )
    name = max(sizes, key=lambda name: sizes[name])
    prefix = f"{name}." if name else ""
    return {f"{prefix}{child}": module for child, module in lists[name].named_children()}


def num_parameters(module: nn.Module) -> int:
    """Numbers in the parameters of a module."""
    return sum(parameter.numel() for parameter in module.parameters())
