"""single: headway import: what it prints, writes and refuses; recipes that it writes are legal."""

from __future__ import annotations

import json
import sys

import pytest

from headway.run.recipe.check import check_recipe
from headway.run.recipe.factory import load_recipe
from headway.run.step.setup import recipe_plan
from support.commands import headway_here

PARTS = "from torch import nn\ndef model():\n    return nn.Linear(2, 2)\ndef data():\n    ...\n"
PIECES = ("--model", "parts:model", "--data", "parts:data", "--loss", "tokens")
FILES = {
    "ds.json": json.dumps(
        {
            "train_batch_size": 16,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "Lamb", "params": {"lr": 0.1, "max_coeff": 1.0}},
            "communication_data_type": "fp16",
            "tensorboard": {"enabled": True},
            "sparse_attention": {"mode": "fixed"},
            "overlap": 1,
        }
    ),
    "acc.yaml": "distributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\n",
    "tt.toml": "[training]\nsteps = 20\n[validation]\nenable = true\nfreq = 5\n[parallelism]\n"
    "data_parallel_shard_degree = 2\npipeline_parallel_degree = 2\n"
    'pipeline_parallel_split_points = ["layers.1"]\n',
}
OPTIONS = {
    "ds.json": ("-n", "2", "--stop", "5 steps"),
    "acc.yaml": ("--batch", "8", "--stop", "5 steps", "--optimizer", "torch.optim:SGD"),
    "tt.toml": ("--validation", "parts:data"),
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "parts.py").write_text(PARTS)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    yield tmp_path
    sys.modules.pop("parts", None)


@pytest.mark.parametrize("name", FILES)
def test_a_complete_recipe_is_legal_and_has_the_imported_plan(folder, name, monkeypatch):
    monkeypatch.chdir(folder)
    words = ("import", name, *OPTIONS[name], *PIECES)
    done = headway_here(*words, "--out", "recipe.toml", "--json", cwd=folder)
    assert done.code == 0, done.err
    facts = json.loads(done.out)
    assert facts["missing"] == []
    check_recipe("recipe.toml")
    recipe = load_recipe("recipe.toml")
    ranks = {"tt.toml": 4}.get(name, 2)
    assert recipe_plan(recipe, None, ranks).hash == facts["hash"]


def test_the_table_says_what_became_of_each_key(folder):
    done = headway_here("import", "ds.json", "-n", "2", cwd=folder)
    assert done.code == 0
    assert "DeepSpeed: 9 keys: 6 carried over, 0 not needed, 2 do not carry over, 1 unknown" in (
        done.out
    )
    assert 'exchange.compress = "fp16"' in done.out
    assert "missing  stop, model, data, loss" in done.out
    assert "then     headway train recipe.toml --processes 2" in done.out


def test_settings_are_laid_over_a_recipe_of_ones_own(folder):
    words = ("import", "ds.json", "--recipe", "transformer:recipe", "--out", "over.toml")
    assert headway_here(*words, "-n", "2", cwd=folder).code == 0
    text = (folder / "over.toml").read_text()
    assert 'recipe = "transformer:recipe"\nbatch = 16' in text
    assert "[optimizer]\nlr = 0.1" in text
    check = headway_here("import", "ds.json", "--recipe", "x:y", "--model", "x:z", cwd=folder)
    assert check.code == 1
    assert "brings its own model" in check.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("ds.json", "--out", "recipe.py"), "Recipes are TOML: --out recipe.toml"),
        (("acc.yaml", "--plan", "p.json"), "there is no plan without"),
        (("none.json",), "No such file"),
        (("ds.json", "--from", "keras"), "--from"),
        (("ds.json", "-n", "2", "--out", "none/recipe.toml"), "cannot be written"),
    ],
)
def test_refusals(folder, words, said):
    done = headway_here("import", *words, cwd=folder)
    assert done.code == 1
    assert said in done.err
    assert "Traceback" not in done.err


def test_without_pyyaml_the_extra_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    done = headway_here("import", "acc.yaml", cwd=folder)
    assert done.code == 1
    assert "HW-1002" in done.err
    assert 'pip install "headway[yaml]"' in done.err
