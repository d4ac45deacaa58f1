"""Universes for CosmoFlow, from first principles: matter at four redshifts, and what made it.

A sample draws four parameters and a field of white noise, gives the noise the linear power spectrum
(Eisenstein and Hu 1998, "Baryonic Features in the Matter Transfer Function", normalised to
sigma_8), moves particles by the Zel'dovich approximation or second-order Lagrangian theory, and
counts them in cells. Such fields are cheap, and unlike those of an N-body code where paths of
particles have crossed.

Sample s of seed t is a function of (t, s) alone, plane by plane of its noise (counter-based
generator), so that every rank makes the same universe. Lengths are in Mpc/h, k in h/Mpc.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

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
        omega_b: Share of baryons.
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
    amplitude = universe.sigma_8**2 / _variance(universe, 8.0)
    return amplitude * _shape(k, universe)


def _shape(k: Array, universe: Cosmology) -> Array:
    result: Array = k**universe.n_s * transfer(k, universe) ** 2
    return result


def _variance(universe: Cosmology, radius: float) -> float:
    """Of the density in spheres, with the spectrum k^n T^2."""
    log_k = np.linspace(np.log(1e-5), np.log(50.0), 2048)
    k = np.exp(log_k)
    x = k * radius
    window = 3 * (np.sin(x) - x * np.cos(x)) / x**3
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
        square[0, 0, 0] = 1.0
        return square

    def linear(self, noise: Array, universe: Cosmology) -> NDArray[np.complex128]:
        """delta_k today, of white noise [W, W, W]."""
        volume = (self.width * self.cell) ** 3
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
        seed: Of all samples.
        box: Its cells; one particle for each.
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
    """Share of matter at a redshift."""
    matter_then = universe.omega_m * (1 + redshift) ** 3
    return matter_then / (matter_then + 1 - universe.omega_m)
