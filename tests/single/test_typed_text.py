"""single: what ranks and pipeline stages tell each other is bounded, typed, and runs no code."""

from __future__ import annotations

import gc
import json
import os
import pickle
import weakref
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field, replace
from enum import Enum

import pytest
import torch

from headway.channel.typed_text import (
    MOST_BYTES,
    read_typed,
    write_typed,
)
from headway.checkpoint.save_plan import HeldTensorSpec, TensorBox
from headway.errors import PlanError, RunError
from headway.parallel.pipeline.runtime.p2p import MessageFormat, StageConnection, TensorFormat
from headway.parallel.stages import flatten, is_payload
from headway.plans import pipelined


class Kind(Enum):
    ONE = 1


@dataclass(frozen=True)
class Record:
    x: torch.Tensor
    flag: bool = True
    more: list = field(default_factory=list)


@dataclass
class Output(OrderedDict):
    """A dictionary that is a dataclass, too, as in transformers."""

    x: torch.Tensor | None = None


Place = namedtuple("Place", "row column")
CPU = torch.device("cpu")
CONSTANTS = [
    None, True, "täxt", 2**70, -3, 0.1, float("inf"), 1 - 2j, b"\0\xff", torch.float8_e4m3fn,
    torch.channels_last, CPU, torch.strided, Kind.ONE, torch.Size([2, 3]), frozenset({1, "a"}),
    {1, 2}, slice(1, None), ..., Place(1, 2), Record, {"a": [1, (2,)]}, [], (),
]  # fmt: skip


@pytest.mark.parametrize("value", CONSTANTS, ids=range(len(CONSTANTS)))
def test_constants_come_as_they_are(value):
    found = read_typed(write_typed(value))
    assert found == value
    assert type(found) is type(value)


VALUES = [
    torch.randn(2, 3),
    (torch.randn(2), [torch.ones(1), None], {"a": 1, 2: "text"}),
    Record(torch.ones(2), more=[torch.ones(3), Kind.ONE]),
    Place(torch.ones(1), 2.5),
    OrderedDict(x=torch.ones(1)),
    Output(x=torch.ones(2)),
    torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
]


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_the_form_of_a_message_comes_as_it_is(value):
    connection = StageConnection(None, 1, CPU)
    form, leaves = MessageFormat.of([value])
    found = connection.read(connection.written(form))
    assert found == form
    (back,) = found.structure.rebuild(leaves)
    assert type(back) is type(value)
    assert flatten(back, is_payload)[1] == flatten(value, is_payload)[1]


def test_what_each_end_has_of_its_own_takes_the_place_of_the_others():
    here, there = object(), object()
    text = write_typed(("a", here), own=("other", here))
    assert read_typed(text, own=("x", there)) == ("a", there)
    with pytest.raises(RunError, match=r"no message|no value"):
        read_typed(text, own=("x",))


class Payload:
    def __reduce__(self):
        return os.mkdir, ("/tmp/headway-was-here",)


STRANGE = [
    pickle.dumps(Payload()),
    b"",
    b"null",
    b"[" * 100_000,
    b"\xff",
    json.dumps(["object", "subprocess", "Popen", ["args", "true"]]).encode(),
    json.dumps(["object", "os", "system"]).encode(),
    json.dumps(["type", "builtins", "eval"]).encode(),
    json.dumps(["type", "antigravity", "fly"]).encode(),
    json.dumps(["own", -1]).encode(),
    json.dumps(["int", "9" * 10_000]).encode(),
    json.dumps(["device", "nowhere"]).encode(),
    json.dumps(["dtype", "load"]).encode(),
    json.dumps(["enum", __name__, "Record", "x"]).encode(),
    json.dumps(["object", __name__, "Record", ["__class__", None]]).encode(),
    json.dumps(["object", __name__, "Record", ["flag", True]]).encode(),
    json.dumps(["named", __name__, "Place", "a"]).encode(),
    b'"' + b"x" * MOST_BYTES + b'"',
]


@pytest.mark.parametrize("text", STRANGE, ids=range(len(STRANGE)))
def test_what_is_no_announcement_is_an_error_and_nothing_else(text):
    with pytest.raises(RunError, match=r"no message|no value"):
        StageConnection(None, 1, CPU).read(text)
    assert not os.path.exists("/tmp/headway-was-here")


FORM, _ = MessageFormat.of([torch.ones(2), 5])
(TENSOR,) = [form for form in FORM.forms if form]


@pytest.mark.parametrize(
    "form",
    [
        replace(FORM, forms=(replace(TENSOR, shape=(2**40, 2**40)), None)),
        replace(FORM, forms=(replace(TENSOR, shape=(-1,)), None)),
        replace(FORM, forms=(replace(TENSOR, order=(3,)), None)),
        replace(FORM, forms=(replace(TENSOR, dtype="float32"), None)),
        replace(FORM, forms=(TENSOR,)),
        replace(FORM, kinds=(list,)),
        replace(FORM, structure=replace(FORM.structure, kind="named")),
        replace(FORM, structure=replace(FORM.structure, parts=())),
        replace(FORM, structure=None),
        TensorFormat((1,), (), torch.float32, flows=False),
    ],
    ids=range(10),
)
def test_impossible_forms_are_refused(form):
    connection = StageConnection(None, 1, CPU)
    with pytest.raises(RunError, match=r"no message|no value"):
        connection.read(connection.written(form))


def test_objects_without_a_text_are_refused_where_they_are():
    @dataclass
    class Local:
        x: int = 1

    for value in (object(), len, Local(), Local):
        with pytest.raises(RunError, match="cannot go from one rank to another"):
            write_typed([value])
    deep: list = []
    for _ in range(200):
        deep = [deep]
    with pytest.raises(RunError, match="too deep"):
        write_typed(deep)


def test_facts_of_ranks_come_as_they_are():
    """What headway itself tells the other ranks: plans, parts of tensors, errors."""
    plan = pipelined(64, processes=4, stages=2)
    specs = {"w": HeldTensorSpec("float32", (4, 2), TensorBox((0, 0), (2, 2)))}
    for value in (plan, specs, (("a", 1), [None, 2.5]), {"x": (torch.Size([2]), torch.int8, True)}):
        assert read_typed(write_typed(value)) == value
    error = PlanError("no", problems=["a", "b"], fix="Do.")
    found = read_typed(write_typed(error))
    assert (type(found), str(found), found.problems) == (PlanError, str(error), ("a", "b"))
    for parts in (["builtins", "dict"], ["headway.errors", "HeadwayError", ["what", "x"]]):
        with pytest.raises(RunError, match="no value"):
            read_typed(json.dumps(["error", *parts]).encode())


def test_what_is_read_does_not_outlive_its_message():
    """Messages hold whole models: they must go when they are dropped, not with the next collection
    of cycles."""
    gc.disable()
    try:
        tensor = torch.zeros(3)
        message = [tensor, 1]
        read = read_typed(write_typed(message, [tensor]), [tensor])
        alive = weakref.ref(tensor)
        del message, read, tensor
        assert alive() is None
    finally:
        gc.enable()
