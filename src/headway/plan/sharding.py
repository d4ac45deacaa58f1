"""What sharded state (ZeRO, hybrid sharding) can be combined with.

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", section 5; Zhao et al. 2023 (PyTorch FSDP), section 3.2.2, hybrid sharding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from headway.plan.exchange import Exchange
from headway.plan.mesh import Mesh

Zero = Literal[0, 1, 2, 3]
"""See `plan.MemoryPolicy`."""
SHARD = "shard"
"""The axis of the mesh whose ranks keep the state together; they take shares of the batch, too."""


def sharding_problems(zero: int, mesh: Mesh, exchange: Exchange) -> Iterator[str]:
    """Why a plan's sharding cannot be, one line each.

    Args:
        zero: As `MemoryPolicy.zero`.
        mesh: Of the plan.
        exchange: Of the plan.
    """
    if not zero:
        if mesh.degree(SHARD) > 1:
            yield f"mesh axis {SHARD} keeps state together; memory.zero is 0: let it be 1, 2 or 3"
        return
    for name, value, only in (
        ("compress", exchange.compress, "none"),
        ("reduce", exchange.reduce, "mean"),
        ("values", exchange.values, "gradients"),
        ("collective", exchange.collective, "all_reduce"),
        ("priority", exchange.priority, False),
    ):
        if value != only:
            yield (
                f"exchange.{name} is {value!r}: with memory.zero {zero} gradients are summed "
                f"exactly where they are kept; leave it at {only!r}"
            )
    if exchange.parts:
        yield f"exchange.parts: with memory.zero {zero} all gradients are summed alike"
