"""pure: each planted bug of the mutation suite still fits the sources that it is about."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from mutations.bugs import FOLDERS, HERE, changed_lines, read_bugs

BUGS = read_bugs()
LEAST = 150


def test_there_are_enough_of_them_in_every_folder():
    assert len(BUGS) >= LEAST
    folders = Counter(Path(bug.file).parts[0] for bug in BUGS)
    assert not set(FOLDERS) - set(folders)


def test_every_old_text_occurs_once_and_every_new_one_differs_in_a_line():
    """One that is no longer in the sources is to be planted anew where its line has gone."""
    wrong = [f"{bug.family}: {bug.name}: {'; '.join(p)}" for bug in BUGS if (p := bug.problems())]
    assert not wrong, "\n".join(wrong)


def test_every_case_of_a_bug_is_defined():
    text = "\n".join(p.read_text(encoding="utf-8") for p in HERE.glob("*cases.py"))
    defined = set(re.findall(r"^@case\(.*\)\ndef (\w+)\(\) -> Recipe:$", text, re.MULTILINE))
    assert {bug.case for bug in BUGS} <= defined


def test_no_bug_is_planted_twice():
    planted = Counter((bug.file, bug.source(), bug.case) for bug in BUGS)
    assert max(planted.values()) == 1


@pytest.mark.parametrize(
    ("new", "lines"),
    [("a\nb\nc", 0), ("a\nx\nc", 1), ("a\nc", 1), ("a\nb\nx\nc", 1), ("x\nb\ny", 2)],
)
def test_changed_lines_are_counted(new, lines):
    assert changed_lines("a\nb\nc", new) == lines


def test_a_list_with_a_mistyped_key_or_a_name_twice_is_refused(tmp_path):
    entry = '[[bug]]\nname = "n"\nfile = "f"\nold = "o"\nnew = "p"\ncase = "c"\nsays = "s"\n'
    for content, said in (
        (entry + 'oldd = "x"\n', "unknown oldd"),
        (entry.replace('says = "s"\n', ""), "without says"),
        (entry + entry, "the name stands twice"),
    ):
        (tmp_path / "some.toml").write_text(content)
        with pytest.raises(ValueError, match=said):
            read_bugs(tmp_path)
