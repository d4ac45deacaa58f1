"""Recipes and plans that reach the planted bugs of models in parts: stages, layers, space."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headway import Recipe
from headway.plans import LayerSplit, PipelinePlan
from mutations.cases import (
    _two_rates,
    case,
    flushless_2bw,
    layers,
    mlp,
    piped,
    tiny,
    volumes,
)
from support.recipes import late, normalised
from support.split_recipes import Lines, Segmenter, Volumes, estimating
from support.tiny_models import CLASSES, FEATURES, Points

WORDS, WINDOW, WIDTH = 16, 6, 16


# ---- pipelines --------------------------------------------------------------------------------


@case(4)
def interleaved_copies() -> Recipe:
    """A rank has two stages, and a batch is ragged."""
    return piped("interleaved")


@case(4)
def flushless_copies() -> Recipe:
    """Groups of micro-batches of different sizes, of two pipelines."""
    return replace(flushless_2bw(), data=lambda: Points(30), batch=15)


@case(microbatches=True)
def recomputed_statistics() -> Recipe:
    plan = PipelinePlan(microbatches=4, recompute="stages")
    return replace(normalised(), stages=2, pipeline=plan)


@case(microbatches=True)
def recomputed_statistics_blocks() -> Recipe:
    plan = PipelinePlan(microbatches=4, recompute="blocks")
    return replace(normalised(), stages=2, pipeline=plan)


class Odd(nn.Sequential):
    """Parameters whose rows cannot be dealt out evenly."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, CLASSES)
        )


@case(4)
def piped_zero_odd() -> Recipe:
    plan = PipelinePlan(microbatches=2)
    return tiny("odd", Odd, zero=3, stages=2, pipeline=plan, microbatch=None)


class Apart(nn.Module):
    """A stage in the middle gives a value that does not depend on what enters it."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.inner = nn.Linear(FEATURES, 8), nn.Linear(8, 8)
        self.side, self.leave = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.enter(x))
        y = torch.tanh(self.inner(y))
        beside = torch.tanh(self.side(x))
        found: Tensor = self.leave(y) + self.last(beside)
        return found


@case(3)
def zero_bubble_apart() -> Recipe:
    plan = PipelinePlan(schedule="zb-h1", microbatches=4, cut=("inner", "leave"))
    return tiny("apart", Apart, stages=3, pipeline=plan, microbatch=None)


def blocks(**more: Any) -> Recipe:
    """Split layers, cut into stages."""
    plan = PipelinePlan(microbatches=2)
    return replace(layers(tensor=(2,)), stages=2, pipeline=plan, microbatch=None, **more)


@case(4)
def piped_tensor() -> Recipe:
    return blocks(clip=0.1)


@case(4)
def piped_spatial() -> Recipe:
    plan = PipelinePlan(microbatches=2)
    return replace(volumes(spatial=(2, 1, 1)), stages=2, pipeline=plan, microbatch=None)


@case(whole=True)
def trained_piped() -> Recipe:
    """Stages, numbers kept by the optimiser, and validation."""
    return replace(piped("1f1b"), precision="float32")


@case(whole=True)
def trained_chimera() -> Recipe:
    return piped("chimera", 4)


@case(whole=True)
def trained_two_rates() -> Recipe:
    return replace(mlp(), optimizer=_two_rates)


@case(whole=True)
def trained_tensor() -> Recipe:
    """Queries, keys and values as one layer, in blocks."""
    return replace(layers(tensor=(2,)), validation=Lines, validation_samples=10)


@case(microbatches=True)
def piped_statistics_dropping() -> Recipe:
    """Running statistics, and random draws that are looked for by running the model."""
    plan = PipelinePlan(microbatches=2)
    return replace(normalised(), model=Mixed, data=lambda: Points(36), stages=2, pipeline=plan)


class Mixed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, CLASSES)
        )


# ---- layers -----------------------------------------------------------------------------------


class Padded(nn.Module):
    """Words of which one is padding; its vector gets no gradient."""

    def __init__(self, padding: int = 0) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=padding)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        found: Tensor = self.head(x + self.down(F.gelu(self.up(x))))
        return found


@case()
def tensor_padded() -> Recipe:
    return replace(layers(tensor=(2,)), model=Padded)


def smoothed(model: nn.Module, batch: Any) -> Any:
    words, following = batch
    return F.cross_entropy(model(words).flatten(0, 1), following.flatten(), label_smoothing=0.1)


@case()
def tensor_smoothed() -> Recipe:
    return replace(layers(tensor=(2,)), model=Padded, loss=smoothed)


def ignoring(model: nn.Module, batch: Any) -> Any:
    words, following = batch
    total = F.cross_entropy(
        model(words).flatten(0, 1), following.flatten(), ignore_index=5, reduction="sum"
    )
    return total, (following != 5).sum()


@case()
def tensor_ignoring() -> Recipe:
    return replace(layers(tensor=(2,)), model=Padded, loss=ignoring)


class RootMeans(Padded):
    """Norms without a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        found: Tensor = self.head(x)
        return found


@case(4)
def tensor_rms() -> Recipe:
    return replace(layers(tensor=(2, 2)), model=RootMeans)


@case(4)
def tensor_2d_clipped() -> Recipe:
    return replace(layers(tensor=(2, 2)), clip=0.1)


