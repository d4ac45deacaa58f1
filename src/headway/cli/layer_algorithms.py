"""A recipe's minibatch and algorithms, measured on this machine: Zou's procedure with real times.

The recipe's own model, data, loss and optimiser are used, on one device. Invariant: nothing is
trained; the model that is measured is thrown away.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headway.capture.algorithm_times import measure
from headway.capture.clock import Clock
from headway.data import as_source
from headway.planner.knapsack import Algorithm, Minibatch, Mode, Profile, choose_minibatch
from headway.run.model_costs import example_of
from headway.run.parts import sum_and_count
from headway.run.randomness import seed_everything
from headway.run.recipe_file import load_recipe
from headway.run.trees import to_device


@dataclass(frozen=True)
class Answer:
    """What was chosen.

    Attributes:
        minibatch: The best one and the trials.
        samples: Of an epoch.
    """

    minibatch: Minibatch
    samples: int


def choose_algorithms(
    reference: str,
    *,
    memory: float,
    most: int,
    device: str = "cpu",
    seconds: float = 0.04,
    mode: Mode = "sum",
) -> Answer:
    """The minibatch of one device with the shortest epoch, and how it computes each layer.

    Args:
        reference: As for `headway train`.
        memory: M_GPU, bytes of the device.
        most: The largest minibatch; powers of two up to it are tried, and itself.
        device: "cpu" or "cuda".
        seconds: For the repetitions of one measurement.
        mode: Of the work spaces, as in `knapsack.frontier_of`.

    Raises:
        PlanError: No minibatch fits.
        RecipeError: The recipe cannot be used.
    """
    recipe = load_recipe(reference)
    seed_everything(recipe.seed)
    where = torch.device(device)
    model = recipe.model().to(where)
    clock, known = Clock(where, seconds), dict[object, tuple[Algorithm, ...]]()
    held = _held(model, recipe.optimizer(model))

    def profile(batch: int) -> Profile:
        data = to_device(example_of(recipe, batch), where, None)

        def step() -> Tensor:
            total, _ = sum_and_count(recipe.loss(model, data), batch)
            return total / batch

        return measure(model, step, clock=clock, parameters=held, known=known).profile

    samples = len(as_source(recipe.data()))
    tried = sorted({2**n for n in range(most.bit_length()) if 2**n <= most} | {most})
    found = choose_minibatch(profile, tried, memory=memory, samples=samples, mode=mode)
    return Answer(found, samples)


def _held(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Bytes of weights, gradients and what the optimiser keeps, after a step without changes."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    trained = [p for p in model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in trained]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    with torch.no_grad():
        for parameter, old in zip(trained, before, strict=True):
            parameter.copy_(old)
    kept = sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )
    gradients = sum(p.numel() * p.element_size() for p in trained)
    optimizer.zero_grad(set_to_none=True)
    return float(weights + gradients + kept)
