"""Dropout switched off, so that losses can be compared: each framework draws other numbers."""

from __future__ import annotations

from contextlib import suppress

from torch import nn

_KINDS = ("drop", "stochasticdepth")
"""In the names of the classes whose probability is `p`: torch's, torchvision's and timm's."""


def turn_off_dropout(model: nn.Module) -> None:
    """Set every probability of dropout to 0.

    It is `p` of a dropout module, or a number above 0 and up to 1 whose name contains "drop"
    ("attn_dropout", "drop_prob"), of a module or of the configuration that it holds, as in
    Hugging Face's models. A probability that is written into `forward` stays.
    """
    for module in model.modules():
        if any(part in type(module).__name__.lower() for part in _KINDS):
            _zero(module, "p")
        for holder in (module, getattr(module, "config", None)):
            for name in [name for name in getattr(holder, "__dict__", ()) if "drop" in name]:
                _zero(holder, name)


def _zero(holder: object, name: str) -> None:
    value = getattr(holder, name, None)
    if isinstance(value, float) and 0 < value <= 1:
        with suppress(AttributeError):  # a frozen configuration; modules have numbers of their own
            setattr(holder, name, 0.0)
