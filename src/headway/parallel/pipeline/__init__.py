"""Pipeline parallelism: cutting a model into stages and running schedule tables on them.

`parallel.stages` defines what a stage is. `partition` makes stages of a model, `runtime` runs them,
and `grad_sync` sums their gradients over the ranks that hold the same stage. Rooms import in this
order only: `grad_sync` from `runtime`, `runtime` from `partition`, all from `parallel.stages`.
"""
