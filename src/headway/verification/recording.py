"""Recordings: every tensor of a run's first optimiser steps, by logical name.

A recording is one safetensors file whose tensors are called `<step>/<kind>/<logical name>`, kinds
in the order in which a step makes them (`KINDS`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from math import isnan
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from headway.comm.tuning.autotuning import PROFILED_STEPS
from headway.data import Cursor
from headway.documents import parse_json
from headway.optim import WarmUp
from headway.plans import Plan
from headway.run.recipe.factory import load_recipe
from headway.run.recipe.recipe import Recipe
from headway.run.recipe.sent_recipe import SentRecipe
from headway.run.step.setup import check_components, recipe_plan, stepped_each_step
from headway.run.strategy.training_state import TrainingState
from headway.verification.reference.optimizers import (
    check_warm_up,
    check_warm_up_then_cosine,
    step_as_published,
)
from headway.verification.reference.schedulers import GivenArguments, check_scaled_rates

KINDS = (
    "loss",
    "share",
    "exchange",
    "residual",
    "unclipped",
    "gradient",
    "norm",
    "parameter",
    "buffer",
    "optimizer",
    "key",
    "facts",
    "validation",
    "journal",
)
STEP_KINDS = ("loss", "gradient", "parameter", "buffer", "optimizer")
"""Those of every step; share, exchange and residual are of an inexact exchange (see `replay`),
unclipped is the gradient before its norm is limited, norm what it was, key the keys of tables that
grow and counts of their steps, as whole numbers, facts are what a checkpoint
holds beside tensors, journal is what a run tells of a step."""


@dataclass(frozen=True, kw_only=True)
class VerifyJob:
    """What to record.

    Attributes:
        recipe: As for `headway train`, or a `Recipe` as it is sent.
        steps: Optimiser steps. They straddle the end of an epoch, so that a ragged last batch and
            the first batch of the next epoch are among them.
        whole: From the first sample on, as training begins, twice as many, with validations.
        narrow: In the recipe's own precision, in which equality cannot be told from rounding; see
            `replay`.
        perturbed: From initial parameters that are off by one unit in their last place, to see what
            rounding becomes in this model: the number of the draw, from 1 on; 0: as they are.
    """

    recipe: str | SentRecipe
    overrides: tuple[str, ...] = ()
    steps: int = 4
    plan: Plan | Path | None = None
    timeout_seconds: float = 120.0
    whole: bool = False
    narrow: bool = False
    perturbed: int = 0

    @property
    def validate_every(self) -> int:
        """Steps between validations of a whole run: others than those of the checkpoints."""
        return max(1, self.steps - 1)

    def validates(self, step: int) -> bool:
        """Whether a whole run validates after a step."""
        return step % self.validate_every == 0 or step == 2 * self.steps

    def count(self, recipe: Recipe) -> int:
        """How many steps are made: with priority enough that some are not measured by the exchange,
        which lets all updates land first; of workers that do not meet enough that some are ahead.
        """
        if self.whole:
            return 2 * self.steps
        if self.narrow:
            return NARROW_STEPS
        plan = Plan.load(self.plan) if isinstance(self.plan, Path) else self.plan
        given = recipe if plan is None else plan
        if given.exchange and given.exchange.priority:
            return max(self.steps, CROSSING_STEPS)
        rules = given.synchrony
        if rules is None or rules.by_all_reduce or rules.in_rounds:
            return self.steps
        return max(self.steps, FREE_STEPS)

    def load(self) -> Recipe:
        """The recipe in float64, in which equality can be told from rounding."""
        recipe = load_recipe(self.recipe, self.overrides)
        return recipe if self.narrow else replace(recipe, precision="float64")

    def start(self, recipe: Recipe, sizes: Callable[[int], Sequence[int]]) -> Cursor:
        """Where the recorded steps begin: so that the epoch ends one step before the last.

        Args:
            sizes: Samples of each batch of an epoch.
        """
        if self.whole:
            return Cursor(seed=recipe.seed)
        epoch = sizes(0)
        first = max(0, len(epoch) - max(1, self.count(recipe) - 1))
        return Cursor(seed=recipe.seed, epoch=0, position=sum(epoch[:first]))


@dataclass(frozen=True, slots=True)
class Recording:
    """Named tensors of a run, and the order in which backward made the gradients.

    `order` is the order of execution, for naming the first difference.

    Attributes:
        bounds: By how much the elements of a tensor may be off beyond rounding in float64.
        apart: Key of a tensor that ranks hold with different numbers -> which ranks.
        ended: The run ended in its last recorded step, by an error or because ranks are apart: what
            it has not made is no difference.
        initial: Name -> value of a parameter before the first step, where it is known.
        coupled: The gradients that a rank has computed depend on the samples of other ranks.
    """

    tensors: Mapping[str, Tensor]
    order: tuple[str, ...]
    bounds: Mapping[str, Tensor] = field(default_factory=dict)
    apart: Mapping[str, str] = field(default_factory=dict)
    ended: bool = False
    initial: Mapping[str, Tensor] = field(default_factory=dict)
    coupled: bool = False

    @property
    def complete_steps(self) -> int:
        """How many steps were made up to their update."""
        steps = (key.split("/", 2) for key in self.order)
        return max((int(step) for step, kind, _ in steps if kind == "parameter"), default=0)

    def save(self, path: Path) -> None:
        # safetensors refuses tensors that are not contiguous.
        clones = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        clones |= {f"{_BOUND}{name}": bound for name, bound in self.bounds.items()}
        clones |= {f"{_INITIAL}{name}": value for name, value in self.initial.items()}
        facts = {
            "order": self.order,
            "apart": dict(self.apart),
            "ended": self.ended,
            "coupled": self.coupled,
        }
        unfinished = path.with_suffix(".unfinished")
        metadata = {key: json.dumps(fact) for key, fact in facts.items()}
        save_file(clones, unfinished, metadata=metadata)
        unfinished.replace(path)

    @staticmethod
    def load(path: Path) -> Recording:
        with safe_open(path, framework="pt") as file:
            facts = {key: parse_json(text) for key, text in file.metadata().items()}
            every = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        bounds, initial = (
            {name.removeprefix(what): t for name, t in every.items() if name.startswith(what)}
            for what in (_BOUND, _INITIAL)
        )
        tensors = {n: t for n, t in every.items() if not n.startswith((_BOUND, _INITIAL))}
        return Recording(
            tensors, tuple(facts["order"]), bounds, facts["apart"], facts["ended"], initial,
            facts["coupled"],
        )  # fmt: skip


_BOUND, _INITIAL = "bound of ", "initial "
NARROW_STEPS = 2
"""So that what a compressor keeps back is used once."""
CROSSING_STEPS = PROFILED_STEPS[-1] + 5
"""Least number of steps of a plan with priority."""
FREE_STEPS = 12
"""Least number of steps of workers that do not meet in rounds."""


def recipe_and_plan(job: VerifyJob, ranks: int) -> tuple[Recipe, Plan]:
    """What is run, in the precision in which it is recorded: a plan that was given decides on the
    recipe's own."""
    recipe = job.load()
    plan = recipe_plan(recipe, job.plan, ranks)
    precision = plan.memory.precision if job.narrow else "float64"
    plan = replace(plan, memory=replace(plan.memory, precision=precision))
    return replace(recipe, precision=precision), plan


