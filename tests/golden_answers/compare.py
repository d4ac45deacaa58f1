"""Differences of two recordings: `compare.py A B [--numbers] [--part P] [--only RE] [--limit N]`.

--numbers: only exit codes, error codes and JSON (answers, plans, losses, tensors, programs); not
prose, standard error or the words of help pages, nor texts inside JSON that are sentences.
--rel X: numbers that differ by less than X relative count as equal (0: all digits).
Exit code 1 where something differs.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

PROSE = {"prose", "stderr", "first", "explain", "text", "words", "done", "hash"}
"""Keys left out with --numbers. `done` (spans of the trace) and `text` have words of the house."""


def is_sentence(text: str) -> bool:
    return len(text.split()) > 3


def differences(a, b, where, asked):
    if type(a) is not type(b) and not (_number(a) and _number(b)):
        yield where, a, b
    elif isinstance(a, dict):
        for key in [*a, *(k for k in b if k not in a)]:
            if asked.numbers and key in PROSE:
                continue
            if key not in a or key not in b:
                yield f"{where}.{key}", a.get(key, "<absent>"), b.get(key, "<absent>")
            else:
                yield from differences(a[key], b[key], f"{where}.{key}", asked)
    elif isinstance(a, list):
        if len(a) != len(b):
            yield f"{where} (length {len(a)} / {len(b)})", a, b
        else:
            for number, (x, y) in enumerate(zip(a, b, strict=True)):
                yield from differences(x, y, f"{where}[{number}]", asked)
    elif isinstance(a, str):
        if a != b and not (asked.numbers and (is_sentence(a) or is_sentence(b))):
            yield where, a, b
    elif _number(a) and not isinstance(a, bool):
        if a != b and not (a != a and b != b):
            if abs(a - b) > asked.rel * max(abs(a), abs(b)):
                yield where, a, b
    elif a != b:
        yield where, a, b


def _number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def short(value):
    text = json.dumps(value)
    return text if len(text) <= 150 else text[:147] + "..."


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("a", type=Path)
    parser.add_argument("b", type=Path)
    parser.add_argument("--numbers", action="store_true")
    parser.add_argument("--part", default="")
    parser.add_argument("--only", default="")
    parser.add_argument("--rel", type=float, default=0.0)
    parser.add_argument("--limit", type=int, default=6, help="differences shown of each case")
    asked = parser.parse_args()
    wanted = set(filter(None, asked.part.split(",")))
    files = {
        path.relative_to(root)
        for root in (asked.a, asked.b)
        for path in root.glob("*/*.json")
        if (not wanted or path.parent.name in wanted) and re.search(asked.only, path.stem)
    }
    same, differ, alone = 0, 0, []
    for name in sorted(files):
        one, other = asked.a / name, asked.b / name
        if not one.exists() or not other.exists():
            alone.append(f"{name} only in {asked.a if one.exists() else asked.b}")
            continue
        x, y = json.loads(one.read_text()), json.loads(other.read_text())
        found = list(differences(x, y, "", asked))
        if not found:
            same += 1
            continue
        differ += 1
        print(f"{name}: {len(found)} differences")
        for where, p, q in found[: asked.limit]:
            print(f"   {where}\n      {short(p)}\n      {short(q)}")
    for line in alone:
        print(line)
    print(f"{same} cases alike, {differ} differ, {len(alone)} in one recording only")
    return int(bool(differ or alone))


if __name__ == "__main__":
    sys.exit(main())
