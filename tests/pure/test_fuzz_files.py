"""pure: no file and no sentence, however damaged, does more than raise an error of headway's."""

from __future__ import annotations

import json
import math
import re

import pytest

from headway.checkpoint.format import (
    FileEntry,
    Manifest,
    StoredChunk,
    TensorEntry,
    _checksum,
    read_header,
)
from headway.cluster import read_cluster, to_toml
from headway.cluster.presets import PRESETS, find_cluster
from headway.cost.machines import machine_of
from headway.documents import parse_json, parse_toml
from headway.errors import HeadwayError
from headway.migration import FORMATS, ImportRequest, RecipeParts, recipe_text, translate_file
from headway.plans import Plan, data_parallel, pipelined
from headway.plans.explain import explain
from headway.report.history.reader import read_history
from headway.run.distributed.failure_record import (
    describe_failure,
    read_failures,
    root_cause,
    write_failure,
)
from headway.schedule.csv_format import read_table, to_csv, to_torch_csv
from headway.schedule.generators.registry import make_schedule
from headway.simulator.what_if import change_device_types, parse_step_faults
from headway.units import parse_bytes, parse_flops, parse_rate, parse_seconds
from support.fuzzing import batches, fuzz
from support.run_directories import write_run

every = pytest.mark.parametrize("cases", batches(), ids=str)

CLUSTER = b"""
nodes = 2
processes = 4
[device]
name = "A100-40"
peak = { float32 = "19.5 TFLOP/s" }
memory = "40 GiB"
[within]
rate = "100 Gbit/s"
latency = "5 us"
[between]
rate = "10 Gbit/s"
"""
CLUSTERS = [
    b"nodes = 2\n",
    b'nodes = ["a", "b"]\nbetween = { rate = "100 Mbit/s", latency = "1 ms" }\n',
    b'[[nodes]]\nname = "a"\nprocesses = 2\n[[nodes]]\nname = "b"\n[between]\nrate = "1 Gbit/s"\n',
]


@every
def test_fuzz_clusters(cases, tmp_path):
    path = tmp_path / "cluster.toml"

    def read(text: bytes) -> None:
        path.write_bytes(text)
        cluster = read_cluster(path)
        to_toml(cluster)

    whole = to_toml(find_cluster("dgx-a100", nodes=2)).encode()
    fuzz("cluster", cases, [*CLUSTERS, whole], read)


@every
def test_fuzz_plans(cases, tmp_path):
    path = tmp_path / "plan.json"

    def read(text: bytes) -> None:
        path.write_bytes(text)
        plan = Plan.load(path)
        explain(plan)
        assert json.loads(plan.to_json())

    plans = [data_parallel(64, processes=4), pipelined(64, processes=4, stages=2)]
    texts = [plan.to_json().encode() for plan in plans]
    fuzz("plan", cases, texts, read, limit=30.0)  # its table may have 2**20 forward passes


@every
def test_fuzz_schedule_tables(cases, tmp_path):
    path = tmp_path / "table.csv"

    def read(text: bytes) -> None:
        path.write_bytes(text)
        read_table(path)

    names = ("gpipe", "1f1b", "interleaved", "zb-h1")
    tables = [make_schedule(name, stages=2, microbatches=4) for name in names]
    texts = [to_csv(table) for table in tables] + [to_torch_csv(tables[0])]
    # Stages and micro-batches of such numbers asked for lists of all below them.
    kept = [b"4611686018427387904F0,0F1\n1F0,1F1\n", b"0F4611686018427387904\n"]
    kept += [b"# pipe d0 = ranks 0-99999999999, microbatches 0\nF0\n"]
    fuzz("table", cases, [text.encode() for text in texts], read, kept=kept)


CONFIGURATIONS = {
    "deepspeed": b"""{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4,
"optimizer": {"type": "Adam", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8}},
"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 6e-4,
"warmup_num_steps": 10, "total_num_steps": 100, "warmup_type": "linear"}},
"bf16": {"enabled": true}, "gradient_clipping": 1.0, "pipeline": {"stages": 2},
"zero_optimization": {"stage": 2, "mics_shard_size": 2, "offload_param": {"device": "cpu"}},
"tensor_parallel": {"autotp_size": 2}, "communication_data_type": "fp16"}""",
    "accelerate": b"""distributed_type: FSDP
mixed_precision: bf16
num_processes: 8
num_machines: 2
fsdp_config:
  fsdp_sharding_strategy: HYBRID_SHARD
  fsdp_version: 1
deepspeed_config: {zero_stage: 3, gradient_clipping: 1.0, gradient_accumulation_steps: 2}
megatron_lm_config: {megatron_lm_tp_degree: 2, megatron_lm_pp_degree: 2}
parallelism_config:
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 4
""",
    "torchtitan": b"""[optimizer]
name = "AdamW"
beta2 = 0.95
[lr_scheduler]
decay_ratio = 0.5
[training]
local_batch_size = 8
steps = 100
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 2
pipeline_parallel_degree = 2
pipeline_parallel_split_points = ["layers.1"]
[checkpoint]
enable = true
interval = 5
[comm]
init_timeout_seconds = 300
""",
}


