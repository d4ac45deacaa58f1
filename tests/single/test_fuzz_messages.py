"""single: no message and no caller, however crafted, does more than end its own connection."""

from __future__ import annotations

import random
import socket
import threading
import time
import tomllib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import pytest
import torch

from headway.channel.job_secret import seal, unseal
from headway.channel.pairing import _read_notice
from headway.channel.region import RegionLayout, TensorMetadata
from headway.channel.rendezvous import accept_calls, read_object
from headway.channel.sockets import _HEAD, SocketTransport
from headway.comm.backend import connection
from headway.comm.backend.connection import ConnectionMessages, PeerConnection
from headway.errors import HeadwayError
from headway.parallel.pipeline.runtime.p2p import MessageFormat, StageConnection
from headway.run.distributed.heartbeat import (
    Heartbeat,
    HeartbeatConnection,
    HeartbeatListener,
    ProcessIdentity,
    RankFailure,
    connect_heartbeat,
)
from headway.run.distributed.heartbeat_message import LineError, SignedLines, decode, encode
from headway.run.recipe.schema import apply_overrides, read_recipe
from support.fuzzing import TOKENS, batches, fuzz
from support.patience import patient

every = pytest.mark.parametrize("cases", batches(), ids=str)

RECIPE = b"""
name = "digits"
batch = "64 samples"
stop = "300 steps"
seed = 7
[model]
call = "torch.nn:Linear"
arguments = { in_features = 4, out_features = 2 }
[data]
call = "torch.utils.data:TensorDataset"
[optimizer]
call = "torch.optim:SGD"
arguments = { lr = 0.1 }
[loss]
call = "torch.nn.functional:mse_loss"
[exchange]
bucket = "auto"
"""


@every
def test_fuzz_recipes(cases, tmp_path):
    path = tmp_path / "recipe.toml"

    def read(text: bytes) -> None:
        path.write_bytes(text)
        read_recipe(path)

    fuzz("recipe", cases, [RECIPE, b'recipe = "a.b:c"\n[arguments]\nx = 1\n'], read)


@every
def test_fuzz_overrides(cases):
    raw = tomllib.loads(RECIPE.decode())

    def read(text: bytes) -> None:
        apply_overrides(raw, [text.decode(errors="replace")])

    samples = [b"batch=12", b"stop=300 steps", b"model.arguments.x=[1, 2]"]
    fuzz("override", cases, samples, read)


# -- heartbeat ------------------------------------------------------------------------------------

HELLO = encode(
    {"hello": 1, "rank": 1, "local_rank": 0, "node": 0, "pid": 5, "host": "a", "machine": "m",
     "started": "77"}
)  # fmt: skip
VERDICT = encode(
    RankFailure(kind="gone", ranks=(1, 2), what="x", why="y\n\u00e9", fix="z").to_message()
)


@every
def test_fuzz_messages_of_the_heartbeat(cases):
    """As from a rank of the job: what is signed, but makes no sense."""
    far, near = socket.socketpair()
    own = ProcessIdentity(rank=0, local_rank=0, node=0, host="a", machine="m", pid=1, started="")
    hub = Heartbeat(own)

    def read(text: bytes) -> None:
        message = decode(text)
        peer = HeartbeatConnection(near, 0.0, b"key")
        peer.identity = own
        if "hello" in message:
            ProcessIdentity.from_message(message)
        hub.loss = None
        hub._handle(peer, message, 1.0)

    texts = [b"", HELLO, VERDICT, b"doing=data+of+step+3&seconds=2.5", b"failed=x", b"bye=1",
             b"ask=1", b"state=3&doing=x&seconds=1.5", b"states=1", b"preparing=1"]  # fmt: skip
    try:
        fuzz("heartbeat message", cases, texts, read, legal=(ValueError,))
    finally:
        hub._close()
        far.close()
        near.close()


