"""What happened to one bucket in one step: the record behind timeline, report and messages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Flight:
    """Times are `perf_counter` seconds; 0.0: not yet.

    Attributes:
        bucket: Number, in the order of the plan.
        parameters: Logical names whose gradients it holds.
        num_bytes: Size of the gradients.
        wire_bytes: What this rank sends for it by the plan's own arithmetic.
        ready: The last of its gradients was there.
        sent: Its first byte was handed to the network.
        received: Its sum was there.
        applied: The optimiser had used it (exchanges across the step's border; else 0.0).
        needed: The training thread asked for it.
        waited: Seconds for which the training thread then stood still: exposed communication.
        name: Of what is no bucket: the all-reduce of a pipeline's stage.
    """

    bucket: int
    parameters: tuple[str, ...]
    num_bytes: int
    wire_bytes: int
    ready: float = 0.0
    sent: float = 0.0
    received: float = 0.0
    applied: float = 0.0
    needed: float = 0.0
    waited: float = 0.0
    name: str = ""
