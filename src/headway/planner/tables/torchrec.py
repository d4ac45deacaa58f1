"""TorchRec's own cost model of sharded tables: its formulas, constants and rules, as a problem.

For comparison with its planner (TorchRec 1.8, `EmbeddingPerfEstimator` and
`EmbeddingStorageEstimator` with their defaults), and for users who know its figures. Times are in
milliseconds, rates in bytes per millisecond, as there. Two of its forms are left out: columns that
do not divide evenly, and more ranges of columns than ranks.

Sources: github.com/pytorch/torchrec, torchrec/distributed/planner (BSD-3-Clause), read, not copied;
Ivchenko et al., RecSys 2022.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from headway.documents import document
from headway.planner.tables.choices import Form, Option, PlacementProblem
from headway.planner.tables.demand import TableDemand

_GIB_MS = 2**30 / 1000
"""GiB/s in bytes per millisecond."""
KERNELS = ("dense", "fused", "fused_uvm", "fused_uvm_caching")
BLOCK, HALF_BLOCK_PENALTY, QUARTER_BLOCK_PENALTY = 128, 1.15, 1.75
"""Columns that fill a block of a kernel, and what takes longer below that and below its half."""
LEAST_COLUMNS = 32
VECTOR = 4
"""Columns that a kernel reads at once."""
BATCHED_COPY, ELEMENTWISE = 2.455, 9.22
"""Passes over a gradient that is copied in parts, and over a table by its optimiser."""
BACKWARD, WEIGHTED = 2.0, 1.1
"""Times the forward pass."""
CACHED = 0.2
"""Share of a table that a cache in the device holds."""
CACHE_ROW, CACHE_SLOT = 4, 16
"""Bytes beside each row, and each cached row."""
TIERS = ("hbm", "ddr")


@document
class Topology:
    """What TorchRec's planner knows of a machine, with its defaults.

    Attributes:
        ranks: In all.
        local: Of a node.
        device: "cuda" or "cpu".
        batch: Samples of one rank.
        hbm: Bytes of one device.
        ddr: Bytes of the host for one device.
    """

    ranks: int
    local: int
    device: str = "cuda"
    batch: int = 512
    hbm: float = 32 * 2**30
    ddr: float = 128 * 2**30
    hbm_rate: float = 897 * _GIB_MS
    ddr_rate: float = 51 * _GIB_MS
    link_rate: float = 32 * _GIB_MS
    inside: float = 600 * _GIB_MS
    between: float = 12.5 * _GIB_MS

    def kernel_rate(self, kernel: str) -> float:
        """At which a kernel reads and writes tables."""
        if self.device == "cpu":
            return self.ddr_rate * (0.5 if kernel == "dense" else 1.0)
        cached = CACHED * self.hbm_rate + (1 - CACHED) * self.link_rate
        return {
            "dense": 0.5 * self.hbm_rate,
            "fused": self.hbm_rate,
            "fused_uvm": self.link_rate / 10,
            "fused_uvm_caching": cached / 10,
        }[kernel]

    def rate(self, ranks: int, local: int) -> float:
        """Of a collective of so many ranks, so many of them on each node."""
        return self.inside if ranks <= local else self.between


@document
class ShardCost:
    """Of one shard of a table, in milliseconds and bytes.

    Attributes:
        forward: Computing in the forward pass.
        sent: Communication in the forward pass.
        backward: Computing in the backward pass.
        returned: Communication in the backward pass.
        hbm: Bytes.
        ddr: Bytes.
    """

    forward: float
    sent: float
    backward: float
    returned: float
    hbm: int
    ddr: int

    @property
    def total(self) -> float:
        """As TorchRec's planner adds up the shards of a rank."""
        return self.forward + self.backward + self.sent + self.returned


def shard_cost(
    table: TableDemand,
    way: str,
    kernel: str,
    shape: tuple[int, int],
    topology: Topology,
    *,
    weighted: bool = False,
) -> ShardCost:
    """The estimate of one shard.

    Args:
        way: As TorchRec calls it: "data_parallel", "table_wise", "column_wise", "row_wise",
            "table_row_wise", "table_column_wise", "grid_shard".
        shape: Rows and columns of the shard.
        weighted: Whether lookups have weights.
    """
    times = _times(table, way, kernel, shape, topology, weighted)
    hbm, ddr = _storage(table, way, kernel, shape, topology)
    return ShardCost(
        forward=times[0], sent=times[1], backward=times[2], returned=times[3], hbm=hbm, ddr=ddr
    )


