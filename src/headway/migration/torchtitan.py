"""torchtitan's job configuration (TOML), from its first release to the last one that had TOML.

Read from the revisions of `torchtitan/config_manager.py` and `torchtitan/config/job_config.py`
before the change to Python configurations (torchtitan pull request 2386, 2026). Keys moved between
sections and changed their names; the table has all of them. Much of a run is not in its file:
torchtitan's defaults (bfloat16, clipping at 1, a warm-up of 200 steps and a decay, AdamW with betas
0.9 and 0.95 and decay 0.1, sharding over all ranks that are left) are told beside the keys.
"""

from __future__ import annotations

from typing import Any

from headway.migration.batch_equation import BatchEquation, solve_batch
from headway.migration.key_table import Key, KeyTable, Switch
from headway.migration.optimizers import ADAM, ADAMW, call_of
from headway.migration.translation import Translation

_MODEL = "name the function that builds your model with --model"
_DATA = "name the function that makes your data with --data, or write [data] memmap = FILE"
_RUN = "the run directory has checkpoints, records and reports: `headway train --directory`"
_SAC = (
    "call torch.utils.checkpoint in the model; stages of a pipeline recompute by "
    'pipeline.recompute = "blocks"'
)
_COMPILE = "apply torch.compile in the function that builds the model"
_CONTEXT = "headway does not split sequences; these ranks take shares of the batch"
_EXPERT = "headway has no expert parallelism; experts are sharded as other layers are"
_FLOAT8 = "headway has no float8; bfloat16 is autocast"
_HF = "`headway checkpoint convert` reads and writes safetensors"


def _named(prefix: str, names: str, **facts: Any) -> tuple[Key, ...]:
    return tuple(Key(name=f"{prefix}{name}", **facts) for name in names.split())


_DP_REPLICATE = (
    "parallelism.data_parallel_replicate_degree",
    "training.data_parallel_replicate_degree",
)
_DP_SHARD = ("parallelism.data_parallel_shard_degree", "training.data_parallel_shard_degree")
_DP = ("training.data_parallel_degree",)
_TP = ("parallelism.tensor_parallel_degree", "training.tensor_parallel_degree")
_PP = (
    "parallelism.pipeline_parallel_degree",
    "experimental.pipeline_parallel_degree",
    "training.pipeline_parallel_degree",
)
_CP = ("parallelism.context_parallel_degree", "experimental.context_parallel_degree")
_LOCAL = ("training.local_batch_size", "training.batch_size")
_WARMUP = ("lr_scheduler.warmup_steps", "training.warmup_steps")
_LOWEST = ("lr_scheduler.min_lr_factor", "lr_scheduler.lr_min")
_SEED = ("debug.seed", "training.seed")
_CHECKPOINT = ("checkpoint.enable", "checkpoint.enable_checkpoint")
_SPLIT_POINTS = (
    "parallelism.pipeline_parallel_split_points",
    "experimental.pipeline_parallel_split_points",
)
_SCHEDULE = (
    "parallelism.pipeline_parallel_schedule",
    "experimental.pipeline_parallel_schedule",
)

