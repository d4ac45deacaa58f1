"""single: recipe.toml, recipe functions, overrides, and every way in which they can be wrong."""

from __future__ import annotations

import dataclasses
import re
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from headway.cli.terminal.console import error_text
from headway.errors import DataError, DocumentError, HeadwayError, RecipeError
from headway.plans import ExchangePlan, PipelinePlan
from headway.run.recipe.batch_units import resolve_batch, steps_per_epoch, stop_steps
from headway.run.recipe.check import check_recipe
from headway.run.recipe.factory import load_recipe, override_recipe
from headway.run.recipe.recipe import Recipe, criterion
from headway.run.recipe.schema import Scalars, apply_overrides
from headway.run.recipe.user_code import describe_recipe, describe_value
from support.golden import check_golden
from support.sampling import sampled

MODULE = """
import torch
from torch import nn
from headway import Recipe, criterion


class MyModel(nn.Module):
    def __init__(self, width=4, depth=1):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, width) for _ in range(depth))

    def forward(self, x):
        return self.layers[0](x)


def train_data(samples=100, outputs=4):
    return torch.utils.data.TensorDataset(torch.ones(samples, 3), torch.ones(samples, outputs))


def my_loss(model, batch, scale=1.0):
    return scale * (model(batch[0]) - batch[1]).square().mean()


def groups(model, lr=0.1):
    return torch.optim.SGD([{"params": model.parameters()}], lr=lr)


def sample(model, text="hello"):
    return text


def no_model():
    return 7


def broken_model():
    return {}["no such key"]


def my_recipe(width=4, samples=64):
    return Recipe(
        name="mine",
        model=lambda: MyModel(width),
        data=train_data,
        loss=criterion(nn.MSELoss()),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        batch=samples,
        stop="300 steps",
        clip=1.0,
    )


def raising():
    values = [1, 2]
    return values[2]


def not_a_recipe():
    return {"name": "x"}


def quits():
    raise SystemExit("usage: no")


constant = 3


def raising_in_a_library():
    return torch.nn.Linear(2, 2)(torch.ones(3))
"""

TOML = """
name = "my-run"
batch = "64 samples"
stop = "300 steps"
microbatch = 8
clip = 1
seed = 3

[model]
call = "my_module:MyModel"
width = 5

[data]
call = "my_module:train_data"
samples = 128
outputs = 5

[validation]
call = "my_module:train_data"

[loss]
criterion = "torch.nn:MSELoss"
reduction = "mean"

[optimizer]
call = "torch.optim:AdamW"
lr = 3e-4

[scheduler]
call = "torch.optim.lr_scheduler:CosineAnnealingLR"
T_max = 300

[showcase]
call = "my_module:sample"
text = "bye"
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The user's folder: the current one, with my_module.py; modules of other tests are gone."""
    monkeypatch.chdir(tmp_path)
    before, path = set(sys.modules), list(sys.path)
    (tmp_path / "my_module.py").write_text(MODULE)
    yield tmp_path
    assert sys.path == path, "sys.path must be as it was"
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def write(text: str, name: str = "recipe.toml") -> str:
    Path(name).write_text(textwrap.dedent(text))
    return name


def problem(reference: str, *overrides: str) -> str:
    """The message that the user sees."""
    with pytest.raises(HeadwayError) as caught:
        load_recipe(reference, overrides)
    return error_text(caught.value)


# -- what is right --------------------------------------------------------------------------------


def test_a_toml_recipe_builds_everything():
    recipe = load_recipe(write(TOML))
    model = recipe.model()
    assert model.layers[0].out_features == 5
    optimizer = recipe.optimizer(model)
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.param_groups[0]["lr"] == 3e-4
    assert recipe.scheduler(optimizer).T_max == 300
    data = recipe.data()
    assert (len(data), len(recipe.validation())) == (128, 100)
    loss = recipe.loss(model, tuple(torch.stack(x) for x in zip(*[data[0], data[1]], strict=True)))
    assert loss.shape == ()
    assert recipe.showcase(model) == "bye"
    assert (recipe.name, recipe.clip, recipe.seed, recipe.microbatch) == ("my-run", 1.0, 3, 8)
    assert resolve_batch(recipe) == 64


