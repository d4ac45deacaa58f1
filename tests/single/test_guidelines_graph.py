"""single: the guidelines' layers from captured models."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from headway.capture import capture
from headway.graph.operator_fusion import fuse_light_operators
from headway.planner.guidelines.layer_parallelism import (
    communication,
    computation,
    layers_of,
    ratio_of,
)
from support.big_models import OVERFEAT_FAST, VGG_A, ResNet50, meta, plain_convolutions


@pytest.mark.parametrize(
    ("channels", "size", "giga", "mega", "whole"),
    [(VGG_A, 224, 44.9, 36.9, 1218), (OVERFEAT_FAST, 231, 16.0, 63.9, 251)],
)
def test_ratio_and_totals_of_the_papers_networks(channels, size, giga, mega, whole):
    graph = capture(plain_convolutions(channels), meta(1, 3, size, size))
    found = layers_of(graph)
    assert [layer.first for layer in found] == [True] + [False] * (len(found) - 1)
    layers = [replace(layer, first=False) for layer in found]
    for layer in layers:
        width, height = layer.output
        assert ratio_of([layer], 4) == 1.5 * width * height * 4
    assert sum(computation(layer, 1) for layer in layers) == 3 * graph.flops.forward
    assert sum(computation(layer, 1) for layer in found) == graph.flops.total
    assert round(3 * graph.flops.forward / 1e9, 1) == giga
    assert round(sum(map(communication, layers)) / 1e6, 1) == mega
    assert ratio_of(layers) == pytest.approx(whole, abs=1)


@pytest.mark.slow
def test_all_layers_with_weights_are_found():
    graph = capture(ResNet50(), meta(2, 3, 64, 64))
    layers = layers_of(graph)
    assert sum(computation(layer, 2) for layer in layers) == graph.flops.total
    folded = layers_of(fuse_light_operators(graph))
    assert sum(computation(layer, 2) for layer in folded) == graph.flops.total
    assert [layer.input for layer in folded] == [layer.input for layer in layers]
    assert layers[-1].ofm == 1000
    assert layers[-1].output == (1, 1)


def test_what_is_folded_in_front_of_a_layer_changes_no_volume():
    class Squared(nn.Module):
        def forward(self, x):
            return torch.relu(x).square()

    graph = capture(nn.Sequential(nn.Linear(3, 4), Squared(), nn.Linear(4, 5)), meta(2, 3))
    folded = fuse_light_operators(graph)
    assert "relu.self" in folded.operators[-1].roles
    assert layers_of(folded) == layers_of(graph)


class Heads(nn.Module):
    """Its products are folded with views of other shapes: heads in front, samples and positions
    in one dimension, a map as a sequence."""

    def __init__(self):
        super().__init__()
        self.stem, self.qkv, self.out = nn.Conv2d(3, 8, 2, 2), nn.Linear(8, 24), nn.Linear(8, 5)

    def forward(self, x):
        x = self.stem(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(x).view(len(x), -1, 3, 2, 4).permute(2, 0, 3, 1, 4)
        x = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(x.transpose(1, 2).flatten(2)).flatten(0, 1)


def test_positions_are_those_of_the_product_whatever_shape_it_leaves():
    graph = capture(Heads(), meta(6, 3, 8, 10))
    folded = fuse_light_operators(graph)
    assert folded.specs(next(o for o in folded.operators if o.module == "out"))[1][0].shape[0] > 6
    for found in (layers_of(graph), layers_of(folded)):
        assert [layer.weights for layer in found] == [96, 8 * 24, 8 * 5]
        assert [math.prod(layer.output) for layer in found] == [4 * 5] * 3
        assert [math.prod(layer.input) for layer in found] == [8 * 10, 4 * 5, 4 * 5]
        attention = next(o for o in graph.operators if "attention" in o.kind)
        whole = sum(computation(layer, 6) for layer in found)
        assert whole == graph.flops.total - attention.flops.total
