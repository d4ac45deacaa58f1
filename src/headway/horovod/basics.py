"""`init` and `shutdown`, the ranks, what this build has, process sets and the timeline.

Horovod's interface has no object that a program holds: all functions are of the one session of the
process, `SESSION`.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from headway.errors import Stalled, UsageError
from headway.horovod.engine.connections import Meeting, meet
from headway.horovod.engine.engine import Engine, Operation
from headway.horovod.engine.process_set import ProcessSet
from headway.horovod.engine.request import GLOBAL_SET, Request
from headway.horovod.engine.settings import HorovodSettings
from headway.horovod.engine.trace import OperationTrace
from headway.horovod.exceptions import RankRemoved
from headway.run.distributed.elastic_world import ElasticMember
from headway.run.distributed.launch_env import ElasticWorkerEnv, LaunchEnv, horovod_variables

_NOTICE_SECONDS = 1.0
_MOST_FAILURES = 3
"""Of meetings, one after the other, in which no rank was lost."""

global_process_set = ProcessSet([])
"""All ranks."""


class Session:
    """What `hvd.init` makes and `hvd.shutdown` ends."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._meeting: Meeting | None = None
        self._sets: dict[int, ProcessSet] = {}
        self._counts: dict[tuple[str, int], Iterator[int]] = {}
        self._joins = 0
        self._at_exit = False
        self._begun = False
        self.member: ElasticMember | None = None
        """Of an elastic job, of which this process is a worker from its first `start` on."""
        self.newcomers = True
        """Whether a rank of this session had been in none before; it has no state."""

    @property
    def engine(self) -> Engine:
        """The engine.

        Raises:
            ValueError: There is none.
        """
        if self._engine is None:
            raise ValueError("Horovod has not been initialized; use hvd.init().")
        return self._engine

    @property
    def meeting(self) -> Meeting:
        """Who has met."""
        _ = self.engine
        assert self._meeting is not None
        return self._meeting

    @property
    def started(self) -> bool:
        return self._engine is not None

    def start(self, process_sets: Sequence[ProcessSet]) -> None:
        """Meet the others, start the engine, register process sets; collective.

        Raises:
            RankRemoved: The elastic job goes on without this process.
        """
        settings = HorovodSettings.of(horovod_variables())
        env = ElasticWorkerEnv.here()
        if env is None:
            self._begin(meet(LaunchEnv.here(), settings.start_seconds), settings, process_sets)
            return
        if self.member is None:
            self.member = ElasticMember(env)
        self.newcomers, failures = False, 0
        while True:
            world, store = self.member.next_world()
            place = self.member.place(world)
            if place is None:
                raise RankRemoved
            try:
                meeting = meet(
                    place,
                    settings.start_seconds,
                    store,
                    self.member.over,
                    newcomer=not self._begun,
                )
                # Kept also where this world fails: for the newcomer it may have begun.
                self.newcomers |= meeting.newcomers
                self._begin(meeting, settings, process_sets)
            except (RuntimeError, Stalled, OSError):
                # Some rank of this world is gone; the launcher, if it lives, makes another one.
                self.end()
                failures = 0 if self.member.over.wait(_NOTICE_SECONDS) else failures + 1
                if failures == _MOST_FAILURES:
                    raise
            else:
                return

    def _begin(
        self, meeting: Meeting, settings: HorovodSettings, process_sets: Sequence[ProcessSet]
    ) -> None:
        self._meeting = meeting
        self._engine = Engine(meeting, settings)
        self._engine.start()
        # Names that are made up must be the same on all ranks, also on one that comes back.
        self._counts, self._joins = {}, 0
        ranks = range(self._engine.size)
        global_process_set.register(GLOBAL_SET, ranks, self._engine.rank)
        self._sets = {GLOBAL_SET: global_process_set}
        if not self._at_exit:
            self._at_exit = True
            atexit.register(self.end)
        self._collective(Request("barrier", "init"))
        self._begun = True
        if settings.timeline and self._engine.rank == 0:
            self.trace(settings.timeline, mark_cycles=settings.mark_cycles)
        for process_set in process_sets:
            self.add(process_set)

    def end(self) -> None:
        """End the engine."""
        engine, self._engine, self._meeting = self._engine, None, None
        if engine is not None:
            engine.shutdown()
        for process_set in self._sets.values():
            process_set.register(None, process_set.ranks, -1)
        self._sets = {}

    def name(self, kind: str, given: str | None, process_set: ProcessSet) -> str:
        """The name by which an operation is matched: the given one, or one that is made up.

        The n-th operations without a name of a kind and process set are one operation.
        """
        if given is not None:
            return f"{kind}.{given}"
        counter = self._counts.setdefault((kind, process_set.process_set_id or 0), count(1))
        # Ranks that joined early have counted less.
        epoch = f"{self._joins}." if self._joins else ""
        return f"{kind}.noname.{epoch}{next(counter)}"

    def join(self) -> int:
        """Take part in what the others do until all have joined; the rank that came last."""
        last = int(self._collective(Request("join", "join")))
        self._joins += 1
        self._counts = {}
        return last

    def _collective(self, request: Request) -> Any:
        return self.engine.wait(self.engine.submit(Operation(request)))

    def add(self, process_set: ProcessSet) -> ProcessSet:
        """Register a process set; collective."""
        engine = self.engine
        ranks = tuple(process_set.ranks or ())
        if not ranks or ranks[0] < 0 or ranks[-1] >= engine.size:
            raise ValueError(
                f"a process set of the ranks {list(ranks)}, with the ranks 0 to {engine.size - 1}"
            )
        if process_set.process_set_id is not None:
            raise ValueError(f"{process_set} is registered already")
        name = self.name("add_process_set", None, global_process_set)
        number = self._collective(Request("add_set", name, ranks=ranks))
        # Its ranks meet in rank 0's store, which rank 0 must not close before.
        self._collective(Request("barrier", name))
        process_set.register(number, ranks, engine.rank)
        self._sets[number] = process_set
        return process_set

    def remove(self, process_set: ProcessSet) -> bool:
        """The inverse of `add`; collective."""
        number = process_set.process_set_id
        if number in (None, GLOBAL_SET) or number not in self._sets:
            return False
        name = self.name("remove_process_set", None, global_process_set)
        known = self._collective(Request("remove_set", name, root=number))
        del self._sets[number]
        process_set.register(None, process_set.ranks, -1)
        return bool(known)

    def sets(self) -> dict[int, ProcessSet]:
        """The registered process sets by their number."""
        _ = self.engine
        return dict(self._sets)

    def trace(self, path: str, *, mark_cycles: bool) -> None:
        """Begin to write a timeline, or with "" end it."""
        engine = self.engine
        previous, engine.trace = engine.trace, None
        if previous is not None:
            previous.close()
        if path and engine.rank == 0:
            engine.trace = OperationTrace(Path(path), mark_cycles=mark_cycles)


