"""What of a gradient is sent: one small class per compressor, made from the plan's text.

Every class is a `ExchangeMethod` over fused buckets. `headway.plan.COMPRESSORS` has the facts of
each, and
`headway.collective.model.payload` the bytes that each hands to torch.distributed; tests hold them
equal.
"""

from __future__ import annotations

from headway.comm.algorithms.method import AllReduce, ExchangeMethod
from headway.comm.compress.powersgd import PowerSgd
from headway.comm.compress.quantization import Bf16, Fp16, Int8, Sign
from headway.comm.compress.sparsification import AdaptiveTopK, MsTopK, RandomK, TopK
from headway.comm.compress.state import merge_states, spread_states
from headway.comm.compress.topk_selection import ms_top_k, top_k
from headway.plan.exchange import Compression

__all__ = [
    "AdaptiveTopK",
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


def make_method(compression: Compression, *, seed: int) -> ExchangeMethod:
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
            return AdaptiveTopK(amount, seed=seed)
        case "randomk":
            return RandomK(amount, seed=seed)
        case "powersgd":
            return PowerSgd(compression.rank, seed=seed)
    raise ValueError(f"no class for the compressor {compression.name!r}")