TABLE = KeyTable(
    title="torchtitan",
    switches=(
        Switch(section="checkpoint", keys=("enable", "enable_checkpoint")),
        Switch(section="profiling", keys=("enable_profiling", "run_profiler")),
        Switch(section="validation", keys=("enable", "enabled")),
        Switch(section="fault_tolerance", keys=("enable",)),
        Switch(section="memory_estimation", keys=("enable", "enabled")),
    ),
    keys=(
        *_named("job.", "config_file description dump_folder", note=_RUN),
        *_named(
            "job.",
            "print_args print_config save_config_file use_for_integration_test",
            note="the run directory holds recipe and plan",
        ),
        Key(
            name="job.custom_config_module",
            fate="lost",
            note="a recipe is Python or TOML; write what it adds there",
        ),
        # Model and data
        *_named("model.", "name flavor", kind="text", fate="lost", note=_MODEL),
        Key(
            name="model.hf_assets_path",
            fate="lost",
            note="weights = DIRECTORY starts from a model that `save_pretrained` has written",
        ),
        Key(name="model.tokenizer_path", fate="lost", note=_DATA),
        *_named(
            "model.",
            "norm_type use_flex_attn attn_mask_type print_after_conversion",
            fate="lost",
            note=_MODEL,
        ),
        Key(name="model.converters", fate="lost", note=_FLOAT8),
        *_named("training.", "dataset dataset_path", fate="lost", note=_DATA),
        Key(name="training.seq_len", kind="whole", fate="carried", field="tokens_per_sample"),
        Key(name="training.dataloader.num_workers", kind="whole", fate="carried", field="workers"),
        *_named(
            "training.dataloader.",
            "persistent_workers pin_memory prefetch_factor",
            note="headway starts and feeds its loader processes itself",
        ),
        # Batch and length
        *_named(
            "training.",
            "local_batch_size batch_size",
            kind="whole",
            fate="adapted",
            field="batch",
            note="of one rank; headway states the global batch",
        ),
        Key(
            name="training.global_batch_size",
            kind="whole",
            fate="carried",
            field="batch",
            idle=(-1,),
        ),
        Key(name="training.steps", kind="whole", fate="carried", field="stop"),
        Key(name="training.max_norm", kind="number", fate="carried", field="clip"),
        # Precision
        Key(
            name="training.mixed_precision_param",
            kind="text",
            fate="adapted",
            field="precision",
            note="autocast",
        ),
        Key(
            name="training.mixed_precision_reduce",
            kind="text",
            fate="lost",
            idle=("float32",),
            note="gradients are summed in their own type, float32",
        ),
        Key(
            name="training.dtype",
            kind="text",
            fate="lost",
            idle=("float32",),
            note="parameters have the type that the model gives them",
        ),
        Key(
            name="training.enable_cpu_offload",
            kind="flag",
            fate="lost",
            idle=(False,),
            note="headway keeps all state in the memory of the device; use more ranks",
        ),
        *_named(
            "training.",
            "gc_freq gc_debug",
            note="Python collects garbage as it likes; it has no setting here",
        ),
        Key(name="training.compile", kind="flag", fate="lost", note=_COMPILE, idle=(False,)),
        Key(
            name="training.deterministic",
            kind="flag",
            note="sample order and random numbers depend on the seed alone; of a GPU's kernels "
            "torch.use_deterministic_algorithms decides",
        ),
        Key(name="training.seed", kind="whole", fate="carried", field="seed"),
        Key(name="training.warmup_steps", kind="whole", fate="carried", field="scheduler.warmup"),
        Key(
            name="training.warmup_pct",
            kind="number",
            fate="adapted",
            field="scheduler.warmup",
            note="a part of all steps",
        ),
        Key(
            name="training.data_parallel_type",
            kind="text",
            fate="lost",
            idle=("fsdp",),
            note="zero = 0 is ddp",
        ),
        *_named(
            "training.",
            "fp8_linear enable_float8_linear enable_fsdp_float8_all_gather "
            "precompute_float8_dynamic_scale_for_fsdp float8_scaling_type_input "
            "float8_scaling_type_weight float8_scaling_type_grad_output",
            fate="lost",
            note=_FLOAT8,
            idle=(False, ""),
        ),
        # Parallelism
        *(
            Key(
                name=name,
                kind="whole",
                fate="adapted",
                field="shards",
                note="copies of the ranks that keep the state together",
            )
            for name in _DP_REPLICATE
        ),
        *(
            Key(
                name=name,
                kind="whole",
                fate="adapted",
                field="zero",
                note="zero = 3 over so many ranks; -1: over all that are left",
            )
            for name in _DP_SHARD
        ),
        Key(
            name="training.data_parallel_degree",
            kind="whole",
            fate="adapted",
            field="zero",
            note="zero = 3 over so many ranks; -1: over all that are left",
        ),
        *(
            Key(name=name, kind="whole", fate="carried", field="split.tensor", idle=(1,))
            for name in _TP
        ),
        Key(
            name="training.sequence_parallel_degree",
            kind="whole",
            fate="lost",
            idle=(1,),
            note="the first releases' tensor parallelism; write split.tensor = [N]",
        ),
        *(Key(name=name, kind="whole", fate="carried", field="stages", idle=(1,)) for name in _PP),
        *(Key(name=name, kind="whole", fate="lost", note=_CONTEXT, idle=(1,)) for name in _CP),
        *_named(
            "parallelism.",
            "context_parallel_rotate_method context_parallel_load_balancer",
            note="it is part of splitting sequences",
        ),
        Key(
            name="parallelism.fsdp_reshard_after_forward",
            kind="text",
            fate="adapted",
            field="zero",
            note="always: zero = 3; never: zero = 2; default: 3, and 2 with stages",
        ),
        *_named(
            "",
            "parallelism.disable_loss_parallel training.enable_loss_parallel",
            note="logits are gathered before the loss",
        ),
        *_named(
            "",
            "parallelism.enable_async_tensor_parallel experimental.enable_async_tensor_parallel "
            "parallelism.enable_compiled_autograd experimental.enable_compiled_autograd",
            fate="lost",
            note="split layers exchange between operators",
            idle=(False,),
        ),
        *(
            Key(name=name, kind="text", fate="carried", field="pipeline.schedule")
            for name in _SCHEDULE
        ),
        *_named(
            "",
            "parallelism.pipeline_parallel_schedule_csv",
            kind="text",
            fate="lost",
            note="`headway train RECIPE --schedule TABLE.csv` runs a table of torch's form",
        ),
        *(
            Key(
                name=name,
                kind="list",
                fate="adapted",
                field="pipeline.cut",
                note="names of the modules with which the second and later stages begin",
            )
            for name in _SPLIT_POINTS
        ),
        Key(
            name="parallelism.pipeline_parallel_microbatch_size",
            kind="whole",
            fate="carried",
            field="microbatch",
        ),
        Key(
            name="experimental.pipeline_parallel_microbatches",
            kind="whole",
            fate="carried",
            field="pipeline.microbatches",
        ),
        Key(
            name="experimental.pipeline_parallel_split_mode",
            kind="text",
            note="the model is cut where pipeline.cut or its parameters say",
        ),
        *_named(
            "parallelism.",
            "pipeline_parallel_layers_per_stage pipeline_parallel_first_stage_less_layers "
            "pipeline_parallel_last_stage_less_layers module_fqns_per_model_part",
            fate="lost",
            note="stages of equal numbers of parameters, or of equal time with "
            'pipeline.balance = "time"; pipeline.cut names the modules',
        ),
        *_named(
            "parallelism.",
            "expert_parallel_degree expert_tensor_parallel_degree",
            kind="whole",
            fate="lost",
            note=_EXPERT,
            idle=(1,),
        ),
        *_named(
            "parallelism.",
            "expert_parallel_comm_backend pipeline_parallel_expert_parallel_overlap "
            "expert_parallel_a2a_impl",
            note="it is part of expert parallelism",
        ),
        Key(name="experimental.torch_spmd", kind="flag", fate="lost", note=_MODEL, idle=(False,)),
        *_named(
            "experimental.",
            "custom_import custom_args_module",
            fate="lost",
            note=_MODEL,
            idle=("",),
        ),
        # Optimiser and schedule
        Key(name="optimizer.name", kind="text", fate="carried", field="optimizer"),
        *_named(
            "optimizer.",
            "lr beta1 beta2 eps weight_decay",
            kind="number",
            fate="carried",
            field="optimizer",
        ),
        *_named(
            "optimizer.",
            "implementation fused",
            note="it chooses an implementation of the same optimiser",
        ),
        Key(
            name="optimizer.early_step_in_backward",
            kind="flag",
            fate="lost",
            idle=(False,),
            note="exchange.priority steps bucket by bucket, exactly, with zero = 0",
        ),
        Key(
            name="lr_scheduler.warmup_steps", kind="whole", fate="carried", field="scheduler.warmup"
        ),
        Key(name="lr_scheduler.total_steps", kind="whole", fate="carried", field="scheduler.steps"),
        Key(
            name="lr_scheduler.decay_ratio",
            kind="number",
            fate="carried",
            field="scheduler.decay_ratio",
        ),
        Key(name="lr_scheduler.decay_type", kind="text", fate="carried", field="scheduler.shape"),
        *_named(
            "lr_scheduler.",
            "min_lr_factor lr_min",
            kind="number",
            fate="carried",
            field="scheduler.end",
        ),
        # Checkpoints, validation, records
        *(
            Key(
                name=name,
                kind="flag",
                fate="carried",
                field="checkpoint_every",
                note="headway always writes one at the end",
            )
            for name in _CHECKPOINT
        ),
        Key(name="checkpoint.interval", kind="whole", fate="carried", field="checkpoint_every"),
        Key(
            name="checkpoint.interval_type",
            kind="text",
            fate="lost",
            idle=("steps",),
            note="steps only",
        ),
        Key(name="checkpoint.keep_latest_k", kind="whole", fate="carried", field="checkpoint_keep"),
        *_named("checkpoint.", "folder create_seed_checkpoint", note=_RUN),
        Key(
            name="checkpoint.async_mode",
            kind="text",
            note="checkpoints are always written while training goes on",
        ),
        *_named(
            "checkpoint.",
            "export_dtype last_save_model_only last_save_in_hf model_weights_only "
            "initial_load_in_hf initial_load_in_hf_quantized initial_load_model_only",
            note=_HF,
        ),
        Key(
            name="checkpoint.initial_load_path",
            fate="lost",
            note="weights = FILE starts from a model, --resume continues a run; " + _HF,
        ),
        *_named(
            "checkpoint.",
            "load_step exclude_from_loading load_only",
            fate="lost",
            note="a run continues from its newest checkpoint; weights_only chooses tensors",
            idle=(-1, False),
        ),
        *_named(
            "checkpoint.",
            "enable_first_step_checkpoint enable_ft_dataloader_checkpoints",
            note="a run that dies before its first checkpoint begins again",
        ),
        *_named(
            "validation.",
            "enable enabled",
            kind="flag",
            fate="adapted",
            field="validate_every",
            note="[validation] names its data: --validation",
        ),
        Key(name="validation.freq", kind="whole", fate="carried", field="validate_every"),
        Key(
            name="validation.steps",
            kind="whole",
            fate="adapted",
            field="validation_samples",
            note="in samples: steps x local_batch_size x copies",
            idle=(-1,),
        ),
        Key(
            name="validation.local_batch_size",
            kind="whole",
            note="validation uses the micro-batches of training",
        ),
        *_named(
            "validation.",
            "dataset dataset_path seq_len dataloader.*",
            fate="lost",
            note="name the function that makes it: [validation] call = MODULE:NAME",
        ),
        Key(
            name="metrics.enable_tensorboard",
            kind="flag",
            fate="carried",
            field="loggers",
            idle=(False,),
        ),
        Key(
            name="metrics.enable_wandb", kind="flag", fate="carried", field="loggers", idle=(False,)
        ),
        *_named(
            "metrics.",
            "log_freq disable_color_printing enable_color_printing save_tb_folder rank_0_only "
            "save_for_all_ranks",
            note="every step is recorded, by rank 0",
        ),
        Key(name="profiling.*", note="--trace-steps N: a timeline every N steps"),
        Key(name="memory_estimation.*", note="`headway plan RECIPE --cluster C` shows the memory"),
        Key(
            name="activation_checkpoint.mode",
            kind="text",
            fate="adapted",
            field="pipeline.recompute",
            note=_SAC,
            idle=("none",),
        ),
        Key(name="activation_checkpoint.*", note="it is part of activation checkpointing"),
        Key(name="compile.enable", kind="flag", fate="lost", note=_COMPILE, idle=(False,)),
        Key(name="compile.*", note="it is part of compiling"),
        *_named("", "float8.* mx.* quantize.*", fate="lost", note=_FLOAT8),
        # Communication and faults
        *_named(
            "comm.",
            "init_timeout_seconds train_timeout_seconds",
            kind="whole",
            fate="adapted",
            field="timeout",
            note="headway train --timeout: one for all waits, the longer of the two",
        ),
        *_named(
            "comm.",
            "trace_buf_size save_traces_folder save_traces_file_prefix",
            note="a wait that ends names the rank that is missing",
        ),
        Key(
            name="comm.mode",
            kind="text",
            fate="lost",
            idle=("default",),
            note="`headway simulate plan.json` needs no devices",
        ),
        Key(
            name="fault_tolerance.*",
            fate="lost",
            note="workers that agree in rounds survive one another's death: see synchrony; dead "
            "workers are started again (--restarts)",
        ),
        Key(name="debug.seed", kind="whole", fate="carried", field="seed"),
        *_named(
            "debug.",
            "deterministic deterministic_warn_only",
            note="sample order and random numbers depend on the seed alone; of a GPU's "
            "kernels torch.use_deterministic_algorithms decides",
        ),
        Key(
            name="debug.moe_force_load_balance",
            kind="flag",
            fate="lost",
            note=_MODEL,
            idle=(False,),
        ),
    ),
)


