"""Proof that a split run computes what the serial run computes.

`recording` says what is compared, `serial_run` makes the expected numbers in one process,
`distributed_run` those of the executor, `compare` puts both side by side. An inexact exchange is
made again in one process (`replay`).
"""
