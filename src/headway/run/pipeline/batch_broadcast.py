"""One micro-batch of a rank, on all ranks: by it each of them cuts the model alike.

Tensors travel as they are, and what they are in as typed text (`channel.typed_text`). Objects of
types that have no text (arrays, classes of the user's) are pickled, which is code for whoever reads
it: such a batch is signed with the job's secret, and only what is signed is read.
"""

from __future__ import annotations

import hmac
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headway.channel.facts import broadcast_facts, moves_nothing
from headway.channel.job_secret import SECRET, SIGNATURE_BYTES, job_secret, sign
from headway.channel.typed_text import write_typed
from headway.errors import RunError
from headway.parallel.pipeline.runtime.p2p import MessageFormat
from headway.parallel.stages import flatten, is_payload

_CONTEXT = "a batch"


def broadcast_batch(batch: Any, source: int) -> Any:
    """The batch of one rank, on all; collective over the world.

    Args:
        batch: That of rank `source`; of no meaning elsewhere.
        source: A global rank.

    Raises:
        RunError: It has an object without a text and the job has no secret (on all ranks), or what
            came is not signed with it.
    """
    if dist.get_world_size() == 1 or moves_nothing(None):
        return batch
    here = dist.get_rank() == source
    sent = _form(batch) if here else None
    said = broadcast_facts(sent, source)
    if isinstance(said, RunError):
        raise said
    if isinstance(said, bytes):
        return batch if here else _unpickled(said, source)
    if not (isinstance(said, MessageFormat) and said.possible):
        raise RunError(f"rank {source} sends no batch", why=f"{said!r}"[:200])
    if here:
        buffers = said.pack(flatten([batch], is_payload)[0])
    else:
        buffers = [form.empty(torch.device("cpu")) for form in said.packed]
    for buffer in buffers:
        dist.broadcast(buffer, source)
    return batch if here else said.structure.rebuild(said.unpack(buffers))[0]


def _form(batch: Any) -> MessageFormat | bytes | RunError:
    """How its tensors are put together; or all of it, signed; or why neither can be."""
    tensors = [leaf for leaf in flatten([batch], is_payload)[0] if isinstance(leaf, Tensor)]
    refused = None
    if all(map(_is_plain, tensors)):
        form, _ = MessageFormat.of([batch])
        try:
            write_typed(form)
        except RunError as error:
            refused = error
        else:
            return form
    if not job_secret():
        return RunError(
            "the first batch of a pipeline cannot go to the other ranks",
            why=refused.what if refused else "It has tensors of other kinds than dense ones.",
            fix="Make it of tensors, numbers, texts, tuples, lists, dictionaries and dataclasses; "
            f"or give all ranks a secret in {SECRET}, with which it is pickled and signed.",
        )
    text = pickle.dumps(batch)
    return sign(job_secret(), _CONTEXT, text) + text


def _is_plain(tensor: Tensor) -> bool:
    dense = type(tensor) is Tensor and tensor.layout == torch.strided
    return dense and tensor.is_cpu and not tensor.requires_grad


def _unpickled(said: bytes, source: int) -> Any:
    secret, given, text = job_secret(), said[:SIGNATURE_BYTES], said[SIGNATURE_BYTES:]
    if not secret or not hmac.compare_digest(given, sign(secret, _CONTEXT, text)):
        raise RunError(
            f"a batch of rank {source} is not signed with the secret of this job",
            fix=f"Start all ranks with the same {SECRET}, and see docs/security.md.",
        )
    return pickle.loads(text)
