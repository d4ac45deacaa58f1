"""DeepSpeed's configuration (JSON): batch, ZeRO, precision, optimiser, schedule and the rest.

Read from DeepSpeed 0.19: `runtime/config.py`, `runtime/constants.py`, `runtime/zero/config.py`,
`runtime/lr_schedules.py`. What is easily lost: its "Adam" is AdamW unless `adam_w_mode` says no,
and decays by 0 where torch's decays by 0.01; a scheduler's `warmup_max_lr` overrides the
optimiser's rate; `gradient_accumulation_steps` is the number of a pipeline's micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from headway.documents import nearest
from headway.migration.batch_equation import BatchEquation, solve_batch
from headway.migration.key_table import Fate, Key, KeyTable, Switch
from headway.migration.optimizers import (
    ADAM,
    ADAM_ARGUMENTS,
    ADAMW,
    TORCH_OPTIMIZERS,
    OptimizerArgument,
    betas,
    call_of,
)
from headway.migration.translation import Translation

NVME = "headway keeps all state in the memory of the device; use more ranks, or zero = 3"
HOST = "headway has no such switch: its checkpoints, records and tables are always on"
MODEL = "it changes the model; build the model so that it has this, or leave it out"
_BUCKETS = "FSDP2 sums and gathers block by block; exchange.bucket is for zero = 0"
_GATHER = "headway gathers the modules with at least 1 % of the parameters, one at a time"
_ONE_BIT = (
    "its momentum is compressed once the variance is frozen; headway compresses gradients: train "
    'exactly first, then try exchange.compress = "powersgd:2" or "sign" with `headway verify`'
)
_LOSS_SCALE = "float32 and bfloat16 have the range of float32 and need no loss scale"
_RECOMPUTE = (
    "the model itself calls it: call torch.utils.checkpoint in its place; stages of a pipeline "
    'recompute by pipeline.recompute = "blocks"'
)


def _named(prefix: str, names: str, **facts: Any) -> tuple[Key, ...]:
    """Keys of one section that share their fate."""
    return tuple(Key(name=f"{prefix}{name}", **facts) for name in names.split())


TABLE = KeyTable(
    title="DeepSpeed",
    auto="auto",
    auto_note='"auto" is filled in by the Trainer of transformers or by Accelerate; write a value',
    switches=tuple(
        Switch(section=section)
        for section in (
            "fp16",
            "bf16",
            "bfloat16",
            "amp",
            "torch_autocast",
            "tensorboard",
            "wandb",
            "csv_monitor",
            "comet",
            "flops_profiler",
            "comms_logger",
            "autotuning",
            "elasticity",
            "progressive_layer_drop",
            "eigenvalue",
            "curriculum_learning",
            "data_efficiency",
            "quantize_training",
            "hybrid_engine",
            "nebula",
        )
    ),
    keys=(
        Key(name="train_batch_size", kind="whole", fate="carried", field="batch"),
        Key(
            name="train_micro_batch_size_per_gpu",
            kind="whole",
            fate="carried",
            field="microbatch",
            note="most samples of one forward pass of a rank",
        ),
        Key(
            name="gradient_accumulation_steps",
            kind="whole",
            fate="adapted",
            field="batch",
            note="headway derives it: batch / (microbatch x ranks); of a pipeline it is "
            "pipeline.microbatches",
        ),
        Key(
            name="managed_gradient_accumulation",
            kind="flag",
            note="headway counts micro-batches itself",
        ),
        Key(
            name="optimizer.type",
            kind="text",
            fate="adapted",
            field="optimizer",
            note="Adam is AdamW unless adam_w_mode is false",
        ),
        Key(
            name="optimizer.params.*",
            fate="carried",
            field="optimizer",
            note="arguments of the optimiser; DeepSpeed's defaults are written out",
        ),
        Key(name="optimizer.legacy_fusion", kind="flag", note="it chooses a kernel"),
        Key(
            name="scheduler.type",
            kind="text",
            fate="adapted",
            field="scheduler",
            note="WarmupLR, WarmupDecayLR and WarmupCosineLR by headway.optim:deepspeed_rates",
        ),
        Key(name="scheduler.params.*", fate="carried", field="scheduler"),
        Key(name="gradient_clipping", kind="number", fate="carried", field="clip"),
        Key(
            name="zero_optimization.stage",
            kind="whole",
            fate="carried",
            field="zero",
            note="1 the optimiser's state, 2 gradients, too, 3 parameters, too",
        ),
        Key(
            name="zero_optimization.mics_shard_size",
            kind="whole",
            fate="carried",
            field="shards",
            note="ranks that keep the state together; the others are copies",
            idle=(-1, 0),
        ),
        Key(
            name="zero_optimization.zero_hpz_partition_size",
            kind="whole",
            fate="lost",
            note="headway has no second copy of the parameters inside a node; shards = ranks of a "
            "node keeps all of the state there",
            idle=(0, 1),
        ),
        *_named(
            "zero_optimization.",
            "zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients",
            kind="flag",
            fate="lost",
            note="with zero headway exchanges exactly; exchange.compress is for zero = 0",
            idle=(False,),
        ),
        Key(
            name="zero_optimization.zeropp_loco_param.*",
            fate="lost",
            note="with zero headway exchanges exactly",
        ),
        *_named(
            "zero_optimization.",
            "offload_param.device offload_optimizer.device",
            kind="text",
            fate="lost",
            note=NVME,
            idle=("none",),
        ),
        *_named(
            "zero_optimization.",
            "cpu_offload cpu_offload_params cpu_offload_param cpu_offload_use_pin_memory",
            kind="flag",
            fate="lost",
            note=NVME,
            idle=(False,),
        ),
        *_named(
            "zero_optimization.",
            "offload_param.nvme_path offload_param.buffer_count offload_param.buffer_size "
            "offload_param.max_in_cpu offload_param.pin_memory offload_optimizer.nvme_path "
            "offload_optimizer.buffer_count offload_optimizer.pin_memory "
            "offload_optimizer.pipeline_read offload_optimizer.pipeline_write "
            "offload_optimizer.pipeline offload_optimizer.fast_init offload_optimizer.ratio "
            "offload_optimizer.super_offload offload_optimizer.cpuadam_cores_perc "
            "offload_optimizer.buffer_size",
            note="it is part of offloading, which headway has not",
        ),
        Key(name="zero_optimization.zenflow.*", fate="lost", note=NVME),
        *_named(
            "zero_optimization.",
            "contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce "
            "allgather_partitions round_robin_gradients legacy_stage1",
            kind="flag",
            note=_BUCKETS,
        ),
        Key(
            name="zero_optimization.overlap_comm",
            kind="flag",
            note="what is sent always overlaps with the backward pass",
        ),
        *_named(
            "zero_optimization.",
            "reduce_bucket_size allgather_bucket_size",
            kind="whole",
            note=_BUCKETS,
        ),
        *_named(
            "zero_optimization.",
            "sub_group_size prefetch_bucket_size param_persistence_threshold "
            "model_persistence_threshold max_live_parameters max_reuse_distance "
            "stage3_prefetch_bucket_size stage3_param_persistence_threshold "
            "stage3_model_persistence_threshold stage3_max_live_parameters "
            "stage3_max_reuse_distance stage3_module_granularity_threshold "
            "module_granularity_threshold",
            kind="whole",
            note=_GATHER,
        ),
        *_named(
            "zero_optimization.",
            "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save "
            "gather_16bit_weights_on_model_save",
            kind="flag",
            note="`headway checkpoint convert RUN model.safetensors` writes the whole model",
        ),
        *_named(
            "zero_optimization.",
            "elastic_checkpoint load_from_fp32_weights pipeline_loading_checkpoint",
            kind="flag",
            note="checkpoints are by logical name and load on any number of ranks",
        ),
        *_named(
            "zero_optimization.",
            "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential "
            "mics_hierarchical_params_gather memory_efficient_linear override_module_apply "
            "log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory "
            "ignore_unused_parameters",
            kind="flag",
            note="how DeepSpeed gathers parameters; FSDP2 gathers them here",
        ),
        Key(
            name="zero_optimization.leaf_module.*",
            note="FSDP2 needs no leaves; modules are gathered by their size",
        ),
        Key(name="zero_allow_untested_optimizer", kind="flag", note="every optimiser may be used"),
        Key(name="zero_force_ds_cpu_optimizer", kind="flag", note="there is none"),
        Key(
            name="fp16.enabled",
            kind="flag",
            fate="lost",
            note="headway computes in float32, float64 or bfloat16: the recipe has float32; write "
            'precision = "bfloat16" where the device has it',
            idle=(False,),
        ),
        *_named(
            "fp16.",
            "auto_cast loss_scale initial_scale_power loss_scale_window hysteresis "
            "consecutive_hysteresis min_loss_scale fp16_master_weights_and_grads",
            note=_LOSS_SCALE,
        ),
        *_named(
            "",
            "bf16.enabled bfloat16.enabled",
            kind="flag",
            fate="adapted",
            field="precision",
            note="autocast; parameters and the optimiser's state stay float32, as DeepSpeed's "
            "master weights",
            idle=(False,),
        ),
        *_named(
            "",
            "bf16.immediate_grad_update bf16.check_grad_overflow bf16.check_overflow "
            "bfloat16.immediate_grad_update",
            kind="flag",
            note="a loss that is not finite stops the run",
        ),
        *_named(
            "",
            "bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states",
            kind="flag",
            fate="lost",
            note="parameters, gradients and the optimiser's state stay float32",
            idle=(False,),
        ),
        Key(
            name="amp.*",
            fate="lost",
            note='apex is not used; write precision = "bfloat16" where the device has it',
        ),
        Key(
            name="torch_autocast.enabled",
            kind="flag",
            fate="adapted",
            field="precision",
            note="with dtype bfloat16",
        ),
        Key(
            name="torch_autocast.dtype",
            kind="text",
            fate="adapted",
            field="precision",
            note="bfloat16 only",
        ),
        Key(
            name="torch_autocast.lower_precision_safe_modules",
            fate="lost",
            note="torch's own lists of operators hold",
        ),
        Key(
            name="data_types.grad_accum_dtype",
            kind="text",
            fate="lost",
            note="gradients are summed in float32",
            idle=("fp32",),
        ),
        *_named(
            "data_types.",
            "param_dtype buffer_dtype",
            kind="text",
            fate="lost",
            note="parameters and buffers keep the type that the model gives them",
        ),
        Key(
            name="communication_data_type",
            kind="text",
            fate="adapted",
            field="exchange.compress",
            note="with zero = 0: gradients travel as fp16 or bf16",
            idle=("fp32",),
        ),
        Key(
            name="seq_parallel_communication_data_type",
            kind="text",
            note="headway has no sequence parallelism",
        ),
        Key(
            name="gradient_allreduce_op",
            kind="text",
            fate="carried",
            field="exchange.reduce",
            idle=("mean",),
        ),
        *_named(
            "",
            "prescale_gradients gradient_predivide_factor",
            note="losses are divided by the global count before they are summed",
        ),
        Key(
            name="sparse_gradients",
            kind="flag",
            fate="lost",
            note='embeddings of which only used rows travel are split.tables = "row"',
            idle=(False,),
        ),
        Key(name="disable_allgather", kind="flag", note="it chooses a collective"),
        Key(
            name="use_data_before_expert_parallelism",
            kind="flag",
            note="headway has no expert parallelism",
        ),
        *_named(
            "activation_checkpointing.",
            "partition_activations cpu_checkpointing contiguous_memory_optimization "
            "synchronize_checkpoint_boundary profile",
            kind="flag",
            fate="lost",
            note=_RECOMPUTE,
            idle=(False,),
        ),
        Key(
            name="activation_checkpointing.number_checkpoints",
            kind="whole",
            fate="lost",
            note=_RECOMPUTE,
        ),
        Key(name="pipeline.stages", kind="whole", fate="carried", field="stages"),
        Key(
            name="pipeline.partition",
            kind="text",
            fate="adapted",
            field="pipeline.balance",
            note='"parameters"; others: balance = "time", or pipeline.cut names the modules',
        ),
        Key(
            name="pipeline.activation_checkpoint_interval",
            kind="whole",
            fate="adapted",
            field="pipeline.recompute",
            note="blocks, one at a time",
        ),
        Key(name="pipeline.seed_layers", kind="flag", note="a seed depends on nothing but itself"),
        *_named(
            "pipeline.",
            "pipe_partitioned grad_partitioned use_reentrant",
            kind="flag",
            note="how DeepSpeed sends activations",
        ),
        Key(
            name="tensor_parallel.autotp_size",
            kind="whole",
            fate="carried",
            field="split.tensor",
            note="linear layers over so many ranks",
            idle=(0, 1),
        ),
        Key(
            name="tensor_parallel.*",
            note="which layers are split, split.only and split.whole say by name",
        ),
        Key(
            name="sequence_parallel_size",
            kind="whole",
            fate="lost",
            note="headway has no sequence parallelism; these ranks take shares of the batch",
            idle=(0, 1),
        ),
        Key(
            name="expert_parallel.*",
            fate="lost",
            note="headway has no expert parallelism; every rank has all experts",
        ),
        Key(name="dataloader_drop_last", kind="flag", fate="carried", field="drop_last"),
        Key(
            name="steps_per_print",
            kind="number",
            note="`headway train` shows its progress, and the run directory has every step",
        ),
        *_named("", "wall_clock_breakdown memory_breakdown dump_state", kind="flag", note=HOST),
        Key(name="log_level", kind="text", note="Python's logging decides"),
        Key(
            name="tensorboard.enabled",
            kind="flag",
            fate="carried",
            field="loggers",
            note="into the run directory",
        ),
        Key(name="wandb.enabled", kind="flag", fate="carried", field="loggers"),
        Key(
            name="csv_monitor.enabled",
            kind="flag",
            fate="carried",
            field="loggers",
            note="metrics.csv in the run directory",
        ),
        *_named(
            "",
            "tensorboard.output_path tensorboard.job_name csv_monitor.output_path "
            "csv_monitor.job_name",
            kind="text",
            note="records are in the run directory",
        ),
        *_named(
            "wandb.",
            "project team group",
            kind="text",
            fate="lost",
            note="set WANDB_PROJECT, WANDB_ENTITY, WANDB_RUN_GROUP",
        ),
        Key(
            name="comet.*",
            fate="lost",
            note="loggers may be a function that returns a logger: one that makes a Comet "
            "experiment",
        ),
        Key(
            name="flops_profiler.*",
            note="`headway report RUN` and `headway explain` show time and work by layer",
        ),
        Key(name="comms_logger.*", note="the run's report shows what each exchange sends"),
        Key(
            name="autotuning.*",
            fate="lost",
            note="`headway plan RECIPE` and `headway train --plan auto` search plans",
        ),
        Key(
            name="elasticity.*",
            fate="lost",
            note="the global batch stays what it is, on any number of ranks: --batch N",
        ),
        Key(name="aio.*", note="headway does not offload to disks"),
        Key(name="sparse_attention.*", fate="lost", note=MODEL),
        Key(name="progressive_layer_drop.*", fate="lost", note=MODEL),
        Key(name="compression_training.*", fate="lost", note=MODEL),
        Key(name="quantize_training.*", fate="lost", note=MODEL),
        Key(name="eigenvalue.*", fate="lost", note=MODEL),
        Key(name="hybrid_engine.*", fate="lost", note="headway trains; it does not generate"),
        *_named(
            "",
            "curriculum_learning.* data_efficiency.*",
            fate="lost",
            note="the order of samples is the data's: a `Source` may give harder ones later",
        ),
        *_named(
            "checkpoint.",
            "tag_validation load_universal use_node_local_storage parallel_write.pipeline_stage "
            "writer.* checkpoint_serialization",
            note="checkpoints are by logical name, written by all ranks, and load on any number "
            "of them",
        ),
        *_named("", "nebula.* datastates_ckpt.*", note="checkpoints are asynchronous already"),
        *_named(
            "",
            "compile.* graph_harvesting vocabulary_size",
            fate="lost",
            note="apply torch.compile in the function that builds the model",
            idle=(False,),
        ),
    ),
)


def translate(t: Translation, processes: int | None, batch: int | None) -> None:
    """Translate a DeepSpeed configuration.

    Args:
        processes: Of the whole job; None: as the batch says, if it does.
        batch: Where the file does not say it.
    """
    stages = t.whole("pipeline.stages") or 1
    tensor = max(1, t.value("tensor_parallel.autotp_size") or 1)
    _parallel(t, stages, tensor)
    _batch(t, processes, batch, stages, tensor)
    _zero(t)
    _precision(t)
    _exchange(t)
    lr = _optimizer(t)
    _scheduler(t, lr)
    _rest(t)


def _parallel(t: Translation, stages: int, tensor: int) -> None:
    if stages > 1:
        t.carry("pipeline.stages", "stages", stages)
        _pipeline(t)
    if tensor > 1:
        t.carry("tensor_parallel.autotp_size", "split.tensor", (tensor,))


def _pipeline(t: Translation) -> None:
    way = t.value("pipeline.partition")
    if way == "parameters":
        t.carry("pipeline.partition", "pipeline.balance", "parameters")
    elif way is not None:
        note = f'"{way}" is DeepSpeed\'s; stages of equal time are the nearest'
        t.carry("pipeline.partition", "pipeline.balance", "time", note)
    if t.value("pipeline.activation_checkpoint_interval"):
        note = "every block, one at a time"
        t.carry("pipeline.activation_checkpoint_interval", "pipeline.recompute", "blocks", note)


_B, _M, _A = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def _batch(
    t: Translation, processes: int | None, given: int | None, stages: int, tensor: int
) -> None:
    together = stages * tensor
    if processes is not None and processes % together:
        why = f"{processes} processes are no multiple of {together} that hold one copy of the model"
        t.problem("pipeline.stages" if stages > 1 else "tensor_parallel.autotp_size", why)
        return
    stated, micro, passes = t.whole(_B), t.whole(_M), t.whole(_A)
    if t.enabled("elasticity"):
        for name in (_B, _M, _A):
            t.tell(name, "off", "elasticity decides it")
        stated = micro = passes = None
    if given is not None and stated is not None and given != stated:
        t.problem(_B, f"it is {stated}, and --batch says {given}")
        return
    known = BatchEquation(
        batch=stated if given is None else given,
        micro=micro,
        accumulation=passes,
        copies=None if processes is None else processes // together,
    )
    try:
        found = solve_batch(known)
    except ValueError as error:
        t.problem(_B if stated is not None else _M, str(error))
        return
    if processes is None and found.copies is not None:
        t.fields["processes"] = found.copies * together
    if found.batch is None:
        note = f"{found}: say how many with --processes, or the batch with --batch"
        for name in (_M, _A):
            t.tell(name, "lost", note)
    else:
        t.carry(_B, "batch", found.batch)
        t.fields["batch"] = found.batch
    _micro_batches(t, found, stages)


def _micro_batches(t: Translation, found: BatchEquation, stages: int) -> None:
    if stages > 1 and found.accumulation is not None:
        note = "the micro-batches of a pipeline's step"
        t.carry(_A, "pipeline.microbatches", found.accumulation, note)
        t.fields["pipeline.microbatches"] = found.accumulation
        t.tell(_M, "adapted", f"{found}", "pipeline.microbatches")
        return
    if found.batch is None:
        return
    if found.micro is not None:
        t.carry(_M, "microbatch", found.micro)
        t.fields["microbatch"] = found.micro
    if found.micro is None and (found.accumulation or 1) > 1:
        t.tell(_A, "lost", f"{found}: say how many with --processes")
        return
    t.tell(_A, "adapted", "headway accumulates what exceeds microbatch", str(found))


def _zero(t: Translation) -> None:
    whole = t.value("zero_optimization")
    if isinstance(whole, bool):
        # Of DeepSpeed's first releases: true is stage 1.
        t.carry("zero_optimization", "zero", int(whole), "true is stage 1")
        return
    stage = t.whole("zero_optimization.stage", least=0)
    if stage is None:
        return
    if stage > 3:
        t.problem("zero_optimization.stage", f"{stage} is no stage of ZeRO; 0, 1, 2 or 3")
        return
    t.carry("zero_optimization.stage", "zero", stage)
    shards = t.value("zero_optimization.mics_shard_size")
    if shards is not None and shards > 0:
        if stage == 0:
            t.problem("zero_optimization.mics_shard_size", "it needs stage 3")
        else:
            t.carry("zero_optimization.mics_shard_size", "shards", shards)


def _precision(t: Translation) -> None:
    half = [name for name in ("fp16", "bf16", "bfloat16", "amp") if t.enabled(name)]
    if len(half) > 1:
        t.problem(f"{half[1]}.enabled", f"{' and '.join(half)} are both enabled; one at most")
    for name in ("bf16", "bfloat16"):
        if t.enabled(name):
            note = "autocast; parameters and the optimiser's state stay float32"
            t.carry(f"{name}.enabled", "precision", "bfloat16", note)
    if t.enabled("torch_autocast"):
        name = "torch_autocast.dtype"
        dtype = t.value(name) or "torch.bfloat16"
        if str(dtype).removeprefix("torch.") in ("bfloat16", "bf16"):
            for key in (name, "torch_autocast.enabled"):
                t.carry(key, "precision", "bfloat16")
            t.fields["precision"] = "bfloat16"
        else:
            for key in (name, "torch_autocast.enabled"):
                t.tell(key, "lost", f"headway has autocast to bfloat16 only, not to {dtype}")


_WIRE = {"fp16": "fp16", "float16": "fp16", "bf16": "bf16", "bfloat16": "bf16", "bfp16": "bf16"}


def _exchange(t: Translation) -> None:
    exact = bool(t.fields.get("zero")) or t.fields.get("stages", 1) > 1
    why = "with zero or stages headway exchanges exactly, in the gradients' own type"
    kind = t.value("communication_data_type")
    if kind in _WIRE:
        if exact:
            t.tell("communication_data_type", "lost", why)
        else:
            note = "gradients are rounded to it as they travel, and summed in it"
            t.carry("communication_data_type", "exchange.compress", _WIRE[kind], note)
    elif kind is not None and kind not in ("fp32", "float32"):
        t.problem("communication_data_type", f"{kind} is none of fp32, fp16, bf16")
    if t.word("gradient_allreduce_op", ("mean", "sum")) == "sum":
        if exact:
            t.tell("gradient_allreduce_op", "lost", why)
        else:
            t.carry("gradient_allreduce_op", "exchange.reduce", "sum")


# ---- optimiser --------------------------------------------------------------------------------

_ADAM_LIKE = ("Adam", "AdamW", "OneBitAdam", "ZeroOneAdam")
_OTHERS = ("Lamb", "OneBitLamb", "Lion", "Muon", "MuAdam", "MuAdamW", "MuSGD", *TORCH_OPTIMIZERS)
_P = "optimizer.params"
_OF_KERNELS = "torch_adam fused foreach capturable differentiable amsgrad bias_correction"
_OF_ONE_BIT = (
    "freeze_step cuda_aware comm_backend_name var_freeze_step var_update_scaler local_step_scaler "
    "local_step_clipper coeff_beta factor_max factor_min factor_threshold max_grad_norm"
)


def _optimizer(t: Translation) -> float | None:
    """Translate the optimiser; returns its rate, where it is known."""
    if not t.has("optimizer.type"):
        return None
    kind = t.word("optimizer.type", (*_ADAM_LIKE, *_OTHERS), fold=True)
    if kind is None:
        return None
    if kind in _ADAM_LIKE:
        return _adam(t, kind)
    if kind in ("Lamb", "OneBitLamb"):
        return _lamb(t, kind)
    if kind in TORCH_OPTIMIZERS:
        return _of_torch(t, kind)
    note = "neither torch nor headway has it as it is; name a function of yours with --optimizer"
    t.tell("optimizer.type", "lost", note)
    for name in t.below(_P):
        t.tell(f"{_P}.{name}", "lost", f"it is an argument of {kind}")
    return None


def _adam(t: Translation, kind: str) -> float | None:
    decoupled = kind != "Adam" or t.below(_P).get("adam_w_mode", True) is not False
    call = ADAMW if decoupled else ADAM
    arguments = _arguments(t, ADAM_ARGUMENTS)
    if t.below(_P).get("amsgrad") is True:
        arguments["amsgrad"] = True
        t.tell(f"{_P}.amsgrad", "carried", "", "optimizer.amsgrad = true")
    note = {
        "Adam": "adam_w_mode is true by default: the decay is AdamW's" if decoupled else "",
        "AdamW": "",
    }.get(kind, _ONE_BIT)
    t.carry("optimizer.type", "optimizer", call_of(call, arguments), note, form=_call(call))
    if t.below(_P).get("bias_correction") is False:
        lost = "torch's Adam always corrects its bias"
        t.tell(f"{_P}.bias_correction", "lost", lost)
    fate: Fate = "adapted" if kind == "Adam" else "unneeded"
    t.tell(f"{_P}.adam_w_mode", fate, "true: AdamW, false: Adam", _call(call))
    _left_arguments(t, kind)
    return float(arguments["lr"]) if "lr" in arguments else None


def _lamb(t: Translation, kind: str) -> float | None:
    arguments = _arguments(t, ADAM_ARGUMENTS)
    given = t.below(_P)
    low, high = given.get("min_coeff", 0.01), given.get("max_coeff", 10.0)
    note = (
        "DeepSpeed bounds the trust ratio by min_coeff and max_coeff, headway.optim.LAMB the norm "
        "of the weights by clamp, which is left out"
    )
    if kind == "OneBitLamb":
        note = f"{note}; {_ONE_BIT}"
    arguments["exclude_1d"] = False
    call = call_of("headway.optim:LAMB", arguments)
    t.carry("optimizer.type", "optimizer", call, note, form=_call(call.call))
    for name, value in (("min_coeff", low), ("max_coeff", high)):
        t.tell(f"{_P}.{name}", "lost", f"a bound of {value} on the trust ratio: headway has none")
    _left_arguments(t, kind)
    return float(arguments["lr"]) if "lr" in arguments else None


def _of_torch(t: Translation, kind: str) -> float | None:
    arguments = t.below(_P)
    for name, value in arguments.items():
        t.tell(f"{_P}.{name}", "carried", "", f"optimizer.{name} = {value!r}")
    call = call_of(f"torch.optim:{kind}", arguments)
    t.carry("optimizer.type", "optimizer", call, form=_call(call.call))
    lr = arguments.get("lr")
    return float(lr) if isinstance(lr, int | float) else None


def _call(call: str) -> str:
    return f'optimizer.call = "{call}"'


def _arguments(t: Translation, wanted: Mapping[str, OptimizerArgument]) -> dict[str, Any]:
    """The keyword arguments of a call, with DeepSpeed's defaults; tells what they became."""
    given, found = t.below(_P), dict[str, Any]()
    for name, argument in wanted.items():
        key, target = f"{_P}.{name}", argument.name or name
        if name not in given:
            if not t.is_auto(key):
                found[target] = argument.default
                t.default(key, argument.default, f"optimizer.{target}")
            continue
        try:
            found[target] = _CHECKS[argument.kind](given[name])
        except ValueError as error:
            t.problem(key, f"{given[name]!r} {error}")
            continue
        t.tell(key, "carried", "", f"optimizer.{target} = {found[target]}")
    return found


