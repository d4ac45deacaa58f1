"""pure: files become types; every problem is one line with its place and what to write instead."""

from __future__ import annotations

import json
from dataclasses import field
from typing import Any, Literal

import pytest

from headway.documents import document, find_line, nearest, read_document, to_type
from headway.errors import DocumentError


@document
class Link:
    rate: float
    name: str = "link"


@document
class Node:
    cores: int
    links: tuple[Link, ...] = ()
    fast: bool = False
    kind: Literal["cpu", "gpu"] = "cpu"
    main: Link | None = None


@document
class Cluster:
    name: str
    size: int | str = 1
    node: Node | None = None
    nodes: dict[str, Node] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


def problems(tmp_path, text, suffix=".toml", kind=Cluster):
    """The problems of a file, each without the path of the file."""
    path = tmp_path / f"file{suffix}"
    path.write_text(text)
    with pytest.raises(DocumentError) as caught:
        read_document(path, kind)
    assert str(caught.value).startswith(f"{path}: ")
    return [line.removeprefix(str(path)) for line in caught.value.problems]


def test_a_good_file_becomes_the_type(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(
        'name = "a"\nsize = 4\n[node]\ncores = 2\nlinks = [{rate = 1}, {rate = 2.5, name = "b"}]\n'
        "[nodes.left]\ncores = 1\nfast = true\n[extra]\nday = 2026-01-01\n"
    )
    with pytest.raises(AttributeError):
        read_document(path, Cluster).name = "b"  # frozen
    cluster = read_document(path, Cluster)
    assert cluster.node == Node(cores=2, links=(Link(rate=1.0), Link(rate=2.5, name="b")))
    assert cluster.nodes == {"left": Node(cores=1, fast=True)}
    assert str(cluster.extra["day"]) == "2026-01-01"


def test_all_problems_come_at_once_with_line_and_key(tmp_path):
    found = problems(
        tmp_path,
        'nmae = "a"\n'
        "size = 1.5\n"
        "# [node] in a comment is no header\n"
        "[node]\n"
        'cores = "2"\n'
        "fast = 1\n"
        'kind = "tpu"\n'
        "links = [\n"
        '  {rate = "quick"},\n'
        "]\n"
        "[nodes.left]\n"
        "coers = 3\n",
    )
    assert found == [
        "  missing key name",
        ":1  unknown key nmae; did you mean name?",
        ":2  size: 1.5 is not a whole number or a text",
        ':5  node.cores: "2" is not a whole number',
        ":6  node.fast: 1 is not true or false",
        ":7  node.kind: \"tpu\" is not 'cpu' or 'gpu'",
        ':8  node.links.0.rate: "quick" is not a number',
        ":11  missing key nodes.left.cores",
        ":12  unknown key nodes.left.coers; did you mean cores?",
    ]


@pytest.mark.parametrize("value", ["5.0", "true", '"5"', "[5]", "{}", "2026-01-01"])
def test_nothing_becomes_a_whole_number_in_silence(tmp_path, value):
    assert len(problems(tmp_path, f"cores = {value}\n", kind=Node)) == 1


@pytest.mark.parametrize("value", ["{}", "1.5", "[1]", "null"])
def test_a_choice_of_types_is_one_problem_of_its_own_key(tmp_path, value):
    assert problems(tmp_path, f'{{"name": "a", "size": {value}}}', ".json") == [
        f":1  size: {value} is not a whole number or a text"
    ]


def test_unknown_keys_name_legal_keys_at_every_depth(tmp_path):
    text = {
        "name": "a",
        "zzz": 1,
        "node": {"cores": 1, "main": {"rate": 1, "nmae": "x"}, "links": [{"rate": 1, "rat": 2}]},
        "nodes": {"name": {"cores": 1, "corse": 2}},
    }
    assert problems(tmp_path, json.dumps(text), ".json") == [
        ":1  unknown key node.links.0.rat; did you mean rate?",
        ":1  unknown key node.main.nmae; did you mean name?",
        ":1  unknown key nodes.name.corse; did you mean cores?",
        ":1  unknown key zzz; legal: extra, name, node, nodes, size",
    ]


def test_json_lines_are_those_of_the_key_and_not_of_its_namesake(tmp_path):
    text = """{
  "name": "cores: 7 }",
  "extra": {"cores": "not this one", "list": [1, [2, 3], {"cores": 4}]},
  "nodes": {
    "left": {"cores": 1},
    "right": {
      "links": [
        {"rate": 1},
        {"name": "b",
         "rate": "quick"}
      ],
      "cores": null
    }
  }
}
"""
    assert problems(tmp_path, text, ".json") == [
        ':10  nodes.right.links.1.rate: "quick" is not a number',
        ":12  nodes.right.cores: null is not a whole number",
    ]


def test_toml_lines_of_tables_lists_of_tables_and_texts():
    text = '''name = "a"
"quoted.key" = 1
a.b.c = 2
note = """
cores = 3
[fake]
"""
[node]
cores = 4
[[node.links]]
rate = 1
[[node.links]]
rate = 2
[node.links.inner]
deep = 3
'''
    lines = {
        "name": 1,
        "a": 3,
        "a.b.c": 3,
        "note": 4,
        "node": 8,
        "node.cores": 9,
        "node.missing": 8,
        "node.links.0.rate": 11,
        "node.links.1.rate": 13,
        "node.links.1.inner.deep": 15,
    }
    assert {key: find_line(text, key.split(".")) for key in lines} == lines
    assert find_line(text, ["quoted.key"]) == 2
    assert find_line(text, ["cores"]) is None
    assert find_line(text, ["fake"]) is None
    assert find_line("", ["name"]) is None


@pytest.mark.parametrize(
    ("suffix", "text", "hint"),
    [
        (".toml", "name = \n", "at line 1"),
        (".json", '{"name": }', "line 1 column 10"),
        (".json", "", "Expecting value"),
        (".json", "[" * 100_000, ""),
        (".json", '{"name": "a", "name": "b"}', "the same key stands twice: name"),
        (".toml", 'name = "a"\nname = "b"\n', "Cannot overwrite a value"),
    ],
)
def test_what_is_no_toml_or_json_says_so(tmp_path, suffix, text, hint):
    assert hint in problems(tmp_path, text, suffix)[0]


def test_a_list_where_a_table_belongs(tmp_path):
    assert problems(tmp_path, "[1]", ".json") == ["  [1] is not a table"]


def test_a_file_that_cannot_be_read(tmp_path):
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    for name, hint in [
        ("absent.toml", "No such file"),
        ("binary.toml", "utf-8"),
        (".", "director"),
    ]:
        with pytest.raises(DocumentError, match="cannot be read") as caught:
            read_document(tmp_path / name, Cluster)
        assert hint in caught.value.problems[0]


def test_a_value_error_of_the_type_is_a_problem_of_its_key():
    @document
    class Even:
        number: int

        def __post_init__(self) -> None:
            if self.number % 2:
                raise ValueError(f"{self.number} is odd")

    with pytest.raises(DocumentError) as caught:
        to_type({"number": 3}, Even, where="here")
    assert caught.value.problems == ("here  3 is odd",)


def test_nearest_suggests_or_lists():
    assert nearest("bacth", ["batch", "stop"]) == "; did you mean batch?"
    assert nearest("zzz", ["b", "a"]) == "; legal: a, b"
    assert nearest("zzz", []) == ""
