"""The launcher's part of an elastic job: which workers there are, world after world.

A world begins with a worker in each slot. It is over when a worker fails, or when workers leave it
because they have lost another one or have been told of other hosts. Once all of them have left or
ended, the slots that are there then make the next world: workers that left in order keep their
process and their state, others are started. A host on which a worker failed is excluded, and its
other workers are ended. The job is complete when all workers have ended with status 0.

One thread looks every `_TICK_SECONDS` at the hosts, the processes and what workers say.

What imports torch (the store, `elastic_world`) is imported where a job begins or goes on, so that
errors of the command line come at once.
"""

from __future__ import annotations

import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from headway.channel.job_secret import SECRET
from headway.errors import RunError, Stalled, UsageError, WorkerFailed
from headway.launch.elastic.discovery import HostDiscovery
from headway.launch.elastic.hosts import ElasticHosts, Slot
from headway.launch.elastic.settings import ElasticSettings
from headway.launch.elastic.worker_process import ElasticProcess, explain_status, is_here
from headway.launch.forkserver import restored_environment
from headway.launch.preflight import threads_for
from headway.run.distributed.launch_env import LOOPBACK, ElasticWorkerEnv, LaunchEnv
from headway.units import counted

_TICK_SECONDS = 0.1
_LEAVE_SECONDS = 15.0
"""For a worker that no world has a place for to end by itself."""
_STORE_SECONDS = 5.0


def run_elastic(
    command: Sequence[str],
    settings: ElasticSettings,
    *,
    variables: Mapping[str, str],
    output: Path | None,
    tell: Callable[[str], None],
) -> str | None:
    """Run a Python program as an elastic job, until it is complete.

    Args:
        command: The program's words, behind those of the interpreter.
        variables: Of the environment of all workers.
        output: A folder in which the output of each goes to rank.N, with its first rank; None: the
            terminal.
        tell: Told of worlds, failures and exclusions.

    Returns:
        The name of the signal that stopped the job, or None when it is complete.

    Raises:
        UsageError: The discovery script fails from the start.
        WorkerFailed: No host is left on which no worker has failed, or a worker failed when others
            were done.
        Stalled: There were too few slots for too long.
        RunError: The reset limit is reached.
    """
    secret = secrets.token_hex(32)
    with (
        restored_environment({SECRET: secret}),
        _signals_noticed() as stopped,
        ExitStack() as stack,
    ):
        discovery = HostDiscovery(settings, tell)
        stack.callback(discovery.close)
        hosts = ElasticHosts(settings.cooldown)
        _wait_for_slots(hosts, discovery, settings, stopped)
        if stopped():
            return stopped()
        job = ElasticDriver(
            hosts=hosts,
            discovery=discovery,
            settings=settings,
            command=(sys.executable, *command),
            variables={**variables, SECRET: secret},
            output=output,
            tell=tell,
        )
        stack.callback(job.end)
        job.start()
        while not (stopped() or job.turn(time.monotonic())):
            time.sleep(_TICK_SECONDS)
        return stopped()


@contextmanager
def _signals_noticed() -> Iterator[Callable[[], str | None]]:
    """Inside, the signals that end a job are kept; the function tells the first of them."""
    names: list[str] = []

    def keep(number: int, _: FrameType | None) -> None:
        names.append(signal.Signals(number).name)

    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    heard = [each for each in numbers if signal.getsignal(each) is not signal.SIG_IGN]
    if threading.current_thread() is not threading.main_thread():
        heard = []
    before = {number: signal.signal(number, keep) for number in heard}
    try:
        yield lambda: names[0] if names else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait_for_slots(
    hosts: ElasticHosts,
    discovery: HostDiscovery,
    settings: ElasticSettings,
    stopped: Callable[[], str | None],
) -> None:
    """Wait until the job can begin."""
    begun = time.monotonic()
    while not stopped():
        now = time.monotonic()
        hosts.update(discovery.poll(now), now)
        there = len(hosts.slots())
        if there >= settings.start_processes:
            return
        if now > begun + settings.seconds:
            raise _too_few(there, settings.start_processes, settings, "-np")
        time.sleep(_TICK_SECONDS)


