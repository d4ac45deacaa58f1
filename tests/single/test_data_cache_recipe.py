"""single: the data cache in recipe.toml: what the table means, and every way to get it wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from headway.cli.terminal.console import error_text
from headway.data import CachedSource
from headway.errors import HeadwayError
from headway.run.recipe.factory import load_recipe
from headway.run.recipe.user_code import describe_recipe
from support.golden import check_golden

MODULE = """
import torch


class Rows(torch.utils.data.Dataset):
    def __init__(self, samples, cache=None):
        self.samples, self.cache = samples, cache

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        return torch.full((3,), float(index)), torch.zeros(2)


def halved(sample):
    return sample[0] / 2, sample[1]


def noisy(sample):
    return sample[0] + torch.rand(3), sample[1]


def of_two(sample, other):
    return sample


constant = 3
"""

TOML = """
name = "my-run"
batch = "8 samples"
stop = "3 epochs"

[model]
call = "torch.nn:Linear"
in_features = 3
out_features = 2

[data]
call = "my_rows:Rows"
samples = 32

[data.cache]
memory = "1 MiB"
disk = "scratch"
disk_limit = "8 MiB"

[loss]
criterion = "torch.nn:MSELoss"

[optimizer]
call = "torch.optim:SGD"
lr = 0.1
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "my_rows.py").write_text(MODULE)
    yield
    sys.modules.pop("my_rows", None)


def write(text: str) -> str:
    Path("recipe.toml").write_text(text)
    return "recipe.toml"


def problem(text: str, *overrides: str) -> str:
    with pytest.raises(HeadwayError) as caught:
        load_recipe(write(text), overrides).data()
    return error_text(caught.value).replace(str(Path.cwd()), "HERE")


def test_the_table_puts_the_data_behind_a_cache():
    recipe = load_recipe(write(TOML))
    source = recipe.data()
    assert isinstance(source, CachedSource)
    assert len(source) == 32
    assert source.read([3, 4])[0].tolist() == [[3.0] * 3, [4.0] * 3]
    assert recipe.data() is source, "a validation that comes again finds what it has read"
    assert source.explain().startswith("data cache 'my_rows:Rows(samples=32) in ")
    (store,) = (path for path in Path("scratch").iterdir() if path.is_dir())
    assert (store / "data").stat().st_size > 0


def test_prepare_augment_name_and_version():
    text = TOML.replace(
        'disk = "scratch"\ndisk_limit = "8 MiB"\n',
        'name = "rows"\nversion = 3\nprepare = "my_rows:halved"\naugment = "my_rows:noisy"\n',
    )
    recipe = load_recipe(write(text))
    source = recipe.data()
    seeded = source.read_seeded([4], [9])[0]
    assert (seeded >= 2).all()
    assert (seeded < 3).all()
    assert torch.equal(source.read_seeded([4], [9])[0], seeded)
    assert not torch.equal(source.read_seeded([4], [8])[0], seeded)
    assert "data cache 'rows'" in source.explain()
    facts = describe_recipe(recipe, "recipe.toml")["data"]
    assert facts == (
        "my_rows:Rows(samples=32) behind a data cache (memory=1 MiB, version=3, "
        "prepare=my_rows:halved, augment=my_rows:noisy)"
    )


def test_mapped_tokens_behind_a_cache():
    np.arange(100, dtype=np.uint8).tofile("tokens.bin")
    start, end = TOML.index("[data]"), TOML.index("[loss]")
    data = '[data]\nmemmap = "tokens.bin"\nwindow = 9\ncache = { memory = "1 MiB" }\n\n'
    recipe = load_recipe(write(TOML[:start] + data + TOML[end:]))
    assert recipe.tokens_per_sample == 9
    assert recipe.data().read([1])[0].tolist() == [list(range(9, 18))]
    assert recipe.data().read([1])[1].tolist() == [list(range(10, 19))]
    assert recipe.data().statistics().memory_samples == 1


def test_validation_data_may_be_cached_and_an_argument_may_be_called_cache():
    text = TOML + '[validation]\ncall = "my_rows:Rows"\ncache = { memory = "1 MiB" }\n'
    recipe = load_recipe(write(text + "[validation.arguments]\nsamples = 8\ncache = 5\n"))
    source = recipe.validation()
    assert isinstance(source, CachedSource)
    assert len(source) == 8
    assert source.source.dataset.cache == 5


def test_overrides_reach_the_table():
    recipe = load_recipe(write(TOML), ["data.cache.memory=2 MiB"])
    assert "memory=2 MiB" in str(recipe.data)


def test_all_problems_of_the_table_come_at_once():
    text = TOML.replace(
        'memory = "1 MiB"\ndisk = "scratch"\ndisk_limit = "8 MiB"',
        'memroy = 3\nmemory = "2 pounds"\ndisk = 5\ndisk_limit = true\nversion = 1.5\n'
        'prepare = "halved"\nname = ""',
    )
    check_golden("recipe/cache_many_problems.txt", problem(text))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("neither", ('memory = "1 MiB"\ndisk = "scratch"\ndisk_limit = "8 MiB"', 'version = "2"')),
        ("limit_alone", ('disk = "scratch"\n', "")),
        ("no_table", ("[data.cache]\n", 'cache = "2 GiB"\n[data.other]\n')),
        ("prepare_missing", ("disk_limit", 'prepare = "my_rows:halve"\ndisk_limit')),
        ("prepare_arguments", ("disk_limit", 'prepare = "my_rows:of_two"\ndisk_limit')),
        ("augment_constant", ("disk_limit", 'augment = "my_rows:constant"\ndisk_limit')),
        ("limit_small", ('"8 MiB"', "500")),
    ],
)
def test_one_thing_wrong_in_the_table(name, change):
    assert change[0] in TOML
    check_golden(f"recipe/cache_{name}.txt", problem(TOML.replace(*change)))
