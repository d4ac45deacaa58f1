"""emulated: strangers who speak to every port of a run change nothing and end nothing."""

from __future__ import annotations

import os
import pickle
import random
import resource
import select
import socket
import struct
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from headway.run.distributed.heartbeat_message import encode
from support.commands import events, headway_here, none_left
from support.emulated import needs_root
from support.fuzzing import TOKENS, batches
from support.open_ports import beyond_the_loopback, descendants, listening
from support.sampling import sampled

pytestmark = needs_root

Place = tuple[str, int]
TWO = 'nodes = 2\nbetween = { rate = "100 Mbit/s" }\n'
# Of one rank with strangers against the same without.
MOST_MIB = 16
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


def few_files(pid: int) -> None:
    """As in most shells, only smaller: callers who are kept would use these up."""
    with suppress(OSError):
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (400, 400))


def resident_mib(pid: int) -> float:
    """What a process holds in memory; 0 where it is gone."""
    with suppress(OSError, IndexError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * resource.getpagesize() / 2**20
    return 0.0


class Company:
    """Looks after the processes of a run, and lets strangers speak to them, on a thread.

    Attributes:
        most: MiB in memory of the largest process of the run at any time.
    """

    def __init__(self, strangers: Strangers, cases: Sequence[int]) -> None:
        self.most = 0.0
        self._strangers, self._numbers, self._left = strangers, iter(cases), len(cases)
        self._limited: set[int] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="strangers")

    def __enter__(self) -> Company:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._strangers.leave()

    @property
    def said_all(self) -> bool:
        return self._left == 0

    def _run(self) -> None:
        looked = 0.0
        while not self._over.is_set():
            if time.monotonic() - looked > (1.0 if len(self._strangers.places) > 4 else 0.05):
                self._look()
                looked = time.monotonic()
            case = next(self._numbers, None) if self._strangers.places else None
            if case is None:
                self._over.wait(0.02)
            else:
                self._strangers.say(case)
                self._left -= 1

    def _look(self) -> None:
        for pid in descendants(os.getpid()):
            with suppress(OSError):
                found = beyond_the_loopback(listening([pid]))
                if found and pid not in self._limited:
                    few_files(pid)
                    self._limited.add(pid)
                # Without messages nobody calls at all.
                for place in found - self._strangers.places if self._left else ():
                    self._strangers.greet(place)
        self.most = max(self.most, *map(resident_mib, self._limited), 0.0)


@pytest.mark.parametrize("words", sampled([(), ("--collective", "ring")], 1), ids=str)
@pytest.mark.timeout(400)
def test_strangers_on_every_port_change_nothing(tmp_path, words):
    cases = [case for batch in batches() for case in batch]
    losses, most = {}, {}
    (tmp_path / "cluster.toml").write_text(TWO)
    strangers = Strangers(crafted(tmp_path / "unpickled"))
    for run, messages in (("alone", []), ("attacked", cases)):
        with Company(strangers, messages) as company:
            done = headway_here(
                "train", RECIPE, "-d", run, "--device", "cpu", "--emulate", "cluster.toml",
                "--set", f"arguments.pause={len(messages) / 2500}", *words, cwd=tmp_path,
            )  # fmt: skip
        assert done.code == 0, done.err
        assert company.said_all, "not every message was sent before the end"
        losses[run] = [event["loss"] for event in events(tmp_path / run, "step")]
        assert {event["attempt"] for event in events(tmp_path / run, "step")} == {0}, done.err
        assert none_left(tmp_path / run)
        most[run] = company.most
    ports = len(strangers.places)
    assert ports >= 5, "the heartbeat and two groups of two ranks: not every port was found"
    assert strangers.heard, "nobody heard a stranger"
    assert losses["attacked"] == losses["alone"]
    assert len(losses["alone"]) == 20
    assert not (tmp_path / "unpickled").exists()
    grown = most["attacked"] - most["alone"]
    print(f"{len(cases)} messages to each of {ports} ports; MiB of a rank: {most}")
    assert grown < MOST_MIB, "strangers make a rank keep what they send"
