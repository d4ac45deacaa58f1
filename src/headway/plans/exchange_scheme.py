"""What of a plan's gradient exchange decides on its time, as `headway.collective` predicts it.

Not exported from `headway.plans`: predicting needs numpy, a plan does not.
"""

from __future__ import annotations

from headway.collective.compression import UNCOMPRESSED
from headway.collective.model.bucket_cost import ExchangeScheme
from headway.plans.exchange import ExchangePlan


def scheme_of(exchange: ExchangePlan) -> ExchangeScheme:
    """What of an exchange decides on time; an automatic compressor is "none" so far."""
    return ExchangeScheme(
        compression=exchange.compression or UNCOMPRESSED,
        reduce=exchange.reduce,
        collective=exchange.collective,
        carrier=exchange.carrier,
        bucket=exchange.bucket_bytes,
        overlap=exchange.overlap,
        priority=exchange.priority,
        chunk=exchange.chunk_bytes,
        credit=exchange.credit,
    )
