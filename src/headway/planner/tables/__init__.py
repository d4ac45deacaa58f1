"""Placement of embedding tables over ranks and tiers of memory.

`skew` measures which rows are looked up how often; `costs` turns tables and a machine into a
problem of choices (`choices`), which `solve` solves as an integer program; `placement` makes its
answer a plan with reasons. `torchrec` states the same problem with TorchRec's cost model. Begin at
`placement.place_over_tiers`.
"""
