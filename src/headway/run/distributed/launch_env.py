"""The launch environment: rank, world size and master address of this process.

Understood are torchrun and everything that sets the same variables (headway's own workers,
Kubernetes operators, Ray), Horovod's, Open MPI, Slurm's srun and PMI; without any of them the
process is alone. Contradictory variables are an error that names them, never a guess. Outside of
the launchers and of Gloo's interface settings, no other module of the library reads `os.environ`
for these.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from headway.errors import HeadwayError, UsageError

HEARTBEAT_TIMEOUT_SECONDS = 5.0
"""After so long without a heartbeat a rank counts as lost, where nobody says how long."""

LOOPBACK = "127.0.0.1"
ATTEMPT = "HEADWAY_ATTEMPT"
ELASTIC = "HEADWAY_ELASTIC"
NODE = "HEADWAY_NODE"
TEMPORARY = "HEADWAY_TEMPORARY"
DEBUG = "TORCH_DISTRIBUTED_DEBUG"
DEFAULT_PORT = 29500
# Derived ports lie below 32768, where the kernel starts to hand out ports to clients by itself.
PORT_RANGE = range(12000, 32000)
_STEP_MARKS = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS")


@dataclass(frozen=True, kw_only=True)
class LaunchEnv:
    """Rank, world size and master address of this process; by default those of a process alone.

    Attributes:
        local_rank: Number of this process on its machine, from 0; chooses the GPU.
        attempt: How often the launcher has restarted the workers; agents of several machines may
            count differently (`World.join` agrees on one number).
        launcher: "headway", "torchrun", "environment", "elastic", "horovod", "mpi", "slurm" or
            "alone".
        master_port: Port of the meeting point; 0 when alone.
        agent_store: The launching agent's store already listens at the master's address; else rank
            0 opens one there.
        meeting: A file in a private directory in which the ranks meet, where all are on this
            machine (emulated nodes too); None: they meet at the master's address.
        interface: The interface named for exchanges (the first of GLOO_SOCKET_IFNAME); "": none.
        node_name: What the launcher calls this machine; empty: nothing, see `node`.
        pace: In an emulation without root, the file through which the ranks of this node share one
            interface, and its rate in bytes per second; see `comm.traffic_shaper.TrafficShaper.of`.
        note_folder: A private folder in which the processes of a run that survives the death of
            some leave notes for each other and the launcher; None: a death ends the run.
        life: How often this rank has come back in this attempt, while the others went on.
        emergency: Reports an error and ends this process, from any thread; does not return. Set by
            whoever called the rank's program; None in a program of the user's own.
    """

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    local_ranks: int = 1
    node_rank: int = 0
    attempt: int = 0
    launcher: str = "alone"
    master_address: str = LOOPBACK
    master_port: int = 0
    agent_store: bool = False
    meeting: Path | None = field(default=None, compare=False)
    interface: str = ""
    node_name: str = ""
    pace: tuple[Path, float] | None = None
    note_folder: Path | None = field(default=None, compare=False)
    life: int = 0
    emergency: Callable[[HeadwayError], None] | None = field(
        default=None, compare=False, repr=False
    )

    @classmethod
    def here(cls, environ: Mapping[str, str] | None = None) -> LaunchEnv:
        """Read the place of this process.

        Raises:
            UsageError: Variables are missing, are no numbers, or contradict each other.
        """
        env = os.environ if environ is None else environ
        return replace(cls._of_launcher(env), interface=_interface(env))

    @classmethod
    def _of_launcher(cls, env: Mapping[str, str]) -> LaunchEnv:
        if "RANK" in env or "WORLD_SIZE" in env:
            return _from_torchrun(env)
        if "HOROVOD_RANK" in env:
            return _from_horovod(env)
        if "OMPI_COMM_WORLD_RANK" in env:
            return _from_mpi(env, "OMPI_COMM_WORLD_", "RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
        if _in_slurm_step(env):
            return _from_slurm(env)
        if "PMI_RANK" in env:
            return _from_mpi(env, "", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
        return cls()

    @property
    def node(self) -> str:
        """The name of this machine among those of the job: ranks that share it have the same."""
        return self.node_name or f"node-{self.node_rank}"

    @property
    def found_world(self) -> bool:
        """Whether a launcher has started this process as a part of a world."""
        return self.launcher != "alone"


class RunEnding(BaseException):
    """A worker comes back when the others are about to end: nothing is left for it to do."""


class NoPeersLeft(BaseException):
    """A worker comes back when the others are gone, and with them what it would begin with."""


def machine_identity() -> str:
    """The same text for all processes that can see each other in /proc; "" without /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def temporary_folder() -> str:
    """The launcher's directory of temporary files, in its forkserver; "" elsewhere."""
    return os.environ.get(TEMPORARY, "")


