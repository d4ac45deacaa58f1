"""CosmoFlow: four parameters of a universe from a cube of its matter at four redshifts.

    headway train cosmoflow -n 2

`--set arguments.variant=lbann`, `--set arguments.width=128` and the like give the published models:
that of LBANN's applications (Oyama et al. 2020, "The Case for Strong Scaling in Deep Learning:
Training Large 3D CNNs with Hybrid Parallelism") and that of MLPerf HPC. Both halve the cube until
4^3 entries are left and end in three layers over all of it.

A sample is (log(1 + matter) [4, W, W, W] at redshifts 0, 0.5, 1.5 and 3, parameters [4] scaled to
[-1, 1]), both float32. A file holds one sample as LBANN's reader expects it: `full` [4, W, W, W],
before the logarithm, and `unitPar` [4].

Universes are made from first principles. A sample draws four parameters and a field of white noise,
gives the noise the linear power spectrum (Eisenstein and Hu 1998, "Baryonic Features in the Matter
Transfer Function", normalised to sigma_8), moves particles by the Zel'dovich approximation or
second-order Lagrangian theory, and counts them in cells. Such fields are cheap, and unlike those of
an N-body code where paths of particles have crossed. Sample s of seed t is a function of (t, s)
alone, so that every rank makes the same universe. Lengths are in Mpc/h, k in h/Mpc.

Names of shapes: N samples, C channels, D H W depth, height, width, P parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from headway.data.slabs.slab_source import SlabSource, slabs_in
from headway.data.source import Source
from headway.errors import RecipeError
from headway.optim.warmup import warmup_then_cosine
from headway.run.recipe.recipe import Recipe, criterion

# ruff: noqa: N803, N806 (shape suffixes)

Array = NDArray[np.float64]

REDSHIFTS = (0.0, 0.5, 1.5, 3.0)
RANGES = ((0.25, 0.35), (0.78, 0.95), (0.9, 1.0), (0.65, 0.75))
"""Of Omega_m, sigma_8, n_s and h; uniform."""
CELL = 2.0
SUBCELLS = 256
"""Particles lie at multiples of 1 / 256 of a cell: weights are then whole numbers, and no mass is
lost to rounding."""


@dataclass(frozen=True, kw_only=True)
class Cosmology:
    """A flat universe of cold matter, baryons and a cosmological constant.

    Attributes:
        omega_m: Share of matter, baryons included, of the critical density.
        sigma_8: Deviation of the linear density today in spheres of 8 Mpc/h.
        h: Hubble's constant in 100 km/s/Mpc.
        temperature: Of the background radiation, in K.
    """

    omega_m: float
    sigma_8: float
    n_s: float
    h: float
    omega_b: float = 0.049
    temperature: float = 2.7255


def draw(seed: int, sample: int) -> Cosmology:
    """The parameters of a sample."""
    values = [
        low + (high - low) * u
        for (low, high), u in zip(RANGES, _stream(seed, sample, 1, 0).random(4), strict=True)
    ]
    return Cosmology(omega_m=values[0], sigma_8=values[1], n_s=values[2], h=values[3])


def unit_parameters(universe: Cosmology) -> NDArray[np.float32]:
    """The four parameters, each scaled from its range to [-1, 1]."""
    values = (universe.omega_m, universe.sigma_8, universe.n_s, universe.h)
    scaled = [
        2 * (value - low) / (high - low) - 1
        for value, (low, high) in zip(values, RANGES, strict=True)
    ]
    return np.array(scaled, dtype=np.float32)


def transfer(k: Array, universe: Cosmology) -> Array:
    """T(k) of Eisenstein and Hu 1998, section 3: 1 at large scales, with acoustic oscillations."""
    matter, baryons = universe.omega_m * universe.h**2, universe.omega_b * universe.h**2
    share = universe.omega_b / universe.omega_m
    theta = universe.temperature / 2.7
    # k comes in h/Mpc; the paper's is in 1/Mpc.
    k = k * universe.h
    # Equations 2 to 7: equality, drag epoch, sound horizon, Silk damping.
    z_equality = 2.5e4 * matter * theta**-4
    k_equality = 7.46e-2 * matter * theta**-2
    b1 = 0.313 * matter**-0.419 * (1 + 0.607 * matter**0.674)
    b2 = 0.238 * matter**0.223
    z_drag = 1291 * matter**0.251 / (1 + 0.659 * matter**0.828) * (1 + b1 * baryons**b2)
    r_drag, r_equality = (31.5 * baryons * theta**-4 * 1e3 / z for z in (z_drag, z_equality))
    ratio = (np.sqrt(1 + r_drag) + np.sqrt(r_drag + r_equality)) / (1 + np.sqrt(r_equality))
    horizon = 2 / (3 * k_equality) * np.sqrt(6 / r_equality) * np.log(ratio)
    k_silk = 1.6 * baryons**0.52 * matter**0.73 * (1 + (10.4 * matter) ** -0.95)
    # Equations 10 to 12, 17 and 18: cold matter.
    a1 = (46.9 * matter) ** 0.67 * (1 + (32.1 * matter) ** -0.532)
    a2 = (12 * matter) ** 0.424 * (1 + (45 * matter) ** -0.582)
    alpha_c = a1**-share * a2 ** -(share**3)
    c1 = 0.944 / (1 + (458 * matter) ** -0.708)
    c2 = (0.395 * matter) ** -0.0266
    beta_c = 1 / (1 + c1 * ((1 - share) ** c2 - 1))
    q = k / (13.41 * k_equality)
    mixed = 1 / (1 + (k * horizon / 5.4) ** 4)
    cold = mixed * _pressureless(q, 1, beta_c) + (1 - mixed) * _pressureless(q, alpha_c, beta_c)
    # Equations 14, 15 and 21 to 24: baryons.
    y = (1 + z_equality) / (1 + z_drag)
    root = np.sqrt(1 + y)
    g = y * (-6 * root + (2 + 3 * y) * np.log((root + 1) / (root - 1)))
    alpha_b = 2.07 * k_equality * horizon * (1 + r_drag) ** -0.75 * g
    beta_b = 0.5 + share + (3 - 2 * share) * np.sqrt((17.2 * matter) ** 2 + 1)
    node = 8.41 * matter**0.435
    ks = k * horizon
    shifted = ks / np.cbrt(1 + (node / ks) ** 3)
    damped = alpha_b / (1 + (beta_b / ks) ** 3) * np.exp(-((k / k_silk) ** 1.4))
    # numpy's sinc(x) is sin(pi x) / (pi x).
    wave = np.sinc(shifted / np.pi)
    wet = (_pressureless(q, 1, 1) / (1 + (ks / 5.2) ** 2) + damped) * wave
    result: Array = share * wet + (1 - share) * cold
    return result


def _pressureless(q: Array, alpha: float, beta: float) -> Array:
    """Equations 19 and 20."""
    log = np.log(np.e + 1.8 * beta * q)
    c = 14.2 / alpha + 386 / (1 + 69.9 * q**1.08)
    result: Array = log / (log + c * q**2)
    return result


def power(k: Array, universe: Cosmology) -> Array:
    """Linear P(k) today, in (Mpc/h)^3."""
    # sigma_8 is by definition the deviation in spheres of 8 Mpc/h.
    amplitude = universe.sigma_8**2 / _variance(universe, 8.0)
    return amplitude * _shape(k, universe)


def _shape(k: Array, universe: Cosmology) -> Array:
    result: Array = k**universe.n_s * transfer(k, universe) ** 2
    return result


def _variance(universe: Cosmology, radius: float) -> float:
    log_k = np.linspace(np.log(1e-5), np.log(50.0), 2048)
    k = np.exp(log_k)
    x = k * radius
    window = 3 * (np.sin(x) - x * np.cos(x)) / x**3
    # One power of k more than in the integral over k, because this one is over log k.
    each = k**3 * _shape(k, universe) * window**2 / (2 * np.pi**2)
    return float(np.sum((each[1:] + each[:-1]) * np.diff(log_k)) / 2)


def growth(redshift: float, universe: Cosmology) -> float:
    """D(z) / D(0) of linear perturbations: D ~ H(a) times the integral of da / (a H)^3."""
    points, weights = np.polynomial.legendre.leggauss(32)

    def unscaled(a: float) -> float:
        # a' = a t^2, after which the integrand is smooth at 0.
        t = (points + 1) / 2
        inner = a * t**2
        hubble_2 = universe.omega_m * inner**-3 + 1 - universe.omega_m
        integrand = 2 * a * t / (inner**2 * hubble_2) ** 1.5
        hubble = np.sqrt(universe.omega_m * a**-3 + 1 - universe.omega_m)
        return float(hubble * np.sum(weights * integrand) / 2)

    return unscaled(1 / (1 + redshift)) / unscaled(1.0)


def white_noise(seed: int, sample: int, width: int) -> Array:
    """Independent normal numbers [W, W, W]; each plane has a stream of its own."""
    planes = [_stream(seed, sample, 2, z).standard_normal((width, width)) for z in range(width)]
    return np.stack(planes)


def _stream(seed: int, sample: int, kind: int, number: int) -> np.random.Generator:
    """Counter-based: the key is the sample, the upper words of the counter say what is drawn."""
    return np.random.Generator(np.random.Philox(key=[seed, sample], counter=[0, 0, number, kind]))


@dataclass(frozen=True)
class PeriodicBox:
    """A periodic cube of `width` cells of `cell` Mpc/h along each side."""

    width: int
    cell: float = CELL

    def waves(self) -> tuple[Array, Array, Array]:
        """k along the three dimensions, to be broadcast, as `rfftn` orders them."""
        full = 2 * np.pi * np.fft.fftfreq(self.width, self.cell).astype(np.float64)
        half = 2 * np.pi * np.fft.rfftfreq(self.width, self.cell).astype(np.float64)
        return full[:, None, None], full[None, :, None], half[None, None, :]

    def square(self) -> Array:
        """k^2; 1 where k is 0, which carries nothing."""
        square: Array = sum((k**2 for k in self.waves()), start=np.zeros(()))
        square[0, 0, 0] = 1.0  # a divisor; the mean itself is set to 0
        return square

    def linear(self, noise: Array, universe: Cosmology) -> NDArray[np.complex128]:
        """delta_k today, of white noise [W, W, W]."""
        volume = (self.width * self.cell) ** 3
        # A mode of the noise has variance W^3 in numpy's unnormalised transform, one of the field P
        # W^6 / volume.
        scale = np.sqrt(power(np.sqrt(self.square()), universe) * self.width**3 / volume)
        delta: NDArray[np.complex128] = np.fft.rfftn(noise) * scale
        delta[0, 0, 0] = 0
        return delta

    def displacement(self, delta: NDArray[np.complex128]) -> Array:
        """psi = i k delta_k / k^2 [3, W, W, W]: minus its divergence is delta."""
        waves, square = self.waves(), self.square()
        parts = []
        for k in waves:
            # The highest wave of an even width has no direction.
            odd = np.where(np.abs(k) > (1 - 1e-9) * np.pi / self.cell, 0, k)
            parts.append(_back(1j * odd * delta / square, self.width))
        return np.stack(parts)

    def second_order(self, delta: NDArray[np.complex128]) -> NDArray[np.complex128]:
        """The source of the second-order potential: sum of phi,ii phi,jj - phi,ij^2 over i < j."""
        waves, square = self.waves(), self.square()

        def second(i: int, j: int) -> Array:
            return _back(waves[i] * waves[j] * delta / square, self.width)

        diagonal = [second(i, i) for i in range(3)]
        pairs = ((0, 1), (0, 2), (1, 2))
        source = sum(
            (diagonal[i] * diagonal[j] - second(i, j) ** 2 for i, j in pairs),
            start=np.zeros(()),
        )
        found: NDArray[np.complex128] = np.fft.rfftn(source)
        found[0, 0, 0] = 0
        return found


def _back(spectrum: NDArray[np.complex128], width: int) -> Array:
    return np.fft.irfftn(spectrum, s=(width, width, width), axes=(0, 1, 2))


def deposit(places: Array, width: int) -> Array:
    """Particles at `places` [3, ...], in cells, shared among the eight cells around each.

    Returns:
        Mass of each cell [W, W, W]; the sum is exactly the number of particles.
    """
    steps = np.rint(places.reshape(3, -1) * SUBCELLS).astype(np.int64)
    cells, rest = np.divmod(steps, SUBCELLS)
    beside = (cells % width, (cells + 1) % width)
    # Whole numbers below 2^53 in float64: sums are exact.
    shares = (SUBCELLS - rest.astype(np.float64), rest.astype(np.float64))
    mass = np.zeros(width**3)
    for i, j in np.ndindex(2, 2):
        column = (beside[i][0] * width + beside[j][1]) * width
        weight = shares[i][0] * shares[j][1]
        for k in range(2):
            mass += np.bincount(column + beside[k][2], weight * shares[k][2], width**3)
    return mass.reshape(width, width, width) / SUBCELLS**3


def matter(
    seed: int, sample: int, box: PeriodicBox, *, order: Literal[1, 2] = 1
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """A universe and its parameters.

    Args:
        order: 1: Zel'dovich; 2: second-order Lagrangian theory.

    Returns:
        Mass of each cell in units of the mean [4, W, W, W], at redshifts 0, 0.5, 1.5 and 3; and
        the parameters Omega_m, sigma_8, n_s and h, each scaled to [-1, 1].
    """
    universe = draw(seed, sample)
    delta = box.linear(white_noise(seed, sample, box.width), universe)
    first = box.displacement(delta) / box.cell
    # x = q + D psi + 3/7 D^2 Omega_m^(-1/143) psi_2 (Bouchet et al. 1995).
    second = box.displacement(box.second_order(delta)) / box.cell if order == 2 else None
    lattice: Any = np.indices((box.width,) * 3, dtype=np.float64)
    found = []
    for redshift in REDSHIFTS:
        rate = growth(redshift, universe)
        places = lattice + rate * first
        if second is not None:
            omega = _omega(redshift, universe)
            places = places + 3 / 7 * rate**2 * omega ** (-1 / 143) * second
        found.append(deposit(places, box.width).astype(np.float32))
    return np.stack(found), unit_parameters(universe)


def _omega(redshift: float, universe: Cosmology) -> float:
    matter_then = universe.omega_m * (1 + redshift) ** 3
    return matter_then / (matter_then + 1 - universe.omega_m)


FULL = "full"
UNIT_PARAMETERS = "unitPar"
KEPT = 512 * 2**20
"""Bytes of universes that a rank keeps in memory; others are made again."""

Float = NDArray[np.float32]
Pair = tuple[Tensor, Tensor]


def prepared(parts: tuple[Tensor, ...]) -> Pair:
    """Matter and parameters of a batch, as in files, as the model takes them."""
    cubes, targets = parts
    return torch.log1p(cubes.float()), targets.float()


class Universes:
    """Universes of `matter`; the first ones are kept in memory."""

    def __init__(
        self,
        count: int,
        width: int,
        *,
        first: int = 0,
        seed: int = 0,
        cell: float = CELL,
        order: Literal[1, 2] = 1,
    ) -> None:
        self.count, self.first, self.seed = count, first, seed
        self.box, self.order = PeriodicBox(width, cell), order
        self._made: dict[int, tuple[Float, Float]] = {}

    def __len__(self) -> int:
        return self.count

    def read(self, indices: Sequence[int]) -> Pair:
        """The samples as one batch: [N, 4, W, W, W] and [N, 4]."""
        cubes, targets = zip(*(self.universe(int(index)) for index in indices), strict=True)
        return prepared((torch.from_numpy(np.stack(cubes)), torch.from_numpy(np.stack(targets))))

    def universe(self, sample: int) -> tuple[Float, Float]:
        """Matter [4, W, W, W] and parameters [4]."""
        made = self._made.get(sample)
        if made is None:
            made = matter(self.seed, self.first + sample, self.box, order=self.order)
            if len(self._made) * made[0].nbytes < KEPT:  # the first ones stay: none is evicted
                self._made[sample] = made
        return made


class RotatedUniverses:
    """Universes seen from elsewhere: none has a middle or a direction, and all are periodic.

    Each sample is turned, mirrored and shifted at random, anew in each epoch.
    """

    def __init__(self, universes: Universes) -> None:
        self._universes = universes

    def __len__(self) -> int:
        return len(self._universes)

    def read(self, indices: Sequence[int]) -> Pair:
        return self._universes.read(indices)

    def read_seeded(self, indices: Sequence[int], seeds: Sequence[int]) -> Pair:
        """The samples, each turned as its seed says."""
        cubes, targets = self._universes.read(indices)
        draws = map(np.random.default_rng, seeds)
        return torch.stack([_rotated(c, d) for c, d in zip(cubes, draws, strict=True)]), targets


def _rotated(cube: Tensor, draw: np.random.Generator) -> Tensor:
    order = (1 + draw.permutation(3)).tolist()
    mirrored = (1 + np.flatnonzero(draw.integers(0, 2, 3))).tolist()
    shifts = draw.integers(0, cube.shape[-1], 3).tolist()
    return cube.permute(0, *order).flip(mirrored).roll(shifts, (1, 2, 3))


def source(
    split: Literal["train", "validation"],
    *,
    width: int,
    count: int,
    directory: str | Path | None = None,
    seed: int = 0,
    order: Literal[1, 2] = 1,
) -> Source:
    """Training or validation samples.

    Args:
        split: Validation universes have other numbers, or lie in another folder; those of training
            that are made are `RotatedUniverses`.
        directory: Folder with the folders `train` and `validation`, see `slabs_in`; None: made
            here.

    Raises:
        DataError: There are no such files.
        MissingExtra: h5py is not installed.
    """
    if directory is not None:
        readers = slabs_in(Path(directory) / split, FULL, UNIT_PARAMETERS)
        return SlabSource(*readers, finish=prepared)
    first = 0 if split == "train" else 1 << 32
    made = Universes(count, width, first=first, seed=seed, order=order)
    return RotatedUniverses(made) if split == "train" else made


LAST_WIDTH = 4
SLOPE = 0.3
OUTPUT_RANGE = 1.2
"""The output is 1.2 tanh(x): targets of -1 and 1 are reached by finite x."""

FIRST_OUTPUT = 0.3
"""Deviation of what goes into tanh at first: it learns nothing far from 0."""

Pooling = Literal["average", "max"]


@dataclass(frozen=True, kw_only=True)
class CosmoFlowConfig:
    """The sizes of a model; `lbann`, `mlperf` and `small` make the usual ones.

    Attributes:
        width: Entries along each side of the cube: a power of two, at least 8.
        channels: Of the first block; each further block has twice as many.
        pooling: "average" (3, stride 2, padding 1) or "max" (2).
        hidden: Outputs of the two hidden layers behind the blocks.
        batch_norm: Normalise behind each convolution, which then has no bias.
        dropout: Share of the hidden layers' outputs that is dropped in training.

    Raises:
        ValueError: A size is none of these, or `dropout` is outside [0, 1).
    """

    width: int
    channels: int
    most_channels: int
    pooling: Pooling
    hidden: tuple[int, int]
    batch_norm: bool = False
    dropout: float = 0.5

    def __post_init__(self) -> None:
        if self.width < 2 * LAST_WIDTH or self.width & (self.width - 1):
            raise ValueError(f"width is {self.width}; it must be a power of two, at least 8")
        for name in ("channels", "most_channels"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if min(self.hidden) < 1:
            raise ValueError(f"hidden is {self.hidden}; layers have at least one output")
        if self.pooling not in ("average", "max"):
            raise ValueError(f"pooling is {self.pooling!r}; it must be 'average' or 'max'")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout is {self.dropout}; it must be at least 0 and below 1")

    @property
    def features(self) -> tuple[int, ...]:
        """Channels of each of the log2(width) - 2 blocks."""
        blocks = self.width.bit_length() - 1 - 2
        return tuple(min(self.channels << i, self.most_channels) for i in range(blocks))


def lbann(width: int, *, batch_norm: bool = False) -> CosmoFlowConfig:
    """LBANN's variant: 16 to 256 channels, average pooling, layers of 2048 and 256."""
    return CosmoFlowConfig(
        width=width,
        channels=16,
        most_channels=256,
        pooling="average",
        hidden=(2048, 256),
        batch_norm=batch_norm,
    )