def translate(t: Translation, processes: int | None, batch: int | None) -> None:
    """Translate a torchtitan configuration.

    Args:
        processes: Of the whole job; None: where no degree is -1, their product.
        batch: In place of the file's.
    """
    copies = _parallel(t, processes)
    _batch(t, copies, batch)
    _run(t)
    _optimizer(t)
    _scheduler(t)
    _records(t, copies)


# ---- parallelism ------------------------------------------------------------------------------


def _parallel(t: Translation, processes: int | None) -> int | None:
    """Translate the degrees; returns the number of shares of the batch."""
    tensor, pipe = t.whole(*_TP) or 1, t.whole(*_PP) or 1
    context, copies = t.whole(*_CP) or 1, t.whole(*_DP_REPLICATE) or 1
    shard_names = (*_DP_SHARD, *_DP)
    shards = t.value(*shard_names)
    shards = -1 if shards is None else int(shards)
    if shards == 0 or shards < -1:
        t.problem(t.named(*shard_names), f"{shards} is neither -1 nor at least 1")
        return None
    rest = copies * tensor * pipe * context
    if shards == -1 and processes is not None:
        if processes % rest:
            t.problem(
                t.named(*shard_names),
                f"{processes} processes are no multiple of the other degrees, {rest}",
            )
            return None
        shards = processes // rest
    if shards == -1:
        t.tell(t.named(*shard_names), "lost", "over all that are left: say --processes")
    elif processes is not None and processes != rest * shards:
        t.problem(
            t.named(*shard_names),
            f"the degrees are {rest * shards} processes, and --processes says {processes}",
        )
        return None
    else:
        t.fields["processes"] = rest * shards
    if tensor > 1:
        t.carry(t.named(*_TP), "split.tensor", (tensor,))
    if pipe > 1:
        t.carry(t.named(*_PP), "stages", pipe)
    _sharding(t, shards, copies, pipe, context)
    return None if shards == -1 else copies * shards


