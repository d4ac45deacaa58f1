"""The forms in which a recipe's fields are accepted, made into the one that headway uses.

A recipe holds factories: what builds a part, in every process and for the serial reference. An
instance is accepted where it means the same in each of them: a model gives copies of itself as it
is, a data set is read and never changed, a criterion has no state that training changes. An
optimiser holds the parameters of one copy of the model, so that its class is wanted. Each mistake
is one sentence that ends with what to write; a recipe's mistakes are told together.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import Dataset

from headway.documents import to_type
from headway.errors import DocumentError, RecipeError
from headway.huggingface import TokenLoss
from headway.plans import ExchangePlan, LayerSplit, PipelinePlan, Synchrony
from headway.run.recipe.schema import RecipeReference, Scalars
from headway.run.recipe.user_code import UserCall, describe_value, user_line

WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")
"""Of models: they do what headway does."""
TABLES = {
    "exchange": ExchangePlan,
    "pipeline": PipelinePlan,
    "split": LayerSplit,
    "synchrony": Synchrony,
}


class Factory:
    """Base of what builds a part of a recipe and is not to be wrapped again."""


@dataclass(frozen=True)
class CheckedFactory(Factory):
    """The user's factory, whose result must be of a kind."""

    function: Callable[..., Any]
    kind: type
    field: str

    def __call__(self, *values: Any) -> Any:
        result = self.function(*values)
        if not isinstance(result, self.kind):
            raise RecipeError(
                f"{describe_value(_inner(self.function))} returned {with_article(result)}, "
                f"not {article_of(self.kind)}",
                where=user_line(_inner(self.function)) or self.field,
                fix=f"Return for example {_EXAMPLES[self.field].partition(': ')[2]}.",
            )
        return result

    def __str__(self) -> str:
        return describe_value(self.function)


@dataclass(frozen=True)
class ModelCopies(Factory):
    """A model instance: every process begins with a copy of it as it is."""

    model: nn.Module

    def __call__(self) -> nn.Module:
        return copied(self.model, meta=torch.get_default_device().type == "meta")

    def __str__(self) -> str:
        return f"a copy of a given {type(self.model).__name__}"


@dataclass(frozen=True)
class GivenExamples(Factory):
    """A data set instance; it is read, and never changed."""

    examples: Any

    def __call__(self) -> Any:
        return self.examples

    def __str__(self) -> str:
        return f"a given {type(self.examples).__name__}"


@dataclass(frozen=True)
class CheckedExamples(Factory):
    """The user's factory of examples."""

    function: Callable[[], Any]
    field: str

    def __call__(self) -> Any:
        examples = self.function()
        try:
            _check_samples(examples, "return ")
        except ValueError as error:
            raise RecipeError(
                f"{self.field}: {error}", where=user_line(_inner(self.function)) or self.field
            ) from None
        return examples

    def __str__(self) -> str:
        return describe_value(self.function)


@dataclass(frozen=True)
class OfParameters(Factory):
    """An optimiser class, or a partial of one: called with the model's parameters."""

    make: Callable[..., Optimizer]

    def __call__(self, model: nn.Module) -> Optimizer:
        return self.make(model.parameters())

    def __str__(self) -> str:
        return describe_value(self.make)


@dataclass(frozen=True)
class CriterionLoss:
    """A criterion as a loss. A class and no closure: it must pickle."""

    function: Callable[[Any, Any], Tensor]

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        # `loss_errors` finds these names in the traceback of an error.
        inputs, target = batch
        output = model(inputs)
        return self.function(output, target)

    def __str__(self) -> str:
        return f"criterion({describe_value(self.function)})"


