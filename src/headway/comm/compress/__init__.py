"""What of a gradient is sent: one class per compressor, made from the plan's `Compression`.

Every class is an `ExchangeMethod` over fused buckets. `headway.collective.compression` has the
facts of each and the bytes that it hands to torch.distributed; tests hold them equal.
"""

from headway.comm.compress.factory import make_method
from headway.comm.compress.state import merge_states, spread_states
from headway.comm.compress.topk_selection import ms_top_k, top_k

__all__ = ["make_method", "merge_states", "ms_top_k", "spread_states", "top_k"]
