"""ranks: what ranks tell each other: alike on all of them, an error on all of them, no pickles."""

from __future__ import annotations

import socket
from collections import UserDict

import pytest
import torch

from headway.channel.facts import broadcast_facts, gather_facts
from headway.errors import HeadwayError, RunError
from headway.run.pipeline import batch_broadcast
from headway.run.pipeline.batch_broadcast import broadcast_batch
from support.ranks import run_ranks


class Own(UserDict):
    """Of a type that has no text."""


def error_of(call, *arguments):
    with pytest.raises(HeadwayError) as caught:
        call(*arguments)
    return str(caught.value)


def talks(world):
    """Whether the one that sends decides as the others do, and what each of them hears."""
    one = (world.rank, 2.5)
    told, gathered = broadcast_facts((one, one)), gather_facts({"x": one})
    none = gather_facts(world.rank, only=1)
    # A socket has no text; the others must not wait for what cannot come.
    broken = [
        error_of(broadcast_facts, socket.socket() if world.rank == 0 else None),
        error_of(gather_facts, socket.socket() if world.rank == 1 else None),
    ]
    return (told[0] is told[1], told, gathered, none), broken


def sends_batches(world):
    here = world.rank == 0
    dense = {"image": torch.arange(6.0).reshape(2, 3).t(), "n": 3, "names": ("a", None)}
    own = Own(x=torch.ones(2))
    batch_broadcast.job_secret = lambda: b""
    found, refused = broadcast_batch(dense if here else None, 0), error_of(broadcast_batch, own, 0)
    batch_broadcast.job_secret = lambda: b"s" * 16
    pickled = broadcast_batch(own if here else None, 0)
    batch_broadcast.job_secret = lambda: b"s" * 16 if here else b"t" * 16
    forged = "" if here else None
    if here:
        broadcast_batch(own, 0)
    else:
        forged = error_of(broadcast_batch, None, 0)
    assert torch.equal(found["image"], dense["image"])
    assert (type(pickled), pickled["x"].tolist()) == (Own, [1.0, 1.0])
    return found["n"], found["names"], refused, forged


def both(world):
    return talks(world), sends_batches(world)


def test_ranks_hear_the_same_and_fail_together():
    (first, batch), (second, batch2) = run_ranks(2, both)
    (said, broken), (said2, broken2) = first, second
    assert (
        said[:3] == said2[:3] == (False, ((0, 2.5), (0, 2.5)), [{"x": (0, 2.5)}, {"x": (1, 2.5)}])
    )
    assert (said[3], said2[3]) == ([], [0, 1])
    assert "socket cannot go from one rank to another" in broken[0]
    assert "rank 0 of a group announces facts of 0 bytes" in broken2[0]
    assert "rank 1 of a group announces" in broken[1]
    assert "socket cannot go" in broken2[1]
    assert batch[:2] == batch2[:2] == (3, ("a", None))
    assert "Own cannot go from one rank to another" in batch[2]
    assert batch[2] == batch2[2]
    assert "not signed" in batch2[3]


def test_an_unsigned_pickle_is_not_read(monkeypatch):
    for secret in (b"", b"s" * 16):
        monkeypatch.setattr(batch_broadcast, "job_secret", lambda secret=secret: secret)
        with pytest.raises(RunError, match="not signed"):
            batch_broadcast._unpickled(b"\0" * 32 + b"cos\nsystem\n(S'true'\ntR.", 0)