def mlperf(width: int) -> CosmoFlowConfig:
    """MLPerf HPC's variant: 32 to 512 channels, maxima, layers of 128 and 64."""
    return CosmoFlowConfig(
        width=width, channels=32, most_channels=512, pooling="max", hidden=(128, 64)
    )


def small(width: int = 32, *, dropout: float = 0.0) -> CosmoFlowConfig:
    """LBANN's blocks with MLPerf's small layers: trains on a CPU."""
    return CosmoFlowConfig(
        width=width,
        channels=16,
        most_channels=256,
        pooling="average",
        hidden=(128, 64),
        dropout=dropout,
    )


class CosmoFlowBlock(nn.Sequential):
    """Convolution 3^3, perhaps a norm, LeakyReLU, pooling: half the width."""

    def __init__(self, entering: int, leaving: int, config: CosmoFlowConfig) -> None:
        layers: list[nn.Module] = [
            nn.Conv3d(entering, leaving, 3, padding=1, bias=not config.batch_norm)
        ]
        if config.batch_norm:
            layers.append(nn.BatchNorm3d(leaving, momentum=0.01))
        layers.append(nn.LeakyReLU(SLOPE))
        average = config.pooling == "average"
        layers.append(nn.AvgPool3d(3, stride=2, padding=1) if average else nn.MaxPool3d(2))
        super().__init__(*layers)