def _lookups(table: TableDemand, topology: Topology) -> tuple[float, float]:
    """Of one rank's samples: lookups, and vectors that come out."""
    inputs = table.bag * topology.batch
    return inputs, (min(1.0, table.bag) * topology.batch if table.pooled else inputs)


def _parts(way: str, topology: Topology) -> int:
    """Parts of the rows of a table."""
    if way == "row_wise":
        return topology.ranks
    return topology.local if way in ("table_row_wise", "grid_shard") else 1


def _times(
    table: TableDemand,
    way: str,
    kernel: str,
    shape: tuple[int, int],
    topology: Topology,
    weighted: bool,
) -> tuple[float, float, float, float]:
    rows, columns = shape
    inputs, outputs = _lookups(table, topology)
    rate, size = topology.kernel_rate(kernel), table.itemsize
    copies, parts = way == "data_parallel", _parts(way, topology)
    ranks = 1 if copies else topology.ranks
    whole = parts == 1 and not copies  # tables and columns: with a minimum, and blocks to fill
    read = math.ceil(inputs / parts * ranks * 8) * (2 if weighted else 1)
    wide = max(columns, LEAST_COLUMNS) if whole else columns
    looked_up = inputs / parts * ranks * wide * size
    written = (outputs if table.pooled else outputs / parts) * ranks * columns * size
    forward = (read + looked_up + written) * (_penalty(columns) if whole else 1.0) / rate
    backward = BACKWARD * forward + (WEIGHTED * forward if weighted else 0.0)
    if copies:
        return forward, 0.0, backward, _update_of_copies(rows * columns * size, rate, topology)
    if way in ("table_row_wise", "grid_shard"):
        sent = written / topology.rate(topology.local, topology.local)
        groups = max(1, topology.ranks // topology.local)
        if groups > 1:
            sent += outputs * groups * columns * size / topology.rate(groups, 1)
    else:
        sent = written / topology.rate(topology.ranks, topology.local)
    copied = 0.0 if whole else written * BATCHED_COPY / rate
    return forward, sent, backward, sent + copied


def _penalty(columns: int) -> float:
    if columns >= BLOCK:
        return 1.0
    return HALF_BLOCK_PENALTY if columns >= BLOCK / 2 else QUARTER_BLOCK_PENALTY


def _update_of_copies(size: float, rate: float, topology: Topology) -> float:
    """An all-reduce of the table's gradient, and the optimiser's passes over the table."""
    nodes = min(topology.ranks / topology.local, 2)
    reduced = size * (2 * nodes - 1) / nodes / (topology.between * topology.local)
    if topology.ranks > 2 * topology.local:
        reduced *= 2
    return reduced + size * ELEMENTWISE / rate


def _storage(
    table: TableDemand, way: str, kernel: str, shape: tuple[int, int], topology: Topology
) -> tuple[int, int]:
    rows, columns = shape
    inputs, outputs = _lookups(table, topology)
    parts = _parts(way, topology)
    ranks = 1 if way == "data_parallel" else topology.ranks
    if not rows * columns:
        read, written = 0, 0
    else:
        read = math.ceil(inputs / parts * ranks * 8)
        vectors = outputs if table.pooled else outputs / parts
        written = math.ceil(vectors * ranks * columns * table.itemsize)
    size = table.rows * table.columns * table.itemsize
    hosted = kernel in ("fused_uvm", "fused_uvm_caching")
    cached = kernel == "fused_uvm_caching"
    device = round(size * CACHED) if cached else 0 if hosted else size
    host = size if hosted else 0
    if topology.device == "cpu":
        return 0, read + written + _share(table, way, host or size, shape)
    extra = math.ceil(rows * (CACHE_ROW + CACHED * CACHE_SLOT)) if cached else 0
    own = _share(table, way, device, shape) + extra
    return own + read + written, _share(table, way, host, shape)


def _share(table: TableDemand, way: str, size: int, shape: tuple[int, int]) -> int:
    """Of a table's bytes, those of a shard, with the optimiser's."""
    own = size
    if way != "data_parallel":
        own = math.ceil(size * (shape[0] * shape[1]) / (table.rows * table.columns))
    state = table.element_state / table.itemsize + table.row_state / (
        table.columns * table.itemsize
    )
    return own + math.ceil(own * state)


def torchrec_problem(
    tables: Sequence[TableDemand], topology: Topology, *, least_columns: int | None = None
) -> PlacementProblem:
    """The same choice that TorchRec's planner has; its times count as seconds / 1000.

    Args:
        least_columns: Of a range of columns (`ParameterConstraints.min_partition`); None: 128.
    """
    room = np.array([[topology.hbm] * topology.ranks, [topology.ddr] * topology.ranks], dtype=float)
    return PlacementProblem(
        names=tuple(table.table for table in tables),
        options=tuple(tuple(_options(table, topology, least_columns)) for table in tables),
        tiers=TIERS,
        capacity=room,
    )


def _options(table: TableDemand, topology: Topology, least_columns: int | None) -> Iterator[Option]:
    every, shape = tuple(range(topology.ranks)), (table.rows, table.columns)
    kernels = KERNELS[1:] if topology.device == "cuda" else KERNELS[1:2]
    yield _option(table, "data_parallel", ("dense",), topology, every, [shape] * topology.ranks)
    yield _option(table, "table_wise", kernels, topology, every, [shape] * topology.ranks, 1)
    width = column_width(table.columns, least_columns)
    ranges = table.columns // width
    if 1 < ranges <= topology.ranks and ranges * width == table.columns:
        own = [(table.rows, width)] * topology.ranks
        yield _option(table, "column_wise", kernels, topology, every, own, ranges, columns=ranges)
    if topology.device == "cpu":
        return
    own = row_shards(table.rows, table.columns, topology.ranks)
    yield _option(table, "row_wise", kernels, topology, every, own, parts=topology.ranks)
    for first in range(0, topology.ranks, topology.local):
        node = every[first : first + topology.local]
        own = [(0, table.columns)] * topology.ranks
        own[first : first + topology.local] = row_shards(table.rows, table.columns, topology.local)
        yield _option(table, "table_row_wise", kernels, topology, node, own, parts=topology.local)


def column_width(columns: int, least: int | None) -> int:
    """Of a range of columns: the smallest that is large enough and divides the table's, else the
    whole."""
    widths = range(least or BLOCK, columns)
    return next((w for w in widths if columns % w == 0 and w % VECTOR == 0), columns)


def row_shards(rows: int, columns: int, parts: int) -> list[tuple[int, int]]:
    """As TorchRec deals rows: equal parts, a smaller one, and empty ones."""
    block = math.ceil(rows / parts)
    return [(max(0, min(block, rows - n * block)), columns) for n in range(parts)]


def _option(
    table: TableDemand,
    way: str,
    kernels: Sequence[str],
    topology: Topology,
    ranks: tuple[int, ...],
    shapes: Sequence[tuple[int, int]],
    pieces: int | None = None,
    *,
    columns: int = 1,
    parts: int = 1,
) -> Option:
    forms = []
    for kernel in kernels:
        costs = {shape: shard_cost(table, way, kernel, shape, topology) for shape in {*shapes}}
        forms.append(
            Form(
                seconds=np.array([costs[shape].total for shape in shapes]) / 1000,
                bytes=np.array(
                    [[costs[s].hbm for s in shapes], [costs[s].ddr for s in shapes]], dtype=float
                ),
                fast=0 if kernel in ("dense", "fused", "fused_uvm_caching") else 1,
                slow=1 if "uvm" in kernel else 0,
                hot=round(CACHED * table.rows) if kernel == "fused_uvm_caching" else 0,
            )
        )
    return Option(
        way=way,
        pieces=len(ranks) if pieces is None else pieces,
        ranks=ranks,
        forms=tuple(forms),
        columns=columns,
        parts=parts,
    )
