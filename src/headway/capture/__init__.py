"""A user's model as data: `capture` makes the `ModelGraph` of any torch.nn.Module."""

from headway.capture.module import capture

__all__ = ["capture"]
