"""Parameters, the state of optimizers, and objects: from one rank to all, or from all to all.

Objects travel as pickles, as in Horovod: who reads one runs what it says. They are signed with the
secret of the job and the token of the session, and nothing else is read (docs/security.md).
"""

from __future__ import annotations

import hmac
import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from headway.channel.job_secret import SIGNATURE_BYTES, job_secret, sign
from headway.errors import RunError
from headway.horovod.basics import SESSION, global_process_set, rank
from headway.horovod.engine.process_set import ProcessSet
from headway.horovod.operations import (
    allgather_async,
    broadcast_,
    broadcast_async_,
    synchronize,
)

_CONTEXT = "an object of hvd"


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Write the parameters of one rank over those of all others.

    Args:
        params: `model.state_dict()` or `model.named_parameters()`; what is no tensor is left out.
        root_rank: The global rank that sends.

    Raises:
        ValueError: `params` is something else.
    """
    if isinstance(params, Mapping):
        pairs = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, str | Tensor):
        pairs = [pair if isinstance(pair, tuple) else ("", pair) for pair in params]
        if any(len(pair) != 2 or not isinstance(pair[0], str) for pair in pairs):
            raise ValueError("invalid params: pairs of a name and a tensor are expected")
    else:
        raise ValueError(f"invalid params of type: {type(params)}")
    handles = [
        broadcast_async_(tensor.detach(), root_rank, name or None, process_set)
        for name, tensor in pairs
        if isinstance(tensor, Tensor)
    ]
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: Any = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give all ranks the options and the state of an optimizer of one rank.

    The others need not have made a step: they get what the root has, or lose what it has not. Where
    no step has been made, parameters without a gradient get one of zero, as in Horovod.

    Args:
        root_rank: The global rank that sends.
        model: Of no meaning here: Horovod looks for sparse parameters in it.

    Raises:
        ValueError: The optimizer is LBFGS, whose state has no fixed form.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    if not optimizer.state:
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    here = rank() == root_rank
    tensors: list[Tensor] = []
    form = _without_tensors(optimizer.state_dict(), tensors) if here else None
    kinds = [(tensor.dtype, tensor.shape, tensor.device.type) for tensor in tensors]
    form, kinds = broadcast_object((form, kinds), root_rank, "optimizer", process_set)
    if not here:
        tensors = [torch.empty(shape, dtype=dtype) for dtype, shape, _ in kinds]
    handles = [
        broadcast_async_(tensor.detach(), root_rank, f"optimizer.{place}", process_set)
        for place, tensor in enumerate(tensors)
    ]
    for handle in handles:
        synchronize(handle)
    if here:
        return
    state = _with_tensors(form, tensors)
    optimizer.load_state_dict(state)
    # It gives tensors the type of their parameter, which they need not have at the root.
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for place, entry in state["state"].items():
        for name, value in entry.items():
            held = optimizer.state[own[place]].get(name)
            if isinstance(held, Tensor) and held.dtype != value.dtype:
                optimizer.state[own[place]][name] = value.to(held.device)


class _Place(int):
    """Where a tensor stood in a state: its number."""


def _without_tensors(state: Any, found: list[Tensor]) -> Any:
    """The state with places instead of tensors, which are appended to `found`."""
    if isinstance(state, Tensor):
        found.append(state)
        return _Place(len(found) - 1)
    if isinstance(state, dict):
        return {key: _without_tensors(value, found) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(_without_tensors(value, found) for value in state)
    return state


def _with_tensors(form: Any, tensors: list[Tensor]) -> Any:
    if isinstance(form, _Place):
        return tensors[form]
    if isinstance(form, dict):
        return {key: _with_tensors(value, tensors) for key, value in form.items()}
    if type(form) in (list, tuple):
        return type(form)(_with_tensors(value, tensors) for value in form)
    return form


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """An object of one rank, on all; the root gets its own.

    Args:
        obj: That of the root; of no meaning elsewhere.
        root_rank: The global rank that sends.
        name: Of the operation.

    Raises:
        RunError: What came is not signed by a rank of this job.
    """
    here = rank() == root_rank
    text = _packed(obj) if here else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([text.numel()])
    broadcast_(length, root_rank, None if name is None else f"{name}.length", process_set)
    if not here:
        text = torch.empty(int(length), dtype=torch.uint8)
    broadcast_(text, root_rank, None if name is None else f"{name}.object", process_set)
    return obj if here else _unpacked(text)


def broadcast_object_fn(
    root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """`broadcast_object` as a function of the object alone."""

    def broadcast(obj: Any) -> Any:
        return broadcast_object(obj, root_rank, name, process_set)

    return broadcast


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """The objects of all ranks, in the order of ranks.

    Raises:
        RunError: What came is not signed by a rank of this job.
    """
    text = _packed(obj)
    length = torch.tensor([text.numel()])
    first = None if name is None else f"{name}.length"
    lengths = synchronize(allgather_async(length, first, process_set)).tolist()
    second = None if name is None else f"{name}.object"
    texts = synchronize(allgather_async(text, second, process_set))
    return [_unpacked(part) for part in texts.split(lengths)]


def _signature(text: bytes) -> bytes:
    return sign(job_secret(), _CONTEXT, SESSION.meeting.token, text)


def _packed(obj: Any) -> Tensor:
    text = cloudpickle.dumps(obj)
    return torch.frombuffer(bytearray(_signature(text) + text), dtype=torch.uint8)


def _unpacked(said: Tensor) -> Any:
    raw = said.numpy().tobytes()
    given, text = raw[:SIGNATURE_BYTES], raw[SIGNATURE_BYTES:]
    if not hmac.compare_digest(given, _signature(text)):
        raise RunError("an object is not signed by a rank of this job")
    return pickle.loads(text)
