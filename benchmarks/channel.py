"""A tensor from one process to another: channels against gRPC, Gloo and plain TCP, one host.

    python benchmarks/channel.py [rounds [sizes ...]]        # sizes as "1 KiB"

Half of a ping-pong, in microseconds, after which the receiver can use the tensor; "add": it has
been added to an accumulator. "channel" copies a tensor into the receiver's memory; "in place": it
has been computed there, before the clock starts, and nothing is copied. "memory": one copy, or one
sum, of so many bytes within a process, which is as fast as a method that copies can be. "stream"
and "gloo new": what pipelines do, a receiver with new memory for each message. In each round all
methods take turns; medians within a round, then the median of the rounds' ratios. gRPC (`pip
install grpcio`): unary, bytes both ways, one channel, no limit of size; without it that column is
left out.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent import futures
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from headway.channel import Channel, open_stream
from headway.units import parse_bytes

SIZES = ["1 KiB", "16 KiB", "256 KiB", "1 MiB", "4 MiB", "16 MiB", "64 MiB"]
BARS = {
    "grpc": {"1 KiB": 100, "1 MiB": 40, "64 MiB": 40},
    "gloo": {"1 MiB": 5, "4 MiB": 5, "16 MiB": 5, "64 MiB": 5},
}
ADD_BAR = 30
Turn = Callable[[bool], None]
"""One ping-pong, at the end that begins (True) or at the other."""


class Way(NamedTuple):
    """How a tensor goes; `prepare`: what both ends do before the clock of a turn starts."""

    turn: Turn
    prepare: Callable[[], Any] | None = None


def times(nbytes: int, slow: bool) -> int:
    return max(3, min(300 if slow else 3000, (256 << 20) // nbytes // 4))


class Methods:
    """All ways for tensors of one size; `add`: with the sum at the receiver."""

    def __init__(self, nbytes: int, link: socket.socket, call: Any) -> None:
        self.rank, self.count = dist.get_rank(), nbytes // 4
        self.x, self.y = torch.ones(self.count), torch.zeros(self.count)
        self.sum = torch.zeros(self.count)
        self.link, self.call = link, call
        shape = (self.count,)
        self.channels = {
            "channel": Channel(1 - self.rank, shape=shape, provider="shared_memory"),
            "channel tcp": Channel(1 - self.rank, shape=shape, provider="socket"),
        }
        self.stream = open_stream(1 - self.rank, ahead=4)
        self.prepared = Channel(1 - self.rank, shape=(1,), provider="shared_memory")

    def close(self) -> None:
        for channel in (*self.channels.values(), self.stream, self.prepared):
            channel.close()

    def ways(self) -> dict[str, Way]:
        turns = self._turns()
        found = {name: Way(turn) for name, turn in turns.items()}
        channel = self.channels["channel"]
        made = {"": lambda: take(channel), " add": lambda: channel.add_into(self.sum)}
        for name, get in made.items():
            turn = self._both(channel.put, get)
            found[f"channel in place{name}"] = Way(turn, lambda: channel.buffer.fill_(1.0))
        return found

    def both_prepared(self) -> None:
        """The end that begins goes on when the other one has prepared itself, too."""
        if self.rank == 0:
            take(self.prepared)
        else:
            self.prepared.put(self.x[:1])

    def _turns(self) -> dict[str, Turn]:
        found: dict[str, Turn] = {
            "memory": lambda first: first and (self.y.copy_(self.x), self.y.copy_(self.x)),
            "memory add": lambda first: first and (self.sum.add_(self.x), self.sum.add_(self.x)),
        }
        for name, channel in self.channels.items():
            found[name] = self._both(lambda c=channel: c.put(self.x), lambda c=channel: take(c))
            found[f"{name} add"] = self._both(
                lambda c=channel: c.put(self.x), lambda c=channel: c.add_into(self.sum)
            )
        gloo = [lambda: dist.send(self.x, 1 - self.rank), lambda: dist.recv(self.y, 1 - self.rank)]
        found["gloo"] = self._both(*gloo)
        found["gloo add"] = self._both(gloo[0], lambda: (gloo[1](), self.sum.add_(self.y)))
        form, peer = [((self.count,), FLOAT)], 1 - self.rank
        found["gloo new"] = self._both(gloo[0], lambda: dist.recv(torch.empty(self.count), peer))
        found["stream"] = self._both(
            lambda: self.stream.put(0, [self.x]), lambda: self.stream.take(0, form)
        )
        found["tcp"] = self._both(self._send, self._receive)
        if self.call is not None:
            found["grpc"] = self._rpc(add=False)
            found["grpc add"] = self._rpc(add=True)
        return found

    def _both(self, give: Callable[[], Any], get: Callable[[], Any]) -> Turn:
        def turn(first: bool) -> None:
            if first:
                give()
                get()
            else:
                get()
                give()

        return turn

    def _send(self) -> None:
        self.link.sendall(memoryview(self.x.numpy()).cast("B"))

    def _receive(self) -> None:
        left = memoryview(self.y.numpy()).cast("B")
        while left:
            left = left[self.link.recv_into(left) :]

    def _rpc(self, add: bool) -> Turn:
        """The server answers in its own threads; with `add` both ends sum."""

        def turn(first: bool) -> None:
            if first:
                answer = self.call[add](self.x.numpy().tobytes())
                came = torch.frombuffer(answer, dtype=FLOAT)
                if add:
                    self.sum.add_(came)

        return turn


FLOAT = torch.float32


def take(channel: Channel) -> None:
    with channel.get():
        pass


def connection() -> socket.socket:
    """Plain TCP between the two."""
    if dist.get_rank() == 0:
        with socket.create_server(("127.0.0.1", 0)) as server:
            dist.broadcast(torch.tensor([server.getsockname()[1]]), 0)
            link = server.accept()[0]
    else:
        port = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(port, 0)
        link = socket.create_connection(("127.0.0.1", int(port)))
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return link


def grpc_ends() -> tuple[Any, Any]:
    """At rank 1 a server, at rank 0 the two calls; None where grpcio is not installed."""
    if importlib.util.find_spec("grpc") is None:
        return None, None
    import grpc

    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    port = torch.zeros(1, dtype=torch.int64)
    server = None
    if dist.get_rank() == 1:
        sums: dict[int, torch.Tensor] = {}

        def answer(request: bytes, context: Any) -> bytes:
            torch.frombuffer(request, dtype=FLOAT)
            return request

        def add(request: bytes, context: Any) -> bytes:
            came = torch.frombuffer(request, dtype=FLOAT)
            sums.setdefault(len(came), torch.zeros(len(came))).add_(came)
            return request

        handlers = {n: grpc.unary_unary_rpc_method_handler(f) for n, f in
                    (("Pass", answer), ("Add", add))}  # fmt: skip
        server = grpc.server(futures.ThreadPoolExecutor(1), options=options)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("B", handlers),))
        port[0] = server.add_insecure_port("127.0.0.1:0")
        server.start()
    dist.broadcast(port, 1)
    to = grpc.insecure_channel(f"127.0.0.1:{int(port)}", options=options)
    return server, {False: to.unary_unary("/B/Pass"), True: to.unary_unary("/B/Add")}


def measured(way: Way, methods: Methods, count: int) -> float:
    """Microseconds of one way, median."""
    first, seconds = dist.get_rank() == 0, []
    dist.barrier()
    for number in range(count + max(2, count // 10)):
        if way.prepare is not None:
            way.prepare()
            methods.both_prepared()
        start = time.perf_counter()
        way.turn(first)
        if number >= max(2, count // 10):
            seconds.append(time.perf_counter() - start)
    dist.barrier()
    return statistics.median(seconds) / 2 * 1e6


def work(rounds: int, sizes: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="The given buffer is not writable")
    link = connection()
    server, call = grpc_ends()
    for size in sizes:
        methods = Methods(parse_bytes(size), link, call)
        ways = methods.ways()
        table: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(rounds):
            for name in ways if number % 2 == 0 else reversed(ways):
                slow = "grpc" in name or "gloo" in name
                count = times(parse_bytes(size), slow)
                table[name].append(measured(ways[name], methods, count))
        if dist.get_rank() == 0:
            report(size, table)
        methods.close()
        dist.barrier()
    if server is not None:
        server.stop(None)


def report(size: str, table: dict[str, list[float]]) -> None:
    print(f"{size}   load {os.getloadavg()[0]:.1f}")
    for name, values in table.items():
        print(f"  {name:20} {statistics.median(values):12.1f} us")
    large = parse_bytes(size) >= 4 << 20
    for peer in ("grpc", "gloo"):
        bar = BARS.get(peer, {}).get(size)
        add_bar = ADD_BAR if peer == "grpc" and large else None
        for own in ("memory", "channel", "channel in place"):
            compare(table, peer, own, bar if own != "memory" else None)
            compare(table, f"{peer} add", f"{own} add", add_bar if own != "memory" else None)
    compare(table, "tcp", "channel", None)
    compare(table, "gloo new", "stream", None)


def compare(table: dict[str, list[float]], peer: str, own: str, bar: float | None) -> None:
    if peer not in table:
        return
    ratios = [p / c for p, c in zip(table[peer], table[own], strict=True)]
    goal = f" (at least {bar})" if bar else ""
    print(
        f"  {peer} / {own}: {statistics.median(ratios):.1f}{goal}, "
        f"{min(ratios):.1f} to {max(ratios):.1f}",
        flush=True,
    )


def main() -> None:
    if len(sys.argv) > 2 and sys.argv[1] == "--rank":
        rank, folder, rounds, *sizes = sys.argv[2:]
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/meet", rank=int(rank), world_size=2
        )
        work(int(rounds), sizes)
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)  # gRPC's threads are in no hurry
    rounds, *sizes = sys.argv[1:] or ["3"]
    if importlib.util.find_spec("grpc") is None:
        print("grpcio is not installed: without gRPC")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--rank"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        ranks = [
            subprocess.Popen([*command, str(r), folder, rounds, *(sizes or SIZES)], env=environment)
            for r in (0, 1)
        ]
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise SystemExit("a rank failed")


if __name__ == "__main__":
    main()
