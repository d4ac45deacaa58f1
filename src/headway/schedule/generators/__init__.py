"""Generators: one function per schedule, `name(ranks, microbatches, *, options)`, compute alone.

D is `ranks`, N is `microbatches`, v is `virtual`: stages on a rank; any N of at least 1 unless a
function says otherwise. Each gives a `PipelineSchedule` whose order on every rank is complete
without messages (`lowering` adds them), and refuses impossible sizes with a PlanError that names
the legal ones.
"""