def _sharding(t: Translation, shards: int, copies: int, pipe: int, context: int) -> None:
    names = (*_DP_SHARD, *_DP)
    key = "parallelism.fsdp_reshard_after_forward"
    policy = t.word(key, ("default", "always", "never"))
    over = shards * context if shards > 0 else -1
    if over == 1:
        t.tell(t.named(*names), "carried", "", "zero = 0: not sharded")
        t.tell(t.named(*_DP_REPLICATE), "carried", "", f"{copies} copies")
        return
    zero = 2 if policy == "never" or (policy in (None, "default") and pipe > 1) else 3
    t.fields["zero"] = zero
    became = f"zero = {zero}"
    if copies > 1 and over > 0:
        t.fields["shards"] = over
        became = f"{became}, shards = {over}"
        t.tell(t.named(*_DP_REPLICATE), "carried", "", f"{copies} copies of {over} ranks")
    elif copies == 1:
        t.tell(t.named(*_DP_REPLICATE), "off", "")
    if over > 0:
        t.tell(t.named(*names), "carried", "", became)
    t.default(t.named(*names), -1, became)
    t.tell(key, "carried", "", f"zero = {zero}")


# ---- batch ------------------------------------------------------------------------------------


def _batch(t: Translation, copies: int | None, given: int | None) -> None:
    local = t.whole(*_LOCAL)
    if local is None:
        local = 8
        t.default("training.local_batch_size", 8, "batch")
    whole = t.value("training.global_batch_size")
    whole = None if whole is None or whole == -1 else t.whole("training.global_batch_size")
    if given is not None and whole is not None and given != whole:
        t.problem("training.global_batch_size", f"it is {whole}, and --batch says {given}")
        return
    known = BatchEquation(batch=whole if given is None else given, micro=local, copies=copies)
    try:
        found = solve_batch(known)
    except ValueError as error:
        t.problem(t.named(*_LOCAL), str(error))
        return
    if found.batch is None:
        t.tell(t.named(*_LOCAL), "lost", f"{found}: say how many with --processes")
    else:
        t.carry("training.global_batch_size", "batch", found.batch)
        t.tell(t.named(*_LOCAL), "adapted", str(found), f"batch = {found.batch}")
    if t.fields.get("stages", 1) > 1:
        _pipeline(t, found)
    elif found.batch is not None:
        t.fields["microbatch"] = local


