"""ranks: `headway verify` finds and names planted one-line bugs; others each day.

`make test-mutations` tries all, and the cases without a bug; see tests/mutations/README.md.
"""

from __future__ import annotations

import pytest

from mutations.bugs import read_bugs
from mutations.cases import CASES
from mutations.report import Verdict, table
from mutations.runner import LIMIT, run
from support.patience import patient
from support.sampling import sampled_by_cost

EACH_DAY = 16.0
"""Seconds of one core, by `Case.cost`, however long the list is."""
BUGS = read_bugs()
TODAY = sampled_by_cost(BUGS, EACH_DAY, lambda bug: CASES[bug.case].cost)


@pytest.mark.timeout(len(TODAY) * LIMIT)
def test_the_bugs_of_today_are_found_and_named():
    trials = [(bug, bug.case) for bug in TODAY]
    verdicts = [Verdict(bug=b, outcome=o) for b, o in run(trials, jobs=2, limit=patient(LIMIT))]
    assert len(verdicts) == len(TODAY)
    print("\n".join(table(verdicts)))
    assert not [str(verdict) for verdict in verdicts if not verdict.right]
