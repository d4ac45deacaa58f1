"""DeepSpeed's configuration (JSON): batch, ZeRO, precision, optimiser, schedule and the rest.

Read from DeepSpeed 0.19: `runtime/config.py`, `runtime/constants.py`, `runtime/zero/config.py`,
`runtime/lr_schedules.py`. What is easily lost: its "Adam" is AdamW unless `adam_w_mode` says no,
and decays by 0 where torch's decays by 0.01; a scheduler's `warmup_max_lr` overrides the
optimiser's rate; `gradient_accumulation_steps` is the number of a pipeline's micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.documents import nearest
from headway.migration.batch_equation import BatchEquation, solve_batch
from headway.migration.key_table import Fate, KeyTable, Switch, adapted, carried, lost, unneeded
from headway.migration.settings import ImportedCall
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
        *carried("train_batch_size", "batch", "whole"),
        *carried(
            "train_micro_batch_size_per_gpu",
            "microbatch",
            "whole",
            "most samples of one forward pass of a rank",
        ),
        *adapted(
            "gradient_accumulation_steps",
            "batch",
            "whole",
            "headway derives it: batch / (microbatch x ranks); of a pipeline it is "
            "pipeline.microbatches",
        ),
        *unneeded("managed_gradient_accumulation", "headway counts micro-batches itself", "flag"),
        *adapted(
            "optimizer.type", "optimizer", "text", "Adam is AdamW unless adam_w_mode is false"
        ),
        *carried("optimizer.params. lr eps weight_decay", "optimizer", "number"),
        *carried(
            "optimizer.params.*",
            "optimizer",
            note="arguments of the optimiser; DeepSpeed's defaults are written out",
        ),
        *unneeded("optimizer.legacy_fusion", "it chooses a kernel", "flag"),
        *adapted(
            "scheduler.type",
            "scheduler",
            "text",
            "WarmupLR, WarmupDecayLR and WarmupCosineLR by headway.optim:deepspeed_rates",
        ),
        *carried("scheduler.params. warmup_num_steps total_num_steps", "scheduler", "whole"),
        *carried(
            "scheduler.params. warmup_min_lr warmup_max_lr warmup_min_ratio cos_min_ratio",
            "scheduler",
            "number",
        ),
        *carried("scheduler.params.*", "scheduler"),
        *carried("gradient_clipping", "clip", "number"),
        *adapted("zero_optimization", "zero", "flag", "true, of the first releases, is stage 1"),
        *carried(
            "zero_optimization.stage",
            "zero",
            "whole",
            "1 the optimiser's state, 2 gradients, too, 3 parameters, too",
        ),
        *carried(
            "zero_optimization.mics_shard_size",
            "shards",
            "whole",
            "ranks that keep the state together; the others are copies",
            idle=(-1, 0),
        ),
        *lost(
            "zero_optimization.zero_hpz_partition_size",
            "headway has no second copy of the parameters inside a node; shards = ranks of a node "
            "keeps all of the state there",
            "whole",
            idle=(0, 1),
        ),
        *lost(
            "zero_optimization. zero_quantized_weights zero_quantized_nontrainable_weights "
            "zero_quantized_gradients",
            "with zero headway exchanges exactly; exchange.compress is for zero = 0",
            "flag",
            idle=(False,),
        ),
        *lost("zero_optimization.zeropp_loco_param.*", "with zero headway exchanges exactly"),
        *lost(
            "zero_optimization. offload_param.device offload_optimizer.device",
            NVME,
            "text",
            idle=("none",),
        ),
        *lost(
            "zero_optimization. cpu_offload cpu_offload_params cpu_offload_param "
            "cpu_offload_use_pin_memory",
            NVME,
            "flag",
            idle=(False,),
        ),
        *unneeded(
            "zero_optimization. offload_param.nvme_path offload_param.buffer_count "
            "offload_param.buffer_size offload_param.max_in_cpu offload_param.pin_memory "
            "offload_optimizer.nvme_path offload_optimizer.buffer_count "
            "offload_optimizer.pin_memory offload_optimizer.pipeline_read "
            "offload_optimizer.pipeline_write offload_optimizer.pipeline "
            "offload_optimizer.fast_init offload_optimizer.ratio offload_optimizer.super_offload "
            "offload_optimizer.cpuadam_cores_perc offload_optimizer.buffer_size",
            "it is part of offloading, which headway has not",
        ),
        *lost("zero_optimization.zenflow.*", NVME),
        *unneeded(
            "zero_optimization. contiguous_gradients reduce_scatter "
            "use_multi_rank_bucket_allreduce allgather_partitions round_robin_gradients "
            "legacy_stage1",
            _BUCKETS,
            "flag",
        ),
        *unneeded(
            "zero_optimization.overlap_comm",
            "what is sent always overlaps with the backward pass",
            "flag",
        ),
        *unneeded("zero_optimization. reduce_bucket_size allgather_bucket_size", _BUCKETS, "whole"),
        *unneeded(
            "zero_optimization. sub_group_size prefetch_bucket_size param_persistence_threshold "
            "model_persistence_threshold max_live_parameters max_reuse_distance "
            "stage3_prefetch_bucket_size stage3_param_persistence_threshold "
            "stage3_model_persistence_threshold stage3_max_live_parameters "
            "stage3_max_reuse_distance stage3_module_granularity_threshold "
            "module_granularity_threshold",
            _GATHER,
            "whole",
        ),
        *unneeded(
            "zero_optimization. stage3_gather_16bit_weights_on_model_save "
            "stage3_gather_fp16_weights_on_model_save gather_16bit_weights_on_model_save",
            "`headway checkpoint convert RUN model.safetensors` writes the whole model",
            "flag",
        ),
        *unneeded(
            "zero_optimization. elastic_checkpoint load_from_fp32_weights "
            "pipeline_loading_checkpoint",
            "checkpoints are by logical name and load on any number of ranks",
            "flag",
        ),
        *unneeded(
            "zero_optimization. stage3_use_all_reduce_for_fetch_params "
            "use_all_reduce_for_fetch_params stage3_allgather_sequential allgather_sequential "
            "parameter_alignment mics_hierarchical_params_gather memory_efficient_linear "
            "override_module_apply log_trace_cache_warnings enable_sanity_checks "
            "save_muon_momentum_buffer_in_memory ignore_unused_parameters",
            "how DeepSpeed gathers parameters; FSDP2 gathers them here",
            "flag",
        ),
        *unneeded(
            "zero_optimization.leaf_module.*",
            "FSDP2 needs no leaves; modules are gathered by their size",
        ),
        *unneeded("zero_allow_untested_optimizer", "every optimiser may be used", "flag"),
        *unneeded("zero_force_ds_cpu_optimizer", "there is none", "flag"),
        *lost(
            "fp16.enabled",
            "headway computes in float32, float64 or bfloat16: the recipe has float32; write "
            'precision = "bfloat16" where the device has it',
            "flag",
            idle=(False,),
        ),
        *unneeded(
            "fp16. auto_cast loss_scale initial_scale_power loss_scale_window hysteresis "
            "consecutive_hysteresis min_loss_scale fp16_master_weights_and_grads",
            _LOSS_SCALE,
        ),
        *adapted(
            "bf16.enabled bfloat16.enabled",
            "precision",
            "flag",
            "autocast; parameters and the optimiser's state stay float32, as DeepSpeed's master "
            "weights",
            idle=(False,),
        ),
        *unneeded(
            "bf16.immediate_grad_update bf16.check_grad_overflow bf16.check_overflow "
            "bfloat16.immediate_grad_update",
            "a loss that is not finite stops the run",
            "flag",
        ),
        *lost(
            "bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states",
            "parameters, gradients and the optimiser's state stay float32",
            "flag",
            idle=(False,),
        ),
        *lost("amp.*", 'apex is not used; write precision = "bfloat16" where the device has it'),
        *adapted("torch_autocast.enabled", "precision", "flag", "with dtype bfloat16"),
        *adapted("torch_autocast.dtype", "precision", "text", "bfloat16 only"),
        *lost("torch_autocast.lower_precision_safe_modules", "torch's own lists of operators hold"),
        *lost(
            "data_types.grad_accum_dtype", "gradients are summed in float32", "text", idle=("fp32",)
        ),
        *lost(
            "data_types. param_dtype buffer_dtype",
            "parameters and buffers keep the type that the model gives them",
            "text",
        ),
        *unneeded(
            "data_types.keep_in_fp32_modules",
            "autocast leaves all parameters and buffers in their type",
        ),
        *adapted(
            "communication_data_type",
            "exchange.compress",
            "text",
            "with zero = 0: gradients travel as fp16 or bf16",
            idle=("fp32",),
        ),
        *unneeded(
            "seq_parallel_communication_data_type", "headway has no sequence parallelism", "text"
        ),
        *carried("gradient_allreduce_op", "exchange.reduce", "text", idle=("mean",)),
        *unneeded(
            "prescale_gradients gradient_predivide_factor",
            "losses are divided by the global count before they are summed",
        ),
        *lost(
            "sparse_gradients",
            'embeddings of which only used rows travel are split.tables = "row"',
            "flag",
            idle=(False,),
        ),
        *unneeded("disable_allgather", "it chooses a collective", "flag"),
        *unneeded(
            "zero_optimization.compute_grad_norm",
            "headway computes the norm of gradients where it clips them",
            "flag",
        ),
        *unneeded("disable_python_gc", "Python collects garbage as it likes", "flag"),
        *unneeded(
            "use_data_before_expert_parallelism", "headway has no expert parallelism", "flag"
        ),
        *lost(
            "activation_checkpointing. partition_activations cpu_checkpointing "
            "contiguous_memory_optimization synchronize_checkpoint_boundary profile",
            _RECOMPUTE,
            "flag",
            idle=(False,),
        ),
        *lost("activation_checkpointing.number_checkpoints", _RECOMPUTE, "whole"),
        *carried("pipeline.stages", "stages", "whole"),
        *adapted(
            "pipeline.partition",
            "pipeline.balance",
            "text",
            '"parameters"; others: balance = "time", or pipeline.cut names the modules',
        ),
        *adapted(
            "pipeline.activation_checkpoint_interval",
            "pipeline.recompute",
            "whole",
            "blocks, one at a time",
        ),
        *unneeded("pipeline.seed_layers", "a seed depends on nothing but itself", "flag"),
        *unneeded(
            "pipeline. pipe_partitioned grad_partitioned use_reentrant",
            "how DeepSpeed sends activations",
            "flag",
        ),
        *carried(
            "tensor_parallel.autotp_size",
            "split.tensor",
            "whole",
            "linear layers over so many ranks",
            idle=(0, 1),
        ),
        *unneeded(
            "tensor_parallel.*", "which layers are split, split.only and split.whole say by name"
        ),
        *lost(
            "sequence_parallel_size",
            "headway has no sequence parallelism; these ranks take shares of the batch",
            "whole",
            idle=(0, 1),
        ),
        *lost("expert_parallel.*", "headway has no expert parallelism; every rank has all experts"),
        *carried("dataloader_drop_last", "drop_last", "flag"),
        *unneeded(
            "steps_per_print",
            "`headway train` shows its progress, and the run directory has every step",
            "number",
        ),
        *unneeded("wall_clock_breakdown memory_breakdown dump_state", HOST, "flag"),
        *unneeded("log_level", "Python's logging decides", "text"),
        *carried("tensorboard.enabled", "loggers", "flag", "into the run directory"),
        *carried("wandb.enabled", "loggers", "flag"),
        *carried("csv_monitor.enabled", "loggers", "flag", "metrics.csv in the run directory"),
        *unneeded(
            "tensorboard.output_path tensorboard.job_name csv_monitor.output_path "
            "csv_monitor.job_name",
            "records are in the run directory",
            "text",
        ),
        *lost(
            "wandb. project team group", "set WANDB_PROJECT, WANDB_ENTITY, WANDB_RUN_GROUP", "text"
        ),
        *lost(
            "comet.*",
            "loggers may be a function that returns a logger: one that makes a Comet experiment",
        ),
        *unneeded(
            "flops_profiler.*",
            "`headway report RUN` and `headway explain` show time and work by layer",
        ),
        *unneeded("comms_logger.*", "the run's report shows what each exchange sends"),
        *lost("autotuning.*", "`headway plan RECIPE` and `headway train --plan auto` search plans"),
        *lost(
            "elasticity.*", "the global batch stays what it is, on any number of ranks: --batch N"
        ),
        *unneeded("aio.*", "headway does not offload to disks"),
        *lost("sparse_attention.*", MODEL),
        *lost("progressive_layer_drop.*", MODEL),
        *lost("compression_training.*", MODEL),
        *lost("quantize_training.*", MODEL),
        *lost("eigenvalue.*", MODEL),
        *lost("hybrid_engine.*", "headway trains; it does not generate"),
        *lost(
            "curriculum_learning.* data_efficiency.*",
            "the order of samples is the data's: a `Source` may give harder ones later",
        ),
        *unneeded(
            "checkpoint. tag_validation load_universal use_node_local_storage "
            "parallel_write.pipeline_stage writer.* checkpoint_serialization",
            "checkpoints are by logical name, written by all ranks, and load on any number of them",
        ),
        *unneeded("nebula.* datastates_ckpt.*", "checkpoints are asynchronous already"),
        *lost(
            "compile.* graph_harvesting vocabulary_size",
            "apply torch.compile in the function that builds the model",
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
        instead = "" if found.copies is not None else "how many with --processes, or "
        note = f"{found}: say {instead}the batch with --batch"
        for name in (_M, _A):
            t.tell(name, "lost", note)
    else:
        t.carry(_B, "batch", found.batch)
    _micro_batches(t, found, stages)


def _micro_batches(t: Translation, found: BatchEquation, stages: int) -> None:
    if stages > 1 and found.accumulation is not None:
        note = "the micro-batches of a pipeline's step"
        t.carry(_A, "pipeline.microbatches", found.accumulation, note)
        t.tell(_M, "adapted", f"{found}", "pipeline.microbatches")
        return
    if found.batch is None:
        return
    if found.micro is not None:
        t.carry(_M, "microbatch", found.micro)
    if found.micro is None and (found.accumulation or 1) > 1:
        t.tell(_A, "lost", f"{found}: say how many with --processes")
        return
    t.tell(_A, "adapted", "headway accumulates what exceeds microbatch", str(found))


def carry_zero_stage(t: Translation, name: str) -> int | None:
    """A stage of ZeRO, 0 to 3; another number is a problem."""
    stage = t.whole(name, least=0)
    if stage is not None and stage > 3:
        t.problem(name, f"{stage} is no stage of ZeRO; 0, 1, 2 or 3")
    elif stage is not None:
        t.carry(name, "zero", stage)
    return stage


def _zero(t: Translation) -> None:
    whole = t.value("zero_optimization")
    if whole is not None:
        # Of DeepSpeed's first releases: true is stage 1.
        t.carry("zero_optimization", "zero", int(whole), "true is stage 1")
    stage = carry_zero_stage(t, "zero_optimization.stage")
    shards = t.value("zero_optimization.mics_shard_size")
    if stage is not None and shards is not None and shards > 0:
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
_OF_TORCH = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adamax", "LBFGS", "NAdam", "RAdam", "RMSprop",
    "Rprop", "SGD", "SparseAdam",
)  # fmt: skip
_OTHERS = ("Lamb", "OneBitLamb", "Lion", "Muon", "MuAdam", "MuAdamW", "MuSGD", *_OF_TORCH)
# Of Adam, AdamW and Lamb. What is not said would be torch's, whose AdamW decays by 0.01.
_DEFAULTS: Mapping[str, Any] = {
    "lr": 1e-3,
    "betas": [0.9, 0.999],
    "eps": 1e-8,
    "weight_decay": 0.0,
}
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
    if kind in _OF_TORCH:
        return _of_torch(t, kind)
    note = "neither torch nor headway has it as it is; name a function of yours with --optimizer"
    t.tell("optimizer.type", "lost", note)
    for name in t.below(_P):
        t.tell(f"{_P}.{name}", "lost", f"it is an argument of {kind}")
    return None


def _adam(t: Translation, kind: str) -> float | None:
    decoupled = kind != "Adam" or t.below(_P).get("adam_w_mode", True) is not False
    call = f"torch.optim:{'AdamW' if decoupled else 'Adam'}"
    arguments = _arguments(t)
    if t.below(_P).get("amsgrad") is True:
        arguments["amsgrad"] = True
        t.tell(f"{_P}.amsgrad", "carried", "", "optimizer.amsgrad = true")
    note = {
        "Adam": "adam_w_mode is true by default: the decay is AdamW's" if decoupled else "",
        "AdamW": "",
    }.get(kind, _ONE_BIT)
    t.carry("optimizer.type", "optimizer", _made(t, call, arguments), note, form=_call(call))
    if t.below(_P).get("bias_correction") is False:
        lost = "torch's Adam always corrects its bias"
        t.tell(f"{_P}.bias_correction", "lost", lost)
    fate: Fate = "adapted" if kind == "Adam" else "unneeded"
    t.tell(f"{_P}.adam_w_mode", fate, "true: AdamW, false: Adam", _call(call))
    _left_arguments(t, kind)
    return float(arguments["lr"]) if "lr" in arguments else None


def _lamb(t: Translation, kind: str) -> float | None:
    arguments = _arguments(t)
    given = t.below(_P)
    low, high = given.get("min_coeff", 0.01), given.get("max_coeff", 10.0)
    note = (
        "DeepSpeed bounds the trust ratio by min_coeff and max_coeff, headway.optim.LAMB the norm "
        "of the weights by clamp, which is left out"
    )
    if kind == "OneBitLamb":
        note = f"{note}; {_ONE_BIT}"
    if given.get("bias_correction") is False:
        arguments["bias_correction"] = False
        t.tell(f"{_P}.bias_correction", "carried", "", "optimizer.bias_correction = false")
    arguments["exclude_1d"] = False
    made = _made(t, "headway.optim:LAMB", arguments)
    t.carry("optimizer.type", "optimizer", made, note, form=_call(made.call))
    for name, value in (("min_coeff", low), ("max_coeff", high)):
        t.tell(f"{_P}.{name}", "lost", f"a bound of {value} on the trust ratio: headway has none")
    _left_arguments(t, kind)
    return float(arguments["lr"]) if "lr" in arguments else None


def _of_torch(t: Translation, kind: str) -> float | None:
    arguments = t.below(_P)
    for name, value in arguments.items():
        t.tell(f"{_P}.{name}", "carried", "", f"optimizer.{name} = {value!r}")
    made = _made(t, f"torch.optim:{kind}", arguments)
    t.carry("optimizer.type", "optimizer", made, form=_call(made.call))
    lr = arguments.get("lr")
    return float(lr) if isinstance(lr, int | float) else None


def _made(t: Translation, call: str, arguments: Mapping[str, Any]) -> ImportedCall:
    # No default of a rate is what the user had: "auto" is the Trainer's 5e-5, or the command's.
    gaps = ("lr",) if t.is_auto(f"{_P}.lr") else ()
    return ImportedCall.of(call, arguments, gaps)


def _call(call: str) -> str:
    return f'optimizer.call = "{call}"'


def _arguments(t: Translation) -> dict[str, Any]:
    """The arguments of Adam and Lamb, with DeepSpeed's defaults; tells what they became."""
    found = dict[str, Any]()
    for name, default in _DEFAULTS.items():
        key = f"{_P}.{name}"
        said = _betas(t, key) if name == "betas" else t.positive(key)
        if said is None and name == "lr" and t.is_auto(key):
            continue
        found[name] = default if said is None else said
        became = f"optimizer.{name} = {found[name]}"
        if said is None:
            # The Trainer of transformers has the same defaults as DeepSpeed, but for the rate.
            t.tell(key, "adapted", "DeepSpeed's default, and the Trainer's", became)
            t.default(key, default, became)
        else:
            t.tell(key, "carried", "", became)
    return found