def _pipeline(t: Translation, found: BatchEquation) -> None:
    count = t.whole("experimental.pipeline_parallel_microbatches")
    size = t.whole("parallelism.pipeline_parallel_microbatch_size")
    if count is not None:
        passes = count * (found.accumulation or 1)
        note = f"{count} x {found.accumulation}" if (found.accumulation or 1) > 1 else ""
        name = "experimental.pipeline_parallel_microbatches"
        t.carry(name, "pipeline.microbatches", passes, note)
    else:
        if size is None:
            size = 1
            t.default("parallelism.pipeline_parallel_microbatch_size", 1, "microbatch = 1")
        t.carry("parallelism.pipeline_parallel_microbatch_size", "microbatch", size)
    _schedule(t)
    points = t.value(*_SPLIT_POINTS)
    if points and all(isinstance(point, str) for point in points):
        note = "the same names, of your model's modules"
        t.carry(t.named(*_SPLIT_POINTS), "pipeline.cut", tuple(points), note)
    elif points:
        t.problem(t.named(*_SPLIT_POINTS), f"{points} are not names of modules")


_SCHEDULES = {
    "1F1B": "1f1b",
    "GPipe": "gpipe",
    "Interleaved1F1B": "interleaved",
    "LoopedBFS": "breadth-first",
    "FlexibleInterleaved1F1B": "interleaved",
    "InterleavedZeroBubble": "interleaved-zero-bubble",
    "ZBVZeroBubble": "zbv",
    "DualPipeV": "dualpipe-v",
}
"""torch's names, as their classes without "Schedule"."""
_OLD_SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved_1f1b": "Interleaved1F1B"}


