"""The embedding tables of a recipe: what they ask of ranks, and the model without them.

The optimiser's state is found by trial steps (`optim.row_law`), and how lookups fall on rows by
running the model on the first samples with tables that only count: nothing as large as a table is
allocated.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headway.capture.annotations import building
from headway.errors import DataError, HeadwayError
from headway.graph.model_graph import ModelGraph
from headway.optim.row_law import row_law
from headway.planner.tables.demand import TableDemand
from headway.planner.tables.model_tables import model_tables
from headway.planner.tables.skew import AccessSkew, SkewCounter
from headway.run.recipe.recipe import Recipe
from headway.run.recipe.training_data import training_data
from headway.run.step.batch import example_batch
from headway.run.step.randomness import generators_restored

SKEW_SAMPLES = 16384
"""Of the data, at most, in which lookups are counted."""
_LOG = logging.getLogger("headway")


def recipe_tables(recipe: Recipe, graph: ModelGraph, samples: int) -> tuple[TableDemand, ...]:
    """The tables of a recipe's captured model, with their optimiser's state, without skew.

    Args:
        samples: With which it was captured.
    """
    demands = model_tables(graph, samples)
    if not demands:
        return ()
    model = _meta_model(recipe)
    optimizer = recipe.optimizer(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = {
        names[id(p)]: group
        for group in optimizer.param_groups
        for p in group["params"]
        if id(p) in names
    }
    found = []
    for demand in demands:
        group = groups.get(demand.table)
        if group is None:  # not trained: nothing but its rows
            found.append(demand)
            continue
        try:
            law = row_law(optimizer, group, torch.device("cpu"))
        except HeadwayError as error:
            _LOG.info("%s stays whole: %s", demand.table, error.what)
            continue
        if not law.rows:
            _LOG.info("%s stays whole: its optimiser updates rows together", demand.table)
            continue
        gradient = 0 if law.touched else demand.itemsize
        found.append(
            replace(
                demand,
                element_state=float(law.by_element * demand.itemsize + gradient),
                row_state=float(law.by_row * demand.itemsize),
                sparse=law.touched,
                divides=law.columns,
            )
        )
    return tuple(found)


def without_tables(recipe: Recipe, tables: Sequence[str]) -> Recipe:
    """The recipe with a row in the place of each table, to be captured only."""

    def model() -> nn.Module:
        built: nn.Module = recipe.model()
        for module, name in _holders(built, tables):
            weight = _weight(module, name)
            row = torch.empty(1, weight.shape[1], dtype=weight.dtype, device=weight.device)
            setattr(module, name, nn.Parameter(row, requires_grad=weight.requires_grad))
        return built

    return replace(recipe, model=model)


def with_skew(recipe: Recipe, demands: Sequence[TableDemand]) -> tuple[TableDemand, ...]:
    """The tables with the skew of the recipe's first samples, where these can be had; with the
    lookups of a sample that they have.

    Raises:
        DataError: An id that a table does not have.
    """
    try:
        skews, lookups = _count(recipe, demands)
    except DataError:
        raise
    except Exception as error:  # the data may be missing here, the model may do anything
        _LOG.info("lookups count as even over rows: %s: %s", type(error).__name__, error)
        return tuple(demands)
    return tuple(
        replace(demand, skew=skews[demand.table], bag=lookups[demand.table])
        if skews.get(demand.table) is not None and skews[demand.table].lookups
        else demand
        for demand in demands
    )


def _count(
    recipe: Recipe, demands: Sequence[TableDemand]
) -> tuple[dict[str, AccessSkew], dict[str, float]]:
    samples = SKEW_SAMPLES
    with suppress(TypeError):  # a stream has no length
        samples = min(samples, len(training_data(recipe)))
    counters = {demand.table: SkewCounter(demand.rows) for demand in demands}
    with generators_restored(), torch.no_grad():
        model = _meta_model(without_tables(recipe, list(counters)))
        for module, name in _holders(model, list(counters)):
            counter = counters[_name_of(model, module, name)]
            module.forward = _counting(module, counter)
        model.to_empty(device="cpu")
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
        recipe.loss(model, example_batch(recipe, samples))
    skews = {name: counter.skew for name, counter in counters.items()}
    return skews, {name: counter.lookups / samples for name, counter in counters.items()}


def _counting(module: nn.Module, counter: SkewCounter) -> Callable[..., Tensor]:
    """A forward that counts ids and gives zeros, as `nn.Embedding` or `nn.EmbeddingBag`."""
    columns = _weight(module, "weight").shape[1]

    def forward(ids: Tensor, offsets: Tensor | None = None, *rest: Any, **named: Any) -> Tensor:
        counter.add(ids.numpy())
        if isinstance(module, nn.EmbeddingBag):
            bags = len(ids) if offsets is None else len(offsets) - module.include_last_offset
            return torch.zeros(bags, columns)
        return torch.zeros(*ids.shape, columns)

    return forward


def _weight(module: nn.Module, name: str) -> Tensor:
    weight = getattr(module, name)
    assert isinstance(weight, Tensor)
    return weight


def _meta_model(recipe: Recipe) -> nn.Module:
    with torch.device("meta"), building():
        model: nn.Module = recipe.model()
    return model


def _holders(model: nn.Module, tables: Sequence[str]) -> Iterator[tuple[nn.Module, str]]:
    """The module of each table, and the name that the table has in it."""
    for table in tables:
        place, _, name = table.rpartition(".")
        yield model.get_submodule(place), name


def _name_of(model: nn.Module, module: nn.Module, name: str) -> str:
    named: Mapping[int, str] = {id(each): place for place, each in model.named_modules()}
    place = named[id(module)]
    return f"{place}.{name}" if place else name
