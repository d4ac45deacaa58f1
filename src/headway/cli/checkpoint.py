"""`headway checkpoint show | convert`: inspect checkpoints; convert from and to safetensors."""

from __future__ import annotations

from pathlib import Path

from headway.checkpoint.convert import from_safetensors, to_safetensors
from headway.checkpoint.directory import (
    check_file,
    committed_steps,
    newest,
    read_manifest,
    step_path,
)
from headway.checkpoint.format import Manifest
from headway.cli.terminal.console import say, say_json
from headway.errors import CheckpointDamaged, CheckpointError, UsageError
from headway.units import format_bytes


def show(directory: Path, /, *, verify: bool = True, json: bool = False) -> int:
    """Show what checkpoints hold, and whether they are intact.

    Args:
        directory: A run directory, its folder checkpoints/, or one step-... folder in that.
        verify: Read every file and compare its checksum; otherwise only manifests are read.

    Returns:
        0 where all checkpoints are sound, else 3.
    """
    shown = newest(directory)
    steps = committed_steps(shown.parent) if shown != directory else []
    paths = [step_path(shown.parent, step) for step in steps] or [shown]
    verdicts = {path: _inspect(path, verify=verify) for path in paths}
    if json:
        say_json([_facts(path, verdict) for path, verdict in verdicts.items()])
    else:
        lines = [_line(path, verdict, verify) for path, verdict in verdicts.items()]
        say("\n".join([*lines, *_content(shown, verdicts[shown])]))
    errors = [v for v in verdicts.values() if isinstance(v, CheckpointError)]
    return errors[-1].exit_code if errors else 0


def convert(source: Path, destination: Path, /) -> None:
    """Convert between checkpoints and safetensors files, tensor by tensor in constant memory.

    Args:
        source: A run directory, its folder checkpoints/ or one step-... folder (its model is
            written); or a .safetensors file.
        destination: The .safetensors file to make; or the folder of checkpoints to make, whose
            step 0 will hold the file's tensors as the model.
    """
    if source.is_file():
        done = from_safetensors(source, destination)
    elif destination.suffix == ".safetensors":
        done = to_safetensors(source, destination)
    else:
        raise UsageError(
            "one of the two must be a safetensors file",
            where=f"{source} -> {destination}",
            fix="Let the destination end in .safetensors, or give such a file as the source.",
        )
    say(f"{done.path}: {done.tensors} tensors, {format_bytes(done.bytes)}")


def _inspect(checkpoint: Path, *, verify: bool) -> Manifest | CheckpointError:
    """The manifest, or what is wrong with the checkpoint."""
    try:
        manifest = read_manifest(checkpoint)
        for name, entry in manifest.files.items() if verify else ():
            check_file(checkpoint / name, entry)
    except CheckpointError as error:
        return error
    return manifest


def _line(checkpoint: Path, verdict: Manifest | CheckpointError, verify: bool) -> str:
    if isinstance(verdict, CheckpointError):
        word = "DAMAGED" if isinstance(verdict, CheckpointDamaged) else "not usable"
        # An error has several lines, the list one for each checkpoint.
        return f"{checkpoint.name}  {word}  {' '.join(str(verdict).split())}"
    return (
        f"{checkpoint.name}  {'sound' if verify else 'not verified'}  "
        f"{format_bytes(verdict.bytes)}, {len(verdict.tensors)} tensors "
        f"in {len(verdict.files)} files"
    )


def _content(checkpoint: Path, verdict: Manifest | CheckpointError) -> list[str]:
    """The names of the facts, and one line per tensor."""
    if isinstance(verdict, CheckpointError):
        return []
    lines = ["", f"{checkpoint.name}: {', '.join(verdict.facts) or 'no facts'}"]
    width = max((len(name) for name in verdict.tensors), default=0)
    for name, entry in verdict.tensors.items():
        files = sorted({chunk.file for chunk in entry.chunks})
        lines.append(
            f"  {name:<{width}}  {entry.dtype}{list(entry.shape)}  {format_bytes(entry.bytes)}  "
            + ", ".join(files)
        )
    return lines


def _facts(checkpoint: Path, verdict: Manifest | CheckpointError) -> dict[str, object]:
    if isinstance(verdict, CheckpointError):
        return {"path": str(checkpoint), "sound": False, "code": verdict.code, "why": str(verdict)}
    return {
        "path": str(checkpoint),
        "sound": True,
        "step": verdict.step,
        "bytes": verdict.bytes,
        "tensors": {
            name: {"dtype": entry.dtype, "shape": list(entry.shape)}
            for name, entry in verdict.tensors.items()
        },
    }
