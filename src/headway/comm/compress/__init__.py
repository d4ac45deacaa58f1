"""What of a gradient is sent: one class per compressor, made from the plan's `Compression`.

Begin with `compressor`; `factory` makes the method of a bucket. `headway.collective.compression`
has the facts of each compressor and the bytes that it hands to torch.distributed.
"""

from headway.comm.compress.topk_selection import top_k

__all__ = ["top_k"]
