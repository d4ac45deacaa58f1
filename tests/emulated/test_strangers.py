"""emulated: strangers who speak to every port of a run change nothing and end nothing."""

from __future__ import annotations

import os
import pickle
import random
import resource
import select
import socket
import struct
import subprocess
import time
from collections.abc import Iterable
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

Place = tuple[str, int]
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
    key = b"/headway/verdict"
    return [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b'{"token":"\xc3\xa9"}\n',
        b"[" * 60_000 + b"\n",
        b"0" * 32 + b"\n" + b"f" * 32 + b" " + hello + b"\n",
        b"0" * 32 + b"\n" + b"f" * 32 + b" failed=gone\n",
        b"f" * 32 + struct.pack("<I", 1),
        struct.pack("<IIQ", 0x68770001, 3, 2**40),
        struct.pack("<BI", 0, 0x3C85F7CE) + struct.pack("<BQ", 8, len(key)) + key,
        struct.pack("<Q", 0),
        struct.pack("<Q", 1),
        struct.pack("<QQQQ", 1, 2**40, 0, 3),
        pickle.dumps(Payload(path)),
        b"x" * 200_000,
    ]


def message(rng: random.Random, known: list[bytes]) -> bytes:
    # Eight bytes are what a caller of Gloo says: whose place he takes.
    parts = [rng.choice(known), rng.choice(TOKENS), rng.randbytes(rng.choice((1, 8, 8, 36, 400)))]
    return b"".join(rng.choices(parts, weights=(3, 1, 5), k=rng.choice((1, 1, 2))))


class Strangers:
    """Callers at all ports; some of them stay and say nothing more."""

    def __init__(self, known: list[bytes]) -> None:
        self._known = known
        self._kept: list[socket.socket] = []
        self.places: set[Place] = set()
        self.heard: set[Place] = set()

    def greet(self, place: Place) -> None:
        """At a port that has just been opened: all messages, and the places of Gloo's ranks."""
        self.places.add(place)
        for text in [*self._known, *(struct.pack("<Q", rank) for rank in range(4))]:
            self.shout([place], text, keep=len(self._kept) % 2 == 0)

    def say(self, case: int) -> None:
        """One of the numbered messages, to every port."""
        rng = random.Random(f"stranger {case}")
        self.shout(self.places, message(rng, self._known), keep=rng.random() < 0.1)

    def shout(self, places: Iterable[Place], text: bytes, *, keep: bool) -> None:
        """Say something to each of these; nobody waits for an answer, or for a port that reads."""
        called = {}
        poll = select.poll()
        for place in places:
            link = socket.socket()
            link.setblocking(False)
            link.connect_ex(place)
            poll.register(link, select.POLLOUT)
            called[link.fileno()] = link, place
        while ready := poll.poll(2):
            for number, _ in ready:
                poll.unregister(number)
                link, place = called[number]
                with suppress(OSError):
                    link.send(text)
                    self.heard.add(place)
        for link, _ in called.values():
            if keep:
                self._kept.append(link)
            else:
                link.close()
        while len(self._kept) > 200:
            self._kept.pop(0).close()

    def leave(self) -> None:
        while self._kept:
            self._kept.pop().close()


def few_files() -> None:
    """As in most shells, only smaller: callers who are kept would use these up."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))


@pytest.mark.parametrize("words", sampled([(), ("--collective", "ring")], 1), ids=str)
@pytest.mark.timeout(400)
def test_strangers_on_every_port_change_nothing(tmp_path, words):
    cases = [case for batch in batches() for case in batch]
    losses = {}
    (tmp_path / "cluster.toml").write_text(TWO)
    known, ports = crafted(tmp_path / "unpickled"), 0
    for run in ("alone", "attacked"):
        job = subprocess.Popen(
            (*HEADWAY, "train", RECIPE, "-d", run, "--device", "cpu", "--emulate", "cluster.toml",
             "--set", f"arguments.pause={len(cases) / 2500 if run == 'attacked' else 0}", *words),
            cwd=tmp_path, env=environment(**warm_variables()), stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True, preexec_fn=few_files,
        )  # fmt: skip
        strangers = Strangers(known)
        numbers, looked = iter(cases), 0.0
        deadline = time.monotonic() + patient(150)
        while run == "attacked" and job.poll() is None:
            assert time.monotonic() < deadline, "the job does not end"
            if time.monotonic() - looked > (1.0 if len(strangers.places) > 4 else 0.0):
                for place in beyond_the_loopback(listening_anywhere(job.pid)) - strangers.places:
                    strangers.greet(place)
                looked = time.monotonic()
            case = next(numbers, None) if strangers.places else None
            if case is not None:
                strangers.say(case)
            elif strangers.places:
                time.sleep(0.01)
        err = job.communicate(timeout=patient(150))[1]
        strangers.leave()
        ports += len(strangers.places)
        assert job.returncode == 0, err
        losses[run] = [event["loss"] for event in events(tmp_path / run, "step")]
        assert {event["attempt"] for event in events(tmp_path / run, "step")} == {0}, err
        assert none_left(tmp_path / run)
    assert ports >= 5, "the heartbeat and two groups of two ranks: not every port was found"
    assert strangers.heard, "nobody heard a stranger"
    assert next(numbers, None) is None, "not every message was sent before the end"
    assert losses["attacked"] == losses["alone"]
    assert len(losses["alone"]) == 20
    assert not (tmp_path / "unpickled").exists()
