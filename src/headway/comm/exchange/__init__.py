"""Gradient exchanges: from the hooks of the backward pass to summed gradients.

Begin with `gradient_exchange`; `priority_exchange` crosses the border of the step. `ddp_hook` is
for users of PyTorch DDP.
"""
