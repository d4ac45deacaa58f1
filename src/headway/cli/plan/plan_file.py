"""`headway plan show | check | diff`."""

from __future__ import annotations

from pathlib import Path

from headway.cli.terminal.console import say, say_json
from headway.errors import HeadwayError, PlanError
from headway.plans import Plan, explain, plan_difference
from headway.plans.taxonomy import explain_taxonomy


def show(file: Path, /, *, json: bool = False) -> None:
    """Describe a plan: ranks, batch, precision, exchange, and its place in the taxonomy.

    Args:
        json: Print the plan as JSON, with every default and its hash.
    """
    plan = Plan.load(file)
    if json:
        say_json({"hash": plan.hash, "plan": plan.to_dict()})
    else:
        say(f"{explain(plan)}\n{explain_taxonomy(plan)}")


def check(file: Path, /, *more: Path, json: bool = False) -> int:
    """Check that plans are legal; list all problems of each.

    Returns:
        0 where all are legal, else the exit code of the first that is not.
    """
    verdicts: dict[str, HeadwayError | Plan] = {}
    for path in (file, *more):
        # Each file is judged: a broken one does not hide the next.
        try:
            verdicts[str(path)] = Plan.load(path)
        except HeadwayError as error:
            verdicts[str(path)] = error
    if json:
        say_json([_facts(name, verdict) for name, verdict in verdicts.items()])
    else:
        say("\n".join(_line(name, verdict) for name, verdict in verdicts.items()))
    return next((v.exit_code for v in verdicts.values() if isinstance(v, HeadwayError)), 0)


def diff(old: Path, new: Path, /, *, json: bool = False) -> int:
    """List the differences between two plans, one per line.

    Returns:
        0 for equal plans, 1 otherwise, as `diff` does.
    """
    lines = plan_difference(Plan.load(old), Plan.load(new))
    if json:
        say_json({"equal": not lines, "differences": lines})
    else:
        say("\n".join(lines) if lines else "the plans are equal")
    return 1 if lines else 0


def _line(file: str, verdict: HeadwayError | Plan) -> str:
    if isinstance(verdict, Plan):
        return f"{file}: legal; plan {verdict.hash}, {verdict.ranks} ranks"
    problems = verdict.problems if isinstance(verdict, PlanError) else [verdict.why]
    return "\n  ".join([f"{file}: {verdict.what}", *problems])


def _facts(file: str, verdict: HeadwayError | Plan) -> dict[str, object]:
    if isinstance(verdict, Plan):
        return {"file": file, "legal": True, "hash": verdict.hash}
    problems = list(getattr(verdict, "problems", [verdict.why]))
    return {"file": file, "legal": False, "code": verdict.code, "problems": problems}
