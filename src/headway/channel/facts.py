"""Facts among the ranks of a group: typed text instead of torch's pickles.

`all_gather_object` and `broadcast_object_list` run whatever the other end sends. These send what
`typed_text` writes: plain values, tuples, dataclasses, errors of headway's; a text has a bound.
All ranks, also the one that sends, get what is read from the text, so that they decide alike: an
object that stands in two places is two objects on all of them.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from headway.channel.typed_text import read_typed, write_typed
from headway.errors import RunError

# Facts of all parameters of a model of a thousand layers take some megabytes.
MOST_BYTES = 1 << 28
T = TypeVar("T")


def gather_facts(
    own: T, group: dist.ProcessGroup | None = None, *, only: int | None = None
) -> list[T]:
    """The facts of all ranks of a group, in their order; collective.

    Args:
        only: The rank in the group that reads them; all others get none.

    Raises:
        RunError: Those of some rank have no text, or it sends what is none; on all ranks.
    """
    ranks = dist.get_world_size(group)
    if ranks == 1 or moves_nothing(group):
        return [own] * ranks
    text, error = _written(own, group)
    sizes = [torch.zeros(1, dtype=torch.int64, device=text.device) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([len(text)], device=text.device), group=group)
    if error is not None:
        raise error
    lengths = [_checked(int(size.item()), rank) for rank, size in enumerate(sizes)]
    padded = text.new_zeros(max(lengths))
    padded[: len(text)] = text
    texts = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(texts, padded, group=group)
    if only not in (None, dist.get_rank(group)):
        return []
    return [_read(each[:length]) for each, length in zip(texts, lengths, strict=True)]


def broadcast_facts(own: Any, source: int = 0, group: dist.ProcessGroup | None = None) -> Any:
    """The facts of one rank, on all; collective.

    Args:
        own: Those of rank `source`; of no meaning elsewhere.
        source: A global rank.

    Raises:
        RunError: As of `gather_facts`.
    """
    if dist.get_world_size(group) == 1 or moves_nothing(group):
        return own
    sends = dist.get_rank() == source
    text, error = _written(own if sends else None, group)
    size = torch.tensor([len(text)], device=text.device)
    dist.broadcast(size, source, group=group)
    if sends and error is not None:
        raise error
    if not sends:
        text = text.new_empty(_checked(int(size.item()), source))
    dist.broadcast(text, source, group=group)
    return _read(text)


def moves_nothing(group: dist.ProcessGroup | None) -> bool:
    """Torch's backend "fake" of tests leaves every result as it was."""
    return dist.get_backend(group) == "fake"


def _written(own: Any, group: dist.ProcessGroup | None) -> tuple[Tensor, RunError | None]:
    """A text where the group can send it; empty, which others take for an error, with the error."""
    error = None
    try:
        text = write_typed(own, most_bytes=MOST_BYTES)
    except RunError as found:
        text, error = b"", found
    host = dist.get_backend(group) != "nccl" or "cpu:" in dist.get_backend_config(group)
    sent = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0).byte()
    return sent if host else sent.to(torch.device("cuda", torch.cuda.current_device())), error


def _checked(size: int, rank: int) -> int:
    if not 0 < size <= MOST_BYTES:
        raise RunError(
            f"rank {rank} of a group announces facts of {size} bytes",
            why=f"A text has 1 to {MOST_BYTES} bytes; 0: it could not be written.",
            fix="The error of that rank says what it could not send.",
        )
    return size


def _read(text: Tensor) -> Any:
    return read_typed(text.cpu().numpy().tobytes(), most_bytes=MOST_BYTES)
