"""What `headway train svm FILE` is asked to do, and how it ended: data that crosses processes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from headway.cost.support_vectors import RankMemory
from headway.errors import TIMEOUT_SECONDS, UsageError
from headway.run.distributed.launch_env import HEARTBEAT_TIMEOUT_SECONDS
from headway.svm.elimination import find_rule
from headway.svm.kernels import KernelName

FILE_KERNELS = tuple(name for name in get_args(KernelName) if name != "callable")
MODEL = "machine.model"
"""Name of the machine in the run directory, where no other is asked for."""


@dataclass(frozen=True, kw_only=True)
class MachineJob:
    """What is trained; the same on every rank.

    Attributes:
        data: Samples in libsvm's format, which every rank can read.
        directory: The run directory, which all ranks must see; chosen by `train_file`.
        test: More samples, of which the share that is predicted rightly is told.
        out: Where the machine is written; None: `MODEL` in the run directory.
        kernel: One of libsvm's.
        gamma: None: 1 / columns, as libsvm has it.
        weights: Factors of C by label; 1 where there is none.
        rule: Name of a rule of elimination.
        memory: What a rank needs at most; None: nobody has asked, as on all ranks but the first of
            another launcher's.
    """

    data: Path
    directory: Path = Path()
    test: Path | None = None
    out: Path | None = None
    kernel: str = "rbf"
    C: float = 1.0
    gamma: float | None = None
    degree: float = 3
    coef0: float = 0.0
    tolerance: float = 1e-3
    weights: Mapping[float, float] = field(default_factory=dict)
    rule: str = "adaptive"
    working_set: int = 512
    most_steps: int = -1
    resume: bool = False
    timeout_seconds: float = TIMEOUT_SECONDS
    patience_seconds: float = HEARTBEAT_TIMEOUT_SECONDS
    memory: RankMemory | None = None

    @property
    def model(self) -> Path:
        return self.out or self.directory / MODEL

    def check(self) -> None:
        """Refuse what cannot be trained.

        Raises:
            UsageError: With all problems.
        """
        problems = list(self._problems())
        if problems:
            raise UsageError("this cannot be trained", why="\n  ".join(problems))
        find_rule(self.rule)

    def _problems(self) -> Iterator[str]:
        if self.kernel not in FILE_KERNELS:
            yield f"there is no kernel {self.kernel!r}: use one of {', '.join(FILE_KERNELS)}"
        positive = {"C": self.C, "tolerance": self.tolerance, "gamma": self.gamma}
        positive |= {f"the weight of class {label:g}": w for label, w in self.weights.items()}
        for name, value in positive.items():
            if value is not None and not (value > 0 and math.isfinite(value)):
                yield f"{name} is {value:g}; it must be positive and finite"
        if not self.degree >= 0:
            yield f"degree is {self.degree:g}; it must not be negative"
        if not math.isfinite(self.coef0):
            yield f"coef0 is {self.coef0:g}; it must be finite"
        if not 2 <= self.working_set <= 1024:
            yield f"a working set has 2 to 1024 samples, not {self.working_set}"
        if self.most_steps < -1:
            yield f"at most {self.most_steps} steps: -1 is 10^9"


@dataclass(frozen=True, kw_only=True)
class MachineOutcome:
    """How a training ended; the same on every rank.

    Attributes:
        step: Outer steps over all attempts.
        finished: Whether the violation of all samples is at most the tolerance.
        support: Support vectors of each class, by label.
        objective: Of the dual problems, summed up.
        values: Kernel values that all ranks have computed.
        accuracy: Share of the test samples that are predicted rightly; None: there are none.
        peak_bytes: Largest memory of a rank, the process itself included; 0: not known.
        bound_bytes: What was said before: at most this, with so many support vectors.
        stopped_by: The signal that stopped it, or None.
    """

    step: int
    finished: bool
    classes: tuple[int, ...]
    support: tuple[int, ...]
    violation: float
    objective: float
    steps: int
    values: int
    accuracy: float | None
    peak_bytes: int
    bound_bytes: float
    stopped_by: str | None
