"""How many devices and parameter servers pay off: two lemmas (Zou et al. 2017).

Source: "Distributed Training Large-Scale Deep Architectures", Lemma 1 and Lemma 2, and the
memory bound of its section on the minibatch. T_C is the compute time of an iteration on one
device, T_O the time that does not shrink with their number, R_O = T_O / T_C, alpha the
efficiency.
"""

from __future__ import annotations

import math

# A quotient this close below a whole number is that number.
_ROUNDING = 1e-9


def efficiency(overhead: float, devices: float) -> float:
    """alpha = (1 + R_O) / (1 + G R_O) for R_O >= 0 and G >= 1.

    Raises:
        ValueError: A number is out of its range.
    """
    _check_overhead(overhead)
    if devices < 1:
        raise ValueError(f"{devices:g} devices; at least 1")
    return (1 + overhead) / (1 + devices * overhead)


def speed_up(overhead: float, devices: float) -> float:
    """G alpha: how many times faster than one device."""
    return devices * efficiency(overhead, devices)


def ceiling(overhead: float) -> float:
    """(1 + R_O) / R_O, which no number of devices exceeds; infinite without overhead."""
    _check_overhead(overhead)
    return (1 + overhead) / overhead if overhead else math.inf


def most_devices(overhead: float, wanted: float) -> float:
    """G_max(alpha) = floor(((1 + R_O) / alpha - 1) / R_O); infinite without overhead.

    Args:
        wanted: Efficiency, above 0 and at most 1.
    """
    _check_overhead(overhead)
    if not 0 < wanted <= 1:
        raise ValueError(f"an efficiency of {wanted:g}; above 0 and at most 1 is possible")
    if not overhead:
        return math.inf
    return math.floor(((1 + overhead) / wanted - 1) / overhead * (1 + _ROUNDING))


def allowed_overhead(devices: float, wanted: float) -> float:
    """R_O = (1 - alpha) / (G alpha - 1), at which so many devices reach the efficiency.

    Infinite where alpha is at most 1 / G, which any overhead reaches.
    """
    if not 0 < wanted <= 1 or devices < 1:
        raise ValueError(f"{devices:g} devices with an efficiency of {wanted:g} are impossible")
    beyond = devices * wanted - 1
    return (1 - wanted) / beyond if beyond > 0 else math.inf


def parameter_servers(
    num_bytes: float, workers: int, rate: float, seconds: float
) -> tuple[int, float]:
    """N_ps = ceil(2 S_p N_w / (B_ps T_C)), at least 1, and the quotient before rounding: servers
    that hide their traffic behind the compute.

    Args:
        num_bytes: S_p, of the parameters.
        workers: N_w, each of which sends gradients and fetches weights once in a round.
        rate: B_ps, bytes/s of one server.
        seconds: T_C, compute time of a round.

    Raises:
        ValueError: A number is not positive.
    """
    if not (num_bytes > 0 and workers > 0 and rate > 0 and seconds > 0):
        raise ValueError(f"{num_bytes=:g}, {workers=}, {rate=:g}, {seconds=:g}: all positive")
    exact = 2 * num_bytes * workers / (rate * seconds)
    return max(1, math.ceil(exact * (1 - _ROUNDING))), exact


def _check_overhead(overhead: float) -> None:
    if not overhead >= 0:
        raise ValueError(f"an overhead of {overhead:g} times the compute; at least 0")
