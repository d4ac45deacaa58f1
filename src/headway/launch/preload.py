"""Last module that the forkserver imports: pays once what every worker would pay.

The first optimiser that a process builds makes torch import about 820 modules (torch._dynamo,
sympy; 0.9 s of CPU time), so one is built here. Nothing may start a thread or touch a GPU. Objects
that exist by now are frozen (`gc.freeze`), so that their memory pages stay shared after the fork.
"""

import gc

import torch

import headway.run.training.loop

torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)

gc.freeze()
gc.enable()

__all__ = ["headway"]
