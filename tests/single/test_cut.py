"""single: models are cut into stages that compute what the model does and keep its names."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.utils.checkpoint import checkpoint

from headway.errors import PlanError
from headway.parallel import cut, list_units, record_call
from headway.parallel.pipeline.partition.cut import run_stages
from headway.parallel.pipeline.partition.stage_modules import balanced_partition
from headway.workloads.transformer import TransformerConfig, TransformerLM

DATA = (torch.randn(4, 8), torch.randint(4, (4,)))


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def words_loss(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def words(samples=2, length=7):
    return torch.randint(256, (samples, length)), torch.randint(256, (samples, length))


def output(stages, function, data):
    """What the stages make of the call of a loss, one after the other."""
    return run_stages(stages, record_call(function, stages.model, data))


class Three(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.c(self.b(self.a(x)))


class Deep(nn.Module):
    """Two levels below the model, with chains and a ModuleDict between."""

    def __init__(self):
        super().__init__()
        body = nn.Sequential(
            nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True)),
            nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True)),
        )
        self.net = nn.ModuleDict({"body": body, "head": nn.Linear(8, 4)})

    def forward(self, x):
        return self.net["head"](self.net["body"](x))


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Deep()

    def forward(self, x):
        return self.inner(x)


class Skips(Three):
    """A value goes over two cuts."""

    def forward(self, x):
        first = torch.tanh(self.a(x))
        return self.c(torch.tanh(self.b(first)) + first)


class Sizes(Three):
    """Sizes of an activation are used two stages later."""

    def forward(self, x):
        h = self.a(x)
        n, d = h.shape
        h = self.b(h.reshape(n * d // 8, 8)).view(n, d)
        for number in range(len(h.shape)):
            h = h + number
        return self.c(h * torch.ones(n, 1))[:n]


class Tensors(Three):
    """Tensors of every kind beside parameters."""

    def __init__(self):
        super().__init__()
        self.plain = torch.full((8,), 2.0)
        self.register_buffer("saved", torch.full((8,), 3.0))
        self.register_buffer("unsaved", torch.full((8,), 0.5), persistent=False)

    def forward(self, x):
        return self.c(self.b(self.a(x) * self.plain * self.unsaved) * self.saved * self.unsaved)


class Repeated(Three):
    """One module is called four times."""

    def forward(self, x):
        x = self.a(x)
        for _ in range(4):
            x = torch.tanh(self.b(x))
        return self.c(x)


class Direct(Three):
    """Parameters are used without a module's call, one of them twice."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        h = F.linear(self.b(self.a(x)) * self.scale.exp(), self.weight)
        return self.c(h) * self.scale.exp()


class Normed(Three):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.c(self.b(self.norm(self.a(x))))


class Noisy(Three):
    """Random numbers without a module, the same ones in two stages."""

    def forward(self, x):
        noise = torch.randn(8)
        return self.c(self.b(F.dropout(self.a(x), 0.5, self.training) + noise) + noise)


class Checkpointed(Three):
    def forward(self, x):
        h = checkpoint(self.a, x, use_reentrant=False)
        return self.c(torch.utils.checkpoint.checkpoint(self.b, h, use_reentrant=False))


class Masked(Three):
    """A mask of the inputs alone, used by every stage."""

    def forward(self, x):
        mask = (x > 0).to(x.dtype)
        return self.c(self.b(self.a(x) * mask) * mask) * mask.mean()


MODELS = [
    Three, Deep, Wrapped, Skips, Sizes, Tensors, Repeated, Direct, Normed, Noisy, Checkpointed,
    Masked,
]  # fmt: skip


@pytest.mark.parametrize("build", MODELS)
@pytest.mark.parametrize("relay", [False, True])
def test_stages_compute_what_the_model_does(build, relay):
    torch.manual_seed(1)
    model = build()
    stages = cut(model, loss, DATA, stages=3, relay=relay)
    for samples in (4, 6):  # the second: another size than that of the example
        data = (torch.randn(samples, 8), torch.randint(4, (samples,)))
        torch.manual_seed(2)
        expected = model(data[0])
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        torch.manual_seed(2)
        found = output(stages, loss, data)
        assert torch.equal(found, expected)
        for name, buffer in model.named_buffers():
            assert buffer.shape == buffers[name].shape
    assert all(a + 1 == b for a, b in stages.edges) or (build in (Skips, Noisy) and not relay)


@pytest.mark.parametrize("build", MODELS)
def test_the_model_is_left_as_it_was(build):
    model = build()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attributes, generator = set(vars(model)), torch.get_rng_state()
    cut(model, loss, DATA, stages=3)
    assert set(vars(model)) == attributes
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(module.training for module in model.modules())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name


@pytest.mark.parametrize("build", MODELS)
def test_names_and_parameters_are_those_of_the_model(build):
    model = build()
    stages = cut(model, loss, DATA, stages=3)
    whole = model.state_dict(keep_vars=True)
    found = {}
    for stage in stages:
        found |= stage.module.state_dict(keep_vars=True)
    assert found.keys() == whole.keys()
    assert all(found[name] is whole[name] for name in whole)
    named = dict(model.named_parameters())
    assert {n for stage in stages for n in stage.parameters} == set(named)
    assert all(p is named[n] for stage in stages for n, p in stage.parameters.items())


