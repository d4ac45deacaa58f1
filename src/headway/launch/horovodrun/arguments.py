"""The arguments of horovodrun, and what each is here: used, not needed, or refused.

Read from Horovod 0.28, `horovod/runner/launch.py`. A job whose processes stay the same is started
on this machine, and for several machines it is said what to run on each; an elastic job
(`headway.launch.elastic`) starts and ends processes on the hosts that are there. What horovodrun
tells its processes by variables of the environment, `headway.horovod` reads there, too
(`headway.horovod.engine.settings`).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from headway.documents import nearest, read_text
from headway.errors import UsageError
from headway.launch.elastic.settings import ELASTIC_SECONDS, ElasticSettings, SshOptions
from headway.run.distributed.launch_env import DEFAULT_PORT
from headway.units import counted

Use = Literal["used", "elastic", "unneeded", "refused"]
"""What an option is here; "elastic": used in elastic jobs, and not needed in others."""


class HorovodrunOption(NamedTuple):
    """An option of horovodrun.

    Attributes:
        values: How many words follow it.
        says: Why it is not needed or refused, and what to do instead.
        variable: The variable of the environment that it sets.
        sets: What it is set to; "": the value that follows, a number or a file.
    """

    names: tuple[str, ...]
    values: int
    use: Use
    says: str = ""
    variable: str = ""
    sets: str = ""


_FOUND = "headway measures links and chooses: `headway train RECIPE --plan auto`"
_ALGORITHM = (
    'torch or the backend "headway" chooses; a recipe says exchange.collective = "hierarchical"'
)
_MACHINES = "several machines start through torchrun, srun or mpirun"
_FIXED = "the number of processes stays the same without --min-np or --host-discovery-script"
_GLOO = "Gloo or NCCL carries what is sent; torch chooses by the device"


def _options(use: Use, values: int, says: str, *names: str) -> tuple[HorovodrunOption, ...]:
    return tuple(HorovodrunOption(tuple(name.split()), values, use, says) for name in names)


def _variable(name: str, variable: str, sets: str = "") -> HorovodrunOption:
    return HorovodrunOption((name,), 0 if sets else 1, "used", variable=variable, sets=sets)


_FUSION, _TIMELINE = "HOROVOD_FUSION_THRESHOLD", "HOROVOD_TIMELINE"
OPTIONS: tuple[HorovodrunOption, ...] = (
    *_options("used", 1, "", "-np --num-proc -n", "-H --hosts", "--hostfile -hostfile"),
    *_options("used", 1, "", "--output-filename", "--reset-limit", "--slots-per-host --slots"),
    *_options("used", 1, "", "--min-np --min-num-proc", "--host-discovery-script"),
    *_options("elastic", 1, _FIXED, "--max-np --max-num-proc", "--elastic-timeout"),
    *_options("elastic", 2, _FIXED, "--blacklist-cooldown-range"),
    *_options("elastic", 1, _MACHINES, "-p --ssh-port", "-i --ssh-identity-file"),
    *_options("used", 0, "", "--gloo"),
    _variable("--start-timeout", "HOROVOD_START_TIMEOUT"),
    _variable("--gloo-timeout-seconds", "HOROVOD_GLOO_TIMEOUT_SECONDS"),
    _variable("--stall-check-warning-time-seconds", "HOROVOD_STALL_CHECK_TIME_SECONDS"),
    _variable("--stall-check-shutdown-time-seconds", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"),
    _variable("--stall-check", "HOROVOD_STALL_CHECK_DISABLE", "0"),
    _variable("--no-stall-check", "HOROVOD_STALL_CHECK_DISABLE", "1"),
    _variable("--fusion-threshold-mb", _FUSION),
    _variable("--cycle-time-ms", "HOROVOD_CYCLE_TIME"),
    _variable("--timeline-filename", _TIMELINE),
    _variable("--timeline-mark-cycles", "HOROVOD_TIMELINE_MARK_CYCLES", "1"),
    _variable("--no-timeline-mark-cycles", "HOROVOD_TIMELINE_MARK_CYCLES", "0"),
    *_options("unneeded", 0, "all that is known is told without it", "--verbose"),
    *_options("unneeded", 0, _GLOO, "--mpi", "--jsrun", "--tcp"),
    *_options("unneeded", 1, _GLOO, "--mpi-args", "--binding-args", "--num-nccl-streams"),
    *_options("unneeded", 0, _GLOO, "--mpi-threads-disable", "--no-mpi-threads-disable"),
    *_options(
        "elastic",
        1,
        "processes of one machine talk over its loopback",
        "--network-interfaces --network-interface",
    ),
    *_options("unneeded", 0, "nothing is looked up on other machines", "--disable-cache"),
    *_options("unneeded", 1, "it tunes how Horovod's ranks agree", "--cache-capacity"),
    *_options(
        "unneeded",
        0,
        _ALGORITHM,
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
    *_options("refused", 1, "write its options on the command line", "--config-file"),
    *_options("refused", 0, "nothing is built: torch's own backends are used", "--check-build -cb"),
    *_options("refused", 0, "write `headway --version`", "--version -v"),
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
        elastic: What an elastic job is asked for beyond that; None: it is none.
        variables: Of the processes' environment, by name.
        notes: A line for each option that is not needed.
    """

    command: tuple[str, ...]
    processes: int
    hosts: tuple[tuple[str, int], ...] = ()
    output: Path | None = None
    restarts: int = 0
    elastic: ElasticSettings | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
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
    elastic = _elastic(first, hosts)
    processes = _number(first, "-np")
    if processes is None:
        processes = sum(slots for _, slots in hosts) or 1
    return HorovodrunRequest(
        command=_program(command),
        processes=elastic.start_processes if elastic else processes,
        hosts=() if elastic else _shared(hosts, processes),
        elastic=elastic,
        output=Path(first["--output-filename"][1][0]) if "--output-filename" in first else None,
        restarts=_number(first, "--reset-limit", least=0) or 0,
        variables=_variables(given),
        notes=tuple(
            f"{name} is not needed: {_BY_NAME[name].says}"
            for name in given
            if _BY_NAME[name].use == "unneeded" or (_BY_NAME[name].use == "elastic" and not elastic)
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
    return _whole(text, written, least)


def _whole(text: str, written: str, least: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= least):
        raise UsageError(f"{written} {text} is not a whole number of at least {least}")
    return int(text)


def _elastic(
    given: Mapping[str, tuple[str, list[str]]], hosts: Sequence[tuple[str, int]]
) -> ElasticSettings | None:
    """What an elastic job is asked for; as in horovodrun, either of two options makes it one.

    Raises:
        UsageError: Numbers contradict each other, or there are no hosts.
    """
    if not given.keys() & {"--min-np", "--host-discovery-script"}:
        return None
    [script] = given.get("--host-discovery-script", ("", [""]))[1]
    least, most = _number(given, "--min-np"), _number(given, "--max-np")
    start = _number(given, "-np") or least or 1
    least = least or start
    if not least <= start <= (most or start):
        raise UsageError(
            f"--min-np {least}, -np {start} and --max-np {most or 'none'} contradict each other",
            fix="They must not descend.",
        )
    if bool(script) == bool(hosts):
        raise UsageError(
            "an elastic job takes its hosts of a script or of a list, and "
            + ("both are given" if script else "none is given"),
            fix="Give --host-discovery-script COMMAND, or -H HOST:SLOTS,HOST:SLOTS.",
        )
    slots = sum(number for _, number in hosts)
    if hosts and slots < start:
        raise UsageError(
            f"{counted(start, 'process')} on {counted(slots, 'slot')}", fix=f"Use -np {slots}."
        )
    cooldown = None
    if "--blacklist-cooldown-range" in given:
        written, texts = given["--blacklist-cooldown-range"]
        shortest, longest = (_whole(text, written, 1) for text in texts)
        if shortest > longest:
            raise UsageError(f"{written} {shortest} {longest} is no range")
        cooldown = float(shortest), float(longest)
    return ElasticSettings(
        start_processes=start,
        min_processes=least,
        max_processes=most,
        script=script,
        hosts=dict(hosts),
        default_slots=_number(given, "--slots-per-host") or 1,
        seconds=_number(given, "--elastic-timeout") or ELASTIC_SECONDS,
        reset_limit=_number(given, "--reset-limit", least=0),
        cooldown=cooldown,
        interface=given.get("--network-interfaces", ("", [""]))[1][0].partition(",")[0],
        ssh=SshOptions(
            port=_number(given, "-p"), identity=given["-i"][1][0] if "-i" in given else None
        ),
    )


def _variables(given: Mapping[str, list[str]]) -> dict[str, str]:
    """What `headway.horovod` reads; the last of two options that contradict each other holds."""
    found = {}
    for written, values in given.items():
        option = _BY_NAME[written]
        if not option.variable:
            continue
        text = option.sets or values[0]
        if option.variable != _TIMELINE and not _is_amount(text):
            raise UsageError(f"{written} {text} is not a number of at least 0")
        if option.variable == _FUSION:
            text = str(int(float(text) * 2**20))
        found[option.variable] = text
    return found


def _is_amount(text: str) -> bool:
    try:
        return len(text) < 20 and 0 <= float(text) < 1e12
    except ValueError:
        return False


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
    name, _, slots = re.sub(r"\s+slots\s*=", ":", line).partition(":")
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
    settings = "".join(f"{name}={shlex.quote(v)} " for name, v in request.variables.items())
    return tuple(
        (
            name,
            f"{settings}torchrun --nnodes={len(request.hosts)} --node-rank={number} "
            f"--nproc-per-node={processes} --master-addr={first} --master-port={DEFAULT_PORT} "
            f"{shlex.join(request.command)}",
        )
        for number, (name, processes) in enumerate(request.hosts)
    )
