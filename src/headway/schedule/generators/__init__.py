"""Generators: one function per schedule, `name(ranks, microbatches, *, options)`, compute alone.

Each gives a `PipelineSchedule` whose order on every rank is complete without messages (`lowering`
adds them), and refuses impossible sizes with a PlanError that names the legal ones.
"""
