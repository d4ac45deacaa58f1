"""Fault injection: slow or cut links, killed and slowed ranks, once per launch.

One rank injects a fault: the one that is killed or slowed, or the first rank of a link's first
node, for both ends. It writes the event to the run's history first, where a restarted rank finds
that the fault has happened already. A slow rank stays slow when it is restarted
(`ProcessThrottle`).
"""

from __future__ import annotations

import os
import signal
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from headway.cluster import CutLink, Fault, KillRank, SlowRank
from headway.documents import parse_json
from headway.launch.cpu_throttle import ProcessThrottle
from headway.launch.emulation import EmulatedCluster, PacedCluster
from headway.run.distributed.launch_env import LaunchEnv
from headway.run.training.run_directory import EventLog, RunDirectory


@dataclass(frozen=True, kw_only=True)
class FaultAction:
    """One action of a fault, at a step.

    Attributes:
        late: Also done at a later step, where the run starts behind `step`.
        rate: New bytes per second of the link; None: as in the cluster.
        factor: How much slower the rank becomes; 1: full speed again. None: unchanged.
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
    """The actions of a fault, in order; a slow link that recovers has two.

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
        first_attempt: The first attempt of this launch; faults of earlier ones do not count.
    """

    faults: tuple[Fault, ...]
    directory: Path
    first_attempt: int = 0
    emulated: EmulatedCluster | PacedCluster | None = None
    _over: set[str] = field(default_factory=set)
    _throttle: ProcessThrottle | None = None

    def __call__(self, place: LaunchEnv, step: int) -> None:
        """Inject what is due before a step, if it is this rank's to inject."""
        # By step: in a run that starts behind both actions of a fault, the recovery must come last.
        for action in sorted(self._actions(), key=lambda action: action.step):
            due = step >= action.step if action.late else step == action.step
            if due and action.rank == place.rank and action.text not in self._over:
                fresh = action.text not in self._happened()
                if fresh:
                    self._note(action, place, step)
                # After a restart this process is a new one, which nobody has slowed yet.
                if fresh or action.factor is not None:
                    self._do(action, place)
                self._over.add(action.text)

    def _actions(self) -> list[FaultAction]:
        return [action for fault in self.faults for action in fault_actions(fault, self.emulated)]

    def _do(self, action: FaultAction, place: LaunchEnv) -> None:
        if action.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        elif action.factor is not None:
            if self._throttle is not None:
                self._throttle.end()
            self._throttle = ProcessThrottle(action.factor) if action.factor > 1 else None
        elif isinstance(self.emulated, PacedCluster):
            if place.pace is not None:
                self.emulated.set_link(*action.ends, action.rate, place.pace[0].parent)
        elif self.emulated is not None and action.cut:
            self.emulated.cut(*action.ends)
        elif self.emulated is not None:
            self.emulated.set_link(*action.ends, action.rate)

    def _note(self, action: FaultAction, place: LaunchEnv, step: int) -> None:
        # Any rank may append to the history that rank 0 writes: short lines are appended whole.
        path = RunDirectory(self.directory).events_file
        with closing(EventLog(path, attempt=place.attempt)) as log:
            log.write("fault", step=step, rank=place.rank, text=action.text)

    def _happened(self) -> set[str]:
        path = RunDirectory(self.directory).events_file
        lines = path.read_bytes().splitlines() if path.exists() else []
        # A rank that was killed may have left half a line.
        events = [parse_json(line) for line in lines if b'"fault"' in line and line.endswith(b"}")]
        return {
            event["text"]
            for event in events
            if event["event"] == "fault" and event["attempt"] >= self.first_attempt
        }