def copied(model: nn.Module, *, meta: bool = False) -> nn.Module:
    """A deep copy of a model; shared parameters stay shared.

    Args:
        meta: Without numbers, for what only looks at shapes.

    Raises:
        RecipeError: It cannot be copied.
    """
    known: dict[int, Any] = {}
    if meta:
        for tensor in (*model.parameters(), *model.buffers()):
            if not is_lazy(tensor):
                empty = torch.empty_like(tensor, device="meta")
                known[id(tensor)] = (
                    nn.Parameter(empty, tensor.requires_grad)
                    if isinstance(tensor, nn.Parameter)
                    else empty
                )
    try:
        return copy.deepcopy(model, known)
    # What a module holds may be anything: locks, open files, tensors of a graph.
    except Exception as error:
        raise RecipeError(
            f"model: this {type(model).__name__} cannot be copied, and every process needs its "
            f"own: write model=lambda: {type(model).__name__}(...)",
            why=f"{type(error).__name__}: {error}",
        ) from error


# -- one function for each field: the factory, or a ValueError with the sentence ------------------


def as_model(value: Any) -> Callable[[], nn.Module]:
    """A factory of a model, from a factory, a class or an instance.

    Raises:
        ValueError: One sentence with what to write.
    """
    if isinstance(value, Factory):
        return cast("Callable[[], nn.Module]", value)
    if isinstance(value, nn.Module):
        kind = type(value).__name__
        if kind in WRAPPERS:
            raise ValueError(f"{kind} does what headway does itself: write model=model.module")
        if any(tensor.is_meta for tensor in value.parameters()):
            raise ValueError(
                f"this {kind} is on the meta device and has no numbers: write "
                f"model=lambda: {kind}(...)"
            )
        try:
            copied(value, meta=True)
        except RecipeError as error:
            raise ValueError(f"{error.what.removeprefix('model: ')} ({error.why})") from None
        if any(tensor.device.type != "cpu" for tensor in value.parameters()):
            # Each process moves its copy to its own device.
            value = copied(value).cpu()
        return ModelCopies(value)
    _check_call("model", value, 0)
    return CheckedFactory(value, nn.Module, "model")


def as_data(value: Any, field: str = "data") -> Callable[[], Any]:
    """A factory of examples, from a factory, a class or the examples themselves.

    Raises:
        ValueError: One sentence with what to write.
    """
    if isinstance(value, Factory):
        return cast("Callable[[], Any]", value)
    _check_samples(value, f"write {field}=")
    function = isinstance(value, type) or inspect.isroutine(value)
    if not function and (isinstance(value, Dataset) or _has_items(value)):
        return GivenExamples(value)
    _check_call(field, value, 0)
    return CheckedExamples(value, field)


def _check_samples(value: Any, advice: str) -> None:
    """ValueError where bare tensors or a table of parts stand for a data set.

    Args:
        advice: What stands before the right expression.
    """
    tensors = value if isinstance(value, tuple) else (value,)
    if tensors and all(isinstance(item, Tensor) for item in tensors):
        written = "x" if len(tensors) == 1 else ", ".join("xyzuvw"[: len(tensors)])
        raise ValueError(
            f"{with_article(value)} does not say what a sample is: "
            f"{advice}torch.utils.data.TensorDataset({written})"
        )
    if isinstance(value, dict):
        first = next(iter(value), "train")
        raise ValueError(
            f"{with_article(value)} is not a data set: {advice}data[{str(first)!r}] if these "
            "are its parts, else a Dataset of samples"
        )


def as_loss(value: Any) -> Any:
    """A loss of (model, batch), from one, from a torch criterion, or from the word "tokens".

    Raises:
        ValueError: One sentence with what to write.
    """
    if isinstance(value, CriterionLoss):
        return value
    if value == "tokens":
        return TokenLoss()
    if isinstance(value, str):
        raise ValueError(
            f'{value!r} is no loss: write loss="tokens" for a model that returns its own, or '
            f"loss={_EXAMPLES['loss']}"
        )
    if isinstance(value, type) and issubclass(value, nn.Module):
        raise ValueError(f"{written_name(value)} is a class: write loss={written_name(value)}()")
    if _is_criterion(value):
        return as_criterion(value)
    _check_call("loss", value, 2)
    return value