def test_the_transformer_is_a_chain_with_tied_ends():
    config = TransformerConfig(width=16, layers=3, heads=2, window=9)
    model = TransformerLM(config)
    stages = cut(model, words_loss, words(), stages=4)
    assert stages.edges == ((0, 1), (1, 2), (2, 3))
    assert stages.shared == {"tokens.weight": (0, 3)}
    assert stages.evaluating is None
    for length in (3, 9):
        data = words(length=length)
        assert torch.equal(output(stages, words_loss, data), model(data[0]))


def test_cut_at_names():
    model = TransformerLM(TransformerConfig(width=16, layers=4, heads=2))
    stages = cut(model, words_loss, words(), at=["blocks.1", "blocks.3.feed_forward", "norm"])
    assert [stage.calls[0] for stage in stages] == [
        "tokens", "blocks.1", "blocks.3.feed_forward", "norm",
    ]  # fmt: skip
    assert "blocks.2" in stages[1].calls  # no finer than asked for
    assert [s.calls for s in cut(Deep(), loss, DATA, at=["net.*.1"])][1][0] == "net.body.1.0"
    repeated = cut(Repeated(), loss, DATA, at=["b#3"])
    assert [stage.calls for stage in repeated] == [("a", "b", "b"), ("b", "b", "c")]
    assert repeated.shared == {"b.weight": (0, 1), "b.bias": (0, 1)}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["net.bodi"], "calls no module net.bodi; did you mean"),
        (["net.head", "net.body.1"], "net.body.1 is called before"),
        (["net.body.0"], "together with, the stage before"),
    ],
)
def test_names_that_are_no_places_to_cut_at(names, message):
    with pytest.raises(PlanError, match=message) as error:
        cut(Deep(), loss, DATA, at=names)
    assert "net.body.0.0, net.body.0.1, net.body.1.0" in str(error.value)


def test_an_even_cut_goes_by_weights():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)), nn.Linear(8, 4))
    by_size = cut(model, loss, DATA, stages=2)
    assert [len(stage.calls) for stage in by_size] == [3, 3]
    seconds = {"0": 5.0, "1": 1.0, "2": 1.0, "3": 1.0, "4": 1.0, "5": 1.0}
    assert list_units(model, loss, DATA, 2) == tuple(seconds)
    by_time = cut(model, loss, DATA, stages=2, weights=seconds)
    assert [len(stage.calls) for stage in by_time] == [1, 5]


def test_even_parts_are_the_best_of_all():
    draw = torch.Generator().manual_seed(3)
    for count, parts in itertools.product(range(1, 8), range(1, 5)):
        if parts > count:
            with pytest.raises(ValueError, match="do not make"):
                balanced_partition([1.0] * count, parts)
            continue
        weights = torch.randint(9, (count,), generator=draw).double().tolist()
        found = balanced_partition(weights, parts)
        best = min(
            _judged(weights, (0, *starts))
            for starts in itertools.combinations(range(1, count), parts - 1)
        )
        assert _judged(weights, tuple(found)) == best


def _judged(weights, starts):
    ends = (*starts[1:], len(weights))
    sums = [sum(weights[a:b]) for a, b in zip(starts, ends, strict=True)]
    return max(sums), sum(s * s for s in sums)


def test_a_model_that_looks_at_its_mode_has_stages_for_both():
    model = Noisy()
    stages = cut(model, loss, DATA, stages=2)
    assert stages.evaluating is not None
    model.eval()
    torch.manual_seed(4)
    expected = model(DATA[0])
    torch.manual_seed(4)
    assert torch.equal(output(stages.evaluating, loss, DATA), expected)
    assert [s.calls for s in stages.evaluating] == [s.calls for s in stages]


def test_stages_know_what_they_do_to_values():
    class InPlace(Three):
        def forward(self, x):
            h = torch.relu_(self.b(self.a(x)))
            return self.c(h)

    stages = cut(InPlace(), loss, DATA, at=["b"])
    assert [stage.alters for stage in stages] == [False, False]
    altering = cut(Deep(), loss, DATA, at=["net.body.0.1"])
    assert [stage.alters for stage in altering] == [False, True]
    assert [stage.updates for stage in cut(Normed(), loss, DATA, stages=3)] == [False, True, False]


def test_too_few_parts():
    with pytest.raises(PlanError, match="Deep cannot be cut into 4 stages") as error:
        cut(Deep(), loss, DATA, stages=4)
    assert "it has 3 parts with parameters" in str(error.value)
    assert "Use 3 stages or fewer" in str(error.value)


def test_what_a_model_is_called_with():
    """Keywords, dicts, settings and numbers; what it returns."""

    class Batchy(Three):
        def forward(self, batch, *, times, mask=None, deep=True, extra=1):
            h = self.a(batch["x"]) * times
            if mask is not None:
                h = h * mask
            h = self.b(h) if deep else h
            return {"logits": self.c(h), "times": times * extra}

    def function(model, batch, times=3):
        mask = torch.ones(8)
        found = model({"x": batch[0], "y": [batch[1]]}, times=times, mask=mask)
        return F.cross_entropy(found["logits"], batch[1])

    model = Batchy()
    stages = cut(model, function, DATA, stages=3)
    for times in (3, 5):
        expected = model({"x": DATA[0]}, times=times, mask=torch.ones(8))
        found = output(stages, partial(function, times=times), DATA)
        assert found["times"] == times
        assert torch.equal(found["logits"], expected["logits"])
