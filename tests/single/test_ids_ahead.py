"""single: where in a batch the ids of tables come from is found out from one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headway.parallel.tables.ids_ahead import IdsAhead


class Two(nn.Module):
    def __init__(self, ids: Callable[[Any], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.one, self.other = nn.EmbeddingBag(100, 2), nn.Embedding(100, 2)
        self.ids = ids

    def forward(self, data: Any) -> Tensor:
        one, other = self.ids(data)
        found: Tensor = self.one(one).sum() + self.other(other).sum()
        return found


def data(seed: int, samples: int = 12) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "wide": torch.randint(40, (samples, 3), generator=draw),
        "parts": [torch.randint(40, (4, samples, 2), generator=draw).int(), torch.rand(samples)],
    }


OFFSETS = torch.tensor([0, 20, 50])

CASES: dict[str, Callable[[Any], tuple[Tensor, Tensor]]] = {
    "as they are": lambda d: (d["wide"], d["parts"][0].reshape(-1, 2)),
    "a column, a row": lambda d: (d["wide"][:, 1:2], d["parts"][0][2]),
    "of another type": lambda d: (d["wide"].int(), d["parts"][0][:, :, 1].long().clone()),
    "with beginnings of fields": lambda d: (d["wide"] + OFFSETS, d["wide"].clone()),
}


@pytest.mark.parametrize("case", CASES)
def test_ids_of_the_next_batch_are_known(case: str) -> None:
    model = Two(CASES[case])
    ahead = IdsAhead({"one": [model.one], "other": [model.other]})
    model(data(0))
    assert ahead.is_learning
    assert ahead.learn([data(0)]) == []
    assert not ahead.is_learning
    for samples in (12, 5):
        following = data(1, samples)
        found = ahead.ids_of([following])
        for name, ids in zip(("one", "other"), CASES[case](following), strict=True):
            assert found[name].tolist() == ids.reshape(-1).tolist()


def test_ids_that_are_not_in_the_batch_are_named() -> None:
    model = Two(lambda d: (d["wide"].square() % 97, d["wide"]))
    ahead = IdsAhead({"one": [model.one], "other": [model.other]})
    model(data(0))
    assert ahead.learn([data(0)]) == ["one"]
    assert list(ahead.ids_of([data(1)])) == ["other"]


def test_a_module_that_is_called_several_times_has_several_sources() -> None:
    model = Two(lambda d: (d["wide"], d["wide"][:, 0]))
    ahead = IdsAhead({"one": [model.one, model.other]})
    model(data(0))
    ahead.learn([data(0)])
    wide = data(1)["wide"]
    assert ahead.ids_of([data(1)])["one"].tolist() == wide.flatten().tolist() + wide[:, 0].tolist()


def test_ids_of_which_some_are_replaced_are_still_known() -> None:
    model = Two(lambda d: (d["wide"].clamp(min=1), d["wide"]))
    ahead = IdsAhead({"one": [model.one]})
    model(data(0))
    assert ahead.learn([data(0)]) == []