class Recorder:
    """Collects the tensors of a run step by step, in execution order."""

    def __init__(self, trained: TrainingState) -> None:
        self._names = [name for name, _ in trained.model.named_parameters()]
        self._tensors: dict[str, Tensor] = {}
        self._gradients: list[str] = []
        self._made: list[str] = []
        self._unclipped: dict[str, Tensor] = {}
        self.norm: float | None = None
        for name, parameter in trained.model.named_parameters():
            # torch raises where such a hook is registered on a parameter that requires no grad.
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(self._note, name))

    def _note(self, name: str, _: Tensor) -> None:
        """Backward has made a gradient."""
        self._gradients.append(name)

    def of_kind(self, step: int, kind: str) -> dict[str, Tensor]:
        """What has been recorded of a step, by name, in the order of execution."""
        start = f"{step}/{kind}/"
        keys = [key for key in self._made if key.startswith(start)]
        return {key.removeprefix(start): self._tensors[key] for key in keys}

    def before_clip(self, numbers: Mapping[str, Mapping[str, Tensor]]) -> None:
        """The gradients of this step before their norm is limited."""
        gradients = numbers.get("gradient", {})
        self._unclipped = {name: value.detach().clone() for name, value in gradients.items()}

    def validated(self, step: int, values: Mapping[str, float]) -> None:
        """A validation after a step that has been taken."""
        for name, value in values.items():
            self._put(step, "validation", name, validation_value(value))

    def told(self, step: int, numbers: Mapping[str, float | None]) -> None:
        """What the journal of a run must tell of a step."""
        for name, number in numbers.items():
            if number is not None:
                self._put(step, "journal", name, torch.tensor(number, dtype=torch.float64))

    def take(
        self,
        step: int,
        loss: float,
        numbers: Mapping[str, Mapping[str, Tensor]],
        norm: float | None = None,
    ) -> None:
        """Record a step that has just been done.

        Args:
            numbers: As `TrainingState.tensors_by_kind` gives them; gradients must still be there.
            norm: Of the gradients, before it is limited.
        """
        self._put(step, "loss", "loss", torch.tensor(loss, dtype=torch.float64))
        if norm is not None:
            self._put(step, "norm", "norm", torch.tensor(norm, dtype=torch.float64))
        numbers = {**numbers, "unclipped": self._unclipped}
        for kind in KINDS[1:]:
            tensors = numbers.get(kind, {})
            made = self._gradients if kind in ("gradient", "unclipped") else []
            # Where backward has noted nothing here (other kinds, stages on other ranks): the
            # model's order.
            for name in dict.fromkeys([*made, *self._names, *tensors]):
                if name in tensors:
                    self._put(step, kind, name, tensors[name])
        self._gradients.clear()
        self._unclipped = {}

    def _put(self, step: int, kind: str, name: str, tensor: Tensor) -> None:
        key = f"{step}/{kind}/{name}"
        # Cloned in any case, because the next step overwrites this memory.
        whole = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
        # safetensors knows no complex128: real and imaginary part in a last dimension.
        self._tensors[key] = (
            torch.view_as_real(whole).clone() if whole.is_complex() else whole.clone()
        )
        self._made.append(key)

    def recording(
        self, *, apart: Mapping[str, str] | None = None, ended: bool = False
    ) -> Recording:
        return Recording(self._tensors, tuple(self._made), apart=apart or {}, ended=ended)


