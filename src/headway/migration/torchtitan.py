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
from headway.migration.key_table import KeyTable, Switch, adapted, carried, lost, unneeded
from headway.migration.settings import ImportedCall
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


_DP_REPLICATE = (
    "parallelism.data_parallel_replicate_degree",
    "training.data_parallel_replicate_degree",
)
_DP_SHARD = (
    "parallelism.data_parallel_shard_degree",
    "training.data_parallel_shard_degree",
    "training.data_parallel_degree",
)
_RESHARD = ("parallelism.fsdp_reshard_after_forward", "training.fsdp_reshard_after_forward")
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
_MICROBATCHES = (
    "parallelism.pipeline_parallel_microbatches",
    "experimental.pipeline_parallel_microbatches",
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
        *unneeded("job. config_file description dump_folder", _RUN),
        *unneeded(
            "job. print_args print_config save_config_file save_config_folder "
            "use_for_integration_test",
            "the run directory holds recipe and plan",
        ),
        *lost("job.custom_config_module", "a recipe is Python or TOML; write what it adds there"),
        # Model and data
        *lost("model. name flavor", _MODEL, "text"),
        *lost(
            "model.hf_assets_path",
            "weights = DIRECTORY starts from a model that `save_pretrained` has written",
        ),
        *lost("model.tokenizer_path", _DATA),
        *lost("model. norm_type use_flex_attn attn_mask_type print_after_conversion", _MODEL),
        *lost("model.converters", _FLOAT8),
        *lost("training. dataset dataset_path", _DATA),
        *carried("training.seq_len", "tokens_per_sample", "whole"),
        *carried("training.dataloader.num_workers", "workers", "whole"),
        *unneeded(
            "training.dataloader. persistent_workers pin_memory prefetch_factor",
            "headway starts and feeds its loader processes itself",
        ),
        # Batch and length
        *adapted(
            "training. local_batch_size batch_size",
            "batch",
            "whole",
            "of one rank; headway states the global batch",
        ),
        *carried("training.global_batch_size", "batch", "whole", idle=(-1,)),
        *carried("training.steps", "stop", "whole"),
        *carried("training.max_norm", "clip", "number"),
        # Precision
        *adapted("training.mixed_precision_param", "precision", "text", "autocast"),
        *lost(
            "training.mixed_precision_reduce",
            "gradients are summed in their own type, float32",
            "text",
            idle=("float32",),
        ),
        *lost(
            "training.dtype",
            "parameters have the type that the model gives them",
            "text",
            idle=("float32",),
        ),
        *lost(
            "training.enable_cpu_offload",
            "headway keeps all state in the memory of the device; use more ranks",
            "flag",
            idle=(False,),
        ),
        *unneeded(
            "training. gc_freq gc_debug",
            "Python collects garbage as it likes; it has no setting here",
        ),
        *lost("training.compile", _COMPILE, "flag", idle=(False,)),
        *unneeded(
            "training.deterministic",
            "sample order and random numbers depend on the seed alone; of a GPU's kernels "
            "torch.use_deterministic_algorithms decides",
            "flag",
        ),
        *carried("training.seed", "seed", "whole"),
        *carried("training.warmup_steps", "scheduler.warmup", "whole"),
        *adapted("training.warmup_pct", "scheduler.warmup", "number", "a part of all steps"),
        *lost("training.data_parallel_type", "zero = 0 is ddp", "text", idle=("fsdp",)),
        *lost(
            "training. fp8_linear enable_fp8_linear enable_float8_linear "
            "enable_fsdp_float8_all_gather enable_fsdp_fp8_all_gather "
            "precompute_float8_dynamic_scale_for_fsdp float8_scaling_type_input "
            "float8_scaling_type_weight float8_scaling_type_grad_output",
            _FLOAT8,
            idle=(False, ""),
        ),
        # Parallelism
        *adapted(
            _DP_REPLICATE, "shards", "whole", "copies of the ranks that keep the state together"
        ),
        *adapted(
            _DP_SHARD, "zero", "whole", "zero = 3 over so many ranks; -1: over all that are left"
        ),
        *carried(_TP, "split.tensor", "whole", idle=(1,)),
        *lost(
            "training.sequence_parallel_degree",
            "the first releases' tensor parallelism; write split.tensor = [N]",
            "whole",
            idle=(1,),
        ),
        *carried(_PP, "stages", "whole", idle=(1,)),
        *lost(_CP, _CONTEXT, "whole", idle=(1,)),
        *unneeded(
            "parallelism.context_parallel_rotate_method parallelism.context_parallel_load_balancer "
            "experimental.context_parallel_rotate_method",
            "it is part of splitting sequences",
        ),
        *adapted(
            _RESHARD,
            "zero",
            "text",
            "always: zero = 3; never: zero = 2; default: 3, and 2 with stages",
        ),
        *unneeded(
            "parallelism.disable_loss_parallel training.disable_loss_parallel "
            "training.enable_loss_parallel",
            "logits are gathered before the loss",
        ),
        *lost(
            "parallelism.enable_async_tensor_parallel experimental.enable_async_tensor_parallel "
            "parallelism.enable_compiled_autograd experimental.enable_compiled_autograd",
            "split layers exchange between operators",
            idle=(False,),
        ),
        *carried(_SCHEDULE, "pipeline.schedule", "text"),
        *lost(
            "parallelism.pipeline_parallel_schedule_csv "
            "experimental.pipeline_parallel_schedule_csv",
            "`headway train RECIPE --schedule TABLE.csv` runs a table of torch's form",
            "text",
        ),
        *adapted(
            _SPLIT_POINTS,
            "pipeline.cut",
            "list",
            "names of the modules with which the second and later stages begin",
        ),
        *carried("parallelism.pipeline_parallel_microbatch_size", "microbatch", "whole"),
        *carried(_MICROBATCHES, "pipeline.microbatches", "whole"),
        *unneeded(
            "experimental.pipeline_parallel_split_mode",
            "the model is cut where pipeline.cut or its parameters say",
            "text",
        ),
        *lost(
            "parallelism. pipeline_parallel_layers_per_stage "
            "pipeline_parallel_first_stage_less_layers pipeline_parallel_last_stage_less_layers "
            "module_fqns_per_model_part",
            "stages of equal numbers of parameters, or of equal time with pipeline.balance = "
            '"time"; pipeline.cut names the modules',
        ),
        *lost(
            "parallelism. expert_parallel_degree expert_tensor_parallel_degree",
            _EXPERT,
            "whole",
            idle=(1,),
        ),
        *unneeded(
            "parallelism. expert_parallel_comm_backend pipeline_parallel_expert_parallel_overlap "
            "expert_parallel_a2a_impl",
            "it is part of expert parallelism",
        ),
        *lost("experimental.torch_spmd", _MODEL, "flag", idle=(False,)),
        *lost(
            "experimental. custom_import custom_args_module custom_model_path", _MODEL, idle=("",)
        ),
        # Optimiser and schedule
        *carried("optimizer.name", "optimizer", "text"),
        *carried("optimizer. lr beta1 beta2 eps weight_decay", "optimizer", "number"),
        *unneeded(
            "optimizer. implementation fused", "it chooses an implementation of the same optimiser"
        ),
        *lost(
            "optimizer.early_step_in_backward",
            "exchange.priority steps bucket by bucket, exactly, with zero = 0",
            "flag",
            idle=(False,),
        ),
        *carried("lr_scheduler.warmup_steps", "scheduler.warmup", "whole"),
        *carried("lr_scheduler.total_steps", "scheduler.steps", "whole"),
        *carried("lr_scheduler.decay_ratio", "scheduler.decay_ratio", "number"),
        *carried("lr_scheduler.decay_type", "scheduler.shape", "text"),
        *carried("lr_scheduler. min_lr_factor lr_min", "scheduler.end", "number"),
        # Checkpoints, validation, records
        *carried(_CHECKPOINT, "checkpoint_every", "flag", "headway always writes one at the end"),
        *carried("checkpoint.interval", "checkpoint_every", "whole"),
        *lost("checkpoint.interval_type", "steps only", "text", idle=("steps",)),
        *carried("checkpoint.keep_latest_k", "checkpoint_keep", "whole"),
        *unneeded("checkpoint. folder create_seed_checkpoint", _RUN),
        *unneeded(
            "checkpoint.async_mode", "checkpoints are always written while training goes on", "text"
        ),
        *unneeded(
            "checkpoint. export_dtype last_save_model_only last_save_in_hf model_weights_only "
            "initial_load_in_hf initial_load_in_hf_quantized initial_load_model_only "
            "initial_load_model_weights_only last_save_model_weights_only "
            "last_save_in_safetensors_format",
            _HF,
        ),
        *lost(
            "checkpoint.initial_load_path",
            "weights = FILE starts from a model, --resume continues a run; " + _HF,
        ),
        *lost(
            "checkpoint. load_step exclude_from_loading load_only",
            "a run continues from its newest checkpoint; weights_only chooses tensors",
            idle=(-1, False),
        ),
        *unneeded(
            "checkpoint. enable_first_step_checkpoint enable_ft_dataloader_checkpoints",
            "a run that dies before its first checkpoint begins again",
        ),
        *adapted(
            "validation. enable enabled",
            "validate_every",
            "flag",
            "[validation] names its data: --validation",
        ),
        *carried("validation.freq", "validate_every", "whole"),
        *adapted(
            "validation.steps",
            "validation_samples",
            "whole",
            "in samples: steps x local_batch_size x copies",
            idle=(-1,),
        ),
        *unneeded(
            "validation.local_batch_size", "validation uses the micro-batches of training", "whole"
        ),
        *lost(
            "validation. dataset dataset_path seq_len dataloader.*",
            "name the function that makes it: [validation] call = MODULE:NAME",
        ),
        *carried("metrics.enable_tensorboard", "loggers", "flag", idle=(False,)),
        *carried("metrics.enable_wandb", "loggers", "flag", idle=(False,)),
        *unneeded(
            "metrics. log_freq disable_color_printing enable_color_printing save_tb_folder "
            "rank_0_only disable_logging_from_checkpoint save_for_all_ranks",
            "every step is recorded, by rank 0",
        ),
        *unneeded("profiling.*", "--trace-steps N: a timeline every N steps"),
        *unneeded(
            "memory_estimation.* estimate.*", "`headway plan RECIPE --cluster C` shows the memory"
        ),
        *adapted("activation_checkpoint.mode", "pipeline.recompute", "text", _SAC, idle=("none",)),
        *unneeded("activation_checkpoint.*", "it is part of activation checkpointing"),
        *lost("compile.enable", _COMPILE, "flag", idle=(False,)),
        *unneeded("compile.*", "it is part of compiling"),
        *lost("float8.enable_float8_linear", _FLOAT8, "flag", idle=(False,)),
        *unneeded("float8.* mx.* quantize.*", "it is part of float8, which headway has not"),
        # Communication and faults
        *adapted(
            "comm. init_timeout_seconds train_timeout_seconds",
            "timeout",
            "whole",
            "headway train --timeout: one for all waits, the longer of the two",
        ),
        *unneeded(
            "comm. trace_buf_size save_traces_folder save_traces_file_prefix",
            "a wait that ends names the rank that is missing",
        ),
        *lost(
            "comm.mode", "`headway simulate plan.json` needs no devices", "text", idle=("default",)
        ),
        *lost(
            "fault_tolerance.*",
            "workers that agree in rounds survive one another's death: see synchrony; dead workers "
            "are started again (--restarts)",
        ),
        *carried("debug.seed", "seed", "whole"),
        *unneeded(
            "debug. deterministic deterministic_warn_only",
            "sample order and random numbers depend on the seed alone; of a GPU's kernels "
            "torch.use_deterministic_algorithms decides",
        ),
        *lost(
            "debug.moe_force_load_balance training.debug_moe_force_load_balance",
            _MODEL,
            "flag",
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
    key, shards = t.named(*_DP_SHARD), t.value(*_DP_SHARD)
    shards = -1 if shards is None else int(shards)
    if shards == 0 or shards < -1:
        t.problem(key, f"{shards} is neither -1 nor at least 1")
        return None
    rest = copies * tensor * pipe * context
    if shards == -1 and processes is not None:
        if processes % rest:
            t.problem(key, f"{processes} processes are no multiple of the other degrees, {rest}")
            return None
        shards = processes // rest
    if shards == -1:
        t.tell(key, "lost", "over all that are left: say --processes")
    elif processes is not None and processes != rest * shards:
        said = f"the degrees are {rest * shards} processes, and --processes says {processes}"
        t.problem(key, said)
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
    key, shard_key = t.named(*_RESHARD), t.named(*_DP_SHARD)
    policy = t.word(key, ("default", "always", "never"))
    over = shards * context if shards > 0 else -1
    if over == 1:
        t.tell(shard_key, "carried", "", "zero = 0: not sharded")
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
        t.tell(shard_key, "carried", "", became)
    t.default(shard_key, -1, became)
    t.tell(key, "carried", "", f"zero = {zero}")


# ---- batch ------------------------------------------------------------------------------------


def _batch(t: Translation, copies: int | None, given: int | None) -> None:
    local = t.whole(*_LOCAL)
    if local is None:
        local = 8
        t.default("training.local_batch_size", 8, "batch and microbatch")
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
    context = t.whole(*_CP) or 1
    if found.batch is not None and copies and found.batch < copies * context:
        said = f"{copies * context} ranks would take shares of {found.batch} samples: say --batch"
        t.problem(t.named(*_CP), f"{_CONTEXT}: {said}")
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
    count = t.whole(*_MICROBATCHES)
    size = t.whole("parallelism.pipeline_parallel_microbatch_size")
    if count is not None:
        passes = count * (found.accumulation or 1)
        note = f"{count} x {found.accumulation}" if (found.accumulation or 1) > 1 else ""
        t.carry(t.named(*_MICROBATCHES), "pipeline.microbatches", passes, note)
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
        each, rest = divmod(len(points) + 1, t.fields["stages"])
        if each > 1 and not rest:
            t.fields["pipeline.virtual"] = each
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


def _schedule(t: Translation) -> None:
    name = t.named(*_SCHEDULE)
    said = t.value(*_SCHEDULE)
    if said is None:
        t.default(_SCHEDULE[0], "1F1B", 'pipeline.schedule = "1f1b"')
        return
    # The first releases write interleaved_1f1b for Interleaved1F1B.
    plain = said.removeprefix("Schedule").replace("_", "").lower()
    if plain.startswith("pipelineschedule"):
        t.tell(name, "lost", "`headway train RECIPE --schedule TABLE.csv` runs a table")
        return
    found = next((ours for theirs, ours in _SCHEDULES.items() if theirs.lower() == plain), "")
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
    else:
        t.tell("training.max_norm", "lost", "it makes all gradients 0; the recipe does not clip")
    _precision(t)
    seed = t.whole(*_SEED, least=0)
    if seed is not None:
        t.carry(t.named(*_SEED), "seed", seed)
    elif not any(t.has(name) for name in _SEED):
        t.default(_SEED[0], None, "seed = 0", "torchtitan draws another one in each run")
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


def _precision(t: Translation) -> None:
    name = "training.mixed_precision_param"
    kind = t.word(name, ("bfloat16", "float32"))
    split = t.fields.get("stages") or t.fields.get("split.tensor")
    if kind != "float32" and split and not t.fields.get("zero"):
        t.fields["precision"] = "float32"
        note = "with stages or split layers torchtitan needs sharding for it, and computes in"
        t.tell(name, "adapted", f"{note} float32", 'precision = "float32"')
        t.default(name, "bfloat16", 'precision = "float32"', f"{note} float32")
        return
    if kind is None:
        kind = "bfloat16"
        t.default(name, kind, 'precision = "bfloat16"', "autocast")
    note = "" if kind == "float32" else "autocast; parameters stay float32"
    t.carry(name, "precision", kind, note)


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
        t.default("optimizer.name", kind, 'optimizer.call = "torch.optim:AdamW"')
    numbers = {}
    for name, default in _ADAM.items():
        said = t.positive(f"optimizer.{name}")
        if said is None:
            t.default(f"optimizer.{name}", default, f"optimizer.{_argument(name)} = {default}")
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
    call = f"torch.optim:{kind}"
    form = f'optimizer.call = "{call}"'
    t.carry("optimizer.name", "optimizer", ImportedCall.of(call, arguments), form=form)


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
        became = f"scheduler.warmup = {min(warmup, steps)}"
        t.default("lr_scheduler.warmup_steps", warmup, became)
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
    t.fields["scheduler"] = ImportedCall.of(target, arguments)
    for name, became in (
        (t.named(*_WARMUP), f"scheduler.warmup = {arguments['warmup']}"),
        ("lr_scheduler.total_steps", f"scheduler.steps = {steps}"),
        ("lr_scheduler.decay_ratio", f"scheduler.decay_ratio = {ratio}"),
        ("lr_scheduler.decay_type", f'scheduler.shape = "{arguments["shape"]}"'),
        (t.named(*_LOWEST), f"scheduler.end = {end}"),
    ):
        t.tell(name, "carried", "", became)
    if shape is None:
        t.default("lr_scheduler.decay_type", "linear", 'scheduler.shape = "linear"')


# ---- records ----------------------------------------------------------------------------------


def _records(t: Translation, copies: int | None) -> None:
    if t.enabled("checkpoint"):
        every = t.whole("checkpoint.interval") or 500
        t.default("checkpoint.interval", every, f"checkpoint_every = {every}")
        t.carry("checkpoint.interval", "checkpoint_every", every)
        t.tell(t.named(*_CHECKPOINT), "carried", "", f"checkpoint_every = {every}")
        keep = t.whole("checkpoint.keep_latest_k", least=0)
        if keep == 0:
            note = "all are kept there; checkpoint_keep says how many stay here"
            t.tell("checkpoint.keep_latest_k", "lost", note)
        else:
            t.default("checkpoint.keep_latest_k", 10, "checkpoint_keep = 10")
            t.carry("checkpoint.keep_latest_k", "checkpoint_keep", keep or 10)
    if t.enabled("validation"):
        every = t.whole("validation.freq") or 10
        t.default("validation.freq", every, f"validate_every = {every}")
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
    t.loggers({name: f"metrics.enable_{name}" for name in ("tensorboard", "wandb")})
