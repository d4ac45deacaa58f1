"""single: what is computed again, per stage and per block, equals what is kept."""

from __future__ import annotations

import weakref
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from headway.errors import RunError
from headway.parallel import Pipeline, PipelineCallbacks, PipelineRanks, cut
from headway.parallel.pipeline.runtime import recomputation
from headway.schedule.pipeline_schedule import Action, ActionKind, PipelineSchedule, SchedulePipe
from headway.workloads.transformer import TransformerConfig, TransformerLM
from support.pipelines import assert_equal, chain, numbers_of, points, run_serially, sentences
from support.sampling import sampled
from support.tiny_models import CLASSES, FEATURES, WORDS, cross_entropy

STAGES, COUNT = 3, 3
EVERY = tuple(range(STAGES))
WAYS = {
    "kept": {},
    "stages": {"recompute": EVERY},
    "one stage": {"recompute": (1,)},
    "blocks": {"recompute": EVERY, "blockwise": True},
    "blocks of two stages": {"recompute": (0, 2), "blockwise": True},
}


def all_forwards_first(stages=STAGES, *, split=False, **recompute):
    """On one rank; weights and buffers that change meanwhile would be seen."""
    row = [Action(ActionKind.FORWARD, "d0", s, m) for m in range(COUNT) for s in range(stages)]
    kinds = (ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD) if split else (ActionKind.BACKWARD,)
    for m in range(COUNT):
        for kind in kinds:
            row += [Action(kind, "d0", s, m) for s in reversed(range(stages))]
    pipe = SchedulePipe("d0", (0,) * stages, tuple(range(COUNT)))
    return PipelineSchedule(name="one", pipes=(pipe,), order=(tuple(row),), **recompute)


def pipeline_of(model, data, loss=cross_entropy, *, around=None, stages=STAGES, **how):
    found = cut(model, loss, data[0], stages=stages)
    table = replace(all_forwards_first(stages, **how), skips=found.skips)
    calls = PipelineCallbacks(loss=loss, share=lambda value, _: value / len(data), around=around)
    return Pipeline(found, table, PipelineRanks(rank=0, ranks=(0,)), calls)


def run(model, data, loss=cross_entropy, **how):
    losses = pipeline_of(model, data, loss, **how).run(data)
    return {**{f"loss {m}": v for m, v in losses.items()}, **numbers_of(model)}


def seeded(stage, microbatch, phase):
    """The same random numbers for a forward and for the whole stage computed again."""
    if phase != "backward":
        torch.manual_seed(100 * stage + microbatch)
    return nullcontext()


# -- random numbers --------------------------------------------------------------------------------


class Dropping(nn.Module):
    """Drops, and notes what."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)
        self.masks = []

    def forward(self, x):
        y = torch.tanh(nn.functional.dropout(self.layer(x), 0.3, self.training))
        mask = torch.rand_like(y) < 0.6
        self.masks.append(mask)
        return y * mask


def masks_of(**how):
    """Of each layer the masks of all its forwards, and the numbers of the run."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Dropping() for _ in range(6)), nn.Linear(FEATURES, CLASSES)).double()
    data = points(COUNT, dtype=torch.float64)
    pipeline = pipeline_of(model, data, around=seeded, **how)
    for layer in model[:-1]:
        layer.masks.clear()
    losses = pipeline.run(data)
    numbers = {**{f"loss {m}": v for m, v in losses.items()}, **numbers_of(model)}
    return [layer.masks for layer in model[:-1]], numbers


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("way", ["stages", "blocks"])
def test_masks_are_the_same_again(way, split):
    expected, numbers = masks_of(split=split)
    found, again = masks_of(split=split, **WAYS[way])
    assert_equal(numbers, [again], 0.0)
    for kept, twice in zip(expected, found, strict=True):
        assert len(kept) == COUNT
        assert len(twice) == 2 * COUNT
        for m in range(COUNT):
            assert torch.equal(twice[m], kept[m])
            assert torch.equal(twice[COUNT + m], kept[m])


def test_other_random_numbers_would_be_noticed(monkeypatch):
    @contextmanager
    def forgotten(self):
        with torch.enable_grad():
            yield

    monkeypatch.setattr(recomputation._ForwardEnvironment, "restored", forgotten)
    expected, numbers = masks_of()
    found, again = masks_of(**WAYS["blocks"])
    assert not torch.equal(found[0][COUNT], expected[0][0])
    with pytest.raises(AssertionError, match="gradient"):
        assert_equal(numbers, [again], 1e-3)


def test_random_numbers_go_on_after_backward_as_if_nothing_had_been_drawn():
    states = []
    for way in ("kept", "blocks"):
        masks_of(**WAYS[way])
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


# -- buffers, values in place, types -----------------------------------------------------------


