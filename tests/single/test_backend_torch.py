"""single: what the backend "headway" uses of torch's half-public interface is as it was."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import headway
from headway.collective.program.program import Copy, Recv, Send, Wait
from headway.comm.backend import torch_compat as compat
from headway.comm.backend.process_group import HeadwayGroup, all_to_all_steps
from headway.errors import UsageError

GROUP, GLOO = dist.ProcessGroup, dist.ProcessGroupGloo
THERE = f"in torch {torch.__version__}"


@pytest.fixture
def world(tmp_path):
    """A default group of one rank on the backend."""
    headway.register_backend()
    dist.init_process_group(
        "headway", init_method=f"file://{tmp_path}/store", rank=0, world_size=1,
        timeout=timedelta(seconds=7),
    )  # fmt: skip
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def arguments(method):
    """Names of the arguments of a method of C++, without self."""
    head = method.__doc__.partition(") ->")[0]
    return re.findall(r"(\w+): ", head)[1:]


@pytest.mark.parametrize("names", compat.ALIASES, ids=lambda names: names[0])
def test_a_group_has_each_method_under_one_of_its_names(names):
    found = [name for name in names if hasattr(GROUP, name)]
    assert found, f"neither {names[0]} nor {names[1]} {THERE}"
    expected = 5 if names[0] == "all_to_all_single" else 3
    assert len(arguments(getattr(GROUP, found[0]))) == expected, THERE


@pytest.mark.parametrize(
    "name", ["allgather", "reduce_scatter", "alltoall", "allreduce", "broadcast"]
)
def test_a_group_has_each_method_that_is_overridden(name):
    assert hasattr(GROUP, name), f"{name} {THERE}"
    assert name in HeadwayGroup.__dict__


def test_the_class_answers_to_old_and_new_names():
    for new, old in compat.ALIASES:
        assert HeadwayGroup.__dict__[new] is HeadwayGroup.__dict__[old]


def test_the_inner_gloo_has_what_is_handed_to_it():
    for names in compat.ALIASES[:3]:
        assert any(hasattr(GLOO, name) for name in names), f"{names} {THERE}"
    for name in ("allgather", "reduce_scatter", "alltoall", "allreduce", "broadcast", "send",
                 "recv", "shutdown", "options", "create_device",
                 "_set_sequence_number_for_group"):  # fmt: skip
        assert hasattr(GLOO, name), f"{name} {THERE}"
    assert {"_devices", "_threads", "_timeout"} <= set(dir(GLOO._Options)), THERE


def test_options_have_the_fields_that_are_read():
    for kind, fields in {
        "AllgatherOptions": {"timeout"},
        "ReduceScatterOptions": {"timeout", "reduceOp"},
        "AllToAllOptions": {"timeout"},
        "AllreduceOptions": {"timeout", "reduceOp"},
        "BroadcastOptions": {"timeout", "rootRank"},
    }.items():
        assert fields <= set(dir(getattr(distributed_c10d, kind))), f"{kind} {THERE}"
    assert compat.reduction_of(compat.options("AllreduceOptions", None)) == "sum"
    with pytest.raises(UsageError, match="takes AllreduceOptions, not"):
        compat.options("AllreduceOptions", dist.ReduceOp.SUM)


def test_torch_says_what_a_birth_needs():
    fields = set(dir(distributed_c10d._DistributedBackendOptions))
    needed = {"store", "group_rank", "group_size", "timeout", "global_ranks_in_group"}
    assert needed <= fields, f"{needed - fields} {THERE}"


def test_a_group_of_one_rank(world):
    assert (dist.get_backend(), world.name()) == ("headway", "headway")
    assert compat.timeout_of(world._gloo, None) == 7
    given = compat.options("AllgatherOptions", None)
    assert compat.timeout_of(world._gloo, given) == 7
    given.timeout = timedelta(seconds=3)
    assert compat.timeout_of(world._gloo, given) == 3
    whole = torch.zeros(2)
    for names in compat.ALIASES[:2]:
        for name in names:
            getattr(world, name)(whole.zero_(), torch.ones(2)).wait()
            assert whole.tolist() == [1, 1]
    dist.all_to_all_single(whole, torch.full((2,), 3.0))
    assert whole.tolist() == [3, 3]
    dist.barrier()
    set_timeout = getattr(dist.distributed_c10d, "set_timeout", None)  # public from 2.14 on
    (set_timeout or dist.distributed_c10d._set_pg_timeout)(timedelta(seconds=9), world)
    assert compat.timeout_of(world._gloo, None) == 9


def test_a_torch_without_gloo_is_told_so(monkeypatch):
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    with pytest.raises(UsageError, match="the backend headway needs Gloo"):
        headway.register_backend()


def test_a_torch_without_any_name_is_named():
    with pytest.raises(AttributeError, match="object has none of a, b"):
        compat.first_of(object(), "a", "b")


def test_registering_leaves_other_backends_alone():
    before = dict(dist.Backend.default_device_backend_map)
    headway.register_backend()
    headway.register_backend(interfaces=("lo",))
    assert dist.Backend.default_device_backend_map == before
    assert dist.Backend.backend_capability["headway"] == ["cpu"]


def test_no_other_file_touches_it():
    root = Path(headway.__file__).parent
    words = r"register_backend\(torch|_set_default_backend|ProcessGroupGloo|_allgather_base"
    words += r"|\b_Options|Backend\.register_backend\(|global_ranks_in_group"
    named = {f.name for f in root.rglob("*.py") if re.search(words, f.read_text("utf-8"))}
    named -= {"collective_recorder.py"}  # names of operations
    assert named == {"torch_compat.py"}


def test_one_ranks_part_of_an_all_to_all():
    role = all_to_all_steps(1, [2, 3, 0], [1, 3, 4])
    receives = [step for step in role.steps if isinstance(step, Recv)]
    assert [(step.peer, step.into.start, step.into.stop) for step in receives] == [
        (0, 0, 1),
        (2, 4, 8),
    ]
    assert [step.peer for step in role.steps if isinstance(step, Send)] == [0]
    assert role.steps.index(receives[-1]) == 1  # before anything is sent
    assert any(isinstance(step, Copy) for step in role.steps)
    assert not role.rounds
    wide = all_to_all_steps(0, [1] * 9, [1] * 9)
    assert sum(isinstance(step, Wait) for step in wide.steps) == 5  # four in flight
    assert all_to_all_steps(0, [0, 0], [0, 0]).steps == ()
