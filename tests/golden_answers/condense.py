"""The small version of a recording: `condense.py RECORDING OUT.json [--compare]`.

For each search the chosen plan's degrees, seconds, memory and the frontier's size; the losses of
each history with a checksum of its last parameters; verdicts; programs; codes of errors. With
--compare OUT.json is read and differences are printed; numbers to 1e-9 relative.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

CLASSES = {
    "HW-1000": "HeadwayError", "HW-1001": "UsageError", "HW-1002": "MissingExtra",
    "HW-1003": "RunDirectoryTaken", "HW-1101": "DocumentError", "HW-1201": "RecipeError",
    "HW-1301": "DataError", "HW-2001": "PlanError", "HW-2002": "NothingFits",
    "HW-3001": "RunError", "HW-3002": "Diverged", "HW-3003": "WorkerFailed",
    "HW-3004": "PeerLost", "HW-3101": "CheckpointError", "HW-3102": "CheckpointDamaged",
    "HW-3103": "CheckpointMismatch", "HW-4001": "NotEqual", "HW-5001": "Stalled",
}  # fmt: skip


def of(folder: Path):
    return {p.stem: json.loads(p.read_text()) for p in sorted(folder.glob("*.json"))}


def devices(point):
    """Their number; on a cluster of several types the number of each."""
    return point.get("types") or point["devices"]


def search(case):
    said = case["answer"]
    if "json" not in said:
        code = next((w for line in said["stderr"] for w in line.split() if w[:3] == "HW-"), None)
        return {"command": said["words"], "exit": said["exit"], "code": code}
    tree = said["json"]
    chosen = tree["points"][tree["chosen"]]
    return {
        "command": said["words"],
        "points": len(tree["points"]),
        "degrees": chosen.get("degrees") or chosen["combination"],
        "seconds": chosen["seconds"],
        "bytes": chosen["bytes"],
        "devices": devices(chosen),
        **({"shares": chosen["shares"]} if "shares" in chosen else {}),
        "frontier": [[devices(p), p["seconds"], p["bytes"]] for p in tree["points"]],
    }


def history(case):
    found = {"command": case["answer"]["words"], "exit": case["answer"]["exit"]}
    if "steps" in case:
        tensors = case["parameters"]
        found["losses"] = [step["loss"] for step in case["steps"]]
        found["validation"] = [v["loss"] for v in case["validation"]]
        found["tensors"] = len(tensors)
        found["squares"] = sum(t["squares"] for t in tensors.values())
    return found


def error(case):
    return [
        {"command": said["words"], "exit": said["exit"], "code": said["code"],
         "class": CLASSES.get(said["code"])}
        for key, said in case.items() if key.isdigit()
    ]  # fmt: skip


def program(case):
    if "error" in case:
        return {"error": case["error"]}
    kinds = ("plain", "clipped", "without work", "ragged")
    ranks = [tuple("; ".join(r[kind]) for kind in kinds) for r in case["ranks"].values()]
    found = {"hash": case["hash"], "lacks": len(case["lacking"]), "exact": case["exact"]}
    found["programs"] = [list(one) for one in dict.fromkeys(ranks)]
    if "table" in case:
        found["table"] = hashlib.sha256("\n".join(case["table"]).encode()).hexdigest()[:12]
    return found


def condensed(root: Path):
    programs = of(root / "programs").get("programs", {})
    return {
        "searches": {n: search(c) for n, c in of(root / "searches").items()},
        "histories": {n: history(c) for n, c in of(root / "histories").items()},
        "verify": {n: [e["exit"] for e in error(c)] for n, c in of(root / "verify").items()},
        "errors": {n: error(c) for n, c in of(root / "errors").items()},
        "programs": {n: program(c) for n, c in programs.items()},
    }


def main() -> int:
    root, out = Path(sys.argv[1]), Path(sys.argv[2])
    found = json.loads(json.dumps(condensed(root)))
    if "--compare" not in sys.argv:
        # one line a case
        parts = ",\n".join(
            f'"{part}": {{\n' + ",\n".join(f" {json.dumps(n)}: {json.dumps(c)}" for n, c in v.items())
            + "\n}"
            for part, v in found.items()
        )  # fmt: skip
        out.write_text("{\n" + parts + "\n}\n")
        return 0
    sys.path.insert(0, str(Path(__file__).parent))
    from compare import differences, short

    class Asked:
        numbers, rel = False, 1e-9

    wrong = list(differences(json.loads(out.read_text()), found, "", Asked))
    for where, a, b in wrong:
        print(f"{where}\n   {short(a)}\n   {short(b)}")
    print(f"{len(wrong)} differences")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
