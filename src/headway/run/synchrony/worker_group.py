"""A worker of several ranks, where workers do not meet in rounds: one leads, the others follow.

The first rank of a worker has its program and its holders (`FreeRun`), with values of the whole
model: to other workers it is the worker. Once the gradients of a step have been summed inside the
worker it gets them whole; when its program wants the next ones, it tells the others the step, and
hands out the parameters to compute with, of which each takes its part. So servers, centres and
models of gossip know nothing of copies, stages and shards.

Whoever follows waits for that message on a channel, as long as it takes, as its leader waits for
other workers; everything else that the ranks of a worker do together takes no longer than they do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from headway.channel.channel import Channel
from headway.channel.facts import broadcast_facts, gather_facts
from headway.channel.gloo_listeners import drop_later_connections
from headway.checkpoint.staging import local_data
from headway.comm.exchange.priority_exchange import empty_copy
from headway.plans import Plan
from headway.run.step.record import AgreementRecord
from headway.run.synchrony.agreement_recorder import AgreementRecorder
from headway.run.synchrony.free_run import FOR_EVER, FreeRun, received
from headway.run.synchrony.messages import MessageReader, put_message
from headway.run.synchrony.replica import StateRows
from headway.run.synchrony.rounds import WorkerPlace
from headway.synchrony.history import History
from headway.synchrony.snapshots import Snapshots

if TYPE_CHECKING:
    from headway.run.distributed.world import World

_BUCKET_BYTES = 1 << 24
_NO_STEP = -1

TensorsByKind = Mapping[str, Mapping[str, Tensor]]


class WorkerModel(Protocol):
    """What a rank holds of its worker's model: `headway.run.strategy.parameters.HeldParameters`."""

    named: Mapping[str, nn.Parameter]

    @property
    def away(self) -> frozenset[Tensor]:
        """Parameters that other ranks of the worker hold, and this one does not."""
        ...

    def complete(self, numbers: TensorsByKind) -> TensorsByKind:
        """Tensors by kind and name, whole on the first rank of the worker; collective in it."""
        ...

    def part_of(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of what has the form of a parameter, as it holds that."""
        ...


@dataclass(frozen=True)
class _GoOn:
    """The leader's program wants gradients of a step.

    Attributes:
        step: From 0; -1: it has ended.
        seen: The leader has got what a checkpoint holds.
    """

    step: int
    seen: bool


@dataclass(frozen=True)
class _Whole:
    """The model of a worker as its program and its holders see it.

    Attributes:
        named: Its parameters, whole.
        optimizer: Over these.
        apart: They are copies of what the ranks of the worker hold in parts.
    """

    named: Mapping[str, nn.Parameter]
    optimizer: Optimizer
    apart: bool

    def take_gradients(self, gradients: Mapping[str, Tensor], groups: Optimizer) -> None:
        """What backward has left in all ranks, and the settings of the user's optimiser now."""
        for name, parameter in self.named.items():
            parameter.grad = gradients.get(name)
        for own, group in zip(self.optimizer.param_groups, groups.param_groups, strict=True):
            own.update({key: value for key, value in group.items() if key != "params"})

    def state(self) -> dict[str, Tensor]:
        """The optimiser's tensors, "name.key" -> tensor."""
        return _state_tensors(self.named, self.optimizer)

    def state_rows(self) -> StateRows:
        """All of its state."""
        state = self.optimizer.state
        held = {name: state[p] for name, p in self.named.items() if p in state}
        return tuple((name, key, value) for name, of in held.items() for key, value in of.items())


def _state_tensors(named: Mapping[str, nn.Parameter], optimizer: Optimizer) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": value
        for name, parameter in named.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


class GroupRun:
    """This rank's part in its worker.

    Args:
        model: Where parameters have been made (`nn.Module.named_parameters`), for their forms.
        held: What this rank has of it.
        apart: Ranks hold parts of the model; else each has all of it.

    Attributes:
        met, over, gone, remarks, snapshots: As of `FreeRun`.
        saving: A Gloo group of the ranks of this worker for checkpoints alone.
    """

    def __init__(
        self,
        plan: Plan,
        place: WorkerPlace,
        world: World,
        model: nn.Module,
        held: WorkerModel,
        optimizer: Optimizer,
        *,
        apart: bool,
    ) -> None:
        self.met, self.over = True, False
        self.gone: frozenset[int] = frozenset()
        self.remarks: list[str] = []
        self.history = History()
        self._plan, self._place, self._world = plan, place, world
        self._held, self._optimizer, self._apart = held, optimizer, apart
        self._forms = {name: (p.shape, p.dtype) for name, p in model.named_parameters()}
        self._ranks = plan.worker_ranks(world.rank)
        self.saving = self._saving_group()
        self.snapshots = Snapshots(every=int(plan.workers == 1))
        self._replayed: History | None = None
        self._whole: _Whole | None = None
        self._free: FreeRun | None = None
        self._recorder = AgreementRecorder()
        self._links: list[MessageReader] = []
        self._next = _GoOn(0, False)
        self._begun = self._finished = False

    @property
    def inside(self) -> dist.ProcessGroup:
        """The group of this worker's ranks."""
        assert self._place.inside is not None
        return self._place.inside

    @property
    def worker(self) -> int:
        """Its number."""
        return self._place.worker

    @property
    def first(self) -> bool:
        """Whether this rank leads its worker."""
        return self._world.rank == self._ranks[0]

    @property
    def leads(self) -> bool:
        """Whether this rank tells of the run: the first one of the first worker."""
        return self._world.rank == 0

    @property
    def saves(self) -> bool:
        """Whether this rank has a part in the checkpoint at the end: those of the first worker."""
        return self._place.worker == 0

    # -- the strategy's calls ------------------------------------------------------------------

    def repeat(self, history: History) -> None:
        """Let holders handle their messages in a recorded order; before the first step."""
        self._replayed = history

    def begin(self, steps_done: int) -> None:
        """Begin with the model as it is now; once."""
        if self._begun:
            return
        self._begun = True
        with self._world.explained("the beginning of the ranks of a worker"):
            self._connect()
            self._whole = self._gathered()
        if self._whole is not None:
            free = self._free = FreeRun(
                self._plan,
                self._place,
                self._world,
                self._whole.named,
                self._whole.optimizer,
                self.history,
            )
            free.snapshots.every = self.snapshots.every if self.saves else 0
            if self._replayed is not None:
                free.repeat(self._replayed)
            free.begin(steps_done)
        self._hand_out()

    def step(self, count: float) -> None:
        """Give the program the gradients of this step, and go on to the next one."""
        self.met = self._plan.workers == 1
        if self._apart:
            self._take_gradients(count)
        if self._free is not None:
            self._free.step(count)
        self._hand_out()

    def is_closed(self, step: int) -> bool:
        """Whether the others have made a step, from 0, without this worker (backup workers)."""
        return step < self._next.step

    def pass_over(self) -> None:
        """Leave a step out that is closed."""
        if self._free is not None:
            self._free.pass_over()

    def agreement_record(self) -> AgreementRecord:
        """What this rank has seen of the others since it was last asked."""
        if self._free is not None:
            return self._free.agreement_record()
        return self._recorder.taken()

    def finish(self) -> None:
        """After the last step: all workers end with one model, each rank with its part of it."""
        if not self._begun or self._finished:
            return
        self._finished = True
        if self._free is not None:
            self._free.finish()
        self._hand_out()
        self._hand_out_state()
        for link in self._links:
            link.channel.allow(self._world.timeout_seconds)
            link.channel.close()
        self.met = True

    def close(self) -> None:
        """End without the others, after an error: those that wait for this rank notice."""
        if self._free is not None:
            self._free.close()
        if not self._finished:
            for link in self._links:
                link.channel.allow(0.1)
                link.channel.close()

    def vote(self, wishes: bool) -> int:
        """All ranks of a worker know its wish; the other workers do not wait for it."""
        return int(wishes)

    @property
    def under_way(self) -> bool:
        """Whether the leader alone has all that a checkpoint holds: from the first step to the
        end."""
        return self._begun and not self._finished

    @property
    def can_save(self) -> bool:
        """Whether a checkpoint can be made now, by the ranks of this worker; see `FreeRun`."""
        return self._finished or self._next.seen

    def snapshot(self) -> tuple[dict[str, Tensor], StateRows] | None:
        """As of `FreeRun`, on the leader alone, whole; None: this rank has nothing to add to it.

        Before the end only: then each rank has its part of what the run ends with.
        """
        if self._free is None or self._whole is None:
            return None
        parameters, rows = self._free.snapshot()
        return parameters, self._whole.state_rows() if rows is None else rows

    def state(self) -> Mapping[str, Tensor]:
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """The worker begins with what has been restored: it is gathered then."""

    def with_state(self, numbers: TensorsByKind) -> TensorsByKind:
        """The tensors of a step, with the optimiser's while the leader alone has it."""
        if not self._apart or self._finished or self._whole is None:
            return numbers
        return {**numbers, "optimizer": self._whole.state()}

    # -- from the ranks to the leader ----------------------------------------------------------

    def _gathered(self) -> _Whole | None:
        """The whole model with its optimiser, on the leader; collective in the worker."""
        held, optimizer = self._held, self._optimizer
        if not self._apart:
            return _Whole(held.named, optimizer, apart=False) if self.first else None
        parts = {n: p.detach() for n, p in held.named.items() if p not in held.away}
        found = held.complete({"parameter": parts, "optimizer": self._own_state()})
        plain = {
            name: {k: v for k, v in optimizer.state[p].items() if not isinstance(v, Tensor)}
            for name, p in held.named.items()
            if p in optimizer.state and p not in held.away
        }
        told = gather_facts(plain, self.inside)
        if not self.first:
            return None
        named = {
            name: nn.Parameter(
                found["parameter"][name].clone(), requires_grad=held.named[name].requires_grad
            )
            for name in self._forms
        }
        return _Whole(
            named, self._whole_optimizer(named, found.get("optimizer", {}), told), apart=True
        )

    def _own_state(self) -> dict[str, Tensor]:
        held = {n: p for n, p in self._held.named.items() if p not in self._held.away}
        return _state_tensors(held, self._optimizer)

    def _whole_optimizer(
        self,
        named: Mapping[str, nn.Parameter],
        state: Mapping[str, Tensor],
        plain: Sequence[Mapping[str, Mapping[str, Any]]],
    ) -> Optimizer:
        """One like the user's, over whole parameters, with the state that its parts have."""
        names = {p: name for name, p in self._held.named.items()}
        found = empty_copy(self._optimizer)
        found.param_groups = [
            {**group, "params": [named[names[p]] for p in group["params"]]}
            for group in self._optimizer.param_groups
        ]
        for told in plain:
            for name, values in told.items():
                found.state[named[name]].update(values)
        for full, tensor in state.items():
            name, _, key = full.rpartition(".")
            found.state[named[name]][key] = tensor.clone()
        return found

    def _take_gradients(self, count: float) -> None:
        """Give the leader what backward has left in all ranks; collective in the worker."""
        found: Mapping[str, Tensor] = {}
        if count:  # else no rank of the worker has had samples
            own = {n: p.grad for n, p in self._held.named.items() if p.grad is not None}
            found = self._held.complete({"gradient": own}).get("gradient", {})
        if self._whole is not None:
            self._whole.take_gradients(found, self._optimizer)

    # -- from the leader to the ranks ----------------------------------------------------------

    def _connect(self) -> None:
        """A channel from the leader to each of the others."""
        first, *others = self._ranks
        for peer in others if self.first else [first]:
            channel = Channel(peer, slots=4, timeout=self._world.timeout_seconds)
            channel.allow(FOR_EVER)
            self._links.append(MessageReader(channel))

    def _hand_out(self) -> None:
        """Tell all ranks of the worker which step is next, and what to compute it with."""
        if self._free is not None:
            wanted = self._free.wanted_step
            self._next = _GoOn(_NO_STEP if wanted is None else wanted, self._free.can_save)
            for link in self._links:
                put_message(link.channel, self._next)
        else:
            self._next = self._told()
        for name, whole in self._spread():
            parameter = self._held.named[name]
            if parameter not in self._held.away:
                part = self._held.part_of(name, whole)
                local_data(parameter.detach()).copy_(local_data(part))

    def _told(self) -> _GoOn:
        with self._recorder.waiting("leader"):
            while (said := received(self._links[0])) is None:
                pass  # a leader that dies breaks the channel
        assert isinstance(said, _GoOn)
        return said

    def _spread(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter of the leader, whole, in parcels that need little memory."""
        for names in self._parcels():
            sizes = [self._forms[name][0].numel() for name in names]
            if self._whole is not None:
                own = [self._whole.named[name].detach().reshape(-1) for name in names]
                flat = torch.cat(own)
            else:
                dtype = self._forms[names[0]][1]
                flat = torch.empty(sum(sizes), dtype=dtype, device=self._world.device)
            dist.broadcast(flat, self._ranks[0], group=self.inside)
            if self._apart or self._whole is None:
                for name, part in zip(names, flat.split(sizes), strict=True):
                    yield name, part.view(self._forms[name][0])

    def _parcels(self) -> Iterator[list[str]]:
        parcel: list[str] = []
        size = 0
        for name, (shape, dtype) in self._forms.items():
            if parcel and (size > _BUCKET_BYTES or dtype != self._forms[parcel[0]][1]):
                yield parcel
                parcel, size = [], 0
            parcel.append(name)
            size += shape.numel() * dtype.itemsize
        if parcel:
            yield parcel

    def _hand_out_state(self) -> None:
        """Give all ranks their parts of the optimiser's state; collective in the worker."""
        state: Mapping[str, Tensor] = {} if self._whole is None else self._whole.state()
        forms = {n: (tuple(t.shape), t.dtype, t.device.type) for n, t in state.items()}
        forms, plain = broadcast_facts((forms, self._plain_state()), self._ranks[0], self.inside)
        if self._apart or self._whole is None:
            self._optimizer.state.clear()
            for name, values in plain.items():
                self._set_state(name, values)
        for full, (shape, dtype, kind) in forms.items():
            value = torch.empty(shape, dtype=dtype, device=self._world.device)
            if self._whole is not None:
                value.copy_(state[full])
            dist.broadcast(value, self._ranks[0], group=self.inside)
            name, _, key = full.rpartition(".")
            if self._apart or self._whole is None:
                self._set_state(name, {key: value if kind != "cpu" else value.cpu()})

    def _plain_state(self) -> dict[str, dict[str, Any]]:
        if self._whole is None:
            return {}
        state = self._whole.optimizer.state
        return {
            name: {k: v for k, v in state[p].items() if not isinstance(v, Tensor)}
            for name, p in self._whole.named.items()
            if p in state
        }

    def _set_state(self, name: str, values: Mapping[str, Any]) -> None:
        parameter = self._held.named[name]
        if parameter in self._held.away:
            return
        shape = self._forms[name][0]
        for key, value in values.items():
            part = value
            if isinstance(value, Tensor) and value.shape == shape:
                part = self._held.part_of(name, value)
            self._optimizer.state[parameter][key] = part

    def _saving_group(self) -> dist.ProcessGroup:
        """Of each worker; collective over all ranks."""
        world = self._world
        timeout = timedelta(seconds=world.timeout_seconds) if world.store is not None else None
        inner = len(self._ranks)
        with world.explained("making the groups that save"), drop_later_connections():
            made: list[dist.ProcessGroup] = [
                dist.new_group(list(range(f, f + inner)), timeout=timeout, backend="gloo")
                for f in range(0, world.ranks, inner)
            ]
        return made[self._place.worker]


AnyFreeRun: TypeAlias = FreeRun | GroupRun
"""A rank's part in a run whose workers do not meet in rounds."""
