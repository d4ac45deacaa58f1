"""Spatial meshes of the ranks of a test, and a split run of a module beside the unsplit one."""

from __future__ import annotations

from itertools import product
from math import prod

import torch
import torch.distributed as dist

from headway.parallel.spatial import SpatialContext, gather, halo_exchange


def context(shape, ranks=None, **options):
    """The context of a mesh (depth, height, width), or of its last dimensions, row-major.

    Args:
        shape: Ranks along each of the last dimensions.
        ranks: Who they are; the first ones if not given. All ranks of the world call this.
        options: Of the context.

    Returns:
        None on ranks that are not of the mesh.
    """
    ranks = list(range(prod(shape))) if ranks is None else ranks
    me = dist.get_rank()
    axes = {}
    for dim, size in enumerate(shape):
        others = [range(n) if place != dim else [0] for place, n in enumerate(shape)]
        for corner in product(*others):
            line = []
            for place in range(size):
                coordinates = [place if d == dim else c for d, c in enumerate(corner)]
                number = 0
                for n, c in zip(shape, coordinates, strict=True):
                    number = number * n + c
                line.append(ranks[number])
            group = dist.new_group(line)
            if me in line and size > 1:
                axes[dim - len(shape)] = group
    together = dist.new_group(ranks) if len(ranks) > 1 else None
    return SpatialContext.of(axes, together=together, **options) if me in ranks else None


def weights_for(y):
    """Fixed numbers of the shape of y, for a loss that every entry takes part in."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(tuple(y.shape), generator=generator, dtype=torch.float64)


def serial_run(module, inputs):
    """(outputs, gradients of inputs, gradients of parameters, buffers) of the unsplit module."""
    inputs = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    y = module(*inputs)
    (y * weights_for(y)).sum().backward()
    return _found(module, y, [x.grad for x in inputs])


def split_run(module, inputs, context, group=None):
    """The same of the module on split inputs; gradients of parameters summed over the ranks."""
    leaves, split = [], []
    for x in inputs:
        part = context.split(x)
        leaf = part.local.clone().requires_grad_(x.is_floating_point())
        leaves.append(leaf)
        split.append(part.like(leaf))
    y = module(*split)
    ((y * weights_for(y)).sum() / context.copies).backward()
    for parameter in module.parameters():
        dist.all_reduce(parameter.grad, group=group)
    grads = [
        None if leaf.grad is None else gather(s.like(leaf.grad))
        for leaf, s in zip(leaves, split, strict=True)
    ]
    return _found(module, gather(y), grads)


def _found(module, y, grads):
    parameters = {name: p.grad.clone() for name, p in module.named_parameters()}
    buffers = {name: b.clone().double() for name, b in module.named_buffers()}
    inputs = {f"input {n}": g for n, g in enumerate(grads) if g is not None}
    return {"output": y.detach(), **inputs, **parameters, **buffers}


def largest_difference(one, other):
    """The largest difference, relative to the largest entry, and where it is."""
    assert one.keys() == other.keys()
    worst = (0.0, "")
    for name, a in one.items():
        b = other[name]
        assert a.shape == b.shape, (name, a.shape, b.shape)
        apart = float((a - b).abs().max()) / max(1.0, float(a.abs().max())) if a.numel() else 0.0
        worst = max(worst, (apart, name))
    return worst


class Sent:
    """Counts the elements that this rank sends."""

    def __init__(self, monkey):
        self.elements = 0
        self._start = halo_exchange.dist.batch_isend_irecv
        monkey.setattr(halo_exchange.dist, "batch_isend_irecv", self)

    def __call__(self, operations):
        self.elements += sum(o.tensor.numel() for o in operations if o.op is dist.isend)
        return self._start(operations)

    def taken(self):
        elements, self.elements = self.elements, 0
        return elements
