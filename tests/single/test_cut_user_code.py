"""single: what people write between the modules of a model is followed into stages."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.parallel import cut, record_call
from headway.parallel.pipeline.partition.cut import run_stages

IDS = torch.randint(3, 20, (4, 6), generator=torch.Generator().manual_seed(1))


@dataclass
class Output(OrderedDict):
    """As the outputs of `transformers`: a dataclass, a dict without the fields that are None, and a
    constructor that does something."""

    loss: Any = None
    scores: Any = None
    states: Any = None

    def __post_init__(self):
        for field in fields(self):
            if getattr(self, field.name) is not None:
                super().__setitem__(field.name, getattr(self, field.name))


class Cache:
    """Keys of all blocks, for generation."""

    def __init__(self):
        self.keys = []


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x, mask, cache):
        if cache is not None:
            cache.keys.append(x)
        return x + self.inner(x) * mask[:, :, None]


class Body(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, ids, use_cache=None):
        use_cache = self.config.use_cache if use_cache is None else use_cache
        cache = Cache() if use_cache else None
        mask = (ids != 3).to(self.embedding.weight.dtype)
        # As masks of attention are made: by the numbers of the type.
        floor = torch.finfo(mask.dtype).min
        mask = mask.masked_fill(mask == floor, 0.0)
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, mask, cache)
        return Output(states=x)


class Model(nn.Module):
    """Built like a language model of `transformers`: body, head, loss, labels moved by one."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(use_cache=True)
        self.body = Body(self.config)
        self.head = nn.Linear(8, 20)

    def forward(self, ids, labels=None):
        states = self.body(ids).states
        if not isinstance(states, Tensor) or hasattr(states, "last_hidden_state"):
            raise TypeError("no tensor")
        moved = labels.new_zeros(labels.shape)
        moved[:, :-1] = labels[:, 1:].clone()
        moved[:, -1] = -100
        moved.masked_fill_(moved == 4, -100)
        scores = self.head(states)
        criterion = nn.CrossEntropyLoss()
        return Output(loss=criterion(scores.flatten(0, 1), moved.flatten()), scores=scores)


def loss(model, batch):
    return model(batch, labels=batch).loss


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model().double()


def test_a_model_as_those_of_transformers_is_cut_between_its_blocks(model):
    stages = cut(model, loss, IDS, stages=2)
    blocks = [name for stage in stages for name in stage.calls if ".blocks." in name]
    assert blocks == [f"body.blocks.{number}" for number in range(4)]
    sizes = [sum(p.numel() for p in stage.parameters.values()) for stage in stages]
    assert max(sizes) < 0.65 * sum(sizes)
    assert model.config.use_cache is True  # put back


@pytest.mark.parametrize("count", [2, 4])
def test_the_stages_compute_what_the_model_does_for_other_sizes_too(model, count):
    stages = cut(model, loss, IDS, stages=count)
    for ids in (IDS, IDS[:3, :5], IDS[:1]):
        expected = model(ids, labels=ids)
        found = run_stages(stages, record_call(loss, model, ids))
        assert type(found) is Output
        assert list(found) == list(expected) == ["loss", "scores"]
        assert torch.equal(found["loss"], expected.loss)
        assert found.states is None
        wanted = torch.autograd.grad(expected.loss, list(model.parameters()))
        given = torch.autograd.grad(found.loss, list(model.parameters()))
        for one, other in zip(wanted, given, strict=True):
            assert torch.equal(one, other)


def test_labels_are_moved_by_the_stage_that_needs_them(model):
    stages = cut(model, loss, IDS, stages=2)
    # Only activations cross the border: mask and labels are made of what every rank reads.
    assert len(stages[0].gives) == 1
    before = IDS.clone()
    run_stages(stages, record_call(loss, model, IDS))
    assert torch.equal(IDS, before)


def test_an_element_of_an_activation_is_assigned():
    class Assigning(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x):
            h = self.a(x)
            h[:, 0] = 0
            h[:, 1:3] += 1
            k = self.b(h)
            h.mul_(2)
            return self.c(k + h)

    model, data = Assigning(), torch.randn(4, 8)
    stages = cut(model, lambda m, x: m(x).sum(), data, stages=3)
    found = run_stages(stages, record_call(lambda m, x: m(x), model, data))
    assert torch.equal(found, model(data))


def test_many_sizes_made_of_sizes_are_collected_in_one_pass():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(60))

        def forward(self, x):
            rows = x.shape[0]
            for layer in self.layers:
                x = layer(x).view(rows, 8)
                rows = (rows + x.shape[0]) // 2 + rows - x.shape[0]
            return x

    model, data = Counting(), torch.randn(4, 8)
    # Followed on every way, this would take 2**60 steps.
    assert len(cut(model, lambda m, x: m(x).sum(), data, stages=2)) == 2


def test_the_largest_module_is_opened_until_stages_are_about_even():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
            self.head = nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.encoder(x))

    def wrapped_loss(model, x):
        return F.cross_entropy(model(x).flatten(0, 1), torch.zeros(8, dtype=torch.long))

    stages = cut(Wrapper(), wrapped_loss, torch.randn(2, 4, 8), stages=2)
    assert stages[1].calls == ("encoder.layers.2", "encoder.layers.3", "head")


def test_functions_of_torch_that_also_take_a_number_first():
    """C asks a value whether it is a tensor, and believes it: torch.pow(2, x) is one of these."""

    class Powers(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            x = self.first(x)
            norm = torch.pow(torch.sum(torch.pow(x, 2), dim=-1, keepdim=True), 0.5)
            x = torch.where(x > 0, x, 0.5) / norm if isinstance(x, Tensor) else x
            return self.second(torch.pow(2, x))

    model, data = Powers(), torch.randn(4, 8)
    stages = cut(model, lambda m, x: m(x).sum(), data, stages=2)
    found = run_stages(stages, record_call(lambda m, x: m(x), model, data))
    assert torch.equal(found, model(data))
