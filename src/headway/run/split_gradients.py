"""The hands on the gradients where layers are split: each rank has its parts of the parameters.

The model is split at its first batch (`split`). Backward then leaves on every rank the gradients of
its parts; those are summed over the ranks that hold the same parts of other samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headway.checkpoint.staging import local
from headway.data import RankBatch
from headway.errors import HeadwayError
from headway.parallel.state_sharding import follow_parameters
from headway.parallel.tensor import Decisions, Grid, Split, obey, survey
from headway.plan.layer_split import TENSOR
from headway.run.memory import give_back_freed_memory
from headway.run.meshes import refined_mesh
from headway.run.part_gradients import PartGradients, skeleton
from headway.run.randomness import Sites

BUCKET = 25 * 2**20
"""Bytes that are summed at once."""


class SplitGradients(PartGradients):
    """As `Gradients`; the arguments are the same.

    Attributes:
        split: None before the model is split.
    """

    split: Split | None = None
    _sites: Sites | None = None

    def _place(self) -> None:
        plan, grid = self._plan, self._plan.split.grid
        assert grid is not None
        axes = {f"{TENSOR}_{axis}": size for axis, size in grid.sizes}
        with self._world.explained("making the groups that split layers"):
            mesh = refined_mesh(plan, self._world, TENSOR, axes)
            self._grid = Grid.of(grid, mesh[tuple(axes)])
            self._copies = mesh.get_group(plan.exchange.axis) if plan.data_degree > 1 else None

    def divide(
        self,
        batch: RankBatch | None,
        loss: Callable[[Any, Any], Any],
        prepare: Callable[[Any], Any],
        probe: Callable[[Any], Sites],
    ) -> Sites:
        """Split the model, where that has not been done; collective. What rank 0 finds counts.

        Args:
            batch: Any; only that of rank 0 is looked at.
            loss: Of the recipe.
            prepare: Micro-batch -> what the loss gets.
            probe: Looks at the random draws of the model, before it is split.

        Raises:
            PlanError: It cannot be split.
        """
        if self._sites is not None:
            return self._sites
        found: list[Any] = [None]
        if self._world.rank == 0:
            try:
                assert batch is not None
                data = prepare(batch.micros[0].data)
                decisions = survey(
                    self._model, loss, data, self._grid.plan, whole=self._plan.split.whole
                )
                found = [(decisions, probe(data))]
            except HeadwayError as error:
                found = [error]
        with self.exchanging():
            dist.broadcast_object_list(found, src=0)
        if isinstance(found[0], HeadwayError):
            raise found[0]
        decided, self._sites = found[0]
        self._obey(decided)
        return self._sites

    def _obey(self, decisions: Decisions) -> None:
        names = {parameter: name for name, parameter in self._model.named_parameters()}
        self._skeleton = skeleton(self._model)
        with self.exchanging():
            self.split = obey(self._model, self._grid, decisions)
        self._all = dict(self._model.named_parameters())
        follow_parameters(self._optimizer, names, self._all, self.split.held)
        self._parameters = {}
        self.follow()
        self.remarks.extend(f"not split: {n} ({why})" for n, why in decisions.left.items())
        give_back_freed_memory()

    def logical(self, name: str, tensor: Tensor) -> Tensor:
        return tensor if self.split is None else self.split.logical(name, tensor)

    def held(self, name: str, tensor: Tensor) -> Tensor:
        """The inverse of `logical`."""
        return tensor if self.split is None else self.split.held(name, tensor)

    def receive(self) -> None:
        """Sum the gradients over the ranks that hold the same parts."""
        if self._copies is None:
            return
        parameters = list(self._parameters.values())
        with self.exchanging():
            used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.float32)
            used = used.to(self._world.device)
            dist.all_reduce(used, group=self._copies)
            for parameter, ranks in zip(parameters, used.tolist(), strict=True):
                if ranks and parameter.grad is None:  # another rank's samples have used it
                    parameter.grad = torch.zeros_like(parameter)
            gradients = [local(p.grad) for p in parameters if p.grad is not None]
            sums = [(part, _start(part, self._copies)) for part in _buckets(gradients)]
            for part, (flat, work) in sums:
                work.wait()
                for gradient, total in zip(
                    part, flat.split([g.numel() for g in part]), strict=True
                ):
                    gradient.copy_(total.view_as(gradient))


def _start(part: list[Tensor], group: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
    flat = torch.cat([gradient.flatten() for gradient in part])
    work = dist.all_reduce(flat, group=group, async_op=True)
    assert work is not None
    return flat, work


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """In their order, of one element type each."""
    part: list[Tensor] = []
    size = 0
    for gradient in gradients:
        if part and (part[0].dtype != gradient.dtype or size >= BUCKET):
            yield part
            part, size = [], 0
        part.append(gradient)
        size += gradient.nbytes
    if part:
        yield part
