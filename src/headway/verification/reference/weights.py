"""The weights that a recipe starts from, read a second time: whole files, name by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import translate
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from headway.run.recipe.recipe import Recipe


def start_from_weights(recipe: Recipe, model: nn.Module) -> None:
    """Give a model the numbers of the recipe's weights, where there are any."""
    if recipe.weights is None:
        return
    patterns = [re.compile(translate(text)) for text in recipe.weights_only]
    own = model.state_dict()
    for name, value in _everything(Path(recipe.weights).expanduser()):
        if not patterns or (name in own and any(p.match(name) for p in patterns)):
            own[name].copy_(value)


def _everything(path: Path) -> Iterator[tuple[str, Tensor]]:
    if path.is_file():
        files = [path]
    else:
        # Without its index: the pieces have no name twice.
        files = sorted(path.glob("model*.safetensors")) or sorted(path.glob("pytorch_model*.bin"))
    for file in files:
        whole = file.suffix == ".safetensors"
        found = (
            load_file(file) if whole else torch.load(file, map_location="cpu", weights_only=True)
        )
        while not all(isinstance(value, Tensor) for value in found.values()):
            found = next(v for v in found.values() if isinstance(v, dict))
        yield from found.items()