class Adapting(nn.Linear):
    """Uses a buffer, and changes it."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.register_buffer("center", torch.zeros(inputs))

    def forward(self, x):
        y = super().forward((x - self.center) * torch.exp(self.center))
        if self.training:
            self.center.lerp_(x.detach().mean(0), 0.3)
        return y


class Altering(nn.Module):
    """Changes a value that an earlier module has been given too."""

    def forward(self, x):
        return x.mul_(1.5).sub_(0.25)


class Shift(nn.Module):
    """Keeps nothing for backward: its argument may be changed."""

    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.full((FEATURES,), 0.3))

    def forward(self, x):
        return torch.tanh(x + self.by)


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.shifts = nn.ModuleList(Shift() for _ in range(3))
        self.alter = nn.ModuleList(Altering() for _ in range(3))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        x = x * 1.0
        for shift, alter in zip(self.shifts, self.alter, strict=True):
            y = shift(x)
            x = y + alter(x)
        return self.head(x)


def in_bfloat16(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        return cross_entropy(model, batch)


MODELS = {
    "buffers": (lambda: nn.Sequential(*(Adapting(FEATURES, FEATURES) for _ in range(5)),
                                      nn.Linear(FEATURES, CLASSES)), cross_entropy),
    "in place": (InPlace, cross_entropy),
    "autocast": (chain, in_bfloat16),
    "one chain": (lambda: chain(depth=20), cross_entropy),
}  # fmt: skip


@pytest.mark.parametrize(("name", "split"), sampled([*product(MODELS, [False, True])], 4))
def test_every_way_equals_the_serial_run(name, split):
    make, loss = MODELS[name]
    data = points(COUNT)
    torch.manual_seed(0)
    expected = run_serially(make(), loss, data)
    for way, how in WAYS.items():
        torch.manual_seed(0)
        found = run(make(), data, loss, split=split, **how)
        assert_equal(expected, [found], 0.0), way


def test_two_steps_of_a_pipeline_are_alike():
    torch.manual_seed(0)
    model = InPlace()
    data = points(COUNT)
    pipeline = pipeline_of(model, data, **WAYS["blocks"])
    found = []
    for _ in range(2):  # in the second it is known which arguments are changed
        model.zero_grad()
        pipeline.run(data)
        found.append(numbers_of(model))
    assert_equal(found[0], [found[1]], 0.0)


def test_an_argument_that_is_changed_later_only_is_refused():
    class Sometimes(nn.Module):
        when = False

        def forward(self, x):
            return x.mul_(2.0) if self.when else x * 2.0

    model = InPlace()
    model.alter = nn.ModuleList(Sometimes() for _ in range(3))
    data = points(COUNT)
    pipeline = pipeline_of(model, data, **WAYS["blocks"])
    pipeline.run(data)
    Sometimes.when = True
    with pytest.raises(RunError, match=r"shifts\.\d in stage \d: an argument was changed in place"):
        pipeline.run(data)


def test_a_block_that_is_another_the_second_time_is_named():
    class Moody(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            y = super().forward(x)
            return y if self.calls > COUNT + 2 else y.exp().log()

    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), Moody(FEATURES, FEATURES), nn.Linear(6, 4))
    data = points(COUNT)
    pipeline = pipeline_of(model, data, **WAYS["blocks"])
    model[1].calls = 2
    with pytest.raises(RunError, match="1 in stage 1 computes something else the second time"):
        pipeline.run(data)


# -- memory ----------------------------------------------------------------------------------------


class Held(TorchDispatchMode):
    """The bytes of all tensors that operators make, as long as they live.

    Attributes:
        peak: The most at a time.
    """

    def __init__(self):
        super().__init__()
        self.peak = self._now = 0
        self._seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key not in self._seen:
            self._seen.add(key)
            self._now += size
            self.peak = max(self.peak, self._now)
            weakref.finalize(storage, self._forget, key, size).atexit = False

    def _forget(self, key, size):
        self._seen.discard(key)
        self._now -= size


def peak(layers, stages, **how):
    torch.manual_seed(0)
    config = TransformerConfig(vocabulary=WORDS, width=32, layers=layers, heads=2)
    model = TransformerLM(config)
    data = sentences(COUNT, samples=64)
    pipeline = pipeline_of(model, data, stages=stages, **how)
    pipeline.run(data)  # gradients are there, and it is known what changes
    with Held() as held:
        pipeline.run(data)
    return held.peak


@pytest.mark.slow
def test_blocks_hold_less_than_stages_and_these_less_than_all():
    every = {"recompute": (0, 1)}
    kept, one = peak(8, 2), peak(8, 2, recompute=(1,))
    stages, by_block = peak(8, 2, **every), peak(8, 2, **every, blockwise=True)
    assert kept > one > stages > by_block
    # All of 3 micro-batches and 8 blocks; of one micro-batch and 4; of one and one, and 24 inputs.
    assert stages < 0.3 * kept
    assert by_block < 0.75 * stages
    # A stage of one block holds the same either way, but for states of random generators.
    assert abs(peak(2, 2, **every, blockwise=True) / peak(2, 2, **every) - 1) < 0.2
