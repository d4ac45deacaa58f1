"""Builds a `Recipe` from a checked recipe file or recipe function.

The user's modules are imported here and their functions are bound to the arguments of the file.
Models and data are not built yet: the functions that the `Recipe` holds do that where it is used.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from headway.data.source import GlobalGenerators
from headway.documents import nearest
from headway.errors import RecipeError
from headway.keywords import told_together
from headway.optim.lr_scaling import Scaling, scale_rates
from headway.run.recipe.accepted_forms import Factory, ModelCopies, with_article
from headway.run.recipe.batch_units import resolve_batch
from headway.run.recipe.check import CheckedRecipe, check_recipe
from headway.run.recipe.recipe import Loss, Recipe, criterion
from headway.run.recipe.schema import (
    CacheTable,
    DataTable,
    LossTable,
    RecipeCall,
    RecipeDocument,
    RecipeReference,
    given_keys,
    nested_calls,
    reference_recipe,
    scalars_of,
)
from headway.run.recipe.sent_recipe import SentRecipe
from headway.run.recipe.training_data import with_loader_batch
from headway.run.recipe.user_code import (
    UserCall,
    call_user_function,
    check_arguments,
    describe_value,
    importable_folders,
    resolve_reference,
    user_line,
)


def load_recipe(reference: str | Recipe | SentRecipe, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe that a reference names, with overrides laid over it.

    Args:
        reference: A path to a .toml file, "module:function", a bundled workload's name, or the
            recipe itself as its author wrote it: `scale_rate` is applied here, once.
        overrides: "key=value" each: fields of the file, or scalar fields of the `Recipe` that the
            function returns; "arguments.key=value" is a keyword argument of the function.

    Raises:
        DocumentError: The file or the overrides have problems; all are listed.
        RecipeError: A module or function is missing or raises, or returns something else.
    """
    if isinstance(reference, SentRecipe):
        reference = reference.open()
    if isinstance(reference, Recipe):
        recipe = override_recipe(reference, overrides)
    else:
        checked = check_recipe(reference, overrides)
        with importable_folders(*checked.folders):
            recipe = _build(checked)
            if checked.file is not None and checked.document.weights is not None:
                # As every path of a recipe.toml: from the file's own folder.
                weights = checked.file.parent / Path(checked.document.weights).expanduser()
                recipe = dataclasses.replace(recipe, weights=weights)
            if recipe.pipeline is not None and recipe.pipeline.by_hand:
                # Imported where it can be found: the model is cut when these folders are gone.
                where = checked.where("pipeline.by_hand")
                _Parts(checked).function(recipe.pipeline.by_hand, where)
    recipe = with_loader_batch(recipe)
    samples = resolve_batch(recipe)
    if recipe.scale_rate is None:
        return recipe
    return dataclasses.replace(recipe, optimizer=_scaled(recipe, samples))


