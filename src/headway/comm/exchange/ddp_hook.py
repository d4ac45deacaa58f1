"""Communication hook for PyTorch DDP: compresses what is sent; DDP keeps the rest.

    register_comm_hook(ddp_model, "powersgd:2")

DDP hands over each bucket as it becomes full; a progress thread exchanges it and completes the
future that DDP waits for at the end of backward. Every process group belongs to one thread, which
exchanges its buckets in the order of their numbers, so operations of several rounds match on all
ranks, whatever the timing. Residuals belong to parameters by name and survive DDP's rebuilding of
buckets after its first step.
"""

# No `from __future__ import annotations`: DDP compares the annotations of a hook as objects.
import threading
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from headway.channel.gloo_listeners import drop_later_connections
from headway.collective.compression import parse_compression
from headway.collective.nodes import Nodes
from headway.comm.algorithms.method import (
    ExchangeMethod,
    FusedBuffer,
    GradientSlice,
    Route,
    complete,
)
from headway.comm.compress.factory import make_method
from headway.comm.lanes.buckets import dims_by_stride
from headway.errors import RunError
from headway.keywords import checks_keywords

if TYPE_CHECKING:  # the public name is missing in torch's annotations
    from torch._C._distributed_c10d import GradBucket
else:
    GradBucket = dist.GradBucket

# Buckets in flight: one is encoded while another is on the wire.
HOOK_LANES = 2

BucketJob = Callable[[Route], None]


