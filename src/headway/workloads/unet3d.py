"""Segmentation of cortex, deep grey matter and cerebellum by 3-D U-Nets, in a size for CPUs.

    headway train unet3d -n 2

`--set arguments.variant=cicek` or `mlperf` gives the published models. `CicekUNet` is that of
LBANN's applications (Cicek et al. 2016, "3D U-Net: Learning Dense Volumetric Segmentation from
Sparse Annotation", with padding, so that sizes stay): batch normalisation, maxima on the way down.
`MLPerfUNet` is that of MLPerf training: instance normalisation, strided convolutions on the way
down; its loss is the mean of cross-entropy and 1 - Dice (Dice 1945). The figure is Dice per class.

A sample is (two images [2, W, W, W] float32, of the whole head and of the brain alone; labels
[W, W, W] int64: 0 none, 1 cortex, 2 deep grey matter, 3 cerebellum). It follows from the seed and
its number alone. A file holds one sample, `images` and `labels`, both uint8; where a plan splits
samples, a rank reads only its part of each.

The real head is `ch2` with the labels `aal`, of one subject on one grid (Debian's mricron-data,
BSD licence; not part of headway):

    apt-get download mricron-data && dpkg -x mricron-data_*.deb mricron
    headway train unet3d --set arguments.volumes=mricron/

Names of shapes: N samples, C channels or classes, D H W depth, height, width.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adam, Optimizer

from headway.data.slabs.slab_source import SlabSource, slabs_in
from headway.data.source import Source
from headway.errors import DataError, RecipeError
from headway.optim.warmup import warmup_then_cosine
from headway.run.recipe.recipe import Recipe, criterion

# ruff: noqa: N803, N806 (shape suffixes)

HEADER = 348
TYPES = {2: "u1", 4: "i2", 8: "i4", 16: "f4", 64: "f8", 256: "i1", 512: "u2", 768: "u4"}


@dataclass(frozen=True)
class NiftiVolume:
    """What a file holds.

    Attributes:
        voxels: [X, Y, Z] and further dimensions, of the file's type; scaled where it says so.
        affine: [3, 4] from indices to millimetres (right, front, up), zero where it is not stated.
    """

    voxels: NDArray[Any]
    affine: NDArray[np.float64]


def read_nifti(path: str | Path) -> NiftiVolume:
    """The volume of a file.

    Raises:
        DataError: There is no such file, it is no NIfTI-1 file, or it is cut short.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    except (OSError, EOFError, zlib.error) as error:
        raise DataError("a volume cannot be read", where=str(path), why=str(error)) from error
    # "ni1" would mean voxels in a second file.
    if len(content) < HEADER or content[344:347] != b"n+1":
        raise DataError("not a NIfTI-1 file with its voxels in it", where=str(path))
    # The header begins with its own length, which shows its byte order.
    order = "<" if struct.unpack_from("<i", content)[0] == HEADER else ">"
    dims = struct.unpack_from(f"{order}8h", content, 40)
    (code,) = struct.unpack_from(f"{order}h", content, 70)
    offset, slope, start = struct.unpack_from(f"{order}3f", content, 108)
    if code not in TYPES:
        raise DataError(f"voxels of type {code}", where=str(path), why=f"known are {sorted(TYPES)}")
    dtype, shape = np.dtype(order + TYPES[code]), dims[1 : 1 + dims[0]]
    size = int(np.prod(shape)) * dtype.itemsize
    if len(content) < int(offset) + size:
        raise DataError(
            "a volume is cut short",
            where=str(path),
            why=f"{size} bytes of voxels from byte {int(offset)} on, of {len(content)}",
        )
    # nifti1.h: the first dimension is the fastest.
    flat = np.frombuffer(content, dtype, size // dtype.itemsize, int(offset))
    voxels = flat.reshape(shape, order="F")
    if slope not in (0.0, 1.0) or (slope and start):  # 0 means that nothing is scaled
        voxels = voxels * slope + start
    (stated,) = struct.unpack_from(f"{order}h", content, 254)
    rows = struct.unpack_from(f"{order}12f", content, 280) if stated else (0.0,) * 12
    return NiftiVolume(voxels, np.array(rows, dtype=np.float64).reshape(3, 4))


# Heads as samples: phantoms that are made, patches of a real one, or files.


IMAGES, LABELS = "images", "labels"
CLASSES = ("none", "cortex", "deep grey", "cerebellum")
DEEP = (71, 78)
CEREBELLUM = (91, 116)
"""First and last label of the atlas; all others from 1 on are cortex."""

Split = Literal["train", "validation"]
Bytes = NDArray[np.uint8]
Float = NDArray[np.float64]


class _Heads:
    count: int

    def sample(self, number: int) -> tuple[Bytes, Bytes]:
        """Images [2, W, W, W] and labels [W, W, W]."""
        raise NotImplementedError

    def read(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The samples as one batch: [N, 2, W, W, W] and [N, W, W, W]."""
        images, labels = zip(*(self.sample(int(index)) for index in indices), strict=True)
        return prepared((torch.from_numpy(np.stack(images)), torch.from_numpy(np.stack(labels))))

    def __len__(self) -> int:
        return self.count


def prepared(parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Images and labels of a batch, as in files, as the loss takes them."""
    images, labels = parts
    return images.float() / 64 - 1, labels.long()


class Phantoms(_Heads):
    """Heads of ellipsoids: a skull, white matter, and three kinds of grey matter of one brightness.

    Args:
        first: Number of the first one; other numbers are other heads.
    """

    def __init__(self, count: int, width: int, *, first: int = 0, seed: int = 0) -> None:
        self.count, self.width, self.first, self.seed = count, width, first, seed

    def sample(self, number: int) -> tuple[Bytes, Bytes]:
        random = _stream(self.seed, self.first + number)
        place = (np.indices((self.width,) * 3) + 0.5) * (2 / self.width) - 1
        place = place - random.uniform(-0.08, 0.08, (3, 1, 1, 1))
        size = random.uniform(0.78, 0.92, 3)
        head = _radius(place, (0, 0, 0), size)
        brain = head < 0.88
        labels = np.where(brain & (head > 0.66), 1, 0)
        for side in (-1, 1):
            nucleus = _radius(place, (0, 0, side * 0.2), random.uniform(0.13, 0.19, 3))
            labels[nucleus < 1] = 2
        cerebellum = _radius(place, (-0.42, -0.34, 0), random.uniform(0.24, 0.34, 3))
        labels[brain & (cerebellum < 1)] = 3
        tissue = np.where(labels > 0, 90.0, 140.0)
        outside = np.where(head < 1, 60.0, 8.0)
        noise = random.normal(0, 10, (self.width,) * 3)
        whole = np.where(brain, tissue, outside) + noise
        images = np.stack([whole, np.where(brain, whole, 0)])
        return np.clip(images, 0, 255).astype(np.uint8), labels.astype(np.uint8)


def _radius(place: Float, centre: Sequence[float], size: Any) -> Float:
    """Distance from a centre, in units of an ellipsoid's half axes."""
    steps = [(place[dim] - centre[dim]) / size[dim] for dim in range(3)]
    result: Float = np.sqrt(sum((step**2 for step in steps), start=np.zeros(())))
    return result


class Patches(_Heads):
    """Cubes out of one half of a head: training from the left one, validation from the right.

    The class in the middle of a cube is drawn first, all with the same chance: the nuclei are few.
    That voxel lies in the brain: a cube of air says nothing.

    Args:
        folder: With `ch2.nii.gz`, `ch2bet.nii.gz` and `aal.nii.gz`, on one grid.

    Raises:
        DataError: A file is missing or damaged, the grids differ, or a cube does not fit.
    """

    def __init__(
        self, folder: str | Path, split: Split, count: int, width: int, *, seed: int = 0
    ) -> None:
        files = [Path(folder) / f"{name}.nii.gz" for name in ("ch2", "ch2bet", "aal")]
        head, brain, atlas = (read_nifti(file) for file in files)
        shapes = [volume.voxels.shape for volume in (head, brain, atlas)]
        if len(set(shapes)) != 1 or len(shapes[0]) != 3:
            raise DataError("the grids differ", where=str(folder), why=f"shapes {shapes}")
        half = shapes[0][0] // 2
        if width > min(half, *shapes[0][1:]):
            raise DataError(
                f"cubes of {width} voxels do not fit", where=str(folder), why=f"a half has {half}"
            )
        # The first dimension goes from left to right where the affine says so.
        left = (split == "train") == (atlas.affine[0, 0] >= 0)
        chosen = slice(0, half) if left else slice(-half, None)
        self.images = np.stack([head.voxels[chosen], brain.voxels[chosen]])
        self.labels = classes_of(atlas.voxels[chosen])
        self.count, self.width = count, width
        self.seed, self.kind = seed, 0 if split == "train" else 1 << 32
        inside = (self.labels > 0) | (self.images[1] > 0)
        present = (np.argwhere(inside & (self.labels == c)) for c in range(len(CLASSES)))
        self._places = [places for places in present if len(places)]

    def sample(self, number: int) -> tuple[Bytes, Bytes]:
        random = _stream(self.seed, self.kind + number)
        places = self._places[int(random.integers(len(self._places)))]
        middle = places[int(random.integers(len(places)))]
        most = np.array(self.labels.shape) - self.width
        corner = np.clip(middle - self.width // 2, 0, most)
        inside = tuple(slice(start, start + self.width) for start in corner.tolist())
        return self.images[(slice(None), *inside)], self.labels[inside]


def classes_of(atlas: NDArray[Any]) -> Bytes:
    """The four classes of the atlas' 116 labels."""
    classes = np.where(atlas > 0, 1, 0)
    classes[(atlas >= DEEP[0]) & (atlas <= DEEP[1])] = 2
    classes[(atlas >= CEREBELLUM[0]) & (atlas <= CEREBELLUM[1])] = 3
    return classes.astype(np.uint8)


def source(
    split: Split,
    *,
    width: int,
    count: int,
    volumes: str | Path | None = None,
    directory: str | Path | None = None,
    seed: int = 0,
) -> Source:
    """Training or validation samples.

    Args:
        split: Of phantoms other numbers, of the real head the other half.
        volumes: Folder of the real head; None: phantoms.
        directory: Folder with the folders `train` and `validation`, see `slabs_in`; None: made
            here.
        seed: Of phantoms, or of the places of cubes.

    Raises:
        DataError: See `Patches` and `slabs_in`.
        MissingExtra: h5py is not installed.
    """
    if directory is not None:
        return SlabSource(*slabs_in(Path(directory) / split, IMAGES, LABELS), finish=prepared)
    if volumes is not None:
        return Patches(volumes, split, count, width, seed=seed)
    return Phantoms(count, width, first=0 if split == "train" else 1 << 32, seed=seed)


def _stream(seed: int, sample: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=[seed, sample]))


CICEK_WIDTH = 32
MLPERF_WIDTHS = (32, 64, 128, 256, 320, 320)
SMALL_WIDTHS = (8, 16, 32)

Norm = Callable[[int], nn.Module]


def _instance_norm(channels: int) -> nn.Module:
    return nn.InstanceNorm3d(channels, affine=True)


def _convolution(entering: int, leaving: int, norm: Norm, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        # Without a bias: the norm behind it would subtract it again.
        nn.Conv3d(entering, leaving, 3, stride=stride, padding=1, bias=False),
        norm(leaving),
        nn.ReLU(),
    )


def _pair(entering: int, middle: int, leaving: int, norm: Norm, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        _convolution(entering, middle, norm, stride), _convolution(middle, leaving, norm)
    )


class _UNet(nn.Module):
    """The way down, and up again beside what was found on the way down.

    Args:
        down: From the finest level to the coarsest.
        up: Doubles the width, from the coarsest level to the finest; one fewer than `down`.
        mix: Behind each of `up`, over its result and the level's own.
    """

    def __init__(
        self,
        down: Sequence[nn.Module],
        up: Sequence[nn.Module],
        mix: Sequence[nn.Module],
        last: nn.Module,
    ) -> None:
        super().__init__()
        self.down = nn.ModuleList(down)
        self.up = nn.ModuleList(up)
        self.mix = nn.ModuleList(mix)
        self.last = last

    def forward(self, x_NCDHW: Tensor) -> Tensor:
        """Scores of each class at each voxel; a softmax over dimension 1 makes them shares.

        Args:
            x_NCDHW: Volumes; each side is a multiple of 2^(levels - 1).

        Returns:
            scores_NCDHW: of the same width.

        Raises:
            ValueError: A side is no such multiple.
        """
        factor, sides = 2 ** len(self.up), tuple(x_NCDHW.shape[2:])
        if any(side % factor for side in sides):
            raise ValueError(f"sides of {sides} voxels; each must be a multiple of {factor}")
        levels = []
        x = x_NCDHW
        for part in self.down:
            x = part(x)
            levels.append(x)
        for up, mix, level in zip(self.up, self.mix, reversed(levels[:-1]), strict=True):
            x = mix(torch.cat((up(x), level), dim=1))
        scores_NCDHW: Tensor = self.last(x)
        return scores_NCDHW


class CicekUNet(_UNet):
    """Four levels of (w, 2w), (2w, 4w), ... channels, batch normalisation.

    With 32 channels, one channel in and three classes it has 19,070,560 parameters.
    """

    def __init__(
        self, channels: int = 1, classes: int = 3, *, width: int = CICEK_WIDTH, levels: int = 4
    ) -> None:
        sizes = [width << level for level in range(levels + 1)]
        entering = (channels, *sizes[1:-1])
        norm: Norm = nn.BatchNorm3d
        pairs = [
            _pair(into, middle, leaving, norm)
            for into, (middle, leaving) in zip(entering, pairwise(sizes), strict=True)
        ]
        down = [pairs[0], *(nn.Sequential(nn.MaxPool3d(2), pair) for pair in pairs[1:])]
        rising = sizes[:1:-1]
        super().__init__(
            down,
            [nn.ConvTranspose3d(size, size, 2, stride=2, bias=False) for size in rising],
            [_pair(size + size // 2, size // 2, size // 2, norm) for size in rising],
            nn.Conv3d(sizes[1], classes, 1, bias=False),
        )


class MLPerfUNet(_UNet):
    """One level for each of `widths`, instance normalisation.

    `MLPerfUNet()` is the benchmark's; `MLPerfUNet(2, 4, widths=SMALL_WIDTHS)` (two images of a
    head, four classes, 85,420 parameters) trains on a CPU.
    """

    def __init__(
        self, channels: int = 1, classes: int = 3, *, widths: Sequence[int] = MLPERF_WIDTHS
    ) -> None:
        norm: Norm = _instance_norm
        down = [_pair(channels, widths[0], widths[0], norm)]
        down += [_pair(a, b, b, norm, stride=2) for a, b in pairwise(widths)]
        rising = list(pairwise(reversed(widths)))
        super().__init__(
            down,
            [nn.ConvTranspose3d(a, b, 2, stride=2) for a, b in rising],
            [_pair(2 * b, b, b, norm) for _, b in rising],
            nn.Conv3d(widths[0], classes, 1),
        )


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


# Cortex, deep grey matter and cerebellum of heads, in a size for CPUs.


Variant = Literal["small", "cicek", "mlperf"]


def recipe(
    *,
    variant: Variant = "small",
    width: int = 32,
    samples: int = 63,
    validation_samples: int = 8,
    batch: int = 2,
    steps: int = 80,
    learning_rate: float = 3e-3,
    seed: int = 0,
    volumes: str | Path | None = None,
    directory: str | Path | None = None,
) -> Recipe:
    """A segmentation of cubes of heads.

    Args:
        variant: "small" (85,420 parameters), "cicek" (batch normalisation, which depends on how a
            batch is split into micro-batches; cross-entropy) or "mlperf" (instance normalisation;
            cross-entropy and Dice, as "small").
        seed: Decides initial parameters, order and samples.
        directory: Folder with `train` and `validation`, folders of files, in place of samples that
            are made.

    Raises:
        RecipeError: There is no such variant.
    """
    models: dict[str, Callable[[], nn.Module]] = {
        "small": partial(MLPerfUNet, 2, len(CLASSES), widths=SMALL_WIDTHS),
        "cicek": partial(CicekUNet, 2, len(CLASSES)),
        "mlperf": partial(MLPerfUNet, 2, len(CLASSES)),
    }
    if variant not in models:
        raise RecipeError(f"no variant {variant!r}", fix=f"choose one of {', '.join(models)}")
    data = partial(source, width=width, volumes=volumes, directory=directory, seed=seed)
    validation = partial(data, "validation", count=validation_samples)
    loss = functional.cross_entropy if variant == "cicek" else cross_entropy_and_dice
    made = directory or volumes or f"phantoms made from seed {seed}"
    return Recipe(
        name=f"unet3d {variant} {width}^3 on {made}",
        model=models[variant],
        data=partial(data, "train", count=samples),
        validation=validation,
        loss=criterion(loss),
        optimizer=partial(adam, learning_rate=learning_rate),
        scheduler=partial(warmup_then_cosine, steps=steps),
        batch=batch,
        stop=f"{steps} steps",
        seed=seed,
        validate_every=max(1, steps // 4),
        showcase=partial(scores, validation),
    )


def adam(model: nn.Module, *, learning_rate: float) -> Optimizer:
    return Adam(model.parameters(), lr=learning_rate)


@torch.no_grad()
def scores(data: Callable[[], Source], model: nn.Module) -> str:
    """Dice of each class, the mean over validation samples, and the mean without the first."""
    samples = data()
    like = next(model.parameters())
    found = torch.zeros(len(CLASSES))
    for index in range(len(samples)):
        images, labels = samples.read([index])
        said = model(images.to(device=like.device, dtype=like.dtype)).float().cpu()
        found += dice_of_classes(said, labels) / len(samples)
    rows = zip(CLASSES, found.tolist(), strict=True)
    lines = [f"{name:10} {score:.3f}" for name, score in rows]
    mean = float(found[1:].mean())
    return "\n".join(["Dice on validation samples", *lines, f"mean of the last three {mean:.3f}"])