def override_recipe(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """A recipe with overrides laid over its scalar fields and tables.

    Raises:
        DocumentError: The overrides have problems; all are listed.
        RecipeError: One is for the arguments of a function, and there is none.
    """
    if not overrides:
        return recipe
    document = reference_recipe(f"recipe:{recipe.name}", overrides)
    if document.arguments:
        raise RecipeError(
            "a Recipe object has no arguments to override",
            where=f"recipe {recipe.name}",
            fix="Build it with other arguments, or name the function that returns it; options of "
            "its optimiser are optimizer.NAME.",
        )
    return _with_document(recipe, document, given_keys(None, overrides))


def _with_document(
    recipe: Recipe, document: RecipeReference, keys: Mapping[str, tuple[str, ...]]
) -> Recipe:
    changed = scalars_of(document) | _tables(recipe, document, keys)
    if document.optimizer:
        changed["optimizer"] = OptionsLaidOver(recipe.optimizer, document.optimizer)
    return dataclasses.replace(recipe, **changed)


def _build(checked: CheckedRecipe) -> Recipe:
    match checked.document:
        case RecipeReference() as document:
            return _from_function(document, checked.where("recipe"), checked.keys)
        case RecipeDocument() as document:
            return _from_tables(document, checked)


def _from_function(
    document: RecipeReference, where: str, keys: Mapping[str, tuple[str, ...]]
) -> Recipe:
    with _seeded(0):
        function = resolve_reference(document.recipe, where=where)
    if isinstance(function, Recipe) and not document.arguments:
        return _with_document(function, document, keys)
    if not callable(function):
        raise RecipeError(
            f"{document.recipe} is {with_article(function)}, not a function that returns a Recipe",
            where=where,
            fix="It takes no arguments: set fields of the Recipe, or name a function."
            if isinstance(function, Recipe)
            else "Write def recipe(): return headway.Recipe(...), and name it.",
        )
    with _seeded(document.seed or 0):
        recipe = call_user_function(function, where=where, **document.arguments)
    seed = document.seed if document.seed is not None else getattr(recipe, "seed", 0)
    if isinstance(getattr(recipe, "model", None), ModelCopies) and seed:
        # The seed decides the numbers of a model that the function has built, too.
        with _seeded(seed):
            recipe = call_user_function(function, where=where, **document.arguments)
    if not isinstance(recipe, Recipe):
        raise RecipeError(
            f"{document.recipe} returned {with_article(recipe)}, not a Recipe",
            where=user_line(function) or where,
            fix="Return headway.Recipe(name=..., model=..., ...).",
        )
    return _with_document(recipe, document, keys)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """What the user's code draws while a recipe is made is the same in every process."""
    generators = GlobalGenerators()
    generators.seed(seed)
    try:
        yield
    finally:
        generators.restore()


def _tables(
    recipe: Recipe, document: RecipeReference, keys: Mapping[str, tuple[str, ...]]
) -> dict[str, Any]:
    """The function's own tables, with the keys that are given laid over them."""
    return {
        name: dataclasses.replace(own, **{key: getattr(given, key) for key in keys[name]})
        for name in keys
        if (own := getattr(recipe, name)) is not None
        and (given := getattr(document, name)) is not None
    }


def _from_tables(document: RecipeDocument, checked: CheckedRecipe) -> Recipe:
    parts = _Parts(checked)
    return Recipe(
        model=parts.call("model", document.model),
        data=parts.data("data", document.data),
        loss=parts.loss(document.loss),
        optimizer=parts.call("optimizer", document.optimizer, 1),
        validation=parts.data("validation", document.validation) if document.validation else None,
        metrics=parts.call("metrics", document.metrics, 2) if document.metrics else None,
        scheduler=parts.scheduler(document.scheduler) if document.scheduler else None,
        collate=parts.call("collate", document.collate, 1) if document.collate else None,
        showcase=parts.call("showcase", document.showcase, 1) if document.showcase else None,
        **_scalars(document),
    )


def _scalars(document: RecipeDocument) -> dict[str, Any]:
    # A memory-mapped window says how many tokens a sample has.
    window = {"tokens_per_sample": document.data.window} if document.data.window else {}
    return window | scalars_of(document)


@dataclasses.dataclass(frozen=True)
class _Parts:
    """Makes the functions of a `Recipe` from the tables of a file."""

    checked: CheckedRecipe

    def call(self, key: str, table: RecipeCall, given: int = 0) -> UserCall:
        """A call that headway will make with `given` positional arguments."""
        where = self.checked.where(f"{key}.call")
        function = self.function(table.call, where)
        check_arguments(function, (None,) * given, table.arguments, where)
        return UserCall(function, table.arguments, where, self.checked.folders)

    def data(self, key: str, table: DataTable) -> Callable[[], Any]:
        if table.call is not None:
            data = self.call(key, RecipeCall(call=table.call, arguments=table.arguments))
        else:
            data = _memmap(table, self.checked.folders[0], self.checked.where(f"{key}.memmap"))
        return self._cached(f"{key}.cache", table.cache, data) if table.cache else data

    def _cached(self, key: str, table: CacheTable, data: UserCall) -> Callable[[], Any]:
        # By default the cache has the name of what builds the data, and of the folder.
        given = {f.name: getattr(table, f.name) for f in dataclasses.fields(table)}
        options = {name: value for name, value in given.items() if value is not None}
        folder = self.checked.folders[0]
        if table.disk is not None:
            options["disk"] = folder / Path(table.disk).expanduser()
        for name in ("prepare", "augment"):
            if name in options:
                where = self.checked.where(f"{key}.{name}")
                options[name] = self.function(options[name], where)
                check_arguments(options[name], (None,), {}, where)
        return _Cached(data, options.pop("name", f"{data} in {folder}"), options)

    def loss(self, table: LossTable) -> Loss:
        """A class is built once with the arguments; a function gets them with every call."""
        reference = table.criterion or table.call
        assert reference is not None
        where = self.checked.where("loss.criterion" if table.criterion else "loss.call")
        function = self.function(reference, where)
        if isinstance(function, type):
            function = _Built(
                call_user_function(function, where=where, **table.arguments),
                str(UserCall(function, table.arguments)),
            )
        else:
            check_arguments(function, (None, None), table.arguments, where)
            # A partial and no closure, because recipes are sent to workers and must pickle.
            function = functools.partial(function, **table.arguments)
        return criterion(function) if table.criterion else cast("Loss", function)

    def scheduler(self, table: RecipeCall, key: str = "scheduler") -> UserCall:
        # An argument that is itself a table with `call` becomes a function of the optimiser, too.
        inner = {
            name: self.scheduler(call, f"{key}.{name}")
            for name, call in nested_calls(table.arguments).items()
        }
        return self.call(
            key, RecipeCall(call=table.call, arguments={**table.arguments, **inner}), 1
        )

    def function(self, reference: str, where: str) -> Callable[..., Any]:
        return _callable(reference, where, "a class or function")


@dataclasses.dataclass(frozen=True)
class OptionsLaidOver(Factory):
    """An optimiser with options changed after it was built, in all of its parameter groups."""

    build: Callable[[nn.Module], Optimizer]
    options: Mapping[str, Any]

    def __call__(self, model: nn.Module) -> Optimizer:
        optimizer = self.build(model)
        if problems := [*self._problems(optimizer)]:
            raise told_together(type(optimizer).__name__, problems, RecipeError, where="--set")
        for name, value in self.options.items():
            optimizer.defaults[name] = _plain(value)
            for group in optimizer.param_groups:
                group[name] = _plain(value)
        return optimizer

    def _problems(self, optimizer: Optimizer) -> Iterator[str]:
        for name, value in self.options.items():
            if name not in optimizer.defaults:
                yield f"there is no option optimizer.{name}{nearest(name, [*optimizer.defaults])}"
                continue
            own = [group[name] for group in optimizer.param_groups]
            if any(one != own[0] for one in own):
                yield (
                    f"optimizer.{name} is {', '.join(map(repr, own))} in its parameter groups: "
                    "write arguments.NAME=... for an argument of the function that builds them"
                )
            # Torch compares numbers, and a text raises a TypeError about "<".
            if _is_number(own[0]) and not _is_number(value):
                yield f"optimizer.{name}={value!r} is not a number"
                continue
            try:
                # The class checks its values where it is built.
                type(optimizer)([nn.Parameter(torch.zeros(1))], **{name: _plain(value)})
            except (ValueError, TypeError) as error:
                if "unexpected keyword" not in str(error):
                    yield f"optimizer.{name}={value!r}: {error}"

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{describe_value(self.build)} with {options}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    """As torch has it: TOML knows lists only."""
    return tuple(value) if isinstance(value, list) else value


@dataclasses.dataclass(frozen=True)
class _Scaled(Factory):
    """An optimiser whose rates are scaled from a reference batch to the recipe's."""

    build: Callable[[nn.Module], Optimizer]
    scaling: Scaling
    samples: int
    tokens: int | None

    def __call__(self, model: nn.Module) -> Optimizer:
        optimizer = self.build(model)
        scale_rates(optimizer, self.scaling, batch=self.samples, tokens_per_sample=self.tokens)
        return optimizer

    def __str__(self) -> str:
        factor = self.scaling.factor(self.samples, self.tokens)
        return f"{describe_value(self.build)}, rates x{factor:g}"


def _scaled(recipe: Recipe, samples: int) -> _Scaled:
    assert recipe.scale_rate is not None
    try:
        scaling = Scaling.parse(recipe.scale_rate)
    except ValueError as error:
        raise RecipeError(f"scale_rate: {error}", where=f"recipe {recipe.name}") from None
    scaling.factor(samples, recipe.tokens_per_sample)  # what is missing is said here
    return _Scaled(recipe.optimizer, scaling, samples, recipe.tokens_per_sample)


@dataclasses.dataclass(frozen=True)
class _Cached(Factory):
    """Data behind a cache."""

    data: UserCall
    name: str
    options: Mapping[str, Any]

    def __call__(self) -> Any:
        return self._source

    @functools.cached_property  # built once: validation asks for its data again and again
    def _source(self) -> Any:
        from headway.data.cache.cached_source import cached

        return cached(self.data(), self.name, **self.options)

    def __str__(self) -> str:
        inner = ", ".join(f"{key}={describe_value(value)}" for key, value in self.options.items())
        return f"{self.data} behind a data cache ({inner})"


@dataclasses.dataclass(frozen=True)
class _Built:
    """A criterion or loss object, with the text that it was built from."""

    function: Callable[..., Tensor]
    text: str

    def __call__(self, *values: Any) -> Tensor:
        return self.function(*values)

    def __str__(self) -> str:
        return self.text


def _memmap(table: DataTable, folder: Path, where: str) -> UserCall:
    from headway.data.source import MemmapSource

    assert table.memmap is not None
    options = {"window": table.window, "dtype": table.dtype}
    given = {key: value for key, value in options.items() if value is not None}
    check_arguments(MemmapSource, (None,), given, where)
    path = folder / Path(table.memmap).expanduser()
    return UserCall(MemmapSource, {"path": path, **given}, where)


def _callable(reference: str, where: str, wanted: str) -> Callable[..., Any]:
    function = resolve_reference(reference, where=where)
    if not callable(function):
        raise RecipeError(f"{reference} is {with_article(function)}, not {wanted}", where=where)
    return cast("Callable[..., Any]", function)
