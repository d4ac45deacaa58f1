"""Which method carries out a plan's exchange: the one place that knows all of them."""

from __future__ import annotations

from headway.comm.adasum import Adasum, HierarchicalAdasum
from headway.comm.compress import make_method
from headway.comm.hierarchical import Hierarchical
from headway.comm.method import Method
from headway.comm.sparse_hierarchical import SparseHierarchical
from headway.comm.swap import Scratch
from headway.plan import Compression, Exchange


def make_exchange_method(
    description: Exchange, compression: Compression, *, seed: int, scratch: Scratch
) -> Method:
    """The method of one bucket.

    Args:
        description: The plan's exchange, which is legal.
        compression: Of this bucket's parameters.
        seed: Of random compressors.
        scratch: Buffers that methods may share which run one after the other.
    """
    hierarchical = description.collective == "hierarchical"
    if description.reduce == "adasum":
        return HierarchicalAdasum(scratch=scratch) if hierarchical else Adasum(scratch=scratch)
    if not hierarchical:
        return make_method(compression, seed=seed)
    if compression.name in ("topk", "mstopk"):
        sampled = compression.name == "mstopk"
        return SparseHierarchical(compression.amount, sampled=sampled, scratch=scratch)
    return Hierarchical(make_method(compression, seed=seed), scratch=scratch)