def as_criterion(value: Any) -> CriterionLoss:
    """The loss of a criterion (output, target).

    Raises:
        ValueError: It is known to give no mean over the samples, or is called otherwise.
    """
    keywords = value.keywords if isinstance(value, functools.partial) else {}
    said = keywords.get("reduction", getattr(value, "reduction", "mean"))
    if said in ("sum", "none"):
        raise ValueError(
            f"reduction={said!r} is not the mean over the samples: write reduction='mean', or a "
            "loss of (model, batch) that returns (sum, count)"
        )
    _check_call("criterion", value, 2)
    return CriterionLoss(value)


def _is_criterion(value: Any) -> bool:
    """Whether a callable is called (output, target): torch's are, and what names a target."""
    module = getattr(_inner(value), "__module__", None) or ""
    if module == functional.__name__ or (isinstance(value, nn.Module) and _is_of_torch(module)):
        return True
    first, second, *_ = [*_names(value), "", ""]
    return first in _OUTPUTS or (second in _TARGETS and first not in MODELS)


def _is_of_torch(module: str) -> bool:
    return module.startswith("torch.nn.")


def as_optimizer(value: Any) -> Callable[[Any], Optimizer]:
    """A factory of an optimiser from the model, from one or from a class or partial of one.

    Raises:
        ValueError: One sentence with what to write.
    """
    if isinstance(value, Factory):
        return cast("Callable[[Any], Optimizer]", value)
    if isinstance(value, Optimizer):
        raise ValueError(
            f"this {type(value).__name__} holds the parameters of one model, and every process "
            f"builds its own: write optimizer=lambda model: {_rebuilt(value)}"
        )
    if isinstance(value, list | tuple):
        raise ValueError(
            f"{with_article(value)} of {len(value)}, and a recipe has one optimiser: write "
            "optimizer=lambda model: torch.optim.AdamW([{'params': ...}, {'params': ..., 'lr': "
            "...}]) with a group for each"
        )
    if isinstance(value, str):
        legal = {n.lower(): n for n, k in vars(torch.optim).items() if isinstance(k, type)}
        name = legal.get(value.lower(), "AdamW")
        raise ValueError(f"{value!r} is a text: write optimizer=torch.optim.{name}")
    inner = _inner(value)
    _check_call("optimizer", value, 1)
    if isinstance(inner, type) and issubclass(inner, Optimizer):
        return OfParameters(value)
    return CheckedFactory(value, Optimizer, "optimizer")


def as_scheduler(value: Any) -> Callable[[Optimizer], LRScheduler]:
    """A factory of a scheduler from the optimiser.

    Raises:
        ValueError: One sentence with what to write.
    """
    if isinstance(value, LRScheduler | ReduceLROnPlateau):
        raise ValueError(
            f"this {type(value).__name__} holds one optimiser, and every process builds its own: "
            f"write scheduler=lambda optimizer: {written_name(type(value))}(optimizer, ...)"
        )
    _check_call("scheduler", value, 1)
    return cast("Callable[[Optimizer], LRScheduler]", value)


def as_collate(value: Any) -> Callable[[list[Any]], Any]:
    """A function that makes a batch of a list of samples."""
    _check_call("collate", value, 1)
    return cast("Callable[[list[Any]], Any]", value)


def as_showcase(value: Any) -> Callable[[nn.Module], str]:
    """A function of the trained model."""
    _check_call("showcase", value, 1)
    return cast("Callable[[nn.Module], str]", value)


def as_metrics(value: Any) -> Callable[[nn.Module, Any], Mapping[str, Any]]:
    """A function of (model, batch)."""
    _check_call("metrics", value, 2)
    return cast("Callable[[nn.Module, Any], Mapping[str, Any]]", value)


def as_weights(value: Any) -> str | Path:
    """A path."""
    if not isinstance(value, str | Path):
        raise ValueError(
            f"{with_article(value)} is no path: write weights='model.safetensors'; numbers that "
            "are in memory belong into model"
        )
    return value


