"""The chunk size of a pipelined program, found by probing: MIAD.

Multiplicative increase while throughput grows, then additive decrease to the steady point
(Blink, Wang et al. 2020, section 4): small chunks pay their latency each, large ones fill the
pipeline slowly. The next probe is a pure function of the throughputs so far, so that ranks
which are told the same numbers (those of the slowest rank) probe the same sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

FIRST_PROBE_BYTES = 64 * 1024
MOST_PROBES = 12
# What counts as growth.
_RISE = 1.05
# An additive step is this part of the chunk with which the steps began.
_STEP = 8


@dataclass(frozen=True)
class ChunkTuner:
    """The probes so far.

    Attributes:
        smallest: Bytes; no smaller chunk is probed.
        largest: Bytes; no larger one. More than a rank's part of the buffer makes no difference.
        first: Bytes of the first probe.
        measured: (bytes of a chunk, throughput) in order.
    """

    smallest: int = 4 * 1024
    largest: int = 64 * 1024 * 1024
    first: int = FIRST_PROBE_BYTES
    most: int = MOST_PROBES
    measured: tuple[tuple[int, float], ...] = ()

    @property
    def best(self) -> int:
        """The chunk of the highest throughput so far; without any probe the first."""
        return max(self.measured, key=lambda probe: probe[1])[0] if self.measured else self._start

    @property
    def next(self) -> int | None:
        """Bytes of the chunk to be probed now; None: done."""
        if len(self.measured) >= self.most:
            return None
        if not self.measured:
            return self._start
        found = self._multiplied()
        if found is None:
            found = self._stepped()
        # A size that was probed before: the search has come to rest.
        return None if any(found == chunk for chunk, _ in self.measured) else found

    def after(self, throughput: float) -> ChunkTuner:
        """With what the probe of `next` has measured, in any unit.

        Raises:
            ValueError: Nothing was to be probed.
        """
        chunk = self.next
        if chunk is None:
            raise ValueError("the tuner is done: take `best`")
        return replace(self, measured=(*self.measured, (chunk, throughput)))

    @property
    def _start(self) -> int:
        return min(max(self.first, self.smallest), self.largest)

    def _multiplied(self) -> int | None:
        """Twice the last chunk while that helps, else half of the smallest; None: neither helps."""
        up = self._run(2, 1)
        if up is not None:
            return up
        return self._run(1, 2) if self.best <= self._start else None

    def _run(self, times: int, part: int) -> int | None:
        """The next chunk of a geometric row from the first one; None: it has ended."""
        known = dict(self.measured)
        chunk, top, failed = self._start, known[self._start], 0
        while failed < 2:  # one probe that fails may be chance
            chunk = chunk * times // part
            if not self.smallest <= chunk <= self.largest:
                return None
            if chunk not in known:
                return chunk
            failed = 0 if known[chunk] > top * _RISE else failed + 1
            top = max(top, known[chunk])
        return None

    def _stepped(self) -> int | None:
        """The best chunk less an eighth of the chunk from which the steps began, while it helps."""
        known, rows = dict(self.measured), {self._start}
        for factor in (2.0, 0.5):
            rows |= {int(self._start * factor**k) for k in range(self.most)}
        base = max((c for c in known if c in rows), key=known.__getitem__)
        for number in range(1, _STEP // 2):  # half of the base belongs to the row
            before, chunk = base - (number - 1) * base // _STEP, base - number * base // _STEP
            if chunk < self.smallest:
                return None
            if chunk not in known:
                return chunk
            if known[chunk] <= known[before]:
                return None
        return None
