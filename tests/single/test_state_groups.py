"""single: which modules are gathered by themselves where a model's state is kept in parts."""

from __future__ import annotations

from torch import nn

from headway.parallel.fsdp import fsdp_units


def layers(number, width=8):
    return [nn.Linear(width, width) for _ in range(number)]


def test_of_a_thousand_equal_layers_each_is_a_group():
    model = nn.Sequential(*layers(1000))
    assert fsdp_units(model) == list(model)


def test_what_is_small_beside_the_others_is_not_a_group():
    model = nn.ModuleList([*layers(2, 100), *layers(1, 2)])
    assert fsdp_units(model) == list(model)[:2]


def test_what_is_outside_of_lists_is_not_a_group():
    model = nn.Module()
    model.head, model.blocks = nn.Linear(8, 8), nn.ModuleList(layers(300))
    assert fsdp_units(model) == list(model.blocks)


def test_what_shares_parameters_is_not_a_group():
    first, second, third = layers(3)
    second.weight = first.weight
    assert fsdp_units(nn.ModuleList([first, second, third])) == [third]
