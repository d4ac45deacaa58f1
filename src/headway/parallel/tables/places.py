"""Places in a flattened sample: a range, or int64 numbers in any order; where functions take them.

What a function of torch does to places, it is asked itself: it is given the numbers of the places
in their own shape, and what comes out says from where each entry of the result is. All of it
follows from shapes, so that each step after the first finds it in a cache; a tensor of numbers is
the same object then, and nobody changes one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

Places = range | Tensor


_MOST = 4096
"""Results that are kept of each function."""


@lru_cache(_MOST)
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


@lru_cache(_MOST)
def same_places(first: Places, second: Places) -> bool:
    if isinstance(first, range) and isinstance(second, range):
        return first == second
    return torch.equal(numbers_of(first), numbers_of(second))


@lru_cache(_MOST)
def content_of(places: Places) -> range | tuple[int, ...]:
    """Places as something that is equal where they are."""
    return places if isinstance(places, range) else tuple(places.tolist())


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


@lru_cache(_MOST)
def are_apart(size: int, places: tuple[Places, ...]) -> bool:
    """Whether these are all places, each once."""
    if sum(map(len, places)) != size:
        return False
    return len(torch.unique(torch.cat([numbers_of(each) for each in places]))) == size


@lru_cache(_MOST)
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


@lru_cache(_MOST)
def joined(tails: tuple[tuple[int, ...], ...], dim: int, stacked: bool) -> tuple[Tensor, Tensor]:
    """Samples of these shapes next to each other.

    Returns:
        A probe of the result, in which they are numbered one behind the other, and for each number
        its place.
    """
    sizes = [prod(tail) for tail in tails]
    probes = [probe(tail) + sum(sizes[:number]) for number, tail in enumerate(tails)]
    source = torch.stack(probes, dim) if stacked else torch.cat(probes, dim)
    place_of = torch.empty(sum(sizes), dtype=torch.int64)
    place_of[source.reshape(-1)] = torch.arange(sum(sizes))
    return source, place_of


@lru_cache(_MOST)
def carried(places: Places, place_of: Tensor, begin: int) -> Places:
    """Where places come to lie that are numbered from `begin` on."""
    return compact(place_of[numbers_of(places) + begin])


@lru_cache(_MOST)
def sum_targets(
    tail: tuple[int, ...], dims: frozenset[int], keepdim: bool
) -> tuple[Tensor, list[int]]:
    """For each place of a sample that of its sum over some dimensions (1 is the first), and what
    shape a sample has then."""
    kept = [1 if d + 1 in dims else n for d, n in enumerate(tail)]
    target = probe(kept).expand(1, *tail).reshape(-1)
    return target, kept if keepdim else [n for d, n in enumerate(tail) if d + 1 not in dims]


@lru_cache(_MOST)
def sums_at(places: Places, target: Tensor) -> tuple[Places, Tensor | None, bool]:
    """Where the entries at places are added up.

    Returns:
        The places of the sums; for each entry the number of its sum, or, where no two come
        together, for each sum the number of its entry (None: in this order); and whether two do.
    """
    into = target[numbers_of(places)]
    found, inverse = torch.unique(into, return_inverse=True)
    if len(found) < len(into):
        return compact(found), inverse, True
    order = into.argsort()
    in_order = bool((order == torch.arange(len(into))).all())
    return compact(found), None if in_order else order, False


@lru_cache(_MOST)
def in_order(places: tuple[Places, ...]) -> Tensor | None:
    """By which entries at several places, side by side, come into order; None: they are."""
    order = torch.cat([numbers_of(each) for each in places]).argsort()
    return None if bool((order == torch.arange(len(order))).all()) else order


@lru_cache(_MOST)
def at_owners(
    places: tuple[Places, ...], owners: tuple[int, ...], columns: int, by_row: bool, ranks: int
) -> tuple[tuple[Places, ...], tuple[Places, ...]]:
    """What goes to the owner of the row, or of the column, in which it is.

    Args:
        places: Of entries side by side, in samples of so many columns.
        owners: Of each row, or of each column.

    Returns:
        By rank, the numbers of the entries that it wants, and their places.
    """
    where = torch.cat([numbers_of(each) for each in places])
    met = torch.tensor(owners)[where // columns if by_row else where % columns]
    wanted = [(met == rank).nonzero().squeeze(1) for rank in range(ranks)]
    return tuple(compact(n) for n in wanted), tuple(compact(where[n]) for n in wanted)


@lru_cache(_MOST)
def owners_of(
    blocks: tuple[tuple[int, Places], ...], columns: int, by_row: bool, own: int
) -> tuple[frozenset[int], ...]:
    """Of each row, or of each column, the ranks that have something of it."""
    found: dict[int, set[int]] = {}
    for owner, places in blocks:
        numbers = numbers_of(places)
        for number in torch.unique(numbers // columns if by_row else numbers % columns).tolist():
            found.setdefault(number, set()).update({owner} - {own})
    return tuple(frozenset(found[number]) for number in sorted(found))
