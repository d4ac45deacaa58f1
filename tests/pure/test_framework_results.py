"""pure: cells of a comparison: equality of losses, medians over rounds, ratios within rounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headway.comparison.changed_lines import changed_lines
from headway.comparison.results import INDEPENDENT, REFERENCE, Cell, SameWork
from headway.comparison.table import (
    CSV_COLUMNS,
    csv_rows,
    headway_sentences,
    hindrances,
    table_rows,
)
from headway.comparison.trial import TrialResult

ROOM = "headway.comparison.frameworks"


def result(seconds: float, *, sent: float | None = None, losses=(2.0, 1.0, 0.5)) -> TrialResult:
    return TrialResult(
        seconds=(9.0, seconds),
        steps=1,
        losses=losses,
        first_step=3.0,
        cpu_seconds=2 * seconds,
        peak_bytes=100,
        sent_bytes=sent,
        model_bytes=40,
    )


def cell(name: str, *seconds: float, processes: int = 2, **options: float) -> Cell:
    rounds = {number: result(one, **options) for number, one in enumerate(seconds)}
    work = SameWork(difference=0.0)
    return Cell(framework=name, processes=processes, batch=8, rounds=rounds, work=work)


def test_four_digits_must_agree():
    assert str(SameWork.compare([1.00009, 2.0], [1.0, 2.0])) == "equal"
    found = SameWork.compare([1.0, 2.001, 9.0], [1.0, 2.0, 3.0])
    assert found.step == 1
    assert str(found) == "differs from step 2 on: 2.001 for 2, 2.0e+00 at most"


def test_a_cell_is_the_median_of_its_rounds_and_ratios_are_within_rounds():
    ours, theirs = cell("headway", 1.0, 4.0, 2.0), cell("ddp", 2.0, 8.0, 5.0)
    assert (ours.step.value, ours.step.low, ours.step.high) == (2.0, 1.0, 4.0)
    assert ours.throughput == 4.0
    ratio = ours.ratio(theirs)
    assert ratio is not None
    assert (ratio.value, ratio.low, ratio.high) == (2.0, 2.0, 2.5)
    # The step that warms up is part of the time of training, not of a step's.
    assert ours.times == (0.0, 9.0, 11.0)
    assert ours.to_target is None
    assert replace(ours, target=1.0).to_target == 9.0
    assert replace(ours, target=0.99992).to_target == 9.0  # four digits
    assert replace(ours, target=0.9998).to_target == 11.0
    assert replace(ours, target=0.1).to_target is None


def test_sentences_take_their_numbers_from_the_cells():
    cells = [
        cell(REFERENCE, 3.0, processes=1),
        cell(INDEPENDENT, 2.0),
        cell("ddp", 5.0, sent=60.0),
        cell("headway", 2.5, sent=40.0),
    ]
    said = dict(hindrances(cells, 40))
    assert "3 s of a step of 5 s (60%)" in said["ddp"]
    assert "sends 60 B, 1.50 times the 40 B of an all-reduce" in said["ddp"]
    assert "1.00 times that of one plain process" in said["headway"]
    (sentence,) = headway_sentences(cells)
    assert "takes 2.00 times as long as that of headway" in sentence


def test_who_fails_has_a_row_that_says_why():
    failed = Cell(framework="horovod", processes=2, batch=8, failure="process 1: no such thing")
    (row,) = table_rows([failed], {"horovod": ("a", "b")})
    assert row[-1] == "process 1: no such thing"
    assert row[-2] == "2"
    (plain,) = csv_rows([failed], {})
    assert set(plain) <= set(CSV_COLUMNS)
    assert plain["failure"] == "process 1: no such thing"


@pytest.mark.parametrize(
    ("adapter", "some"),
    [
        ("ddp:Ddp", "self.model = DistributedDataParallel(model)"),
        ("headway_executor:HeadwayExecutor", "import headway"),
    ],
)
def test_lines_that_a_user_adds(adapter, some):
    plain = f"{ROOM}.plain:PlainLoop"
    lines = changed_lines(f"{ROOM}.{adapter}", plain)
    assert some in lines
    assert not any("headway.comparison" in line or line.startswith('"""') for line in lines)
    assert changed_lines(plain, plain) == ()