def _rate(value: Any) -> float:
    try:
        found = float(value) if not isinstance(value, bool) else -1.0
    except (TypeError, ValueError, OverflowError):
        raise ValueError("is not a number") from None
    if not 0 <= found < 1e300:
        raise ValueError("is not a number of at least 0")
    return found


_CHECKS: Mapping[str, Callable[[Any], Any]] = {"number": _rate, "betas": betas}


def _left_arguments(t: Translation, kind: str) -> None:
    """What the optimiser's own arguments leave: kernels, 1-bit settings, and what no one knows."""
    told = {"lr", "betas", "eps", "weight_decay", "adam_w_mode", "min_coeff", "max_coeff"}
    known = (*told, *_OF_KERNELS.split(), *_OF_ONE_BIT.split())
    for name, value in t.below(_P).items():
        key = f"{_P}.{name}"
        if name in told or (name == "amsgrad" and value is True):
            continue
        if name == "bias_correction" and value is False:
            continue
        if name == "max_grad_norm":
            t.tell(key, "lost", "clip is the field: write gradient_clipping")
        elif name in _OF_KERNELS.split():
            t.tell(key, "unneeded", "it chooses an implementation of the same optimiser")
        elif name in _OF_ONE_BIT.split():
            t.tell(key, "lost", _ONE_BIT)
        else:
            t.tell(key, "unknown", f"{kind} has no such argument{nearest(name, known)}")


