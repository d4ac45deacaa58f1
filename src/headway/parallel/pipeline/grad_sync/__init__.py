"""Synchronising a stage's gradients and sharded parameters over the ranks that hold it.

`gradient_reduction` carries out the SYNC and WAIT actions of a schedule table; `zero` keeps the
parameters of stages sharded between steps."""
