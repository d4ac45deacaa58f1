"""pure: configurations of other frameworks: values, every key once, contradictions, the plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from headway.api.migration import import_configuration
from headway.errors import DocumentError, PlanError, UsageError
from headway.migration import FORMATS
from headway.migration.batch_equation import BatchEquation, solve_batch
from headway.migration.configuration_file import leaves, read_configuration
from headway.migration.key_table import normal
from headway.plans import ExchangePlan, LayerSplit, PipelinePlan, data_parallel, pipelined

DEEPSPEED = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 3e-4, "betas": [0.9, 0.95]}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_max_lr": 6e-4, "warmup_num_steps": 10, "total_num_steps": 100},
    },
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8},
}
ACCELERATE = """
distributed_type: FSDP
mixed_precision: bf16
num_processes: 8
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
parallelism_config:
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 2
  parallelism_config_tp_size: 2
  parallelism_config_cp_size: 1
"""
TORCHTITAN = """
[model]
name = "llama3"
[optimizer]
lr = 3e-4
[training]
local_batch_size = 8
seq_len = 512
steps = 100
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 2
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "Interleaved1F1B"
pipeline_parallel_microbatch_size = 2
"""


def written(tmp_path: Path, content: object, name: str = "config.json") -> Path:
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def deepspeed(tmp_path, changes=None, **options):
    return import_configuration(written(tmp_path, {**DEEPSPEED, **(changes or {})}), **options)


def row(found, key):
    [one] = [r for r in (*found.rows, *found.defaults) if r.key == key]
    return one


# ---- plans ------------------------------------------------------------------------------------


def test_a_deepspeed_plan_is_the_one_written_by_hand(tmp_path):
    found = deepspeed(tmp_path)
    by_hand = data_parallel(32, processes=4, microbatch=4, precision="bfloat16", zero=2)
    assert found.plan == by_hand
    assert found.plan.hash == by_hand.hash


def test_an_accelerate_plan_is_the_one_written_by_hand(tmp_path):
    found = import_configuration(written(tmp_path, ACCELERATE, "c.yaml"), batch=64)
    assert found.plan == data_parallel(
        64,
        processes=8,
        precision="bfloat16",
        zero=3,
        shards=2,
        split=LayerSplit(tensor=(2,)),
    )


def test_a_torchtitan_plan_is_the_one_written_by_hand(tmp_path):
    found = import_configuration(written(tmp_path, TORCHTITAN, "c.toml"))
    # Four shares of 8 samples; by default a pipeline keeps its parameters gathered: zero 2.
    assert found.plan == pipelined(
        32,
        processes=8,
        stages=2,
        pipeline=PipelinePlan(schedule="interleaved"),
        microbatch=2,
        precision="bfloat16",
        zero=2,
        shards=2,
    )


def test_a_pipeline_of_deepspeed_accumulates_in_its_schedule(tmp_path):
    changes = {"pipeline": {"stages": 2, "activation_checkpoint_interval": 1}}
    found = deepspeed(tmp_path, changes | {"zero_optimization": {"stage": 1}})
    assert found.plan == pipelined(
        32,
        processes=8,
        stages=2,
        pipeline=PipelinePlan(microbatches=2, recompute="blocks"),
        precision="bfloat16",
        zero=1,
    )


def test_compression_is_for_what_is_not_sharded(tmp_path):
    changes = {"communication_data_type": "fp16"}
    assert row(deepspeed(tmp_path, changes), "communication_data_type").fate == "lost"
    found = deepspeed(tmp_path, changes | {"zero_optimization": {"stage": 0}})
    assert found.plan.exchange == ExchangePlan(compress="fp16")


def test_mics_is_hybrid_sharding(tmp_path):
    found = deepspeed(tmp_path, {"zero_optimization": {"stage": 3, "mics_shard_size": 2}})
    assert found.plan == data_parallel(
        32, processes=4, microbatch=4, precision="bfloat16", zero=3, shards=2
    )


# ---- the batch --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "micro", "passes", "copies", "expected"),
    [
        (32, 4, 2, None, (32, 4, 2, 4)),
        (32, 4, None, 4, (32, 4, 2, 4)),
        (32, None, 2, 4, (32, 4, 2, 4)),
        (None, 4, 2, 4, (32, 4, 2, 4)),
        (None, 4, None, 4, (16, 4, 1, 4)),
        (33, None, None, 4, (33, None, 1, 4)),
        (32, 4, None, None, (32, 4, None, None)),
        (None, 4, 2, None, (None, 4, 2, None)),
    ],
)
def test_the_missing_number_follows(batch, micro, passes, copies, expected):
    known = BatchEquation(batch=batch, micro=micro, accumulation=passes, copies=copies)
    found = solve_batch(known)
    assert (found.batch, found.micro, found.accumulation, found.copies) == expected


def test_every_equation_of_four_numbers_is_solved_from_any_three():
    for micro in (1, 2, 3, 5):
        for passes in (1, 2, 4):
            for copies in (1, 3, 8):
                whole = BatchEquation(
                    batch=micro * passes * copies,
                    micro=micro,
                    accumulation=passes,
                    copies=copies,
                )
                for name in ("batch", "micro", "accumulation", "copies"):
                    assert solve_batch(replace(whole, **{name: None})) == whole


@pytest.mark.parametrize(
    ("changes", "options", "said"),
    [
        ({}, {"processes": 2}, "32 is not 4 x 2 x 2 processes, which is 16; it is 4 x 2 x 4"),
        ({"train_batch_size": 30}, {}, "no number of processes solves 30 = micro-batch 4"),
        ({"gradient_accumulation_steps": None}, {"processes": 3}, "no number of accumulated"),
        ({}, {"batch": 16}, "it is 32, and --batch says 16"),
        ({"train_batch_size": 0}, {}, "0 is not a whole number of at least 1"),
        ({"zero_optimization": {"stage": 4}}, {}, "4 is no stage of ZeRO"),
        ({"fp16": {"enabled": True}}, {}, "fp16 and bf16 are both enabled"),
        ({"optimizer": {"type": "AdmW"}}, {}, "did you mean AdamW"),
        ({"gradient_clipping": "much"}, {}, '"much" is not a number'),
        ({"bf16": {"enabled": 3}}, {}, "3 is not true or false"),
        ({"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}}, {}, "two numbers"),
        ({"optimizer": {"type": "Adam", "params": {"lr": -1}}}, {}, "at least 0"),
        ({"scheduler": {"type": "WarmupDecayLR"}}, {}, "needs total_num_steps"),
        ({"gradient_allreduce_op": "max"}, {}, "none of its values"),
    ],
)
def test_contradictions_name_the_numbers(tmp_path, changes, options, said):
    with pytest.raises(DocumentError, match="1 problem:") as caught:
        deepspeed(tmp_path, changes, **options)
    assert said in str(caught.value)


def test_all_problems_come_at_once_with_their_lines(tmp_path):
    text = '{\n"train_batch_size": "many",\n"zero_optimization": {\n"stage": 7},\n"bf16": 1}'
    with pytest.raises(DocumentError) as caught:
        import_configuration(written(tmp_path, text), format="deepspeed")
    assert [p.rpartition("config.json")[2].split()[0] for p in caught.value.problems] == [
        ":2",
        ":4",
    ]


def test_what_nobody_says_is_missing_and_not_invented(tmp_path):
    found = import_configuration(written(tmp_path, {"train_micro_batch_size_per_gpu": 4}))
    assert found.plan is None
    assert found.missing == ("batch", "stop", "model", "data", "loss", "optimizer")
    assert "--processes" in row(found, "train_micro_batch_size_per_gpu").note
    assert "\nbatch" not in found.recipe
    assert "\n# batch = 64" in found.recipe


def test_elasticity_decides_the_batch_so_the_file_does_not(tmp_path):
    found = deepspeed(tmp_path, {"elasticity": {"enabled": True, "max_train_batch_size": 64}})
    assert found.plan is None
    assert row(found, "elasticity.max_train_batch_size").fate == "lost"


# ---- optimiser and schedule -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "params", "call", "decay"),
    [
        ("Adam", {}, "torch.optim:AdamW", 0.0),
        ("Adam", {"adam_w_mode": True, "weight_decay": 0.1}, "torch.optim:AdamW", 0.1),
        ("Adam", {"adam_w_mode": False}, "torch.optim:Adam", 0.0),
        ("AdamW", {}, "torch.optim:AdamW", 0.0),
        ("adamw", {}, "torch.optim:AdamW", 0.0),
        ("OneBitAdam", {"freeze_step": 400}, "torch.optim:AdamW", 0.0),
    ],
)
def test_adam_of_deepspeed_is_adamw_and_decays_by_nothing(tmp_path, kind, params, call, decay):
    changes = {"optimizer": {"type": kind, "params": params}, "scheduler": {}}
    made = deepspeed(tmp_path, changes).settings.optimizer
    assert made.call == call
    assert dict(made.arguments)["weight_decay"] == decay
    assert dict(made.arguments)["lr"] == 1e-3


def test_the_rate_of_a_schedule_overrides_the_optimisers(tmp_path):
    found = deepspeed(tmp_path)
    assert dict(found.settings.optimizer.arguments)["lr"] == 6e-4
    assert "overrides" in row(found, "optimizer.params.lr").note


def test_torchtitans_defaults_are_written_out(tmp_path):
    found = import_configuration(written(tmp_path, TORCHTITAN, "c.toml"))
    assert dict(found.settings.optimizer.arguments) == {
        "lr": 3e-4,
        "betas": [0.9, 0.95],
        "eps": 1e-8,
        "weight_decay": 0.1,
    }
    assert dict(found.settings.scheduler.arguments) == {
        "steps": 100,
        "warmup": 100,
        "shape": "linear",
    }
    assert found.settings.clip == 1.0
    assert {r.key for r in found.defaults} >= {"training.max_norm", "lr_scheduler.warmup_steps"}


def test_auto_says_who_fills_it_in(tmp_path):
    changes = {"train_batch_size": "auto", "gradient_clipping": "auto"}
    changes["scheduler"] = {
        "type": "WarmupLR",
        "params": {"warmup_num_steps": "auto", "warmup_min_lr": 0},
    }
    found = deepspeed(tmp_path, changes, processes=4)
    assert "Trainer" in row(found, "gradient_clipping").note
    assert "clip is the field" in row(found, "gradient_clipping").note
    assert row(found, "scheduler.type").fate == "lost"
    assert found.settings.batch == 32
    assert found.settings.clip is None


# ---- every key once ---------------------------------------------------------------------------


def test_every_key_has_one_row_in_the_order_of_the_file(tmp_path):
    for content, name in ((DEEPSPEED, "a.json"), (ACCELERATE, "b.yaml"), (TORCHTITAN, "c.toml")):
        path = written(tmp_path, content, name)
        found = import_configuration(path)
        keys = [".".join(p) for p, _ in leaves(read_configuration(path).data)]
        assert [r.key for r in found.rows] == keys
        assert all(r.line for r in found.rows)
        assert not [r for r in found.rows if r.fate == "lost" and not r.note]


def test_unknown_keys_are_told_with_the_nearest(tmp_path):
    changes = {"gradient_cliping": 1, "zero_optimization": {"stage": 2, "overlap_com": True}}
    found = deepspeed(tmp_path, changes | {"a.b": 1, "zzz": {"q": 1}})
    assert "did you mean gradient_clipping" in row(found, "gradient_cliping").note
    assert "did you mean overlap_comm" in row(found, "zero_optimization.overlap_com").note
    assert {r.key for r in found.rows if r.fate == "unknown"} == {
        "gradient_cliping",
        "zero_optimization.overlap_com",
        "a.b",
        "zzz.q",
    }


def test_a_section_that_is_off_costs_nothing(tmp_path):
    changes = {"flops_profiler": {"enabled": False, "profile_step": 3}, "autotuning": {"fast": 1}}
    found = deepspeed(tmp_path, changes)
    assert row(found, "flops_profiler.profile_step").fate == "off"
    assert row(found, "autotuning.fast").fate == "off"


def test_tables_have_no_key_twice_and_say_why():
    for name, (table, _) in FORMATS.items():
        names = [key.name for key in table.keys]
        assert len(set(names)) == len(names), name
        for key in table.keys:
            assert key.note or key.fate == "carried", key.name
            assert key.field or key.fate not in ("carried", "adapted") or "follow" in key.note


# ---- Accelerate -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "zero", "shards"),
    [
        ("FULL_SHARD", 3, None),
        ("SHARD_GRAD_OP", 2, None),
        ("NO_SHARD", 0, None),
        ("HYBRID_SHARD", 3, 4),
        ("HYBRID_SHARD_ZERO2", 2, 4),
        ("1", 3, None),
        ("5", 2, 4),
    ],
)
def test_strategies_of_fsdp(tmp_path, strategy, zero, shards):
    text = (
        "distributed_type: FSDP\nnum_processes: 8\nnum_machines: 2\n"
        f"fsdp_config:\n  fsdp_sharding_strategy: {strategy}\n"
    )
    found = import_configuration(written(tmp_path, text, "c.yaml"), batch=64)
    assert found.plan == data_parallel(64, processes=8, zero=zero, shards=shards)


def test_a_deepspeed_file_inside_accelerate_is_translated_with_it(tmp_path):
    written(tmp_path, {**DEEPSPEED, "zero_optimizaton": 1}, "ds.json")
    text = (
        "distributed_type: DEEPSPEED\nnum_processes: 4\ndeepspeed_config:\n"
        "  deepspeed_config_file: ds.json\n  zero3_init_flag: false\n"
    )
    found = import_configuration(written(tmp_path, text, "c.yaml"))
    assert found.plan == deepspeed(tmp_path).plan
    assert row(found, "ds.json:zero_optimization.stage").became == "zero = 2"
    assert row(found, "ds.json:zero_optimizaton").fate == "unknown"


def test_sections_of_another_type_have_no_effect(tmp_path):
    text = "distributed_type: MULTI_GPU\nnum_processes: 2\nfsdp_config:\n  fsdp_version: 2\n"
    found = import_configuration(written(tmp_path, text, "c.yaml"), batch=8)
    assert found.plan == data_parallel(8, processes=2)
    assert row(found, "fsdp_config.fsdp_version").fate == "off"


def test_accumulation_is_a_micro_batch(tmp_path):
    text = (
        "distributed_type: DEEPSPEED\nnum_processes: 2\nmixed_precision: no\ndeepspeed_config:\n"
        "  zero_stage: 1\n  gradient_accumulation_steps: 4\n  gradient_clipping: 0.5\n"
    )
    found = import_configuration(written(tmp_path, text, "c.yaml"), batch=64)
    assert found.plan == data_parallel(64, processes=2, microbatch=8, zero=1)
    assert found.settings.clip == 0.5


def test_megatron(tmp_path):
    text = (
        "distributed_type: MEGATRON_LM\nnum_processes: 8\nmegatron_lm_config:\n"
        "  megatron_lm_tp_degree: 2\n  megatron_lm_pp_degree: 2\n"
        "  megatron_lm_num_micro_batches: 4\n  megatron_lm_use_distributed_optimizer: true\n"
        "  megatron_lm_recompute_activations: true\n"
    )
    found = import_configuration(written(tmp_path, text, "c.yaml"), batch=64)
    assert found.plan == pipelined(
        64,
        processes=8,
        stages=2,
        pipeline=PipelinePlan(microbatches=4, recompute="blocks"),
        zero=1,
        split=LayerSplit(tensor=(2,)),
    )


# ---- torchtitan -------------------------------------------------------------------------------


def test_keys_of_the_first_releases(tmp_path):
    text = (
        "[training]\nbatch_size = 4\nsteps = 10\nwarmup_steps = 2\ndata_parallel_degree = 2\n"
        "tensor_parallel_degree = 2\n[experimental]\npipeline_parallel_degree = 1\n"
        "[checkpoint]\nenable_checkpoint = true\ninterval = 5\n"
    )
    found = import_configuration(written(tmp_path, text, "c.toml"))
    split = LayerSplit(tensor=(2,))
    assert found.plan == data_parallel(
        8, processes=4, microbatch=4, precision="bfloat16", zero=3, split=split
    )
    assert dict(found.settings.scheduler.arguments)["warmup"] == 2
    assert found.settings.checkpoint_every == 5


def test_degrees_that_do_not_multiply_to_the_processes(tmp_path):
    with pytest.raises(DocumentError, match="the degrees are 8 processes, and --processes says 6"):
        import_configuration(written(tmp_path, TORCHTITAN, "c.toml"), processes=6)


def test_left_over_ranks_need_the_number_of_processes(tmp_path):
    text = "[training]\nlocal_batch_size = 4\n[parallelism]\ndata_parallel_shard_degree = -1\n"
    assert import_configuration(written(tmp_path, text, "c.toml")).plan is None
    found = import_configuration(written(tmp_path, text, "c.toml"), processes=2)
    assert found.plan == data_parallel(8, processes=2, microbatch=4, precision="bfloat16", zero=3)


# ---- files ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", '{"train_batch_size": 1,}', "line 1 column"),
        ("a.json", '{"a": 1, "a": 2}', "the same key stands twice: a"),
        ("a.json", "[1]", "it is a list, not a table"),
        ("a.json", '{"a": "\\ud800"}', "half of a character"),
        ("a.toml", "[training\n", "line 1, column"),
        ("a.yaml", "a: [1, 2", "line 1, column"),
        ("a.yaml", "a: 1\na: 2\n", "the same key stands twice: a (line 2)"),
        ("a.yaml", "a: &x 1\nb: *x\n", "anchor or alias, 'x' (line 1)"),
        ("a.yaml", "[" * 200, "more than 100 deep"),
        ("a.yaml", "a: !!python/object:os.system 1\n", "python/object"),
        ("a.yaml", "", "it is empty"),
        ("a.json", " " * 300_000, "at most 262144"),
    ],
)
def test_files_that_are_none(tmp_path, name, text, said):
    with pytest.raises(DocumentError) as caught:
        import_configuration(written(tmp_path, text, name))
    assert said in str(caught.value)


def test_the_format_is_seen_from_the_keys(tmp_path):
    path = written(tmp_path, {"learning": 1})
    with pytest.raises(UsageError, match="no key at the top is one of DeepSpeed"):
        import_configuration(path)
    assert import_configuration(path, format="deepspeed").rows[0].fate == "unknown"
    # The suffix says nothing.
    for content, title in (
        (json.dumps(DEEPSPEED), "DeepSpeed"),
        (ACCELERATE, "Accelerate"),
        (TORCHTITAN, "torchtitan"),
    ):
        path = written(tmp_path, content, "configuration")
        assert import_configuration(path).translated.title == title


def test_a_plan_that_cannot_exist_is_refused(tmp_path):
    with pytest.raises(PlanError, match="some ranks would never have work"):
        import_configuration(written(tmp_path, ACCELERATE, "c.yaml"), batch=2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"recipe": "m:f", "model": "m:g"}, "brings its own model"),
        ({"loss": "m:f", "criterion": "m:g"}, "--loss and --criterion"),
        ({"processes": 0}, "--processes 0"),
        ({"format": "keras"}, "no format 'keras'"),
    ],
)
def test_options_that_contradict_each_other(tmp_path, options, said):
    with pytest.raises(UsageError) as caught:
        deepspeed(tmp_path, **options)
    assert said in str(caught.value)


def test_a_recipe_that_the_options_spoil_is_refused_before_it_is_written(tmp_path):
    parts = {"model": "m:f", "data": "m:d", "criterion": "torch.nn:MSELoss"}
    with pytest.raises(DocumentError, match="stop"):
        deepspeed(tmp_path, stop="some time", **parts)


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("whole", 5e8, 500_000_000),
        ("whole", "5e8", 500_000_000),
        ("number", "1e-5", 1e-5),
        ("flag", "No", False),
        ("text", False, "no"),
        ("list", "layers.1, layers.2", ["layers.1", "layers.2"]),
    ],
)
def test_values_as_the_frameworks_read_them(kind, value, expected):
    assert normal(kind, value) == expected


@pytest.mark.parametrize(
    ("kind", "value"),
    [("whole", 1.5), ("whole", True), ("number", "inf"), ("flag", 1), ("text", 1), ("list", 1)],
)
def test_values_of_another_kind(kind, value):
    with pytest.raises(ValueError, match=r"^$"):
        normal(kind, value)
