"""`headway collective show --change`: the same programs where links have drifted, and what training
would go over to (`headway.collective.repacking`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from headway.collective.carried import make_program
from headway.collective.carrier import CARRIED
from headway.collective.repacking import Repacking, find_repacking
from headway.collective.wires import Wires
from headway.documents import nearest
from headway.errors import UsageError
from headway.planner.carried import find_carrier
from headway.planner.programs import Priced
from headway.simulator.collective import Host, play_collective
from headway.units import format_seconds, parse_rate

_LINK = re.compile(r"link (\S+?)-(\S+) (.+)")
_TIMES = re.compile(r"([0-9]+(?:\.[0-9]+)?)x")
LEGAL = '"link a-b 10 Mbit/s" or "link a-b 0.1x", with the names of two ranks'


@dataclass(frozen=True)
class Changed:
    """Programs on links that have drifted.

    Attributes:
        sentences: What has changed.
        seconds: Of each program now, by name.
        repacking: What training does if it carries its sums by the first of them; None: it keeps
            that program, or the operation is none of training.
        seconds_after: Of the program that it goes over to.
    """

    sentences: tuple[str, ...]
    seconds: Mapping[str, float]
    repacking: Repacking | None
    seconds_after: float | None

    def lines(self, found: Sequence[Priced]) -> Iterator[str]:
        """The times before and now, and the change of program.

        Args:
            found: The programs before.
        """
        yield f"changed: {'; '.join(self.sentences)}"
        width = max(len(one.name) for one in found)
        for one in found:
            now, before = format_seconds(self.seconds[one.name]), format_seconds(one.seconds)
            yield f"   {one.name:<{width}}  {now}, was {before}"
        if self.repacking is None:
            return
        if self.seconds_after is None:
            yield f"train keeps {self.repacking.before}"
        else:
            yield f"train re-packs: {self.repacking.after}: {format_seconds(self.seconds_after)}"

    def facts(self) -> dict[str, object]:
        """For `--json`."""
        after = self.repacking and self.repacking.after
        return {
            "change": self.sentences,
            "seconds": dict(self.seconds),
            "program": after and after.kind,
            "seconds_after": self.seconds_after,
            "trees": [
                {"parents": tree.parents, "weight": tree.weight}
                for tree in (after.carrier.trees if after else ())
            ],
        }


def changed(
    found: Sequence[Priced],
    wires: Wires,
    sentences: Sequence[str],
    *,
    element_bytes: int,
    host: Host,
) -> Changed:
    """Play programs on other links.

    Args:
        found: Made for `wires`, the fastest first.
        wires: As described.
        sentences: See `LEGAL`; several are made together.
        element_bytes: Of an element.
        host: What messages and sums cost the ranks.

    Raises:
        UsageError: A sentence says nothing that can be changed.
    """
    now = wires
    for sentence in sentences:
        now = _with(now, sentence)
    seconds = {
        one.name: play_collective(one.program, now, element_bytes, host=host).seconds
        for one in found
    }
    repacking = _repacking(found[0], wires, now, element_bytes)
    after = None
    if repacking is not None and repacking.changes:
        task, chosen = found[0].program.collective, repacking.after
        program = make_program(
            chosen.kind, chosen.carrier, wires.ranks, task.elements, element_bytes
        )
        after = play_collective(program, now, element_bytes, host=host).seconds
    return Changed(tuple(sentences), seconds, repacking, after)


def _repacking(best: Priced, wires: Wires, now: Wires, element_bytes: int) -> Repacking | None:
    if best.program.op != "all_reduce" or wires.shared or best.name not in CARRIED:
        return None
    size = best.program.elements * element_bytes
    carrier = find_carrier(best.name, wires, size, element_bytes=element_bytes).carrier
    assert carrier is not None  # with the rates of links that are not shared
    return find_repacking(best.name, carrier, wires.graph, now.graph, [size], element_bytes)


def _with(wires: Wires, sentence: str) -> Wires:
    """One link, both of its directions, with another rate."""
    found = _LINK.fullmatch(sentence)
    if found is None:
        raise _refused(sentence, "this changes nothing")
    ends = [_rank(wires, name, sentence) for name in found.group(1, 2)]
    times = _TIMES.fullmatch(found[3])
    try:
        rate = 0.0 if times else parse_rate(found[3])
    except ValueError as error:
        raise _refused(sentence, str(error)) from None
    if not (rate or (times and float(times[1]))):
        raise _refused(sentence, "a link needs a rate above 0")
    used = [wire for way in wires.ways.values() for wire in way.wires]
    rates = list(wires.wires)
    for pair in (ends, ends[::-1]):
        own = [w for w in wires.way(pair[0], pair[1]).wires if used.count(w) == 1]
        if not own:
            raise _refused(sentence, "these ranks have no link of their own")
        for wire in own:
            factor = float(times[1]) if times else 0.0
            rates[wire] = replace(rates[wire], rate=rate or rates[wire].rate * factor)
    return replace(wires, wires=tuple(rates))


def _rank(wires: Wires, name: str, sentence: str) -> int:
    if name in wires.names:
        return wires.names.index(name)
    raise _refused(sentence, f"no rank {name!r}{nearest(name, list(wires.names))}")


def _refused(sentence: str, why: str) -> UsageError:
    return UsageError(f"{sentence!r}: {why}", where="--change", fix=f"Write {LEGAL}.")
