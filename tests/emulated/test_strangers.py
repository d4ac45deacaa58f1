"""emulated: strangers who speak to every port of a run change nothing and end nothing."""

from __future__ import annotations

import os
import pickle
import random
import socket
import struct
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from headway.run.distributed.heartbeat_message import encode
from support.commands import HEADWAY, environment, events, none_left, warm_variables
from support.emulated import needs_root
from support.fuzzing import TOKENS, batches
from support.open_ports import beyond_the_loopback, listening_anywhere
from support.patience import patient
from support.sampling import sampled

pytestmark = needs_root

TWO = 'nodes = 2\nbetween = { rate = "100 Mbit/s" }\n'
RECIPE = "support.recipes:trapped"
HELLO = {"hello": 1, "rank": 1, "local_rank": 0, "node": 0, "host": "x", "machine": "", "pid": 1}


class Payload:
    """What would show that somebody unpickles what strangers send."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self):
        return os.mkdir, (str(self._path),)


def crafted(path: Path) -> list[bytes]:
    """For the heartbeat, the backend and channels, torch's store, Gloo; pickles; HTTP."""
    hello = encode({**HELLO, "started": "1"})
    key = b"groups/left/0"
    return [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b'{"token":"\xc3\xa9"}\n',
        b"[" * 60_000 + b"\n",
        b"0" * 32 + b"\n" + b"f" * 32 + b" " + hello + b"\n",
        b"0" * 32 + b"\n" + b"f" * 32 + b" failed=gone\n",
        b"f" * 32 + struct.pack("<I", 1),
        struct.pack("<IIQ", 0x68770001, 3, 2**40),
        struct.pack("<BI", 9, 0x3C85F7CE) + struct.pack("<BQ", 0, len(key)) + key,
        struct.pack("<Q", 0),
        struct.pack("<Q", 1),
        struct.pack("<QQQQ", 1, 2**40, 0, 3),
        pickle.dumps(Payload(path)),
        b"x" * 200_000,
    ]


def message(rng: random.Random, known: list[bytes]) -> bytes:
    parts = [rng.choice(known), rng.choice(TOKENS), rng.randbytes(rng.choice((1, 8, 36, 400)))]
    return b"".join(rng.choices(parts, weights=(4, 1, 2), k=rng.choice((1, 1, 2))))


def shout(place: tuple[str, int], text: bytes, kept: list[socket.socket], *, keep: bool) -> None:
    """Say something to a port; some callers stay and say nothing more."""
    with suppress(OSError):
        link = socket.create_connection(place, timeout=0.5)
        kept.append(link)
        # What the kernel takes: nobody waits until a port reads.
        link.setblocking(False)
        link.send(text)
    if kept and not keep:
        kept.pop().close()
    while len(kept) > 40:
        kept.pop(0).close()


@pytest.mark.parametrize("words", sampled([(), ("--collective", "ring")], 1), ids=str)
@pytest.mark.timeout(400)
def test_strangers_on_every_port_change_nothing(tmp_path, words):
    cases = [case for batch in batches() for case in batch]
    losses = {}
    (tmp_path / "cluster.toml").write_text(TWO)
    known, harmed = crafted(tmp_path / "unpickled"), set()
    for run in ("alone", "attacked"):
        job = subprocess.Popen(
            (*HEADWAY, "train", RECIPE, "-d", run, "--device", "cpu", "--emulate", "cluster.toml",
             "--set", f"arguments.pause={len(cases) / 2500}", *words),
            cwd=tmp_path, env=environment(**warm_variables()), stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        kept: list[socket.socket] = []
        numbers, places, looked = iter(cases), [], 0.0
        deadline = time.monotonic() + patient(150)
        while run == "attacked" and job.poll() is None:
            assert time.monotonic() < deadline, "the job does not end"
            if time.monotonic() - looked > (1.5 if places else 0.2):
                places = sorted(beyond_the_loopback(listening_anywhere(job.pid)))
                looked = time.monotonic()
            case = next(numbers, None) if places else None
            if case is None:
                time.sleep(0.01)
                continue
            rng = random.Random(f"stranger {case}")
            place = places[case % len(places)]
            harmed.add(place)
            shout(place, message(rng, known), kept, keep=rng.random() < 0.1)
        err = job.communicate(timeout=patient(150))[1]
        for link in kept:
            link.close()
        assert job.returncode == 0, err
        losses[run] = [event["loss"] for event in events(tmp_path / run, "step")]
        assert {event["attempt"] for event in events(tmp_path / run, "step")} == {0}, err
        assert none_left(tmp_path / run)
    assert harmed, "no port was found"
    assert next(numbers, None) is None, "not every message was sent before the end"
    assert losses["attacked"] == losses["alone"]
    assert len(losses["alone"]) == 20
    assert not (tmp_path / "unpickled").exists()