class CosmoFlow(nn.Module):
    """Blocks, then three layers over what is left of the cube."""

    def __init__(self, config: CosmoFlowConfig) -> None:
        super().__init__()
        self.config = config
        channels = (len(REDSHIFTS), *config.features)
        self.blocks = nn.Sequential(*(CosmoFlowBlock(a, b, config) for a, b in pairwise(channels)))
        first, second = config.hidden
        self.head = nn.Sequential(
            nn.Linear(channels[-1] * LAST_WIDTH**3, first),
            nn.LeakyReLU(SLOPE),
            nn.Dropout(config.dropout),
            nn.Linear(first, second),
            nn.LeakyReLU(SLOPE),
            nn.Dropout(config.dropout),
            nn.Linear(second, len(RANGES)),
        )
        initialise(self)

    def forward(self, x_NCDHW: Tensor) -> Tensor:
        """Parameters, scaled as their targets.

        Args:
            x_NCDHW: log(1 + matter) at the four redshifts, `width` entries along each side.

        Returns:
            y_NP: in (-1.2, 1.2).

        Raises:
            ValueError: The cube has another shape.
        """
        shape, width = tuple(x_NCDHW.shape[1:]), self.config.width
        if shape != (len(REDSHIFTS), width, width, width):
            raise ValueError(f"samples of shape {shape} do not fit a cube of {width}^3 x 4")
        hidden = self.head(self.blocks(x_NCDHW).flatten(1))
        y_NP: Tensor = OUTPUT_RANGE * torch.tanh(hidden)
        return y_NP