def initial_values(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters, as a recording has them."""
    named = ((name, p.detach()) for name, p in model.named_parameters())
    return {n: (torch.view_as_real(p) if p.is_complex() else p).contiguous().clone()
            for n, p in named}  # fmt: skip


def build_training_state(
    recipe: Recipe, model: nn.Module, *, reference: bool = False
) -> TrainingState:
    """Optimiser and scheduler of the recipe around a model.

    Args:
        reference: headway's own optimisers step, and rates are scaled, as their papers have it.
    """
    given = GivenArguments()
    with given.noting() if reference else nullcontext():
        optimizer = recipe.optimizer(model)
        if reference:
            check_scaled_rates(recipe, model, optimizer)
            step_as_published(optimizer)
        scheduler = recipe.scheduler(optimizer) if recipe.scheduler else None
    if reference and isinstance(scheduler, WarmUp):
        check_warm_up(scheduler)
        check_warm_up_then_cosine()
    check_components(model, optimizer, stepped_each_step(scheduler), 1)
    return TrainingState(model, optimizer, given.published(scheduler))


def validation_value(value: float) -> Tensor:
    """A value of a validation: [value, 0], or [0, 1] where there is none (NaN, which differs from
    itself), as of an AUC of samples with one label."""
    return torch.tensor([0.0, 1.0] if isnan(value) else [value, 0.0], dtype=torch.float64)
