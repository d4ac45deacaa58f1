"""single: what headway uses of torch's private pipelining and FSDP2 is as it was."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, schedules

from headway.errors import RunError
from support import torch_runtime

RUNTIME = schedules._PipelineScheduleRuntime
USED = {
    RUNTIME._load_csv: ["self", "filename", "format"],
    RUNTIME._step_microbatches: [
        "self", "arg_mbs", "kwarg_mbs", "target_mbs", "losses", "return_outputs",
    ],
    RUNTIME._maybe_compute_loss: ["self", "stage", "output", "target_mbs", "mb_index"],
    RUNTIME._maybe_get_loss: ["self", "stage", "mb_index"],
    PipelineStage.__init__: ["self", "submodule", "stage_index", "num_stages", "device"],
    PipelineStage.clear_runtime_states: ["self"],
    PipelineStage.set_local_fwd_input: ["self", "prev_stage_outputs", "mb_index"],
    PipelineStage.get_local_bwd_output: ["self", "mb_index"],
    PipelineStage.set_local_bwd_input: ["self", "next_stage_bwd_outputs", "mb_index"],
    PipelineStage.backward_one_chunk: [
        "self", "bwd_chunk_id", "loss", "full_backward", "last_backward",
    ],
    PipelineStage.backward_weight_one_chunk: ["self", "bwd_chunk_id", "last_backward"],
    PipelineStage.perform_reduce_grad: ["self", "grad_scale_factor"],
}  # fmt: skip


@pytest.mark.parametrize("function", USED, ids=lambda f: f.__qualname__)
def test_parameters_that_are_used(function):
    found = list(inspect.signature(function).parameters)
    assert found[: len(USED[function])] == USED[function], f"in torch {torch.__version__}"


def test_parameters_that_are_given_by_name():
    stage = inspect.signature(PipelineStage.__init__).parameters
    assert {"input_args", "output_args", "group"} <= set(stage)
    multi = inspect.signature(schedules.PipelineScheduleMulti.__init__).parameters
    assert list(multi)[1:3] == ["stages", "n_microbatches"]
    assert {"loss_fn", "scale_grads"} <= set(multi)
    assert {"compute_only", "compute_comms"} == {
        word
        for word in ("compute_only", "compute_comms")
        if word in inspect.getsource(RUNTIME._load_csv)
    }


def test_attributes_that_are_overridden_or_read():
    assert isinstance(PipelineStage.is_first, property)
    assert isinstance(PipelineStage.is_last, property)
    source = inspect.getsource(PipelineStage.__mro__[1])
    assert "self.fwd_cache[fwd_chunk_id] = (" in source
    assert "if self.stage_index != 0:" in source  # which `_Stage.backward_weight_one_chunk` mends


def test_the_policy_of_mixed_precision(tmp_path):
    """Which `parallel/sharded` reads."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
        part = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
        assert part._get_fsdp_state()._mp_policy is policy
    finally:
        dist.destroy_process_group()


def test_a_torch_without_it_is_told_which_one_has_it(monkeypatch):
    monkeypatch.setattr(torch_runtime, "_RUNTIME", None)
    with pytest.raises(RunError, match=r"It is private, and torch 2\.11 to 2\.14 have it"):
        torch_runtime.TorchPipeline(None, None, None, None)


def test_no_other_file_touches_the_private_runtime():
    root = Path(__file__).parents[2]
    files = [f for folder in ("src", "tests", "benchmarks") for f in root.glob(f"{folder}/**/*.py")]
    named = {f.name for f in files if "_PipelineScheduleRuntime" in f.read_text("utf-8")}
    assert named == {"torch_runtime.py", Path(__file__).name}


def test_the_fake_process_group():
    """Which `support/fake_world` makes: operations end at once, groups have names."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from support.fake_world import fake_world, group_named

    assert issubclass(FakeStore, dist.Store)
    with fake_world(1024, rank=1023) as world:
        assert (dist.get_rank(), dist.get_world_size()) == (world.rank, world.ranks) == (1023, 1024)
        group = dist.new_group([3, 1023])
        numbers = torch.ones(2)
        dist.all_reduce(numbers, group=group)
        assert numbers.tolist() == [1, 1]
        assert group_named(group.group_name).size() == 2
    assert not dist.is_initialized()


def test_a_torch_without_the_fake_group_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.testing._internal.distributed.fake_pg", None)
    from support.fake_world import fake_world

    with pytest.raises(RunError, match="has no fake process group"), fake_world(2):
        pass


def test_the_kinds_of_operations_that_the_recorder_knows():
    """Every collective of c10d that torch has is known, or seen under its own name."""
    from support.collective_recorder import _KINDS

    known = {name for name in _KINDS if hasattr(torch.ops.c10d, name)}
    assert {"allreduce_", "_allgather_base_", "_reduce_scatter_base_", "send", "recv_"} <= known
    functional = {name for name in _KINDS if hasattr(torch.ops._c10d_functional, name)}
    assert {"all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"} <= functional


def test_no_other_file_touches_the_fake_group():
    root = Path(__file__).parents[2]
    files = [f for folder in ("src", "tests", "benchmarks") for f in root.glob(f"{folder}/**/*.py")]
    named = {f.name for f in files if "fake_pg" in f.read_text("utf-8")}
    assert named == {"fake_world.py", Path(__file__).name}
