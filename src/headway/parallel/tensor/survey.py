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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from headway.capture.fake import Pretence
from headway.errors import PlanError
from headway.parallel.tensor.context import Refused
from headway.parallel.tensor.hold import Entered, hold
from headway.parallel.tensor.islands import Island, find_islands, meant
from headway.parallel.tensor.rules.named import table
from headway.parallel.tensor.survey_run import Blame, Decisions, Survey
from headway.plan.tensor_layout import TensorGrid, check_needs

ROUNDS = 60
"""Runs of the model after which a survey gives up; each blames at least one more weight."""


def survey(
    model: nn.Module,
    loss: Callable[[Any, Any], Any],
    batch: Any,
    plan: TensorGrid,
    *,
    whole: Sequence[str] = (),
    only: Sequence[str] = (),
    by: Sequence[tuple[str, TensorGrid]] = (),
) -> Decisions:
    """Find out how a model can be split; it is not changed, and nothing is computed.

    Args:
        model: In training mode, as it will be used.
        loss: `loss(model, batch)`.
        batch: Of a micro-batch, as each rank of the grid will get it.
        plan: The grid.
        whole: Names of parameters or modules, or patterns, that are not split.
        only: Those that may be split; none: all.
        by: Patterns of modules that are split over another grid of the same ranks, on which `whole`
            and `only` have no bearing; the plan is a classic one then.

    Raises:
        PlanError: The degrees do not divide something, with the legal ones; on a grid that cuts
            every activation, a function has no rule; or a pattern means no parameter.
    """
    blames: dict[str, Blame] = {}
    islands = find_islands(model, by)
    whole, only = (
        meant(model, patterns, said) for patterns, said in ((whole, "whole"), (only, "only"))
    )
    for _ in range(ROUNDS):
        runs = _run(model, loss, batch, {**islands, "": plan}, blames, whole, only)
        found = {name: refusal for run in runs for name, refusal in run.found.items()}
        if not found:
            break
        known = {name: blames.setdefault(name, Blame()) for name in found}
        sure = {
            n: r
            for n, r in found.items()
            if r.of is not None or (r.blocks > 1 and known[n].blocks == 1)
        }
        for name, refusal in (sure or found).items():  # these may do away with the rest
            _next(known[name], refusal)
    decided = [_judged(model, run) for run in runs]
    if found:
        raise _refusal(model, plan, [f"{name}: {one.why}" for name, one in found.items()])
    return replace(
        decided[-1],
        cuts={name: cuts for one in decided for name, cuts in one.cuts.items()},
        companions=frozenset().union(*(one.companions for one in decided)),
        left={name: why for one in decided for name, why in one.left.items()},
        islands=islands,
    )


def _judged(model: nn.Module, run: Survey) -> Decisions:
    """What a grid's run has decided.

    Raises:
        PlanError: See `survey`.
    """
    plan = run.grid.plan
    blames = {name: run.blames[name] for name in run.names.values() if name in run.blames}
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
    if problems:
        raise _refusal(model, plan, problems)
    return run.decisions()


def _refusal(model: nn.Module, plan: TensorGrid, problems: Sequence[str]) -> PlanError:
    return PlanError(
        f"{type(model).__name__} cannot be split over a {plan.form} grid",
        problems=problems,
        fix="The classic form leaves such layers whole; or name them in whole=[...].",
    )


def _run(
    model: nn.Module,
    loss: Callable[[Any, Any], Any],
    batch: Any,
    plans: Mapping[str, TensorGrid],
    blames: Mapping[str, Blame],
    whole: Sequence[str],
    only: Sequence[str],
) -> list[Survey]:
    """One run; what each grid's part of the model has said, the model itself last."""
    pretence = Pretence()
    copy = pretence.model(model)
    rest = {id(parameter): name for name, parameter in copy.named_parameters()}
    runs = []
    for name, plan in plans.items():  # `hold` leaves alone what is held already
        part = copy.get_submodule(name)
        own = {id(p): rest.pop(id(p)) for p in part.parameters() if id(p) in rest}
        patterns = ((), ()) if name else (whole, only)
        runs.append(Survey(plan, own, blames, table(), *patterns))
        hold(part, runs[-1], root=Island if name else Entered)
    with pretence.mode, torch.enable_grad():
        loss(copy, pretence.tree(batch))
    return runs


def _next(blame: Blame, refusal: Refused) -> None:
    """What to try after a refusal: blocks once, then the whole layer."""
    blame.why = refusal.why
    blame.needs += refusal.needs
    if refusal.blocks > 1 and blame.blocks == 1:
        blame.blocks = refusal.blocks
    else:
        blame.whole = True
