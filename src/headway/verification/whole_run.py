"""What a training run leaves behind, as a recording: its checkpoints, losses and validations.

Read here byte by byte from the manifest, without the code that wrote it or restores it.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from headway.checkpoint.directory import committed_steps, read_manifest, step_path
from headway.checkpoint.format import Manifest, TensorEntry
from headway.documents import parse_json
from headway.errors import NotEqual
from headway.run.training.run_directory import RunDirectory
from headway.verification.recording import Recording, validation_value
from headway.verification.saved_facts import numbers_of

JOURNAL = ("lr", "norm", "samples", "epoch", "position")


def recorded_end(directory: Path, steps: Sequence[int], serial: Recording) -> Recording:
    """The checkpoints of some steps with their facts, all losses, validations and lines of the
    journal, under the keys of the serial recording."""
    run = RunDirectory(directory)
    found: dict[str, Tensor] = {}
    for step in steps:
        checkpoint = step_path(run.checkpoints, step)
        manifest = read_manifest(checkpoint)
        grown = _grown_tables(checkpoint, manifest)
        for key, value in grown.items():
            found[f"{step}/{key}"] = value
        for name, entry in manifest.tensors.items():
            if _of_grown_table(name, entry, manifest):
                continue
            kind, _, own = name.partition(".")
            if kind == "model":
                kind = "buffer" if f"{step}/buffer/{own}" in serial.tensors else "parameter"
            value = read_tensor(checkpoint, entry)
            value = torch.view_as_real(value) if value.is_complex() else value
            found[f"{step}/{kind}/{own}"] = value
        cursor = {n: v for n, v in manifest.facts["cursor"].items() if n != "stream"}
        # The state of a stream is its own affair; what it gives behind it, resumed runs show.
        facts = numbers_of({**manifest.facts, "cursor": cursor})
        found |= {f"{step}/facts/{name}": value for name, value in facts.items()}
    # Of a step that was made twice, because the run was resumed, the last line counts.
    for line in run.events_file.read_text(encoding="utf-8").splitlines():
        row = parse_json(line)
        if row.get("event") in ("step", "validation"):
            kind = "loss" if row["event"] == "step" else "validation"
            loss = torch.tensor(row["loss"], dtype=torch.float64)
            said = loss if kind == "loss" else validation_value(row["loss"])
            found[f"{row['step']}/{kind}/loss"] = said
        for name, value in row.get("metrics", {}).items():
            found[f"{row['step']}/validation/{name}"] = validation_value(value)
        if row.get("event") == "step":
            for name in JOURNAL:
                if row.get(name) is not None:
                    number = torch.tensor(row[name], dtype=torch.float64)
                    found[f"{row['step']}/journal/{name}"] = number
    return Recording(found, tuple(found))


_KEYS = ".rows.keys"


def _tables_in(manifest: Manifest) -> list[str]:
    """The tables that grow, of whose keys a checkpoint tells."""
    return [
        name.removeprefix("model.").removesuffix(_KEYS)
        for name in manifest.tensors
        if name.endswith(_KEYS)
    ]


def _of_grown_table(name: str, entry: TensorEntry, manifest: Manifest) -> bool:
    own = any(name.startswith(f"model.{table}.") for table in _tables_in(manifest))
    rows = any(name.startswith(f"optimizer.{table}.weight.") for table in _tables_in(manifest))
    return own or (rows and bool(entry.shape))


def _grown_tables(checkpoint: Path, manifest: Manifest) -> dict[str, Tensor]:
    """Kind and name -> what belongs to the keys of tables that grow, in the order of the keys."""
    found: dict[str, Tensor] = {}
    for table in _tables_in(manifest):
        for store in ("rows", "waiting"):
            prefix, slots = f"model.{table}.{store}.", f"optimizer.{table}.weight."
            columns = {
                f"{table}.{store}.{name.removeprefix(prefix)}": read_tensor(checkpoint, entry)
                for name, entry in manifest.tensors.items()
                if name.startswith(prefix)
            }
            taken = columns.pop(f"{table}.{store}.taken")
            order = columns[f"{table}.{store}.keys"].masked_fill(~taken, 2**63 - 1).argsort()
            order = order[taken[order]]
            for name, column in columns.items():
                if column.is_floating_point():
                    found[f"parameter/{name}"] = column[order]
                else:
                    found[f"key/{name}"] = column[order].view(torch.int32)
            for name, entry in manifest.tensors.items() if store == "rows" else ():
                if name.startswith(slots) and entry.shape:
                    state = read_tensor(checkpoint, entry)[order]
                    found[name.replace(".", "/", 1)] = state
        clock = read_tensor(checkpoint, manifest.tensors[f"model.{table}.clock"])
        found[f"key/{table}.clock"] = clock
    return found


def expected_end(serial: Recording, steps: Sequence[int], given: Recording) -> Recording:
    """Of a serial recording what a run must have left behind.

    Buffers that are not saved, and what the optimiser keeps as plain numbers, are left out.
    """

    def wanted(key: str) -> bool:
        step, kind, _ = key.split("/", 2)
        if kind in ("loss", "validation", "facts", "journal"):
            return True
        saved = kind in ("parameter", "optimizer", "key") or (
            kind == "buffer" and key in given.tensors
        )
        return saved and int(step) in steps

    keys = [key for key in serial.order if wanted(key)]
    return Recording({key: serial.tensors[key] for key in keys}, tuple(keys))


def read_tensor(checkpoint: Path, entry: TensorEntry) -> Tensor:
    """A tensor of a checkpoint, made of its boxes."""
    dtype: torch.dtype = getattr(torch, entry.dtype)
    whole = torch.zeros(entry.shape, dtype=dtype)
    for box in entry.chunks:
        with (checkpoint / box.file).open("rb") as file:
            file.seek(box.start)
            text = bytearray(file.read(box.bytes))
        values = torch.frombuffer(text, dtype=dtype) if text else torch.empty(0, dtype=dtype)
        places = tuple(
            slice(first, first + size) for first, size in zip(box.offsets, box.shape, strict=True)
        )
        whole[places] = values.view(box.shape)
    return whole


def without_last(directory: Path, step: int) -> None:
    """Take the checkpoints after a step out of a run directory, as if the run had died there."""
    checkpoints = RunDirectory(directory).checkpoints
    for later in committed_steps(checkpoints):
        if later > step:
            shutil.rmtree(step_path(checkpoints, later))


def check_end(directory: Path, name: str, step: int) -> None:
    """Hold the last checkpoint of a run against the number of steps that it had to make.

    Raises:
        NotEqual: It ended after another step.
    """
    made = max(committed_steps(RunDirectory(directory).checkpoints), default=0)
    if made != step:
        raise NotEqual(f"a training run ({name}) ends after step {made}, and not after step {step}")


def check_resumption(directory: Path, name: str, step: int) -> None:
    """Hold what a resumed run says against the newest checkpoint that it had.

    Raises:
        NotEqual: It has resumed from another one.
    """
    lines = RunDirectory(directory).events_file.read_text(encoding="utf-8").splitlines()
    events = [parse_json(line) for line in lines]
    resumed = [row["checkpoint"] for row in events if row.get("event") == "resume"]
    if resumed[-1:] != [step]:
        raise NotEqual(
            f"a training run ({name}) resumes from the checkpoint of step {resumed[-1:]}, and not "
            f"from the newest, of step {step}"
        )
