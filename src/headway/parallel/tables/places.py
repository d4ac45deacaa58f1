"""Places in a flattened sample: a range, or int64 numbers in any order; where functions take them.

What a function of torch does to places, it is asked itself: it is given the numbers of the places
in their own shape, and what comes out says from where each entry of the result is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

Places = range | Tensor


def numbers_of(places: Places) -> Tensor:
    """int64 [places]."""
    return torch.arange(places.start, places.stop) if isinstance(places, range) else places


def compact(numbers: Tensor) -> Places:
    """As a range, if they are one."""
    count = len(numbers)
    if not count:
        return range(0)
    first = int(numbers[0])
    if int(numbers[-1]) - first == count - 1 and bool((numbers.diff() == 1).all()):
        return range(first, first + count)
    return numbers


def same_places(first: Places, second: Places) -> bool:
    if isinstance(first, range) and isinstance(second, range):
        return first == second
    return torch.equal(numbers_of(first), numbers_of(second))


def entries_at(x: Tensor, places: Places) -> Tensor:
    """Of [samples, entries] those at some places."""
    if isinstance(places, range):
        return x[:, places.start : places.stop]
    return x.index_select(1, places.to(x.device))


def add_at(x: Tensor, places: Places, part: Tensor) -> None:
    """Add to [samples, entries] in place."""
    if isinstance(places, range):
        x[:, places.start : places.stop] += part
    else:
        x.index_add_(1, places.to(x.device), part)


def put_at(x: Tensor, places: Places, part: Tensor) -> None:
    """Write into [samples, entries]."""
    if isinstance(places, range):
        x[:, places.start : places.stop] = part
    else:
        x.index_copy_(1, places.to(x.device), part)


def probe(shape: Sequence[int]) -> Tensor:
    """One sample of this shape with the numbers of its places [1, *shape]."""
    return torch.arange(prod(shape)).view(1, *shape)


def asked_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a function of torch does to probes; only one that leaves samples apart."""
    with torch.no_grad():
        return function(*args, **kwargs)


def picked(places: Places, source: Tensor, size: int) -> tuple[Places, Tensor | None]:
    """Where entries that are taken from `places` come to lie.

    Args:
        source: For each entry of a result, the place it is taken from.
        size: Places there are.

    Returns:
        Places in the result, and for each of these its number among `places`; None: all, in order.
    """
    number = torch.full((size,), -1)
    listed = numbers_of(places)
    number[listed] = torch.arange(len(listed))
    taken = number[source]
    found = (taken >= 0).nonzero().squeeze(1)
    taken = taken[found]
    whole = len(taken) == len(listed) and bool((taken == torch.arange(len(listed))).all())
    return compact(found), None if whole else taken
