"""A user's model as data: `capture` makes the `ModelGraph` of any torch.nn.Module."""

from headway.capture.model_capture import capture

__all__ = ["capture"]
