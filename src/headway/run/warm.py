"""Imported by a forkserver before it forks workers: pays once what every worker would pay.

The first optimiser that a process builds makes torch import about 820 modules (torch._dynamo,
sympy; 0.9 s of CPU time), so one is built here. Nothing may start a thread or touch a GPU.
"""

import torch

import headway.run.worker

torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)

__all__ = ["headway"]