# ---- schedule ---------------------------------------------------------------------------------

_S = "scheduler.params"
_SCHEDULES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "LRRangeTest", "OneCycle")
_CURVES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_SCHEDULE_KEYS = {
    "WarmupLR": "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type last_batch_iteration",
    "WarmupDecayLR": "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type total_num_steps "
    "last_batch_iteration",
    "WarmupCosineLR": "warmup_min_ratio cos_min_ratio warmup_num_steps warmup_type "
    "total_num_steps last_batch_iteration",
}


def _scheduler(t: Translation, lr: float | None) -> None:
    kind = t.word("scheduler.type", _SCHEDULES) if t.has("scheduler.type") else None
    if kind is None:
        return
    if kind not in _CURVES:
        note = {
            "LRRangeTest": "`headway study RECIPE` trains a grid of rates and finds the best",
            "OneCycle": "its momentum is cycled as well; torch.optim.lr_scheduler:OneCycleLR is "
            "the nearest, with --set or in recipe.toml",
        }[kind]
        t.tell("scheduler.type", "lost", note)
        for name in t.below(_S):
            t.tell(f"{_S}.{name}", "lost", f"it is an argument of {kind}")
        return
    known = _SCHEDULE_KEYS[kind].split()
    given = t.below(_S)
    for name in given:
        if name not in known:
            t.tell(f"{_S}.{name}", "unknown", f"{kind} has no such argument{nearest(name, known)}")
    missing = [name for name in known[:-1] if t.is_auto(f"{_S}.{name}") and name != "warmup_max_lr"]
    if kind != "WarmupLR" and "total_num_steps" not in given and not missing:
        t.problem("scheduler.type", f"{kind} needs total_num_steps")
        return
    if missing:
        note = f'{", ".join(missing)} {"is" if len(missing) == 1 else "are"} "auto"; write a number'
        t.tell("scheduler.type", "lost", note)
        for name in (name for name in given if name in known):
            t.tell(f"{_S}.{name}", "lost", "without the others there is no schedule")
        return
    _curve(t, kind, lr, given)


