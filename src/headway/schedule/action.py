"""One cell of a pipeline schedule: what a rank does with one micro-batch at one stage.

An action is a small immutable value with a text form, `d0.s2.F.5` (pipe d0, stage 2, forward of
micro-batch 5), so that tables can be written, read, compared and named in messages.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What is done. B is I and W together; SYNC, WAIT and STEP concern a stage, no micro-batch."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    SYNC = "SYNC"  # start the all-reduce of the stage's gradients
    WAIT = "WAIT"  # until that all-reduce has ended
    STEP = "STEP"  # the optimiser's step of the stage
    SEND = "SEND"  # hand a message to the network; does not wait
    POST = "POST"  # be ready for a message; does not wait
    RECV = "RECV"  # wait for a message that was posted


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD})
MESSAGES = frozenset({Kind.SEND, Kind.POST, Kind.RECV})
OF_STAGE = frozenset({Kind.SYNC, Kind.WAIT, Kind.STEP})
NONE = -1
_KINDS = "|".join(sorted(Kind, key=len, reverse=True))
_TEXT = re.compile(
    rf"(?P<pipe>[A-Za-z]\w*)\.s(?P<stage>\d+)\.(?P<kind>{_KINDS})"
    r"(\.(?P<microbatch>\d+))?([<>](?P<other>\d+))?(@(?P<version>\d+))?"
)


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One thing that one rank does.

    Attributes:
        kind: What.
        pipe: Name of the pipe (a chain of stages; several may share the ranks).
        stage: Number of the stage in its pipe, from 0.
        microbatch: Number of the micro-batch in the step, from 0; NONE for SYNC, WAIT, STEP.
        other: Of a message: the stage at the other end. Between s and t > s, s sends activations
            and t sends their gradients. NONE otherwise.
        version: Of F, B, I, W in schedules without a flush: the number of steps of this stage whose
            weights are used. NONE: the newest. Of STEP in them: the version that it makes.
    """

    kind: Kind
    pipe: str
    stage: int
    microbatch: int = NONE
    other: int = NONE
    version: int = NONE

    def __str__(self) -> str:
        text = f"{self.pipe}.s{self.stage}.{self.kind}"
        if self.microbatch != NONE:
            text += f".{self.microbatch}"
        if self.other != NONE:
            text += f"{'>' if self.kind == Kind.SEND else '<'}{self.other}"
        return text + (f"@{self.version}" if self.version != NONE else "")

    @staticmethod
    def parse(text: str) -> Action:
        """The action of a text form.

        Raises:
            ValueError: The text is none, with an example of one that is.
        """
        found = _TEXT.fullmatch(text.strip())
        if found is None:
            raise ValueError(f"{text!r} is no action; write one like d0.s2.F.5 or d0.s2.STEP")

        def number(name: str) -> int:
            return NONE if found[name] is None else int(found[name])

        kind = Kind(found["kind"])
        if (kind in OF_STAGE) == (found["microbatch"] is not None):
            verb = "has no" if kind in OF_STAGE else "needs a"
            raise ValueError(f"{text!r}: {kind} {verb} micro-batch")
        if (kind in MESSAGES) != (found["other"] is not None):
            verb = "needs the" if kind in MESSAGES else "has no"
            raise ValueError(f"{text!r}: {kind} {verb} stage at the other end")
        return Action(
            kind,
            found["pipe"],
            int(found["stage"]),
            number("microbatch"),
            number("other"),
            number("version"),
        )

    @property
    def carries_gradient(self) -> bool:
        """Of a message: gradients go from later to earlier stages."""
        earlier = self.other < self.stage
        return earlier if self.kind == Kind.SEND else not earlier
