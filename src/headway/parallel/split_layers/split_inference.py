"""Inferring how a model can be split by running it on a dry grid; no class is known by name.

A copy of the model runs on tensors without data. A parameter is undecided until a function
takes it; then the layer's weight is cut as its input's layout wants it. What a cut activation
meets afterwards shows whether that was right: a reshape into heads, an activation function, a
product, and at last the weight that sums it up again. A function without a rule for its
operands blames the weights that they come from: such a weight is split in blocks (queries, keys
and values in one layer) if that helps, and left whole otherwise; then the model runs again,
until no weight is blamed.

Submodules may be split over another grid of the same ranks (Das et al. 2016: another number of
groups for each layer). Between grids activations are whole: such a submodule cuts its inputs by
samples, as its grid wants it, and gathers its outputs.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from headway.capture.fake_tensors import DataIndependentValues, FakeContext
from headway.documents import nearest
from headway.errors import HeadwayError, PlanError
from headway.parallel.operator_rules import RULES
from headway.parallel.split_layers.parameters import (
    DimensionCuts,
    SplitInputModule,
    install_parameter_access,
)
from headway.parallel.split_tensor import (
    WHOLE_DIMENSION,
    DimensionCut,
    RuleRefused,
    SplitTensor,
    map_nested,
    split_tensors_in,
    torch_function_name,
)
from headway.parallel.stages import user_line
from headway.parallel.tensor.grid import ProcessGrid, local_slice
from headway.parallel.tensor.layer_context import (
    LayerContext,
    SplitSettings,
    UndecidedParameter,
    cuts_of,
)
from headway.parallel.tensor.rules.layers import cuboid_axes_for
from headway.plans.tensor_layout import AxisDivisor, TensorGrid, check_divisibility
from headway.user_frames import innermost_user_frame


class SubmoduleOnOwnGrid(SplitInputModule):
    """The module itself: plain whole tensors enter and leave."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        context: LayerContext = self.__dict__["_headway_split"][1]
        result = super().__call__(
            *map_nested(args, gather_input), **map_nested(kwargs, gather_input)
        )
        return map_nested(result, lambda x: x.full_tensor() if _is_of(x, context) else x)


def gather_input(x: Any) -> Any:
    """What enters an island, as a plain tensor."""
    return x.context.leave(x) if isinstance(x, SplitTensor | UndecidedParameter) else x


def _is_of(x: Any, context: LayerContext) -> bool:
    return isinstance(x, SplitTensor) and x.context is context


def matches_pattern(name: str, patterns: Sequence[str]) -> bool:
    """Whether patterns mean a module or parameter, or a module that it is in."""
    return any(fnmatchcase(name, p) or fnmatchcase(name, f"{p}.*") for p in patterns)


def parameters_matching(model: nn.Module, patterns: Sequence[str], option: str) -> list[str]:
    """The parameters that patterns mean, each by its first name; a tied one has several.

    Raises:
        PlanError: A pattern means none.
    """
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    named = [(n, first[id(p)]) for n, p in model.named_parameters(remove_duplicate=False)]
    problems, found = [], []
    for pattern in patterns:
        hits = [own for name, own in named if matches_pattern(name, (pattern,))]
        if not hits:
            hint = nearest(pattern, [n for n, _ in model.named_modules() if n])
            problems.append(f"split.{option} {pattern}: no parameter has or lies under it{hint}")
        found += hits
    if problems:
        raise PlanError(
            f"{type(model).__name__} cannot be split so",
            problems=problems,
            fix="Name parameters, or modules that they lie in, as model.named_parameters() does.",
        )
    return found


def submodule_grids(
    model: nn.Module, by: Sequence[tuple[str, TensorGrid]]
) -> Mapping[str, TensorGrid]:
    """Name of each module that the patterns mean -> its grid; the first pattern counts.

    Raises:
        PlanError: A pattern means no module, or an island shares parameters with the rest.
    """
    found: dict[str, TensorGrid] = {}
    problems = []
    modules = dict(model.named_modules())
    for pattern, grid in by:
        hits = [name for name in modules if name and fnmatchcase(name, pattern)]
        if not hits:
            problems.append(f"split.by {pattern}: no module has this name")
        for name in hits:
            if not any(name == other or name.startswith(f"{other}.") for other in found):
                # Of nested modules the outermost is the one that is split.
                found = {n: g for n, g in found.items() if not n.startswith(f"{name}.")}
                found[name] = grid
    for name in found:
        inside = {id(p) for p in modules[name].parameters()}
        problems += [
            f"{name}: {other} is shared with the rest of the model"
            for other, p in model.named_parameters(remove_duplicate=False)
            if id(p) in inside and not other.startswith(f"{name}.")
        ]
    if problems:
        raise PlanError(
            f"{type(model).__name__} cannot be split so",
            problems=problems,
            fix="Name modules as model.named_modules() does; tied weights belong to one grid.",
        )
    return found