@every
def test_fuzz_lines_of_the_heartbeat(cases):
    """As from a stranger: pieces of any length, greetings, signatures that are none."""

    def read(text: bytes) -> None:
        lines = SignedLines(b"key", calls=False)
        for start in range(0, len(text), 97):
            found, _ = lines.read(text[start : start + 97])
            assert found == []

    greeting = b"0" * 32 + b"\n"
    texts = [greeting, greeting + b"f" * 10, b""]
    fuzz("heartbeat line", cases, texts, read, legal=(LineError,))


def crafted(texts: Sequence[bytes]) -> Callable[[random.Random], bytes]:
    def make(rng: random.Random) -> bytes:
        parts = [rng.choice(texts), rng.choice(TOKENS), rng.randbytes(rng.randrange(80))]
        return b"".join(rng.choices(parts, k=rng.choice((1, 1, 3))))

    return make


@every
def test_fuzz_the_port_of_the_heartbeat(cases):
    """The thread lives, and the ranks of the job are heard, while strangers call."""
    listener = HeartbeatListener.open(socket.create_server(("127.0.0.1", 0)), "127.0.0.1")
    own = ProcessIdentity(rank=0, local_rank=0, node=0, host="a", machine="", pid=1, started="")
    hub = Heartbeat(own, listener=listener)
    hub.start()
    place = listener.server.getsockname()
    make = crafted([b"0" * 32 + b"\n", HELLO + b"\n", b"f" * 32 + b" " + HELLO + b"\n"])

    def read(text: bytes) -> None:
        with socket.create_connection(place, 5) as stranger, suppress(OSError):
            stranger.sendall(text)

    try:
        fuzz("heartbeat port", cases, [b""], read, make=lambda rng, _: make(rng))
        assert hub._thread.is_alive()
        assert hub.loss is None
    finally:
        hub.stop()


def test_a_signed_line_is_worth_nothing_a_second_time():
    """Again, on another connection, for another job or attempt, and back to who has sent it."""
    caller, called = (SignedLines(b"k", calls=calls) for calls in (True, False))
    called.read(caller.greeting)
    caller.read(called.greeting)
    line = caller.write({"step": 1})
    assert called.read(line) == ([{"step": "1"}], b"")
    assert called.read(line) == ([], b"")
    for key, greeting in ((b"k", caller.greeting), (b"other", caller.greeting), (b"k", None)):
        other = SignedLines(key, calls=False)
        other.read(other.greeting if greeting is None else greeting)
        with pytest.raises(LineError):
            other.read(line)
    with pytest.raises(LineError):
        caller.read(line)


def test_a_flood_from_elsewhere_turns_no_rank_away():
    """A rank that has called and not yet proved who it is, as over a slow link."""
    listener = HeartbeatListener.open(socket.create_server(("127.0.0.1", 0)), "127.0.0.1")
    own = ProcessIdentity(rank=0, local_rank=0, node=0, host="a", machine="", pid=1, started="")
    hub = Heartbeat(own, listener=listener)
    hub.start()
    strangers = []
    try:
        rank = connect_heartbeat(listener.notice, replace(own, rank=1))
        for _ in range(300):
            place = listener.server.getsockname()
            strangers.append(socket.create_connection(place, 5, ("127.0.0.2", 0)))
        deadline = time.monotonic() + patient(10)
        while not hub.states().get(1):
            assert rank.receive(time.monotonic()) is not None, "turned away"
            assert time.monotonic() < deadline
            time.sleep(0.01)
        rank.send({"bye": 1})
    finally:
        hub.stop()
        rank.link.close()
        for stranger in strangers:
            stranger.close()


# -- channels and the backend ---------------------------------------------------------------------


@every
def test_fuzz_notices(cases):
    """What ranks tell each other through a store, signed and not."""
    good = '{"at": [["10.0.0.1", 4711], ["::1", 12]], "token": "00ff"}'

    def read(text: bytes) -> None:
        with suppress(HeadwayError):
            unseal(text, b"secret", "x")
        _read_notice(read_object(text.decode(errors="replace")))

    kept = [b'{"at": [["101", 1e9992]], "token": "00ff"}']
    fuzz("notice", cases, [good.encode()], read, kept=kept)
    assert unseal(seal(good, b"secret", "x"), b"secret", "x") == good


