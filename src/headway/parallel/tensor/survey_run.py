"""One run of a model on stand-ins, in which it is decided how its weights are cut.

A parameter is undecided until a function takes it; then the layer's weight is cut as its input's
layout wants it. A function that has no rule for what it gets puts the blame on the weights that it
comes from (`Survey.found`), and goes on as if nothing were cut. See `survey` for what follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from headway.parallel.standin import user_line
from headway.parallel.tensor.context import Context, Refused, Rule, Settings, name_of
from headway.parallel.tensor.exchange import part
from headway.parallel.tensor.grid import Grid
from headway.parallel.tensor.home import Cuts
from headway.parallel.tensor.islands import matches
from headway.parallel.tensor.nested import all_split, mapped, with_origins
from headway.parallel.tensor.rules.products import turn_of
from headway.parallel.tensor.split_tensor import (
    WHOLE,
    Cut,
    SplitTensor,
    Undecided,
    cuts_of,
    real_cut,
)
from headway.plan.tensor_layout import Need, TensorGrid


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """What of a model is split, and how.

    Attributes:
        plan: The grid.
        cuts: Logical name of each parameter -> how its dimensions are cut; none: it is whole.
        companions: Weights whose input other weights take as well: it travels once.
        left: Weights that are whole -> why.
        needs: What the degrees divide.
        islands: Name of each module that is split otherwise -> its grid.
    """

    plan: TensorGrid
    cuts: Mapping[str, Cuts]
    companions: frozenset[str]
    left: Mapping[str, str]
    needs: tuple[Need, ...]
    islands: Mapping[str, TensorGrid] = field(default_factory=dict)


@dataclass
class Blame:
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
        rules: Function's name -> rule.
        whole: Patterns of names that the user wants whole.
        only: Patterns of names that may be split; none: all.
    """

    surveys = True

    def __init__(
        self,
        plan: TensorGrid,
        names: Mapping[int, str],
        blames: Mapping[str, Blame],
        rules: Mapping[str, Rule],
        whole: Sequence[str] = (),
        only: Sequence[str] = (),
    ) -> None:
        super().__init__(Grid.dry(plan), Settings(), rules)
        self.names, self.blames, self.patterns = names, blames, whole
        self.only = only
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

    def leave(self, x: Any) -> Any:
        if isinstance(x, SplitTensor):
            self._blame(x.origins, Refused("it enters what is split otherwise"), "a module")
            return x.local.new_empty(x.shape)
        return self.resolve(x)

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
        if (blame is not None and blame.whole) or matches(name, self.patterns):
            return True
        return bool(self.only) and not matches(name, self.only)

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
        own = set(self.names.values())
        left = {n: blame.why for n, blame in self.blames.items() if blame.whole and n in own}
        companions = [names for names in self.takers.values() if len(names) > 1]
        return Decisions(
            plan=self.grid.plan,
            cuts=dict.fromkeys(self.names.values(), ()) | self.cuts,
            companions=frozenset().union(*companions),
            left=left,
            needs=tuple(dict.fromkeys(self.needs)),
        )
