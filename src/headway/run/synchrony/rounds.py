"""Workers that meet in rounds, as processes: local SGD, D-PSGD, synchronous EASGD.

The program is that of `headway.synchrony.programs`, one worker's on each rank. A meeting of all is
an all-reduce over the ranks that stand at the same place in their workers; neighbours send each
other their models. Both begin when the program posts a message, and are waited for when it awaits
the answer. Nothing here depends on who is faster, so that a run needs no record to be repeated.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from headway.channel.gloo_listeners import drop_later_connections
from headway.comm.compress.state import STATE_PREFIX
from headway.errors import RunError
from headway.plans import Plan
from headway.run.step.record import AgreementRecord
from headway.run.synchrony.agreement_recorder import AgreementRecorder
from headway.run.synchrony.bundle import Bundle
from headway.run.synchrony.differences import DifferenceExchange
from headway.run.synchrony.replica import ModelReplica
from headway.synchrony import merging, mixing
from headway.synchrony.actors import Address, Gradient, Sender
from headway.synchrony.driving import WorkerSeat
from headway.synchrony.programs import meets_after, rounds_program

if TYPE_CHECKING:
    from headway.run.distributed.world import World

_MEETING = Address("meeting")


@dataclass(frozen=True)
class WorkerPlace:
    """Where this rank stands among the workers.

    Attributes:
        worker: Its worker's number.
        peers: The ranks at its place in each worker, in the order of the workers.
        across: Their group; None: a world of one rank, or a process that has rejoined.
        inside: The group of its worker's ranks; None: it is the only one.
    """

    worker: int
    peers: tuple[int, ...]
    across: dist.ProcessGroup | None
    inside: dist.ProcessGroup | None

    @classmethod
    def of(cls, plan: Plan, world: World) -> WorkerPlace:
        """Make the groups; collective over all ranks."""
        inner = plan.ranks // plan.workers
        if world.alone:  # one rank, or a process that has rejoined: there is no group to make
            return cls(world.rank, tuple(range(plan.ranks)), None, None)
        timeout = timedelta(seconds=world.timeout_seconds) if world.store is not None else None
        mine, place = divmod(world.rank, inner)

        def made(ranks: list[int]) -> dist.ProcessGroup:
            with drop_later_connections():
                group: dist.ProcessGroup = dist.new_group(ranks, timeout=timeout)
            return group

        with world.explained("making the groups of the workers"):
            columns = [made([w * inner + c for w in range(plan.workers)]) for c in range(inner)]
            rows = [
                made([w * inner + c for c in range(inner)]) if inner > 1 else None
                for w in range(plan.workers)
            ]
        peers = tuple(w * inner + place for w in range(plan.workers))
        return cls(mine, peers, columns[place], rows[mine])


@dataclass
class _Awaited:
    """An answer that is on its way; `receive` waits for it."""

    holder: Address
    receive: Callable[[], Any]


class RoundsRun:
    """This rank's worker.

    Args:
        make_replica: Of the parameters that this rank updates, once these are known: a model is cut
            into stages, and its layers are split, by a first batch.

    Attributes:
        common: What the workers have agreed on.
        differences: What compresses their meetings; None: models travel whole.
        met: Whether all workers have the same model now.
    """

    def __init__(
        self,
        plan: Plan,
        place: WorkerPlace,
        make_replica: Callable[[], ModelReplica],
        differences: DifferenceExchange | None = None,
    ) -> None:
        self.differences = differences
        self._plan, self._rules, self._place = plan, plan.synchrony, place
        self._make_replica = make_replica
        self.common = merging.CommonModel(plan.synchrony)
        self.met = True
        self._steps = 0
        self._seat: WorkerSeat | None = None
        self._awaited: deque[_Awaited] = deque()
        self._sends: list[tuple[dist.Work, Bundle]] = []
        self._wishes = False
        self._recorder = AgreementRecorder()
        self._vote: tuple[Tensor, dist.Work] | None = None

    @cached_property
    def _replica(self) -> ModelReplica:
        made = self._make_replica()
        made.check_state = self._check_state
        return made

    @property
    def inside(self) -> dist.ProcessGroup | None:
        """The group of this worker's ranks; None: it is the only one."""
        return self._place.inside

    def begin(self, steps_done: int) -> None:
        """Begin, or go on behind some steps, with the model as it is now; once."""
        if self._seat is not None:
            return
        self._steps = steps_done
        program = rounds_program(
            self._rules,
            self._place.worker,
            self._plan.workers,
            self._replica,
            self.common,
            steps_done,
        )
        self._seat = WorkerSeat(self._place.worker, program, self._post)
        self._drive(self._seat, None)

    def step(self, count: float) -> None:
        """Give the program the gradients that are in the parameters, and go on to the next one.

        Args:
            count: What their loss is a mean over; 0: there are none.
        """
        assert self._seat is not None
        self._steps += 1
        self._drive(self._seat, Gradient(None, count))
        self.met = self._rules.merge == "mean" and meets_after(self._rules, self._steps)

    def finish(self) -> None:
        """After the last step: all workers end with one model; collective.

        The mean of all models, or the centre of an elastic run.
        """
        if self._seat is None and not self.met:
            self.begin(self._steps)  # a run that was resumed, and is over
        if self._seat is None or self._seat.ended:
            return
        self._drive(self._seat, None)
        for work, _ in self._sends:
            work.wait()
        if self._rules.merge == "neighbour":
            self._post(
                self._place.worker, _MEETING, merging.Meet(self._steps, self._replica.read())
            )
            self._replica.write(self._awaited.popleft().receive())
        elif self._rules.merge == "elastic":
            self._replica.write(self.common.at)
        self.met, self._seat = True, None

    def agreement_record(self) -> AgreementRecord:
        """What this rank has seen of the others since it was last asked."""
        return self._recorder.taken()

    def vote(self, wishes: bool) -> int:
        """How many workers wish to stop, as all of them know it at the same step; 0 between.

        A vote is begun when workers meet, and read when they meet again: nobody waits for it.
        """
        self._wishes |= wishes
        if not meets_after(self._rules, self._steps):
            return 0
        before, self._vote = self._vote, None
        sums = torch.tensor([float(self._wishes)])
        work = dist.all_reduce(sums, group=self._place.across, async_op=True)
        assert work is not None
        self._vote = sums, work
        if before is None:
            return 0
        before[1].wait()
        return round(float(before[0]))

    # -- driving the program -------------------------------------------------------------------

    def _drive(self, seat: WorkerSeat, result: Any) -> None:
        """Resume the program up to the next gradient, or its end."""
        wanted = seat.resume(result)
        while wanted is None and not seat.ended:
            assert seat.waits is not None
            first = self._awaited.popleft()
            with self._recorder.waiting(seat.waits.cause):
                answer = first.receive()
            if seat.answer(first.holder, answer):
                wanted = seat.go_on()

    def _post(self, _: Sender, to: Address, message: merging.Meet) -> None:
        if to == _MEETING:
            self._meet(message)
        elif to.number == self._place.worker:
            self._listen(message)
        else:
            self._send(self._place.peers[to.number], message.model)

    def _meet(self, message: merging.Meet) -> None:
        share = 1 / self._plan.workers
        if message.what == "difference":
            assert self.differences is not None
            total = self.differences.start(message.model)
            self._awaited.append(_Awaited(_MEETING, lambda: total() * share))
            return
        model: Bundle = message.model
        if self._rules.merge == "elastic":  # the worker goes on from what it has sent
            model = Bundle(tuple(tensor.clone() for tensor in model.flat))
        # One operation a type: several at a time keep a slow link busy for longer than one does.
        works = [
            dist.all_reduce(tensor, group=self._place.across, async_op=True)
            for tensor in model.flat
        ]

        def average() -> Bundle:
            for work, tensor in zip(works, model.flat, strict=True):
                if work is not None:
                    work.wait()
                tensor.mul_(share)
            return model

        self._awaited.append(_Awaited(_MEETING, average))

    def _send(self, rank: int, model: Bundle) -> None:
        # A tensor must live until it has left; those of the step before have.
        for work, _ in self._sends[: -len(self._place.peers) * len(model.flat)]:
            work.wait()
        self._sends = self._sends[-len(self._place.peers) * len(model.flat) :]
        for tensor in model.flat:
            sent = dist.isend(tensor, rank)
            if sent is not None:
                self._sends.append((sent, model))

    def _listen(self, message: merging.Meet) -> None:
        """Receive the models of this step of all neighbours."""
        matrix = mixing.mixing_matrix(self._rules, self._plan.workers)
        models = {self._place.worker: message.model}
        works = []
        for other in mixing.neighbours(matrix, self._place.worker):
            model = Bundle(tuple(torch.empty_like(tensor) for tensor in message.model.flat))
            models[other] = model
            works += [dist.irecv(tensor, self._place.peers[other]) for tensor in model.flat]
        holder = Address("model", self._place.worker)

        def heard() -> dict[int, Bundle]:
            for work in works:
                if work is not None:
                    work.wait()
            return models

        self._awaited.append(_Awaited(holder, heard))

    def _check_state(self, names: Sequence[str]) -> None:
        """Refuse to average what only some workers have; collective, at every such meeting."""
        known = zlib.crc32("\n".join(names).encode())
        bounds = torch.tensor([known, -known], dtype=torch.int64)
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=self._place.across)
        if int(bounds[0]) != -int(bounds[1]):
            raise RunError(
                "the workers' optimisers have state of different parameters",
                where=f"the meeting after step {self._steps}",
                why="Some worker has not used a parameter that another one has used.",
                fix='Set synchrony.state to "keep" or "reset".',
            )

    def close(self) -> None:
        """End what runs beside the training thread."""
        if self.differences is not None:
            self.differences.close()

    # -- checkpoints ---------------------------------------------------------------------------

    @property
    def number(self) -> int:
        """Of this rank's worker."""
        return self._place.worker

    @property
    def averages_state(self) -> bool:
        """Whether the optimisers have the same moments now."""
        return self.met and self._rules.merge == "mean" and self._rules.state == "average"

    @property
    def agreed_state(self) -> frozenset[str]:
        """Tensors of the optimiser, "name.key", that are the same in all workers now."""
        return frozenset(self._replica.state_tensors() if self.averages_state else ())

    def mean(self) -> Mapping[str, Tensor]:
        """The mean of all models, by name; collective."""
        sums = self._replica.read()
        for tensor in sums.flat:
            dist.all_reduce(tensor, group=self._place.across)
        return self._replica.by_name(sums * (1 / self._plan.workers))

    def state(self) -> Mapping[str, Tensor]:
        """What the workers have beside the model, "exchange.name/what" -> tensor; collective.

        That is what compressed meetings keep back, the momentum of an outer optimiser and, where
        the models differ now, the model to which differences are taken, or the centre.
        """
        found: dict[str, Tensor] = {}
        if self.differences is not None:
            found = self.differences.state(self._place.across)
        needed = self.differences or self._rules.outer != "none" or self._rules.merge == "elastic"
        start = self.common.at if needed and not self.met else None
        for what, value in ((MOMENTUM, self.common.momentum), (START, start)):
            named = {} if value is None else self._replica.by_name(value)
            found |= {f"{STATE_PREFIX}{name}/{what}": tensor for name, tensor in named.items()}
        return found

    def resume(self, steps_done: int, *, met: bool) -> None:
        """Go on behind some steps; `restore` follows."""
        self._steps, self.met = steps_done, met

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Take up what `state` has given; the model has been restored before."""
        if self.differences is not None:
            self.differences.restore(saved)
        self.common.momentum = self._common(saved, MOMENTUM)
        self.common.at = self._common(saved, START)

    def _common(self, saved: Mapping[str, Tensor], what: str) -> Bundle | None:
        end = f"/{what}"
        own = {
            name.removeprefix(STATE_PREFIX).removesuffix(end): tensor
            for name, tensor in saved.items()
            if name.startswith(STATE_PREFIX) and name.endswith(end)
        }
        return self._replica.from_names(own) if own else None


MOMENTUM, START = "outer-momentum", "outer-start"
"""What workers have agreed on, in the names of a checkpoint."""
