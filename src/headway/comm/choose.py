"""`compress = "auto"`: the compressor that is fastest on the measured link, for measured times.

The decision is `collective.choice`'s; here measured numbers become its layers. An inexact exchange
is chosen only where it gains more than it costs in exactness.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from headway.collective import Nodes
from headway.collective.choice import CANDIDATES, TYPICAL, Choice, choose
from headway.collective.link import LinkFit
from headway.collective.predict import Layer
from headway.collective.service import Network, Speed
from headway.plan import Exchange, parse_compression
from headway.plan.compression import COMPRESSORS
from headway.plan.scheme import scheme_of


def choose_compressor(
    parameters: Mapping[str, nn.Parameter],
    description: Exchange,
    ready: Mapping[str, float],
    link: LinkFit,
    nodes: Nodes,
    *,
    current: str,
    speeds: Mapping[str, Speed] = TYPICAL,
) -> Choice:
    """The best candidate.

    Args:
        parameters: Logical name -> parameter, in order of registration.
        description: The plan's; all but its compressor stays.
        ready: Seconds after the start of a step at which each gradient is there.
        link: As measured.
        nodes: Of all ranks.
        current: The compressor that is used now. One that has kept gradients back is only
            followed by one that will send them.
        speeds: Of compressors, as measured.
    """
    candidates = [
        (name, amount)
        for name, amount in CANDIDATES
        if COMPRESSORS[name].feedback or not parse_compression(current).facts.feedback
    ]
    base = scheme_of(description)
    network = Network(link, nodes)
    return choose(
        _layers(parameters, description, ready),
        network,
        base=base,
        candidates=candidates,
        speeds=speeds,
    )[0]


def _layers(
    parameters: Mapping[str, nn.Parameter], description: Exchange, ready: Mapping[str, float]
) -> list[Layer]:
    """One layer per parameter; what passes before the first gradient is the forward pass."""
    forward = min(ready.values()) / len(parameters)
    clock, backward = min(ready.values()), dict.fromkeys(parameters, 0.0)
    for name in sorted(ready, key=ready.__getitem__):
        backward[name], clock = ready[name] - clock, ready[name]
    layers = []
    for name, parameter in parameters.items():
        part = description.part(name)
        own = parse_compression(part.compress) if part and part.compress else None
        layers.append(
            Layer(
                name=name,
                shapes=(tuple(parameter.shape),),
                forward=forward,
                backward=backward[name],
                element_bytes=parameter.element_size(),
                compressor=own.name if own else None,
                amount=own.amount if own else 0.0,
            )
        )
    return layers
