"""The arguments of horovodrun, and what each is here: used, not needed, or refused.

Read from Horovod 0.28, `horovod/runner/launch.py`. headway has no scheduler of its own: it starts
processes on this machine, and for several machines says what to run on each.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from headway.documents import nearest, read_text
from headway.errors import UsageError
from headway.run.distributed.launch_env import DEFAULT_PORT
from headway.units import counted

Use = Literal["used", "unneeded", "refused"]


class HorovodrunOption(NamedTuple):
    """An option of horovodrun.

    Attributes:
        values: How many words follow it.
        says: Why it is not needed or refused, and what to do instead.
    """

    names: tuple[str, ...]
    values: int
    use: Use
    says: str = ""


_TUNED = "buckets are fused by headway (`exchange.bucket` of a recipe), from measured links"
_FOUND = "headway measures links and chooses: `headway train RECIPE --plan auto`"
_MACHINES = "several machines start through torchrun, srun or mpirun"
_WAITS = "every wait has a time limit that names who is missing"
_TIMELINE = "`headway train RECIPE` writes a timeline, `headway report RUN` draws it"
_GLOO = "Gloo or NCCL carries what is sent; torch chooses by the device"


def _options(use: Use, values: int, says: str, *names: str) -> tuple[HorovodrunOption, ...]:
    return tuple(HorovodrunOption(tuple(name.split()), values, use, says) for name in names)


OPTIONS: tuple[HorovodrunOption, ...] = (
    *_options("used", 1, "", "-np --num-proc -n", "-H --hosts", "--hostfile -hostfile"),
    *_options("used", 1, "", "--output-filename", "--reset-limit", "--slots-per-host"),
    *_options("used", 0, "", "--gloo", "--verbose"),
    *_options("unneeded", 0, _GLOO, "--mpi", "--jsrun", "--tcp"),
    *_options("unneeded", 1, _GLOO, "--mpi-args", "--binding-args", "--num-nccl-streams"),
    *_options("unneeded", 0, _GLOO, "--mpi-threads-disable", "--no-mpi-threads-disable"),
    *_options(
        "unneeded",
        1,
        "processes of one machine talk over its loopback",
        "--network-interfaces --network-interface",
    ),
    *_options("unneeded", 1, _MACHINES, "-p --ssh-port", "-i --ssh-identity-file"),
    *_options("unneeded", 0, "nothing is looked up on other machines", "--disable-cache"),
    *_options("unneeded", 1, _WAITS, "--start-timeout", "--elastic-timeout"),
    *_options("unneeded", 1, _WAITS, "--gloo-timeout-seconds"),
    *_options("unneeded", 1, _WAITS, "--stall-check-warning-time-seconds"),
    *_options("unneeded", 1, _WAITS, "--stall-check-shutdown-time-seconds"),
    *_options("unneeded", 0, _WAITS, "--stall-check", "--no-stall-check"),
    *_options("unneeded", 1, _TUNED, "--fusion-threshold-mb", "--cycle-time-ms"),
    *_options("unneeded", 1, _TUNED, "--cache-capacity"),
    *_options(
        "unneeded",
        0,
        'a recipe says exchange.collective = "hierarchical"',
        "--hierarchical-allreduce",
        "--no-hierarchical-allreduce",
        "--hierarchical-allgather",
        "--no-hierarchical-allgather",
        "--torus-allreduce",
        "--no-torus-allreduce",
    ),
    *_options("unneeded", 0, _FOUND, "--autotune", "--no-autotune"),
    *_options(
        "unneeded",
        1,
        _FOUND,
        "--autotune-log-file",
        "--autotune-warmup-samples",
        "--autotune-steps-per-sample",
        "--autotune-bayes-opt-max-samples",
        "--autotune-gaussian-process-noise",
    ),
    *_options("unneeded", 1, "torch says where threads run", "--thread-affinity"),
    *_options("unneeded", 1, "Python's logging decides", "--log-level"),
    *_options(
        "unneeded",
        0,
        "output of workers passes through as it is",
        "--log-with-timestamp",
        "--log-without-timestamp",
        "--log-hide-timestamp",
        "--no-log-hide-timestamp",
        "--prefix-output-with-timestamp -prefix-timestamp",
    ),
    *_options("refused", 1, _TIMELINE, "--timeline-filename"),
    *_options("refused", 0, _TIMELINE, "--timeline-mark-cycles", "--no-timeline-mark-cycles"),
    *_options(
        "refused",
        1,
        "the number of processes does not change while a program runs; name the hosts with -H",
        "--host-discovery-script",
    ),
    *_options(
        "refused",
        1,
        "the number of processes does not change while a program runs; dead ones are started "
        "again: --reset-limit N",
        "--min-np --min-num-proc",
        "--max-np --max-num-proc",
    ),
    *_options("refused", 2, "no machine is left out", "--blacklist-cooldown-range"),
    *_options("refused", 1, "write its options on the command line", "--config-file"),
    *_options("refused", 0, "nothing is built: torch's own backends are used", "--check-build -cb"),
)
_BY_NAME: Mapping[str, HorovodrunOption] = {
    name: option for option in OPTIONS for name in option.names
}


@dataclass(frozen=True, kw_only=True)
class HorovodrunRequest:
    """What a command line of horovodrun asks for.

    Attributes:
        hosts: Names and slots, in order; empty: this machine.
        restarts: How often dead processes are started again.
        notes: A line for each option that is not needed.
    """

    command: tuple[str, ...]
    processes: int
    hosts: tuple[tuple[str, int], ...] = ()
    output: Path | None = None
    restarts: int = 0
    notes: tuple[str, ...] = field(default=())


def parse_horovodrun(words: Sequence[str]) -> HorovodrunRequest:
    """Read the words of a command line: options, then the program with its own.

    Raises:
        UsageError: An option is unknown or refused, or its value is missing or wrong; all refused
            ones are named together.
        DocumentError: The host file cannot be read.
    """
    given, command = _split(words)
    refused = [name for name in given if _BY_NAME[name].use == "refused"]
    if refused:
        reasons = [f"{name}: {_BY_NAME[name].says}" for name in refused]
        raise UsageError(
            "headway launch has no " + ", ".join(refused),
            why="\n  ".join(reasons),
            fix="Leave out what is named.",
        )
    first = {_BY_NAME[name].names[0]: (name, values) for name, values in given.items()}
    hosts = _hosts(first)
    processes = _number(first, "-np")
    if processes is None:
        processes = sum(slots for _, slots in hosts) or 1
    return HorovodrunRequest(
        command=_program(command),
        processes=processes,
        hosts=_shared(hosts, processes),
        output=Path(first["--output-filename"][1][0]) if "--output-filename" in first else None,
        restarts=_number(first, "--reset-limit", least=0) or 0,
        notes=tuple(
            f"{name} is not needed: {_BY_NAME[name].says}"
            for name in given
            if _BY_NAME[name].use == "unneeded"
        ),
    )


def _split(words: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    given: dict[str, list[str]] = {}
    rest = list(words)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "--":
            break
        name, equals, value = word.partition("=")
        option = _BY_NAME.get(name)
        if option is None:
            fix = "See headway launch program --help"
            raise UsageError(f"there is no option {name!r}{nearest(name, list(_BY_NAME))}", fix=fix)
        values = [value] if equals else rest[: option.values]
        if len(values) < option.values or (equals and option.values != 1):
            needs = counted(option.values, "value")
            raise UsageError(f"{name} takes {needs}", fix=f"Write {name} and {needs} behind it.")
        if not equals:
            del rest[: option.values]
        given[name] = values
    return given, rest


def _number(given: Mapping[str, tuple[str, list[str]]], name: str, *, least: int = 1) -> int | None:
    if name not in given:
        return None
    written, [text] = given[name]
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= least):
        raise UsageError(f"{written} {text} is not a whole number of at least {least}")
    return int(text)


def _hosts(given: Mapping[str, tuple[str, list[str]]]) -> list[tuple[str, int]]:
    """Hosts with slots, of -H "a:2,b:2" or a file with lines "a slots=2" or "a:2"."""
    if "-H" in given and "--hostfile" in given:
        raise UsageError("-H and --hostfile are both given", fix="Leave one of them out.")
    lines: list[str] = []
    if "-H" in given:
        lines = given["-H"][1][0].split(",")
    elif "--hostfile" in given:
        text = read_text(Path(given["--hostfile"][1][0]))
        lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    default = _number(given, "--slots-per-host") or 1
    return [_host(line, default) for line in lines if line]


def _host(line: str, default: int) -> tuple[str, int]:
    name, _, slots = line.replace(" slots=", ":").partition(":")
    slots = slots.strip() or str(default)
    if not name or name.startswith("-") or not (slots.isascii() and slots.isdigit()):
        raise UsageError(f"{line!r} names no host", fix="Write HOST:SLOTS, as in host1:2,host2:2.")
    if len(slots) > 9 or int(slots) < 1:
        raise UsageError(f"{line!r} has no slots", fix="Write HOST:SLOTS with at least one slot.")
    return name.strip(), int(slots)


def _shared(hosts: Sequence[tuple[str, int]], processes: int) -> tuple[tuple[str, int], ...]:
    """The processes of each host, filled in order as horovodrun does.

    Raises:
        UsageError: There are fewer slots than processes.
    """
    slots = sum(number for _, number in hosts)
    if hosts and slots < processes:
        raise UsageError(
            f"{counted(processes, 'process')} on {counted(slots, 'slot')}",
            fix=f"Use -np {slots}, or give more slots.",
        )
    found, left = [], processes
    for name, number in hosts:
        if left > 0:
            found.append((name, min(number, left)))
        left -= number
    return tuple(found)


def _program(command: Sequence[str]) -> tuple[str, ...]:
    """The script or module with its arguments, without the interpreter.

    Raises:
        UsageError: It is no Python program.
    """
    words = list(command)
    if words and Path(words[0]).name.startswith("python"):
        words = [word for word in words[1:2] if word != "-u"] + words[2:]
    is_module = len(words) > 1 and words[0] == "-m"
    if not words or not (is_module or words[0].endswith(".py")):
        raise UsageError(
            f"headway launch starts Python programs, not {shlex.join(command) or 'nothing'}",
            fix="Write python SCRIPT.py ARGUMENTS, or python -m MODULE ARGUMENTS, at the end.",
        )
    return tuple(words)


def commands_by_host(request: HorovodrunRequest) -> tuple[tuple[str, str], ...]:
    """What to run on each of several hosts: torchrun, with the first host as the meeting point."""
    first = request.hosts[0][0]
    return tuple(
        (
            name,
            f"torchrun --nnodes={len(request.hosts)} --node-rank={number} "
            f"--nproc-per-node={processes} --master-addr={first} --master-port={DEFAULT_PORT} "
            f"{shlex.join(request.command)}",
        )
        for number, (name, processes) in enumerate(request.hosts)
    )
