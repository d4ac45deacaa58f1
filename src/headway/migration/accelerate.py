"""Accelerate's configuration (YAML or JSON, as `accelerate config` writes it).

Read from Accelerate 1.15: `commands/config/config_args.py`, `commands/config/cluster.py`,
`utils/launch.py`. It says how a script is started, and nothing of the batch, the optimiser or the
schedule: these are the script's. A section has an effect only with its `distributed_type`. A
DeepSpeed file that it names is translated with it, each of its keys in front of the file's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headway.migration import deepspeed
from headway.migration.configuration_file import read_configuration
from headway.migration.key_table import Key, KeyTable
from headway.migration.translation import Translation

_LAUNCHER = (
    "headway starts local processes, and joins what torchrun, srun or mpirun has started on "
    "several machines: `headway launch RECIPE --write slurm|kubernetes`"
)
_WRAP = "headway gathers the modules with at least 1 % of the parameters by themselves"
_PREFETCH = "FSDP2 gathers the next block while one is computed"
_COMPILE = "apply torch.compile in the function that builds the model"
_TPU = "headway runs on CPUs and CUDA devices"
_RECOMPUTE = (
    "call torch.utils.checkpoint in the model; stages of a pipeline recompute by "
    'pipeline.recompute = "blocks"'
)
_OFFLOAD = "headway keeps all state in the memory of the device; use more ranks"
_MEGATRON_MODEL = "the recipe's own model and data are trained, not Megatron's"


def _named(prefix: str, names: str, **facts: Any) -> tuple[Key, ...]:
    return tuple(Key(name=f"{prefix}{name}", **facts) for name in names.split())


TABLE = KeyTable(
    title="Accelerate",
    auto="auto",
    auto_note='"auto" is filled in by Accelerate from the script; write a value',
    keys=(
        Key(
            name="compute_environment",
            kind="text",
            fate="lost",
            note="headway has no service that starts machines; start the job on them",
            idle=("LOCAL_MACHINE", "LOCAL", "0"),
        ),
        Key(
            name="distributed_type",
            kind="text",
            fate="adapted",
            field="zero",
            note="says which of the sections below has an effect",
        ),
        Key(name="num_processes", kind="whole", fate="carried", field="processes"),
        Key(
            name="num_machines",
            kind="whole",
            fate="adapted",
            field="nodes",
            note="`headway launch RECIPE --write slurm --nodes N -n PROCESSES`",
            idle=(1,),
        ),
        *_named(
            "",
            "machine_rank main_process_ip main_process_port rdzv_backend same_network "
            "deepspeed_hostfile",
            note=_LAUNCHER,
        ),
        Key(name="mpirun_config.*", note=_LAUNCHER),
        Key(
            name="mixed_precision",
            kind="text",
            fate="carried",
            field="precision",
            note="bf16 is autocast; fp16 and fp8 do not carry over",
        ),
        Key(
            name="fp16",
            kind="flag",
            fate="lost",
            note='headway computes in float32 or bfloat16; write precision = "bfloat16"',
            idle=(False,),
        ),
        Key(
            name="downcast_bf16",
            kind="flag",
            fate="lost",
            note=_TPU,
            idle=(False,),
        ),
        Key(name="fp8_config.*", fate="lost", note="headway has no float8; bfloat16 is autocast"),
        Key(
            name="use_cpu",
            kind="flag",
            fate="carried",
            field="device",
            note="headway train --device cpu",
            idle=(False,),
        ),
        Key(name="gpu_ids", note="CUDA_VISIBLE_DEVICES says which GPUs there are"),
        Key(name="debug", kind="flag", note="every error names rank and step"),
        Key(name="enable_cpu_affinity", kind="flag", note="threads are shared evenly by ranks"),
        Key(name="main_training_function", note="the recipe is the training function"),
        Key(
            name="gradient_accumulation_steps",
            kind="whole",
            fate="adapted",
            field="microbatch",
            note="microbatch = batch / (accumulation x ranks), which needs --batch",
            idle=(1,),
        ),
        *_named(
            "",
            "tpu_name tpu_zone tpu_use_cluster tpu_use_sudo tpu_vm tpu_env tpu_config.* "
            "command_file commands",
            fate="lost",
            note=_TPU,
            idle=(False,),
        ),
        *_named(
            "",
            "ec2_instance_type iam_role_name image_uri profile region base_job_name "
            "pytorch_version transformers_version py_version sagemaker_inputs_file "
            "sagemaker_metrics_file additional_args.*",
            fate="lost",
            note="headway has no service that starts machines; start the job on them",
        ),
        Key(name="ipex_config.*", fate="lost", note="operators are torch's own"),
        Key(
            name="dynamo_backend",
            kind="text",
            fate="lost",
            note=_COMPILE,
            idle=("NO", "no"),
        ),
        Key(
            name="dynamo_config.dynamo_backend",
            kind="text",
            fate="lost",
            note=_COMPILE,
            idle=("NO", "no"),
        ),
        Key(name="dynamo_config.*", note="it is part of compiling"),
        # FSDP
        Key(
            name="fsdp_config.fsdp_version",
            kind="whole",
            note="headway uses FSDP2; version 1 is the same numbers",
        ),
        *_named(
            "fsdp_config.",
            "fsdp_sharding_strategy fsdp_reshard_after_forward",
            fate="adapted",
            field="zero",
            note="FULL_SHARD is zero = 3, SHARD_GRAD_OP zero = 2, NO_SHARD zero = 0, "
            "HYBRID_SHARD zero = 3 with shards = processes of a machine",
        ),
        *_named(
            "fsdp_config.",
            "fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params "
            "fsdp_use_orig_params",
            note=_WRAP,
        ),
        *_named(
            "fsdp_config.",
            "fsdp_backward_prefetch fsdp_backward_prefetch_policy fsdp_forward_prefetch "
            "fsdp_limit_all_gathers",
            note=_PREFETCH,
        ),
        Key(
            name="fsdp_config.fsdp_offload_params",
            kind="flag",
            fate="lost",
            note=_OFFLOAD,
            idle=(False,),
        ),
        Key(
            name="fsdp_config.fsdp_activation_checkpointing",
            kind="flag",
            fate="lost",
            note=_RECOMPUTE,
            idle=(False,),
        ),
        Key(
            name="fsdp_config.fsdp_state_dict_type",
            note="checkpoints are written in parts and load on any number of ranks; `headway "
            "checkpoint convert` writes the whole model",
        ),
        *_named(
            "fsdp_config.",
            "fsdp_sync_module_states fsdp_cpu_ram_efficient_loading",
            note="every rank starts from the same numbers",
        ),
        Key(
            name="fsdp_config.fsdp_ignored_modules",
            fate="lost",
            note="all modules are sharded with the model",
        ),
        # DeepSpeed, inline
        Key(
            name="deepspeed_config.deepspeed_config_file",
            kind="text",
            fate="adapted",
            note="its keys follow",
        ),
        Key(name="deepspeed_config.zero_stage", kind="whole", fate="carried", field="zero"),
        Key(
            name="deepspeed_config.gradient_accumulation_steps",
            kind="whole",
            fate="adapted",
            field="microbatch",
            note="microbatch = batch / (accumulation x ranks), which needs --batch",
            idle=(1,),
        ),
        Key(
            name="deepspeed_config.gradient_clipping",
            fate="carried",
            field="clip",
            idle=("none", "None"),
        ),
        *_named(
            "deepspeed_config.",
            "offload_optimizer_device offload_param_device",
            kind="text",
            fate="lost",
            note=deepspeed.NVME,
            idle=("none", "None"),
        ),
        *_named(
            "deepspeed_config.",
            "offload_optimizer_nvme_path offload_param_nvme_path",
            note="it is part of offloading, which headway has not",
        ),
        Key(
            name="deepspeed_config.zero3_init_flag",
            note="a model that is too large for one rank is built on every rank first: "
            "use stages, each of which holds its part",
            kind="flag",
            fate="lost",
            idle=(False,),
        ),
        Key(
            name="deepspeed_config.zero3_save_16bit_model",
            note="`headway checkpoint convert RUN model.safetensors` writes the whole model",
        ),
        *_named(
            "deepspeed_config.",
            "deepspeed_hostfile deepspeed_multinode_launcher deepspeed_exclusion_filter "
            "deepspeed_inclusion_filter",
            note=_LAUNCHER,
        ),
        Key(
            name="deepspeed_config.deepspeed_moe_layer_cls_names",
            fate="lost",
            note="headway has no expert parallelism; experts are sharded as other layers are",
        ),
        # Parallelism
        *_named(
            "parallelism_config.",
            "parallelism_config_dp_replicate_size parallelism_config_dp_shard_size",
            kind="whole",
            fate="adapted",
            field="shards",
            note="zero = 3 over shards = dp_shard ranks, and dp_replicate copies of them",
        ),
        Key(
            name="parallelism_config.parallelism_config_tp_size",
            kind="whole",
            fate="carried",
            field="split.tensor",
            idle=(1,),
        ),
        *_named(
            "parallelism_config.",
            "parallelism_config_cp_size parallelism_config_sp_size",
            kind="whole",
            fate="lost",
            note="headway does not split sequences; these ranks take shares of the batch",
            idle=(1,),
        ),
        *_named(
            "parallelism_config.",
            "parallelism_config_cp_comm_strategy parallelism_config_cp_backend "
            "parallelism_config_sp_backend parallelism_config_sp_seq_length "
            "parallelism_config_sp_seq_length_is_variable "
            "parallelism_config_sp_attn_implementation",
            note="it is part of splitting sequences",
        ),
        Key(
            name="tp_config.tp_size", kind="whole", fate="carried", field="split.tensor", idle=(1,)
        ),
        # Megatron-LM
        Key(
            name="megatron_lm_config.megatron_lm_tp_degree",
            kind="whole",
            fate="carried",
            field="split.tensor",
            idle=(1,),
        ),
        Key(
            name="megatron_lm_config.megatron_lm_pp_degree",
            kind="whole",
            fate="carried",
            field="stages",
            idle=(1,),
        ),
        Key(
            name="megatron_lm_config.megatron_lm_num_micro_batches",
            kind="whole",
            fate="carried",
            field="pipeline.microbatches",
        ),
        Key(
            name="megatron_lm_config.megatron_lm_recompute_activations",
            kind="flag",
            fate="adapted",
            field="pipeline.recompute",
            note=_RECOMPUTE,
            idle=(False,),
        ),
        Key(
            name="megatron_lm_config.megatron_lm_use_distributed_optimizer",
            kind="flag",
            fate="carried",
            field="zero",
            note="zero = 1",
            idle=(False,),
        ),
        Key(
            name="megatron_lm_config.megatron_lm_gradient_clipping",
            kind="number",
            fate="carried",
            field="clip",
        ),
        Key(
            name="megatron_lm_config.megatron_lm_sequence_parallelism",
            kind="flag",
            fate="lost",
            note="activations between split layers are whole; split.tensor = [1, p, 1] keeps "
            "them in parts",
            idle=(False,),
        ),
        Key(name="megatron_lm_config.*", fate="lost", note=_MEGATRON_MODEL),
    ),
)

_DATA_PARALLEL = (
    "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_XPU",
    "MULTI_HPU",
)  # fmt: skip
_TYPES = (
    "NO", *_DATA_PARALLEL, "DEEPSPEED", "FSDP", "MEGATRON_LM", "TP", "XLA", "TPU", "MULTI_NEURON",
    "SAGEMAKER", "DATA_PARALLEL", "MODEL_PARALLEL",
)  # fmt: skip
_SECTIONS = {
    "fsdp_config": "FSDP",
    "deepspeed_config": "DEEPSPEED",
    "megatron_lm_config": "MEGATRON_LM",
    "tp_config": "TP",
}


def translate(t: Translation, processes: int | None, batch: int | None) -> None:
    """Translate an Accelerate configuration.

    Args:
        processes: Of the whole job, in place of num_processes.
        batch: The global batch, which these files do not say.
    """
    said = t.value("distributed_type")
    # An unquoted NO is a truth value in YAML 1.1.
    kind = "NO" if said == "no" else t.word("distributed_type", _TYPES, fold=True)
    if said is None:
        t.problem("", "distributed_type is missing, which Accelerate requires")
    ranks = _processes(t, kind, processes)
    if batch is not None:
        t.fields["batch"] = batch
    _precision(t)
    if t.value("use_cpu") is True:
        t.carry("use_cpu", "device", "cpu")
    _type(t, kind)
    for section, needed in _SECTIONS.items():
        if kind != needed:
            _without_effect(t, section, f"it has an effect with distributed_type {needed} only")
    translators: Mapping[str, Callable[[Translation, int | None, int | None], None]] = {
        "FSDP": _fsdp,
        "DEEPSPEED": _deepspeed,
        "MEGATRON_LM": _megatron,
        "TP": _tensor,
    }
    if kind is not None and kind in translators:
        translators[kind](t, ranks, batch)
    _parallelism(t, ranks)
    _accumulation(t, "gradient_accumulation_steps", ranks, batch)


def _processes(t: Translation, kind: str | None, processes: int | None) -> int | None:
    found = t.whole("num_processes", least=-1)
    if found is not None and found < 1:
        t.tell("num_processes", "off", "the launcher says how many")
        found = None
    machines = t.whole("num_machines") or 1
    if found is not None and processes is not None and processes != found:
        t.tell("num_processes", "off", f"--processes says {processes}")
        found = None
    elif found is not None:
        t.carry("num_processes", "processes", found)
    elif kind == "NO" and processes is None:
        found = 1
        t.fields["processes"] = 1
    ranks = processes or found
    if machines > 1:
        if ranks is not None and ranks % machines:
            t.problem("num_machines", f"{ranks} processes are no multiple of {machines} machines")
            return ranks
        each = "PROCESSES" if ranks is None else ranks // machines
        note = f"`headway launch RECIPE --write slurm --nodes {machines} -n {each}`"
        t.carry("num_machines", "nodes", machines, note, form=f"{machines} machines")
    return ranks


def _precision(t: Translation) -> None:
    kind = t.word("mixed_precision", ("no", "bf16", "fp16", "fp8"), fold=True)
    match kind:
        case "no":
            t.carry("mixed_precision", "precision", "float32")
        case "bf16":
            t.carry("mixed_precision", "precision", "bfloat16")
        case "fp16" | "fp8":
            note = (
                f"headway has no {kind}: the recipe has float32; write "
                'precision = "bfloat16" where the device has it'
            )
            t.tell("mixed_precision", "lost", note)


def _type(t: Translation, kind: str | None) -> None:
    if kind in (None, "FSDP", "DEEPSPEED", "MEGATRON_LM", "TP"):
        t.tell("distributed_type", "adapted", "the section below says how", str(kind))
    elif kind == "NO":
        t.tell("distributed_type", "carried", "", "one process")
    elif kind in _DATA_PARALLEL:
        t.tell("distributed_type", "carried", "", "data parallel, the default")
    else:
        t.tell("distributed_type", "lost", _TPU)


def _without_effect(t: Translation, section: str, why: str) -> None:
    for name in t.below(section):
        t.tell(f"{section}.{name}", "off", why)


# ---- FSDP -------------------------------------------------------------------------------------

_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_ZERO = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3}
_F = "fsdp_config."


def _fsdp(t: Translation, ranks: int | None, batch: int | None) -> None:
    key = _strategy_key(t)
    said = t.value(key)
    if key.endswith("reshard_after_forward") and str(said).lower() in ("true", "false"):
        # FSDP2: whether parameters are given back between forward and backward.
        zero = 3 if str(said).lower() == "true" else 2
        t.carry(key, "zero", zero)
        return
    number = str(said) if said is not None else "FULL_SHARD"
    strategy = _STRATEGIES[int(number) - 1] if number in "12345" and len(number) == 1 else number
    if strategy.upper() not in _STRATEGIES:
        t.problem(key, f"{said!r} is none of {', '.join(_STRATEGIES)}")
        return
    strategy = strategy.upper()
    zero = _ZERO.get(strategy, 2)
    if said is None:
        t.default(f"{_F}fsdp_sharding_strategy", strategy, f"zero = {zero}")
    t.carry(key, "zero", zero)
    if strategy.startswith("HYBRID"):
        machines = t.fields.get("nodes", 1)
        if ranks is None:
            t.tell(key, "adapted", "shards: the processes of a machine, which are not known", "")
        elif ranks > machines > 1:
            t.fields["shards"] = ranks // machines
            became = f"zero = {zero}, shards = {ranks // machines}"
            t.tell(key, "adapted", "copies on the machines", became)


def _strategy_key(t: Translation) -> str:
    """Version 2 has a flag, and version 1 a strategy, which some releases write in its place."""
    strategy, flag = f"{_F}fsdp_sharding_strategy", f"{_F}fsdp_reshard_after_forward"
    version = t.value(f"{_F}fsdp_version") or 1
    both = t.value(strategy) is not None and t.value(flag) is not None
    chosen = flag if (version == 2 and t.value(flag) is not None) else strategy
    if t.value(chosen) is None:
        chosen = flag if t.value(flag) is not None else strategy
    if both:
        other = strategy if chosen == flag else flag
        t.tell(other, "off", f"it has no effect in version {version} of FSDP")
    return chosen


# ---- DeepSpeed --------------------------------------------------------------------------------

_D = "deepspeed_config."


def _deepspeed(t: Translation, ranks: int | None, batch: int | None) -> None:
    named = t.value(f"{_D}deepspeed_config_file")
    if named is not None:
        _inner_file(t, str(named), ranks, batch)
        for name in t.below("deepspeed_config"):
            if name != "deepspeed_config_file":
                t.tell(f"{_D}{name}", "off", f"{named} says it, and Accelerate ignores it here")
        return
    stage = t.whole(f"{_D}zero_stage", least=0)
    if stage is not None and stage > 3:
        t.problem(f"{_D}zero_stage", f"{stage} is no stage of ZeRO; 0, 1, 2 or 3")
    elif stage is not None:
        t.carry(f"{_D}zero_stage", "zero", stage)
    else:
        t.default(f"{_D}zero_stage", 2, "zero = 2")
        t.fields["zero"] = 2
    _clip(t, f"{_D}gradient_clipping")
    _accumulation(t, f"{_D}gradient_accumulation_steps", ranks, batch)


def _clip(t: Translation, name: str) -> None:
    said = t.value(name)
    if said is None or str(said).lower() == "none":
        return
    try:
        clip = float(said) if not isinstance(said, bool | list | dict) else -1.0
    except ValueError:
        clip = -1.0
    if not 0 <= clip < float("inf"):
        t.problem(name, f"{said!r} is not a number of at least 0")
    elif clip > 0:
        t.carry(name, "clip", clip)
    else:
        t.tell(name, "off", "")


def _inner_file(t: Translation, named: str, ranks: int | None, batch: int | None) -> None:
    """Translate the DeepSpeed file that is named, beside this one or in the current folder."""
    beside = t.file.path.parent / named
    path = Path(named) if Path(named).is_file() and not beside.is_file() else beside
    # Raises DocumentError with the file's own name and line.
    file = read_configuration(path)
    inner = Translation(file, deepspeed.TABLE, prefix=f"{Path(named).name}:", outer=t)
    deepspeed.translate(inner, ranks, batch)
    t.tell(f"{_D}deepspeed_config_file", "adapted", "its keys follow", named)
    t.inner[("deepspeed_config", "deepspeed_config_file")] = inner


def _accumulation(t: Translation, name: str, ranks: int | None, batch: int | None) -> None:
    passes = t.whole(name)
    if passes is None or passes == 1:
        return
    if batch is None or ranks is None:
        t.tell(name, "lost", "microbatch = batch / (accumulation x ranks): say --batch")
    elif batch % (passes * ranks):
        t.problem(name, f"--batch {batch} is no multiple of {passes} x {ranks} processes")
    else:
        micro = batch // (passes * ranks)
        t.carry(name, "microbatch", micro, f"{batch} = {micro} x {passes} x {ranks} processes")


# ---- Megatron-LM, tensor parallelism, parallelism_config --------------------------------------


def _megatron(t: Translation, ranks: int | None, batch: int | None) -> None:
    prefix = "megatron_lm_config.megatron_lm_"
    tensor, pipe = t.whole(f"{prefix}tp_degree") or 1, t.whole(f"{prefix}pp_degree") or 1
    if ranks is not None and ranks % (tensor * pipe):
        t.problem(f"{prefix}tp_degree", f"{ranks} processes are no multiple of {tensor} x {pipe}")
    if tensor > 1:
        t.carry(f"{prefix}tp_degree", "split.tensor", (tensor,))
    if pipe > 1:
        t.carry(f"{prefix}pp_degree", "stages", pipe)
        micro = t.whole(f"{prefix}num_micro_batches")
        if micro is not None:
            t.carry(f"{prefix}num_micro_batches", "pipeline.microbatches", micro)
    elif t.whole(f"{prefix}num_micro_batches"):
        _accumulation(t, f"{prefix}num_micro_batches", _copies(ranks, tensor), batch)
    if t.value(f"{prefix}recompute_activations") is True:
        if pipe > 1:
            note = "the modules that a stage calls, one at a time"
            t.carry(f"{prefix}recompute_activations", "pipeline.recompute", "blocks", note)
        else:
            t.tell(f"{prefix}recompute_activations", "lost", _RECOMPUTE)
    if t.value(f"{prefix}use_distributed_optimizer") is True:
        t.carry(f"{prefix}use_distributed_optimizer", "zero", 1)
    _clip(t, f"{prefix}gradient_clipping")


def _copies(ranks: int | None, together: int) -> int | None:
    return None if ranks is None else max(1, ranks // together)


def _tensor(t: Translation, ranks: int | None, batch: int | None) -> None:
    size = t.whole("tp_config.tp_size")
    if size is not None and size > 1:
        t.carry("tp_config.tp_size", "split.tensor", (size,))


_PREFIX = "parallelism_config.parallelism_config_"


def _parallelism(t: Translation, ranks: int | None) -> None:
    if not t.has("parallelism_config"):
        return
    sizes = {
        name: t.whole(f"{_PREFIX}{name}_size") or 1
        for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    }
    total = 1
    for size in sizes.values():
        total *= size
    if ranks is not None and total != ranks:
        factors = " x ".join(map(str, sizes.values()))
        t.problem("parallelism_config", f"{factors} are {total}, and there are {ranks} processes")
        return
    if sizes["tp"] > 1:
        t.carry(f"{_PREFIX}tp_size", "split.tensor", (sizes["tp"],))
    copies, shards = sizes["dp_replicate"], sizes["dp_shard"]
    if shards > 1:
        t.fields.setdefault("zero", 3)
        if copies > 1:
            t.carry(f"{_PREFIX}dp_shard_size", "shards", shards)
        else:
            became = f"zero = {t.fields['zero']} over all ranks"
            t.tell(f"{_PREFIX}dp_shard_size", "carried", "", became)
    elif t.fields.get("zero"):
        # FSDP over one rank shards nothing.
        t.fields["zero"] = 0
    became = f"{copies} copies" if copies > 1 else ""
    t.tell(f"{_PREFIX}dp_replicate_size", "carried" if copies > 1 else "off", "", became)
