"""ranks: schedules without a flush in training: their law, bugs that break it, refusals, notes."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch

from headway.errors import PlanError
from headway.parallel.pipeline.runtime.weight_stashing import WeightVersionPlan
from headway.plans import PipelinePlan, pipelined
from headway.run.distributed.launch_env import LaunchEnv
from headway.run.distributed.world import World
from headway.run.pipeline.step import UpdateGroupWeights, check_last_batch
from headway.run.strategy import strategy
from headway.run.strategy.strategy import check_clip
from headway.schedule.csv_format import to_csv
from headway.schedule.pipeline_schedule import ActionKind
from headway.verification.compare import compare
from headway.verification.distributed_run import record_in_world
from headway.verification.recording import Recording, VerifyJob
from headway.verification.serial_run import cut_file, record_delayed, record_serial
from support.commands import headway_here, newest_tensors
from support.ranks import RanksFailed, run_ranks
from support.sampling import sampled
from support.tables import table_without_flush

RANKS, STEPS = 4, 4


def job_of(*overrides, recipe="late"):
    return VerifyJob(recipe=f"support.recipes:{recipe}", steps=STEPS, overrides=overrides)


def late(stages, schedule, parts, **more):
    return job_of(
        f"stages={stages}", f"pipeline.schedule='{schedule}'", f"pipeline.microbatches={parts}",
        *(f"{key}={value}" for key, value in more.items()),
    )  # fmt: skip


def written():
    """Two stages a rank, split backwards, updates of two and three micro-batches."""
    text = json.dumps(to_csv(table_without_flush()))
    return job_of("stages=2", f"pipeline.table={text}", "drop_last=true")


def jobs():
    return {
        "pipedream": late(4, "pipedream", 6),
        "copies": late(2, "pipedream-2bw", 5, drop_last="true"),
        "words": VerifyJob(**{**vars(late(4, "pipedream", 4)),
                              "recipe": "support.recipes:late_words"}),
        "written": written(),
    }  # fmt: skip


def split(world, names, folder, plant=None):
    """The recordings of some jobs, one after the other."""
    if plant is not None:
        plant()
    every, joined = jobs(), World.adopt()
    for name in names:
        record_in_world(joined, every[name], folder / name)


def run(tmp_path, names, plant=None):
    """For each job the comparison of the split run with its law, and the split recording."""
    folder = tmp_path / "split"
    folder.mkdir()
    run_ranks(RANKS, split, names, folder, plant)
    found = {}
    for name in names:
        target = folder / name
        stages = json.loads(cut_file(target).read_text())
        law = tmp_path / f"{name}.law"
        record_delayed(LaunchEnv(), jobs()[name], law, ranks=RANKS, stages=stages)
        recording = Recording.load(target)
        found[name] = compare(Recording.load(law), recording), recording
    return found


@pytest.mark.slow
def test_the_run_equals_one_process_that_makes_the_same_delayed_updates(tmp_path):
    found = run(tmp_path, list(jobs()))
    for name, (comparison, _) in found.items():
        assert comparison.equal, (name, str(comparison.first))
        kinds = {d.kind for d in comparison.differences}
        assert kinds == {"loss", "gradient", "parameter", "optimizer"}
    serial = tmp_path / "serial"
    record_serial(LaunchEnv(), jobs()["pipedream"], serial)
    assert not compare(Recording.load(serial), found["pipedream"][1]).equal


def other_versions(change):
    """Forwards see other weights than the table says; `change`: (version, steps so far)."""
    original = WeightVersionPlan.__init__

    def init(self, schedule, rank):
        steps, rows = Counter(), list(schedule.order)
        row = []
        for action in rows[rank]:
            steps[action.stage] += action.kind == ActionKind.STEP
            if action.kind == ActionKind.FORWARD:
                version = change(action.version, steps[action.stage])
                row.append(replace(action, version=version))
            else:
                row.append(action)
        rows[rank] = tuple(row)
        original(self, replace(schedule, order=tuple(rows)), rank)

    WeightVersionPlan.__init__ = init


def one_version_too_new():
    other_versions(lambda version, steps: min(version + 1, steps))


def one_version_too_old():
    other_versions(lambda version, _: max(version - 1, 0))


def means_of_the_batch():
    UpdateGroupWeights.factor = lambda self, microbatch, count: 1.0


def others_step_too():
    """STEP leaves the gradients where they are."""
    original = strategy.update_stage
    strategy.update_stage = lambda optimizer, parameters, last: original(
        optimizer, parameters, last=True
    )


PLANTS = (
    (one_version_too_new, "copies"),  # PipeDream always takes the newest that is there
    (one_version_too_old, "pipedream"),
    (means_of_the_batch, "pipedream"),
    (others_step_too, "pipedream"),
)


@pytest.mark.parametrize(("plant", "name"), sampled(PLANTS, 2))
def test_planted_bugs_break_the_law(tmp_path, plant, name):
    comparison, _ = run(tmp_path, [name], plant)[name]
    assert comparison.first is not None
    assert comparison.first.step == 1


def counted_in_groups(world):
    job = VerifyJob(**{**vars(late(4, "pipedream-2bw", 6)),
                       "recipe": "support.recipes:late_words"})  # fmt: skip
    record_in_world(World.adopt(), job, world.directory / "never")


def test_a_count_that_nobody_can_know_is_refused():
    with pytest.raises(RanksFailed, match="a count that differs between micro-batches"):
        run_ranks(RANKS, counted_in_groups)


def test_what_cannot_be_is_refused_by_name():
    plan = pipelined(12, processes=4, stages=2, pipeline=PipelinePlan(schedule="pipedream"))
    assert not plan.exact
    assert not plan.flushes
    with pytest.raises(PlanError, match=r"clip is 0.5.*pipedream updates each stage by itself"):
        check_clip(plan, 0.5)
    check_clip(plan, None)
    check_last_batch(plan, 12 * 3 + 8)  # 4 for each copy
    with pytest.raises(PlanError, match="give them 1 and 2 micro-batches"):
        check_last_batch(plan, 12 * 3 + 3)
    uneven = to_csv(table_without_flush(uneven=True))
    with pytest.raises(PlanError, match="STEPs after different micro-batches"):
        pipelined(12, processes=2, stages=2, pipeline=PipelinePlan(table=uneven))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("late")
    words = ("--set", "stages=2", "--set", "pipeline.schedule='pipedream'")
    done = headway_here("train", "support.recipes:late", "-n", "2", "--directory", "run", *words,
                        cwd=folder)  # fmt: skip
    assert done.code == 0, done.err
    return folder / "run"


def rows(run, rank, event):
    lines = (run / "ranks" / f"rank-{rank:05d}.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["event"] == event]


def test_spans_cover_messages_waits_and_updates(trained):
    for rank in range(2):
        spans = [row for row in rows(trained, rank, "span") if row["step"] == 2]
        lanes = {lane: [s for s in spans if s["lane"] == lane] for lane in ("compute", "messages")}
        waits = {s["label"]: s for s in lanes["compute"] if ".RECV." in s["label"]}
        received = {s["label"].partition(":")[0]: s
                    for s in lanes["messages"] if ".RECV." in s["label"]}  # fmt: skip
        assert len(waits) == 4  # a micro-batch each
        assert waits.keys() == received.keys()
        for label, wait in waits.items():
            assert received[label]["end"] == pytest.approx(wait["end"], abs=1e-5)
            assert received[label]["start"] <= wait["start"] + 1e-5
            assert received[label]["label"].endswith(f": 192 B from rank {1 - rank}")
        assert sum(".SEND." in s["label"] for s in lanes["messages"]) == 4
        assert sum(s["kind"] == "update" for s in lanes["compute"]) >= 4
        for step in rows(trained, rank, "rank_step")[1:]:
            seconds = sum(step[part] for part in ("compute", "exposed", "data", "update"))
            assert 0 < seconds <= step["seconds"] * 1.001


def test_the_journal_knows_what_was_exposed_and_hidden(trained):
    steps = [json.loads(line) for line in (trained / "events.jsonl").read_text().splitlines()]
    for step in (row for row in steps if row["event"] == "step"):
        assert 0 < step["exposed"] <= step["seconds"]
        assert 0 <= step["overlap"] <= 1
        # Of each point two values of 8 numbers of 4 bytes: the chain's, and the first for its end.
        assert step["wire_bytes"] == 2 * 8 * 4 * step["samples"]


def test_the_report_draws_the_step_beside_its_prediction(trained):
    done = headway_here("report", str(trained), cwd=trained.parent)
    assert done.code == 0, done.err
    page = (trained / "report.html").read_text()
    assert "<h2>The pipeline</h2>" in page
    assert "What each rank of the pipeline does when: measured, predicted" in page
    trace = json.loads((trained / "timeline.json").read_text())["traceEvents"]
    names = {e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    assert "messages" in names


@pytest.mark.slow
def test_a_run_that_is_resumed_ends_where_the_other_one_ends(trained):
    words = ("--set", "stages=2", "--set", "pipeline.schedule='pipedream'")
    for stop, resume in ((3, ()), (4, ("--resume",))):
        done = headway_here(
            "train", "support.recipes:late", "-n", "2", "--directory", "halves",
            "--set", f"stop={stop}", *words, *resume, cwd=trained.parent,
        )  # fmt: skip
        assert done.code == 0, done.err
    halves, whole = newest_tensors(trained.parent / "halves"), newest_tensors(trained)
    assert halves.keys() == whole.keys()
    assert all(torch.equal(halves[name], whole[name]) for name in whole)


@pytest.mark.slow
def test_verify_says_that_the_law_holds_and_not_equal(trained):
    words = ("--set", "stages=2", "--set", "pipeline.schedule='pipedream-2bw'")
    done = headway_here("verify", "support.recipes:late", "-n", "2", *words,
                        "--directory", str(trained), cwd=trained.parent)  # fmt: skip
    assert done.code == 0, done.err
    assert "INEXACT by its plan, and its law holds" in done.out
    assert "EQUAL to the serial" not in done.out
    (proof,) = json.loads((trained / "verification.json").read_text())
    assert (proof["equal"], proof["law"]) == (False, "holds")
