"""Facts among the ranks of a group: typed text instead of torch's pickles.

`all_gather_object` and `broadcast_object_list` run whatever the other end sends. These send what
`typed_text` writes: plain values, tuples, dataclasses, errors of headway's; a text has a bound.
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


def gather_facts(own: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The facts of all ranks of a group, in their order; collective.

    Raises:
        RunError: They have no text, or that of another rank is none.
    """
    ranks = dist.get_world_size(group)
    if ranks == 1 or _moves_nothing(group):
        return [own] * ranks
    text = _tensor_of(write_typed(own, most_bytes=MOST_BYTES), group)
    sizes = [torch.zeros(1, dtype=torch.int64, device=text.device) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([len(text)], device=text.device), group=group)
    lengths = [_checked(int(size.item())) for size in sizes]
    padded = text.new_zeros(max(lengths))
    padded[: len(text)] = text
    texts = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(texts, padded, group=group)
    return [_read(each[:length]) for each, length in zip(texts, lengths, strict=True)]


def broadcast_facts(own: Any, source: int = 0, group: dist.ProcessGroup | None = None) -> Any:
    """The facts of one rank, on all; collective.

    Args:
        own: Those of rank `source`; of no meaning elsewhere.
        source: A global rank.

    Raises:
        RunError: As of `gather_facts`.
    """
    if dist.get_world_size(group) == 1 or _moves_nothing(group):
        return own
    sends = dist.get_rank() == source
    text = _tensor_of(write_typed(own, most_bytes=MOST_BYTES) if sends else b"", group)
    size = torch.tensor([len(text)], device=text.device)
    dist.broadcast(size, source, group=group)
    if not sends:
        text = text.new_empty(_checked(int(size.item())))
    dist.broadcast(text, source, group=group)
    return own if sends else _read(text)


def _moves_nothing(group: dist.ProcessGroup | None) -> bool:
    """Torch's backend "fake" of tests leaves every result as it was."""
    return dist.get_backend(group) == "fake"


def _tensor_of(text: bytes, group: dist.ProcessGroup | None) -> Tensor:
    """Bytes where the group can send them."""
    host = dist.get_backend(group) != "nccl" or "cpu:" in dist.get_backend_config(group)
    found = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0).byte()
    return found if host else found.to(torch.device("cuda", torch.cuda.current_device()))


def _checked(size: int) -> int:
    if not 0 < size <= MOST_BYTES:
        raise RunError(f"another rank announces facts of {size} bytes")
    return size


def _read(text: Tensor) -> Any:
    return read_typed(text.cpu().numpy().tobytes(), most_bytes=MOST_BYTES)