def _curve(t: Translation, kind: str, lr: float | None, given: Mapping[str, Any]) -> None:
    """headway.optim:deepspeed_rates with the arguments of one of its schedules."""
    numbers: dict[str, float] = {}
    for name in given.keys() - {"warmup_type"}:
        try:
            numbers[name] = _rate(given[name])
        except ValueError as error:
            t.problem(f"{_S}.{name}", f"{given[name]!r} {error}")
    if len(numbers) < len(given.keys() - {"warmup_type"}):
        return
    steps = numbers.get("warmup_num_steps", 1000)
    for name in ("warmup_num_steps", "total_num_steps"):
        if name in numbers and (numbers[name] < 1 or numbers[name] != int(numbers[name])):
            t.problem(f"{_S}.{name}", f"{given[name]!r} is not a whole number of at least 1")
            return
    arguments: dict[str, Any] = {"warmup": int(steps)}
    shape = given.get("warmup_type", "log")
    if shape not in ("log", "linear"):
        t.problem(f"{_S}.warmup_type", f"{shape!r} is neither log nor linear")
        return
    arguments["shape"] = shape
    if kind == "WarmupCosineLR":
        arguments["start"] = numbers.get("warmup_min_ratio", 0.0)
        arguments["end"] = numbers.get("cos_min_ratio", 0.0001)
    else:
        top = numbers.get("warmup_max_lr", 1e-3 if kind == "WarmupDecayLR" else lr)
        if top is not None and t.is_auto(f"{_S}.warmup_max_lr"):
            top = lr
        if not top:
            t.tell("scheduler.type", "lost", "the rate that it goes up to is not known")
            for name in given:
                t.tell(f"{_S}.{name}", "lost", "without the rate there is no schedule")
            return
        low = numbers.get("warmup_min_lr", 0.0)
        arguments["start"] = low / top
        _top(t, lr, top)
    arguments["decay"] = _CURVES[kind]
    if "total_num_steps" in numbers:
        arguments["steps"] = int(numbers["total_num_steps"])
    call = call_of("headway.optim:deepspeed_rates", arguments)
    form = 'scheduler.call = "headway.optim:deepspeed_rates"'
    t.carry("scheduler.type", "scheduler", call, form=form)
    said = {
        "warmup_num_steps": f"scheduler.warmup = {arguments['warmup']}",
        "warmup_type": f'scheduler.shape = "{shape}"',
        "warmup_min_lr": f"scheduler.start = {arguments['start']:g}",
        "warmup_min_ratio": f"scheduler.start = {arguments['start']:g}",
        "cos_min_ratio": f"scheduler.end = {arguments.get('end', 0):g}",
        "total_num_steps": f"scheduler.steps = {arguments.get('steps', 0)}",
    }
    for name in given:
        if name in said:
            t.tell(f"{_S}.{name}", "carried", "", said[name])
    t.tell(f"{_S}.last_batch_iteration", "unneeded", "a resumed run knows its step")
    if "warmup_type" not in given:
        t.default(f"{_S}.warmup_type", "log", "scheduler.shape")
    if "warmup_num_steps" not in given:
        t.default(f"{_S}.warmup_num_steps", 1000, "scheduler.warmup")


