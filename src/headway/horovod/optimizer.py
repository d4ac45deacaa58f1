"""`DistributedOptimizer`: any optimizer of torch's, with gradients of all ranks.

Each gradient begins to travel as soon as it is complete, while backward goes on; `step` waits for
all of them. The wrapped optimizer is of the original's class and shares its options, its state and
its parameters: schedulers, state dictionaries and hooks work on it as on the original.

With `op=Adasum` the updates travel, not the gradients: each rank's own step from the common
parameters is combined with those of the others (docs/adasum.md).
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from headway.comm.algorithms.method import split_evenly
from headway.horovod import operations
from headway.horovod.basics import SESSION, global_process_set
from headway.horovod.compression import Compression, Compressor
from headway.horovod.engine.process_set import ProcessSet
from headway.horovod.operations import Adasum, Average, synchronize


@dataclass(frozen=True, kw_only=True)
class ReductionOptions:
    """How gradients are combined; see `DistributedOptimizer`."""

    compression: type[Compressor]
    passes: int
    op: int
    predivide: float
    sparse_as_dense: bool
    process_set: ProcessSet


@dataclass
class _Reduction:
    """Gradients under way: of one parameter, or of a group.

    Attributes:
        handle: Of the operation.
        sent: What travels, for each parameter; none: it is a sparse one.
        contexts: For each parameter what `decompress` needs.
    """

    parameters: list[Tensor]
    handle: Any
    sent: list[Tensor] = field(default_factory=list)
    contexts: list[Any] = field(default_factory=list)


class GradientReducer:
    """The gradients of one optimizer on their way.

    Args:
        names: Of the parameters.
        groups: Parameters whose gradients travel as one operation, when all are complete.
    """

    def __init__(
        self,
        names: dict[Tensor, str],
        groups: Sequence[Sequence[Tensor]],
        options: ReductionOptions,
    ) -> None:
        self.options = options
        self.synchronized = False
        self.synchronizes = True
        self._names = names
        self._groups = {member: list(group) for group in groups for member in group}
        self._hooked: set[Tensor] = set()
        self._passes: Counter[Tensor] = Counter()
        self._flying: set[Tensor] = set()
        self._reductions: list[_Reduction] = []
        self._sparse_dims: dict[Tensor, int] = {}

    @property
    def busy(self) -> bool:
        """Whether gradients are under way."""
        return bool(self._reductions)

    @property
    def alone(self) -> bool:
        """Whether there is nobody to exchange with."""
        process_set = self.options.process_set
        return not process_set.included() or len(process_set.members()) == 1

    def hook(self) -> None:
        """Watch all parameters that need gradients, also those that have begun to."""
        # Parameters outlive an optimizer that another one replaces.
        accumulated = weakref.WeakMethod(self._accumulated)

        def hear(parameter: Tensor) -> None:
            if (method := accumulated()) is not None:
                method(parameter)

        for parameter in self._names:
            if parameter.requires_grad and parameter not in self._hooked:
                handle = parameter.register_post_accumulate_grad_hook(hear)
                weakref.finalize(self, handle.remove)
                self._hooked.add(parameter)

    def synchronize(self) -> None:
        """Wait for all gradients; parameters that were not used here have a gradient of zero."""
        self.hook()
        for parameter in self._names:
            if parameter.requires_grad and parameter not in self._flying:
                self._send(self._group_of(parameter))
        SESSION.engine.hurry()
        try:
            for reduction in self._reductions:
                self._finish(reduction)
        finally:
            self.forget()
        self.synchronized = True

    def forget(self) -> None:
        """Begin the next step."""
        self._reductions.clear()
        self._flying.clear()
        self._passes.clear()

    def _accumulated(self, parameter: Tensor) -> None:
        """A backward pass has added to a gradient."""
        if self.alone:
            return
        passes = self.options.passes
        if parameter in self._flying or self._passes[parameter] >= passes:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to "
                "step(). Increase backward_passes_per_step to accumulate gradients locally."
            )
        self._passes[parameter] += 1
        group = self._group_of(parameter)
        if all(self._passes[member] == passes for member in group):
            self._send(group)

    def _group_of(self, parameter: Tensor) -> list[Tensor]:
        group = self._groups.get(parameter)
        if group is None:
            return [parameter]
        return [member for member in group if member.requires_grad]

    def _send(self, parameters: list[Tensor]) -> None:
        """Begin the reduction of complete gradients."""
        options = self.options
        dense: list[Tensor] = []
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = self._no_gradient(parameter)
            if parameter.grad.is_sparse:
                self._sparse_dims[parameter] = parameter.grad.sparse_dim()
            if parameter.grad.is_sparse and not options.sparse_as_dense:
                sparse = operations.sparse_allreduce_async(
                    parameter.grad, self._names[parameter], options.op, options.process_set
                )
                self._reductions.append(_Reduction([parameter], sparse))
            else:
                dense.append(parameter)
        self._flying.update(parameters)
        if not dense:
            return
        packed = [options.compression.compress(_dense(parameter)) for parameter in dense]
        sent = [tensor for tensor, _ in packed]
        # The sum of predivided gradients: g / f first, and f / n times the sum.
        predivide = options.predivide if options.op == Average else 1.0
        handle = operations.grouped_allreduce_async_(
            sent, None, self._names[dense[0]], options.op, 1.0 / predivide, predivide,
            options.process_set,
        )  # fmt: skip
        contexts = [context for _, context in packed]
        self._reductions.append(_Reduction(dense, handle, sent, contexts))

    def _no_gradient(self, parameter: Tensor) -> Tensor:
        """Zero, of the form in which this parameter's gradients have come so far."""
        dims = self._sparse_dims.get(parameter)
        if dims is None:
            return torch.zeros_like(parameter)
        return torch.sparse_coo_tensor(
            torch.zeros((dims, 0), dtype=torch.int64, device=parameter.device),
            parameter.new_zeros((0, *parameter.shape[dims:])),
            parameter.shape,
            check_invariants=False,
        )

    def _finish(self, reduction: _Reduction) -> None:
        result = synchronize(reduction.handle)
        if not reduction.sent:
            reduction.parameters[0].grad = result
        for parameter, sent, context in zip(
            reduction.parameters, reduction.sent, reduction.contexts, strict=False
        ):
            given = parameter.grad
            if sent is given:
                continue
            found = self.options.compression.decompress(sent, context)
            # An optimizer for sparse gradients gets one, with the rows of all ranks.
            parameter.grad = found.to_sparse(1) if given is not None and given.is_sparse else found