def as_several(value: Any, field: str) -> tuple[Any, ...]:
    """A tuple of objects, from one or from a list."""
    if isinstance(value, list | tuple):
        return tuple(value)
    raise ValueError(f"{with_article(value)} stands alone: write {field}={_EXAMPLES[field]}")


_FORMS: Mapping[str, Callable[[Any], Any]] = {
    "model": as_model,
    "data": as_data,
    "loss": as_loss,
    "optimizer": as_optimizer,
    "validation": functools.partial(as_data, field="validation"),
    "scheduler": as_scheduler,
    "collate": as_collate,
    "showcase": as_showcase,
    "metrics": as_metrics,
    "weights": as_weights,
    "weights_only": functools.partial(as_several, field="weights_only"),
    "loggers": functools.partial(as_several, field="loggers"),
    "callbacks": functools.partial(as_several, field="callbacks"),
}
_OPTIONAL = ("validation", "scheduler", "collate", "showcase", "metrics", "weights", *TABLES)
_EXAMPLES = {
    "model": "lambda: Net(width=64)",
    "data": "lambda: MyDataset('train')",
    "validation": "lambda: MyDataset('valid')",
    "loss": "torch.nn.CrossEntropyLoss()",
    "criterion": "headway.criterion(lambda output, target: (output - target).abs().mean())",
    "optimizer": "lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3)",
    "scheduler": "lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)",
    "collate": "torch.utils.data.default_collate",
    "showcase": "lambda model: f'{sum(p.numel() for p in model.parameters())} numbers'",
    "metrics": "lambda model, batch: {'accuracy': ...}",
    "weights_only": '("encoder.*",)',
    "loggers": '("csv",)',
    "callbacks": "(MyCallback(),)",
}
_CALLED_WITH = {
    "metrics": ("model", "batch"),
    "loss": ("model", "batch"),
    "criterion": ("output", "target"),
    "optimizer": ("model",),
    "scheduler": ("optimizer",),
    "collate": ("samples",),
    "showcase": ("model",),
}
_TARGETS = ("target", "targets", "label", "labels", "y_true", "y")
_OUTPUTS = ("output", "outputs", "out", "pred", "preds", "prediction", "predictions", "logits",
    "scores", "y_pred", "y_hat")  # fmt: skip
MODELS = ("model", "module", "net", "network")
KEYWORDS_OF_OTHERS = {
    **dict.fromkeys(("epochs", "num_epochs", "max_epochs"), 'stop="3 epochs"'),
    **dict.fromkeys(("steps", "max_steps", "num_steps"), 'stop="300 steps"'),
    **dict.fromkeys(("lr", "learning_rate"), f"optimizer={_EXAMPLES['optimizer']}"),
    **dict.fromkeys(("criterion", "loss_fn"), "loss=torch.nn.CrossEntropyLoss()"),
    **dict.fromkeys(("dataset", "dataloader", "train_data", "train_loader"), "data=..."),
    **dict.fromkeys(("val_data", "val_dataset", "eval_dataset", "val_loader"), "validation=..."),
    **dict.fromkeys(("processes", "world_size"), "headway.train(recipe, processes=2)"),
}
"""What to write for names that other libraries have."""


