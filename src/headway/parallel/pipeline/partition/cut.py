"""Cutting a model into stages: evenly, at named modules, or along a given chain of modules.

`cut` traces the model with the coarsest leaves of which stages of about even size can be made.
`cut_module_chain` is for models that torch.fx cannot trace: the user lists the modules of each
stage, and each module is called with what the one before it returned. The model itself is not
changed.

Either way the stages are run in this process on one micro-batch and compared with the model
before they are used. Values are copied between stages, as messages are, so that whatever a cut
would change silently (a value altered in place, state outside of modules) shows as a
different output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from headway.capture.fake_tensors import is_fake
from headway.errors import HeadwayError, PlanError, RecipeError
from headway.parallel.fsdp import check_root_not_wrapped, reshard_stages
from headway.parallel.pipeline.partition.stage_modules import (
    ModelUnit,
    balanced_partition,
    cut_at,
    cut_evenly,
    cut_units,
    node_labels,
    split_graph,
)
from headway.parallel.pipeline.partition.tracing import (
    ExampleValues,
    IsLeaf,
    Trace,
    has_hooks,
    preserve_model_state,
    trace_model,
    without_caches,
)
from headway.parallel.stages import (
    LOSS,
    METRICS,
    MODEL_INPUT,
    LossFunction,
    ModelCall,
    ModelProxy,
    ModelStages,
    Stage,
    StageCompleted,
    flatten,
    is_payload,
    training_mode,
    user_line,
)

AGREEMENT_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
"""By type, relative to the largest element; 1e-2 for the others: sums in another order."""
MAX_IMBALANCE = 1.25
"""Largest stage over the mean; above it, units of a deeper level are tried."""
MIN_IMPROVEMENT = 0.05
"""By how much the largest stage must shrink for units of a deeper level to be taken."""


def check_stages_match_model(stages: ModelStages, call: ModelCall) -> ModelStages:
    """The stages with what has been seen of them: whether they alter inputs, update buffers.

    Args:
        stages: Of a model in the mode that they were cut for.

    Raises:
        PlanError: The output is not the model's, or two stages update one buffer.
    """
    model = stages.model
    with torch.no_grad():
        # Both runs begin with the same buffers and random state, so that dropout is the same.
        with preserve_model_state(model):
            args, kwargs = call.arguments(_copies(call.leaves))
            expected = model(*args, **kwargs)
        with preserve_model_state(model):
            found, alters, updates = _run(stages, call)
    problem = _difference(expected, found)
    if problem:
        raise PlanError(
            f"cut like this, {type(model).__name__} computes something else",
            problems=[f"the output of the stages differs from the model's: {problem}"],
            fix="Look for values that are changed in place after a cut, or for state outside of "
            "modules; or cut elsewhere.",
        )
    _check_buffers(stages, updates)
    flagged = (
        replace(stage, alters=alters[stage.number], updates=bool(updates[stage.number]))
        for stage in stages
    )
    return replace(stages, stages=tuple(flagged))


def run_stages(
    stages: ModelStages, call: ModelCall, *, before: Callable[[int], None] = lambda _: None
) -> Any:
    """The output of the stages, one after the other in this process.

    Args:
        before: Called with the number of each stage before it is run.
    """
    return _run(stages, call, before)[0]


def _run(
    stages: ModelStages, call: ModelCall, before_stage: Callable[[int], None] = lambda _: None
) -> tuple[Any, dict[int, bool], dict[int, set[str]]]:
    """The output; for each stage whether it alters what enters it; which buffers it updates."""
    given: list[Sequence[Any]] = []
    alters: dict[int, bool] = {}
    updates: dict[int, set[str]] = {}
    for stage in stages:
        before_stage(stage.number)
        # As messages are: what a stage changes in place must not reach the stage it comes from.
        values = _copies(_entering(stage, given, call))
        inside = flatten(list(values), is_payload)[0]
        _check_whole(stage.number, inside)
        # `_version` rises with every change in place.
        before = [t._version for t in inside if isinstance(t, Tensor)]
        versions = {name: buffer._version for name, buffer in stage.buffers.items()}
        given.append(stage.module.forward(*values))
        after = [t._version for t in inside if isinstance(t, Tensor)]
        alters[stage.number] = before != after
        updates[stage.number] = {
            name for name, buffer in stage.buffers.items() if buffer._version != versions[name]
        }
    return given[-1], alters, updates


def _check_whole(stage: int, entering: Sequence[Any]) -> None:
    if any(isinstance(value, DTensor) for value in entering):
        raise PlanError(
            "the model cannot be cut there",
            problems=[f"a DTensor enters stage {stage}, and its parts cannot be sent"],
            fix="Let the module before it return plain tensors (use_local_output=True).",
        )


def _entering(stage: Stage, given: list[Sequence[Any]], call: ModelCall) -> tuple[Any, ...]:
    return tuple(
        call.leaves[entry.leaf] if entry.source == MODEL_INPUT else given[entry.source][entry.leaf]
        for entry in stage.takes
    )


def _copies(values: Sequence[Any]) -> tuple[Any, ...]:
    """The values with tensors of their own."""
    leaves, structure = flatten(list(values), is_payload)
    return tuple(structure.rebuild([v.clone() if isinstance(v, Tensor) else v for v in leaves]))


def _check_buffers(stages: ModelStages, updates: dict[int, set[str]]) -> None:
    for name in {name for names in updates.values() for name in names}:
        holders = [stage.number for stage in stages if name in stage.buffers]
        if len(holders) > 1:
            raise PlanError(
                "the model cannot be cut there",
                problems=[
                    f"the buffer {name} is updated in the forward, and the stages {holders} use it"
                ],
                fix="Cut so that all calls of its module are in one stage.",
            )


def _difference(expected: Any, found: Any) -> str:
    """How two outputs differ; empty if they do not."""
    a, shape = flatten(expected, lambda _: True)
    b, other = flatten(found, lambda _: True)
    if shape != other or len(a) != len(b):
        return "it is put together in another way"
    for number, (x, y) in enumerate(zip(a, b, strict=True)):
        if isinstance(x, Tensor):
            if not isinstance(y, Tensor) or x.shape != y.shape or x.dtype != y.dtype:
                return f"tensor {number} has another shape or type"
            if not _close(x, y):
                return f"tensor {number} by up to {float((x - y).abs().max()):.1e}"
        elif is_payload(x) and x != y:
            return f"number {number} is {y} in place of {x}"
    return ""


def _close(x: Tensor, y: Tensor) -> bool:
    # Stand-ins have no numbers that could differ.
    if not x.numel() or is_fake(x) or torch.equal(x, y):
        return True
    if not (x.is_floating_point() or x.is_complex()):
        return False
    # An infinity must not make the tolerance infinite.
    largest = float(x.abs().nan_to_num(0.0, posinf=1.0).max())
    return torch.allclose(
        x, y, rtol=0.0, atol=AGREEMENT_TOLERANCE.get(x.dtype, 1e-2) * largest, equal_nan=True
    )


# The user's model cut into stages: evenly, or at named modules; the model is not changed.


UnitWeights = Mapping[str, float]
T = TypeVar("T")


def cut(
    model: nn.Module,
    loss: LossFunction,
    data: Any,
    *,
    stages: int | None = None,
    weights: UnitWeights | None = None,
    at: Sequence[str] | None = None,
    relay: bool = False,
) -> ModelStages:
    """Cut a model into stages.

    Args:
        model: Any module, on its device. Its parameters, buffers, modes and attributes stay as
            they are; it must have no hooks of its own (its submodules may).
        loss: `loss(model, data)`, which calls the model once; it is unwound there.
        data: Of one micro-batch, as the loss gets it.
        stages: How many, for a cut into parts of even weight.
        weights: Unit -> weight for the even cut, as `Stage.calls` and `list_units` name them
            (measured seconds, say); None: the number of parameters.
        at: In place of `stages`: names of the modules with which the second and all later stages
            begin, with the wildcards of a shell.
        relay: Stages give values to the next stage only, for schedules without skips.

    Raises:
        PlanError: The model's forward cannot be followed, has too few parts, or cannot be cut at
            these places; or the stages would not compute what the model does.
        RecipeError: The loss does not call the model exactly once.
    """
    if (stages is None) == (at is None):
        raise ValueError("give either stages or at")

    def choose(call: ModelCall) -> ModelStages:
        if at is not None:
            traced = trace_model(model, call, _down_to(at))
            return _finish(traced, lambda found: cut_at(found, at), relay)
        assert stages is not None
        traced = trace_units(model, call, stages)
        return _finish(traced, lambda found: _even(found, stages, weights), relay)

    return reshard_stages(check_loss(run_at_model_call(model, loss, data, choose), loss, data))


def check_cut(model: nn.Module, loss: LossFunction, data: Any, at: Sequence[str]) -> None:
    """Whether `cut` at named modules succeeds; tensors may be stand-ins without numbers. Arguments
    as those of `cut`.

    With stand-ins a value that a stage changes in place is not seen, nor what a loss does that
    needs numbers.

    Raises:
        PlanError: As `cut`.
        RecipeError: Likewise.
    """

    def choose(call: ModelCall) -> ModelStages:
        traced = trace_model(model, call, _down_to(at))
        return _finish(traced, lambda found: cut_at(found, at), relay=False)

    stages = run_at_model_call(model, loss, data, choose)
    try:
        check_loss(stages, loss, data)
    except HeadwayError:
        raise
    except Exception:
        # A loss may read numbers behind the model's call.
        if not any(is_fake(tensor) for tensor in model.parameters()):
            raise


def list_units(model: nn.Module, loss: LossFunction, data: Any, stages: int) -> tuple[str, ...]:
    """The names of the units between which a cut into so many stages chooses, in order."""

    def names(call: ModelCall) -> tuple[str, ...]:
        return tuple(unit.name for unit in cut_units(trace_units(model, call, stages)))

    return run_at_model_call(model, loss, data, names)


def run_at_model_call(
    model: nn.Module, loss: LossFunction, data: Any, do: Callable[[ModelCall], T]
) -> T:
    """Do something where a loss calls the model, in the contexts (autocast) that it has made."""
    check_root_not_wrapped(model)
    done: list[T] = []

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with without_caches(model):
            done.append(do(ModelCall.of(args, kwargs)))
        # The rest of the loss would need an output that nobody has computed.
        raise StageCompleted

    ModelProxy(model, run).compute(loss, data)
    return done[0]


def record_call(loss: LossFunction, model: nn.Module, data: Any) -> ModelCall:
    """What a loss calls the model with; nothing behind the call is run.

    Raises:
        RecipeError: The loss does not call the model, or uses it in another way.
    """
    return run_at_model_call(model, loss, data, lambda call: call)


def check_loss(
    stages: ModelStages, loss: LossFunction, data: Any, *, caller: str = LOSS
) -> ModelStages:
    """The stages, after a loss has been computed with them: every rank sees what one would.

    Raises:
        RecipeError: The loss uses the model otherwise than by one call, or differentiates by its
            inputs.
        RunError: It calls the model in another way than the stages are for.
    """

    def refuse(_: Tensor) -> None:
        raise RecipeError(
            f"{caller} asks for the gradient of the model's inputs",
            where=user_line(),
            why="In a pipeline the inputs are in the first stage and the loss behind the last one: "
            "no rank has the graph between them.",
            fix="Compute such derivatives without a pipeline (stages = 1), or in the model's own "
            "forward, inside of one module.",
        )

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves = stages.leaves_of(args, kwargs, caller)
        output = run_stages(stages, ModelCall.of(args, kwargs))
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(refuse)
        return output

    with preserve_model_state(stages.model):
        ModelProxy(stages.model, run, stages.foreign, caller=caller).compute(loss, data)
    return stages


def check_metrics_call(stages: ModelStages, metrics: LossFunction, data: Any) -> None:
    """Whether stages can serve metrics as the model would, in eval mode.

    Args:
        data: Of one micro-batch of the training data.

    Raises:
        RecipeError: They use the model otherwise than by one call.
        RunError: They call it in another way than the loss.
    """
    evaluating = stages.evaluating or stages
    try:
        with training_mode(stages.model, False), torch.no_grad():
            check_loss(evaluating, metrics, data, caller=METRICS)
    except HeadwayError:
        raise
    except Exception:  # validation data may be of another form than the training data
        return
    finally:
        reshard_stages(evaluating)


def trace_units(model: nn.Module, call: ModelCall, stages: int) -> Trace:
    """The model traced at the coarsest level whose units make stages of about even size.

    Raises:
        PlanError: No level has as many units as stages.
    """
    deepest = max(_level(model, name) for name, _ in model.named_modules())
    most = 0
    closed: dict[str, str] = {}
    best: tuple[float, Trace] | None = None
    # Coarse calls first: what happens inside of one need not be traceable.
    for level in range(1, deepest + 1):
        found = trace_model(model, call, _at_level(model, level))
        units = cut_units(found)
        most, closed = max(most, len(units)), {**closed, **found.closed}
        if len(units) < stages:
            continue
        imbalance = _imbalance(units, stages)
        if best is None or imbalance < best[0] * (1 - MIN_IMPROVEMENT):
            best = imbalance, found
        if imbalance <= MAX_IMBALANCE:
            break
    if best is not None:
        return best[1]
    raise PlanError(
        f"{type(model).__name__} cannot be cut into {stages} stages",
        problems=[
            f"it has {most} parts with parameters that are carried out one after the other",
            *(f"{name} is one part, because {why}" for name, why in closed.items()),
        ],
        fix=f"Use {max(most, 1)} stages or fewer.",
    )


def _imbalance(units: Sequence[ModelUnit], stages: int) -> float:
    """Parameters of the largest stage of an even cut over the mean of all stages."""
    starts = balanced_partition([unit.parameters for unit in units], stages)
    ends = [*starts[1:], len(units)]
    sizes = [sum(u.parameters for u in units[a:b]) for a, b in zip(starts, ends, strict=True)]
    return stages * max(sizes) / max(sum(sizes), 1)


def _finish(found: Trace, choose: Callable[[Trace], list[int]], relay: bool) -> ModelStages:
    """The stages of a trace, compared with the model, in both modes."""
    model, call = found.model, found.call
    starts = choose(found)
    stages = _stages(found, starts, relay)
    mode = model.training
    with training_mode(model, not mode):
        # The same modules stay closed, so that the two graphs can be compared.
        other = trace_model(model, call, lambda name, _: name not in found.opened)
        # The code around the calls does not look at the mode: one cut serves both.
        if str(other.graph) == str(found.graph):
            return stages
        # The numbers of nodes differ between the two graphs; the names of calls do not.
        names = node_labels(found)
        opposite = _stages(other, _cut_alike(other, [names[n] for n in starts[1:]], mode), relay)
    if mode:
        return replace(stages, evaluating=opposite)
    return replace(opposite, evaluating=stages)


def _cut_alike(other: Trace, at: Sequence[str], training: bool) -> list[int]:
    """The same places in the graph of the other mode.

    Args:
        training: The places were chosen in training mode.

    Raises:
        PlanError: That graph has none of them.
    """
    try:
        return cut_at(other, at)
    except PlanError as error:
        chosen, now = ("training", "evaluation") if training else ("evaluation", "training")
        raise PlanError(
            f"{type(other.model).__name__} can be cut at {', '.join(at)} in {chosen} mode, and not "
            f"in {now} mode",
            problems=[
                *error.problems,
                *(f"{name} is one part, because {why}" for name, why in other.closed.items()),
            ],
            fix="Let both modes go the same way between modules, or cut elsewhere "
            "(pipeline.cut, the recipe's cut).",
        ) from error


def _stages(found: Trace, starts: Sequence[int], relay: bool) -> ModelStages:
    with found.examples.opened():
        parts = split_graph(found, starts, relay=relay)
        # Examples of activations are large, and nobody asks for them again.
        found.examples.forget()
    stages = ModelStages(
        found.model, add_unused_parameters(found.model, parts), found.call.structure
    )
    return replace(check_stages_match_model(stages, found.call), checks=(found.check(),))


def add_unused_parameters(model: nn.Module, parts: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """The last stage gets the parameters that none uses: only a loss can."""
    used = {name for stage in parts for name in stage.parameters}
    rest = {name: p for name, p in model.named_parameters() if name not in used}
    last = replace(parts[-1], parameters={**parts[-1].parameters, **rest})
    return (*parts[:-1], last)


def _even(found: Trace, stages: int, weights: UnitWeights | None) -> list[int]:
    units = cut_units(found)
    of_unit = [u.parameters if weights is None else weights.get(u.name, 0.0) for u in units]
    return cut_evenly(units, of_unit, stages)


# -- which modules are one call --------------------------------------------------------------------


def _at_level(model: nn.Module, level: int) -> IsLeaf:
    """Modules of this level, where chains and lists do not count as one."""

    def is_leaf(name: str, module: nn.Module) -> bool:
        opens = _is_chain(module) or (_level(model, name) < level and any(module.children()))
        # A module that is walked into would run without its hooks.
        return has_hooks(module) or not opens

    return is_leaf


def _down_to(patterns: Sequence[str]) -> IsLeaf:
    """As coarse as possible, so that there are calls that match the patterns."""
    paths = [pattern.partition("#")[0].split(".") for pattern in patterns]

    def holds(name: str) -> bool:
        parts = name.split(".")
        return any(len(path) > len(parts) and all(map(fnmatchcase, parts, path)) for path in paths)

    def is_leaf(name: str, module: nn.Module) -> bool:
        return has_hooks(module) or not (_is_chain(module) or holds(name))

    return is_leaf


def _level(model: nn.Module, name: str) -> int:
    parts = name.split(".")
    above = (model.get_submodule(".".join(parts[: n + 1])) for n in range(len(parts)))
    return sum(not _is_chain(module) for module in above)


def _is_chain(module: nn.Module) -> bool:
    if isinstance(module, nn.Sequential):
        # A Sequential with a forward of its own need not call its children one after the other.
        return type(module).forward is nn.Sequential.forward
    return isinstance(module, nn.ModuleList | nn.ModuleDict)


# Stages that the user has written down: a chain of the model's modules, one list for each
# stage.


ModuleChain = Sequence[Sequence[str | nn.Module]]


def cut_module_chain(
    model: nn.Module, loss: LossFunction, data: Any, chain: ModuleChain
) -> ModelStages:
    """Make stages of modules that are called one after the other.

    Args:
        chain: For each stage its modules: names in the model, modules of it, or others whose
            parameters and buffers are all the model's (a function as a module, a new Sequential).

    Raises:
        PlanError: A module is not the model's, or the chain does not compute what the model does.
        RecipeError: The loss does not call the model exactly once.
    """

    def choose(call: ModelCall) -> ModelStages:
        examples = ExampleValues(model)
        with examples.opened():
            trace, starts = _chain(model, call, chain, examples)
        stages = _stages(trace, starts, relay=False)
        # What is seen in the other mode is not kept: flags are those of the mode that is run.
        with training_mode(model, not model.training):
            check_stages_match_model(stages, call)
        return stages

    return reshard_stages(check_loss(run_at_model_call(model, loss, data, choose), loss, data))


def _chain(
    model: nn.Module, call: ModelCall, chain: ModuleChain, examples: ExampleValues
) -> tuple[Trace, list[int]]:
    """The graph of the calls, and the node at which each stage begins."""
    graph = fx.Graph()
    leaves = [graph.placeholder(f"input_{number}") for number in range(len(call.leaves))]
    for node, leaf in zip(leaves, call.leaves, strict=True):
        examples.know(node, leaf)
    args, kwargs = call.arguments(tuple(leaves))
    starts: list[int] = []
    for modules in chain:
        # The first stage begins with the placeholders.
        starts.append(len(graph.nodes) if starts else 0)
        for module in modules:
            node = graph.call_module(_name(model, module, examples), tuple(args), kwargs)
            args, kwargs = _results(graph, node, examples), {}
    graph.output(node if len(args) == 1 else tuple(args))
    trace = Trace(model, graph, call, examples.constants, examples, (), {}, {})
    return trace, starts


def _results(graph: fx.Graph, node: fx.Node, examples: ExampleValues) -> list[fx.Node]:
    value = examples.value(node)
    if type(value) not in (tuple, list):
        return [node]
    return [graph.call_function(_item, (node, number)) for number in range(len(value))]


def _item(values: Sequence[Any], number: int) -> Any:
    return values[number]


def _name(model: nn.Module, module: str | nn.Module, examples: ExampleValues) -> str:
    """Of a module in the graph.

    Raises:
        PlanError: It has tensors that the model does not have, or there is none of this name.
    """
    if isinstance(module, str):
        if module not in dict(model.named_modules()):
            raise _foreign_tensor(f"there is no module {module}")
        return module
    known: list[str] = [name for name, own in model.named_modules() if own is module]
    if known:
        return known[0]
    held = {id(t) for t in (*model.parameters(), *model.buffers())}
    if any(id(t) not in held for t in (*module.parameters(), *module.buffers())):
        raise _foreign_tensor(
            f"{type(module).__name__} has parameters that the model does not have"
        )
    name = f"by_hand_{len(examples.constants)}"
    examples.constants[name] = module
    return name


def _foreign_tensor(problem: str) -> PlanError:
    return PlanError(
        "the stages given by hand are not the model's",
        problems=[problem],
        fix="Give names of its modules, or the modules themselves, in the order of their calls.",
    )
