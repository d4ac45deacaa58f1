"""The repeated blocks of a model: where its user would cut or shard it."""

from __future__ import annotations

from torch import nn


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The entries of the model's lists of modules, by their names in the model, in its order.

    A user knows them. Here they are what is in its `ModuleList`s and `Sequential`s, of nested ones
    the outermost: the modules made of other modules (the blocks of a transformer or a ResNet), or
    where there are not two of these, those with parameters (the layers of a VGG).

    Raises:
        ValueError: There are fewer than two.
    """
    entries = dict(_entries(model, ""))
    blocks = {name: module for name, module in entries.items() if any(module.children())}
    if len(blocks) < 2:
        blocks = {name: module for name, module in entries.items() if list(module.parameters())}
    if len(blocks) < 2:
        raise ValueError(
            f"{type(model).__name__} has no nn.ModuleList and no nn.Sequential of two or more "
            "modules with parameters, so that there are no blocks to cut it at"
        )
    return blocks


def _entries(module: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    """Entries of the outermost lists in a module of a name."""
    children = [(f"{name}.{child}".lstrip("."), inner) for child, inner in module.named_children()]
    if isinstance(module, nn.ModuleList | nn.Sequential):
        return children
    return [entry for child, inner in children for entry in _entries(inner, child)]
