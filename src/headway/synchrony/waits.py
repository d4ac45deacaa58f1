"""What a worker's wait for an answer was spent on: the causes of a simulated and of a live run.

- "bound": the holder had the message, and the rule did not let the worker go on.
- "server": the holder was busy with other messages and with this one, or waited for those of other
  workers.
- "neighbour": the same where the holder is another worker's model.
- "link": the message and its answer were on their way.
- "meeting": an exchange in which all workers meet, as a whole.

Only durations are compared, each by the clock of one process.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HolderTime:
    """Of a message at its holder, in seconds.

    Attributes:
        busy: Until it was handled.
        held: From then on until it was answered.
    """

    busy: float = 0.0
    held: float = 0.0


NO_TIME = HolderTime()


def split_wait(cause: str, waited: float, whole: float, spent: HolderTime) -> dict[str, float]:
    """Seconds by cause; together what was waited.

    Args:
        cause: Of a wait that a rule has brought about: the program's.
        waited: Seconds; fewer than `whole` where something was computed meanwhile.
        whole: From the worker's last message to the holder to the answer; 0 in the same process,
            where no link is between them.
        spent: At the holder; what is left of the whole was on its way.
    """
    link = min(waited, max(0.0, whole - spent.busy - spent.held))
    held = min(waited - link, spent.held)
    found = {"link": link}
    for name, seconds in ((cause, held), (_busy_cause(cause), waited - link - held)):
        found[name] = found.get(name, 0.0) + seconds
    return {name: seconds for name, seconds in found.items() if seconds}


def _busy_cause(cause: str) -> str:
    return "server" if cause == "bound" else cause