SESSION = Session()


def init(
    comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None
) -> None:
    """Meet all other ranks; collective. A second call does nothing.

    The ranks are those of torch.distributed's default group where the program has initialised one,
    else those of the launcher: torchrun, headway, Slurm, mpirun, or Horovod's own variables.
    Without any of them this process is alone.

    Args:
        comm: None, or all ranks: jobs of some of the ranks are process sets here.
        process_sets: Sets to register; "dynamic" says only that some will be added, which is always
            possible here.

    Raises:
        UsageError: Variables contradict each other, or `comm` is not all ranks.
        Stalled: Names the ranks that do not come.
    """
    if SESSION.started:
        return
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ValueError(f'process_sets is a list of process sets or "dynamic": {process_sets}')
        process_sets = None
    SESSION.start(process_sets or ())
    if comm and sorted(comm) != list(range(size())):
        SESSION.end()
        raise UsageError(
            f"hvd.init cannot make a world of the ranks {list(comm)}",
            fix="Call hvd.init(process_sets=[hvd.ProcessSet([...])]) on all ranks, and give the "
            "set to each operation.",
        )


def shutdown() -> None:
    """End the session. Operations of other ranks that need this one fail."""
    SESSION.end()


def is_initialized() -> bool:
    """Whether there is a session."""
    return SESSION.started


def rank() -> int:
    """The number of this process."""
    return SESSION.engine.rank


def size() -> int:
    """The number of processes."""
    return SESSION.engine.size


def _same_node() -> list[int]:
    nodes = SESSION.meeting.nodes
    return [other for other, node in enumerate(nodes) if node == nodes[rank()]]


def local_rank() -> int:
    """The number of this process among those of its machine."""
    return _same_node().index(rank())


def local_size() -> int:
    """The number of processes of this machine."""
    return len(_same_node())


def _same_place() -> list[int]:
    """The processes with the same number on other machines, one for each machine that has it."""
    nodes, found = SESSION.meeting.nodes, []
    for node in dict.fromkeys(nodes):
        ranks = [other for other, name in enumerate(nodes) if name == node]
        found += ranks[local_rank() : local_rank() + 1]
    return found


def cross_rank() -> int:
    """The number of this process among those with its `local_rank`."""
    return _same_place().index(rank())


def cross_size() -> int:
    """The number of processes with this `local_rank`: of machines that have so many."""
    return len(_same_place())


def is_homogeneous() -> bool:
    """Whether all machines have the same number of processes."""
    nodes = SESSION.meeting.nodes
    return len({nodes.count(node) for node in nodes}) == 1


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a process set, or one of these ranks; all ranks call it.

    Raises:
        ValueError: There is one of these ranks already, or a rank that does not exist.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    return SESSION.add(process_set)


def remove_process_set(process_set: ProcessSet) -> bool:
    """Forget a process set; all ranks call it. False: it is global, or not registered."""
    return SESSION.remove(process_set)


def process_set_by_id(process_set_id: int) -> ProcessSet:
    """The registered process set of this number.

    Raises:
        KeyError: There is none.
    """
    return SESSION.sets()[process_set_id]


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """The ranks of the registered process sets by their number."""
    return {number: list(found.ranks or ()) for number, found in SESSION.sets().items()}


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Write a timeline of the operations from now on; rank 0 does.

    Args:
        mark_cycles: With a mark for each message of the coordinator.
    """
    SESSION.trace(file_path, mark_cycles=mark_cycles)


def stop_timeline() -> None:
    """End the timeline."""
    SESSION.trace("", mark_cycles=False)


# What Horovod was built with. Here it is Gloo's interface, and nothing else.


def gloo_built(verbose: bool = False) -> bool:
    """True."""
    return True


def gloo_enabled() -> bool:
    """True."""
    return True


def mpi_built(verbose: bool = False) -> bool:
    """False: ranks that mpirun has started meet without MPI."""
    return False


def mpi_enabled() -> bool:
    """False."""
    return False


def mpi_threads_supported() -> bool:
    """False: there is no MPI. Operations may be submitted from several threads.

    Raises:
        ValueError: There is no session.
    """
    _ = SESSION.engine
    return False


def nccl_built(verbose: bool = False) -> int:
    """0: tensors of GPUs travel through host memory."""
    return 0


def cuda_built(verbose: bool = False) -> bool:
    """False, for the same reason."""
    return False


def rocm_built(verbose: bool = False) -> bool:
    """False."""
    return False


def ddl_built(verbose: bool = False) -> bool:
    """False."""
    return False


def ccl_built(verbose: bool = False) -> bool:
    """False."""
    return False