def _dense(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad


class NamedStep(torch.optim.Optimizer):
    """An optimizer that knows its parameters by their names."""

    _parameter_names: dict[Tensor, str]
    _given_names: dict[Tensor, str]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Parameters that come later are exchanged as well; all ranks add them alike.

        They have the names that `named_parameters` gave them, else their place as a name.
        """
        super().add_param_group(param_group)
        for place, parameter in enumerate(_parameters(self)):
            if parameter not in self._parameter_names:
                made_up = f"gradient.noname.{place}"
                self._parameter_names[parameter] = self._given_names.get(parameter, made_up)


class DistributedStep(NamedStep):
    """What an optimizer's class gets added; the gradients of a step are those of all ranks."""

    horovod_reducer: GradientReducer

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if not self.horovod_reducer.alone:
            self.horovod_reducer.hook()

    def synchronize(self) -> None:
        """Wait for the gradients, to clip them for instance.

        Then step inside of `skip_synchronize()`.
        """
        if not self.horovod_reducer.alone:
            self.horovod_reducer.synchronize()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Begin anew from a state: gradients of a step that was given up are forgotten."""
        self.horovod_reducer.forget()
        super().load_state_dict(state_dict)

    @property
    def backward_passes_per_step(self) -> int:
        """So many backward passes add to a gradient before it travels."""
        return self.horovod_reducer.options.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Add up the gradients of so many backward passes from now on."""
        reducer = self.horovod_reducer
        reducer.options = replace(reducer.options, passes=passes)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, `step` takes the gradients as they are."""
        self.horovod_reducer.synchronizes = False
        try:
            yield
        finally:
            self.horovod_reducer.synchronizes = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait for the gradients and make the step.

        Args:
            closure: Computes the loss and its gradients, which then are those of all ranks.
        """
        reducer = self.horovod_reducer
        synchronizes, synchronized = reducer.synchronizes, reducer.synchronized
        reducer.synchronized = False
        if closure is not None and synchronizes:
            given = closure

            def closure() -> Any:
                loss = given()
                self.synchronize()
                return loss

        elif synchronizes:
            if synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). This can cause training slowdown. You may want to "
                    "consider using optimizer.skip_synchronize() context if you use "
                    "optimizer.synchronize() in your code.",
                    stacklevel=2,
                )
            self.synchronize()
        found = super().step(closure)
        reducer.synchronized = False
        return found

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients.

        Raises:
            AssertionError: They are under way.
        """
        if self.horovod_reducer.busy:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before "
                "optimizer.step() or optimizer.synchronize(). This is prohibited as it can cause "
                "a race condition."
            )
        super().zero_grad(set_to_none)


class AdasumStep(NamedStep):
    """What an optimizer's class gets added with Adasum: updates of all ranks are combined."""

    horovod_options: ReductionOptions

    def synchronize(self) -> None:
        """Nothing: gradients stay those of this rank."""

    def skip_synchronize(self) -> NoReturn:
        """Raises: a step is never without an exchange."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum.")

    @property
    def backward_passes_per_step(self) -> int:
        """How many the program has announced."""
        return self.horovod_options.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Nothing to prepare: gradients add up here until the step, however many there are."""
        self.horovod_options = replace(self.horovod_options, passes=passes)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """This rank's step, combined with those of the others.

        Args:
            closure: Computes the loss and its gradients.
        """
        options, names = self.horovod_options, self._parameter_names
        if not options.process_set.included():
            return super().step(closure)
        before = {parameter: parameter.detach().clone() for parameter in names}
        found = super().step(closure)
        with torch.no_grad():
            flying = []
            for parameter, name in names.items():
                sent, context = options.compression.compress(parameter - before[parameter])
                handle = operations.allreduce_async_(
                    sent, None, name, Adasum, process_set=options.process_set
                )
                flying.append((parameter, handle, context))
            for parameter, handle, context in flying:
                update = options.compression.decompress(synchronize(handle), context)
                parameter.copy_(before[parameter].add_(update))
        return found


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The optimizer, with gradients of all ranks; use it instead of the given one.

    Args:
        named_parameters: `model.named_parameters()`: gradients are matched by these names; None:
            by the order of the optimizer's parameters.
        compression: Of gradients on their way.
        backward_passes_per_step: So many backward passes add to a gradient before it travels. The
            sum is not divided by them.
        op: Average, Sum or Adasum.
        gradient_predivide_factor: f: gradients are divided by f, summed, and multiplied by f / n.
        num_groups: Deprecated: a number as `groups`.
        groups: Gradients travel together: in so many groups of parameters that follow each other,
            or in these lists of parameters, and all others alone.
        sparse_as_dense: Sparse gradients travel as dense ones, and are sparse again afterwards.
        process_set: The ranks that exchange; others make steps of their own.

    Raises:
        ValueError: An argument is illegal, or parameters are not or twice named.
    """
    named = None if named_parameters is None else list(named_parameters)
    names = _names(optimizer, named)
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    if num_groups:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups`",
            DeprecationWarning,
            stacklevel=2,
        )
        groups = num_groups if groups is None else groups
    options = ReductionOptions(
        compression=compression,
        passes=backward_passes_per_step,
        op=op,
        predivide=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    adasum = op == Adasum and len(process_set.members()) > 1
    kind = type(optimizer)
    made: Any = type(kind.__name__, (AdasumStep if adasum else DistributedStep, kind), {})
    wrapped = made.__new__(made)
    # A scheduler may have wrapped the step of the given one.
    wrapped.__dict__.update((key, value) for key, value in vars(optimizer).items() if key != "step")
    wrapped._parameter_names = names  # by Horovod's name: programs read it
    wrapped._given_names = {parameter: name for name, parameter in named or ()}
    if adasum:
        wrapped.horovod_options = options
        return wrapped
    wrapped.horovod_reducer = GradientReducer(names, _groups(groups, names), options)
    if not wrapped.horovod_reducer.alone:
        wrapped.horovod_reducer.hook()
    return wrapped


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _names(
    optimizer: torch.optim.Optimizer, named: list[tuple[str, Tensor]] | None
) -> dict[Tensor, str]:
    """The names of an optimizer's parameters."""
    own = _parameters(optimizer)
    if named is None:
        return {parameter: f"gradient.noname.{place}" for place, parameter in enumerate(own)}
    if any(not isinstance(pair, tuple) for pair in named):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced "
            "by model.named_parameters()."
        )
    twice = [name for name, number in Counter(name for name, _ in named).items() if number > 1]
    if twice:
        raise ValueError(
            "Parameter names in named_parameters must be unique. Found duplicates: "
            + ", ".join(twice)
        )
    names = {parameter: name for name, parameter in named}
    missing = [place for place, parameter in enumerate(own) if parameter not in names]
    if missing:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named: "
            f"of the optimizer's parameters those at {', '.join(map(str, missing))}"
        )
    return {parameter: names[parameter] for parameter in own}


def _groups(
    groups: int | Sequence[Sequence[Tensor]] | None, names: dict[Tensor, str]
) -> Sequence[Sequence[Tensor]]:
    if groups is None:
        return []
    if isinstance(groups, int):
        if groups < 1:
            raise ValueError(
                f"groups is a number of groups from 1 on, or a list of lists: {groups}"
            )
        parameters = [parameter for parameter in names if parameter.requires_grad]
        return [parameters[span] for span in split_evenly(len(parameters), groups)]
    if not all(isinstance(group, list | tuple) for group in groups):
        raise ValueError("groups should be a non-negative integer or a list of lists")
    members = [member for group in groups for member in group]
    if any(not isinstance(member, Tensor) for member in members):
        raise ValueError("groups must consist of parameters (torch.Tensor)")
    if len(set(members)) < len(members):
        raise ValueError("a parameter stands in two groups, or twice in one")
    return [[member for member in group if member in names] for group in groups]
