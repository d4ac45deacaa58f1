"""What of the plan's exchange decides on time, in the words of `collective`.

Not among the exports of `headway.plan`: predicting needs numpy, and a plan does not.
"""

from __future__ import annotations

from headway.collective.predict import Scheme
from headway.plan.exchange import Exchange


def scheme_of(exchange: Exchange) -> Scheme:
    """What of an exchange decides on time; an automatic compressor is "none" so far."""
    compression = exchange.compression
    return Scheme(
        compressor=compression.name if compression else "none",
        amount=compression.amount if compression else 0.0,
        reduce=exchange.reduce,
        collective=exchange.collective,
        carrier=exchange.carrier,
        bucket=exchange.bucket_bytes,
        overlap=exchange.overlap,
        priority=exchange.priority,
        chunk=exchange.chunk_bytes,
        credit=exchange.credit,
    )
