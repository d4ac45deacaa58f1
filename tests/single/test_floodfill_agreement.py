"""single: agreement of segmentations with the truth, by hand, by definition and by scikit-image."""

from __future__ import annotations

import json

import numpy as np
import pytest

from headway.errors import DataError, MissingExtra
from headway.floodfill import skeletons
from headway.floodfill.agreement import agreement, chunks, contingency
from headway.floodfill.skeletons import Skeleton, read_skeletons, skeleton_agreement, thin
from headway.report.pictures.segmentation import disagreements
from support.commands import headway_here
from support.fib25 import SEGMENTATION, VOLUME, needs_fib25


def figures(segments, truth, *, dust=0, voxels=7):
    return agreement(contingency(chunks(segments, truth, voxels)), dust=dust)


def volume(*values):
    return np.array(values).reshape(-1, 1, 1)


def test_a_body_in_halves_is_split_by_one_bit():
    found = figures(volume(1, 1, 2, 2), volume(5, 5, 5, 5))
    assert (found.split, found.merge, found.precision) == (1, 0, 1)
    assert found.recall == pytest.approx(4 / 12)
    assert [(b.id, b.voxels, b.parts, b.bits) for b in found.worst_splits] == [(5, 4, 2, 1.0)]
    assert found.worst_merges == ()


def test_two_bodies_in_one_segment_are_merged_by_one_bit():
    found = figures(volume(7, 7, 7, 7), volume(1, 1, 2, 2))
    assert (found.split, found.merge, found.recall) == (0, 1, 1)
    assert found.rand_error == pytest.approx(1 - 2 * (4 / 12) / (4 / 12 + 1))
    assert [b.id for b in found.worst_merges] == [7]


def test_dust_and_what_has_no_label_is_left_out():
    segments = volume(1, 1, 1, 1, 0, -1, 3)
    truth = volume(4, 4, 4, 9, 4, 4, 0)
    found = figures(segments, truth, dust=2)
    assert (found.voxels, found.bodies, found.segments) == (5, 1, 1)
    assert found.coverage == pytest.approx(3 / 5)
    assert (found.split, found.merge, found.rand_error) == (0, 0, 0)


@pytest.fixture(scope="module")
def random_pair():
    draw = np.random.default_rng(1)
    truth = np.repeat(draw.integers(0, 12, (6, 7, 8)), 2, axis=2)
    segments = np.where(
        draw.random(truth.shape) < 0.8, truth * 3 % 10, draw.integers(0, 9, truth.shape)
    )
    return segments.astype(np.uint16), truth.astype(np.int64) * 10**12


def test_it_is_the_definition_whatever_the_chunks(random_pair):
    segments, truth = random_pair
    both = (segments > 0) & (truth > 0)
    s, t = segments[both].astype(np.int64), truth[both]

    def entropy(*ids):
        _, counts = np.unique(np.stack(ids), axis=1, return_counts=True)
        return -(counts / counts.sum() * np.log2(counts / counts.sum())).sum()

    same_s, same_t = (s[:, None] == s), (t[:, None] == t)
    off = ~np.eye(len(s), dtype=bool)
    precision = (same_s & same_t & off).sum() / (same_s & off).sum()
    recall = (same_s & same_t & off).sum() / (same_t & off).sum()
    for voxels in (1, 200, 10**6):
        found = figures(segments, truth, voxels=voxels)
        assert found.split == pytest.approx(entropy(s, t) - entropy(t), rel=1e-12)
        assert found.merge == pytest.approx(entropy(s, t) - entropy(s), rel=1e-12)
        assert found.precision == pytest.approx(precision, rel=1e-12)
        assert found.recall == pytest.approx(recall, rel=1e-12)
        assert sum(b.bits for b in figures(segments, truth).worst_splits) <= found.split + 1e-12


def test_it_is_scikit_images(random_pair):
    metrics = pytest.importorskip("skimage.metrics")
    segments, truth = random_pair
    both = (segments > 0) & (truth > 0)
    found = figures(segments, truth)
    given = truth[both] // 10**12, segments[both].astype(np.int64)
    vi = metrics.variation_of_information(*given)
    assert [found.split, found.merge] == pytest.approx(vi.tolist(), rel=1e-9)
    error, *shares = metrics.adapted_rand_error(*given, ignore_labels=())
    assert found.rand_error == pytest.approx(error, rel=1e-9)
    assert sorted([found.precision, found.recall]) == pytest.approx(sorted(shares), rel=1e-9)


def test_mistakes_are_told():
    with pytest.raises(DataError, match=r"shape \[2, 1, 1\], and the truth \[3, 1, 1\]"):
        figures(volume(1, 2), volume(1, 2, 3))
    with pytest.raises(DataError, match="no voxel has both"):
        figures(volume(1, 2), volume(1, 2), dust=10)


@needs_fib25
def test_the_published_segmentation_has_its_known_figures(tmp_path):
    done = headway_here(
        "evaluate", str(SEGMENTATION), f"{VOLUME}:gt", "--dust", "0", "--json", cwd=tmp_path
    )
    assert done.code == 0, done.err
    found = json.loads(done.out)
    rounded = [round(found[name], 3) for name in ("split", "merge", "rand_error")]
    assert rounded == [0.613, 0.263, 0.056]


# -- skeletons -------------------------------------------------------------------------------------


