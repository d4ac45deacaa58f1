"""single: recipes, executors and calls with the commonest mistakes: one sentence, what to write."""

from __future__ import annotations

import functools
import inspect
import threading

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

import headway
from headway.plans import ExchangePlan
from headway.run.recipe.accepted_forms import copied
from headway.run.recipe.factory import load_recipe
from headway.run.step.randomness import build_model

X, Y = torch.randn(8, 4), torch.zeros(8, 2)


class Net(nn.Module):
    """Two layers that share their weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one = nn.Linear(width, width)
        self.two = nn.Linear(width, width)
        self.two.weight = self.one.weight
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x))


class Locked(nn.Module):
    """It cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def make(**fields: object) -> headway.Recipe:
    given = {
        "name": "mistake",
        "model": lambda: nn.Linear(4, 2),
        "data": lambda: TensorDataset(X, Y),
        "loss": headway.criterion(nn.MSELoss()),
        "optimizer": lambda model: SGD(model.parameters(), lr=0.1),
        "batch": 4,
        "stop": 2,
    }
    return headway.Recipe(**(given | fields))  # type: ignore[arg-type]


def no_parameter(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [SGD(model.parameters())]


NET = Net(4)
MISTAKES = {
    "a model class that needs arguments": ({"model": Net}, "lambda: Net(width=...)"),
    "no model": ({"model": None}, "None cannot be used: write model=lambda: Net"),
    "a wrapped model": (
        {"model": nn.DataParallel(NET)},
        "does what headway does itself: write model=model.module",
    ),
    "a model that cannot be copied": ({"model": Locked()}, "write model=lambda: Locked(...)"),
    "a model without numbers": ({"model": nn.Linear(2, 2, device="meta")}, "write model=lambda: "),
    "an optimiser instance": (
        {"optimizer": SGD(NET.parameters(), lr=0.5, momentum=0.9)},
        "optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)",
    ),
    "a list of optimisers": (
        {"optimizer": [AdamW(NET.parameters()), SGD(NET.parameters())]},
        "a list of 2, and a recipe has one optimiser: write optimizer=lambda model: torch.optim",
    ),
    "an optimiser's name": ({"optimizer": "adamw"}, "write optimizer=torch.optim.AdamW"),
    "an optimiser of nothing": ({"optimizer": lambda: AdamW(NET.parameters())}, "lambda model: "),
    "a criterion class": ({"loss": nn.MSELoss}, "write loss=torch.nn.MSELoss()"),
    "a sum": ({"loss": nn.MSELoss(reduction="sum")}, "write reduction='mean', or a loss"),
    "a sum in a partial": (
        {"loss": functools.partial(nn.functional.mse_loss, reduction="sum")},
        "write reduction='mean'",
    ),
    "a criterion of one argument": (
        {"loss": lambda output: output.mean()},
        "(output) is called with (output, target): write loss=headway.criterion(lambda output, ta",
    ),
    "a criterion that needs more": (
        {"loss": nn.TripletMarginLoss()},
        "also needs negative: write loss=lambda output, target: TripletMarginLoss()(",
    ),
    "a loss of one argument": ({"loss": lambda model: 0}, "is called with (model, batch): write"),
    "a tensor": ({"data": X}, "write data=torch.utils.data.TensorDataset(x)"),
    "tensors": ({"data": (X, Y)}, "write data=torch.utils.data.TensorDataset(x, y)"),
    "parts of data": ({"data": {"train": [1]}}, "write data=data['train']"),
    "a path": ({"data": "train.bin"}, "a str cannot be used: write data=lambda: MyDataset"),
    "a scheduler instance": (
        {"scheduler": StepLR(SGD(NET.parameters()), 2)},
        "scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, ...)",
    ),
    "a scheduler class that needs more": (
        {"scheduler": StepLR},
        "lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=...)",
    ),
    "a table of the exchange": (
        {"exchange": {"compress": "fp16"}},
        "write exchange=ExchangePlan(compress='fp16')",
    ),
    "a misspelt field": ({"optimiser": SGD}, "there is no argument optimiser; did you mean optim"),
    "epochs": ({"epochs": 3}, 'there is no argument epochs: write stop="3 epochs"'),
    "a rate": ({"lr": 0.1}, "argument lr: write optimizer=lambda model: torch.optim.AdamW(model"),
    "a misspelt unit": ({"batch": "64 sampels"}, 'for example "64 samples"'),
    "a precision of another library": ({"precision": "fp16"}, "'float32', 'float64' or 'bfloat16'"),
    "a validation of nothing": (
        {"validate_every": 5},
        "validate_every: there is no validation data: write validation=lambda: MyDataset('valid')",
    ),
    "metrics of nothing": (
        {"metrics": lambda model, batch: {}, "validation_samples": 3},
        "'), or leave out validation_samples and metrics",
    ),
    "a number that is none": ({"clip": 0}, "clip: 0 is not a number greater than 0"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_recipe_is_one_sentence_with_what_to_write(mistake):
    fields, said = MISTAKES[mistake]
    with pytest.raises(headway.RecipeError) as refused:
        make(**fields)
    assert said in refused.value.what
    assert (refused.value.why, refused.value.fix) == ("", "")
    assert refused.value.where.startswith(__file__)


def test_all_mistakes_of_a_recipe_are_told_together():
    with pytest.raises(headway.RecipeError) as refused:
        make(model=Net, optimizer=[], data=X, batch=4.0, stopp=3)
    assert "5 arguments" in refused.value.what
    told = [line.split(":")[0].strip() for line in refused.value.why.splitlines()]
    assert told == [
        "there is no argument stopp; did you mean stop?", "model", "data", "optimizer", "batch",
    ]  # fmt: skip


def test_what_is_missing_is_told_beside_what_is_unknown_but_not_twice():
    given = {"model": lambda: NET, "data": lambda: X, "batch": 4}
    with pytest.raises(headway.RecipeError) as refused:
        headway.Recipe(**given, stop="1 epoch", epochs=3)  # type: ignore[arg-type]
    assert "3 arguments are missing: write name=..., loss=..., optimizer=..." in refused.value.why
    with pytest.raises(headway.RecipeError) as refused:
        headway.Recipe(**given, stop="1 epoch", nam="x")  # type: ignore[arg-type]
    assert "no argument nam; did you mean name" in str(refused.value)
    assert "2 arguments are missing: write loss=..., optimizer=..." in refused.value.why


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ((X, Y), "data: a tuple does not say what a sample is: return torch.utils.data.TensorData"),
        ({"train": [1]}, "data: a dict is not a data set: return data['train'] if"),
    ],
)
def test_a_function_that_returns_bare_tensors_or_parts_is_told_as_they_are(returned, said):
    with pytest.raises(headway.RecipeError) as refused:
        make(data=lambda: returned).data()
    assert said in refused.value.what
    assert "test_accepted_forms.py" in refused.value.where


def test_missing_fields_are_named_together():
    with pytest.raises(
        headway.RecipeError, match=r"3 arguments are missing: write loss=\.\.\., op"
    ):
        headway.Recipe(name="x", model=NET, data=[1], batch=1)


def test_a_factory_that_returns_something_else_is_named():
    with pytest.raises(headway.RecipeError, match="no_parameter returned a list, not an Optim"):
        make(optimizer=no_parameter).optimizer(NET)
    with pytest.raises(headway.RecipeError, match="returned a type, not a Module"):
        make(model=lambda: Net).model()


# -- accepted -------------------------------------------------------------------------------------


def test_a_model_gives_equal_copies_of_itself():
    recipe = make(model=NET)
    first, second = build_model(recipe), build_model(recipe)
    with torch.no_grad():
        first.one.weight.zero_()
    for name, value in NET.state_dict().items():
        assert torch.equal(second.state_dict()[name], value)
    assert first.one.weight is first.two.weight
    assert first is not NET
    with torch.device("meta"):
        meta = recipe.model()
    assert all(value.is_meta for value in (*meta.parameters(), *meta.buffers()))
    assert meta.one.weight is meta.two.weight
    assert copied(NET).one.weight is not NET.one.weight


@pytest.mark.parametrize("optimizer", [AdamW, functools.partial(AdamW, lr=0.5)])
def test_an_optimiser_class_gets_the_parameters(optimizer):
    made = make(optimizer=optimizer).optimizer(NET)
    assert made.param_groups[0]["params"] == list(NET.parameters())
    assert made.defaults["lr"] == (0.5 if optimizer is not AdamW else 1e-3)


def target_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def scores_loss(scores: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return (scores - wanted).square().mean()


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.functional.mse_loss, target_loss, scores_loss])
def test_a_criterion_is_a_loss(loss):
    model = nn.Linear(4, 2)
    found = make(loss=loss).loss(model, (X, Y))
    assert torch.equal(found, nn.functional.mse_loss(model(X), Y))