def horovod_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """All variables of Horovod's (`headway.horovod` takes up its settings)."""
    env = os.environ if environ is None else environ
    return {name: value for name, value in env.items() if name.startswith("HOROVOD_")}


@dataclass(frozen=True)
class ElasticWorkerEnv:
    """A worker of an elastic job: where its launcher's store is, and what it calls the worker.

    Attributes:
        interface: As of `LaunchEnv`.
    """

    address: str
    port: int
    worker: str
    interface: str = ""

    @classmethod
    def here(cls, environ: Mapping[str, str] | None = None) -> ElasticWorkerEnv | None:
        """This process, if it is one."""
        env = os.environ if environ is None else environ
        if not env.get(ELASTIC):
            return None
        address, port, worker = env[ELASTIC].split(" ")
        return cls(address, int(port), worker, _interface(env))

    def to_variables(self) -> dict[str, str]:
        """The inverse of `here`."""
        return {ELASTIC: f"{self.address} {self.port} {self.worker}"}


def _interface(env: Mapping[str, str]) -> str:
    return env.get("GLOO_SOCKET_IFNAME", "").partition(",")[0].strip()


def user_threads(environ: Mapping[str, str] | None = None) -> int | None:
    """The user's own OMP_NUM_THREADS, or None where it is not set (or is no number)."""
    text = (os.environ if environ is None else environ).get("OMP_NUM_THREADS", "")
    return int(text) if text.isdigit() and int(text) > 0 else None


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """A variable as a number >= 0."""
    text = env.get(name, "")
    if not text and default is not None:
        return default
    if not text:
        raise UsageError(
            f"the environment variable {name} is missing",
            why="Other variables say that this process belongs to a larger world.",
            fix=f"Set {name}, or start the job with torchrun, srun or `headway train --processes`.",
        )
    if not text.isdigit():
        raise UsageError(
            f"the environment variable {name} is not a number: {text!r}",
            fix=f"Unset {name} or correct it.",
        )
    return int(text)


def _below(env: Mapping[str, str], rank_name: str, rank: int, size_name: str, size: int) -> None:
    """Raise unless 0 <= rank < size, naming both variables."""
    if rank < size:
        return
    raise UsageError(
        f"the environment variables {rank_name} and {size_name} contradict each other",
        why=f"{rank_name}={rank} must be less than {size_name}={env.get(size_name, size)}.",
        fix="Usually one of them is left over from another job: unset both.",
    )


def _port(env: Mapping[str, str], default: int) -> int:
    port = _number(env, "MASTER_PORT", default)
    if port < 65536:
        return port
    raise UsageError(f"the environment variable MASTER_PORT is no port: {port}")


