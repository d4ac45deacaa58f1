"""How fast compressors are on this machine, for `compress = "auto"`.

Each candidate compresses one matrix on a route of one rank, where nothing has to travel. One number
is measured; how it is shared between encoding and decoding is taken from typical figures. All ranks
go on with the speeds of the slowest one.
"""

from __future__ import annotations

from time import perf_counter

import torch
import torch.distributed as dist

from headway.collective import Nodes
from headway.collective.choice import CANDIDATES, TYPICAL
from headway.collective.service import Speed
from headway.comm.compress import make_method
from headway.comm.method import Fused, Piece, Route, complete
from headway.plan.compression import Compression

_SIDE = 1024
"""The matrix has 4 MiB: what a call costs beside its work is lost in it."""
_ROUNDS = 3


def measure_speeds(device: torch.device) -> dict[str, Speed]:
    """Speeds of all compressors; measures the candidates, in about 0.1 s. Collective."""
    route = _alone(device)
    measured = [(name, amount) for name, amount in CANDIDATES if name in TYPICAL]
    factors = torch.tensor(
        [_factor(name, amount, route, device) for name, amount in measured],
        dtype=torch.float64,
        device=device,
    )
    dist.all_reduce(factors, op=dist.ReduceOp.MAX)
    slowest: dict[str, float] = {}
    for (name, _), factor in zip(measured, factors.tolist(), strict=True):
        slowest[name] = max(slowest.get(name, 0.0), factor)
    return TYPICAL | {
        name: Speed(TYPICAL[name].encode * factor, TYPICAL[name].decode * factor)
        for name, factor in slowest.items()
    }


def _factor(name: str, amount: float, route: Route, device: torch.device) -> float:
    """By how much this machine is slower than the typical one."""
    method = make_method(Compression(name=name, amount=amount), seed=0)
    buffer = torch.randn(_SIDE * _SIDE + 1, device=device)
    buffer[-1] = 1.0
    fused = Fused(buffer, (Piece("probe", 0, _SIDE * _SIDE, (_SIDE, _SIDE)),))
    complete(method, fused, route)
    times = []
    for _ in range(_ROUNDS):
        start = perf_counter()
        complete(method, fused, route)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(perf_counter() - start)
    typical = TYPICAL[name].encode + TYPICAL[name].decode
    return min(times) / (fused.gradients.nbytes * typical)


def _alone(device: torch.device) -> Route:
    rank = dist.get_rank()
    group = dist.new_group([rank], use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return Route((rank,), rank, group, Nodes(((rank,),)))
