"""`compress = "auto"`: measures compressors and chooses the fastest on the measured link.

Each candidate compresses one matrix on a route of one rank, where nothing has to be sent. One
number is measured; how it divides between encoding and decoding is taken from typical figures. All
ranks use the speeds of the slowest. The decision is that of `headway.collective`; here measured
numbers become its layers. An inexact exchange is chosen only where it gains more than it costs in
exactness.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter

import torch
import torch.distributed as dist
from torch import nn

from headway.collective.compression import Compression, CompressorSpeed, parse_compression
from headway.collective.model.bucket_cost import ExchangeNetwork
from headway.collective.model.exchange_scheme import (
    CANDIDATE_COMPRESSORS,
    TYPICAL_COMPRESSOR_SPEEDS,
    GradientLayer,
    SchemeChoice,
    rank_schemes,
)
from headway.collective.model.link_fit import LinkFit
from headway.collective.nodes import Nodes
from headway.comm.algorithms.method import FusedBuffer, GradientSlice, Route, complete
from headway.comm.compress import make_method
from headway.plans import ExchangePlan
from headway.plans.exchange_scheme import scheme_of

_SIDE = 1024
"""The matrix has 4 MiB: what a call costs beside its work is lost in it."""
_ROUNDS = 3


def measure_speeds(device: torch.device) -> dict[str, CompressorSpeed]:
    """Speeds of all compressors; measures the candidates, in about 0.1 s. Collective."""
    route = _single_rank_route(device)
    measured = [
        candidate
        for candidate in CANDIDATE_COMPRESSORS
        if candidate.name in TYPICAL_COMPRESSOR_SPEEDS
    ]
    factors = torch.tensor(
        [_slowdown(candidate, route, device) for candidate in measured],
        dtype=torch.float64,
        device=device,
    )
    dist.all_reduce(factors, op=dist.ReduceOp.MAX)
    slowest: dict[str, float] = {}
    for candidate, factor in zip(measured, factors.tolist(), strict=True):
        slowest[candidate.name] = max(slowest.get(candidate.name, 0.0), factor)
    return TYPICAL_COMPRESSOR_SPEEDS | {
        name: CompressorSpeed(
            TYPICAL_COMPRESSOR_SPEEDS[name].encode * factor,
            TYPICAL_COMPRESSOR_SPEEDS[name].decode * factor,
        )
        for name, factor in slowest.items()
    }


def _slowdown(compression: Compression, route: Route, device: torch.device) -> float:
    """By how much this machine is slower than the typical one."""
    method = make_method(compression, seed=0)
    buffer = torch.randn(_SIDE * _SIDE + 1, device=device)
    buffer[-1] = 1.0
    fused = FusedBuffer(buffer, (GradientSlice("probe", 0, _SIDE * _SIDE, (_SIDE, _SIDE)),))
    complete(method, fused, route)
    times = []
    for _ in range(_ROUNDS):
        start = perf_counter()
        complete(method, fused, route)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(perf_counter() - start)
    typical = TYPICAL_COMPRESSOR_SPEEDS[compression.name]
    return min(times) / (fused.gradients.nbytes * (typical.encode + typical.decode))


def _single_rank_route(device: torch.device) -> Route:
    rank = dist.get_rank()
    group = dist.new_group([rank], use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return Route((rank,), rank, group, Nodes(((rank,),)))


# `compress = "auto"`: the compressor that is fastest on the measured link, for measured times.


def choose_compressor(
    parameters: Mapping[str, nn.Parameter],
    description: ExchangePlan,
    ready: Mapping[str, float],
    link: LinkFit,
    nodes: Nodes,
    *,
    current: str,
    speeds: Mapping[str, CompressorSpeed] = TYPICAL_COMPRESSOR_SPEEDS,
) -> SchemeChoice:
    """The best candidate.

    Args:
        parameters: Logical name -> parameter, in order of registration.
        description: The plan's; all but its compressor stays.
        ready: Seconds after the start of a step at which each gradient is there.
        current: The compressor that is used now. One that has kept gradients back is only
            followed by one that will send them.
        speeds: Of compressors, as measured.
    """
    candidates = [
        candidate
        for candidate in CANDIDATE_COMPRESSORS
        if candidate.feedback or not parse_compression(current).feedback
    ]
    base = scheme_of(description)
    network = ExchangeNetwork(link, nodes)
    return rank_schemes(
        _measured_layers(parameters, description, ready),
        network,
        base=base,
        candidates=candidates,
        speeds=speeds,
    )[0]


def _measured_layers(
    parameters: Mapping[str, nn.Parameter], description: ExchangePlan, ready: Mapping[str, float]
) -> list[GradientLayer]:
    """One layer per parameter; what passes before the first gradient is the forward pass."""
    forward = min(ready.values()) / len(parameters)
    clock, backward = min(ready.values()), dict.fromkeys(parameters, 0.0)
    for name in sorted(ready, key=ready.__getitem__):
        backward[name], clock = ready[name] - clock, ready[name]
    layers = []
    for name, parameter in parameters.items():
        part = description.part(name)
        layers.append(
            GradientLayer(
                name=name,
                shapes=(tuple(parameter.shape),),
                forward=forward,
                backward=backward[name],
                element_bytes=parameter.element_size(),
                compression=parse_compression(part.compress) if part and part.compress else None,
            )
        )
    return layers