def _betas(t: Translation, key: str) -> list[float] | None:
    """Two numbers from 0 to below 1; others are a problem."""
    said = t.value(key)
    if said is None:
        return None
    if isinstance(said, list) and len(said) == 2:
        numbers = [b for b in said if isinstance(b, int | float) and not isinstance(b, bool)]
        if len(numbers) == 2 and all(0 <= b < 1 for b in numbers):
            return [float(b) for b in numbers]
    t.problem(key, f"{said!r} is not two numbers from 0 to below 1")
    return None


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
            t.tell(key, "lost", f"it is part of {kind}'s compression")
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
    warmup, total = t.whole(f"{_S}.warmup_num_steps"), t.whole(f"{_S}.total_num_steps")
    numbers = {
        name: t.positive(f"{_S}.{name}")
        for name in ("warmup_min_lr", "warmup_max_lr", "warmup_min_ratio", "cos_min_ratio")
    }
    shape = given.get("warmup_type", "log")
    if shape not in ("log", "linear"):
        t.problem(f"{_S}.warmup_type", f"{shape!r} is neither log nor linear")
    if t.problems:
        return
    arguments: dict[str, Any] = {"warmup": warmup or 1000}
    arguments["shape"] = shape
    if kind == "WarmupCosineLR":
        end = numbers["cos_min_ratio"]
        arguments["start"] = numbers["warmup_min_ratio"] or 0.0
        arguments["end"] = 0.0001 if end is None else end
    else:
        top = numbers["warmup_max_lr"]
        if top is None:
            of_decay = kind == "WarmupDecayLR" and not t.is_auto(f"{_S}.warmup_max_lr")
            top = 1e-3 if of_decay else lr
        if not top:
            t.tell("scheduler.type", "lost", "the rate that it goes up to is not known")
            for name in given:
                t.tell(f"{_S}.{name}", "lost", "without the rate there is no schedule")
            return
        if kind == "WarmupDecayLR":
            t.default(f"{_S}.warmup_max_lr", top, f"optimizer.lr = {top:g}")
        arguments["start"] = (numbers["warmup_min_lr"] or 0.0) / top
        _top(t, lr, top)
    arguments["decay"] = _CURVES[kind]
    if total is not None:
        arguments["steps"] = total
    call = ImportedCall.of("headway.optim:deepspeed_rates", arguments)
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
    t.default(f"{_S}.warmup_type", "log", 'scheduler.shape = "log"')
    t.default(f"{_S}.warmup_num_steps", 1000, "scheduler.warmup = 1000")