def _schedule(t: Translation) -> None:
    name = t.named(*_SCHEDULE)
    said = t.value(*_SCHEDULE)
    if said is None:
        t.default(_SCHEDULE[0], "1F1B", 'pipeline.schedule = "1f1b"')
        return
    said = _OLD_SCHEDULES.get(said, str(said).removeprefix("Schedule"))
    if said in ("PipelineScheduleSingle", "PipelineScheduleMulti", "_PipelineScheduleRuntime"):
        t.tell(name, "lost", "`headway train RECIPE --schedule TABLE.csv` runs a table")
        return
    found = next(
        (ours for theirs, ours in _SCHEDULES.items() if theirs.lower() == said.lower()), ""
    )
    if not found:
        t.word(name, tuple(_SCHEDULES))
        return
    t.carry(name, "pipeline.schedule", found)


# ---- length, precision ------------------------------------------------------------------------


def _run(t: Translation) -> None:
    steps = t.whole("training.steps")
    if steps is None:
        steps = 10000
        t.default("training.steps", steps, f'stop = "{steps} steps"')
    t.carry("training.steps", "stop", f"{steps} steps")
    clip = t.positive("training.max_norm")
    if clip is None:
        clip = 1.0
        t.default("training.max_norm", clip, "clip = 1.0")
    if clip > 0:
        t.carry("training.max_norm", "clip", clip)
    kind = t.word("training.mixed_precision_param", ("bfloat16", "float32"))
    if kind is None:
        kind = "bfloat16"
        t.default("training.mixed_precision_param", kind, 'precision = "bfloat16"', "autocast")
    t.carry(
        "training.mixed_precision_param",
        "precision",
        kind,
        "" if kind == "float32" else "autocast; parameters stay float32",
    )
    seed = t.whole(*_SEED, least=0)
    if seed is not None:
        t.carry(t.named(*_SEED), "seed", seed)
    length = t.whole("training.seq_len")
    if length is None:
        length = 2048
        t.default("training.seq_len", length, "tokens_per_sample = 2048")
    t.carry("training.seq_len", "tokens_per_sample", length)
    workers = t.whole("training.dataloader.num_workers", least=0)
    if workers is not None:
        t.carry("training.dataloader.num_workers", "workers", workers)
    _waits(t)
    mode = t.word("activation_checkpoint.mode", ("none", "selective", "full", "memory_budget"))
    if mode not in (None, "none"):
        if mode == "full" and t.fields.get("stages", 1) > 1:
            t.carry("activation_checkpoint.mode", "pipeline.recompute", "blocks", "every block")
        else:
            t.tell("activation_checkpoint.mode", "lost", _SAC)
    elif mode is None:
        t.default("activation_checkpoint.mode", "selective", "", _SAC)


