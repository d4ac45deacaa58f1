"""Pipeline parallelism: cutting a model into stages and running schedule tables on them.

`parallel.stages` defines what a stage is. `partition` makes stages of a model, `runtime` runs them,
and `data_parallel` sums their gradients over the ranks that hold the same stage. Imports go in this
order only: `data_parallel` from `runtime`, that from `partition`, all from `parallel.stages`.
"""
