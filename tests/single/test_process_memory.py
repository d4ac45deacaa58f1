"""single: freed memory goes back to the kernel once a process has grown, and not before."""

from __future__ import annotations

import pytest
import torch

from headway.channel import process_memory
from headway.channel.process_memory import HeapTrimmer, resident_bytes

BLOCK, BLOCKS = 64 << 10, 2000
"""Smaller than what malloc maps apart; 125 MiB."""


def resident() -> int:
    return resident_bytes(torch.device("cpu"))


@pytest.mark.skipif(process_memory._malloc("malloc_trim") is None, reason="glibc has malloc_trim")
@pytest.mark.parametrize(("growth", "goes_back"), [(16 << 20, True), (1 << 40, False)])
def test_gaps_between_blocks_in_use_go_back(growth: int, goes_back: bool) -> None:
    process_memory.give_back_freed_memory()
    freed = HeapTrimmer(growth)
    for _ in range(process_memory._LOOK):
        freed.end_step()
    blocks = [bytearray(b"1" * BLOCK) for _ in range(BLOCKS)]
    del blocks[::2]
    before = resident()
    for _ in range(process_memory._LOOK):
        freed.end_step()
    given = before - resident()
    assert (given > BLOCK * BLOCKS // 3) if goes_back else (given < BLOCK * BLOCKS // 6)
    assert all(block == b"1" * BLOCK for block in blocks)


def test_a_process_that_has_grown_for_good_is_not_trimmed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held, given = [100], list[int]()
    monkeypatch.setattr(process_memory, "resident_bytes", lambda device: held[0])
    monkeypatch.setattr(process_memory, "give_back_freed_memory", lambda: given.append(held[0]))
    freed = HeapTrimmer(10)
    for size in (100, 110, 150, 150, 150, 160, 161, 90, 101):
        held[0] = size
        for _ in range(process_memory._LOOK):
            freed.end_step()
    assert given == [150, 161, 101]