def line(name, row, length=5):
    nodes = np.array([[0, row, x] for x in range(length)])
    return Skeleton(name, nodes, np.array([[n, n + 1] for n in range(length - 1)]))


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        # Without an error: two runs of 4 edges.
        (([1] * 5, [2] * 5), (4.0, 1.0, 0.0, 0.0, 0.0)),
        # The first in runs of 1 and 2 with a split edge between: (1 + 4 + 16) / 8.
        (([1, 1, 3, 3, 3], [2] * 5), (21 / 8, 7 / 8, 1 / 8, 0.0, 0.0)),
        # A gap omits two edges; both ends are one run of 2.
        (([1, 1, 0, 1, 1], [2] * 5), (20 / 8, 6 / 8, 0.0, 0.0, 2 / 8)),
        # Merged: nothing is left.
        (([1] * 5, [1] * 5), (0.0, 0.0, 0.0, 1.0, 0.0)),
    ],
    ids=["right", "split", "omitted", "merged"],
)
def test_run_lengths_of_two_lines(rows, expected):
    found = skeleton_agreement(np.array([rows]), [line("a", 0), line("b", 1)])
    shares = (found.correct, found.split, found.merged, found.omitted)
    assert (found.run_length, *shares) == pytest.approx(expected)
    assert found.most == pytest.approx(4.0)
    double = skeleton_agreement(np.array([rows]), [line("a", 0), line("b", 1)], voxel=(1, 1, 2))
    assert double.run_length == pytest.approx(2 * expected[0])


def test_a_node_over_the_border_can_be_forgiven():
    rows = np.array([[[1] * 5, [2, 2, 2, 2, 1]]])
    both = [line("a", 0), line("b", 1)]
    assert skeleton_agreement(rows, both).merged == pytest.approx(4 / 8)
    assert skeleton_agreement(rows, both, merge_nodes=2).merged == 0


def test_skeletons_are_read_from_files(tmp_path):
    (tmp_path / "a.swc").write_text("# made\n1 0 30 20 10 1 -1\n2 0 40 20 10 1 1\n")
    (tmp_path / "b.json").write_text('{"b": {"nodes": [[0, 0, 0], [10, 0, 0]], "edges": [[1, 0]]}}')
    a, b = read_skeletons(tmp_path, voxel=(10, 10, 10))
    assert a.nodes.tolist() == [[1, 2, 3], [1, 2, 4]]
    assert (a.edges.tolist(), b.nodes.tolist()) == ([[1, 0]], [[0, 0, 0], [1, 0, 0]])
    assert a.lengths((10, 10, 10)).tolist() == [10]
    with pytest.raises(DataError, match=r"node of skeleton a .*outside"):
        skeleton_agreement(np.ones((2, 2, 2)), [a])
    (tmp_path / "b.json").write_text('{"b": {"nodes": [[0, 0, 0]], "edges": [[0, 1]]}}')
    with pytest.raises(DataError, match="skeletons cannot be read"):
        read_skeletons(tmp_path)


def test_a_bar_thins_to_its_axis():
    pytest.importorskip("skimage")
    bodies = np.zeros((9, 9, 40), dtype=int)
    bodies[2:7, 2:7, 2:38] = 5
    (bar,) = thin(bodies, min_size=100)
    assert len(bar.edges) == len(bar.nodes) - 1
    assert 30 <= bar.lengths((1, 1, 1)).sum() <= 40
    assert set(bodies[tuple(bar.nodes.T)].tolist()) == {5}


def test_without_scikit_image_it_says_so(monkeypatch):
    def missing(_):
        raise ImportError

    monkeypatch.setattr(skeletons.importlib, "import_module", missing)
    with pytest.raises(MissingExtra, match="scikit-image is not installed"):
        next(thin(np.ones((3, 3, 3), dtype=int)))


# -- the command and its page ----------------------------------------------------------------------


def test_splits_and_merges_are_marked_and_borders_a_voxel_apart_are_not():
    truth = np.ones((20, 30), dtype=int)
    truth[:, 20:] = 2
    segments = np.full((20, 30), 7)
    segments[:10] = 8
    splits, merges = disagreements(truth, segments)
    assert splits[9:11].all()
    assert not splits[:9].any()
    assert merges[:, 19:21].all()
    assert not merges[:, 22:].any()
    shifted = truth.copy()
    shifted[:, 20] = 1
    assert not any(marks.any() for marks in disagreements(truth, shifted))


def test_the_command_prints_a_table_and_writes_a_page(tmp_path):
    truth = np.ones((8, 20, 30), dtype=np.int32)
    truth[:, :, 15:] = 2
    segments = truth.copy()
    segments[:, 10:] += 2 * (truth[:, 10:] == 1)
    np.save(tmp_path / "s.npy", segments)
    np.savez(tmp_path / "t.npz", truth=truth, image=np.full(truth.shape, 90, np.uint8))
    words = ("evaluate", "s.npy", "t.npz:truth", "--image", "t.npz:image", "--report", "page.html")
    done = headway_here(*words, cwd=tmp_path)
    assert done.code == 0, done.err
    assert "VI split    0.5000  bits" in done.out
    assert "split most  voxels  segments    bits" in done.out
    page = (tmp_path / "page.html").read_text()
    assert "data:image/png;base64," in page
    assert "Bodies that are split most" in page
    refused = headway_here("evaluate", "s.npy", "t.npz", cwd=tmp_path)
    assert refused.code != 0
    assert "It holds truth, image, and no name was given" in refused.err
    np.save(tmp_path / "f.npy", segments / 2)
    refused = headway_here("evaluate", "s.npy", "f.npy", cwd=tmp_path)
    assert refused.code != 0
    assert "f.npy: these are no ids" in refused.err
    assert "Its numbers are float64; expected are integers" in refused.err
