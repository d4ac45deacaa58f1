"""The weight of the next layer is gathered while this one computes.

Which layer is next is what came next in the pass before. Invariant: a gathered weight is used only
if the weight has not changed since; all ranks start the same gathers in the same order.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from headway.parallel.tensor.grid import Grid, Pending


class Ahead:
    """Gathers under way, of weights by name.

    Args:
        grid: The ranks; weights are gathered along i.
        local: Name -> this rank's part of the weight, as it is now.
    """

    def __init__(self, grid: Grid, local: Callable[[str], Tensor]) -> None:
        self._grid, self._local = grid, local
        self._coming: dict[str, tuple[int, Pending]] = {}
        self._next: dict[tuple[str, bool], str] = {}
        self._last: dict[bool, str] = {}

    def begin(self) -> None:
        """A forward pass of the model begins: no layer comes before its first."""
        self._last.clear()

    def gather(self, name: str, weight: Tensor, *, backward: bool) -> Pending:
        """The whole weight of a layer; the one that followed the last time is started as well."""
        version, found = self._coming.pop(name, (-1, None))
        if found is None or version != weight._version:
            found = self._grid.gather(weight, "i")
        last = self._last.get(backward)
        if last is not None:
            self._next[last, backward] = name
        self._last[backward] = name
        following = self._next.get((name, backward))
        if following is not None and following not in self._coming:
            part = self._local(following)
            self._coming[following] = part._version, self._grid.gather(part, "i")
        return found
