"""Weights of a network from a file: the published ones, or of a training by headway."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from headway.errors import DataError
from headway.floodfill.network import FloodFillingNetwork, Triple
from headway.floodfill.published_weights import read_published_weights


def read_network(
    path: Path, *, fov: Triple = (33, 33, 33), deltas: Triple = (8, 8, 8)
) -> FloodFillingNetwork:
    """The network of a file.

    Args:
        path: An .npz file (`published_weights.py`), or a .safetensors file as `headway checkpoint
            convert` writes it.

    Raises:
        DataError: There is no such file, or it does not hold these weights.
    """
    if path.suffix != ".safetensors":
        return read_published_weights(path, fov=fov, deltas=deltas)
    try:
        state = load_file(path)
    except Exception as error:  # safetensors has an exception of its own, which is not public
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise DataError("weights cannot be read", where=str(path), why=why or "") from error
    first = state.get("conv0_a.weight")
    features = len(first) if first is not None else 32
    depth = 1 + sum(name.startswith("residual.") and name.endswith("a.weight") for name in state)
    network = FloodFillingNetwork(depth, fov=fov, deltas=deltas, features=features)
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        raise DataError(
            f"no weights of a flood-filling network of depth {depth}",
            where=str(path),
            why=" ".join(str(error).split())[:300],
        ) from error
    return network
