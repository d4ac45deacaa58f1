"""The asynchronous operations, `synchronize` and `poll`, and what waits at once without gradients.

An operation is matched with those of other ranks by its name: the order in which ranks begin
operations does not matter. The tensors of one must not change before it is done. The functions
whose gradients flow (`allreduce`, `allgather`, ...) are in `autograd.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headway.horovod.basics import SESSION, global_process_set
from headway.horovod.engine.engine import Operation
from headway.horovod.engine.process_set import ProcessSet
from headway.horovod.engine.request import HorovodOp, Request, dtype_name
from headway.horovod.exceptions import InvalidArgument

Average = HorovodOp.AVERAGE
Sum = HorovodOp.SUM
Adasum = HorovodOp.ADASUM
Min = HorovodOp.MIN
Max = HorovodOp.MAX
Product = HorovodOp.PRODUCT

_REDUCED = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
_ONLY_SUMMED = (torch.complex64, torch.complex128)


class SparseOperation:
    """A sparse all-reduce that is under way; called, it waits and gives the sparse sum or mean."""

    def __init__(
        self, indices: Operation, values: Operation, shape: torch.Size, divisor: int
    ) -> None:
        self._indices, self._values = indices, values
        self._shape, self._divisor = shape, divisor

    @property
    def done(self) -> bool:
        return self._indices.done and self._values.done

    def __call__(self) -> Tensor:
        values = synchronize(self._values) / self._divisor
        indices = synchronize(self._indices)
        return torch.sparse_coo_tensor(indices.t(), values, self._shape, check_invariants=False)


def which_op(average: bool | None, op: int | None) -> HorovodOp:
    """The reduction that the two arguments name; `average` is Horovod's older one.

    Raises:
        InvalidArgument: Both are given, or `op` is none.
    """
    if average is not None:
        if op is not None:
            raise InvalidArgument(
                "The op parameter supersedes average. Please provide only one of them."
            )
        warnings.warn(
            "Parameter `average` has been replaced with `op`", DeprecationWarning, stacklevel=3
        )
        return Average if average else Sum
    if op is not None and op not in set(HorovodOp):
        raise InvalidArgument(f"op is hvd.Average, Sum, Adasum, Min, Max or Product, not {op}")
    return Average if op is None else HorovodOp(op)


def synchronize(handle: Any) -> Any:
    """Wait for an operation and return what it gives.

    Raises:
        HorovodInternalError: Ranks disagree about it, or one of them is lost or missing.
        ValueError: An argument of some rank is wrong, or the handle is none.
    """
    if isinstance(handle, SparseOperation):
        return handle()
    if not isinstance(handle, Operation):
        raise ValueError(f"hvd.synchronize takes what an asynchronous operation returned: {handle}")
    if handle.done:  # also when its session has ended
        if handle.error is not None:
            raise handle.error
        return handle.result(handle.value)
    return SESSION.engine.wait(handle)


def poll(handle: Any) -> bool:
    """Whether an operation is done or has failed, so that `synchronize` will not wait.

    Raises:
        ValueError: It is none.
    """
    if not isinstance(handle, Operation | SparseOperation):
        raise ValueError(f"hvd.poll takes what an asynchronous operation returned: {handle}")
    if isinstance(handle, Operation) and not handle.done and SESSION.started:
        SESSION.engine.hurry(handle)
    return bool(handle.done)


def _submit(
    kind: str,
    tensors: Sequence[Tensor],
    name: str | None,
    process_set: ProcessSet,
    *,
    outputs: Sequence[Tensor] = (),
    result: Any,
    **facts: Any,
) -> Operation:
    """Begin an operation on some tensors."""
    engine = SESSION.engine
    if engine.rank not in process_set.members():
        raise InvalidArgument(
            f"{kind}: rank {engine.rank} does not belong to the process set {process_set.ranks}"
        )
    # What travels are bytes, and a conjugated view has those of what it is a view of.
    inputs = [tensor.detach().resolve_conj().resolve_neg() for tensor in tensors]
    for tensor in inputs:
        if tensor.layout != torch.strided:
            raise InvalidArgument(
                f"{kind} takes dense tensors, not {tensor.layout}; sparse ones can be "
                "summed with hvd.sparse_allreduce_async"
            )
        if tensor.is_cuda:
            # The engine's thread reads it; nothing may be on its way there any more.
            torch.cuda.current_stream(tensor.device).synchronize()
    for out in outputs:
        if any(n > 1 and not step for n, step in zip(out.shape, out.stride(), strict=True)):
            raise InvalidArgument(
                f"{kind} cannot write into an expanded tensor, several elements of which are one: "
                f"shape {tuple(out.shape)}, strides {out.stride()}"
            )
    request = Request(
        kind,
        SESSION.name(kind, name, process_set),
        process_set.process_set_id or 0,
        tuple(map(dtype_name, inputs)),
        tuple(tuple(tensor.shape) for tensor in inputs),
        inputs[0].device.type if inputs else "cpu",
        **facts,
    )
    return engine.submit(Operation(request, inputs, outputs, result))


# -- allreduce ------------------------------------------------------------------------------------


def _allreduce(
    tensors: Sequence[Tensor],
    outputs: Sequence[Tensor],
    returned: Any,
    name: str | None,
    op: HorovodOp,
    before: float,
    after: float,
    process_set: ProcessSet,
) -> Operation:
    _check_types(tensors, op)
    if op == Adasum:
        _check_adasum(tensors, process_set)
    return _submit(
        "allreduce",
        tensors,
        name,
        process_set,
        outputs=[out.detach() for out in outputs],
        result=lambda _: returned,
        op=int(op),
        before=float(before),
        after=float(after),
    )


def _check_types(tensors: Sequence[Tensor], op: HorovodOp) -> None:
    legal = _REDUCED + _ONLY_SUMMED if op in (Average, Sum) else _REDUCED
    for tensor in tensors:
        if tensor.dtype not in legal:
            raise InvalidArgument(f"{op.name} is not possible with tensors of type {tensor.dtype}")


def _check_adasum(tensors: Sequence[Tensor], process_set: ProcessSet) -> None:
    ranks = len(process_set.members())
    if ranks & (ranks - 1):
        raise NotImplementedError(f"Adasum needs a power of two of ranks, and there are {ranks}")
    if not all(tensor.is_floating_point() for tensor in tensors):
        raise InvalidArgument("Adasum needs tensors of floating-point numbers")


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Operation:
    """Begin to combine a tensor of all ranks, which must agree in shape and type.

    Args:
        average: Deprecated: `op` is Average or Sum.
        op: Average (the default), Sum, Adasum, Min, Max or Product.
        prescale_factor: The tensor is multiplied by it before.
        postscale_factor: The result is multiplied by it.

    Returns:
        For `poll` and `synchronize`, which gives a new tensor.
    """
    out = torch.empty_like(tensor, requires_grad=False)
    chosen = which_op(average, op)
    return _allreduce(
        [tensor], [out], out, name, chosen, prescale_factor, postscale_factor, process_set
    )


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Operation:
    """As `allreduce_async`, in place."""
    chosen = which_op(average, op)
    return _allreduce(
        [tensor], [tensor], tensor, name, chosen, prescale_factor, postscale_factor, process_set
    )


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """As `allreduce_async_`, done at once."""
    chosen = which_op(average, op)
    return synchronize(
        allreduce_async_(tensor, None, name, chosen, prescale_factor, postscale_factor, process_set)
    )


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Operation:
    """As `allreduce_async`, of several tensors as one operation; gives a tuple."""
    outs = tuple(torch.empty_like(tensor, requires_grad=False) for tensor in tensors)
    chosen = which_op(average, op)
    return _allreduce(
        tensors, outs, outs, name, chosen, prescale_factor, postscale_factor, process_set
    )


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Operation:
    """As `grouped_allreduce_async`, in place."""
    tensors, chosen = tuple(tensors), which_op(average, op)
    return _allreduce(
        tensors, tensors, tensors, name, chosen, prescale_factor, postscale_factor, process_set
    )


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """As `grouped_allreduce_async_`, done at once."""
    chosen = which_op(average, op)
    return synchronize(
        grouped_allreduce_async_(
            tensors, None, name, chosen, prescale_factor, postscale_factor, process_set
        )
    )


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> SparseOperation:
    """Begin to add up a sparse tensor (COO) of all ranks, by gathering indices and values.

    Args:
        op: Average or Sum.

    Returns:
        Called, or given to `synchronize`, it waits; its result may have an index several times.
    """
    if op not in (Average, Sum):
        raise InvalidArgument(f"a sparse tensor is averaged or summed, not {HorovodOp(op).name}")
    if not tensor.is_sparse:
        raise InvalidArgument(f"sparse_allreduce_async takes sparse tensors, not {tensor.layout}")
    # Public accessors want a coalesced tensor, and coalescing sorts what is sorted in the end.
    tensor = tensor.detach().coalesce()
    return SparseOperation(
        allgather_async(tensor.indices().t().contiguous(), f"{name}.indices", process_set),
        allgather_async(tensor.values(), f"{name}.values", process_set),
        tensor.shape,
        len(process_set.members()) if op == Average else 1,
    )


# -- allgather ------------------------------------------------------------------------------------


def _gathered(
    tensors: Sequence[Tensor],
    kind: str,
    name: str | None,
    process_set: ProcessSet,
    *,
    single: bool,
    **facts: Any,
) -> Operation:
    devices = [tensor.device for tensor in tensors]

    def result(found: Sequence[Tensor]) -> Any:
        moved = tuple(tensor.to(device) for tensor, device in zip(found, devices, strict=True))
        return moved[0] if single else moved

    return _submit(kind, tensors, name, process_set, result=result, **facts)


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Operation:
    """Begin to concatenate a tensor of all ranks, in the order of ranks, along the first dimension.

    Ranks must agree in type and in all other dimensions.
    """
    return _gathered([tensor], "allgather", name, process_set, single=True)


def grouped_allgather_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Operation:
    """As `allgather_async`, of several tensors as one operation; gives a tuple."""
    return _gathered(tensors, "allgather", name, process_set, single=False)


# -- broadcast ------------------------------------------------------------------------------------


def _broadcast(
    tensor: Tensor, out: Tensor, root_rank: int, name: str | None, process_set: ProcessSet
) -> Operation:
    return _submit(
        "broadcast",
        [tensor],
        name,
        process_set,
        outputs=[out.detach()],
        result=lambda _: out,
        root=int(root_rank),
    )


def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Operation:
    """Begin to send a tensor of one rank to all, which give one of the same shape and type.

    Args:
        root_rank: The global rank that sends.
    """
    out = torch.empty_like(tensor, requires_grad=False)
    return _broadcast(tensor, out, root_rank, name, process_set)


def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Operation:
    """As `broadcast_async`, in place."""
    return _broadcast(tensor, tensor, root_rank, name, process_set)


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """As `broadcast_async_`, done at once."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


