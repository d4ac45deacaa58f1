"""What a training run leaves behind, as a recording: its last checkpoint and its validations.

Read here byte by byte from the manifest, without the code that wrote it or restores it.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from headway.checkpoint.directory import read_manifest, step_path
from headway.checkpoint.format import TensorEntry
from headway.run.training.run_directory import RunDirectory
from headway.verification.recording import Recording


def recorded_end(directory: Path, step: int, serial: Recording) -> Recording:
    """The checkpoint of a step and all validations, under the keys of the serial recording."""
    run = RunDirectory(directory)
    checkpoint = step_path(run.checkpoints, step)
    found: dict[str, Tensor] = {}
    for name, entry in read_manifest(checkpoint).tensors.items():
        kind, _, own = name.partition(".")
        if kind == "model":
            kind = "buffer" if f"{step}/buffer/{own}" in serial.tensors else "parameter"
        value = _read(checkpoint, entry)
        found[f"{step}/{kind}/{own}"] = torch.view_as_real(value) if value.is_complex() else value
    for line in run.events_file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row.get("event") == "validation":
            loss = torch.tensor(row["loss"], dtype=torch.float64)
            found[f"{row['step']}/validation/loss"] = loss
    return Recording(found, tuple(found))


def expected_end(serial: Recording, step: int, given: Recording) -> Recording:
    """Of a serial recording what a run must have left behind.

    Buffers that are not saved, and what the optimiser keeps as plain numbers, are left out.
    """
    wanted = ("validation", "parameter", "optimizer")
    keys = [
        key
        for key in serial.order
        if key.split("/", 2)[1] == "validation"
        or (key.startswith(f"{step}/") and key.split("/", 2)[1] in wanted)
        or (key.startswith(f"{step}/buffer/") and key in given.tensors)
    ]
    return Recording({key: serial.tensors[key] for key in keys}, tuple(keys))


def _read(checkpoint: Path, entry: TensorEntry) -> Tensor:
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
    """Take the checkpoint of a step out of a run directory, as if the run had died before it."""
    path = step_path(RunDirectory(directory).checkpoints, step)
    for file in path.iterdir():
        file.unlink()
    path.rmdir()