def test_what_a_file_leaves_out_has_the_default_of_the_class():
    recipe = load_recipe(write(TOML))
    given = {"clip", "microbatch", "seed"}
    for field in dataclasses.fields(Recipe):
        if field.default is not dataclasses.MISSING and field.name in scalar_names() - given:
            assert getattr(recipe, field.name) == field.default


def scalar_names() -> set[str]:
    return {field.name for field in dataclasses.fields(Scalars)}


def test_the_schema_knows_every_scalar_field_of_recipe():
    parts = {"model", "data", "loss", "optimizer", "validation", "scheduler", "showcase"}
    parts |= {"metrics", "callbacks", "collate"}
    fields = {field.name for field in dataclasses.fields(Recipe)}
    assert scalar_names() | {"name", "batch", "stop"} == fields - parts


def test_a_loss_may_be_a_function_a_class_or_a_criterion_function():
    model, batch = nn.Linear(3, 4), (torch.ones(2, 3), torch.zeros(2, 4))
    mean = (model(batch[0]) - batch[1]).square().mean()
    for loss, factor in [
        ('call = "my_module:my_loss"', 1),
        ('call = "my_module:my_loss"\nscale = 2.0', 2),
        ('criterion = "torch.nn.functional:mse_loss"', 1),
        ('criterion = "torch.nn:MSELoss"', 1),
    ]:
        start, end = TOML.index("[loss]"), TOML.index("[optimizer]")
        recipe = load_recipe(write(TOML[:start] + "[loss]\n" + loss + "\n" + TOML[end:]))
        assert torch.equal(recipe.loss(model, batch), factor * mean), loss


def test_an_optimiser_function_gets_the_model():
    changed = TOML.replace("torch.optim:AdamW", "my_module:groups")
    recipe = load_recipe(write(changed))
    assert type(recipe.optimizer(recipe.model())) is torch.optim.SGD


def test_a_keyword_named_call_goes_into_a_table_of_its_own():
    changed = TOML.replace('"my_module:sample"\ntext = "bye"', '"my_module:sample"')
    recipe = load_recipe(write(changed + '[showcase.arguments]\ntext = "in a table"\n'))
    assert recipe.showcase(None) == "in a table"


def test_memory_mapped_tokens(folder: Path):
    (folder / "sub").mkdir()
    np.arange(100, dtype=np.uint8).tofile(folder / "sub" / "tokens.bin")
    start, end = TOML.index("[data]"), TOML.index("[loss]")
    data = '[data]\nmemmap = "tokens.bin"\nwindow = 9\ndtype = "uint8"\n\n'
    text = (TOML[:start] + data + TOML[end:]).replace('"64 samples"', '"18 tokens"')
    recipe = load_recipe(write(text, "sub/recipe.toml"))
    source = recipe.data()
    inputs, target = source.read([1])
    assert inputs[0].tolist() == list(range(9, 18))
    assert target[0].tolist() == list(range(10, 19))
    assert recipe.tokens_per_sample == 9, "the window says how many tokens a sample has"
    assert resolve_batch(recipe) == 2


def test_a_recipe_function():
    recipe = load_recipe("my_module:my_recipe")
    assert (recipe.name, recipe.batch, recipe.clip) == ("mine", 64, 1.0)


def test_overrides_of_a_function_and_of_its_arguments():
    recipe = load_recipe(
        "my_module:my_recipe",
        ["stop=2 epochs", "arguments.width=7", "clip=0.5", "name=other", 'precision="float64"'],
    )
    assert (recipe.stop, recipe.clip, recipe.name) == ("2 epochs", 0.5, "other")
    assert recipe.precision == "float64"
    assert recipe.model().layers[0].out_features == 7


