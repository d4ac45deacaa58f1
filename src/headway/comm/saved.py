"""The state of compressors in a checkpoint: independent of ranks and buckets.

What a rank has kept back is a part of a sum that no rank will ever need alone: a checkpoint holds
the sum over the ranks, one tensor per parameter, and on resuming every rank takes an equal share.
Invariant: sent + kept back = gradient holds over the whole run, for any number of ranks before and
after. (It is not bit for bit the run that would have gone on: the ranks' shares are other ones.)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headway.comm.compress.state import SUMMED, parts_of

PREFIX = "exchange."


def collect(
    state: Mapping[str, Tensor],
    parameters: Mapping[str, nn.Parameter],
    group: dist.ProcessGroup | None = None,
) -> dict[str, Tensor]:
    """What goes into a checkpoint; collective, equal on all ranks.

    Args:
        state: Of this rank's methods: "name/what" or "name/offset/what" -> tensor.
        parameters: Logical name -> parameter.
        group: All ranks; None: the world.
    """
    own = sorted({(name, what) for name, _, what in map(parts_of, state)})
    everywhere: list[list[tuple[str, str]]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everywhere, own, group=group)
    found: dict[str, Tensor] = {}
    for name, what in sorted({key for keys in everywhere for key in keys}):
        if what in SUMMED:
            whole = _assemble(state, parameters[name], name, what)
            dist.all_reduce(whole, group=group)
        else:
            whole = state[f"{name}/{what}"]
        found[f"{PREFIX}{name}/{what}"] = whole
    return found


def share_out(saved: Mapping[str, Tensor], ranks: int) -> dict[str, Tensor]:
    """One rank's state from a checkpoint; not collective.

    Args:
        saved: What `collect` returned, among other tensors.
        ranks: That take equal shares.
    """
    found = {}
    for key, value in saved.items():
        if not key.startswith(PREFIX):
            continue
        name, _, what = parts_of(key.removeprefix(PREFIX))
        found[f"{name}/{what}"] = value / ranks if what in SUMMED else value.clone()
    return found


def _assemble(state: Mapping[str, Tensor], parameter: nn.Parameter, name: str, what: str) -> Tensor:
    """This rank's part of one parameter's residual, as a flat tensor of the parameter's size."""
    whole = torch.zeros(parameter.numel(), dtype=parameter.dtype)
    for key, value in state.items():
        owner, offset, kind = parts_of(key)
        if (owner, kind) == (name, what):
            whole[offset : offset + value.numel()] += value.reshape(-1).to(whole)
    return whole
