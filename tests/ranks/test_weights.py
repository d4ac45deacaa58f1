"""ranks: starting from pretrained or partial weights, as one process does."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import TensorDataset

import headway
from headway.checkpoint.pretrained import load_weights
from headway.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch


class Tied(nn.Module):
    """An encoder, and a head that shares its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
        self.again = nn.Linear(4, 6)
        self.again.weight = self.encoder[0].weight
        self.head = nn.Linear(6, 1)

    def forward(self, x: Any) -> Any:
        return self.head(self.again(self.encoder(x)))


def data() -> TensorDataset:
    draw = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(20, 4, generator=draw), torch.randn(20, 1, generator=draw))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def recipe(weights: str, only: str = "") -> headway.Recipe:
    return headway.Recipe(
        name="weights", model=Tied, data=data, loss=headway.criterion(nn.MSELoss()), optimizer=sgd,
        batch=8, stop=4, weights=weights, weights_only=(only,) if only else (),
    )  # fmt: skip


def numbers() -> dict[str, torch.Tensor]:
    """As `save_pretrained` has them: of tied tensors one."""
    torch.manual_seed(9)
    found = {name: torch.randn_like(t) for name, t in Tied().state_dict().items()}
    del found["again.weight"]
    return found


def write(form: str, folder: Any) -> Any:
    found = numbers()
    if form == "safetensors":
        save_file(found, folder / "my.safetensors")
        return folder / "my.safetensors"
    if form == "torch":
        torch.save({"epoch": 3, "state_dict": found}, folder / "my.pt")
        return folder / "my.pt"
    if form == "directory":
        save_file(found, folder / "model.safetensors")
        return folder
    # Shards with an index.
    names = list(found)
    where = {}
    for number, some in enumerate([names[:3], names[3:]], 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: found[name] for name in some}, folder / file)
        where |= dict.fromkeys(some, file)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("form", ["safetensors", "torch", "directory", "shards"])
def test_every_form_fills_the_model(form, tmp_path):
    model = Tied()
    load_weights(model, write(form, tmp_path))
    for name, value in numbers().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert model.again.weight is model.encoder[0].weight
    other = headway.Executor(
        made := Tied(), sgd(made), loss=headway.criterion(nn.MSELoss()), batch=4, weights=tmp_path
        if form in ("directory", "shards") else next(tmp_path.iterdir()),
    ).model  # fmt: skip
    assert torch.equal(other.state_dict()["head.weight"], numbers()["head.weight"])


def test_a_part_by_pattern(tmp_path):
    torch.manual_seed(0)
    model = Tied()
    head = model.head.weight.detach().clone()
    load_weights(model, write("shards", tmp_path), ["encoder.*", "again.bias"])
    assert torch.equal(model.encoder[2].bias, numbers()["encoder.2.bias"])
    assert torch.equal(model.head.weight, head)
    with pytest.raises(CheckpointMismatch, match="no tensor of the model matches"):
        load_weights(model, tmp_path, ["decoder.*"])


def test_differences_are_listed_and_nothing_is_changed(tmp_path):
    found = numbers()
    found["encodr.0.weight"] = found.pop("encoder.0.weight")
    found["head.bias"] = torch.zeros(7)
    save_file(found, tmp_path / "my.safetensors")
    model = Tied()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(CheckpointMismatch) as caught:
        load_weights(model, tmp_path / "my.safetensors")
    for text in (
        "missing: encoder.0.weight; did you mean encodr.0.weight",
        "unexpected: encodr.0.weight",
        "head.bias: [7] in the file, [1] in the model",
        "weights_only=",
    ):
        assert text in str(caught.value)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    with pytest.raises(CheckpointError, match="there are no such weights"):
        load_weights(model, tmp_path / "other.safetensors")
    (tmp_path / "broken.pt").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_weights(model, tmp_path / "broken.pt")
    torch.save(nn.Linear(2, 2), tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"Save model.state_dict\(\)"):
        load_weights(model, tmp_path / "model.pt")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b"}}')
    with pytest.raises(CheckpointDamaged, match="is not a plain file name"):
        load_weights(model, tmp_path)


@pytest.mark.parametrize(
    ("form", "only", "overrides"),
    [
        ("shards", "", ["zero=3"]),
        pytest.param("torch", "encoder.*", ["stages=2"], marks=pytest.mark.slow),
    ],
)
def test_every_plan_starts_from_them_as_the_serial_run_does(form, only, overrides, tmp_path):
    given = write(form, tmp_path)
    arguments = [f'arguments.weights="{given}"', f'arguments.only="{only}"']
    (run,) = headway.verify(
        "test_weights:recipe", processes=2, steps=2, overrides=[*arguments, *overrides]
    ).runs
    assert run.comparison.equal