def test_a_file_may_name_a_function():
    recipe = load_recipe(
        write("""
            recipe = "my_module:my_recipe"
            stop = "10 steps"
            [arguments]
            width = 9
        """),
        ["arguments.samples=32"],
    )
    assert (recipe.stop, recipe.batch) == ("10 steps", 32)
    assert recipe.model().layers[0].out_features == 9


def test_a_key_of_the_functions_own_pipeline_or_exchange_changes_nothing_else(folder: Path):
    own = """
from dataclasses import replace
from headway.plans import ExchangePlan, PipelinePlan

def in_stages():
    return replace(
        my_recipe(),
        stages=2,
        pipeline=PipelinePlan(schedule="chimera", microbatches=6),
        exchange=ExchangePlan(bucket=7),
    )
"""
    (folder / "my_module.py").write_text(MODULE + own)
    text = 'recipe = "my_module:in_stages"\n[pipeline]\nschedule = "1f1b"\n'
    recipe = load_recipe(write(text), ['pipeline.sync="post"', "exchange.priority=true"])
    assert recipe.pipeline == PipelinePlan(schedule="1f1b", microbatches=6, sync="post")
    assert recipe.exchange == ExchangePlan(bucket=7, priority=True)


def test_wrong_values_of_a_pipeline_are_found_before_anything_starts():
    text = 'recipe = "my_module:my_recipe"\nstages = 2\n[pipeline]\nschedule = "chimer"\n'
    message = problem(write(text), "pipeline.microbatches=0", 'pipeline.recompute="all"')
    check_golden("recipe/pipeline.txt", message)


def test_overrides_of_a_file():
    recipe = load_recipe(write(TOML), ["optimizer.lr=0.5", "batch=32 samples", "model.depth=2"])
    assert recipe.optimizer(recipe.model()).param_groups[0]["lr"] == 0.5
    assert (recipe.batch, len(recipe.model().layers)) == ("32 samples", 2)


GROUPS = """
def in_groups():
    import dataclasses
    def build(model):
        first, *rest = model.parameters()
        return torch.optim.SGD([{"params": [first], "lr": 0.5}, {"params": rest}], lr=0.1)
    return dataclasses.replace(my_recipe(), optimizer=build)
"""


def test_overrides_reach_the_optimiser_of_a_function(folder: Path):
    recipe = load_recipe("my_module:my_recipe", ["optimizer.lr=0.25", "optimizer.momentum=0.5"])
    made = recipe.optimizer(recipe.model())
    assert [(g["lr"], g["momentum"]) for g in made.param_groups] == [(0.25, 0.5)]
    assert "lr=0.25" in describe_value(recipe.optimizer)
    assert override_recipe(recipe, ["optimizer.lr=2"]).optimizer(recipe.model()).defaults["lr"] == 2


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optimizer.momentun=0.5", "no option optimizer.momentun; did you mean momentum?"),
        ("optimizer.lr=-1", "Invalid learning rate: -1"),
        ("optimizer.lr=fast", "optimizer.lr='fast' is not a number"),
    ],
)
def test_a_wrong_option_of_the_optimiser_is_named(override: str, said: str):
    recipe = load_recipe("my_module:my_recipe", [override])
    with pytest.raises(RecipeError, match=re.escape(said)):
        recipe.optimizer(recipe.model())


def test_an_option_that_groups_have_of_their_own_is_not_levelled(folder: Path):
    (folder / "my_module.py").write_text(MODULE + GROUPS)
    recipe = load_recipe("my_module:in_groups", ["optimizer.lr=0.2"])
    with pytest.raises(RecipeError, match=r"optimizer.lr is 0.5, 0.1 in its parameter groups"):
        recipe.optimizer(recipe.model())


