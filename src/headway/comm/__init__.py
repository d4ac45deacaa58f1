"""Gradient communication: how the gradients of all ranks become one sum.

Rooms, each importing only those before it: `backend` (a process group for torch.distributed that
runs collective programs), `algorithms` (the interface of an exchange method; plain, hierarchical
and Adasum reductions), `compress` (compressors with error feedback), `lanes` (buckets and the
threads that send them), `exchange` (hooks on the backward pass), `tuning` (building an exchange
from a plan, and rebuilding it from measurements).
"""
