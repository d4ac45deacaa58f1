"""Imported by a forkserver before it forks workers: pays once what every worker would pay.

The first optimiser that a process builds makes torch import about 820 modules (torch._dynamo,
sympy; 0.9 s of CPU time), so one is built here. Nothing may start a thread or touch a GPU.
What has been imported so far is never looked at again by the collector: its pages stay shared.
"""

import gc

import torch

import headway.run.worker

torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)

gc.freeze()
gc.enable()

__all__ = ["headway"]
