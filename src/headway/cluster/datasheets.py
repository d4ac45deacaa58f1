"""Datasheets of common devices, by name.

Every number is the vendor's, for dense matrices, and the sheet is cited; where there is none, the
source says so. Which share of it programs
reach is an assumption of the cost model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headway.cluster.link import Link
from headway.cluster.memory_tier import MemoryTier

GIB = 2.0**30


@dataclass(frozen=True, kw_only=True)
class Datasheet:
    """Of a datasheet.

    Attributes:
        peak: FLOP/s, dense, by number format.
        memory: Bytes.
        memory_rate: Bytes/s.
        link_rate: Bytes/s to the other devices of a node, in each direction.
        tiers: Memory behind its own.
    """

    peak: Mapping[str, float]
    memory: float
    memory_rate: float
    link_rate: float
    source: str
    tiers: tuple[MemoryTier, ...] = ()


# Facebook's Zion (Smelyanskiy, Hot Chips 31, 2019) as we remember it: no sheet is at hand, and the
# figures are orders of magnitude. Eight accelerators with 8 TB/s of HBM together; eight sockets
# with 2 TB of DDR at 1 TB/s together; PCIe between the two. The drives are assumed.
_ZION = "from memory, orders of magnitude: Zion (Hot Chips 31, 2019)"
_ZION_TIERS = (
    MemoryTier(
        name="DRAM", memory=256 * GIB, rate=128e9, link=Link(rate=12e9, latency=10e-6), source=_ZION
    ),
    MemoryTier(
        name="NVMe", memory=1024 * GIB, rate=3e9, link=Link(rate=3e9, latency=100e-6), mapped=True,
        source="assumed: one drive of 1 TiB, mapped",
    ),
)  # fmt: skip
_A100 = {"fp64": 9.7e12, "fp32": 19.5e12, "tf32": 156e12, "fp16": 312e12, "bf16": 312e12}
_V100 = {"fp64": 7.8e12, "fp32": 15.7e12, "fp16": 125e12}

DATASHEETS: Mapping[str, Datasheet] = {
    "p100": Datasheet(
        peak={"fp64": 5.3e12, "fp32": 10.6e12, "fp16": 21.2e12},
        memory=16 * GIB,
        memory_rate=732e9,
        link_rate=80e9,
        source="NVIDIA Tesla P100 datasheet (SXM2, 16 GB; NVLink 160 GB/s both ways)",
    ),
    "v100-16gb": Datasheet(
        peak=_V100,
        memory=16 * GIB,
        memory_rate=900e9,
        link_rate=150e9,
        source="NVIDIA V100 datasheet (SXM2, 16 GB; NVLink 300 GB/s both ways)",
    ),
    "v100-32gb": Datasheet(
        peak=_V100,
        memory=32 * GIB,
        memory_rate=900e9,
        link_rate=150e9,
        source="NVIDIA V100 datasheet (SXM2, 32 GB; NVLink 300 GB/s both ways)",
    ),
    "t4": Datasheet(
        peak={"fp32": 8.1e12, "fp16": 65e12},
        memory=16 * GIB,
        memory_rate=300e9,
        link_rate=16e9,
        source="NVIDIA T4 datasheet (PCIe 3.0 x16, 32 GB/s both ways)",
    ),
    "a100-40gb": Datasheet(
        peak=_A100,
        memory=40 * GIB,
        memory_rate=1555e9,
        link_rate=300e9,
        source="NVIDIA A100 40GB datasheet (SXM; NVLink 600 GB/s both ways)",
    ),
    "a100-80gb": Datasheet(
        peak=_A100,
        memory=80 * GIB,
        memory_rate=2039e9,
        link_rate=300e9,
        source="NVIDIA A100 80GB datasheet (SXM; NVLink 600 GB/s both ways)",
    ),
    "h100": Datasheet(
        peak={"fp32": 67e12, "tf32": 494.5e12, "fp16": 989e12, "bf16": 989e12, "fp8": 1979e12},
        memory=80 * GIB,
        memory_rate=3350e9,
        link_rate=450e9,
        source="NVIDIA H100 datasheet (SXM; dense: half of what it says with sparsity)",
    ),
    "rtx-4090": Datasheet(
        peak={"fp32": 82.6e12, "tf32": 82.6e12, "fp16": 165.2e12, "bf16": 165.2e12},
        memory=24 * GIB,
        memory_rate=1008e9,
        link_rate=32e9,
        source=(
            "NVIDIA Ada architecture white paper (RTX 4090; dense, summed in 32 bits; PCIe 4.0 "
            "x16, 64 GB/s both ways, no NVLink)"
        ),
    ),
    "zion": Datasheet(
        peak={"fp32": 15e12, "fp16": 100e12},
        memory=32 * GIB,
        memory_rate=1000e9,
        link_rate=50e9,
        source=f"{_ZION}; peaks and links assumed",
        tiers=_ZION_TIERS,
    ),
    "xeon-8380": Datasheet(
        peak={"fp64": 2.94e12, "fp32": 5.89e12},
        memory=256 * GIB,
        memory_rate=204.8e9,
        link_rate=6e9,
        source=(
            "Intel Xeon Platinum 8380, one socket: 40 cores x 2 AVX-512 FMA units x base clock of "
            "2.3 GHz, eight channels of DDR4-3200; memory of 256 GiB and 6 GB/s over the loopback "
            "are assumed"
        ),
    ),
}
DATASHEET_ALIASES: Mapping[str, str] = {"a100": "a100-80gb", "v100": "v100-32gb"}
"""Names without a size mean the larger one."""


def has_datasheet(name: str) -> bool:
    """Whether `datasheet_of` knows a device."""
    return name in DATASHEETS or name in DATASHEET_ALIASES


def datasheet_of(name: str) -> Datasheet:
    """A device's datasheet.

    Raises:
        KeyError: There is none.
    """
    return DATASHEETS[DATASHEET_ALIASES.get(name, name)]