def test_an_unknown_key_of_a_function_says_where_options_belong():
    with pytest.raises(DocumentError, match=r"write optimizer.lr for an option of the optimiser"):
        load_recipe("my_module:my_recipe", ["lr=0.2"])


def test_an_override_may_supply_what_the_file_lacks():
    text = TOML.replace('batch = "64 samples"\n', "")
    assert load_recipe(write(text), ["batch=16"]).batch == 16


def test_override_values_are_toml_or_plain_text():
    changed = apply_overrides(
        {"a": {"b": 1}}, ["a.b=[1, 2]", "c=true", "d=1e-3", "e=two words", 'f="3"', "g.h=1"]
    )
    assert changed["a"] == {"b": [1, 2]}
    assert [changed[key] for key in "cdef"] == [True, 1e-3, "two words", "3"]
    assert changed["g"] == {"h": 1}


def test_the_files_folder_is_importable(folder: Path):
    (folder / "project").mkdir()
    write(MODULE.replace("class MyModel", "class Other"), "project/far_module.py")
    text = TOML.replace("my_module:", "far_module:").replace("MyModel", "Other")
    assert type(load_recipe(write(text, "project/r.toml")).model()).__name__ == "Other"


def test_a_model_may_import_its_neighbour_when_it_is_built(folder: Path):
    (folder / "project").mkdir()
    write(
        "import torch\ndef build():\n    import late\n    return late.model()", "project/early.py"
    )
    write("import torch\ndef model():\n    return torch.nn.Linear(1, 1)", "project/late.py")
    text = TOML.replace('"my_module:MyModel"\nwidth = 5', '"early:build"')
    assert isinstance(load_recipe(write(text, "project/r.toml")).model(), nn.Linear)


def test_modules_in_folders_without_init(folder: Path):
    (folder / "configs" / "deep").mkdir(parents=True)
    write(MODULE, "configs/deep/mine.py")
    assert load_recipe("configs.deep.mine:my_recipe").name == "mine"
    assert "module configs.deep.other is not found" in problem("configs.deep.other:my_recipe")


def test_a_bundled_workload_by_its_short_name():
    assert load_recipe("transformer").name
    assert check_recipe("transformer").name == "transformer"


# -- what is wrong --------------------------------------------------------------------------------


def test_all_problems_of_a_file_come_at_once():
    text = """
        name = "my/run"
        batch = "64 sampels"
        sed = 1
        seed = true
        microbatch = 0
        clip = "one"
        precision = "float16"
        drop_last = 1
        validate_every = 5
        checkpoint_every = 2.5

        [modle]
        call = "my_module:MyModel"

        [data]
        memmap = "tokens.bin"
        windw = 12

        [loss]
        call = "my_loss"

        [optimizer]
        lr = 3

        [scheduler]
        call = 3
    """
    check_golden("recipe/many_problems.txt", problem(write(text)))


def test_problems_of_overrides_are_told_from_those_of_the_file():
    text = TOML.replace("seed = 3", "sead = 3")
    message = problem(write(text), "optimiser.lr=1", "batch=64 apples", "clip=-1")
    check_golden("recipe/overrides.txt", message)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("loss_both", ('criterion = "torch.nn:MSELoss"', 'criterion = "a:b"\ncall = "a:b"')),
        ("loss_neither", ('criterion = "torch.nn:MSELoss"\n', "")),
        ("data_both", ("samples = 128\noutputs = 5", 'memmap = "tokens.bin"')),
        ("not_a_table", ('[model]\ncall = "my_module:MyModel"\nwidth = 5\n', "[other]\n")),
        ("tokens_unknown", ('"64 samples"', '"64 tokens"')),
        ("not_toml", ("seed = 3", "seed = = 3")),
        ("argument_unknown", ("width = 5", "widht = 5")),
        ("argument_of_a_class", ("lr = 3e-4", "learning_rate = 3e-4")),
        ("module_missing", ("my_module:MyModel", "my_modul:MyModel")),
        ("name_missing", ("my_module:MyModel", "my_module:MyModell")),
        ("name_missing_in_torch", ("torch.optim:AdamW", "torch.optim:AdmaW")),
        ("not_callable", ('my_module:MyModel"\nwidth = 5', 'my_module:constant"')),
        ("stop_unit", ('"300 steps"', '"300 stops"')),
        ("stop_negative", ('"300 steps"', "-3")),
    ],
)
def test_one_thing_wrong_in_a_file(name: str, change: tuple[str, str]):
    assert change[0] in TOML
    text = TOML.replace(*change)
    if name == "not_a_table":
        text = 'model = "my_module:MyModel"\n' + text.replace("[other]\n", "")
    check_golden(f"recipe/{name}.txt", problem(write(text)))