def _from_torchrun(env: Mapping[str, str]) -> LaunchEnv:
    """torchrun's variables; headway's launch, Kubernetes operators and Ray set them, too."""
    rank, ranks = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    _below(env, "RANK", rank, "WORLD_SIZE", ranks)
    local_ranks = _number(env, "LOCAL_WORLD_SIZE", 1)
    local_rank = _number(env, "LOCAL_RANK", 0)
    if "LOCAL_WORLD_SIZE" in env:
        _below(env, "LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_ranks)
    _below(env, "LOCAL_WORLD_SIZE", local_ranks - 1, "WORLD_SIZE", ranks)
    if ranks > 1 and not env.get("MASTER_ADDR"):
        raise UsageError(
            "the environment variable MASTER_ADDR is missing",
            why=f"WORLD_SIZE={ranks} says that there are other ranks to meet.",
            fix="Set MASTER_ADDR to the host of rank 0, or start the job with torchrun.",
        )
    node_default = _number(env, "NODE_RANK", rank // max(local_ranks, 1))
    if ATTEMPT in env:
        launcher = "headway"
    else:
        launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in env else "environment"
    return LaunchEnv(
        rank=rank,
        ranks=ranks,
        local_rank=local_rank,
        local_ranks=local_ranks,
        node_rank=_number(env, "GROUP_RANK", node_default),
        attempt=_number(env, ATTEMPT, _number(env, "TORCHELASTIC_RESTART_COUNT", 0)),
        launcher=launcher,
        master_address=env.get("MASTER_ADDR") or LOOPBACK,
        master_port=_port(env, DEFAULT_PORT),
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        node_name=env.get(NODE, ""),
    )


def _from_horovod(env: Mapping[str, str]) -> LaunchEnv:
    """The variables that horovodrun gives its workers."""
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    found = _from_mpi(env, "HOROVOD_", *names)
    if found.ranks == 1:
        return found
    # Its own meeting point is of another protocol, and names the job.
    job = ":".join(
        env.get(f"HOROVOD_GLOO_RENDEZVOUS_{part}", "") for part in ("ADDR", "PORT")
    ).strip(":")
    return replace(
        found,
        launcher="horovod",
        node_rank=_number(env, "HOROVOD_CROSS_RANK", found.node_rank),
        master_port=_port(env, derive_port(job) if job else found.master_port),
    )


def _from_mpi(env: Mapping[str, str], prefix: str, *names: str) -> LaunchEnv:
    """Open MPI's mpirun, or MPICH's (PMI).

    Args:
        names: Of the variables behind the prefix: rank, ranks, and both on this machine.
    """
    rank_name, size_name, rank_here, size_here = (prefix + name for name in names)
    rank, ranks = _number(env, rank_name), _number(env, size_name)
    _below(env, rank_name, rank, size_name, ranks)
    if ranks == 1:
        return LaunchEnv()
    local_rank, local_ranks = _number(env, rank_here, 0), _number(env, size_here, 1)
    _below(env, rank_here, local_rank, size_here, local_ranks)
    one_machine = local_ranks == ranks
    if not env.get("MASTER_ADDR") and not one_machine:
        raise UsageError(
            "the environment variable MASTER_ADDR is missing",
            why=f"{size_name}={ranks}, {size_here}={local_ranks}: there are several machines.",
            fix="Give the host of rank 0: mpirun -x MASTER_ADDR=... (and -x MASTER_PORT=...).",
        )
    # These name one mpirun, and are equal on all its ranks.
    job = "".join(env.get(name, "") for name in ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"))
    return LaunchEnv(
        rank=rank,
        ranks=ranks,
        local_rank=local_rank,
        local_ranks=local_ranks,
        node_rank=0 if one_machine else rank // local_ranks,
        launcher="mpi",
        master_address=env.get("MASTER_ADDR") or LOOPBACK,
        master_port=_port(env, derive_port(job) if job else DEFAULT_PORT),
    )


def _in_slurm_step(env: Mapping[str, str]) -> bool:
    """Whether srun has started this process as one of several tasks."""
    if "SLURM_PROCID" not in env:
        return False
    # A batch script, too, sees SLURM_PROCID=0 and the SLURM_NTASKS of its allocation; only srun
    # sets the SLURM_STEP variables.
    if not any(name in env for name in _STEP_MARKS) and env["SLURM_PROCID"] == "0":
        return False
    if _number(env, _tasks_name(env), 1) <= 1:
        return False
    # Where MPICH's own launcher runs inside Slurm, SLURM_PROCID counts its daemons: then PMI's
    # numbers differ, and are the ones that hold.
    pmi = (env.get("PMI_RANK"), env.get("PMI_SIZE"))
    return None in pmi or pmi == (env["SLURM_PROCID"], env[_tasks_name(env)])


def _tasks_name(env: Mapping[str, str]) -> str:
    return "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"


def _from_slurm(env: Mapping[str, str]) -> LaunchEnv:
    rank, ranks = _number(env, "SLURM_PROCID"), _number(env, _tasks_name(env))
    _below(env, "SLURM_PROCID", rank, _tasks_name(env), ranks)
    node_rank, local_rank = _number(env, "SLURM_NODEID", 0), _number(env, "SLURM_LOCALID", 0)
    per_node = "SLURM_STEP_TASKS_PER_NODE"
    per_node = per_node if per_node in env else "SLURM_TASKS_PER_NODE"
    counts = _tasks_per_node(env.get(per_node, ""), per_node)
    if counts:
        _below(env, "SLURM_NODEID", node_rank, per_node, len(counts))
        _below(env, "SLURM_LOCALID", local_rank, per_node, counts[node_rank])
    job, step = env.get("SLURM_JOB_ID", ""), env.get("SLURM_STEP_ID", "")
    return LaunchEnv(
        rank=rank,
        ranks=ranks,
        local_rank=local_rank,
        local_ranks=counts[node_rank] if counts else _number(env, "SLURM_NTASKS_PER_NODE", 1),
        node_rank=node_rank,
        attempt=_number(env, "SLURM_RESTART_COUNT", 0),
        launcher="slurm",
        master_address=env.get("MASTER_ADDR") or _slurm_host(env),
        master_port=_port(env, derive_port(f"{job}.{step}")),
    )


def _slurm_host(env: Mapping[str, str]) -> str:
    """The first host of the step, where rank 0 runs."""
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
        if env.get(name):
            return expand_slurm_hosts(env[name], name)[0]
    # The last resort: it is where srun was typed, often a login node.
    return env.get("SLURM_LAUNCH_NODE_IPADDR") or LOOPBACK


def _tasks_per_node(text: str, name: str) -> list[int]:
    """Slurm's short form of task counts: "2(x3),1" -> [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise UsageError(f"the environment variable {name} cannot be read: {text!r}")
        counts += [int(match.group(1))] * int(match.group(2) or 1)
    return counts


def expand_slurm_hosts(text: str, name: str = "SLURM_STEP_NODELIST") -> list[str]:
    """Slurm's short form of host names: "node[01-02,07],gpu3" -> node01, node02, node07, gpu3.

    Args:
        text: The list; several bracket groups in one name are multiplied out.

    Raises:
        UsageError: The text is no such list.
    """
    hosts: list[str] = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text):
        hosts += _expand(part.strip())
    if not hosts or text.count("[") != text.count("]") or "[" in "".join(hosts):
        raise UsageError(f"the environment variable {name} is no list of hosts: {text!r}")
    return hosts


def _expand(pattern: str) -> list[str]:
    match = re.search(r"\[([0-9,\-]+)\]", pattern)
    if match is None:
        return [pattern]
    head, tail = pattern[: match.start()], _expand(pattern[match.end() :])
    numbers: list[str] = []
    for part in match.group(1).split(","):
        first, _, last = part.partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            return [pattern]
        numbers += [f"{n:0{len(first)}d}" for n in range(int(first), int(last or first) + 1)]
    return [head + number + end for number in numbers for end in tail]


def derive_port(job: str) -> int:
    """A port that all ranks of one job compute alike, and that another job is unlikely to get."""
    digest = hashlib.sha256(job.encode()).digest()
    return PORT_RANGE[int.from_bytes(digest[:8], "big") % len(PORT_RANGE)]


def free_port() -> int:
    """A port of the loopback that nobody has, and that the system gives to no connection until
    rank 0, some seconds later, listens there: it hands out those above the range."""
    while True:
        port = secrets.choice(PORT_RANGE)
        with socket.socket() as found, suppress(OSError):
            found.bind((LOOPBACK, port))
            return port
