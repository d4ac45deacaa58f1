"""Judges what was said of a bug, and makes the table of all of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mutations.bugs import Bug
from mutations.runner import Outcome

MOST_CHARACTERS = 240


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A bug, what came of it, and whether that is as the list says."""

    bug: Bug | None
    outcome: Outcome

    @property
    def found(self) -> bool:
        """The numbers were called different; an error or a hang is no verdict on numbers."""
        return self.outcome.verdict == "different"

    @property
    def named(self) -> bool:
        """Found, and the tensor, bucket or law that is wrong was named."""
        return bool(self.found and self.bug and re.search(self.bug.says, self.outcome.said))

    @property
    def right(self) -> bool:
        """As the list has it; without a bug everything must be equal."""
        if self.bug is None:
            return self.outcome.verdict == "equal"
        return not self.named if self.bug.survives else self.named

    def __str__(self) -> str:
        said = self.outcome.said.partition("\n")[0] if self.found else self.outcome.said
        said = said if len(said) <= MOST_CHARACTERS else "..." + said[-MOST_CHARACTERS:]
        words = "as expected" if self.right else "NOT AS EXPECTED"
        if self.bug and self.bug.survives:
            words = "known to survive" if self.right else "IS FOUND NOW: delete `survives`"
        elif self.bug and self.found and not self.named:
            words = f"MISNAMED, expected {self.bug.says!r}"
        name = f"{self.bug.family}: {self.bug.name}" if self.bug else self.outcome.name
        seconds = f"{self.outcome.seconds:.1f} s"
        return f"{words}: {name} ({seconds}): {self.outcome.verdict}  {said}".rstrip()


def table(verdicts: Sequence[Verdict]) -> list[str]:
    """One line per family: bugs, how many were found, how many named rightly, how many survive."""
    lines = [f"{'family':<16}{'bugs':>6}{'found':>7}{'named':>7}{'survive':>9}"]
    families = sorted({v.bug.family for v in verdicts if v.bug})
    for family in [*families, "all"]:
        own = [v for v in verdicts if v.bug and family in (v.bug.family, "all")]
        found, named = sum(v.found for v in own), sum(v.named for v in own)
        lines.append(f"{family:<16}{len(own):>6}{found:>7}{named:>7}{len(own) - found:>9}")
    return lines
