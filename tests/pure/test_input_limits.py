"""pure: input too large, too deep or too long for any use is one error, at once; never a hang."""

from __future__ import annotations

import json

import pytest

from headway.checkpoint.format import Manifest, decode_facts, encode_facts
from headway.cli.main import main
from headway.documents import MAX_DEPTH, parse_json, parse_toml
from headway.errors import CheckpointDamaged, CheckpointError
from headway.plans import pipelined
from headway.units import parse_bytes

CLUSTER = 'nodes = 2\nprocesses = {}\n[between]\nrate = "10 Gbit/s"\n'
DEEP = 3000
HUGE = 2**31
LONG = "x" * 300


def refused(capsys, *words: str) -> str:
    """What a command says that refuses its input."""
    code = main(words)
    err = capsys.readouterr().err
    assert code in (1, 2), err
    assert "Traceback" not in err
    assert err.startswith("HW-")
    return err


def shown(tmp_path, capsys, text: str) -> str:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return refused(capsys, "cluster", "show", str(path))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (HUGE, f"{2 * HUGE} on all nodes; at most"),
        ("1" * 5000, "more than 64 bits"),
        ("0x" + "f" * 5000, "more than 64 bits"),
        ("[" * DEEP + "]" * DEEP, "nested more than 100 deep"),
        ("{a = " * DEEP + "1" + "}" * DEEP, "nested more than 100 deep"),
    ],
    ids=["many", "digits", "hexadecimal", "lists", "tables"],
)
def test_a_value_of_a_cluster_beyond_all_use(tmp_path, capsys, value, reason):
    assert reason in shown(tmp_path, capsys, CLUSTER.format(value))


@pytest.mark.parametrize("line", ["{} = 1", "[{}]\nb = 1", '[["a".{}]]'])
def test_a_dotted_key_of_many_parts(tmp_path, capsys, line):
    key = "a" + ".a" * 20_000
    assert "nested more than 100 deep (line 1)" in shown(tmp_path, capsys, line.format(key))


def test_too_many_nodes(tmp_path, capsys):
    assert f"{HUGE} nodes: at most" in shown(tmp_path, capsys, f"nodes = {HUGE}")
    assert "too many" in refused(capsys, "cluster", "show", "dgx-1", "--nodes", str(HUGE))


@pytest.mark.parametrize("text", ["[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP])
def test_a_deep_plan(tmp_path, capsys, text):
    path = tmp_path / "plan.json"
    path.write_text(text)
    assert "nested more than 100 deep" in refused(capsys, "plan", "show", str(path))


@pytest.mark.parametrize("axis", [0, 1])
def test_a_plan_for_more_ranks_than_there_are(tmp_path, capsys, axis):
    plan = json.loads(pipelined(64, processes=4, stages=2).to_json())
    plan["mesh"]["axes"][axis]["size"] = HUGE
    plan["batch"]["samples"] = 2**40
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan))
    assert f"mesh has {2 * HUGE} ranks; at most" in refused(capsys, "plan", "show", str(path))


def test_a_plan_of_many_axes_or_microbatches(tmp_path, capsys):
    path = tmp_path / "plan.json"
    plan = json.loads(pipelined(64, processes=4, stages=2).to_json())
    path.write_text(json.dumps(plan | {"batch": {"samples": 2**40, "parts": HUGE}}))
    assert "forward passes; at most" in refused(capsys, "plan", "show", str(path))
    axes = [{"name": f"a{number}", "size": 1} for number in range(100_000)]
    path.write_text(json.dumps(plan | {"mesh": {"axes": axes}}))
    assert "mesh has 100000 axes" in refused(capsys, "plan", "show", str(path))


def test_a_schedule_of_many_cells(capsys):
    assert "forward passes; at most" in refused(
        capsys, "schedule", "show", "1f1b", "--stages", "4", "--microbatches", str(HUGE)
    )


RECIPE = "support.recipes:mlp"


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        (f"name='{LONG}'", f"{len(LONG)} bytes, at most 200"),
        (f"stop={'1' * 5000}", "more than 64 bits"),
        (f"arguments.batch={'[' * DEEP}", "nested more than 100 deep"),
        (f"a{'.a' * DEEP}=1", "nested more than 100 deep"),
    ],
    ids=["name", "digits", "lists", "key"],
)
def test_overrides(tmp_path, monkeypatch, capsys, override, reason):
    monkeypatch.chdir(tmp_path)
    assert reason in refused(capsys, "train", RECIPE, "--set", override)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        ("train", LONG),
        ("cluster", "show", LONG),
        ("plan", "show", LONG),
        ("report", LONG),
        ("checkpoint", "show", LONG),
    ],
    ids=lambda words: words[0],
)
def test_names_longer_than_any_file_s(tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    refused(capsys, *words)


def test_a_file_without_an_end(capsys, monkeypatch):
    monkeypatch.setattr("headway.documents.MAX_BYTES", 2**20)
    assert "more than 1 MiB" in refused(capsys, "plan", "show", "/dev/zero")


def test_a_deep_manifest_is_damaged_and_never_written():
    deep: object = 1
    for _ in range(DEEP):
        deep = {"a": deep}
    with pytest.raises(CheckpointError, match="nested deeper"):
        encode_facts(deep)
    with pytest.raises(CheckpointDamaged, match="not JSON"):
        Manifest.from_json('{"a":' * DEEP + "1" + "}" * DEEP)
    with pytest.raises(CheckpointDamaged, match="not JSON"):
        Manifest.from_json(f'{{"format": {"1" * 5000}}}')


def test_what_is_as_deep_as_allowed_is_read_again():
    deep: object = 1
    for _ in range(MAX_DEPTH - 1):
        deep = [deep]
    assert decode_facts(parse_json(json.dumps([encode_facts(deep)]))) == [deep]
    with pytest.raises(CheckpointError):
        encode_facts([deep])
    assert parse_toml("a = " + "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1))
    with pytest.raises(ValueError, match="nested"):
        parse_toml("a = " + "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1))


def test_numbers_with_units_overflow_to_nothing():
    with pytest.raises(ValueError, match="not a size"):
        parse_bytes("1e308 GiB")