def test_several_missing_names_come_together():
    text = TOML.replace("my_module:MyModel", "my_modul:MyModel").replace(
        "my_module:sample", "my_module:sampel"
    )
    check_golden("recipe/missing_together.txt", problem(write(text)))


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("function_raises", "my_module:raising"),
        ("function_raises_in_a_library", "my_module:raising_in_a_library"),
        ("function_quits", "my_module:quits"),
        ("function_returns_dict", "my_module:not_a_recipe"),
        ("function_missing", "my_module:my_recip"),
        ("function_is_a_number", "my_module:constant"),
        ("package_missing", "my_modul:my_recipe"),
        ("attribute_of_attribute", "my_module:MyModel.nothing"),
        ("no_such_file", "recipy.toml"),
        ("not_toml_but_python", "my_module.py"),
        ("no_such_workload", "transfromer"),
        ("half_a_reference", "my_module:"),
    ],
)
def test_references_that_lead_nowhere(name: str, reference: str):
    write(TOML)
    message = problem(reference).replace(str(Path.cwd()), "HERE")
    check_golden(f"recipe/{name}.txt", message)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("import_raises", "import torch\n\nrate = 1 / 0\n"),
        ("import_syntax", "def recipe(:\n    pass\n"),
        ("import_missing", "import no_such_package\n\ndef recipe(): ...\n"),
        ("import_quits", "import sys\nsys.exit('usage: train.py FILE')\ndef recipe(): ...\n"),
        ("import_indirect", "from deeper import helper\n\ndef recipe(): ...\n"),
    ],
)
def test_a_module_that_cannot_be_imported(name: str, source: str):
    write(source.replace("rate = 1", "recipe = rate = 1"), "faulty.py")
    write("def helper(): ...\nassert 1 == 2, 'one is not two'\n", "deeper.py")
    message = problem("faulty:recipe")
    assert "Traceback" not in message
    check_golden(f"recipe/{name}.txt", message)


def test_the_users_error_stays_attached():
    with pytest.raises(RecipeError) as caught:
        load_recipe("my_module:raising")
    assert isinstance(caught.value.__cause__, IndexError)


def test_wrong_arguments_of_a_recipe_function():
    assert "has no argument widht; did you mean width?" in problem(
        "my_module:my_recipe", "arguments.widht=3"
    )


@pytest.mark.parametrize("call", ["no_model", "broken_model"])
def test_a_model_that_fails_when_it_is_built(call: str):
    text = TOML.replace('"my_module:MyModel"\nwidth = 5', f'"my_module:{call}"')
    recipe = load_recipe(write(text))
    with pytest.raises(RecipeError) as caught:
        recipe.model()
    check_golden(f"recipe/{call}.txt", error_text(caught.value))


def test_an_override_that_is_no_assignment():
    assert "'stop' is not of the form key=value" in problem("my_module:my_recipe", "stop")
    assert "batch in 'batch.x' is not a table" in problem(write(TOML), "batch.x=1")