@every
def test_fuzz_calls_at_a_port(cases):
    """One caller says all; strangers say too little, nothing, or break off."""
    rngs = [random.Random(f"call {case}") for case in cases]
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        place = server.getsockname()

        def strangers() -> None:
            for rng in rngs:
                with socket.create_connection(place, 5) as link, suppress(OSError):
                    link.sendall(rng.randbytes(rng.randrange(36)))
            link = socket.create_connection(place, 5)
            link.sendall(b"y" * 36)
            link.close()

        thread = threading.Thread(target=strangers)
        thread.start()
        calls = accept_calls([server], 36, time.monotonic() + 60)
        link, said = next(calls)
        assert said == b"y" * 36
        link.close()
        calls.close()
        thread.join()


def pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection, whose options these parsers set."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = socket.create_connection(server.getsockname())
        return far, server.accept()[0]


def _frames(form: TensorMetadata) -> list[bytes]:
    put = _HEAD.pack(1, 0, 1, *form.block(), 0) + b"\0" * form.nbytes
    return [put, _HEAD.pack(2, 1, 5, *[0] * 12, 0), _HEAD.pack(3, 0, 0, *[0] * 12, 0), put + put]


@every
@pytest.mark.parametrize("dynamic", [False, True])
def test_fuzz_frames_of_a_channel(cases, dynamic):
    """As from the peer itself: the thread that reads ends in order, whatever comes."""
    form = TensorMetadata((2, 3), torch.float32)
    ended: list[BaseException] = []
    hook, threading.excepthook = threading.excepthook, lambda args: ended.append(args.exc_value)

    def read(text: bytes) -> None:
        far, near = pair()
        layout = RegionLayout(2, 0 if dynamic else form.nbytes)
        channel = SocketTransport("rank 1", layout, 5.0, near)
        try:
            with suppress(OSError):
                far.sendall(text)
            far.close()
            channel._thread.join(5)
            assert not channel._thread.is_alive()
            assert not ended, ended
        finally:
            channel.close(patient=False)

    try:
        fuzz(f"frame {dynamic}", cases, _frames(form), read)
    finally:
        threading.excepthook = hook


@every
def test_fuzz_frames_of_the_backend(cases):
    """As from another rank of the group: a receive gets its tensor, or says who is gone."""
    head = connection._HEAD
    good = head.pack(connection._DATA, 3, 8) + b"\0" * 8
    early = head.pack(connection._DATA, 9, 4) + b"1234"
    bye = head.pack(connection._BYE, 0, 0)

    def read(text: bytes) -> None:
        far, near = pair()
        own = ConnectionMessages([[], [PeerConnection(1, near)]])
        try:
            with suppress(OSError):
                far.sendall(text)
            far.close()
            with suppress(connection.ConnectionBroken):
                own.recv([torch.zeros(2)], 1, 3).wait(timedelta(seconds=5))
        finally:
            own.close()

    # Room for it was filled with zeros at once: 40 s for a head of 24 bytes.
    kept = [head.pack(connection._DATA, 9, size) + good for size in (2**32, 2**40, 2**64 - 1)]
    fuzz("backend frame", cases, [good, early + good, bye, early + bye], read, kept=kept)


@every
def test_fuzz_announcements(cases):
    wire = StageConnection(None, 1, torch.device("cpu"))
    values = [[torch.ones(2), 3], {"a": (torch.ones(1), None, 2.5)}, [[[torch.ones(3, 4)]]]]
    texts = [wire.written(MessageFormat.of([value])[0]) for value in values]

    def read(text: bytes) -> None:
        form = wire.read(text)
        form.packed  # noqa: B018

    fuzz("announcement", cases, texts, read)