# -- alltoall -------------------------------------------------------------------------------------


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Operation:
    """Begin to send rows of a tensor to all ranks, and to receive rows of theirs.

    Args:
        splits: How many rows each rank gets, in the order of ranks; None: equally many.

    Returns:
        For `synchronize`, which gives the rows in the order of their ranks, and how many came from
        each (int32).
    """
    rows: tuple[int, ...] = ()
    ranks = len(process_set.members())
    if splits is not None:
        given = torch.as_tensor(splits)
        if given.dtype not in (torch.int32, torch.int64) or given.dim() != 1:
            raise InvalidArgument(
                f"alltoall: splits are a list of whole numbers (int32), not {given.dtype} with "
                f"{given.dim()} dimensions"
            )
        rows = tuple(given.tolist())
        if len(rows) != ranks:
            raise InvalidArgument(f"alltoall: {len(rows)} splits for {ranks} ranks")
    device = tensor.device

    def result(found: tuple[Tensor, list[int]]) -> Any:
        received = found[0].to(device)
        where = splits.device if isinstance(splits, Tensor) else None
        return received, torch.tensor(found[1], dtype=torch.int32, device=where)

    return _submit("alltoall", [tensor], name, process_set, result=result, splits=rows)


# -- reducescatter --------------------------------------------------------------------------------


