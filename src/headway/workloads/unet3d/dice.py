# ruff: noqa: N803, N806 (shape suffixes)
"""How well two segmentations agree (Dice 1945), as a figure and as a loss.

Names of shapes: N samples, C classes, D H W depth, height, width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

SMOOTH = 1e-6
"""Added above and below the line: a class that is in neither segmentation agrees."""


def dice(shares_NCDHW: Tensor, labels_NDHW: Tensor) -> Tensor:
    """2 |A and B| / (|A| + |B|) of each sample and class.

    Args:
        shares_NCDHW: Share of each class in each voxel, 0 or 1 or between.
        labels_NDHW: int64; the right class of each voxel.

    Returns:
        dice_NC: in [0, 1].
    """
    classes = shares_NCDHW.shape[1]
    truth_NCDHW = functional.one_hot(labels_NDHW, classes).permute(0, 4, 1, 2, 3)
    truth_NCDHW = truth_NCDHW.to(shares_NCDHW.dtype)
    common_NC = (shares_NCDHW * truth_NCDHW).sum(dim=(2, 3, 4))
    both_NC = shares_NCDHW.sum(dim=(2, 3, 4)) + truth_NCDHW.sum(dim=(2, 3, 4))
    dice_NC: Tensor = (2 * common_NC + SMOOTH) / (both_NC + SMOOTH)
    return dice_NC


def dice_of_classes(scores_NCDHW: Tensor, labels_NDHW: Tensor) -> Tensor:
    """Dice of the likeliest class of each voxel, dice_C, the mean over the samples."""
    classes = scores_NCDHW.shape[1]
    chosen = functional.one_hot(scores_NCDHW.argmax(dim=1), classes).permute(0, 4, 1, 2, 3)
    return dice(chosen.to(scores_NCDHW.dtype), labels_NDHW).mean(dim=0)


def cross_entropy_and_dice(scores_NCDHW: Tensor, labels_NDHW: Tensor) -> Tensor:
    """(cross-entropy + mean of 1 - Dice without class 0) / 2, as MLPerf's benchmark trains.

    Dice is that of each sample, so that the mean over samples weighs each equally.
    """
    shares_NCDHW = torch.softmax(scores_NCDHW, dim=1)
    missing = 1 - dice(shares_NCDHW, labels_NDHW)[:, 1:].mean()
    return (functional.cross_entropy(scores_NCDHW, labels_NDHW) + missing) / 2
