"""Proof that a split run computes what the serial run computes.

`recording` says what is compared, `reference` makes the expected numbers in one process,
`distributed_run` those of the executor, `compare` puts both side by side. An inexact exchange is
checked by its own law (`exchange_law`) instead.
"""

from headway.verification.compare import Comparison, Difference, compare
from headway.verification.distributed_run import laws_file, record_split
from headway.verification.exchange_law import Law, load_laws
from headway.verification.recording import Recording, VerifyJob
from headway.verification.reference import cut_file, record_delayed, record_serial

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