def test_data_are_read_as_they_are():
    examples = TensorDataset(X, Y)
    recipe = make(data=examples, validation=[(X[0], Y[0])])
    assert recipe.data() is examples
    assert recipe.validation is not None
    assert len(recipe.validation()) == 1


IN_FUNCTION = """
import torch, headway
from torch import nn

OUTSIDE = nn.Linear(4, 2)

def recipe(outside=False, seed=0):
    x = torch.randn(8, 4)
    return headway.Recipe(
        name="inside", model=OUTSIDE if outside else nn.Linear(4, 2), seed=seed,
        data=torch.utils.data.TensorDataset(x, x[:, :2]), loss=nn.MSELoss(),
        optimizer=torch.optim.AdamW, batch=4, stop=2,
    )
"""


def test_a_module_may_hold_the_recipe_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "held.py").write_text(IN_FUNCTION + "\nheld = recipe()\nother = 3\n")
    assert load_recipe("held:held", ["stop=5"]).stop == 5
    with pytest.raises(headway.RecipeError) as refused:
        load_recipe("held:held", ["arguments.outside=true"])
    assert "It takes no arguments" in refused.value.fix
    with pytest.raises(headway.RecipeError, match="other is an int, not a function") as refused:
        load_recipe("held:other")
    assert "return headway.Recipe(" in refused.value.fix


