"""Compressor state in checkpoints, and when the number of ranks changes.

A residual is a part of a sum that has not been sent yet: where a rank goes, another one must send
its residual, or it is lost. A checkpoint holds the sum over the ranks, one tensor per parameter,
independent of ranks and buckets; on resuming, every rank takes an equal share. So sent + residual =
gradient holds over the whole run. (It is not bit for bit the run that would have continued: the
ranks' shares differ.) Everything else (factors, steps, budgets) is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headway.channel.facts import gather_facts

SUMMED_STATE = ("residual", "server")


def parse_state_key(key: str) -> tuple[str, int, str]:
    """(logical name, offset in elements, what) of "name/what" or "name/offset/what"."""
    name, _, what = key.rpartition("/")
    inner, _, offset = name.rpartition("/")
    return (inner, int(offset), what) if inner and offset.isdigit() else (name, 0, what)


STATE_PREFIX = "exchange."


def collect_state(
    state: Mapping[str, Tensor],
    parameters: Mapping[str, nn.Parameter],
    group: dist.ProcessGroup | None = None,
) -> dict[str, Tensor]:
    """What goes into a checkpoint; collective, equal on all ranks.

    Args:
        state: Of this rank's methods: "name/what" or "name/offset/what" -> tensor.
    """
    own = sorted({(name, what) for name, _, what in map(parse_state_key, state)})
    everywhere = gather_facts(own, group)
    found: dict[str, Tensor] = {}
    # The names of all ranks, sorted: shards differ from rank to rank, but the sums are collective.
    for name, what in sorted({key for keys in everywhere for key in keys}):
        if what in SUMMED_STATE:
            whole = _assemble(state, parameters[name], name, what)
            dist.all_reduce(whole, group=group)
        else:
            whole = state[f"{name}/{what}"]
        found[f"{STATE_PREFIX}{name}/{what}"] = whole
    return found


def distribute_state(saved: Mapping[str, Tensor], ranks: int) -> dict[str, Tensor]:
    """One rank's state from a checkpoint that `ranks` ranks share evenly; not collective."""
    found = {}
    for key, value in saved.items():
        if not key.startswith(STATE_PREFIX):
            continue
        name, _, what = parse_state_key(key.removeprefix(STATE_PREFIX))
        found[f"{name}/{what}"] = value / ranks if what in SUMMED_STATE else value.clone()
    return found


def _assemble(state: Mapping[str, Tensor], parameter: nn.Parameter, name: str, what: str) -> Tensor:
    """This rank's part of one parameter's residual, as a flat tensor of the parameter's size."""
    whole = torch.zeros(parameter.numel(), dtype=parameter.dtype)
    for key, value in state.items():
        owner, offset, kind = parse_state_key(key)
        if (owner, kind) == (name, what):
            whole[offset : offset + value.numel()] += value.reshape(-1).to(whole)
    return whole
