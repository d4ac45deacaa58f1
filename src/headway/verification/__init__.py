"""Proof that a split run computes what the serial run computes."""

from headway.verification.compare import Comparison, Difference, compare
from headway.verification.delayed import cut_file, record_delayed
from headway.verification.law import Law, load_laws
from headway.verification.record import Recording, VerifyJob
from headway.verification.serial import record_serial
from headway.verification.split import laws_file, record_split

__all__ = [
    "Comparison",
    "Difference",
    "Law",
    "Recording",
    "VerifyJob",
    "compare",
    "cut_file",
    "laws_file",
    "load_laws",
    "record_delayed",
    "record_serial",
    "record_split",
]
