"""pure: every error says what, where, why and what to do, crosses processes, and is tested."""

from __future__ import annotations

import ast
import inspect
import pickle
import re
from functools import cache
from pathlib import Path

import pytest

from headway import errors
from headway.errors import DocumentError, HeadwayError, PlanError

TESTS = Path(__file__).parent.parent
CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, HeadwayError)]


def example(kind):
    """An instance with everything that the class can say."""
    legal = inspect.signature(kind.__init__).parameters
    given = {"where": "rank 1, step 7", "why": "3 < 4", "fix": "Use 4."}
    facts = {name: value for name, value in given.items() if name in legal}
    if "problems" in legal:
        facts["problems"] = ["a is 1", "b is 2"]
    return kind("the sum is wrong", **facts)


@cache
def raised_in_tests():
    """Names of classes that stand in a `pytest.raises(...)` of any other test file."""
    found = set()
    for path in TESTS.rglob("test_*.py"):
        if path == Path(__file__):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("raises"):
                for argument in node.args[:1]:
                    found |= {n.id for n in ast.walk(argument) if isinstance(n, ast.Name)}
                    found |= {n.attr for n in ast.walk(argument) if isinstance(n, ast.Attribute)}
    return found


@cache
def codes_in_tests():
    """Error codes that stand in a text of any other test file (errors of another process)."""
    texts = [p.read_text() for p in TESTS.rglob("test_*.py") if p != Path(__file__)]
    return set(re.findall(r"HW-\d{4}", "".join(texts)))


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_is_raised_by_some_test(kind):
    """A class with subclasses counts as raised where one of them is."""
    family = [other for other in CLASSES if issubclass(other, kind)]
    names, codes = raised_in_tests(), codes_in_tests()
    assert any(member.__name__ in names or member.code in codes for member in family)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_the_text_has_everything_that_was_said(kind):
    error = example(kind)
    head, *rest = str(error).splitlines()
    assert head == "rank 1, step 7: the sum is wrong"
    said = [line.strip() for line in rest]
    if isinstance(error, DocumentError | PlanError):
        assert said[:2] == ["a is 1", "b is 2"]
    else:
        assert said == ["3 < 4", "Use 4."]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_an_error_crosses_a_process_border_whole(kind):
    error = example(kind)
    error.step = 7
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind
    assert str(back) == str(error)
    assert vars(back) == vars(error)
    assert back.args == error.args


def test_codes_are_unique_and_exit_codes_are_those_of_the_tree():
    codes = [kind.code for kind in CLASSES]
    assert sorted(codes) == sorted(set(codes))
    tree = dict(re.findall(r"── (\w+) +(\d)  ", inspect.getdoc(errors)))
    assert {kind.__name__: str(kind.exit_code) for kind in CLASSES} == tree | {"HeadwayError": "1"}


def test_the_tree_in_the_docstring_is_the_tree_of_the_classes():
    """The depth of a line is the depth of the class."""
    lines = re.findall(r"^([│├└─ ]*)(\w+) +\d", inspect.getdoc(errors), re.MULTILINE)
    depths = {name: len(indent) // 4 - 1 for indent, name in lines}
    classes = {kind.__name__: len(kind.__mro__) for kind in CLASSES if kind is not HeadwayError}
    above = len(HeadwayError.__mro__)
    assert depths == {name: length - above for name, length in classes.items()}


def test_what_is_not_said_leaves_no_trace():
    assert str(HeadwayError("the sum is wrong")) == "the sum is wrong"
    assert str(HeadwayError("the sum is wrong", fix="Use 4.")) == "the sum is wrong\n  Use 4."


def test_an_error_cannot_be_made_from_nameless_parts():
    with pytest.raises(TypeError):
        HeadwayError("what", "where")
