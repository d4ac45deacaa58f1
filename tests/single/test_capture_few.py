"""single: a model captured with four blocks of each stack has the graph of the whole model."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from headway.capture import block_stacks, capture, model_capture
from headway.workloads.transformer import TransformerConfig, TransformerLM
from support.big_models import Encoder, ResNet50, UNet, ids, meta
from support.sampling import sampled

BLOCKS = 9


class Block(nn.Module):
    def __init__(self, width=8, scale=1.0):
        super().__init__()
        self.one = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.scale = scale
        self.number = 0

    def forward(self, x, mask=None):
        y = self.norm(self.one(x)).relu() * self.scale
        return y if mask is None else y * mask


class Stacked(nn.Module):
    """A stem, blocks as `way` calls them, a head."""

    def __init__(self, way, blocks=None):
        super().__init__()
        self.head = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS)) if blocks is None else blocks
        self.stem = nn.Linear(8, 8)
        self.way = way
        self.calls = 0

    def forward(self, x):
        return self.head(self.way(self, self.stem(x)))


def plainly(self, x):
    for block in self.blocks:
        x = block(x)
    return x


def with_a_shared_mask(self, x):
    mask = torch.ones(4, 1) * 2
    for block in self.blocks:
        x = x + block(x, mask=mask.exp())
    return x


def from_the_first_one(self, x):
    first = x = self.blocks[0](x)
    for block in self.blocks[1:]:
        x = block(x + first)
    return x


def special_ends(self, x):
    for number, block in enumerate(self.blocks):
        x = block(x * 3 if number == 0 else x)
    return x.exp() * self.blocks[-1].one.weight.sum()


def sums_on_the_way(self, x):
    total = x.sum()
    for block in self.blocks:
        x = block(x)
        total = total + x.square().mean()
    return x * total


def in_place(self, x):
    for block in self.blocks:
        x = block(x)
        x += 1
    return x


def recomputed(self, x):
    for block in self.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def special_fifth(self, x):
    for number, block in enumerate(self.blocks):
        x = block(x * 3 if number == 5 else x)
    return x


def by_number_of_blocks(self, x):
    for block in self.blocks:
        x = block(x) / len(self.blocks)
    return x


def scaled_inside(self, x):
    for block in self.blocks:
        x = block(x, mask=1 / len(self.blocks))
    return x


def skips_across(self, x):
    kept = []
    for number, block in enumerate(self.blocks):
        kept.append(x)
        x = block(x + kept[number // 2])
    return x


def two_back(self, x):
    before = x
    for block in self.blocks:
        before, x = x, block(x + before)
    return x


def all_together(self, x):
    kept = []
    for block in self.blocks:
        x = block(x)
        kept.append(x)
    return torch.stack(kept).sum(0)


def from_the_middle(self, x):
    kept = []
    for block in self.blocks:
        x = block(x)
        kept.append(x)
    return x + kept[len(kept) // 2]


def every_other(self, x):
    for block in self.blocks[::2]:
        x = block(x)
    return x


def backwards(self, x):
    for block in reversed(self.blocks):
        x = block(x)
    return x


def twice(self, x):
    return plainly(self, plainly(self, x))


def not_as_modules(self, x):
    for block in self.blocks:
        x = block.one(x)
    return x


def frozen_at_first(self, x):
    for number, block in enumerate(self.blocks):
        with torch.set_grad_enabled(number > 5):
            x = block(x)
    return x


def counted(self, x):
    for block in self.blocks:
        self.calls += 1
        x = block(x) * (2 if self.calls > 2 * BLOCKS else 1)
    return x


def kept_for_later(self, x):
    if not hasattr(self, "mask"):
        self.mask = x.exp()
    return plainly(self, x) * self.mask


def marked(self, x):
    for number, block in enumerate(self.blocks):
        block.number = number
        x = block(x)
    return x


def weights_of_the_middle(self, x):
    return plainly(self, x) @ self.blocks[4].one.weight


def numbered():
    blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
    for number, block in enumerate(blocks):
        block.number = number
    return blocks


def tied():
    blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
    blocks[7].one.weight = blocks[3].one.weight
    return blocks


class InARow(nn.Sequential):
    """Blocks between others in one container."""

    def __init__(self):
        fifth = [Block(scale=2.0 if n == 5 else 1.0) for n in range(18)]
        super().__init__(nn.Linear(8, 8), *fifth, nn.Linear(8, 8), nn.ReLU(), Stacked(plainly))


class Translator(nn.Module):
    """Two stacks, the second registered first; all of its blocks read the end of the other."""

    def __init__(self):
        super().__init__()
        self.decoder = nn.ModuleList(Block() for _ in range(BLOCKS + 2))
        self.encoder = nn.ModuleList(nn.Linear(8, 8) for _ in range(BLOCKS))

    def forward(self, x):
        memory = x
        for layer in self.encoder:
            memory = layer(memory).relu()
        for block in self.decoder:
            x = block(x, mask=memory)
        return x + memory


GPT = TransformerConfig(vocabulary=512, window=16, width=16, layers=11, heads=2, dropout=0.1)
ALIKE = {
    "gpt": (lambda: TransformerLM(GPT), ids(2, 16)),
    "bert": (lambda: Encoder(BLOCKS), (ids(2, 32), meta(2, 32, dtype=torch.bool))),
    "row": (InARow, meta(4, 8)),
    "translator": (Translator, meta(4, 8)),
} | {
    way.__name__: (lambda way=way: Stacked(way), meta(4, 8))
    for way in (
        plainly, with_a_shared_mask, from_the_first_one, special_ends, sums_on_the_way, in_place,
        recomputed, two_back,
    )
}  # fmt: skip
OTHERS = {
    "unet": (UNet, meta(2, 3, 64, 64)),
    "resnet": (ResNet50, meta(2, 3, 64, 64)),
    "one block": (lambda: Stacked(plainly, nn.ModuleList([Block()] * BLOCKS)), meta(4, 8)),
    "numbered": (lambda: Stacked(plainly, numbered()), meta(4, 8)),
    "tied": (lambda: Stacked(plainly, tied()), meta(4, 8)),
} | {
    way.__name__: (lambda way=way: Stacked(way), meta(4, 8))
    for way in (
        special_fifth, by_number_of_blocks, scaled_inside, skips_across, all_together,
        from_the_middle, every_other, backwards, twice, not_as_modules, frozen_at_first, counted,
        kept_for_later, marked, weights_of_the_middle,
    )
}  # fmt: skip


def both(case, monkeypatch):
    """(file of the graph, that without the short way, whether the short way was taken)."""
    make, example = case
    with torch.device("meta"):
        model = make()
    taken = []
    short = block_stacks.capture_by_blocks
    monkeypatch.setattr(
        model_capture, "capture_by_blocks", lambda *args: taken.append(short(*args)) or taken[-1]
    )
    found = capture(model, example)
    monkeypatch.setattr(model_capture, "capture_by_blocks", lambda *_: None)
    return found.to_json(), capture(model, example).to_json(), taken[0] is not None


@pytest.mark.parametrize("name", sampled([*ALIKE], 4))
def test_four_blocks_stand_for_all(name, monkeypatch):
    found, whole, taken = both(ALIKE[name], monkeypatch)
    assert taken
    assert found == whole


@pytest.mark.parametrize("name", sampled([*OTHERS], 5))
def test_blocks_that_are_not_treated_alike(name, monkeypatch):
    found, whole, taken = both(OTHERS[name], monkeypatch)
    assert not taken
    assert found == whole


def test_the_model_stays_as_it_is():
    with torch.device("meta"):
        model = Stacked(with_a_shared_mask)
    before = {name: dict(vars(inner)) for name, inner in model.named_modules()}
    held = list(model.parameters())
    capture(model, meta(4, 8))
    assert {name: dict(vars(inner)) for name, inner in model.named_modules()} == before
    assert all(a is b for a, b in zip(model.parameters(), held, strict=True))
