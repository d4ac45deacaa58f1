"""What the planner predicts for a plan on a cluster; it travels in the plan's file.

It is no part of the decision: the plan's hash leaves it out, and nothing that executes a plan reads
it. Reports and the progress lines show it beside the measured times.
"""

from __future__ import annotations

from headway.documents import document

WAITS = ("bubble", "messages", "exchange")
"""Parts in which a rank does not compute."""


@document
class PlanProvenance:
    """Recipe and cluster of a plan, so that `explain` and `simulate` can use them again.

    Attributes:
        recipe: As for `headway train`; a file's path goes from the folder of the plan's file.
        cluster: A preset, or a file's path as above.
        nodes: Of a preset; 0: not said.
    """

    recipe: str
    cluster: str
    nodes: int = 0


@document
class Prediction:
    """What is predicted of one step.

    Attributes:
        parts: Of it: "compute", "bubble", "messages", "exchange", "update", "data",
            "host"; they add up to it.
        stages: Of each stage of a pipeline the seconds of one micro-batch, both passes; one number
            where the model is not cut.
        message: Seconds by which each message of the filling and draining shows.
        cluster: Hash of the cluster's text.
    """

    seconds: float
    parts: dict[str, float]
    stages: tuple[float, ...] = ()
    message: float = 0.0
    bytes: float = 0.0
    cluster: str = ""
    device: str = ""
    version: str = ""
    asked: PlanProvenance | None = None

    @property
    def waiting(self) -> float:
        """Seconds of a step in which a rank does not compute."""
        return sum(self.parts.get(name, 0.0) for name in WAITS)

    @property
    def compute(self) -> float:
        """Seconds of both passes."""
        return self.parts.get("compute", 0.0)

    @property
    def update(self) -> float:
        """Seconds of the optimiser."""
        return self.parts.get("update", 0.0)
