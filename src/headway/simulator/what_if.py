"""What-if sentences for hardware and faults: "link node-node 100 Gbit/s", "rank 3 slow 2x".

A sentence changes exactly the numbers that it names; what is not understood is refused with the
legal names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from headway.cluster import Cluster
from headway.cluster.faults import CutLink, Fault, KillRank, SlowLink, check_faults, parse_fault
from headway.collective.topology import NetworkTopology
from headway.cost.device import scale_device
from headway.cost.machines import Machine
from headway.cost.network import HierarchicalNetwork, LinkLevel
from headway.documents import nearest
from headway.errors import UsageError
from headway.simulator.ranks import SlowPath, StepFaults
from headway.units import parse_bytes, parse_rate, parse_seconds

_TIMES = re.compile(r"([0-9]+(?:\.[0-9]+)?)x")
LEGAL_CHANGES = (
    '"link LEVEL 100 Gbit/s", "link LEVEL 2x", "latency LEVEL 10 us", "device peak 2x", '
    '"memory 80 GiB", "memory 2x"; of one type of devices "device TYPE peak 2x", "memory TYPE 2x"'
)
_LINK = re.compile(r"link (\S+?)-(\S+) (.+)")
LEGAL_LINK_CHANGES = '"link a-b 10 Mbit/s" or "link a-b 0.1x", with the names of two ranks'
LEGAL_FAULTS = '"rank 3 slow 2x" or "link a-b 10x slower"'
RATES = {"peak": "compute", "memory-rate": "stream", "launches": "launches"}
"""Of a device, as a sentence calls them, and their names in `scale_device`; 2x is faster."""
BETWEEN = "node-node"
"""The innermost level that joins nodes, whatever its own name is."""
TIMES = ("dispatch", "kernel", "update")
"""Seconds, of which 2x is slower."""


def change_device_types(
    machines: Mapping[str, Machine], cluster: Cluster, sentences: Sequence[str]
) -> dict[str, Machine]:
    """Machines with other numbers, by type of device, on one network.

    Args:
        sentences: See `LEGAL_CHANGES`; one after the other. One that names a type changes that
            alone.

    Raises:
        UsageError: A sentence says nothing that can be changed.
    """
    found = dict(machines)
    levels = levels_of(next(iter(machines.values())).network, cluster)
    for sentence in sentences:
        kinds, words = _addressed(sentence, list(machines))
        for kind in kinds:
            found[kind] = _changed(found[kind], levels, words, sentence)
    return found


def _addressed(sentence: str, kinds: Sequence[str]) -> tuple[Sequence[str], list[str]]:
    """The types of devices that a sentence is about, and its words without their name."""
    words = sentence.split()
    name = words[1] if len(words) > 1 else ""
    # "memory 80 GiB" has three words, too; the name of a type begins with a letter.
    typed = {"device": len(words) > 3, "memory": len(words) > 2 and name[0].isalpha()}
    if not typed.get(words[0] if words else ""):
        return kinds, words
    if name not in kinds:
        raise UsageError(
            f"{sentence!r}: no devices {name!r}{nearest(name, kinds)}",
            where="--change",
            fix=f"The cluster has {', '.join(kinds)}; without a name all are meant.",
        )
    return [name], [words[0], *words[2:]]


def change_link(wires: NetworkTopology, sentence: str) -> NetworkTopology:
    """One link of two ranks, both of its directions, with another rate.

    Args:
        sentence: See `LEGAL_LINK_CHANGES`.

    Raises:
        UsageError: The sentence is none of these, or the ranks have no link of their own.
    """
    found = _LINK.fullmatch(sentence)
    if found is None:
        raise _link_error(sentence, "not a change of a link")
    ends = [_rank(wires, name, sentence) for name in found.group(1, 2)]
    factor, rate = _value(found[3], parse_rate, sentence)
    used = [wire for way in wires.ways.values() for wire in way.wires]
    rates = list(wires.wires)
    # A link is two wires, one for each direction.
    for pair in (ends, ends[::-1]):
        # A wire that other pairs use, too (the interface of a node), is no link of these two.
        own = [w for w in wires.way(pair[0], pair[1]).wires if used.count(w) == 1]
        if not own:
            raise _link_error(sentence, "these ranks have no link of their own")
        for wire in own:
            rates[wire] = replace(rates[wire], rate=rate or rates[wire].rate * factor)
    return replace(wires, wires=tuple(rates))


def _rank(wires: NetworkTopology, name: str, sentence: str) -> int:
    if name in wires.names:
        return wires.names.index(name)
    raise _link_error(sentence, f"no rank {name!r}{nearest(name, list(wires.names))}")


def _link_error(sentence: str, why: str) -> UsageError:
    return UsageError(f"{sentence!r}: {why}", where="--change", fix=f"Write {LEGAL_LINK_CHANGES}.")


def levels_of(network: HierarchicalNetwork, cluster: Cluster) -> dict[str, int]:
    """The numbers of a network's levels by name; "rank-rank" and "node-node" are the innermost
    ones that join ranks, and nodes."""
    names = {level.name: number for number, level in enumerate(network.levels)}
    own = (node.processes for node in cluster.nodes)
    widest = max(cluster.processes if number is None else number for number in own)
    between = [n for n, level in enumerate(network.levels) if level.width > widest]
    aliases = {"rank-rank": 0} | ({BETWEEN: between[0]} if between else {})
    # A level that is itself called "node-node" wins over the alias.
    return aliases | names


def _changed(
    machine: Machine, levels: Mapping[str, int], words: Sequence[str], sentence: str
) -> Machine:
    what, rest = (words[0], words[1:]) if words else ("", [])
    if what in ("link", "latency") and len(rest) > 1:
        number = _level(levels, rest[0], sentence)
        level = machine.network.levels[number]
        kind = _rate if what == "link" else _latency
        other = kind(level, _value(" ".join(rest[1:]), _PARSE[what], sentence))
        every = list(machine.network.levels)
        every[number] = other
        return replace(machine, network=HierarchicalNetwork(tuple(every)))
    if what == "memory" and rest:
        factor, size = _value(" ".join(rest), parse_bytes, sentence)
        memory = machine.device.memory * factor if factor else float(size)
        return replace(machine, device=replace(machine.device, memory=memory))
    if what == "device" and len(rest) == 2:
        return _device(machine, rest[0], rest[1], sentence)
    raise UsageError(f"{sentence!r} is no change", where="--change", fix=f"Write {LEGAL_CHANGES}.")


_PARSE: Mapping[str, Callable[[str], float]] = {"link": parse_rate, "latency": parse_seconds}


def _level(levels: Mapping[str, int], name: str, sentence: str) -> int:
    if name == BETWEEN and name not in levels:
        raise UsageError(
            f"{sentence!r}: there is one node only, nothing joins nodes",
            where="--change",
            fix=f"Take several nodes (--nodes with a preset), or one of {', '.join(levels)}.",
        )
    if name not in levels:
        raise UsageError(
            f"{sentence!r}: no level {name!r}{nearest(name, list(levels))}",
            where="--change",
            fix=f"The cluster has {', '.join(levels)}.",
        )
    return levels[name]


def _value(text: str, parse: Callable[[str], float], sentence: str) -> tuple[float, float]:
    """(factor, 0) of "2x", (0, value) of a text with its unit."""
    found = _TIMES.fullmatch(text)
    try:
        factor, value = (float(found[1]), 0.0) if found else (0.0, float(parse(text)))
        # Bytes and seconds may be bare numbers; here one may as well be a factor without its x.
        if not found and text.strip().replace(".", "", 1).isdigit():
            raise ValueError(f"{text} has neither a unit nor the x of 2x")
    except ValueError as error:
        raise UsageError(f"{sentence!r}: {error}", where="--change") from None
    if not (factor or value) or not math.isfinite(factor + value):
        raise UsageError(f"{sentence!r}: a value above 0 is needed", where="--change")
    return factor, value


def _rate(level: LinkLevel, value: tuple[float, float]) -> LinkLevel:
    """Of collectives; messages get faster or slower by as much."""
    factor = value[0] or value[1] / level.link.rate
    message = level.message and replace(level.message, rate=level.message.rate * factor)
    # A rate that is named is taken as it is: a product with the factor would round.
    rate = level.link.rate * factor if value[0] else value[1]
    return replace(level, link=replace(level.link, rate=rate), message=message)


def _latency(level: LinkLevel, value: tuple[float, float]) -> LinkLevel:
    factor, seconds = value
    latency = level.link.latency * factor if factor else seconds
    message = level.message
    if message:
        own = message.latency * factor if factor else seconds
        message = replace(message, latency=own)
    return replace(level, link=replace(level.link, latency=latency), message=message)


def _device(machine: Machine, name: str, text: str, sentence: str) -> Machine:
    found = _TIMES.fullmatch(text)
    if name not in (*RATES, *TIMES) or not found or not float(found[1]):
        raise UsageError(
            f"{sentence!r} is no change of a device{nearest(name, (*RATES, *TIMES))}",
            where="--change",
            fix=f'Write "device NUMBER 2x" with one of {", ".join((*RATES, *TIMES))}.',
        )
    device, factor = machine.device, float(found[1])
    if name in RATES:
        return replace(machine, device=scale_device(device, **{RATES[name]: factor}))
    return replace(machine, device=replace(device, **{name: getattr(device, name) * factor}))


def parse_step_faults(
    sentences: Sequence[str], ranks: int, cluster: Cluster, places: Sequence[int] = ()
) -> StepFaults:
    """What is wrong in a step.

    Args:
        sentences: As `headway train --fault` takes them, without the step.
        places: Of each rank the device, by its number in the cluster; empty: its own number.

    Raises:
        UsageError: A sentence is none, names what is not there, or lets the step never end.
    """
    slow: dict[int, float] = {}
    paths = []
    for sentence in sentences:
        fault = _parsed(sentence)
        if isinstance(fault, CutLink | KillRank):
            raise UsageError(
                f"{sentence!r}: a step with this fault never ends",
                where="--fault",
                fix=f"Write {LEGAL_FAULTS}; `headway train --fault` shows how a job survives.",
            )
        check_faults([fault], ranks, cluster)
        if isinstance(fault, SlowLink):
            on = places or range(ranks)
            one, other = (
                frozenset(rank for rank, place in enumerate(on) if place in cluster.ranks_of(name))
                for name in fault.ends
            )
            paths.append(SlowPath(ends=(one, other), factor=fault.factor))
        else:
            slow[fault.rank] = slow.get(fault.rank, 1.0) * fault.factor
    return StepFaults(slow=slow, paths=tuple(paths))


def parse_rank_faults(sentences: Sequence[str], ranks: int, cluster: Cluster) -> list[Fault]:
    """What happens to ranks and links in a run, with its steps.

    Raises:
        UsageError: A sentence is none, or names what is not there.
    """
    faults = [_parsed(sentence) for sentence in sentences]
    check_faults(faults, ranks, cluster)
    return faults


def _parsed(sentence: str) -> Fault:
    whys = []
    # A fault may need the step from which it holds; here there is one step only.
    for text in (sentence, f"{sentence} from step 1"):
        try:
            return parse_fault(text)
        except ValueError as error:
            whys.append(str(error).replace(text, sentence))
    plain = f"{sentence!r} is no fault of a step"
    why = next((one for one in whys if "is no fault" not in one), plain)
    raise UsageError(why, where="--fault", fix=f"Write {LEGAL_FAULTS}.")
