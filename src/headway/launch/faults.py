"""Fault injection: slow or cut links, killed and slowed ranks, once per launch.

One rank acts: the one that is killed or slow, or the first rank of a link's first node, for both
ends. It notes the event in the run's history before it acts; a restarted rank asks the history
whether the fault has happened already. A slow rank stays slow when it is restarted.

`ProcessThrottle` slows a rank by a helper process that stops and continues it many times a second
(SIGSTOP, SIGCONT), so that all of it is slow: its computation, its data, its side of an exchange.
The helper ends with its rank and does not leave it stopped. What a GPU was given to do goes on.
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path

from headway.cluster import CutLink, Fault, KillRank, SlowRank
from headway.launch.cpu_throttle import ProcessThrottle
from headway.launch.emulation import EmulatedCluster, PacedCluster
from headway.run.distributed.launch_env import LaunchEnv
from headway.run.training.run_directory import EventLog, RunDirectory


@dataclass(frozen=True, kw_only=True)
class FaultAction:
    """What is done at a step.

    Attributes:
        late: Also done at a later step, should the run begin there.
        rate: New bytes per second of the link; None: as in the cluster.
        factor: How much slower the rank becomes; 1: not any more. None: it stays as it is.
    """

    text: str
    rank: int
    step: int
    late: bool = True
    kill: bool = False
    ends: tuple[str, str] = ("", "")
    rate: float | None = None
    cut: bool = False
    factor: float | None = None


def fault_actions(
    fault: Fault, emulated: EmulatedCluster | PacedCluster | None
) -> list[FaultAction]:
    """What a fault means, in order; a slow link that recovers is two deeds.

    Args:
        emulated: The links; None where only ranks can fail.
    """
    text = str(fault)
    if isinstance(fault, KillRank):
        return [FaultAction(text=text, rank=fault.rank, step=fault.step, late=False, kill=True)]
    if isinstance(fault, SlowRank):
        lag = FaultAction(text=text, rank=fault.rank, step=fault.first, factor=fault.factor)
        if fault.until is None:
            return [lag]
        over = f"rank {fault.rank} at its own rate again at step {fault.until}"
        return [lag, FaultAction(text=over, rank=fault.rank, step=fault.until, factor=1.0)]
    assert emulated is not None
    first = emulated.cluster.ranks_of(fault.ends[0])[0]
    if isinstance(fault, CutLink):
        return [FaultAction(text=text, rank=first, step=fault.step, ends=fault.ends, cut=True)]
    link = emulated.cluster.link(*fault.ends)
    assert link is not None
    slow = FaultAction(
        text=text, rank=first, step=fault.first, ends=fault.ends, rate=link.rate / fault.factor
    )
    if fault.until is None:
        return [slow]
    back = f"link {'-'.join(fault.ends)} back to {link} at step {fault.until}"
    return [
        slow,
        FaultAction(text=back, rank=first, step=fault.until, ends=fault.ends, rate=link.rate),
    ]


@dataclass(kw_only=True)
class FaultInjector:
    """The faults of a launch, for `TrainJob.before_step`; pickles.

    Attributes:
        first_attempt: Of this launch; what an earlier one noted does not count.
    """

    faults: tuple[Fault, ...]
    directory: Path
    first_attempt: int = 0
    emulated: EmulatedCluster | PacedCluster | None = None
    _over: set[str] = field(default_factory=set)
    _throttle: ProcessThrottle | None = None

    def __call__(self, place: LaunchEnv, step: int) -> None:
        """Do what is due before a step, if this rank is the one to do it."""
        for deed in sorted(self._deeds(), key=lambda deed: deed.step):
            due = step >= deed.step if deed.late else step == deed.step
            if due and deed.rank == place.rank and deed.text not in self._over:
                fresh = deed.text not in self._happened()
                if fresh:
                    self._note(deed, place, step)
                if fresh or deed.factor is not None:  # this process is a new one
                    self._do(deed, place)
                self._over.add(deed.text)

    def _deeds(self) -> list[FaultAction]:
        return [deed for fault in self.faults for deed in fault_actions(fault, self.emulated)]

    def _do(self, deed: FaultAction, place: LaunchEnv) -> None:
        if deed.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        elif deed.factor is not None:
            if self._throttle is not None:
                self._throttle.end()
            self._throttle = ProcessThrottle(deed.factor) if deed.factor > 1 else None
        elif isinstance(self.emulated, PacedCluster):
            if place.pace is not None:
                self.emulated.set_link(*deed.ends, deed.rate, place.pace[0].parent)
        elif self.emulated is not None and deed.cut:
            self.emulated.cut(*deed.ends)
        elif self.emulated is not None:
            self.emulated.set_link(*deed.ends, deed.rate)

    def _note(self, deed: FaultAction, place: LaunchEnv, step: int) -> None:
        """Any rank may add a line to the run's history: short lines are appended as a whole."""
        path = RunDirectory(self.directory).events_file
        with EventLog(path, attempt=place.attempt) as log:
            log.write("fault", step=step, rank=place.rank, text=deed.text)

    def _happened(self) -> set[str]:
        path = RunDirectory(self.directory).events_file
        lines = path.read_bytes().splitlines() if path.exists() else []
        events = [json.loads(line) for line in lines if b'"fault"' in line and line.endswith(b"}")]
        return {
            event["text"]
            for event in events
            if event["event"] == "fault" and event["attempt"] >= self.first_attempt
        }
