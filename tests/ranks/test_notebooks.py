"""ranks: recipes that a script without a guard, a notebook's cells or a function define."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import headway
from headway.launch.forkserver import main_left_alone
from headway.run.recipe.sent_recipe import SentRecipe, send_recipe
from support.commands import command

X = torch.ones(8, 4)
CELL = """
import torch, headway
from torch import nn

print("begins")

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.last = nn.Linear(4, width)

    def forward(self, x):
        return self.last(x)

def loss(model, batch):
    x, y = batch
    return (model(x) - y).square().mean()

width = 2
x = torch.randn(8, 4)
recipe = headway.Recipe(
    name="cell", model=lambda: Net(width), data=torch.utils.data.TensorDataset(x, x[:, :2]),
    loss=loss, optimizer=torch.optim.AdamW, batch=4, stop=2,
)
run = headway.train(recipe, processes=2)
print("trained", run.steps, headway.verify(recipe, processes=2, steps=2).holds)
"""
NOTEBOOK = f"""
import sys
del sys.modules["__main__"].__file__
exec(compile({CELL!r}, "/tmp/ipykernel_1/1.py", "exec"), sys.modules["__main__"].__dict__)
"""


def local_recipe() -> headway.Recipe:
    return headway.Recipe(
        name="local",
        model=lambda: nn.Linear(4, 2),
        data=lambda: TensorDataset(X, X[:, :2]),
        loss=nn.MSELoss(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        batch=4,
        stop=2,
    )


def test_functions_without_a_name_are_sent_by_value():
    sent = send_recipe(local_recipe())
    assert isinstance(sent, SentRecipe)
    again = sent.open()
    assert isinstance(again.model(), nn.Linear)
    assert send_recipe(sent) is sent
    assert send_recipe("module:function") == "module:function"


def test_the_main_module_is_put_back(monkeypatch):
    main = sys.modules["__main__"]
    before = (main.__dict__.get("__file__"), main.__spec__)
    with main_left_alone():
        assert (main.__file__, main.__spec__) == (None, None)
    assert (main.__dict__.get("__file__"), main.__spec__) == before
    monkeypatch.delattr(main, "__file__", raising=False)
    with main_left_alone():
        pass
    assert not hasattr(main, "__file__")


@pytest.mark.slow
@pytest.mark.parametrize("text", [CELL, NOTEBOOK], ids=["script", "notebook"])
def test_a_recipe_of_the_main_module_trains_and_is_verified_in_workers(text, tmp_path):
    # Not forked from a warm process: what the main module is, is what is tested.
    (tmp_path / "script.py").write_text(text)
    done = command(sys.executable, "script.py", cwd=tmp_path)
    assert (done.code, done.out.splitlines()) == (0, ["begins", "trained 2 True"])
