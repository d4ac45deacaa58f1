"""How layers are split: tensor and spatial parallelism over ranks that share their samples, and
tables of rows (embeddings) over all that share the batch.

Sources: Shoeybi et al. 2019 (1-D), Xu et al. 2021 (2-D, Optimus), Wang et al. 2021 (2.5-D,
Tesseract), Bian et al. 2021 (3-D); Oyama et al. 2020 (spatial); `plans.tables` for tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal, cast

from pydantic import Discriminator, GetPydanticSchema, Tag

from headway.collective.compression import ELEMENTWISE_NAMES, compressor_of
from headway.documents import document
from headway.keywords import checks_keywords
from headway.plans.exchange import ExchangePlan
from headway.plans.mesh import Axis, Mesh
from headway.plans.tables import TableSplit, Way
from headway.plans.tensor_layout import TensorGrid

TENSOR, SPACE = "tensor", "space"
"""Axes of the mesh; their ranks lie next to each other, those that split tensors innermost."""


Form = Literal["auto", "classic", "cuboid", "summa"]
Head = Literal["auto", "gathered", "samples"]


@document
class ModuleSplit:
    """Modules that the same ranks split over a grid of their own.

    Attributes:
        modules: A pattern of names: "blocks.*.mlp".
    """

    modules: str
    tensor: tuple[int, ...]
    form: Form = "auto"

    @property
    def grid(self) -> TensorGrid:
        """The grid of these sizes.

        Raises:
            ValueError: No grid has these sizes.
        """
        return grid_of(self.tensor, self.form)


def _form_of(value: object) -> str:
    return "table" if isinstance(value, dict) else "way" if isinstance(value, str) else "list"


_Forms = (
    Annotated[tuple[TableSplit, ...], Tag("list")]
    | Annotated[TableSplit, Tag("table")]
    | Annotated[Way, Tag("way")]
)
Tables = Annotated[
    tuple[TableSplit, ...],
    GetPydanticSchema(lambda _, schema: schema(Annotated[_Forms, Discriminator(_form_of)])),
]
"""One table may be written without its list, and one way for all tables as its name."""


@checks_keywords
@document
class LayerSplit:
    """How layers and samples are split; the default splits nothing.

    Attributes:
        tensor: Ranks that split linear layers: [p] is 1-D with whole activations between the
            layers, [q, q] 2-D, [i, j, l] a cuboid ([1, p, 1] is 1-D with activations in parts).
        form: "auto": as the number of sizes says; "summa" with [d, q, q]: 2.5-D.
        whole: Names of parameters or modules, or patterns, that are not split.
        only: Those that may be split; none: all.
        by: Modules that are split over a grid of their own; `tensor` is [p] then, and `whole` and
            `only` are about the rest. The first pattern that means a module counts.
        spatial: Ranks that split the last dimensions of samples: [2, 2, 1] for depth, height and
            width.
        min_width: See `parallel.spatial.SpatialContext`.
        head: What layers behind the split of space work on: "gathered": every rank on all samples;
            "samples": each rank on its share of them; "auto": the latter where there are several.
        tables: Tables of rows (embeddings) that lie in pieces on the ranks that share the batch;
            the first that matches counts, and what none matches is as the rest of the model. A way
            alone ("row") means all tables.
        shared_memory: Ranks of one machine look rows up in memory that both share; else, and
            between machines and on GPUs, over the process group.
    """

    tensor: tuple[int, ...] = ()
    form: Form = "auto"
    whole: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    by: tuple[ModuleSplit, ...] = ()
    spatial: tuple[int, ...] = ()
    min_width: int = 1
    head: Head = "auto"
    tables: Tables = ()
    shared_memory: bool = True

    def __post_init__(self) -> None:
        given: object = self.tables  # as it may be written: `LayerSplit(tables="row")`
        if isinstance(given, str):
            given = TableSplit(way=cast("Way", given))
        if isinstance(given, TableSplit):
            object.__setattr__(self, "tables", (given,))

    def __str__(self) -> str:
        """ "linear layers over 2 x 2 ranks (summa); samples over 2 x 1 x 1 ranks"."""
        found = []
        if self.grid is not None:
            said = f"linear layers over {_by(self.tensor)} ranks ({self.grid.form})"
            only = [f"only {', '.join(self.only)}"] if self.only else []
            left = [f"whole: {', '.join(self.whole)}"] if self.whole else []
            others = [f"{o.modules} over {_by(o.tensor)} ({o.grid.form})" for o in self.by]
            found.append("; ".join([said, *only, *left, *others]))
        if self.spatial:
            head = "" if self.head == "auto" else f", then {_HEADS[self.head]}"
            found.append(f"the last dimensions of samples over {_by(self.spatial)} ranks{head}")
        if self.tables:
            over_group = "" if self.shared_memory else "; over the process group"
            found.append(f"tables: {', '.join(map(str, self.tables))}{over_group}")
        return "; ".join(found) or "none"

    @property
    def ranks(self) -> int:
        """Ranks that share each sample."""
        return math.prod((*self.tensor, *self.spatial))

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of the mesh that the split needs."""
        sizes = ((SPACE, self.spatial), (TENSOR, self.tensor))
        return tuple(Axis(name=name, size=math.prod(found)) for name, found in sizes if found)

    @property
    def grid(self) -> TensorGrid | None:
        """The grid of the tensor split, if any."""
        return grid_of(self.tensor, self.form) if self.tensor else None

    @property
    def others(self) -> tuple[tuple[str, TensorGrid], ...]:
        """Patterns of modules with a grid of their own, and those grids."""
        return tuple((one.modules, one.grid) for one in self.by)

    def problems(self, mesh: Mesh, exchange: ExchangePlan) -> Iterator[str]:
        """The problems of the split, one line each."""
        for name, sizes in (("split.tensor", self.tensor), ("split.spatial", self.spatial)):
            if any(size < 1 for size in sizes):
                yield f"{name} is {list(sizes)}; sizes of at least 1"
        try:
            # `grid` raises ValueError where no grid has these sizes.
            assert self.grid is None or self.grid.ranks
            yield from self._problems_of_others()
        except ValueError as error:
            yield f"split.tensor: {error}; [p], [q, q], [i, j, l], or [d, q, q] with form summa"
        wanted = {axis.name: axis.size for axis in self.axes}
        for name in (TENSOR, SPACE):
            if mesh.degree(name) != wanted.get(name, 1):
                yield (
                    f"mesh axis {name} has size {mesh.degree(name)}; the split has "
                    f"{wanted.get(name, 1)} ranks"
                )
        if self.head != "auto" and not self.spatial:
            yield f"split.head is {self.head!r}: it needs split.spatial"
        if self.tensor:
            yield from _exchange_problems(exchange)
        if (self.ranks > 1 or self.tables) and exchange.reduce != "mean":
            yield f"exchange.reduce is {exchange.reduce!r}: with a split it can only be 'mean'"
        yield from self._problems_of_tables(mesh, exchange)

    def _problems_of_tables(self, mesh: Mesh, exchange: ExchangePlan) -> Iterator[str]:
        if not self.tables:
            return
        for number, one in enumerate(self.tables):
            said = f"split.tables.{number}"
            if not one.tables.strip():
                yield f'{said}.tables is empty; a pattern of names, such as "embeddings.*"'
            if one.columns < 0:
                yield f"{said}.columns is {one.columns}; at least 1, or 0 for one for each rank"
            if one.columns and one.way not in ("column", "grid"):
                yield f'{said}.columns: way "{one.way}" cuts no columns; leave it out'
            if one.ranks and one.way in ("copies", "dense"):
                yield f'{said}.ranks: way "{one.way}" lies on every rank; leave it out'
            if one.way == "dense" and (one.hot or one.cold):
                yield f'{said}.hot: way "dense" is in memory as other layers are; leave it out'
            if len(set(one.ranks)) < len(one.ranks):
                yield f"{said}.ranks: {list(one.ranks)} names a rank twice"
            shared = math.prod(a.size for a in mesh.axes if a.name not in (TENSOR, SPACE, "pipe"))
            if wrong := sorted({rank for rank in one.ranks if not 0 <= rank < shared}):
                yield f"{said}.ranks: there is no rank {wrong[0]}; {shared} share the batch, from 0"
        if exchange.priority:
            yield (
                "exchange.priority with split.tables: the gradient of a table is complete where "
                "it lies and in no bucket, so that no update of a bucket would make its update"
            )
        if exchange.values != "gradients":
            yield (
                f"exchange.values is {exchange.values!r}: with split.tables only 'gradients': "
                "the update of a table's row is made once, by the rank that has it"
            )

    def _problems_of_others(self) -> Iterator[str]:
        ranks = math.prod(self.tensor)
        # Between modules of different grids activations must be whole, as only "classic" has them.
        if self.by and (self.grid is None or self.grid.form != "classic"):
            yield (
                f"split.by: with split.tensor {list(self.tensor)} activations are nowhere whole "
                "between modules; let it be [p]"
            )
        for one in self.by:
            if one.grid.ranks != ranks:
                yield (
                    f"split.by {one.modules}: {_by(one.tensor)} are {one.grid.ranks} ranks; "
                    f"split.tensor has {ranks}"
                )
            if any(size < 1 for size in one.tensor):
                yield f"split.by {one.modules}: {list(one.tensor)}; sizes of at least 1"