def _top(t: Translation, lr: float | None, top: float) -> None:
    """The schedule's highest rate is what the optimiser is given: it overrides the other one."""
    found = t.fields.get("optimizer")
    if found is not None and top != lr:
        arguments = {**dict(found.arguments), "lr": top}
        t.fields["optimizer"] = replace(found, arguments=tuple(arguments.items()))
        if lr is not None:
            note = f"the schedule's warmup_max_lr overrides it: {top:g}"
            t.tell(f"{_P}.lr", "adapted", note, f"optimizer.lr = {top:g}")
    t.tell(f"{_S}.warmup_max_lr", "carried", "", f"optimizer.lr = {top:g}")


# ---- the rest ---------------------------------------------------------------------------------

_LOGGERS = {"tensorboard": "tensorboard", "wandb": "wandb", "csv_monitor": "csv"}


def _rest(t: Translation) -> None:
    clip = t.positive("gradient_clipping")
    if clip:
        t.carry("gradient_clipping", "clip", clip)
    elif clip == 0:
        t.tell("gradient_clipping", "off", "")
    if t.value("dataloader_drop_last") is not None:
        t.carry("dataloader_drop_last", "drop_last", t.value("dataloader_drop_last"))
    loggers = tuple(name for section, name in _LOGGERS.items() if t.enabled(section))
    if loggers:
        t.fields["loggers"] = loggers
    for section, name in _LOGGERS.items():
        if name in loggers:
            t.tell(f"{section}.enabled", "carried", "", f'loggers = ["{name}"]')
