"""ranks: models that break pipelines elsewhere, pipelined as they are, equal the serial run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import headway
from headway import Recipe
from headway.errors import PlanError
from headway.parallel import cut
from headway.schedule.generators.registry import make_schedule
from headway.schedule.lowering import lower
from headway.workloads.transformer import TransformerConfig, TransformerLM
from support.pipelines import (
    assert_equal,
    draws_before,
    keyed,
    keyed_around,
    make_pipeline,
    numbers_of,
    own_names,
    points,
    run_pipelined,
    run_serially,
    sentences,
    sites_of,
)
from support.ranks import ranks, run_ranks
from support.sampling import sampled
from support.tiny_models import CLASSES, FEATURES, WORDS, cross_entropy

COUNT, SAMPLES = 4, 3


class Unet(nn.Module):
    """Down and up again with a value over every level, and an in-place non-linearity."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(a, b, 3, padding=1) for a, b in ((1, 3), (3, 4))])
        self.bottom = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(inplace=True))
        self.up = nn.ModuleList([nn.Conv2d(a, b, 3, padding=1) for a, b in ((8, 3), (6, 2))])
        self.head = nn.Linear(2, CLASSES)

    def forward(self, image):
        x, skips = image.to(memory_format=torch.channels_last), []
        for layer in self.down:
            x = F.relu(layer(x), inplace=True)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.bottom(x)
        for layer in self.up:
            skip = skips.pop()
            x = F.interpolate(x, size=skip.shape[2:])
            x = torch.tanh(layer(torch.cat((x, skip), 1)))
        return self.head(x.mean((2, 3)))


class Normed(nn.Module):
    """Batch-norm that keeps running statistics, in every stage."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES), nn.ReLU())
              for _ in range(4))
        )  # fmt: skip
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        return self.head(self.layers(x))


class Dropping(Normed):
    """Dropout in modules and in the code between them."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.4)

    def forward(self, x):
        for layer in self.layers:
            x = F.dropout(self.drop(layer(x)), 0.2, self.training)
        return self.head(x)


class Masked(nn.Module):
    """Dropout in modules and between them, and nothing that depends on other samples."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Dropout(0.4), nn.Tanh())
            for _ in range(4)
        )
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        for layer in self.layers:
            x = x + F.dropout(layer(x), 0.2, self.training)
        return self.head(x)


class HalfFrozen(Normed):
    """Stages that are not trained: no gradient comes to the first, one goes through the third."""

    def __init__(self):
        super().__init__()
        self.layers[0].requires_grad_(False)
        self.layers[2].requires_grad_(False)


class Towers(nn.Module):
    """Two towers: nothing goes from the end of the first to the beginning of the second."""

    def __init__(self):
        super().__init__()
        self.left, self.right = (
            nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 5)) for _ in range(2)
        )
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x):
        left = self.left(x)
        return self.head(left * self.right(x.flip(0)))


class Dense(nn.Module):
    """Every value goes to all later stages."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(4))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        found = [x]
        for layer in self.layers:
            found.append(torch.tanh(layer(sum(found))))
        return self.head(sum(found))


class Altering(nn.Linear):
    """Begins by changing what enters it."""

    def forward(self, x):
        return super().forward(x.mul_(1.5).sub_(0.25))


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Altering(FEATURES, FEATURES) for _ in range(4))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        x = x.clone()
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Pack(nn.Linear):
    """Gives tensors with and without gradients, sizes and numbers, all in a dict."""

    def forward(self, given):
        x = given if isinstance(given, torch.Tensor) else given["x"] * given["scale"]
        y = super().forward(x)
        found = {"x": y, "mask": x.detach() > 0, "rows": y.shape[0], "scale": 0.5, "skip": (y * 2,)}
        if not isinstance(given, torch.Tensor):
            assert given["mask"].dtype == torch.bool
            found["skip"] = (y + given["skip"][0] / given["rows"],)
        return found


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Pack(FEATURES, FEATURES) for _ in range(4))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x["skip"][0] + x["mask"])


def transformer():
    return TransformerLM(TransformerConfig(vocabulary=WORDS, width=16, layers=3, heads=2))


def images(count, dtype=torch.float64):
    data = points(count, samples=SAMPLES, dtype=dtype)
    return [(x.repeat(1, 11)[:, :64].reshape(SAMPLES, 1, 8, 8), y) for x, y in data]


def small_points(count):
    return points(count, samples=SAMPLES, dtype=torch.float64)


CASES = {
    "transformer": (transformer, sentences),
    "unet": (Unet, images),
    "batch-norm": (Normed, small_points),
    "dropout": (Dropping, small_points),
    "masks": (Masked, small_points),
    "half-frozen": (HalfFrozen, small_points),
    "towers": (Towers, small_points),
    "dense": (Dense, small_points),
    "in-place": (InPlace, small_points),
    "values": (Packed, small_points),
}
STATISTICS = ("batch-norm", "dropout", "half-frozen")
EVERY = (0, 1, 2, 3)
SCHEDULES = {
    "1f1b": {},
    "zb-h1": {},
    "chimera": {},
    "1f1b, stages": {"recompute": EVERY},
    "zb-h1, two stages": {"recompute": (0, 2)},
    "1f1b, blocks": {"recompute": EVERY, "blockwise": True},
    "zb-h1, blocks of two": {"recompute": (1, 3), "blockwise": True},
    "chimera-doubling": {},
    "chimera-doubling, three stages": {"recompute": (0, 1, 3)},
    "chimera-doubling, blocks": {"recompute": EVERY, "blockwise": True},
}


