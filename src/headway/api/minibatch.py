"""Best minibatch of one device, and the algorithm of each layer, from measurements.

Zou's procedure with times measured on this machine: every way to compute a convolution or attention
is timed on the recipe's own model, and a knapsack chooses among them within the device's memory.
The measured model is thrown away; nothing is trained.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headway.capture.benchmark.layer_algorithms import measure_algorithms
from headway.capture.benchmark.timer import DeviceTimer
from headway.data import as_source
from headway.graph.layer_algorithms import AlgorithmProfile, LayerAlgorithm
from headway.planner.guidelines.layer_algorithms import Minibatch, Mode, choose_minibatch
from headway.run.recipe.factory import load_recipe
from headway.run.recipe.recipe import sum_and_count
from headway.run.step.batch import example_batch, to_device
from headway.run.step.randomness import seed_everything


def measure_minibatch(
    reference: str,
    *,
    memory: float,
    most: int,
    device: str = "cpu",
    seconds: float = 0.04,
    mode: Mode = "sum",
) -> Minibatch:
    """The minibatch of one device with the shortest epoch, and how it computes each layer.

    Args:
        memory: M_GPU, bytes of the device.
        most: The largest minibatch; powers of two up to it are tried, and itself.
        seconds: For the repetitions of one measurement.

    Raises:
        PlanError: No minibatch fits.
        RecipeError: The recipe cannot be used.
    """
    recipe = load_recipe(reference)
    seed_everything(recipe.seed)
    where = torch.device(device)
    model = recipe.model().to(where)
    clock, known = DeviceTimer(where, seconds), dict[object, tuple[LayerAlgorithm, ...]]()
    held = _training_state_bytes(model, recipe.optimizer(model))

    def profile(batch: int) -> AlgorithmProfile:
        data = to_device(example_batch(recipe, batch), where, None)

        def step() -> Tensor:
            total, _ = sum_and_count(recipe.loss(model, data), batch)
            return total / batch

        return measure_algorithms(model, step, clock=clock, parameters=held, known=known).profile

    samples = len(as_source(recipe.data()))
    tried = sorted({2**n for n in range(most.bit_length()) if 2**n <= most} | {most})
    return choose_minibatch(profile, tried, memory=memory, samples=samples, mode=mode)


def _training_state_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Bytes of weights, gradients and what the optimiser keeps, after a step without changes."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    trained = [p for p in model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in trained]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    # Lazily created optimiser state exists only after a step; the measured model stays as it was.
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