@every
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_fuzz_configurations(name, cases, tmp_path):
    suffix = {"deepspeed": "json", "accelerate": "yaml", "torchtitan": "toml"}[name]
    path = tmp_path / f"configuration.{suffix}"
    assert set(CONFIGURATIONS) == set(FORMATS)

    def read(text: bytes) -> None:
        path.write_bytes(text)
        found = translate_file(path, ImportRequest(format=name, batch=None))
        keys = [row.key for row in found.rows]
        assert len(set(keys)) == len(keys) or any("." in key for key in keys)
        made = recipe_text(found.settings, RecipeParts(), name="fuzz", source="fuzz")
        parse_toml(made)
        found.settings.plan()

    fuzz(name, cases, [CONFIGURATIONS[name]], read, limit=30.0)


FILE = "rank-00000.safetensors"
MANIFEST = Manifest(
    step=50,
    facts={"seed": 1, "betas": (0.9, 0.99), "nan": math.nan},
    tensors={
        "model.w": TensorEntry(
            dtype="float32",
            shape=(2, 3),
            chunks=(StoredChunk(offsets=(0, 0), shape=(2, 3), file=FILE, start=8, bytes=24),),
        )
    },
    files={FILE: FileEntry(bytes=32, crc32=7)},
)


@every
def test_fuzz_manifests(cases):
    """With a checksum that fits, where there can be one: damage alone is found by that already."""

    def read(text: bytes) -> None:
        try:
            body = parse_json(text)
            body["checksum"] = _checksum({k: v for k, v in body.items() if k != "checksum"})
            text = json.dumps(body).encode()
        except (ValueError, TypeError, AttributeError):  # no JSON object
            pass
        found = Manifest.from_json(text.decode(errors="replace"))
        assert Manifest.from_json(found.to_json()).step == found.step

    fuzz("manifest", cases, [MANIFEST.to_json().encode()], read)


@every
def test_fuzz_headers_of_safetensors(cases, tmp_path):
    path = tmp_path / "a.safetensors"
    head = b'{"__metadata__":{"a":"b"},"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'

    def read(text: bytes) -> None:
        path.write_bytes(text)
        read_header(path)

    samples = [len(head).to_bytes(8, "little") + head + b"\0" * 8]
    fuzz("safetensors", cases, samples, read)


@every
def test_fuzz_failure_records(cases, tmp_path):
    write_failure(tmp_path, describe_failure(1, 0, ValueError("no")))
    write_failure(tmp_path, describe_failure(0, 0, HeadwayError("x", where="step 3", why="y")))
    paths = sorted((tmp_path / "failures").iterdir())
    # Without the time, so that a case is the same every time.
    good = [re.sub(rb'"time": [0-9.]+', b'"time": 1.5', path.read_bytes()) for path in paths]

    def read(text: bytes) -> None:
        paths[0].write_bytes(text)
        cause = root_cause(read_failures(tmp_path, 0))
        if cause is not None:
            assert str(cause.error())

    fuzz("failure record", cases, good, read)


@every
def test_fuzz_the_files_of_a_run(cases, tmp_path):
    """What the report reads: nothing of it is an error, damage is a note."""
    write_run(tmp_path / "run")
    files = [path for path in (tmp_path / "run").rglob("*.json*") if path.is_file()]
    good = {path: path.read_bytes() for path in files}

    def read(text: bytes) -> None:
        number, _, content = text.partition(b"|")
        path = files[int(number) % len(files)] if number.isdigit() else files[0]
        path.write_bytes(content)
        try:
            read_history(tmp_path / "run")
        finally:
            path.write_bytes(good[path])

    samples = [b"%d|%s" % (n, good[path]) for n, path in enumerate(files)]
    fuzz("run directory", cases[:: max(1, len(cases) // 100)], samples, read)


@every
def test_fuzz_names_of_clusters(cases):
    names = [name.encode() for name in PRESETS]
    kept = [b"x" * 5000, b"a\0b"]  # names that no file can have
    fuzz(
        "preset", cases, names, lambda text: find_cluster(text.decode(errors="replace")), kept=kept
    )


@every
@pytest.mark.parametrize(
    ("parse", "samples"),
    [
        (parse_bytes, [b"80 GiB", b"1.5 MB", b"12"]),
        (parse_seconds, [b"2 ms", b"0.1 us", b"1 h"]),
        (parse_rate, [b"25 Gbit/s", b"3.2 GB/s"]),
        (parse_flops, [b"19.5 TFLOP/s"]),
    ],
    ids=["bytes", "seconds", "rate", "flops"],
)
def test_fuzz_units(cases, parse, samples):
    """Called by the readers of files and options, which say where: a ValueError is legal."""
    fuzz(
        parse.__name__, cases, samples, lambda text: parse(text.decode(errors="replace")),
        legal=(ValueError,),
    )  # fmt: skip


@every
def test_fuzz_what_if_sentences(cases):
    cluster = find_cluster("dgx-a100", nodes=2)
    machine = machine_of(cluster)

    def read(text: bytes) -> None:
        sentence = text.decode(errors="replace")
        change_device_types({machine.device.name: machine}, cluster, [sentence])

    samples = [b"link node-node 100 Gbit/s", b"link rank-rank 2x", b"latency node-node 10 us"]
    samples += [b"device peak 2x", b"memory 80 GiB", b"memory 2x"]
    fuzz("what-if", cases, samples, read)


@every
def test_fuzz_faults(cases):
    cluster = find_cluster("dgx-a100", nodes=2)

    def read(text: bytes) -> None:
        parse_step_faults([text.decode(errors="replace")], 16, cluster)

    samples = [b"rank 3 slow 2x", b"rank 15 slow 1.5x from step 3 to step 9"]
    fuzz("fault", cases, samples, read)