@torch.no_grad()
def fit(model: CosmoFlow, x_NCDHW: Tensor) -> None:
    """Shift and scale the initial weights: results of each layer get mean 0 and deviation 1.

    Universes differ by a few percent, so that He's initial weights give results of which nearly all
    is common to all samples, and gradients that are nearly all noise about it: for hundreds of
    steps nothing is learned. Layer by layer, over samples and places, as Krähenbühl et al. 2016,
    "Data-dependent Initializations of Convolutional Neural Networks", section 3.1; the last layer
    gets deviation `FIRST_OUTPUT`.

    Args:
        model: Without batch normalisation, which does this in every step. Not on the meta device.
    """
    x, training = x_NCDHW, model.training
    model.eval()  # without dropout, which would add its noise to the deviations
    blocks = (layer for block in model.blocks for layer in block.children())
    for layer in (*blocks, nn.Flatten(), *model.head):
        if isinstance(layer, nn.Conv3d | nn.Linear):
            assert layer.bias is not None
            y = layer(x).transpose(0, 1).flatten(1)
            deviation = y.std(dim=1)
            wanted = FIRST_OUTPUT if layer is model.head[-1] else 1.0
            scale = torch.where(deviation > 0, wanted / deviation, 1.0)
            layer.weight.mul_(scale.view(-1, *(1,) * (layer.weight.ndim - 1)))
            # The result becomes scale (W x + b - mean).
            layer.bias.sub_(y.mean(dim=1)).mul_(scale)
        x = layer(x)
    model.train(training)


