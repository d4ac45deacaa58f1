"""What of a gradient is sent: one small class per compressor, made from the plan's text.

Every class is a `Method` over fused buckets. `headway.plan.COMPRESSORS` has the facts of each, and
`headway.collective.payload` the bytes that each hands to torch.distributed; tests hold them equal.
"""

from __future__ import annotations

from headway.comm.compress.halves import Bf16, Fp16
from headway.comm.compress.int8 import Int8
from headway.comm.compress.mstopk import ms_top_k
from headway.comm.compress.powersgd import PowerSgd
from headway.comm.compress.randomk import RandomK
from headway.comm.compress.selection import top_k
from headway.comm.compress.sign import Sign
from headway.comm.compress.sparse import Adaptive, MsTopK, TopK
from headway.comm.compress.state import merge_states, spread_states
from headway.comm.method import AllReduce, Method
from headway.plan.compression import Compression

__all__ = [
    "Adaptive",
    "Bf16",
    "Fp16",
    "Int8",
    "MsTopK",
    "PowerSgd",
    "RandomK",
    "Sign",
    "TopK",
    "make_method",
    "merge_states",
    "ms_top_k",
    "spread_states",
    "top_k",
]


def make_method(compression: Compression, *, seed: int) -> Method:
    """The method of one bucket.

    Args:
        compression: Which, with its amount.
        seed: Of what is drawn at random; must be the same on all ranks.
    """
    amount = compression.amount
    match compression.name:
        case "none":
            return AllReduce()
        case "fp16":
            return Fp16()
        case "bf16":
            return Bf16()
        case "int8":
            return Int8(seed=seed)
        case "sign":
            return Sign(seed=seed)
        case "topk":
            return TopK(amount, seed=seed)
        case "mstopk":
            return MsTopK(amount, seed=seed)
        case "adaptive":
            return Adaptive(amount, seed=seed)
        case "randomk":
            return RandomK(amount, seed=seed)
        case "powersgd":
            return PowerSgd(compression.rank, seed=seed)
    raise ValueError(f"no class for the compressor {compression.name!r}")