@pytest.mark.parametrize("outside", ["true", "false"])
def test_a_function_that_builds_instances_gives_the_same_in_every_process(
    outside, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)

    def numbers(name: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        # A module of its own: imported anew, as in another process.
        (tmp_path / f"{name}.py").write_text(IN_FUNCTION)
        torch.randn(1)
        found = load_recipe(f"{name}:recipe", [f"arguments.outside={outside}", f"seed={seed}"])
        return build_model(found).weight, found.data().tensors[0]

    first, again, other = numbers("a1" + outside, 5), numbers("a2" + outside, 5), numbers(
        "a3" + outside, 6
    )  # fmt: skip
    assert all(map(torch.equal, first, again))
    assert torch.equal(first[0], other[0]) == (outside == "true")


# -- executors, exchanges, calls ------------------------------------------------------------------

BUILT = nn.Linear(4, 2)
STEP = SGD(BUILT.parameters(), lr=0.1)
CALLS = {
    "a model class": (lambda: executor(model=Net), "model: a type cannot be used"),
    "an optimiser class": (lambda: executor(optimizer=SGD), "write torch.optim.SGD(model.param"),
    "optimisers": (lambda: executor(optimizer=[STEP, STEP]), "write one with a parameter group"),
    "a loss class": (lambda: executor(loss=nn.MSELoss), "write loss=torch.nn.MSELoss()"),
    "a batch with a unit": (lambda: executor(batch="4 samples"), "write batch=64"),
    "a loader's batch": (
        lambda: executor().step((X, Y)),
        "write for batch in run.batches(dataset): run.step(batch)",
    ),
    "a misspelt option": (lambda: executor(sheduler=None), "did you mean scheduler?"),
    "a misspelt choice": (
        lambda: headway.Exchange(BUILT, STEP, compres="fp16"),
        "there is no choice compres; did you mean compress?",
    ),
    "an exchange of a class": (lambda: headway.Exchange(BUILT, SGD), "write torch.optim.SGD("),
    "a function for a recipe": (lambda: headway.train(make), "make is not a recipe: write make()"),
    "processes in quotes": (
        lambda: headway.train(make(), processes="2"),
        "processes='2' is not a whole number: write processes=2",
    ),
    "a model for a recipe": (lambda: headway.verify(BUILT), "a Linear is not a recipe: write head"),
}


def executor(**changes: object) -> headway.Executor:
    given = {"model": BUILT, "optimizer": STEP, "loss": nn.MSELoss(), "batch": 4} | changes
    return headway.Executor(given.pop("model"), given.pop("optimizer"), **given)  # type: ignore


@pytest.mark.parametrize("mistake", CALLS)
def test_a_mistake_in_a_call_is_one_sentence_with_what_to_write(mistake):
    call, said = CALLS[mistake]
    with pytest.raises(headway.HeadwayError) as refused:
        call()
    assert said in refused.value.what
    assert refused.value.where.startswith(__file__)


NOT_FITTING = {
    "a criterion by other names": (
        {"loss": lambda o, t: (o - t).square().mean()},
        "loss: o is the model here and t the batch, as of every loss: write "
        "loss=headway.criterion(lambda o, t: ...) if it compares output and target",
    ),
    "torch's criterion in it": (
        {"loss": lambda o, t: nn.functional.cross_entropy(o, t)},
        "loss=headway.criterion(lambda o, t: ...)",
    ),
    "targets of another shape": (
        {"loss": nn.CrossEntropyLoss(), "data": TensorDataset(X, Y[:, :1])},
        "loss: CrossEntropyLoss() cannot compare the model's output, a tensor of shape "
        "[4, 2] (float32), with the target of data, a tensor of shape [4, 1] (float32)",
    ),
    "numbers that are no class": (
        {"loss": nn.CrossEntropyLoss(), "data": TensorDataset(X, torch.full((8,), 7))},
        "with the target of data, a tensor of shape [4] (int64)",
    ),
    "inputs of another shape": (
        {"data": TensorDataset(X[:, :3], Y)},
        "model: Linear cannot be called with the input of data, a tensor of shape [4, 3] (float32)",
    ),
    "dictionaries": (
        {"data": [{"x": X[i], "y": Y[i], "z": 0} for i in range(8)]},
        "data: a criterion takes batches of (input, target), and this one is a dict of x, y, z",
    ),
}


@pytest.mark.parametrize("mistake", NOT_FITTING)
def test_what_does_not_fit_names_the_field_before_torchs_line(mistake):
    fields, said = NOT_FITTING[mistake]
    data = fields.pop("data", TensorDataset(X, Y))
    run = executor(**fields)
    batch = next(iter(run.batches(data)))
    with pytest.raises(headway.RecipeError) as refused:
        run.step(batch)
    assert said in refused.value.what
    assert "Error: " in refused.value.why
    assert refused.value.where.startswith("tests/single/test_accepted_forms.py") == (
        "lambda o" in said
    )


def test_an_error_of_the_users_own_code_stays_as_it_is():
    def loss(output, target):
        raise ValueError("no such table")

    run = executor(loss=loss)
    with pytest.raises(ValueError, match="no such table"):
        run.step(next(iter(run.batches(TensorDataset(X, Y)))))


@pytest.mark.parametrize("trained", [True, False])
def test_a_loss_without_a_parameter_to_train_is_told_before_backward(trained):
    """Detached, or of a frozen model."""
    model = nn.Linear(4, 2).requires_grad_(trained)
    run = executor(
        model=model,
        optimizer=SGD(model.parameters(), lr=0.1),
        loss=lambda model, batch: model(batch[0]).detach().mean(),
    )
    batch = next(iter(run.batches(TensorDataset(X, Y))))
    with pytest.raises(headway.RecipeError, match="no parameter that is trained"):
        run.step(batch)


def named_arguments(name: str) -> list[str]:
    """The arguments of a public function or class that can be misspelt."""
    target = getattr(headway, name)
    if not callable(target) or (isinstance(target, type) and issubclass(target, Exception)):
        return []
    found = inspect.signature(target).parameters.values()
    return [p.name for p in found if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]


RESULTS = {
    "ComparisonResult", "ImportedConfiguration", "StudyResult",
    "EquivalenceResult", "PlanningResult", "Prediction", "SimulationResult", "Timeline",
    "TrainingResult", "VerificationResult", "Cluster", "Plan", "SimulationScenario", "Source",
    "TrainingObserver", "Exchange", "criterion", "set_default_strategy",
}  # fmt: skip
"""What users are given, read from files, or call without names; for `Exchange` see `CALLS`."""


@pytest.mark.parametrize("name", sorted(set(headway.__all__) - RESULTS))
def test_a_misspelt_argument_of_a_public_name_names_the_nearest(name):
    for argument in named_arguments(name):
        with pytest.raises(headway.HeadwayError) as refused:
            getattr(headway, name)(**{f"{argument}x": 1})
        assert f"there is no argument {argument}x; did you mean " in str(refused.value)


def test_right_calls_whose_body_fails_keep_their_error():
    with pytest.raises(TypeError):
        headway.data_parallel("x", processes=())  # type: ignore[arg-type]
    assert ExchangePlan(compress="fp16").compress == "fp16"