class Looking(nn.Module):
    """torch's attention, with a mask of the future and one of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.attend = nn.MultiheadAttention(WIDTH, 4, dropout=0.2, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        size = words.shape[1]
        future = torch.ones(size, size, dtype=torch.bool).triu(1)
        padding = torch.zeros(words.shape, dtype=torch.bool)
        padding[:, 2] = True
        seen, _ = self.attend(
            x, x, x, attn_mask=future, key_padding_mask=padding, need_weights=False
        )
        found: Tensor = self.head(x + seen)
        return found


@case()
def tensor_attention() -> Recipe:
    return replace(layers(tensor=(2,)), model=Looking)


@case(4)
def tensor_ahead() -> Recipe:
    """Weights of a cuboid are gathered ahead, over the border of a step."""
    return layers(tensor=(2, 1, 2))


# ---- space ------------------------------------------------------------------------------------


class Pooled(nn.Module):
    """Poolings with padding, and a step up by interpolation."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv3d(2, 4, 3, padding=1), nn.Conv3d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        y = F.max_pool3d(F.max_pool3d(x - 3.0, 3, stride=1, padding=1), 2)
        z = F.avg_pool3d(x, 3, stride=2, padding=1, count_include_pad=False)
        both = torch.cat([y, z], 1)
        grown = F.interpolate(both, scale_factor=2, mode="trilinear", align_corners=False)
        found: Tensor = self.leave(grown)
        return found


@case()
def spatial_pooled() -> Recipe:
    return replace(volumes(spatial=(2, 1, 1)), model=Pooled)


class PerSample(nn.Module):
    """Statistics of single samples that run along."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv3d(2, 4, 3, padding=1)
        self.norm = nn.InstanceNorm3d(4, affine=True, track_running_stats=True)
        self.leave = nn.Conv3d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.leave(self.norm(self.enter(x)).relu())
        return found


@case(microbatches=True)
def spatial_instances() -> Recipe:
    return replace(volumes(spatial=(2, 1, 1)), model=PerSample)


def weighted(model: nn.Module, batch: Any) -> Any:
    volume, labels = batch
    weight = torch.tensor([0.2, 1.0, 3.0], dtype=volume.dtype)
    return F.cross_entropy(model(volume), labels, weight=weight, reduction="mean")


@case(microbatches=True)
def spatial_weighted() -> Recipe:
    return replace(volumes(spatial=(2, 1, 1)), loss=weighted)


def unlabelled(model: nn.Module, batch: Any) -> Any:
    """Labels of one kind do not count, all of them in the upper half."""
    volume, labels = batch
    hidden = torch.zeros(labels.shape[1:], dtype=torch.bool)
    hidden[:3] = True
    labels = labels.masked_fill(hidden, -100)
    return F.cross_entropy(model(volume), labels)


@case()
def spatial_unlabelled() -> Recipe:
    return replace(volumes(spatial=(2, 1, 1)), loss=unlabelled)


class Headed(nn.Module):
    """Whole samples behind the convolutions, and a layer that needs them whole."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv3d(2, 3, 3, padding=1)
        self.hidden, self.leave = nn.Linear(3 * 4 * 3 * 3, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.avg_pool3d(self.enter(x).relu(), 2)
        found: Tensor = self.leave(torch.tanh(self.hidden(y.flatten(1))))
        return found


class Averaged(nn.Module):
    """A mean over all of space."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv3d(2, 4, 3, padding=1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.leave(self.enter(x).relu().mean((2, 3, 4)))
        return found


@case()
def spatial_averaged() -> Recipe:
    return replace(spatial_samples(), model=Averaged)


@case()
def spatial_samples() -> Recipe:
    split = LayerSplit(spatial=(2, 1, 1), head="samples")
    return replace(
        volumes(spatial=(2, 1, 1)),
        model=Headed,
        loss=estimating,
        split=split,
        batch=6,
        microbatch=3,
    )


class ScaledSegmenter(Segmenter):
    """With a parameter of no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Any) -> Any:
        return super().forward(x) * self.scale


@case(4)
def spatial_zero() -> Recipe:
    return replace(volumes(spatial=(2, 1, 1)), model=ScaledSegmenter, zero=2)


class UnevenSegmenter(nn.Module):
    """Strides and dilations over extents that cannot be shared evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv3d(2, 4, 3, stride=2, padding=1)
        self.wide = nn.Conv3d(4, 4, 3, padding=2, dilation=2)
        self.up = nn.ConvTranspose3d(4, 3, 3, stride=2, padding=1, output_padding=0)

    def forward(self, x: Any) -> Any:
        return self.up(self.wide(self.enter(x[:, :, :7, :5, :5])).relu())


class OddVolumes(Volumes):
    """Of 7 x 5 x 5 voxels."""

    def __getitem__(self, index: int) -> Any:
        volume, labels = super().__getitem__(index)
        return volume[:, :7, :5, :5].contiguous(), labels[:7, :5, :5].contiguous()


class OddSegmenter(UnevenSegmenter):
    def forward(self, x: Any) -> Any:
        return self.up(self.wide(self.enter(x)).relu())


@case(3)
def spatial_uneven() -> Recipe:
    return replace(volumes(spatial=(3, 1, 1)), model=OddSegmenter, data=OddVolumes)


@case(4)
def spatial_uneven_2d() -> Recipe:
    return replace(volumes(spatial=(2, 2, 1)), model=OddSegmenter, data=OddVolumes)


class FlatDropping(nn.Module):
    """Positions of all samples in one dimension when dropout is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = F.dropout(self.words(words).flatten(0, 1), 0.3, self.training)
        found: Tensor = self.head(x).unflatten(0, words.shape)
        return found


@case()
def flat_dropping() -> Recipe:
    return replace(layers(tensor=(1,)), model=FlatDropping, split=None)


@case()
def flushless_words() -> Recipe:
    """The loss counts words, and each micro-batch is an update of its own."""
    plan = PipelinePlan(schedule="pipedream", microbatches=4)
    return replace(late(words=True), stages=2, pipeline=plan)