# One run of a model on stand-ins, in which it is decided how its weights are cut.


@dataclass(frozen=True, kw_only=True)
class SplitDecisions:
    """What of a model is split, and how.

    Attributes:
        cuts: Logical name of each parameter -> how its dimensions are cut; none: it is whole.
        companions: Weights whose input other weights take as well: it travels once.
        left: Weights that are whole -> why.
        islands: Name of each module that is split otherwise -> its grid.
    """

    plan: TensorGrid
    cuts: Mapping[str, DimensionCuts]
    companions: frozenset[str]
    left: Mapping[str, str]
    needs: tuple[AxisDivisor, ...]
    islands: Mapping[str, TensorGrid] = field(default_factory=dict)


@dataclass
class FailedSplit:
    """What is known of a weight that could not be split as it was."""

    blocks: int = 1
    whole: bool = False
    needs: list[AxisDivisor] = field(default_factory=list)
    why: str = ""


DECIDING_FUNCTIONS = frozenset({
    "linear", "addmm", "matmul", "rmatmul", "bmm", "mm", "embedding", "layer_norm", "rms_norm",
    "multi_head_attention_forward",
})  # fmt: skip
"""Functions whose rules decide how a parameter is cut; all others take it whole."""


class InferenceContext(LayerContext):
    """One run of the model.

    Args:
        names: id of a stand-in parameter -> its name.
        blames: What the runs before have found out.
        whole: Patterns of names that the user wants whole.
        only: Patterns of names that may be split; none: all.
    """

    rules = RULES["layers"]
    infers = True

    def __init__(
        self,
        plan: TensorGrid,
        names: Mapping[int, str],
        blames: Mapping[str, FailedSplit],
        whole: Sequence[str] = (),
        only: Sequence[str] = (),
    ) -> None:
        super().__init__(ProcessGrid.dry(plan), SplitSettings())
        self.names, self.blames, self.patterns = names, blames, whole
        self.only = only
        self.cuts: dict[str, DimensionCuts] = {}
        self.needs: list[AxisDivisor] = []
        self.found: dict[str, RuleRefused] = {}
        self.stray: list[str] = []
        self.takers: dict[int, set[str]] = {}
        self.kept: list[Any] = []

    # -- functions ------------------------------------------------------------------------------

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = torch_function_name(func)
        if name not in DECIDING_FUNCTIONS:
            args, kwargs = self._resolved(args), self._resolved(kwargs)
            if not split_tensors_in(args, kwargs):
                return func(*args, **kwargs)
        origins = frozenset().union(*(x.origins for x in split_tensors_in(args, kwargs)))

        def with_origins(x: Any) -> Any:
            known = not isinstance(x, SplitTensor) or x.origins or not origins
            return x if known else replace(x, origins=origins)

        try:
            return map_nested(self.run_rule(func, args, kwargs), with_origins)
        except RuleRefused as refusal:
            if split_tensors_in(args, kwargs):
                self._blame(getattr(refusal.of, "origins", origins), refusal, name)
            # The run goes on as if nothing were split, and may find further weights to blame.
            return func(*self._whole(args), **self._whole(kwargs))

    def _blame(self, origins: frozenset[str], refusal: RuleRefused, name: str) -> None:
        refusal.why = f"{name} at {user_line()}: {refusal.why}"
        if not origins:
            self.stray.append(refusal.why)
        for origin in origins:
            # The first refusal counts: later ones may be its consequences.
            self.found.setdefault(origin, refusal)

    def _whole(self, value: Any) -> Any:
        """Arguments as they would be without any split."""

        def whole(x: Any) -> Any:
            return x.local.new_empty(x.shape) if isinstance(x, SplitTensor) else self.resolve(x)

        return map_nested(value, whole)

    def leave(self, x: Any) -> Any:
        if isinstance(x, SplitTensor):
            self._blame(x.origins, RuleRefused("it enters what is split otherwise"), "a module")
            return x.local.new_empty(x.shape)
        return self.resolve(x)

    def _resolved(self, value: Any) -> Any:
        return map_nested(value, self.resolve)

    # -- parameters -----------------------------------------------------------------------------

    def parameter(self, parameter: nn.Parameter, key: Any) -> Any:
        """What a module's code gets for a parameter of it."""
        name = self.names[id(parameter)]
        # A weight with several uses stays as the first one has cut it.
        if name in self.cuts:
            return self._cut(UndecidedParameter(name, parameter, self), self.cuts[name])
        return UndecidedParameter(name, parameter, self)

    def resolve(self, parameter: Any) -> Any:
        if not isinstance(parameter, UndecidedParameter):
            return parameter
        self.cuts.setdefault(parameter.name, ())
        return parameter.tensor

    def _cut(self, parameter: UndecidedParameter, cuts: DimensionCuts) -> Any:
        self.cuts[parameter.name] = cuts
        x: Tensor = parameter.tensor
        for dim, cut in enumerate(cuts):
            if cut.axes and x.shape[dim] % self.grid.size(cut.axes) == 0:
                x = local_slice(x, self.grid, cut.axes, dim, cut.blocks)
        real = tuple(self.without_unit_axes(cut) for cut in cuts)
        if all(cut is WHOLE_DIMENSION for cut in real):
            return x
        shape = parameter.tensor.shape
        return SplitTensor(x, shape, real, self, frozenset({parameter.name}), parameter=True)

    def _stays_whole(self, name: str) -> bool:
        blame = self.blames.get(name)
        if (blame is not None and blame.whole) or matches_pattern(name, self.patterns):
            return True
        return bool(self.only) and not matches_pattern(name, self.only)

    def _divides(self, *needs: AxisDivisor, required: bool = True) -> bool:
        self.needs += needs if required else ()
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
        self.kept.append(x)  # its id is a key of `takers`, and must not be given to another tensor
        outputs, inputs, of_bias = found
        cuts = (inputs, outputs) if flipped else (outputs, inputs)
        if isinstance(bias, UndecidedParameter):
            bias = self._cut(bias, (of_bias,)) if of_bias.axes else self.resolve(bias)
        return self._cut(weight, cuts), bias

    def _linear_cuts(
        self, name: str, x: Any, n: int, k: int, blocks: int
    ) -> tuple[DimensionCut, DimensionCut, DimensionCut] | None:
        """Outputs, inputs and bias; None: the layer stays whole."""
        last, outputs = cuts_of(x)[-1], f"{name}: outputs"
        match self.grid.plan.form:
            case "classic":
                if last.axes:
                    # A cut input belongs to the second layer of a pair, which sums over it.
                    return WHOLE_DIMENSION, last, WHOLE_DIMENSION
                if isinstance(x, SplitTensor):
                    return None
                # A whole input belongs to the first layer of a pair (Shoeybi et al. 2019, section
                # 3).
                cut = DimensionCut("j", blocks)
                return (
                    (cut, WHOLE_DIMENSION, cut)
                    if self._divides(AxisDivisor("j", n // blocks, outputs))
                    else None
                )
            case "cuboid":
                if not isinstance(x, SplitTensor):
                    return None
                rows, sums = cuboid_axes_for(self, x)
                fits = self._divides(
                    AxisDivisor(rows, n // blocks, outputs),
                    AxisDivisor(f"{rows}i", n, outputs),
                    AxisDivisor(sums, k, f"{name}: inputs"),
                    AxisDivisor(f"i{sums}", x.shape[0], "samples of a micro-batch"),
                )
                cut = DimensionCut(rows, blocks)
                both = DimensionCut(f"{rows}i", blocks)
                return (both, last if last.axes else DimensionCut(sums), cut) if fits else None
            case "summa":
                if not isinstance(x, SplitTensor):
                    return None
                fits = self._divides(
                    AxisDivisor("j", n // blocks, outputs), AxisDivisor("i", k, f"{name}: inputs")
                )
                cut = DimensionCut("j", blocks)
                return (cut, DimensionCut("i", last.blocks), cut) if fits else None

    def decide_table(self, index: Any, weight: Any) -> Any:
        name, (words, width) = weight.name, weight.tensor.shape
        many = f"{name}: vocabulary"
        single = index.ndim < 2 and not isinstance(index, SplitTensor)
        if self._stays_whole(name):
            return self.resolve(weight)
        if self.grid.plan.form == "classic":  # a table of positions costs less to hold than to sum
            fits = not single and self._divides(AxisDivisor("j", words, many))
            cuts = (DimensionCut("j"), WHOLE_DIMENSION)
        else:
            rows, columns = ("ji", "l") if self.grid.plan.form == "cuboid" else ("j", "i")
            # Of a table of positions nothing is required: it can stay whole.
            fits = self._divides(
                AxisDivisor(rows, words, many),
                AxisDivisor(columns, width, f"{name}: width"),
                required=not single,
            )
            cuts = (DimensionCut(rows), DimensionCut(columns))
        return self._cut(weight, cuts) if fits else self.resolve(weight)

    def decide_vector(self, weight: Any, cut: Any) -> Any:
        if not cut.axes or self._stays_whole(weight.name):
            return self.resolve(weight)
        return self._cut(weight, (cut,))


# What of a model can be split, found by running it: nothing is known of its classes.


MAX_INFERENCE_RUNS = 60
"""Runs of the model after which inference gives up; each blames at least one more weight."""


def infer_split(
    model: nn.Module,
    loss: Callable[[Any, Any], Any],
    batch: Any,
    plan: TensorGrid,
    *,
    whole: Sequence[str] = (),
    only: Sequence[str] = (),
    by: Sequence[tuple[str, TensorGrid]] = (),
) -> SplitDecisions:
    """Find out how a model can be split; it is not changed, and nothing is computed.

    Args:
        model: In training mode, as it will be used.
        batch: Of a micro-batch, as each rank of the grid will get it.
        whole: Names of parameters or modules, or patterns, that are not split.
        only: Those that may be split; none: all.
        by: Patterns of modules that are split over another grid of the same ranks, on which `whole`
            and `only` have no bearing; the plan is a classic one then.

    Raises:
        PlanError: The degrees do not divide something, with the legal ones; on a grid that cuts
            every activation, a function has no rule; a pattern means no parameter; or nothing is
            split.
    """
    blames: dict[str, FailedSplit] = {}
    islands = submodule_grids(model, by)
    whole, only = (
        parameters_matching(model, patterns, said)
        for patterns, said in ((whole, "whole"), (only, "only"))
    )
    for _ in range(MAX_INFERENCE_RUNS):
        runs = _run(model, loss, batch, {**islands, "": plan}, blames, whole, only)
        found = {name: refusal for run in runs for name, refusal in run.found.items()}
        if not found:
            break
        known = {name: blames.setdefault(name, FailedSplit()) for name in found}
        # A refusal that names an operand or a number of blocks is a cause; others may be
        # consequences.
        sure = {
            n: r
            for n, r in found.items()
            if r.of is not None or (r.blocks > 1 and known[n].blocks == 1)
        }
        for name, refusal in (sure or found).items():  # these may do away with the rest
            _next(known[name], refusal)
    for run in runs:
        _check_decided(model, run)
    if found:
        raise _refusal(model, plan, [f"{name}: {one.why}" for name, one in found.items()])
    names = [name for run in runs for name in run.names.values()]
    decided = {name: cuts for run in runs for name, cuts in run.cuts.items()}
    if plan.ranks > 1 and not any(cut.axes for cuts in decided.values() for cut in cuts):
        raise _nothing_to_split(model, plan, blames)
    takers = [taking for run in runs for taking in run.takers.values()]
    return SplitDecisions(
        plan=plan,
        cuts=dict.fromkeys(names, ()) | decided,
        companions=frozenset().union(*(taking for taking in takers if len(taking) > 1)),
        left={
            name: blame.why
            for run in runs
            for name, blame in blames.items()
            if blame.whole and name in run.names.values()
        },
        needs=tuple(dict.fromkeys(runs[-1].needs)),
        islands=islands,
    )


def _check_decided(model: nn.Module, run: InferenceContext) -> None:
    """Refuse what a grid's run has found out that it cannot do.

    Raises:
        PlanError: See `infer_split`.
    """
    plan = run.grid.plan
    blames = {name: run.blames[name] for name in run.names.values() if name in run.blames}
    stuck = [
        replace(need, what=f"{name}: {need.what}")
        for name, blame in blames.items()
        if blame.whole
        for need in blame.needs
    ]
    check_divisibility(plan, [*run.needs, *stuck])
    problems = [*run.stray]
    if plan.form != "classic":
        problems += [f"{name}: {blame.why}" for name, blame in blames.items() if blame.whole]
    if problems:
        raise _refusal(model, plan, problems)


def _refusal(model: nn.Module, plan: TensorGrid, problems: Sequence[str]) -> PlanError:
    return PlanError(
        f"{type(model).__name__} cannot be split over a {plan.form} grid",
        problems=problems,
        fix="The classic form leaves such layers whole; or name them in whole=[...].",
    )


def _nothing_to_split(
    model: nn.Module, plan: TensorGrid, blames: Mapping[str, FailedSplit]
) -> PlanError:
    """The refusal of a split in which all ranks would compute the same."""
    return PlanError(
        f"no layer of {type(model).__name__} is split over {plan.ranks} ranks: all of them would "
        "compute the same",
        problems=[f"{name}: {blame.why}" for name, blame in blames.items()],
        fix="Linear layers, attention and embeddings are split. For convolutions split samples "
        "(--set 'split.spatial=[2, 1]'), or leave split away: every rank takes other samples.",
    )


def _run(
    model: nn.Module,
    loss: Callable[[Any, Any], Any],
    batch: Any,
    plans: Mapping[str, TensorGrid],
    blames: Mapping[str, FailedSplit],
    whole: Sequence[str],
    only: Sequence[str],
) -> list[InferenceContext]:
    """One run; what each grid's part of the model has said, the model itself last."""
    pretence = FakeContext()
    copy = pretence.model(model)
    rest = {id(parameter): name for name, parameter in copy.named_parameters()}
    runs = []
    for name, plan in plans.items():  # `install_parameter_access` leaves alone what is held already
        part = copy.get_submodule(name)
        own = {id(p): rest.pop(id(p)) for p in part.parameters() if id(p) in rest}
        patterns = ((), ()) if name else (whole, only)
        runs.append(InferenceContext(plan, own, blames, *patterns))
        install_parameter_access(
            part, runs[-1], root=SubmoduleOnOwnGrid if name else SplitInputModule
        )
    # torch's own Transformer asks whether a mask is causal; the numbers of masks are known.
    known = DataIndependentValues()
    for own_buffer, fake_buffer in zip(model.buffers(), copy.buffers(), strict=True):
        known.give(fake_buffer, own_buffer)
    # Rules ask `requires_grad` to tell activations from masks.
    try:
        with pretence.mode, known, torch.enable_grad():
            loss(copy, pretence.tree(batch))
    except HeadwayError:
        raise
    except Exception as error:
        raise _without_numbers(model, error) from error
    return runs


_NEEDS_NUMBERS = ("DataDependent", "DynamicOutputShape")
"""How names begin of what torch raises where a stand-in is asked for its numbers."""


def _without_numbers(model: nn.Module, error: Exception) -> PlanError:
    """The refusal of a model whose code needs the numbers in its tensors, or fails."""
    frame = innermost_user_frame(traceback.extract_tb(error.__traceback__))
    kind = type(error).__name__
    if kind.startswith(_NEEDS_NUMBERS):
        why = "its code does not run without numbers"
        fix = (
            "Replace decisions by the numbers in a tensor (.item(), .tolist(), masks as indices, "
            "torch.where with one argument) by functions of tensors, or split otherwise."
        )
    else:
        why = "its code fails on stand-ins, tensors without numbers of which some are split"
        fix = (
            "Name the modules whose results this line uses in split.whole (whole=[...]), replace "
            "what no tensor without numbers can do (.numpy(), .tolist()), or split otherwise."
        )
    return PlanError(
        f"how {type(model).__name__} can be split was not found out: {why}",
        where="" if frame is None else f"{frame.filename}:{frame.lineno}",
        problems=[f"{kind}: {str(error).strip().partition(chr(10))[0]}"],
        fix=fix,
    )


def _next(blame: FailedSplit, refusal: RuleRefused) -> None:
    """What to try after a refusal: blocks once, then the whole layer."""
    blame.why = refusal.why
    if refusal.blocks > 1 and blame.blocks == 1:
        blame.blocks = refusal.blocks  # what the layer as one block needed it does not need so
    else:
        blame.needs += refusal.needs
        blame.whole = True
