"""Proof that a split run computes what the serial run computes."""

from headway.verification.compare import Comparison, Difference, compare
from headway.verification.record import Recording, VerifyJob
from headway.verification.serial import record_serial
from headway.verification.split import record_split

__all__ = [
    "Comparison",
    "Difference",
    "Recording",
    "VerifyJob",
    "compare",
    "record_serial",
    "record_split",
]
