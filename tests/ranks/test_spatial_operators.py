"""ranks: operators on split tensors equal to the unsplit ones, on meshes of 4 and 8 ranks."""

from __future__ import annotations

import pytest
from torch import nn

from support.ranks import ranks
from support.spatial_cases import CASES, compare_all, nothing_differs


@pytest.mark.slow
@ranks(4, timeout=120, check=nothing_differs)
def test_3d_operators_on_four_ranks(world):
    return compare_all(CASES, [(4, 1, 1), (2, 2, 1), (1, 1, 4)], min_width=0)


@pytest.mark.slow
@ranks(8, timeout=120, check=nothing_differs)
def test_3d_operators_on_eight_ranks(world):
    return compare_all(CASES, [(2, 2, 2)], min_width=0)


FLAT_CASES = {
    "conv2d": (nn.Conv2d(2, 3, 3, stride=2, padding=1), (2, 2, 9, 10)),
    "deconv2d": (nn.ConvTranspose2d(2, 3, 3, 2, 1, 1), (2, 2, 6, 5)),
    "pools2d": (nn.Sequential(nn.AvgPool2d(3, 2, 1), nn.MaxPool2d(3, 1, 1)), (2, 2, 9, 11)),
    "norms2d": (
        nn.Sequential(nn.BatchNorm2d(2), nn.InstanceNorm2d(2), nn.GroupNorm(1, 2)), (2, 2, 5, 6)),
    "bilinear": (nn.Upsample(scale_factor=2, mode="bilinear"), (1, 2, 5, 6)),
    "adaptive2d": (nn.AdaptiveAvgPool2d(1), (2, 3, 5, 6)),
}  # fmt: skip
LINE_CASES = {
    "conv1d": (nn.Conv1d(2, 3, 5, padding=2, dilation=2), (2, 2, 19)),
    "deconv1d": (nn.ConvTranspose1d(2, 3, 4, 3, 1), (2, 2, 6)),
    "pools1d": (nn.Sequential(nn.AvgPool1d(3, 2, 1, count_include_pad=False), nn.MaxPool1d(2)),
                (2, 2, 19)),
    "norm1d": (nn.BatchNorm1d(2), (3, 2, 7)),
    "linear": (nn.Upsample(scale_factor=2, mode="linear"), (1, 2, 9)),
}  # fmt: skip


@ranks(4, timeout=60, check=nothing_differs)
def test_2d_and_1d_operators_on_four_ranks(world):
    flat = compare_all(FLAT_CASES, [(2, 2), (4, 1)], min_width=0)
    return flat | compare_all(LINE_CASES, [(4,)], min_width=0)


@ranks(4, timeout=60, check=nothing_differs)
def test_overlap_of_the_inner_part_changes_no_number(world):
    cases = {name: case for name, case in CASES.items() if name.startswith("conv")}
    wide = {"wide": (nn.Conv3d(2, 3, 3, padding=1), (2, 2, 20, 18, 7))}
    return compare_all(cases | wide, [(4, 1, 1), (2, 2, 1)], min_width=0, overlap=True)