def _waits(t: Translation) -> None:
    names = ("comm.init_timeout_seconds", "comm.train_timeout_seconds")
    waits = {name: t.whole(name) for name in names}
    longest = max((wait for wait in waits.values() if wait is not None), default=None)
    for name, wait in waits.items():
        if wait is not None and wait == longest:
            note = "one for all waits"
            t.carry(name, "timeout", f"{wait} s", note, form=f'--timeout "{wait} s"')
        elif wait is not None:
            t.tell(name, "adapted", "the longer of the two", f'--timeout "{longest} s"')


# ---- optimiser, schedule ----------------------------------------------------------------------

_ADAM = {"lr": 8e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def _optimizer(t: Translation) -> None:
    kind = t.word("optimizer.name", ("AdamW", "Adam"))
    if kind is None and t.value("optimizer.name") is None:
        kind = "AdamW"
        t.default("optimizer.name", kind, f'optimizer.call = "{ADAMW}"')
    numbers = {}
    for name, default in _ADAM.items():
        said = t.positive(f"optimizer.{name}")
        if said is None:
            t.default(f"optimizer.{name}", default, f"optimizer.{_argument(name)}")
        elif name.startswith("beta") and said >= 1:
            t.problem(f"optimizer.{name}", f"{said} is not a number from 0 to below 1")
        numbers[name] = default if said is None else said
        t.tell(f"optimizer.{name}", "carried", "", f"optimizer.{_argument(name)} = {numbers[name]}")
    arguments = {
        "lr": numbers["lr"],
        "betas": [numbers["beta1"], numbers["beta2"]],
        "eps": numbers["eps"],
        "weight_decay": numbers["weight_decay"],
    }
    call = ADAM if kind == "Adam" else ADAMW
    form = f'optimizer.call = "{call}"'
    t.carry("optimizer.name", "optimizer", call_of(call, arguments), form=form)


def _argument(name: str) -> str:
    return {"beta1": "betas[0]", "beta2": "betas[1]"}.get(name, name)


def _scheduler(t: Translation) -> None:
    steps = t.whole("lr_scheduler.total_steps") or t.whole("training.steps") or 10000
    warmup = t.whole(*_WARMUP, least=0)
    part = t.positive("training.warmup_pct")
    if warmup is None and part is not None:
        warmup = int(steps * part)
        t.tell(
            "training.warmup_pct", "adapted", f"of {steps} steps", f"scheduler.warmup = {warmup}"
        )
    if warmup is None:
        warmup = 200
        t.default("lr_scheduler.warmup_steps", warmup, "scheduler.warmup")
    ratio = t.positive("lr_scheduler.decay_ratio")
    if ratio is not None and ratio > 1:
        t.problem("lr_scheduler.decay_ratio", f"{ratio} is not a number from 0 to 1")
    shape = t.word("lr_scheduler.decay_type", ("linear", "sqrt", "cosine"))
    end = t.positive(*_LOWEST) or 0.0
    arguments: dict[str, Any] = {"steps": steps, "warmup": min(warmup, steps)}
    if ratio is not None:
        arguments["decay_ratio"] = ratio
    arguments["shape"] = shape or "linear"
    if end:
        arguments["end"] = end
    target = "headway.optim:torchtitan_rates"
    t.fields["scheduler"] = call_of(target, arguments)
    for name, became in (
        (t.named(*_WARMUP), f"scheduler.warmup = {arguments['warmup']}"),
        ("lr_scheduler.total_steps", f"scheduler.steps = {steps}"),
        ("lr_scheduler.decay_ratio", f"scheduler.decay_ratio = {ratio}"),
        ("lr_scheduler.decay_type", f'scheduler.shape = "{arguments["shape"]}"'),
        (t.named(*_LOWEST), f"scheduler.end = {end}"),
    ):
        t.tell(name, "carried", "", became)
    if shape is None:
        t.default("lr_scheduler.decay_type", "linear", "scheduler.shape")


# ---- records ----------------------------------------------------------------------------------


def _records(t: Translation, copies: int | None) -> None:
    if t.enabled("checkpoint"):
        every = t.whole("checkpoint.interval") or 500
        t.carry("checkpoint.interval", "checkpoint_every", every)
        t.tell(t.named(*_CHECKPOINT), "carried", "", f"checkpoint_every = {every}")
        keep = t.whole("checkpoint.keep_latest_k", least=0)
        if keep == 0:
            note = "all are kept there; checkpoint_keep says how many stay here"
            t.tell("checkpoint.keep_latest_k", "lost", note)
        elif keep is not None:
            t.carry("checkpoint.keep_latest_k", "checkpoint_keep", keep)
    if t.enabled("validation"):
        every = t.whole("validation.freq") or 10
        t.carry("validation.freq", "validate_every", every)
        became = f"validate_every = {every}"
        name = t.named("validation.enable", "validation.enabled")
        t.tell(name, "adapted", "[validation] names its data", became)
        steps = t.value("validation.steps")
        size = (t.whole("validation.local_batch_size") or 8) * (copies or 0)
        if steps is not None and steps > 0:
            if size:
                note = f"{steps} steps x {size} samples"
                t.carry("validation.steps", "validation_samples", steps * size, note)
            else:
                t.tell("validation.steps", "lost", "in samples: say --processes")
    loggers = tuple(
        name for name in ("tensorboard", "wandb") if t.value(f"metrics.enable_{name}") is True
    )
    if loggers:
        t.fields["loggers"] = loggers
    for name in loggers:
        t.tell(f"metrics.enable_{name}", "carried", "", f'loggers = ["{name}"]')
