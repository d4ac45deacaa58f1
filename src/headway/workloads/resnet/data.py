"""Images as samples: gratings that are made, or scikit-learn's digits.

A sample is (image [C, H, W] float32, class int64).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from headway.data.source import Source, TensorSource
from headway.errors import DataError

CLASSES = 10
TRAINED_DIGITS = 1500
"""Of 1,797; the rest validate."""

Split = Literal["train", "validation"]
Images = Literal["gratings", "digits"]


class Gratings:
    """Waves in noise; the class is one of ten directions. Sample i follows from the seed and i.

    Args:
        first: Number of the first one; other numbers are other images.
    """

    def __init__(self, count: int, width: int, *, first: int = 0, seed: int = 0) -> None:
        self.count, self.width, self.first, self.seed = count, width, first, seed

    def __len__(self) -> int:
        return self.count

    def read(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The samples as one batch: [N, 3, W, W] and [N]."""
        images, classes = zip(*(self._sample(int(index)) for index in indices), strict=True)
        return torch.from_numpy(np.stack(images)), torch.tensor(classes)

    def _sample(self, index: int) -> tuple[Any, int]:
        random = np.random.Generator(np.random.Philox(key=[self.seed, self.first + index]))
        chosen = int(random.integers(CLASSES))
        angle, phase = np.pi * chosen / CLASSES, random.uniform(0, 2 * np.pi)
        wave = random.uniform(0.5, 1.2)
        y, x = np.indices((self.width, self.width))
        grating = np.sin(wave * (x * np.cos(angle) + y * np.sin(angle)) + phase)
        colours = random.uniform(0.5, 1, (3, 1, 1))
        noise = random.normal(0, 0.5, (3, self.width, self.width))
        return (colours * grating + noise).astype(np.float32), chosen


def digits(split: Split) -> Source:
    """scikit-learn's `load_digits`: 8 x 8 pixels, one channel.

    Raises:
        DataError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise DataError(
            "the digits are not here",
            why="they are part of scikit-learn, which is not installed",
            fix="pip install scikit-learn",
        ) from error
    found = load_digits()
    chosen = slice(None, TRAINED_DIGITS) if split == "train" else slice(TRAINED_DIGITS, None)
    images = torch.tensor(found.images[chosen] / 8 - 1, dtype=torch.float32)
    return TensorSource(images[:, None], torch.tensor(found.target[chosen], dtype=torch.int64))


def source(split: Split, images: Images, *, width: int, count: int, seed: int = 0) -> Source:
    """Training or validation samples; `width`, `count` and `seed` are of the gratings.

    Raises:
        DataError: See `digits`.
    """
    if images == "digits":
        return digits(split)
    return Gratings(count, width, first=0 if split == "train" else 1 << 32, seed=seed)