class HookState:
    """What the hook keeps: methods with their state, lanes. `close` it after training.

    Args:
        compress: A compressor as in the plan: "fp16", "mstopk:0.01", "powersgd:2".
        seed: Of random compressors; the same on all ranks.

    Raises:
        ValueError: No such compressor, or an illegal amount.
        RunError: The model is not on a CPU.
    """

    def __init__(self, compress: str, ddp_model: DistributedDataParallel, *, seed: int = 0) -> None:
        self._compression = parse_compression(compress)
        parameters = dict(ddp_model.module.named_parameters())
        for name, parameter in parameters.items():
            if not parameter.is_cpu:
                raise RunError(
                    f"the communication hook works on CPUs, and {name} is on {parameter.device}",
                    fix="Use DDP's own hooks there.",
                )
        self._names = {parameter: name for name, parameter in parameters.items()}
        self._seed = seed
        self._known: dict[tuple[str, ...], tuple[ExchangeMethod, tuple[GradientSlice, ...]]] = {}
        self._left: dict[str, Tensor] = {}
        ranks = dist.get_process_group_ranks(ddp_model.process_group)
        self._lanes = [_Lane(_own_route(ranks)) for _ in range(HOOK_LANES)]
        self._ranks = len(ranks)

    def exchange(self, bucket: GradBucket) -> Future[Tensor]:
        """Start to replace a bucket by its mean over the ranks."""
        buffer = bucket.buffer()
        names = tuple(self._names[parameter] for parameter in bucket.parameters())
        if names not in self._known:
            self._make_method(names, bucket)
        method, pieces = self._known[names]
        fused = FusedBuffer(buffer, pieces, bucket.index())
        future: Future[Tensor] = Future()

        def job(route: Route) -> None:
            try:
                # As DDP does, bit by bit: before the sum (so residuals count in shares of the
                # mean), and by the reciprocal.
                buffer.mul_(1.0 / self._ranks)
                complete(method, fused, route)
            except BaseException as error:
                future.set_exception(error)  # type: ignore[arg-type]  # any error reaches DDP
            else:
                future.set_result(buffer)

        # By number, not by load: all ranks must use the same group for a bucket.
        self._lanes[bucket.index() % HOOK_LANES].put(job)
        return future

    def _make_method(self, names: tuple[str, ...], bucket: GradBucket) -> None:
        """Make the method of a bucket whose parameters were in other buckets, or in none."""
        for lane in self._lanes:
            lane.rest()  # the state of a method that is still at work would be lost
        state = self.state_dict()
        # DDP has rebuilt its buckets: the state goes on under the new ones.
        for known in [known for known in self._known if set(known) & set(names)]:
            del self._known[known]
        self._left = state
        method = make_method(self._compression, seed=self._seed)
        method.restore({k: t for k, t in state.items() if k.rpartition("/")[0] in names})
        self._known[names] = (method, _gradient_slices(names, bucket))

    def state_dict(self) -> dict[str, Tensor]:
        """Residuals and whatever else must survive a checkpoint: "parameter/what" -> tensor.

        It belongs to this rank; `collect_state` and `distribute_state` of `compress.state` carry
        it over to another number of ranks. Called between steps.
        """
        own = {key: t for method, _ in self._known.values() for key, t in method.state().items()}
        known = {name for names in self._known for name in names}
        rest = {k: t for k, t in self._left.items() if k.rpartition("/")[0] not in known}
        return rest | own

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state_dict` gave on this rank; called between steps."""
        self._known.clear()
        self._left = dict(state)

    def close(self) -> None:
        """End the lanes' threads."""
        for lane in self._lanes:
            lane.close()

    def __enter__(self) -> "HookState":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def exchange_bucket(state: HookState, bucket: GradBucket) -> Future[Tensor]:
    """The hook itself: `ddp_model.register_comm_hook(state, exchange_bucket)`."""
    return state.exchange(bucket)


@checks_keywords
def register_comm_hook(
    ddp_model: DistributedDataParallel, compress: str, *, seed: int = 0
) -> HookState:
    """Let a DDP model exchange its gradients compressed; all its ranks call this together.

    Returns:
        The state; `state.state_dict()` belongs into checkpoints, `state.close()` ends its threads.
    """
    state = HookState(compress, ddp_model, seed=seed)
    ddp_model.register_comm_hook(state, exchange_bucket)
    return state


class _Lane:
    """A thread with a process group of its own; runs its jobs in the order of arrival."""

    def __init__(self, route: Route) -> None:
        self._route = route
        self._jobs: SimpleQueue[BucketJob | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="headway-hook", daemon=True)
        self._thread.start()

    def put(self, job: BucketJob) -> None:
        self._jobs.put(job)

    def rest(self) -> None:
        """Wait until all jobs are done."""
        done = threading.Event()
        self._jobs.put(lambda _: done.set())
        # A lane that was closed would never run the job.
        while not done.wait(1.0):
            if not self._thread.is_alive():
                raise RunError("the communication hook was closed and is used again")

    def close(self) -> None:
        self._jobs.put(None)
        # A thread that waits for a rank that has vanished ends with the process.
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        # The cores belong to backward; a kernel on all of them would slow it down.
        torch.set_num_threads(1)
        with torch.no_grad():
            while (job := self._jobs.get()) is not None:
                job(self._route)


def _own_route(ranks: list[int]) -> Route:
    # Only the ranks of the DDP model meet here, perhaps not the whole world.
    with drop_later_connections():
        group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    chosen = tuple(sorted(ranks))
    return Route(chosen, dist.get_rank(), group, Nodes((chosen,)))


def _gradient_slices(names: tuple[str, ...], bucket: GradBucket) -> tuple[GradientSlice, ...]:
    """Where each parameter's gradient lies in a bucket of DDP, with its shape in memory order."""
    first = bucket.buffer().storage_offset()
    found = []
    rows = zip(names, bucket.gradients(), bucket.parameters(), strict=True)
    for name, gradient, parameter in rows:
        start = int(gradient.storage_offset() - first)
        found.append(GradientSlice(name, start, start + gradient.numel(), _memory_shape(parameter)))
    return tuple(found)


def _memory_shape(parameter: Tensor) -> tuple[int, ...]:
    """DDP lays a gradient out as its parameter, or in order if that one has gaps or overlaps."""
    ordered = parameter.permute(dims_by_stride(parameter))
    return tuple(ordered.shape if ordered.is_contiguous() else parameter.shape)
