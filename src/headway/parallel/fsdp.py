"""FSDP2: sharding a model's state, and stages whose blocks the user passed to `fully_shard`.

`ShardedState` makes every parameter a DTensor of which a rank keeps some rows. FSDP2 gathers a
group of modules before their forward and backward, and reduces gradients to where they are
kept. The ZeRO stages differ in how long a group stays gathered and in how often gradients are
reduced. Sources: Rajbhandari et al. 2020 (ZeRO), section 5; Zhao et al. 2023 (FSDP).

Inside a pipeline FSDP2's own backward hooks cannot be used: in a backward that is split in two
they run with the gradients of the inputs, before those of the weights exist. A wrapped block
therefore stays gathered from its first forward to SYNC and accumulates unreduced gradients
(public FSDP2 switches); SYNC reduces them with one reduce-scatter per stage and step. Between
steps all parameters are sharded again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from headway.errors import PlanError
from headway.parallel.stages import ModelStages, Stage, user_line
from headway.schedule.pipeline_schedule import ActionKind, PipelineSchedule

MIN_SHARE_OF_MODEL = 0.01
"""A module with at least this share of the parameters is gathered by itself,"""
MIN_SHARE_OF_LARGEST = 0.1
"""or with this share of the largest one, as in a model of a thousand equal layers."""


class ShardedState:
    """A model and its optimiser, sharded in place; collective.

    Args:
        optimizer: Over its parameters; its groups then hold the sharded ones. None: it follows
            otherwise.
        mesh: Of one dimension, or of two: copies x parts.
        zero: 1 to 3, see `plan.MemoryPolicy`.
        counted: How often each gradient counts in their sum: ranks that share a sample.
        left: Parameters that stay as they are, and whose gradients nobody sums here.

    Attributes:
        whole: Parameters that are not sharded, by name: those of no dimension.

    Raises:
        PlanError: The model cannot be sharded.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        mesh: DeviceMesh,
        zero: Literal[1, 2, 3],
        *,
        counted: int = 1,
        left: Collection[nn.Parameter] = (),
    ) -> None:
        self.model = model
        self.mesh = mesh
        self.zero = zero
        check_real_numbers(model)
        # The optimiser's groups and state are keyed by these objects, which `fully_shard` replaces.
        names = {parameter: name for name, parameter in model.named_parameters()}
        # FSDP2 splits along dimension 0 and refuses a parameter that has none.
        apart = set(left)
        self.whole = {name: p for p, name in names.items() if p.dim() == 0 and p not in apart}
        options: dict[str, Any] = {"mesh": mesh, "ignored_params": {*self.whole.values(), *apart}}
        # Inner modules first: `fully_shard` leaves alone what a call further inside has taken.
        for module in fsdp_units(model, apart):
            fully_shard(module, **options, reshard_after_forward=zero == 3)
        try:
            # What the root holds is needed again at once, when backward begins.
            fully_shard(model, **options, reshard_after_forward=False)
        except (ValueError, NotImplementedError) as error:
            raise PlanError(
                f"the state of {type(model).__name__} cannot be kept in parts",
                problems=[str(error)],
                fix="Leave memory.zero (the recipe's zero) at 0.",
            ) from error
        self._parts = [cast(FSDPModule, m) for m in model.modules() if isinstance(m, FSDPModule)]
        self._calling = False
        for part in self._parts:
            # Gradients are of shares of the global mean: they are summed, not averaged.
            part.set_gradient_divide_factor(float(counted))
            part.set_force_sum_reduction_for_comms(True)
            if zero == 3:
                cast(nn.Module, part).register_forward_hook(self._watch_output)
        if optimizer is not None:
            rebind_optimizer_parameters(optimizer, names, dict(model.named_parameters()))

    def begin(self) -> None:
        """A step begins: parameters stay gathered and gradients whole as long as `zero` allows."""
        for part in self._parts:
            # Only in the last backward does FSDP2 wait for its pending reductions.
            part.set_is_last_backward(False)
            # `_parts` names every FSDP2 module, inner ones too: recursion would only repeat the
            # calls.
            part.set_requires_gradient_sync(self.zero > 1, recurse=False)
            part.set_reshard_after_backward(self.zero == 3, recurse=False)

    def arm(self) -> None:
        """The next backward pass is the last one of the step."""
        for part in self._parts:
            part.set_is_last_backward(True)
            part.set_requires_gradient_sync(True, recurse=False)
            part.set_reshard_after_backward(True, recurse=False)

    def sum_whole(self, factor: float) -> None:
        """Sum the gradients of what is not sharded; collective."""
        parameters = [p for p in self.whole.values() if p.requires_grad]
        if not parameters:
            return
        # Every rank sends as many numbers: zero for a parameter that it did not use, and whether
        # it did. float64 for all: parameters of different types go in one message.
        sums = [0.0 if p.grad is None else p.grad.item() for p in parameters]
        users = [0.0 if p.grad is None else 1.0 for p in parameters]
        shared = torch.tensor([sums, users], dtype=torch.float64, device=self.mesh.device_type)
        # Over one dimension of the mesh after the other, hence over all of its ranks.
        for group in self.mesh.get_all_groups():
            torch.distributed.all_reduce(shared, group=group)
        for parameter, total, used in zip(parameters, *shared.tolist(), strict=True):
            if used:  # by any rank: all make the same update, and none where none did
                parameter.grad = torch.full_like(parameter, total * factor)

    @contextmanager
    def called(self) -> Iterator[None]:
        """Around what calls the model: explains what torch says of modules that are used otherwise.

        Raises:
            PlanError: A parameter is used where it is not gathered, or the graph of a gradient is
                wanted whose parameters are not kept (ZeRO 3).
        """
        self._calling = True
        try:
            yield
        except RuntimeError as error:
            # torch raises a bare RuntimeError here, which only its text tells from others.
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise PlanError(
                "a sharded parameter is used outside of the module that gathers it",
                problems=[str(error).splitlines()[0]],
                fix="Let the loss call model(...) itself, and modules their children as modules; "
                "or leave memory.zero (the recipe's zero) at 0.",
            ) from error
        finally:
            self._calling = False

    def _watch_output(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._calling:
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(self._refuse_graph_of_gradient)

    def _refuse_graph_of_gradient(self, gradient: Tensor) -> None:
        # In a backward pass gradients are enabled where it makes a graph (create_graph).
        if self._calling and torch.is_grad_enabled():
            raise PlanError(
                "a gradient that shall be differentiated again needs parameters that are not kept",
                where=user_line(),
                problems=[
                    "with memory.zero 3 parameters are freed behind each backward pass, also "
                    "behind torch.autograd.grad(..., create_graph=True), whose graph needs them"
                ],
                fix="Set memory.zero (the recipe's zero) to 2: parameters stay gathered for the "
                "step.",
            )


def check_real_numbers(model: nn.Module) -> None:
    """Refuse complex parameters.

    Raises:
        PlanError: The model has some.
    """
    problems = [
        f"{name} is of {parameter.dtype}, and FSDP2 keeps parts of real numbers only"
        for name, parameter in model.named_parameters()
        if parameter.is_complex()
    ]
    if problems:
        raise PlanError(
            f"the state of {type(model).__name__} cannot be kept in parts",
            problems=problems,
            fix="Leave memory.zero (the recipe's zero) at 0; or hold the parameters as real ones "
            "with a last dimension of 2, and use torch.view_as_complex.",
        )


def fsdp_units(model: nn.Module, left: Collection[nn.Parameter] = ()) -> list[nn.Module]:
    """The modules that are gathered by themselves: elements of lists and sequences, the outermost
    that have `MIN_SHARE_OF_MODEL` of the parameters, or `MIN_SHARE_OF_LARGEST`, and share none with
    the rest of the model.

    Args:
        left: Parameters that are not gathered.
    """
    sizes = {p: p.numel() for p in model.parameters() if p not in left}
    users: dict[Tensor, int] = {}
    for module in model.modules():
        for parameter in dict.fromkeys(module.parameters(recurse=False)):
            users[parameter] = users.get(parameter, 0) + 1

    def found(module: nn.Module) -> Iterator[tuple[nn.Module, int]]:
        for child in module.children():
            # What holds modules and is never called itself has no moment at which to gather them.
            holder = isinstance(child, nn.ModuleList | nn.ModuleDict)
            container = holder or isinstance(child, nn.Sequential)
            block = isinstance(module, nn.ModuleList) and not holder
            if not block and (container or not isinstance(module, nn.Sequential)):
                yield from found(child)
                continue
            own = [p for p in child.parameters() if p in sizes]
            # A parameter that a module outside holds as well would be used there while it is
            # sharded.
            alone = all(_uses(child, p) == users[p] for p in own)
            if alone and own:
                yield child, sum(sizes[p] for p in own)

    each = dict(found(model))
    least = min(
        MIN_SHARE_OF_MODEL * sum(sizes.values()),
        MIN_SHARE_OF_LARGEST * max(each.values(), default=0),
    )
    return [module for module, size in each.items() if size >= least]


def _uses(module: nn.Module, parameter: Tensor) -> int:
    """Modules inside that hold a parameter."""
    return sum(
        any(p is parameter for p in part.parameters(recurse=False)) for part in module.modules()
    )


def rebind_optimizer_parameters(
    optimizer: Optimizer,
    names: Mapping[nn.Parameter, str],
    now: Mapping[str, nn.Parameter],
    held: Callable[[str, Tensor], Tensor] | None = None,
) -> None:
    """Let an optimiser hold the new parameters in place of the old, with what it has of them.

    Args:
        optimizer: Its groups and state are changed.
        names: Old parameter -> logical name.
        now: Logical name -> new parameter.
        held: (name, something of a parameter's shape) -> this rank's part; None: by `shard_like`.
    """
    for group in optimizer.param_groups:
        old = group["params"]
        group["params"] = [now[names[parameter]] for parameter in old]
        for parameter, new in zip(old, group["params"], strict=True):
            # Left under the old parameter, the state would never be found again.
            state = optimizer.state.pop(parameter, None)
            if state:
                own = partial(held, names[parameter]) if held else partial(shard_like, new)
                optimizer.state[new] = {
                    key: own(value) if _has_shape_of(value, new) else value
                    for key, value in state.items()
                }


def _has_shape_of(value: Any, parameter: Tensor) -> bool:
    # A state of no dimension is the same on all ranks: Adam's number of steps.
    return isinstance(value, Tensor) and value.shape == parameter.shape and value.dim() > 0


def shard_like(parameter: Tensor, value: Tensor) -> Tensor:
    """This rank's part of something that it has whole, where it has a part of a parameter."""
    if not isinstance(parameter, DTensor):
        return value
    mesh = parameter.device_mesh
    everywhere = [Replicate()] * mesh.ndim
    # The value is the same on all ranks already; `run_check` would broadcast it once more.
    found = DTensor.from_local(value, mesh, everywhere, run_check=False)
    return found.redistribute(placements=parameter.placements)


def part_as_dtensor(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size
) -> DTensor:
    """This rank's memory as a part of the whole; nothing is copied."""
    # Parts may be uneven; torch would take all of them to be as large as this one.
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def full_tensor_of(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank; collective where it is kept in parts."""
    if not isinstance(tensor, DTensor):
        return tensor
    placements = list(tensor.placements)
    for dim in reversed(range(len(placements))):  # torch warns of several dims at once
        placements[dim] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


def squared_gradient_norm(gradients: dict[str, Tensor]) -> Tensor:
    """The square of the norm of all gradients, float64, to which every element counts once.

    Collective: all ranks have the same names.
    """
    total = torch.zeros((), dtype=torch.float64)
    spread: dict[tuple[DeviceMesh, tuple[int, ...]], Tensor] = {}
    for gradient in gradients.values():
        part = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        # Squared in float64: in float16 the square of a norm above 255 is infinite.
        square = torch.linalg.vector_norm(part).double().square()
        if not isinstance(gradient, DTensor):
            total += square.cpu()
            continue
        # Not over dims of copies: each would count again.
        dims = tuple(n for n, p in enumerate(gradient.placements) if isinstance(p, Shard))
        # Added up per mesh, so that there is one small all-reduce for each and not one per
        # gradient.
        key = (gradient.device_mesh, dims)
        spread[key] = spread.get(key, torch.zeros((), dtype=torch.float64)) + square.cpu()
    for (mesh, dims), square in spread.items():
        shared = square.to(mesh.device_type)
        for dim in dims:
            torch.distributed.all_reduce(shared, group=mesh.get_group(dim))
        total += shared.cpu()
    return total


# Stages whose blocks were wrapped by FSDP2 (`fully_shard`) before the cut.


_OWN_WRAPPER = (
    "Wrap the model's blocks by fully_shard, each by itself and those at the beginning and end as "
    "well, and not the model."
)


def check_root_not_wrapped(model: nn.Module) -> None:
    """Refuse a model that is wrapped as a whole.

    Raises:
        PlanError: It is.
    """
    if isinstance(model, FSDPModule):
        raise PlanError(
            f"{type(model).__name__} cannot be cut into stages",
            problems=["fully_shard gathers its parameters around its forward, which no stage runs"],
            fix=_OWN_WRAPPER,
        )


def reshard_stages(stages: ModelStages) -> ModelStages:
    """The stages with all blocks sharded again, after their forwards have been run for the cut.

    Raises:
        PlanError: A stage uses a wrapped module's parameter otherwise than by calling the module.
    """
    reshard_fsdp_modules(stages.model)
    inside = {name for name, _ in fsdp_parameters_in(stages.model)}
    problems = [
        f"stage {stage.number} uses {name} outside of the module that fully_shard wrapped"
        for stage in stages
        for name in dict.fromkeys(n.target for n in stage.module.graph.nodes if n.op == "get_attr")
        if name in inside
    ]
    problems += [
        f"{name} is in the stages {', '.join(map(str, where))} and wrapped by fully_shard"
        for name, where in stages.shared.items()
        if name in inside
    ]
    if problems:
        raise PlanError("the model cannot be cut there", problems=problems, fix=_OWN_WRAPPER)
    # Resharding has put the sharded parameters back into the modules, in place of gathered ones.
    now = dict(stages.model.named_parameters())
    renewed = tuple(
        replace(stage, parameters={name: now[name] for name in stage.parameters})
        for stage in stages
    )
    evaluating = stages.evaluating and reshard_stages(stages.evaluating)
    return replace(stages, stages=renewed, evaluating=evaluating)


def fsdp_modules_in(module: nn.Module) -> list[FSDPModule]:
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def fsdp_parameters_in(module: nn.Module) -> Iterator[tuple[str, ShardedParameterSite]]:
    """The parameters that FSDP2 shards, by name; they are sharded now."""
    # Each is a module as well: its class was made of the user's and FSDPModule.
    tops = (cast(nn.Module, top) for top in fsdp_modules_in(module))
    inside = {id(part) for top in tops for part in top.modules()}
    for prefix, owner in module.named_modules():
        if id(owner) in inside:
            for key, parameter in owner.named_parameters(recurse=False):
                if isinstance(parameter, DTensor):
                    yield f"{prefix}.{key}".lstrip("."), ShardedParameterSite(owner, key, parameter)


def reshard_fsdp_modules(module: nn.Module) -> None:
    """Free what has been gathered."""
    for part in fsdp_modules_in(module):
        part.reshard()


def explain_fsdp_conflicts(schedule: PipelineSchedule, stages: ModelStages, rank: int) -> list[str]:
    """Why a table for these stages cannot be carried out, where parts of them are wrapped."""
    # `Pipeline` reports a table for another number of stages by itself.
    if stages.unlike(schedule):
        return []
    split = [stage for stage in schedule.stages_on(rank) if fsdp_modules_in(stages[stage].module)]
    summed = {action.stage for action in schedule.order[rank] if action.kind == ActionKind.SYNC}
    problems = [
        f"stage {stage} is wrapped by fully_shard, and the table has no SYNC of it: lower(..., "
        "sync='eager')"
        for stage in split
        if stage not in summed
    ]
    if split and not schedule.flush:
        problems.append("it has no flush, and fully_shard keeps one version of the weights")
    kinds = {
        kinds for stage in split for kinds in _unreachable_gradient_dtypes(stages[stage].module)
    }
    problems += [
        f"gradients of fully_shard in {kept} that it reduces in {summed} are out of reach: give "
        "MixedPrecisionPolicy no reduce_dtype, and they are summed in the type of the parameters"
        for kept, summed in sorted(kinds, key=str)
    ]
    return problems


def _unreachable_gradient_dtypes(module: nn.Module) -> Iterator[tuple[torch.dtype, torch.dtype]]:
    """Types of gradients that FSDP2 casts, and then keeps, as soon as a backward has ended.

    Its policy is private: `tests/single/test_torch_private.py` says when it is elsewhere.
    """
    for part in fsdp_modules_in(module):
        policy: Any = part._get_fsdp_state()._mp_policy
        for _, place in fsdp_parameters_in(cast(nn.Module, part)):
            kind = policy.param_dtype or place.sharded.dtype
            if policy.reduce_dtype not in (None, kind):
                yield kind, policy.reduce_dtype


def defer_gradient_sync(stages: Iterable[Stage]) -> tuple[str, ...]:
    """Let blocks stay gathered, and their gradients unsummed, until SYNC.

    Returns:
        A remark for each stage that has such blocks.
    """
    remarks = []
    for stage in stages:
        for part in fsdp_modules_in(stage.module):
            part.set_reshard_after_forward(False)
            part.set_reshard_after_backward(False)
            part.set_requires_gradient_sync(False)
        if fsdp_modules_in(stage.module):
            remarks.append(
                f"stage {stage.number}: what fully_shard wraps stays gathered until the stage's "
                "gradients are summed; reshard_after_forward is off"
            )
    return tuple(remarks)


@dataclass(frozen=True, slots=True, eq=False)
class ShardedParameterSite:
    """Where FSDP2 puts a parameter, gathered or sharded."""

    owner: nn.Module
    key: str
    sharded: DTensor

    @property
    def now(self) -> Tensor:
        """The parameter as it is: gathered, or sharded."""
        # Not by getattr: modules of split layers answer with something else.
        held = self.owner.named_parameters(recurse=False, remove_duplicate=False)
        return dict(held)[self.key]

    @property
    def shard(self) -> tuple[int, ...]:
        """Which part this rank holds: its coordinates in the mesh where that splits."""
        mesh, placements = self.sharded.device_mesh, self.sharded.placements
        place = mesh.get_coordinate() or ()
        return tuple(c for c, p in zip(place, placements, strict=True) if not p.is_replicate())


def local_part_like(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a tensor, split as another one is (by tensor parallelism)."""
    if not isinstance(tensor, DTensor):
        return tensor
    if isinstance(like, DTensor) and not same_placements(tensor, like):
        tensor = tensor.redistribute(placements=like.placements)
    return tensor.to_local()


def same_placements(tensor: Tensor, other: Tensor) -> bool:
    """Whether ranks hold the same parts of both."""
    if isinstance(tensor, DTensor) and isinstance(other, DTensor):
        return tensor.placements == other.placements
    return not isinstance(tensor, DTensor) and not isinstance(other, DTensor)