def accept_fields(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The fields of a recipe in the forms that headway uses, and a sentence for each mistake."""
    accepted, problems = dict(given), []
    for name, accept in _FORMS.items():
        if name in given and not (given[name] is None and name in _OPTIONAL):
            try:
                accepted[name] = accept(given[name])
            except ValueError as error:
                problems.append(f"{name}: {error}")
    for name, kind in TABLES.items():
        if isinstance(value := given.get(name), dict):
            inner = ", ".join(f"{key}={item!r}" for key, item in value.items())
            problems.append(f"{name}: a table is for files: write {name}={kind.__name__}({inner})")
        elif not isinstance(value, kind | None):
            problems.append(
                f"{name}: {with_article(value)} cannot be used: write {name}={kind.__name__}()"
            )
    idle = [name for name in ("validate_every", "validation_samples", "metrics") if given.get(name)]
    if idle and given.get("validation") is None:
        which = " and ".join(idle)
        problems.append(
            f"{which}: there is no validation data: write validation={_EXAMPLES['validation']}, or "
            f"leave out {which}"
        )
    return accepted, [*problems, *_scalar_problems(given)]


def _scalar_problems(given: Mapping[str, Any]) -> list[str]:
    """What recipe.toml would say of the scalar fields."""
    names = (*Scalars.__dataclass_fields__, "batch", "stop")
    own = (*TABLES, *_FORMS)
    told = {n: given[n] for n in names if n not in own and given.get(n) is not None}
    try:
        to_type({"recipe": "recipe:recipe", **told}, RecipeReference, where="")
    except DocumentError as error:
        return [problem.strip() for problem in error.problems]
    name = given.get("name", "run")
    ok = isinstance(name, str) and name.strip()
    return [] if ok else [f'name: {name!r} is not a text: write name="my-run"']


def _check_call(field: str, value: Any, given: int) -> None:
    """ValueError unless `value` can be called with so many arguments."""
    if not callable(value):
        raise ValueError(f"{with_article(value)} cannot be used: write {field}={_EXAMPLES[field]}")
    try:
        _signature(value).bind(*[None] * given)
    except TypeError:
        names = ", ".join(_CALLED_WITH.get(field, ()))
        written = "loss" if field == "criterion" else field
        short = _short_name(value)
        needed = [name for name in _needed(value) if name != "self"][given:]
        if given <= len(_needed(value)) and needed:
            arguments = ", ".join([*_CALLED_WITH.get(field, ()), *(f"{n}=..." for n in needed)])
            shown = f"{f'lambda {names}' if names else 'lambda'}: {short}({arguments})"
            raise ValueError(
                f"{short} also needs {', '.join(needed)}: write {written}={shown}"
            ) from None
        raise ValueError(
            f"{short}{_signature(value)} is called with ({names}): "
            f"write {written}={_EXAMPLES[field]}"
        ) from None
    except ValueError:  # some classes written in C show no signature
        return


def _needed(value: Any) -> list[str]:
    kinds = inspect.Parameter
    return [
        p.name
        for p in _signature(value).parameters.values()
        if p.default is p.empty and p.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
    ]


def _signature(value: Any) -> inspect.Signature:
    return inspect.signature(value.forward if isinstance(value, nn.Module) else value)


def _names(function: Any) -> list[str]:
    try:
        return list(_signature(function).parameters)
    except (TypeError, ValueError):
        return []


def _inner(value: Any) -> Any:
    """The function or class behind partials and calls of a recipe file."""
    while isinstance(value, functools.partial | UserCall):
        value = value.func if isinstance(value, functools.partial) else value.function
    return value


def _has_items(value: Any) -> bool:
    items = hasattr(value, "__getitem__") or hasattr(value, "__iter__") or hasattr(value, "read")
    return items and not isinstance(value, str | bytes)


def _rebuilt(optimizer: Optimizer) -> str:
    """The call that builds such an optimiser."""
    kind = type(optimizer)
    changed = {
        name: optimizer.defaults[name]
        for name, parameter in inspect.signature(kind).parameters.items()
        if name in optimizer.defaults
        and (name == "lr" or optimizer.defaults[name] != parameter.default)
    }
    options = "".join(f", {name}={value!r}" for name, value in changed.items())
    return f"{written_name(kind)}(model.parameters(){options})"


def written_name(kind: type) -> str:
    """A class as users write it: torch.optim.AdamW, torch.nn.Linear, else its name."""
    for place in ("torch.optim.lr_scheduler", "torch.optim", "torch.nn"):
        if kind.__module__.startswith(place):
            return f"{place}.{kind.__name__}"
    return kind.__name__


def _short_name(value: Any) -> str:
    value = _inner(value)
    if isinstance(value, type):
        return written_name(value)
    return getattr(value, "__name__", None) or describe_value(value)


def with_article(value: object) -> str:
    return "None" if value is None else article_of(type(value))


def article_of(kind: type) -> str:
    name = kind.__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"