def build(case):
    torch.manual_seed(0)
    return CASES[case][0]().double(), CASES[case][1](COUNT)


def expected_of(case):
    """The serial run; a context for each micro-batch makes its random numbers."""
    model, data = build(case)
    sites = sites_of(model, cross_entropy, data[0])
    found = {}
    for m in range(COUNT):
        with keyed(sites, m, SAMPLES):
            share = cross_entropy(model, data[m]) / COUNT
        found[f"loss {m}"] = share.detach()
        share.backward()
    return {**found, **numbers_of(model)}


def pipelined(world, case, names):
    found = {}
    for name in names:
        model, data = build(case)
        stages = cut(model, cross_entropy, data[0], stages=world.size)
        sites = sites_of(model, cross_entropy, data[0])
        first = draws_before(stages, cross_entropy, data[0])
        table = make_schedule(name.partition(",")[0], stages=world.size, microbatches=COUNT)
        table = replace(table, skips=stages.skips, **SCHEDULES[name])
        around = keyed_around(sites, SAMPLES, first)
        found[name] = run_pipelined(
            world, model, cross_entropy, data, lower(table, sync="eager"),
            stages=stages, around=around, step=lambda _: None,
        )  # fmt: skip
    return found


@pytest.mark.parametrize("case", sampled([*CASES], 6))
def test_equal_to_the_serial_run(case):
    expected = expected_of(case)
    # Two copies of a batch-norm see half of the micro-batches each: their statistics differ.
    names = [n for n in SCHEDULES if not n.startswith("chimera") or case not in STATISTICS]
    names = sampled(names, 3)
    found = run_ranks(4, pipelined, case, names)
    for name in names:
        assert_equal(expected, [of_rank[name] for of_rank in found], 1e-12)


def lengths(step):
    """Micro-batches of several lengths and sizes."""
    draw = torch.Generator().manual_seed(step)
    sizes = [(2, 3), (3, 5), (2, 3), (1, 4)] if step else [(2, 3), (2, 5), (4, 3), (1, 4)]
    words = [torch.randint(WORDS, (n, t + 1), generator=draw) for n, t in sizes]
    return [(part[:, :-1], part[:, 1:]) for part in words]


@ranks(2)
def test_sizes_change_from_micro_batch_to_micro_batch(world):
    torch.manual_seed(0)
    model, serial = transformer().double(), transformer().double()
    serial.load_state_dict(model.state_dict())
    schedule = lower(make_schedule("1f1b", stages=2, microbatches=4), sync="post")
    pipeline = make_pipeline(world, model, cross_entropy, lengths(0), schedule, step=lambda _: None)
    for step in range(3):
        for one in (model, serial):
            one.zero_grad()
        expected = run_serially(serial, cross_entropy, lengths(step))
        losses = {f"loss {m}": v for m, v in pipeline.run(lengths(step)).items()}
        held = own_names(pipeline.stages, world.rank)
        got = {**losses, **{k: v for k, v in numbers_of(model).items() if k in held}}
        assert_equal({k: expected[k] for k in got}, [got], 1e-12)
        assert bool(losses) == (world.rank == 1)


@ranks(2)
def test_evaluation_runs_the_forwards_in_eval_mode(world):
    torch.manual_seed(0)
    model = Dropping()
    data = points(3, samples=SAMPLES)
    schedule = lower(make_schedule("1f1b", stages=2, microbatches=4))
    pipeline = make_pipeline(
        world, model, cross_entropy, data, schedule, share=lambda value, _: value
    )
    assert pipeline.stages.evaluating is not None
    model.eval()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for count in (3, 2, 3):
        losses = pipeline.evaluate(data[:count])
        expected = {m: cross_entropy(model, data[m]) for m in range(count)}
        assert losses == (expected if world.rank == 1 else {})
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert all(p.grad is None for p in model.parameters())


class Tagger(nn.Module):
    """Recurrent layers over packed sequences, of which each micro-batch has other lengths."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.lower = nn.LSTM(6, 5, batch_first=True)
        self.upper = nn.LSTM(5, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, ids, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embedding(ids), lengths, batch_first=True, enforce_sorted=False
        )
        packed, _ = self.upper(self.lower(packed)[0])
        padded, _ = nn.utils.rnn.pad_packed_sequence(packed, batch_first=True, total_length=7)
        return self.head(padded)


def tagged():
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 20, (24, 7), generator=draw)
    lengths = torch.randint(1, 8, (24,), generator=draw)

    def loss(model, batch):
        inside = torch.arange(7) < batch[1][:, None]
        scores = model(*batch)[inside]
        return nn.functional.cross_entropy(scores, batch[0][inside] % 3, reduction="sum"), (
            inside.sum()
        )

    return Recipe(
        name="tagged", model=Tagger, data=lambda: TensorDataset(ids, lengths), loss=loss,
        optimizer=torch.optim.Adam, batch=12, microbatch=3, stop=4,
    )  # fmt: skip


def test_packed_sequences_stay_within_a_stage():
    (run,) = headway.verify(f"{__name__}:tagged", processes=2, steps=2, overrides=["stages=2"]).runs
    assert run.holds, run.comparison.first
    batch = tuple(tensor[:3] for tensor in tagged().data().tensors)
    with pytest.raises(PlanError, match="a packed sequence would be sent to upper"):
        cut(Tagger(), tagged().loss, batch, at=["upper"])
