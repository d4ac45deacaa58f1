"""What of a model can be split, found by running it: nothing is known of its classes.

The model's copy runs on stand-ins without numbers. A parameter is undecided until a function takes
it; then the layer's weight is cut as its input's layout wants it. What a cut activation meets
afterwards decides whether that was right: a reshape into heads, an activation function, a product,
and at last the weight that sums it up again. A function without a rule for it puts the blame on the
weight the activation came from: it is split in blocks (queries, keys and values in one layer), if
that helps, and left whole otherwise; then the model runs again, until nobody is to blame.

Invariant: in the classic form whatever is not split is whole and the same everywhere. The other
forms cut every activation; there an unanswered blame is an error.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from headway.capture.fake import Pretence
from headway.errors import PlanError
from headway.parallel.standin import user_line
from headway.parallel.tensor.context import Context, Refused, Rule, Settings, name_of
from headway.parallel.tensor.exchange import part
from headway.parallel.tensor.grid import Grid
from headway.parallel.tensor.hold import hold
from headway.parallel.tensor.nested import all_split, mapped, with_origins
from headway.parallel.tensor.rules.named import table
from headway.parallel.tensor.rules.products import turn_of
from headway.parallel.tensor.split_tensor import (
    WHOLE,
    Cut,
    SplitTensor,
    Undecided,
    cuts_of,
    real_cut,
)
from headway.plan.tensor_layout import Need, TensorGrid, check_needs

Cuts = tuple[Cut, ...]
ROUNDS = 60
"""Runs of the model after which a survey gives up; each blames at least one more weight."""


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """What of a model is split, and how.

    Attributes:
        plan: The grid.
        cuts: Logical name of each parameter -> how its dimensions are cut; none: it is whole.
        companions: Weights whose input other weights take as well: it travels once.
        left: Weights that are whole -> why.
        needs: What the degrees divide.
    """

    plan: TensorGrid
    cuts: Mapping[str, Cuts]
    companions: frozenset[str]
    left: Mapping[str, str]
    needs: tuple[Need, ...]


@dataclass
class _Blame:
    """What is known of a weight that could not be split as it was.

    Attributes:
        blocks: Tried last.
        whole: It is left whole.
        needs: That it did not meet.
        why: The last refusal.
    """

    blocks: int = 1
    whole: bool = False
    needs: list[Need] = field(default_factory=list)
    why: str = ""


DECIDING = frozenset({
    "linear", "addmm", "matmul", "rmatmul", "bmm", "mm", "embedding", "layer_norm", "rms_norm",
    "multi_head_attention_forward",
})  # fmt: skip
"""Functions whose rules decide how a parameter is cut; all others take it whole."""


class Survey(Context):
    """One run of the model.

    Args:
        plan: The grid.
        names: id of a stand-in parameter -> its name.
        blames: What the runs before have found out.
        whole: Patterns of names that the user wants whole.
        rules: Function's name -> rule.
    """

    surveys = True

    def __init__(
        self,
        plan: TensorGrid,
        names: Mapping[int, str],
        blames: Mapping[str, _Blame],
        whole: Sequence[str],
        rules: Mapping[str, Rule],
    ) -> None:
        super().__init__(Grid.dry(plan), Settings(), rules)
        self.names, self.blames, self.patterns = names, blames, whole
        self.cuts: dict[str, Cuts] = {}
        self.needs: list[Need] = []
        self.found: dict[str, Refused] = {}
        self.stray: list[str] = []
        self.takers: dict[int, set[str]] = {}
        self.kept: list[Any] = []

    # -- functions ------------------------------------------------------------------------------

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = name_of(func)
        rule = self.rules.get(name)
        if name not in DECIDING:
            args, kwargs = self._resolved(args), self._resolved(kwargs)
            if not all_split(args, kwargs):
                return func(*args, **kwargs)
        origins = frozenset().union(*(x.origins for x in all_split(args, kwargs)))
        try:
            if rule is None:
                raise Refused("there is no rule for it")
            return with_origins(rule(self, func, *args, **kwargs), origins)
        except Refused as refusal:
            if all_split(args, kwargs):
                self._blame(getattr(refusal.of, "origins", origins), refusal, name)
            return func(*self._whole(args), **self._whole(kwargs))

    def _blame(self, origins: frozenset[str], refusal: Refused, name: str) -> None:
        refusal.why = f"{name} at {user_line()}: {refusal.why}"
        if not origins:
            self.stray.append(refusal.why)
        for origin in origins:
            self.found.setdefault(origin, refusal)

    def _whole(self, value: Any) -> Any:
        """Arguments as they would be without any split."""

        def whole(x: Any) -> Any:
            return x.local.new_empty(x.shape) if isinstance(x, SplitTensor) else self.resolve(x)

        return mapped(value, whole)

    def _resolved(self, value: Any) -> Any:
        return mapped(value, self.resolve)

    # -- parameters -----------------------------------------------------------------------------

    def parameter(self, parameter: nn.Parameter, key: Any) -> Any:
        """What a module's code gets for a parameter of it."""
        name = self.names[id(parameter)]
        if name in self.cuts:
            return self._cut(Undecided(name, parameter, self), self.cuts[name])
        return Undecided(name, parameter, self)

    def resolve(self, parameter: Any) -> Any:
        if not isinstance(parameter, Undecided):
            return parameter
        self.cuts.setdefault(parameter.name, ())
        return parameter.tensor

    def _cut(self, parameter: Undecided, cuts: Cuts) -> Any:
        self.cuts[parameter.name] = cuts
        x: Tensor = parameter.tensor
        for dim, cut in enumerate(cuts):
            if cut.axes and x.shape[dim] % self.grid.size(cut.axes) == 0:
                x = part(x, self.grid, cut.axes, dim, cut.blocks)
        real = tuple(real_cut(cut, self) for cut in cuts)
        if all(cut is WHOLE for cut in real):
            return x
        shape = parameter.tensor.shape
        return SplitTensor(x, shape, real, self, frozenset({parameter.name}), parameter=True)

    def _stays_whole(self, name: str) -> bool:
        blame = self.blames.get(name)
        return (blame is not None and blame.whole) or any(
            fnmatch.fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")
            for pattern in self.patterns
        )

    def _divides(self, *needs: Need) -> bool:
        self.needs += needs
        return all(need.size % self.grid.size(need.axes) == 0 for need in needs)

    def decide_linear(
        self, x: Any, weight: Any, bias: Any, *, flipped: bool = False, blocks: int = 1
    ) -> tuple[Any, Any]:
        name, shape = weight.name, weight.tensor.shape
        n, k = shape[::-1] if flipped else shape
        if blocks == 1 and name in self.blames:
            blocks = self.blames[name].blocks
        found = None if self._stays_whole(name) else self._linear_cuts(name, x, n, k, blocks)
        if found is None:
            return self.resolve(weight), self.resolve(bias)
        self.takers.setdefault(id(x), set()).add(name)
        self.kept.append(x)
        outputs, inputs, of_bias = found
        cuts = (inputs, outputs) if flipped else (outputs, inputs)
        if isinstance(bias, Undecided):
            bias = self._cut(bias, (of_bias,)) if of_bias.axes else self.resolve(bias)
        return self._cut(weight, cuts), bias

    def _linear_cuts(
        self, name: str, x: Any, n: int, k: int, blocks: int
    ) -> tuple[Cut, Cut, Cut] | None:
        """Outputs, inputs and bias; None: the layer stays whole."""
        last, outputs = cuts_of(x)[-1], f"{name}: outputs"
        match self.grid.plan.form:
            case "classic":
                if last.axes:
                    return WHOLE, last, WHOLE
                if isinstance(x, SplitTensor):
                    return None
                cut = Cut("j", blocks)
                return (cut, WHOLE, cut) if self._divides(Need("j", n // blocks, outputs)) else None
            case "cuboid":
                if not isinstance(x, SplitTensor):
                    return None
                rows, sums = turn_of(self, x)
                fits = self._divides(
                    Need(rows, n // blocks, outputs),
                    Need(f"{rows}i", n, outputs),
                    Need(sums, k, f"{name}: inputs"),
                    Need(f"i{sums}", x.shape[0], "samples of a micro-batch"),
                )
                cut = Cut(rows, blocks)
                both = Cut(f"{rows}i", blocks)
                return (both, last if last.axes else Cut(sums), cut) if fits else None
            case "summa":
                if not isinstance(x, SplitTensor):
                    return None
                fits = self._divides(
                    Need("j", n // blocks, outputs), Need("i", k, f"{name}: inputs")
                )
                cut = Cut("j", blocks)
                return (cut, Cut("i", last.blocks), cut) if fits else None

    def decide_table(self, index: Any, weight: Any) -> Any:
        name, (words, width) = weight.name, weight.tensor.shape
        many = f"{name}: vocabulary"
        single = index.ndim < 2 and not isinstance(index, SplitTensor)
        if self._stays_whole(name):
            return self.resolve(weight)
        match self.grid.plan.form:
            case "classic":  # a table of positions costs less to hold than to sum
                fits = not single and self._divides(Need("j", words, many))
                cuts = (Cut("j"), WHOLE)
            case "cuboid":
                needs = (Need("ji", words, many), Need("l", width, f"{name}: width"))
                cuts = (Cut("ji"), Cut("l"))
                fits = self._fits(single, needs)
            case "summa":
                needs = (Need("j", words, many), Need("i", width, f"{name}: width"))
                cuts = (Cut("j"), Cut("i"))
                fits = self._fits(single, needs)
        return self._cut(weight, cuts) if fits else self.resolve(weight)

    def _fits(self, single: bool, needs: tuple[Need, ...]) -> bool:
        """Of a table of positions nothing is required: it can stay whole."""
        if single:
            return all(need.size % self.grid.size(need.axes) == 0 for need in needs)
        return self._divides(*needs)

    def decide_vector(self, weight: Any, cut: Any) -> Any:
        if not cut.axes or self._stays_whole(weight.name):
            return self.resolve(weight)
        return self._cut(weight, (cut,))

    def decisions(self) -> Decisions:
        left = {name: blame.why for name, blame in self.blames.items() if blame.whole}
        companions = [names for names in self.takers.values() if len(names) > 1]
        return Decisions(
            plan=self.grid.plan,
            cuts=dict.fromkeys(self.names.values(), ()) | self.cuts,
            companions=frozenset().union(*companions),
            left=left,
            needs=tuple(dict.fromkeys(self.needs)),
        )


def survey(
    model: nn.Module,
    loss: Callable[[Any, Any], Any],
    batch: Any,
    plan: TensorGrid,
    *,
    whole: Sequence[str] = (),
) -> Decisions:
    """Find out how a model can be split; it is not changed, and nothing is computed.

    Args:
        model: In training mode, as it will be used.
        loss: `loss(model, batch)`.
        batch: Of a micro-batch, as each rank of the grid will get it.
        plan: The grid.
        whole: Names of parameters or modules, or patterns, that are not split.

    Raises:
        PlanError: The degrees do not divide something, with the legal ones; or, on a grid that
            cuts every activation, a function has no rule.
    """
    blames: dict[str, _Blame] = {}
    for _ in range(ROUNDS):
        run = _run(model, loss, batch, plan, blames, whole)
        if not run.found:
            break
        known = {name: blames.setdefault(name, _Blame()) for name in run.found}
        sure = {
            n: r
            for n, r in run.found.items()
            if r.of is not None or (r.blocks > 1 and known[n].blocks == 1)
        }
        for name, refusal in (sure or run.found).items():  # these may do away with the rest
            _next(known[name], refusal)
    stuck = [
        replace(need, what=f"{name}: {need.what}")
        for name, blame in blames.items()
        if blame.whole
        for need in blame.needs
    ]
    check_needs(plan, [*run.needs, *stuck])
    problems = [*run.stray]
    if plan.form != "classic":
        problems += [f"{name}: {blame.why}" for name, blame in blames.items() if blame.whole]
    if problems or run.found:
        raise PlanError(
            f"{type(model).__name__} cannot be split over a {plan.form} grid",
            problems=problems or [f"{name}: {found.why}" for name, found in run.found.items()],
            fix="The classic form leaves such layers whole; or name them in whole=[...].",
        )
    return run.decisions()


def _run(
    model: nn.Module,
    loss: Callable[[Any, Any], Any],
    batch: Any,
    plan: TensorGrid,
    blames: Mapping[str, _Blame],
    whole: Sequence[str],
) -> Survey:
    pretence = Pretence()
    copy = pretence.model(model)
    names = {id(parameter): name for name, parameter in copy.named_parameters()}
    run = Survey(plan, names, blames, whole, table())
    hold(copy, run)
    with pretence.mode, torch.enable_grad():
        loss(copy, pretence.tree(batch))
    return run


def _next(blame: _Blame, refusal: Refused) -> None:
    """What to try after a refusal: blocks once, then the whole layer."""
    blame.why = refusal.why
    blame.needs += refusal.needs
    if refusal.blocks > 1 and blame.blocks == 1:
        blame.blocks = refusal.blocks
    else:
        blame.whole = True