def grid_of(sizes: tuple[int, ...], form: Form) -> TensorGrid:
    """The grid of these sizes.

    Raises:
        ValueError: No grid of this form has these sizes.
    """
    match sizes, form:
        case (p,), "auto" | "classic":
            return TensorGrid.classic(p)
        case (q, r), "auto" | "summa" if q == r:
            return TensorGrid.summa(q)
        case (d, q, r), "summa" if q == r:
            return TensorGrid.summa(q, d)
        case (i, j, k), "auto" | "cuboid":
            return TensorGrid.cuboid(i, j, k)
    raise ValueError(f"{list(sizes)} are no sizes of a grid of form {form}")


def _exchange_problems(exchange: ExchangePlan) -> Iterator[str]:
    kind = compressor_of(exchange.compress)
    *first, last = ELEMENTWISE_NAMES
    names = f"{', '.join(first)} or {last}"
    if kind is not None and not (kind.elementwise or kind.feedback):
        yield (
            f"exchange.compress is {exchange.compress!r}: its scales are those of a rank's own "
            "parts, and ranks would round what all of them hold differently; with split.tensor "
            f"{names}"
        )
    elif kind is None or not kind.elementwise:
        yield (
            f"exchange.compress is {exchange.compress!r}: what it keeps back of split layers no "
            f"checkpoint could give to another plan; with split.tensor {names}"
        )
    if exchange.priority:
        yield (
            "exchange.priority with split.tensor: the update of a bucket may need all ranks "
            "(norms of layers), and buckets are not updated in the same order everywhere"
        )
    if exchange.values != "gradients":
        yield f"exchange.values is {exchange.values!r}: with split.tensor only 'gradients'"
    if exchange.carried:
        yield (
            f"exchange.collective {exchange.collective} with split.tensor: a program is for all "
            "ranks together, and those that hold the same parts sum apart"
        )
    if exchange.parts:
        yield "exchange.parts: with split.tensor all gradients are summed alike"


_HEADS = {"gathered": "all of them on every rank", "samples": "whole samples on each rank"}


def _by(sizes: tuple[int, ...]) -> str:
    return " x ".join(map(str, sizes))
