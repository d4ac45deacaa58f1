"""Weights of the reference implementation, from its TensorFlow checkpoint saved as .npz.

A convolution is `seed_update.NAME.weights`, [kernel z, y, x, inputs, outputs], and
`seed_update.NAME.biases`, [outputs]; the names are conv0_a, conv0_b, conv1_a ... and conv_lom.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.errors import DataError
from headway.floodfill.network import FloodFillingNetwork, Triple

_PREFIX = "seed_update."
_LAST = f"{_PREFIX}conv_lom.weights"


def read_published_weights(
    path: str | Path, *, fov: Triple = (33, 33, 33), deltas: Triple = (8, 8, 8)
) -> FloodFillingNetwork:
    """The network of a file; depth and features follow from its arrays.

    Args:
        fov: The field of view it was trained for, which the file does not tell.
        deltas: The moves it was trained for, likewise.

    Raises:
        DataError: There is no such file, or it does not hold these weights.
    """
    arrays = _read_arrays(Path(path))
    features = arrays[_LAST].shape[-2] if arrays.get(_LAST, np.zeros(0)).ndim == 5 else 32
    network = FloodFillingNetwork(_depth(arrays), fov=fov, deltas=deltas, features=features)
    _assign(network, arrays, str(path))
    return network


def load_published_weights(network: FloodFillingNetwork, path: str | Path) -> None:
    """Give a network the weights of a file.

    Raises:
        DataError: There is no such file, or its weights are of another depth or shape.
    """
    arrays = _read_arrays(Path(path))
    depth = _depth(arrays)
    if depth != network.depth:
        raise DataError(
            f"the weights are of depth {depth}, and the network of depth {network.depth}",
            where=str(path),
            fix=f"Make the network with depth={depth}.",
        )
    _assign(network, arrays, str(path))


def _read_arrays(path: Path) -> Mapping[str, NDArray[Any]]:
    try:
        with np.load(path) as file:
            return {name: file[name] for name in file.files}
    # One array (.npy) is no archive, and cannot be entered: TypeError.
    except (OSError, ValueError, TypeError, AttributeError, EOFError, zipfile.BadZipFile) as error:
        why = error.strerror if isinstance(error, OSError) else None
        raise DataError(
            "weights cannot be read",
            where=str(path),
            why=why or "It is no .npz file of arrays.",
        ) from error


def _depth(arrays: Mapping[str, NDArray[Any]]) -> int:
    """One more than the residual modules that the file has, in order."""
    depth = 1
    while f"{_PREFIX}conv{depth}_a.weights" in arrays:
        depth += 1
    return depth


def _names(network: FloodFillingNetwork) -> dict[str, str]:
    """The file's convolutions by ours."""
    names = {"conv0_a": "conv0_a", "conv0_b": "conv0_b", "conv_lom": "conv_lom"}
    for index in range(network.depth - 1):
        names |= {f"residual.{index}.{which}": f"conv{index + 1}_{which}" for which in "ab"}
    return names


def _assign(network: FloodFillingNetwork, arrays: Mapping[str, NDArray[Any]], where: str) -> None:
    names = _names(network)
    state: dict[str, Tensor] = {}
    problems = []
    for ours, parameter in network.named_parameters():
        module, _, kind = ours.rpartition(".")
        key = f"{_PREFIX}{names[module]}.{'weights' if kind == 'weight' else 'biases'}"
        # [outputs, inputs, z, y, x] here.
        layout = (2, 3, 4, 1, 0) if kind == "weight" else (0,)
        expected = tuple(parameter.shape[dim] for dim in layout)
        array = arrays.get(key)
        if array is None:
            problems.append(f"{key} is missing")
        elif array.shape != expected:
            problems.append(f"{key} is {list(array.shape)}, expected {list(expected)}")
        else:
            order = tuple(np.argsort(layout))
            state[ours] = torch.from_numpy(array.astype(np.float32).transpose(order).copy())
    if problems:
        more = [f"and {len(problems) - 4} more"] if len(problems) > 4 else []
        raise DataError(
            f"no weights of a flood-filling network of depth {network.depth} with "
            f"{network.features} features",
            where=where,
            why="; ".join(problems[:4] + more),
        )
    network.load_state_dict(state)
