"""What of a gradient is sent: one class per compressor, made from the plan's `Compression`."""

from headway.comm.compress.topk_selection import top_k

__all__ = ["top_k"]
