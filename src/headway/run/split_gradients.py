"""The hands on the gradients where layers are split: each rank has its parts of the parameters.

The model is split at its first batch (`split`). Its modules then hold parts as plain parameters, so
that the exchange, or FSDP2 where the state is sharded as well, takes them for those of a smaller
model; ranks that hold the same parts of other samples are its copies. The optimiser has DTensors
over the same memory, which know what they are parts of. Invariant: both have the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from headway.data import RankBatch
from headway.parallel.state_sharding import ShardedState, follow_parameters
from headway.parallel.tensor import Decisions, Grid, Home, Settings, Split, obey, survey
from headway.plan.layer_split import TENSOR
from headway.plan.sharding import SHARD
from headway.run.first import found_by_first
from headway.run.memory import give_back_freed_memory
from headway.run.meshes import grid_axes, refined_mesh
from headway.run.part_gradients import PartGradients
from headway.run.randomness import Sites
from headway.run.record import StepRecord
from headway.run.skeleton import skeleton


class SplitGradients(PartGradients):
    """As `Gradients`; the arguments are the same.

    Attributes:
        split: None before the model is split.
    """

    split: Split | None = None
    _sites: Sites | None = None
    _leaves: Mapping[str, nn.Parameter] = {}
    _wrapped: dict[str, tuple[Tensor, Tensor]]

    def _place(self) -> None:
        plan, grid = self._plan, self._plan.split.grid
        assert grid is not None
        self.layout = self
        with self._world.explained("making the groups that split layers"):
            self._meshes = {
                one: refined_mesh(plan, self._world, TENSOR, grid_axes(one), first=True)
                for one in dict.fromkeys((grid, *(other for _, other in plan.split.others)))
            }
        self._grids = {
            one: Grid.of(one, m[tuple(grid_axes(one))]) for one, m in self._meshes.items()
        }
        self._grid = self._grids[grid]
        self._wrapped = {}

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

        def look() -> tuple[Decisions, Sites]:
            assert batch is not None
            data = prepare(batch.micros[0].data)
            said = self._plan.split
            decisions = survey(
                self._model, loss, data, self._grid.plan,
                whole=said.whole, only=said.only, by=said.others,
            )  # fmt: skip
            return decisions, probe(data)

        decided, self._sites = found_by_first(self._world.rank, look, self.exchanging())
        self._obey(decided)
        return self._sites

    def _obey(self, decisions: Decisions) -> None:
        names = {parameter: name for name, parameter in self._model.named_parameters()}
        self._skeleton = skeleton(self._model)
        zero = self._plan.memory.zero if self._plan.data_degree > 1 else 0
        with self.exchanging():
            homes = {plan: self._home(grid, zero > 0) for plan, grid in self._grids.items()}
            # FSDP2 gathers weights ahead, and a part that is away cannot be gathered further.
            settings = Settings(ahead=not zero)
            self.split = obey(
                self._model, self._grid, decisions, settings=settings,
                home=homes[self._grid.plan], grids=self._grids,
            )  # fmt: skip
            for name, key in self.split.keys.items():
                self.split.homes[name] = homes[key.grid.plan]
            if zero:
                mesh = self._meshes[self._grid.plan][self._data_dims]
                self.sharded = ShardedState(self._model, None, mesh, zero)
        self._leaves = dict(self._model.named_parameters())
        self._all = {name: self._seen(name, leaf) for name, leaf in self._leaves.items()}
        follow_parameters(self._optimizer, names, self._all, self.split.held)
        self.follow()
        self.remarks.extend(f"not split: {n} ({why})" for n, why in decisions.left.items())
        give_back_freed_memory()

    @property
    def _data_dims(self) -> tuple[str, ...]:
        names = (self._plan.exchange.axis, SHARD)
        return tuple(n for n in names if self._plan.mesh.degree(n) > 1)

    def _home(self, grid: Grid, sharded: bool) -> Home:
        """On a grid; with sharded state on the data axes as well, of which the last one cuts."""
        if not sharded:
            return Home.of(grid)
        *copies, _ = self._data_dims
        names = tuple(grid.held_on.mesh_dim_names or ()) + self._data_dims
        inner = (*(Replicate() for _ in copies), Shard(0))
        return Home(grid, self._meshes[grid.plan][names], inner)

    def _seen(self, name: str, leaf: nn.Parameter) -> nn.Parameter:
        """A parameter as the optimiser has it."""
        assert self.split is not None
        return nn.Parameter(self.split.wrapped(name, leaf), leaf.requires_grad)

    def _sources(self) -> Mapping[str, nn.Parameter]:
        return {name: self._leaves[name] for name in self._parameters}

    def follow(self) -> None:
        if self.split is None:
            return
        for name, leaf in self._leaves.items():  # the user freezes what the modules hold
            self._all[name].requires_grad_(leaf.requires_grad)
        super().follow()

    def begin(self, record: StepRecord, own: int, doing: str) -> None:
        super().begin(record, own, doing)
        for name, leaf in self._leaves.items():
            self._all[name].grad = leaf.grad = None

    def receive(self) -> None:
        """Wait for the sums; the optimiser's parameters get what the modules' have."""
        super().receive()
        assert self.split is not None
        for name, parameter in self._parameters.items():
            gradient = self._leaves[name].grad
            if gradient is None:
                continue
            if self._exchange is None:
                parameter.grad = self.split.wrapped(name, gradient)
                continue
            known = self._wrapped.get(name)
            if known is None or known[0] is not gradient:  # a bucket's memory stays the same
                known = self._wrapped[name] = gradient, self.split.wrapped(name, gradient)
            parameter.grad = known[1]

    def logical(self, name: str, tensor: Tensor) -> Tensor:
        return tensor if self.split is None else self.split.logical(name, tensor)

    def held(self, name: str, tensor: Tensor) -> Tensor:
        """The inverse of `logical`."""
        return tensor if self.split is None else self.split.held(name, tensor)
