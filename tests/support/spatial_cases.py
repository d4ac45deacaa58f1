"""Operators of split tensors, and their comparison with the unsplit ones on several meshes."""

from __future__ import annotations

import warnings
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import nn

from support.spatial import context, largest_difference, serial_run, split_run


class Apply(nn.Module):
    """A function as a module."""

    def __init__(self, function, *modules):
        super().__init__()
        self.function = function
        self.parts = nn.ModuleList(modules)

    def forward(self, *x):
        return self.function(*x, *self.parts)


def unet(x, down, up):
    y = F.max_pool3d(down(x), 2)
    return torch.cat([x, up(y)], 1)


CASES = {
    # name: (module, shape of the input; one entry per rank is enough)
    "conv 3 same": (nn.Conv3d(2, 3, 3, padding=1), (2, 2, 9, 8, 7)),
    "conv 3 no padding": (nn.Conv3d(2, 3, 3), (2, 2, 9, 8, 7)),
    "conv 5 stride 2": (nn.Conv3d(2, 3, 5, stride=2, padding=2), (1, 2, 11, 9, 8)),
    "conv even 4 stride 2": (nn.Conv3d(2, 2, 4, stride=2, padding=1), (1, 2, 10, 12, 8)),
    "conv dilated, halo > share": (nn.Conv3d(2, 2, 3, padding=4, dilation=4), (1, 2, 8, 9, 10)),
    "conv 7 > share": (nn.Conv3d(1, 2, 7, padding=3), (1, 1, 6, 5, 6)),
    "conv same, even": (nn.Conv3d(2, 2, (2, 4, 3), padding="same"), (1, 2, 8, 9, 8)),
    "conv grouped 1x3x5": (
        nn.Conv3d(4, 4, (1, 3, 5), (1, 2, 1), (0, 1, 2), groups=2), (1, 4, 8, 9, 10)),
    "conv 1": (nn.Conv3d(2, 3, 1), (2, 2, 5, 6, 7)),
    "conv of few": (nn.Conv3d(2, 2, 3, padding=1, stride=2), (1, 2, 5, 3, 4)),
    "deconv 2/2": (nn.ConvTranspose3d(2, 3, 2, 2), (1, 2, 5, 6, 4)),
    "deconv 3/2 pad 1 out 1": (nn.ConvTranspose3d(2, 2, 3, 2, 1, 1), (1, 2, 5, 6, 7)),
    "deconv dilated": (nn.ConvTranspose3d(2, 4, 3, 1, 2, dilation=2, groups=2), (1, 2, 7, 6, 8)),
    "deconv 1/3 with gaps": (nn.ConvTranspose3d(2, 2, 1, 3, 0, 2), (1, 2, 4, 5, 4)),
    "max pool 2": (nn.MaxPool3d(2), (2, 2, 9, 8, 8)),
    "max pool 3/2/1": (nn.MaxPool3d(3, 2, 1), (1, 2, 9, 8, 7)),
    "max pool 3/2 ceil": (nn.MaxPool3d(3, 2, 1, ceil_mode=True), (1, 2, 8, 8, 10)),
    "max pool dilated": (nn.MaxPool3d(3, 1, 1, dilation=2), (1, 2, 8, 8, 10)),
    "average pool 3/2/1": (nn.AvgPool3d(3, 2, 1), (1, 2, 9, 8, 8)),
    "average pool 3/2/1 exclusive": (
        nn.AvgPool3d(3, 2, 1, count_include_pad=False), (1, 2, 9, 8, 8)),
    "average pool ceil": (nn.AvgPool3d(3, 2, 1, ceil_mode=True), (1, 2, 8, 10, 8)),
    "average pool divisor": (nn.AvgPool3d(3, 2, 1, divisor_override=5), (1, 2, 9, 8, 8)),
    "adaptive average to 1": (nn.AdaptiveAvgPool3d(1), (2, 3, 5, 6, 7)),
    "adaptive average to 4": (nn.AdaptiveAvgPool3d((4, 2, 2)), (2, 3, 8, 6, 4)),
    "adaptive max to 2": (nn.AdaptiveMaxPool3d(2), (2, 3, 8, 6, 4)),
    "batch norm": (nn.BatchNorm3d(3), (3, 3, 7, 6, 5)),
    "batch norm plain": (nn.BatchNorm3d(3, affine=False, momentum=None), (2, 3, 7, 6, 5)),
    "group norm": (nn.GroupNorm(2, 4), (2, 4, 7, 6, 5)),
    "instance norm": (
        nn.InstanceNorm3d(3, affine=True, track_running_stats=True), (2, 3, 7, 6, 5)),
    "nearest 2": (nn.Upsample(scale_factor=2), (1, 2, 5, 6, 4)),
    "nearest to size": (nn.Upsample(size=(7, 9, 5)), (1, 2, 5, 6, 4)),
    "nearest exact 1.7": (nn.Upsample(scale_factor=1.7, mode="nearest-exact"), (1, 2, 5, 6, 4)),
    "trilinear": (nn.Upsample(scale_factor=2, mode="trilinear"), (1, 2, 5, 6, 4)),
    "trilinear corners": (
        nn.Upsample(size=(9, 11, 7), mode="trilinear", align_corners=True), (1, 2, 5, 6, 4)),
    "trilinear 1.3": (nn.Upsample(scale_factor=(1.3, 1.5, 0.7), mode="trilinear"), (1, 2, 7, 6, 9)),
    "softmax": (nn.Softmax(1), (1, 3, 5, 6, 4)),
    "pad": (nn.ConstantPad3d((1, 2, 0, 3, 2, 1), 0.5), (1, 2, 5, 6, 4)),
    "crop": (nn.ConstantPad3d((-1, 0, 0, -1, -1, -2), 0.0), (1, 2, 8, 6, 6)),
    "activations": (nn.Sequential(nn.LeakyReLU(0.3), nn.PReLU(2), nn.GELU()), (1, 2, 5, 6, 4)),
    "reductions": (Apply(lambda x: x.mean((2, 3, 4)) + x.sum((0, 2)).mean()), (2, 2, 5, 6, 4)),
    "means one by one": (Apply(lambda x: x.mean(4).mean(2).mean(2) ** 2), (2, 2, 5, 6, 4)),
    "arithmetic": (Apply(lambda x: (2 - x * x[:, :1] / 3).clamp(min=-1) ** 2), (2, 2, 5, 6, 4)),
    "shapes": (
        Apply(lambda x: x.permute(0, 2, 3, 4, 1).unsqueeze(1).squeeze(1).transpose(1, 3)
              .reshape(2, 4, 6, 5, 2, 1)), (2, 2, 5, 6, 4)),
    "chunks": (Apply(lambda x: torch.stack([*x.chunk(2, 1), x[:, 1:3]], 1)), (1, 4, 5, 6, 4)),
    "flatten": (nn.Sequential(nn.Flatten(), nn.Linear(32, 3)), (2, 2, 4, 2, 2)),
    "skip connection": (
        Apply(unet, nn.Conv3d(2, 2, 3, padding=1), nn.ConvTranspose3d(2, 2, 2, 2)),
        (1, 2, 8, 8, 8)),
}  # fmt: skip


def compare_all(cases, meshes, **options):
    """The names of cases and meshes that differ, with by how much."""
    warnings.filterwarnings("ignore", "Using padding='same' with even kernel")  # the serial run
    contexts = {mesh: context(mesh, **options) for mesh in meshes}
    worst = {}
    for name, (module, shape) in cases.items():
        torch.manual_seed(2)
        module = deepcopy(module).double()
        for parameter in module.parameters():
            nn.init.normal_(parameter)
        x = torch.randn(shape, dtype=torch.float64)
        expected = serial_run(deepcopy(module), [x])
        for mesh in meshes:
            try:  # twice on the first mesh: the bits must agree
                again = range(1 + (mesh == meshes[0]))
                runs = [split_run(deepcopy(module), [x], contexts[mesh]) for _ in again]
            except Exception as error:
                raise AssertionError(f"{name} on {mesh}: {error!r}") from error
            worst[name, mesh] = largest_difference(expected, runs[0])
            assert all(torch.equal(runs[0][key], runs[-1][key]) for key in expected), (name, mesh)
    return {key: value for key, value in worst.items() if value[0] > 1e-12}


def nothing_differs(results):
    assert results[0] == {}
    assert all(result == {} for result in results)
