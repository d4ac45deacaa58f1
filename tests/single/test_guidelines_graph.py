"""single: the guidelines' layers from captured models."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headway.capture import capture
from headway.cost.guidelines.das import communication, computation, ratio, ratio_of
from headway.cost.guidelines.model import layers_of
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
        assert ratio(layer, 4) == 1.5 * width * height * 4
    assert sum(computation(layer, 1) for layer in layers) == 3 * graph.flops.forward
    assert sum(computation(layer, 1) for layer in found) == graph.flops.total
    assert round(3 * graph.flops.forward / 1e9, 1) == giga
    assert round(sum(map(communication, layers)) / 1e6, 1) == mega
    assert ratio_of(layers) == pytest.approx(whole, abs=1)


def test_all_layers_with_weights_are_found():
    graph = capture(ResNet50(), meta(2, 3, 64, 64))
    layers = layers_of(graph)
    assert sum(computation(layer, 2) for layer in layers) == graph.flops.total
    assert layers[-1].ofm == 1000
    assert layers[-1].output == (1, 1)