def _too_few(there: int, wanted: int, settings: ElasticSettings, option: str) -> Stalled:
    return Stalled(
        f"{counted(there, 'slot')} after {settings.seconds:.0f} s, and {option} wants {wanted}",
        why="Hosts on which a worker has failed do not count.",
        fix="Look at what the discovery script prints; --elastic-timeout is how long to wait.",
    )


@dataclass
class _Worker:
    """A worker of the present world.

    Attributes:
        name: Of this process; a slot's next one has another name.
        left: Whether it has left the world in order, and waits for the next one.
        expelled: Whether it was told to end.
        status: With which it has ended.
    """

    name: str
    slot: Slot
    rank: int
    process: ElasticProcess
    left: bool = False
    expelled: bool = False
    status: int | None = None

    @property
    def failed(self) -> bool:
        return bool(self.status) and not self.expelled

    @property
    def finished(self) -> bool:
        return self.status == 0 and not self.expelled


@dataclass
class ElasticDriver:
    """See the module; times are seconds of a monotonic clock."""

    hosts: ElasticHosts
    discovery: HostDiscovery
    settings: ElasticSettings
    command: Sequence[str]
    variables: Mapping[str, str]
    output: Path | None
    tell: Callable[[str], None]
    _world: int = 0
    _changes: int = 0
    _told: tuple[Slot, ...] = ()
    _over: int = 0
    _over_since: float = 0.0
    _short_since: float | None = None
    _store: Any = None
    _address: str = ""
    _port: int = 0
    _workers: list[_Worker] = field(default_factory=list)
    _leaving: list[tuple[ElasticProcess, float]] = field(default_factory=list)

    def start(self) -> None:
        """Listen, and begin the first world."""
        from headway.run.distributed.job_store import host_job_store
        from headway.run.distributed.rendezvous import listen

        others = [slot.host for slot in self.hosts.slots() if not is_here(slot.host)]
        alone = not (others or self.settings.interface)
        place = LaunchEnv(
            ranks=2,
            local_ranks=2 if alone else 1,
            master_address=others[0] if others else LOOPBACK,
            interface=self.settings.interface,
        )
        server, self._address = listen(place)
        self._port = server.getsockname()[1]
        self._store = host_job_store(server, _STORE_SECONDS)
        self._begin_world(time.monotonic())

    def turn(self, now: float) -> bool:
        """Look at everything once, and do what follows; whether the job is complete."""
        self.hosts.update(self.discovery.poll(now), now)
        self._look_at_workers(now)
        if not all(worker.left or worker.status is not None for worker in self._workers):
            self._give_up_late_workers(now)
            self._announce_change()
            return False
        if self._complete():
            return True
        there = self._slots()
        if self.hosts.all_excluded:
            raise self._failure("and no host is left on which no worker has failed")
        if len(there) < self.settings.min_processes:
            self._short_since = now if self._short_since is None else self._short_since
            if now > self._short_since + self.settings.seconds:
                raise _too_few(len(there), self.settings.min_processes, self.settings, "--min-np")
            return False
        limit = self.settings.reset_limit
        if limit is not None and self._world > limit:
            raise RunError(
                f"the workers of this job have changed {counted(self._world, 'time')}",
                why=f"--reset-limit is {limit}; {self._last_failure() or 'hosts came and went'}.",
                fix="Give a higher limit, or none; look for errors of the workers above.",
            )
        self._begin_world(now)
        return False

    def end(self) -> None:
        """End all workers."""
        processes = [worker.process for worker in self._workers]
        processes += [process for process, _ in self._leaving]
        for process in processes:
            process.stop()
        for process in processes:
            process.end()

    # -- looking -----------------------------------------------------------------------------------

    def _look_at_workers(self, now: float) -> None:
        from headway.run.distributed.elastic_world import arrival

        for worker in [worker for worker in self._workers if worker.status is None]:
            worker.status = worker.process.status()
            if worker.failed:
                self._exclude(worker, explain_status(worker.status or 0), now)
            if worker.status is not None or worker.left:
                continue
            came_from = arrival(self._store, worker.name)
            if came_from == self._world:
                self._world_is_over(now)
            # Who waits, from whichever world, does not go into one that is over.
            worker.left = came_from is not None and self._over == self._world
        ended = [pair for pair in self._leaving if pair[0].status() is not None]
        self._leaving = [pair for pair in self._leaving if pair not in ended]
        for process, until in self._leaving:
            if now > until:
                process.stop()

    def _exclude(self, failed: _Worker, how: str, now: float) -> None:
        """A worker has failed: its host is excluded, and the world is over."""
        self.tell(
            f"rank {failed.rank} on {failed.slot} {how}; {failed.slot.host} is excluded"
            + ("" if self.settings.cooldown is None else " for a while")
        )
        self.hosts.exclude(failed.slot.host, now)
        for worker in self._workers:
            if worker.slot.host == failed.slot.host and worker.status is None:
                worker.expelled = True
                worker.process.stop()
        self._world_is_over(now)

    def _world_is_over(self, now: float) -> None:
        if self._over < self._world:
            self._over, self._over_since = self._world, now
            self._give_notice(0)

    def _give_up_late_workers(self, now: float) -> None:
        """End workers that stay in a world that is over, unless others have completed it."""
        done = any(worker.finished for worker in self._workers)
        if self._over < self._world or done or now < self._over_since + self.settings.seconds:
            return
        for worker in self._workers:
            if not worker.left and worker.status is None and not worker.expelled:
                worker.process.stop()
                worker.expelled = True
                how = f"has not left its world for {self.settings.seconds:.0f} s"
                self._exclude(worker, how, now)

    # -- deciding ----------------------------------------------------------------------------------

    def _slots(self) -> tuple[Slot, ...]:
        alive = {worker.slot.host for worker in self._workers if worker.status is None}
        return self.hosts.slots(alive, self.settings.max_processes)

    def _announce_change(self) -> None:
        """Tell the workers that the next world would be another one, once for each change."""
        from headway.run.distributed.elastic_world import HostChange

        if self._over == self._world:
            return
        there, before = set(self._slots()), set(self._told)
        if len(there) < self.settings.min_processes:
            there = set()
        if there == before:
            return
        self._told = tuple(there)
        now_in_use = {worker.slot for worker in self._workers}
        if there == now_in_use:  # back again before anybody has left
            return
        change = HostChange.REMOVED if now_in_use - there else HostChange.NONE
        change |= HostChange.ADDED if there - now_in_use else HostChange.NONE
        self._changes += 1
        self.tell(f"hosts have changed: {counted(len(there), 'slot')}")
        self._give_notice(change)

    def _give_notice(self, change: int) -> None:
        from headway.run.distributed.elastic_world import ElasticNotice, HostChange, announce

        announce(
            self._store,
            ElasticNotice(
                over=self._over,
                world=self._world,
                changes=self._changes,
                change=HostChange(change),
            ),
        )

    def _complete(self) -> bool:
        """Whether some worker has finished, and all others have ended or wait.

        Raises:
            WorkerFailed: One of them has failed.
        """
        if any(worker.finished for worker in self._workers):
            if self._last_failure():
                raise self._failure("when others had finished")
            return True
        if all(worker.failed for worker in self._workers):
            raise self._failure("and no worker is left")
        return False

    def _last_failure(self) -> str:
        failed = [worker for worker in self._workers if worker.failed]
        if not failed:
            return ""
        return f"rank {failed[0].rank} on {failed[0].slot} {explain_status(failed[0].status or 0)}"

    def _failure(self, when: str) -> WorkerFailed:
        what = self._last_failure() or "workers did not leave a world that was over"
        return WorkerFailed(
            f"{what}, {when}",
            where=f"world {self._world}",
            why=f"Excluded: {', '.join(self.hosts.excluded) or 'no host'}.",
            fix="Look for its error above. A host comes back after a while with "
            "--blacklist-cooldown-range MIN MAX; TorchState(commit_file=...) keeps the state.",
        )

    # -- the next world ----------------------------------------------------------------------------

    def _begin_world(self, now: float) -> None:
        from headway.run.distributed.elastic_world import ElasticPlace, ElasticWorld, announce

        slots = self._slots()
        self._check_reachable(slots)
        there = [worker for worker in self._workers if worker.status is None]
        kept = {worker.slot: worker for worker in there if not worker.expelled}
        kept = {slot: worker for slot, worker in kept.items() if slot in slots}
        # Who has no place reads that there is a world without it, and ends.
        self._leaving += [
            (worker.process, now + _LEAVE_SECONDS)
            for worker in there
            if worker not in kept.values()
        ]
        self._world += 1
        self._told, self._short_since = slots, None
        if self._world > 1:
            self.tell(f"world {self._world}: {counted(len(slots), 'process')}")
            if not kept:
                self.tell("no worker of the last world is left: its state is, in a commit file")
        hosts = list(dict.fromkeys(slot.host for slot in slots))
        names = [kept[slot].name if slot in kept else f"{slot}/{self._world}" for slot in slots]
        places = {
            name: ElasticPlace(
                rank=rank,
                local_rank=slot.number,
                local_ranks=sum(other.host == slot.host for other in slots),
                node_rank=hosts.index(slot.host),
                host=slot.host,
            )
            for rank, (name, slot) in enumerate(zip(names, slots, strict=True))
        }
        world = ElasticWorld(
            number=self._world,
            master_address=self._address if is_here(hosts[0]) else hosts[0],
            places=places,
        )
        announce(self._store, world)
        self._workers = [
            replace(kept[slot], rank=rank, left=False)
            for rank, slot in enumerate(slots)
            if slot in kept
        ]
        for rank, (name, slot) in enumerate(zip(names, slots, strict=True)):
            if slot not in kept:
                process = self._start(name, places[name], len(slots), len(hosts))
                self._workers.append(_Worker(name, slot, rank, process))

    def _start(self, name: str, place: Any, ranks: int, nodes: int) -> ElasticProcess:
        env = ElasticWorkerEnv(self._address, self._port, name)
        output = self.output
        if output is not None:
            output /= f"rank.{place.rank}"
        horovod = {
            "RANK": place.rank,
            "SIZE": ranks,
            "LOCAL_RANK": place.local_rank,
            "LOCAL_SIZE": place.local_ranks,
            "CROSS_RANK": place.node_rank,
            "CROSS_SIZE": nodes,
            "HOSTNAME": place.host,
            "ELASTIC": 1,
        }
        variables = {
            "OMP_NUM_THREADS": str(threads_for(place.local_ranks)),
            **self.variables,
            **{f"HOROVOD_{key}": str(value) for key, value in horovod.items()},
            **env.to_variables(),
        }
        return ElasticProcess(place.host, self.command, variables, self.settings.ssh, output)

    def _check_reachable(self, slots: Sequence[Slot]) -> None:
        """A launcher that listens at the loopback cannot be reached by other hosts."""
        others = [slot.host for slot in slots if not is_here(slot.host)]
        if others and self._address == LOOPBACK:
            raise UsageError(
                f"the host {others[0]} cannot reach the launcher, which began with this machine",
                fix="Start it with --network-interfaces NAME, where other hosts reach this one.",
            )