def initialise(model: nn.Module) -> None:
    """Weights normal with variance 2 / inputs of a sum (He et al. 2015, eq. 10), biases 0."""
    for module in model.modules():
        if isinstance(module, nn.Conv3d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


NAMES = ("Omega_m", "sigma_8", "n_s", "h")
FITTED = 32
Variant = Literal["small", "lbann", "mlperf"]


def recipe(
    *,
    variant: Variant = "small",
    width: int = 32,
    dropout: float | None = None,
    batch_norm: bool = False,
    samples: int = 240,
    validation_samples: int = 64,
    batch: int = 16,
    steps: int = 100,
    learning_rate: float = 1e-3,
    order: Literal[1, 2] = 1,
    fitted: int | None = None,
    seed: int = 0,
    directory: str | Path | None = None,
) -> Recipe:
    """A regression of Omega_m, sigma_8, n_s and h.

    Args:
        dropout: None: the variant's, which is none for "small".
        batch_norm: Batch normalisation, which depends on how a batch is split into micro-batches.
        learning_rate: Adam's at its height: it rises for a tenth of the steps, then falls as a
            cosine.
        fitted: Further universes, made for that, on which the initial weights are fitted (`fit`);
            0: they are He's. None: 32 for "small" where universes are made, else 0: a process may
            have no room for a whole one.
        seed: Decides initial parameters, order and universes.
        directory: Folder with `train` and `validation`, folders of files, in place of universes
            that are made.

    Raises:
        RecipeError: The sizes do not make a model.
    """
    config = _config(variant, width, dropout, batch_norm)
    if fitted is None:
        fitted = FITTED if variant == "small" and directory is None and not batch_norm else 0
    if fitted and batch_norm:
        raise RecipeError(
            "fitted initial weights with batch normalisation",
            why="It does in every step what they do once.",
            fix="Set arguments.fitted=0.",
        )
    # Numbers of their own: training counts from 0, validation from 1 << 32.
    universes = partial(Universes, fitted, width, first=2 << 32, seed=seed, order=order)
    data = partial(source, width=width, directory=directory, seed=seed, order=order)
    validation = partial(data, "validation", count=validation_samples)
    made = f"universes of order {order}, made from seed {seed}" if directory is None else directory
    return Recipe(
        name=f"cosmoflow {variant} {width}^3 on {made}",
        model=partial(build, config, universes if fitted else None),
        data=partial(data, "train", count=samples),
        validation=validation,
        loss=criterion(nn.MSELoss()),
        optimizer=partial(adam, learning_rate=learning_rate),
        scheduler=partial(warmup_then_cosine, steps=steps),
        batch=batch,
        stop=f"{steps} steps",
        seed=seed,
        validate_every=max(1, steps // 4),
        showcase=partial(errors, validation),
    )


def build(config: CosmoFlowConfig, universes: Callable[[], Universes] | None) -> CosmoFlow:
    """The model, with initial weights fitted on universes where they are given."""
    model = CosmoFlow(config)
    # On the meta device, where plans are made, there are no values to fit.
    if universes is not None and not next(model.parameters()).is_meta:
        samples = universes()
        fit(model, samples.read(range(len(samples)))[0])
    return model


def _config(variant: str, width: int, dropout: float | None, batch_norm: bool) -> CosmoFlowConfig:
    variants: dict[str, Callable[[int], CosmoFlowConfig]] = {
        "small": small,
        "lbann": lbann,
        "mlperf": mlperf,
    }
    if variant not in variants:
        raise RecipeError(f"no variant {variant!r}", fix=f"choose one of {', '.join(variants)}")
    try:
        config = replace(variants[variant](width), batch_norm=batch_norm)
        return config if dropout is None else replace(config, dropout=dropout)
    except ValueError as error:
        raise RecipeError("the sizes do not make a CosmoFlow", why=str(error)) from error


def adam(model: nn.Module, *, learning_rate: float) -> Optimizer:
    return Adam(model.parameters(), lr=learning_rate)


@torch.no_grad()
def errors(data: Callable[[], Source], model: nn.Module) -> str:
    """Of each parameter the mean absolute error, that of saying the mean, and R^2."""
    samples, like = data(), next(model.parameters())
    said, targets = [], []
    for index in range(len(samples)):
        cube, target = samples.read([index])
        said.append(model(cube.to(device=like.device, dtype=like.dtype)).float().cpu())
        targets.append(target)
    left, spread = torch.cat(said) - torch.cat(targets), torch.cat(targets)
    spread = spread - spread.mean(dim=0)
    explained = 1 - left.square().sum(dim=0) / spread.square().sum(dim=0)
    figures = torch.stack((left.abs().mean(dim=0), spread.abs().mean(dim=0), explained), dim=1)
    lines = [
        f"{name:8} {error:.3f}   ({mean:.3f} of saying the mean; R^2 {share:5.2f})"
        for name, (error, mean, share) in zip(NAMES, figures.tolist(), strict=True)
    ]
    return "\n".join(["mean absolute error, parameters scaled to [-1, 1]", *lines])
