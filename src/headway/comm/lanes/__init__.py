"""Lanes: buckets of gradients, the process groups they travel on, the threads that send them.

Begin with `buckets`; `bucket_lanes` sends them. A route is one set of process groups; a lane with
`credit` chunks in flight needs as many routes, because operations on one group must have the same
order on all ranks.
"""
