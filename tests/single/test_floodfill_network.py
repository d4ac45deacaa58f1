"""single: the flood-filling network: its size and equation; weights in TensorFlow's layout."""

import numpy as np
import pytest
import torch
from scipy import ndimage

from headway.errors import DataError
from headway.floodfill.network import FloodFillingNetwork
from headway.floodfill.published_weights import load_published_weights, read_published_weights
from support.fib25 import WEIGHTS, needs_fib25


def published_arrays(depth, features=3, seed=0):
    """Random weights as the reference implementation's checkpoint has them."""
    rng = np.random.default_rng(seed)
    names = ["conv0_a", "conv0_b"] + [f"conv{i}_{w}" for i in range(1, depth) for w in "ab"]
    arrays = {}
    for name in names:
        inputs = 2 if name == "conv0_a" else features
        arrays[f"seed_update.{name}.weights"] = rng.normal(0, 0.3, (3, 3, 3, inputs, features))
        arrays[f"seed_update.{name}.biases"] = rng.normal(0, 0.3, features)
    arrays["seed_update.conv_lom.weights"] = rng.normal(0, 0.3, (1, 1, 1, features, 1))
    arrays["seed_update.conv_lom.biases"] = rng.normal(0, 0.3, 1)
    return {name: array.astype(np.float32) for name, array in arrays.items()}


def convolved(hidden, arrays, name):
    """A padded convolution of [z, y, x, channels], in float64 and without torch."""
    weights, biases = (arrays[f"seed_update.{name}.{k}"] for k in ("weights", "biases"))
    return np.stack(
        [
            sum(
                ndimage.correlate(hidden[..., i], weights[..., i, o], mode="constant")
                for i in range(hidden.shape[-1])
            )
            + biases[o]
            for o in range(weights.shape[-1])
        ],
        axis=-1,
    )


def test_the_size_of_the_published_network():
    with torch.device("meta"):
        network = FloodFillingNetwork(12)
    assert sum(p.numel() for p in network.parameters()) == 638_433


def test_the_equation_of_the_reference_implementation(tmp_path):
    arrays = published_arrays(depth=3)
    np.savez(tmp_path / "weights.npz", **arrays)
    network = read_published_weights(tmp_path / "weights.npz").double()
    rng = np.random.default_rng(1)
    image, mask = rng.normal(size=(2, 4, 5, 6))

    hidden = np.maximum(convolved(np.stack((image, mask), -1), arrays, "conv0_a"), 0)
    hidden = convolved(hidden, arrays, "conv0_b")
    for i in (1, 2):
        inner = np.maximum(convolved(np.maximum(hidden, 0), arrays, f"conv{i}_a"), 0)
        hidden = hidden + convolved(inner, arrays, f"conv{i}_b")
    expected = mask + convolved(np.maximum(hidden, 0), arrays, "conv_lom")[..., 0]

    found = network(*(torch.from_numpy(a)[None, None] for a in (image, mask)))
    np.testing.assert_allclose(found[0, 0].detach().numpy(), expected, rtol=1e-12, atol=1e-12)


def test_initial_weights():
    torch.manual_seed(0)
    network = FloodFillingNetwork(4)
    weights = torch.cat([m.weight.flatten() for m in network.modules() if hasattr(m, "weight")])
    # A normal cut off at two deviations keeps 0.774 of its variance.
    assert weights.std().item() == pytest.approx(0.01 * 0.774**0.5, rel=0.02)
    assert weights.abs().max() <= 0.02
    assert all((m.bias == 0).all() for m in network.modules() if hasattr(m, "bias"))


@needs_fib25
def test_the_published_weights():
    network = read_published_weights(WEIGHTS)
    assert (network.depth, network.features) == (12, 32)
    total = sum(p.double().sum() for p in network.parameters()).item()
    with np.load(WEIGHTS) as file:
        assert total == pytest.approx(sum(file[name].sum(dtype=float) for name in file.files))
    kernel = np.load(WEIGHTS)["seed_update.conv0_a.weights"]
    assert network.conv0_a.weight[5, 1, 0, 1, 2].item() == kernel[0, 1, 2, 1, 5]


def test_weights_of_another_depth(tmp_path):
    np.savez(tmp_path / "weights.npz", **published_arrays(depth=3))
    with pytest.raises(DataError, match=r"depth 3, and the network of depth 5"):
        load_published_weights(FloodFillingNetwork(5, features=3), tmp_path / "weights.npz")


def test_weights_of_another_width(tmp_path):
    np.savez(tmp_path / "weights.npz", **published_arrays(depth=2))
    expected = r"conv0_a\.weights is \[3, 3, 3, 2, 3\], expected \[3, 3, 3, 2, 4\]"
    with pytest.raises(DataError, match=expected):
        load_published_weights(FloodFillingNetwork(2, features=4), tmp_path / "weights.npz")


def test_a_file_without_weights(tmp_path):
    np.savez(tmp_path / "other.npz", voxels=np.zeros(3))
    with pytest.raises(DataError, match=r"conv0_a\.weights is missing"):
        read_published_weights(tmp_path / "other.npz")
    (tmp_path / "text.npz").write_text("no archive")
    with pytest.raises(DataError, match=r"It is no \.npz file"):
        read_published_weights(tmp_path / "text.npz")
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(DataError, match=r"It is no \.npz file"):
        read_published_weights(tmp_path / "one.npy")
    with pytest.raises(DataError, match="No such file"):
        read_published_weights(tmp_path / "absent.npz")
