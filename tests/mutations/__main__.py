"""`python -m mutations`: verify with each planted bug, and print what was found.

make test-mutations
PYTHONPATH=src:tests python -m mutations --family ddp
PYTHONPATH=src:tests python -m mutations --only "gradients counted twice"
"""

from __future__ import annotations

import argparse
import os
import sys

from mutations.bugs import read_bugs
from mutations.report import Verdict, table
from mutations.runner import LIMIT, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m mutations", description=__doc__)
    parser.add_argument("--family", action="append", help="only bugs of this file")
    parser.add_argument("--only", action="append", help="only bugs whose name contains this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for one bug")
    parser.add_argument("--cases", action="store_true", help="the cases without any bug")
    options = parser.parse_args()
    bugs = [
        bug
        for bug in read_bugs()
        if (not options.family or bug.family in options.family)
        and (not options.only or any(text in bug.name for text in options.only))
    ]
    cases = sorted({bug.case for bug in bugs})
    trials = [] if options.cases else [(bug, bug.case) for bug in bugs]
    if options.cases or not options.only:
        trials = [*((None, case) for case in cases), *trials]
    verdicts = []
    for bug, outcome in run(trials, jobs=options.jobs, limit=options.limit):
        verdict = Verdict(bug=bug, outcome=outcome)
        verdicts.append(verdict)
        print(verdict, flush=True)
    print("\n".join(table(verdicts)))
    return int(any(not verdict.right for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