def _top(t: Translation, lr: float | None, top: float) -> None:
    """The schedule's highest rate is what the optimiser is given: it overrides the other one."""
    found, became = t.fields.get("optimizer"), f"optimizer.lr = {top:g}"
    if found is None:
        t.fields["lr"] = top
    elif top != lr:
        arguments = {"lr": top} | dict(found.arguments) | {"lr": top}
        t.fields["optimizer"] = ImportedCall.of(found.call, arguments)
        note = f"the schedule's warmup_max_lr overrides it: {top:g}"
        t.tell(f"{_P}.lr", "adapted", note, became)
    t.tell(f"{_S}.warmup_max_lr", "carried", "", became)


# ---- the rest ---------------------------------------------------------------------------------


def _rest(t: Translation) -> None:
    clip = t.positive("gradient_clipping")
    if clip:
        t.carry("gradient_clipping", "clip", clip)
    elif clip == 0:
        t.tell("gradient_clipping", "off", "")
    if t.value("dataloader_drop_last") is not None:
        t.carry("dataloader_drop_last", "drop_last", t.value("dataloader_drop_last"))
    t.loggers(
        {
            "tensorboard": "tensorboard.enabled",
            "wandb": "wandb.enabled",
            "csv": "csv_monitor.enabled",
        }
    )