def test_a_batch_that_is_no_whole_number_of_samples():
    message = problem(write(TOML), "batch=100 tokens", "tokens_per_sample=64")
    check_golden("recipe/batch_in_tokens.txt", message)


def test_a_wrong_amount_in_a_function_is_found_too():
    recipe = load_recipe("my_module:my_recipe")
    with pytest.raises(RecipeError, match="not a positive count of samples or tokens"):
        dataclasses.replace(recipe, batch="64 apples")


# -- arithmetic -----------------------------------------------------------------------------------


def sized(**values) -> Recipe:
    return dataclasses.replace(load_recipe("my_module:my_recipe"), **values)


@pytest.mark.parametrize(
    ("batch", "tokens", "samples"),
    [(64, None, 64), ("64 samples", None, 64), ("8192 tokens", 128, 64), ("1k samples", 1, 1000)],
)
def test_batch(batch, tokens, samples):
    assert resolve_batch(sized(batch=batch, tokens_per_sample=tokens)) == samples


@pytest.mark.parametrize(
    ("stop", "drop_last", "steps"),
    [
        ("7 steps", False, 7),
        (7, True, 7),
        ("1 epoch", False, 4),
        ("1 epoch", True, 3),
        ("3 epochs", False, 12),
        ("3 epochs", True, 9),
        ("30 samples", False, 1),
        ("31 samples", False, 2),
        ("100 samples", False, 4),
        ("101 samples", False, 5),
        ("200 samples", False, 8),
        ("90 samples", True, 3),
        ("91 samples", True, 4),
        ("180 samples", True, 6),
        ("310 tokens", False, 2),
        ("301 tokens", False, 2),
        ("300 tokens", False, 1),
    ],
)
def test_stop_in_steps_of_30_samples_of_100(stop, drop_last, steps):
    recipe = sized(batch=30, stop=stop, drop_last=drop_last, tokens_per_sample=10)
    assert stop_steps(recipe, 100) == steps


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("samples", sampled(range(1, 40), 10))
def test_the_run_ends_with_the_first_step_that_reaches_the_samples(samples, drop_last):
    batch, length = 4, 10
    recipe = sized(batch=batch, stop=f"{samples} samples", drop_last=drop_last)
    sizes = [4, 4] if drop_last else [4, 4, 2]
    consumed = steps = 0
    while consumed < samples:
        consumed += sizes[steps % len(sizes)]
        steps += 1
    assert stop_steps(recipe, length) == steps
    assert steps_per_epoch(recipe, length) == len(sizes)


def test_data_smaller_than_one_batch():
    with pytest.raises(DataError) as caught:
        stop_steps(sized(batch=64, stop="1 epoch"), 63)
    check_golden("recipe/data_too_small.txt", error_text(caught.value))


def test_tokens_need_their_number():
    with pytest.raises(RecipeError, match="tokens_per_sample is not given"):
        stop_steps(sized(batch=4, stop="64 tokens"), 100)


# -- description ----------------------------------------------------------------------------------


def test_a_recipe_as_text_for_the_run_directory():
    facts = describe_recipe(load_recipe(write(TOML)), "recipe.toml")
    assert set(facts) == {field.name for field in dataclasses.fields(Recipe)} | {"reference"}
    check_golden("recipe/described.txt", "\n".join(f"{k}: {v}" for k, v in facts.items()))


def test_functions_as_text():
    facts = describe_recipe(load_recipe("my_module:my_recipe"), "my_module:my_recipe")
    assert facts["model"].startswith("my_module:my_recipe.<locals>.<lambda> (my_module.py:")
    assert facts["data"] == "my_module:train_data"
    assert facts["loss"] == "criterion(MSELoss())"
    assert criterion(nn.MSELoss()) is not None


def test_a_wrong_file_is_reported_by_the_check_alone():
    with pytest.raises(DocumentError):
        check_recipe(write(TOML.replace("seed = 3", "seed = -3")))