def _reducescatter(
    tensors: Sequence[Tensor],
    name: str | None,
    op: int,
    process_set: ProcessSet,
    before: float,
    after: float,
    single: bool,
) -> Operation:
    chosen = which_op(None, op)
    if chosen not in (Average, Sum):
        raise InvalidArgument(f"reducescatter averages or sums, and cannot {chosen.name}")
    _check_types(tensors, chosen)
    return _gathered(
        tensors,
        "reducescatter",
        name,
        process_set,
        single=single,
        op=int(chosen),
        before=float(before),
        after=float(after),
    )


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Operation:
    """Begin to combine a tensor of all ranks, of which each gets its rows.

    The first ranks get one row more where the rows cannot be divided by the ranks.

    Args:
        op: Average (the default) or Sum.
    """
    return _reducescatter([tensor], name, op, process_set, prescale_factor, postscale_factor, True)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Operation:
    """As `reducescatter_async`, of several tensors as one operation; gives a tuple."""
    return _reducescatter(tensors, name, op, process_set, prescale_factor, postscale_factor, False)


# -- without tensors ------------------------------------------------------------------------------


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait for all ranks of a process set."""
    synchronize(_submit("barrier", [], None, process_set, result=lambda _: None))


def join(device: int = -1) -> int:
    """This rank has no more data: take part in the others' all-reduces with zeros until all join.

    A mean is still over all ranks. Other operations are errors while a rank has joined.

    Args:
        device: Of no meaning here.

    Returns:
        The rank that joined last.
    """
    return SESSION.join()
