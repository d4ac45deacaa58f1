"""single: seeds, moves, the canvas, the ledger of seeds, sub-volumes: how objects are filled."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import ndimage

from headway.errors import DataError, UsageError
from headway.floodfill import seed_ledger, segmentation_worker
from headway.floodfill.agreement import agreement, contingency
from headway.floodfill.array_files import check_grey_values, check_image
from headway.floodfill.canvas import Canvas, FilledObject, FillingOptions
from headway.floodfill.crews import Crews, prepare_crews
from headway.floodfill.movement import MoveQueue, face_moves
from headway.floodfill.network import FloodFillingNetwork, scale_image
from headway.floodfill.prediction import FovPredictor
from headway.floodfill.seed_ledger import WEAK, SeedLedger, prepare_ledger, release_claims
from headway.floodfill.seeds import peak_seeds, seed_groups
from headway.floodfill.segmentation_job import SegmentationJob, prepare_folder
from headway.floodfill.segmentation_worker import LentThreads
from headway.floodfill.subvolumes import cut_volume, reconcile
from headway.floodfill.weight_files import read_network
from support.bubbles import BRIGHT, DELTAS, FOV, bubbles, write_brightness_weights
from support.fib25 import SEGMENTATION, VOLUME, WEIGHTS, needs_fib25

SHAPE = (30, 34, 38)
OPTIONS = FillingOptions(min_size=20)


# -- moves ----------------------------------------------------------------------------------------


def test_moves_go_to_the_best_voxel_of_each_face_best_first():
    mask = np.full((9, 9, 9), -5.0, dtype=np.float32)
    mask[1, 4, 4] = 3.0  # the face z = -3
    mask[4, 7, 5] = 4.0  # y = +3
    mask[4, 4, 1] = 2.0  # x = -3, below the threshold
    assert face_moves(mask, DELTAS, 2.5) == [(4.0, (0, 3, 1)), (3.0, (-3, 0, 0))]


def test_of_equal_voxels_the_first_of_a_face_and_the_larger_offset():
    mask = np.full((9, 9, 9), 1.0, dtype=np.float32)
    # Each face's first voxel is a corner of the box; (-3, -3, -3) is that of three faces.
    assert face_moves(mask, DELTAS, 1.0) == [
        (1.0, (3, -3, -3)), (1.0, (-3, 3, -3)), (1.0, (-3, -3, 3)), (1.0, (-3, -3, -3)),
    ]  # fmt: skip


def test_along_a_dimension_without_delta_nothing_moves():
    mask = np.ones((9, 9, 9), dtype=np.float32)
    assert {offset[0] for _, offset in face_moves(mask, (0, 3, 3), 0.5)} == {0}


def test_a_cell_of_the_lattice_is_visited_once():
    queue = MoveQueue((20, 20, 20), (4, 4, 4), 0.5)
    mask = np.full((9, 9, 9), -1.0, dtype=np.float32)
    mask[8, 4, 4] = mask[8, 5, 5] = 1.0
    visits = []
    for position in queue:
        visits.append(position)
        if len(visits) == 3:
            break
        queue.update(position, mask)
    assert visits == [(20, 20, 20), (24, 20, 20), (28, 20, 20)]
    # One voxel away lies in the same cell, two are the next one.
    queue = MoveQueue((20, 20, 20), (4, 4, 4), 0.5)
    queue.update((20, 20, 20), np.full((9, 9, 9), -1.0, dtype=np.float32))
    assert queue._cell((21, 20, 18)) == queue._cell((20, 20, 20))
    assert queue._cell((22, 20, 20)) != queue._cell((20, 20, 20))


# -- the canvas -----------------------------------------------------------------------------------


def grow(image, mask):
    """What of the bright voxels is connected with the object: raised; all else is lowered."""
    parts, _ = ndimage.label(image > 0)
    inside = np.isin(parts, np.unique(parts[(mask > 0) & (parts > 0)]))
    return np.where(inside, mask + 6, mask - 1).astype(np.float32)


def canvas_of(image, options=OPTIONS, predict=grow):
    return Canvas(scale_image(image), predict, options, fov=FOV, deltas=DELTAS)


def test_an_object_is_filled_and_the_canvas_is_clean_after_it():
    image = np.zeros(SHAPE, dtype=np.uint8)
    image[10:13, 8:11, 6:30] = BRIGHT
    image[20:23, 8:11, 6:30] = BRIGHT  # another one, which nothing leads to
    canvas = canvas_of(image)
    filled = canvas.fill((11, 9, 15), lambda voxel: False)
    box = tuple(slice(a, a + n) for a, n in zip(filled.start, filled.mask.shape, strict=True))
    found = np.zeros(SHAPE, dtype=bool)
    found[box] = filled.mask
    assert (found == ((image > 0) & (np.arange(30) < 15)[:, None, None])).all()
    assert np.isnan(canvas.mask).all()


def test_nothing_moves_to_where_others_are():
    image = np.zeros(SHAPE, dtype=np.uint8)
    image[10:13, 8:11, 6:34] = BRIGHT
    filled = canvas_of(image).fill((11, 9, 10), lambda voxel: voxel[2] > 16)
    assert filled.moves[:, 2].max() <= 16


@pytest.mark.parametrize(("bias", "rises"), [(0.0, False), (-1.0, True)])
def test_voxels_that_were_unlikely_stay_so(bias, rises):
    old = np.full(FOV, np.nan, dtype=np.float32)
    canvas = canvas_of(
        np.zeros(FOV, dtype=np.uint8),
        FillingOptions(disconnected_bias=bias),
        lambda image, mask: np.full_like(mask, 5.0),
    )
    old[2, 2, 2], old[3, 3, 3] = -0.5, 0.5
    canvas.mask[:] = old
    canvas._update((slice(0, 9),) * 3)
    assert canvas.mask[2, 2, 2] == (5.0 if rises else -0.5)
    assert canvas.mask[3, 3, 3] == canvas.mask[0, 0, 0] == 5.0


def test_a_seed_that_becomes_unlikely_is_no_object():
    canvas = canvas_of(np.zeros(SHAPE, dtype=np.uint8), predict=lambda i, mask: mask - 9)
    assert canvas.fill((10, 10, 10), lambda voxel: False).mask is None


def test_options_that_cannot_be():
    with pytest.raises(UsageError, match="move is 1"):
        FillingOptions(move=1.0).check()
    with pytest.raises(UsageError, match="no object could begin"):
        FillingOptions(initial=0.8).check()


# -- seeds ----------------------------------------------------------------------------------------


def test_seeds_lie_inside_and_are_the_same_each_time():
    image = bubbles(SHAPE, 30)
    seeds = peak_seeds(image)
    assert (seeds == peak_seeds(image)).all()
    assert len(seeds) > 5
    assert (seeds == seeds[np.lexsort(seeds.T[::-1])]).all()
    far = np.abs(seeds[:, None] - seeds[None]).max(axis=2)
    assert far[~np.eye(len(seeds), dtype=bool)].min() > 3


# -- the ledger -----------------------------------------------------------------------------------


def run_ledger(folder, image, workers, rng):
    """Workers take turns at random, each a move at a time; the same as one after the other."""
    seeds = peak_seeds(image)
    margin = np.array(FOV) // 2
    inside = ((seeds >= margin) & (seeds < np.array(image.shape) - margin)).all(axis=1)
    seeds = seeds[inside]
    # Each a group of its own: all that may be in vain happens.
    prepare_ledger(folder, image.shape, seeds, np.arange(1, len(seeds) + 1, dtype=np.int32))
    ledgers = [SeedLedger(folder, distance=(1, 1, 1), min_size=20) for _ in range(workers)]
    jobs = {number: worker(ledger, image) for number, ledger in enumerate(ledgers)}
    while not ledgers[0].finished:
        number = int(rng.integers(workers))
        next(jobs[number], None)
        if rng.random() < 0.005:  # a death: all begin anew, as after a restart
            for job in jobs.values():
                job.close()
            release_claims(folder)
            jobs = {n: worker(ledger, image) for n, ledger in enumerate(ledgers)}
    # A mark that is left would keep the seeds under it from ever being filled.
    assert not ledgers[0]._owners.any()
    return np.array(ledgers[0].segments), ledgers[0].figures(), np.array(ledgers[0]._ids)


def worker(ledger, image):
    """Fills seeds; a turn is one move, or a look for a seed."""
    while not ledger.finished:
        index = ledger.claim()
        yield
        if index is None:
            continue
        boxes = []

        canvas = canvas_of(image, predict=grow_weakly)

        def go_on(box, position, index=index, boxes=boxes, canvas=canvas):
            boxes.append(box)
            ledger.mark(index, box, canvas.object_in(box))
            return ledger.is_worthwhile(index)

        filled = canvas.fill(ledger.seed(index), ledger.is_taken, go_on)
        # What was seen of the others is from now; it is handed in later.
        for _ in boxes:
            yield
        if filled is None:
            ledger.give_up(index, box_around(boxes), len(boxes))
        else:
            ledger.submit(index, filled)


def box_around(boxes):
    return tuple(
        slice(min(part.start for part in parts), max(part.stop for part in parts))
        for parts in zip(*boxes, strict=True)
    )


def grow_weakly(image, mask):
    """As `grow`; of objects with few voxels in view the middle plane goes, with the seed in it."""
    new = grow(image, mask)
    if np.count_nonzero(image > 0) < 230:
        new[FOV[0] // 2] = -9
    return new


def test_seeds_filled_ahead_of_their_turn_make_the_same_volume(tmp_path):
    image = bubbles((44, 48, 52), 60, seed=2)
    serial, figures, ids = run_ledger(tmp_path / "serial", image, 1, np.random.default_rng(0))
    assert figures.objects > 8
    assert figures.in_vain == 0
    assert (ids == WEAK).any()
    vain = 0
    for seed in range(4):
        rng = np.random.default_rng(seed)
        found, split, _ = run_ledger(tmp_path / f"run{seed}", image, 3, rng)
        assert (found == serial).all()
        assert (split.moves, split.objects) == (figures.moves, figures.objects)
        vain += split.in_vain
    # Else this has shown nothing.
    assert vain > 0


def test_ids_are_those_of_the_objects_in_the_order_of_their_seeds(tmp_path):
    image = bubbles(SHAPE, 30)
    found, figures, _ = run_ledger(tmp_path / "ledger", image, 1, np.random.default_rng(0))
    assert set(np.unique(found)) == set(range(figures.objects + 1))
    assert figures.voxels == np.count_nonzero(found)
    assert (image[found > 0] > 0).all()


def test_of_a_body_one_seed_is_filled_at_a_time(tmp_path):
    image = np.zeros((20, 40, 20), np.uint8)
    image[5:15, 5:15, 5:15] = image[5:15, 25:35, 5:15] = BRIGHT
    seeds = np.array([[6, 8, 8], [7, 8, 12], [8, 30, 8], [9, 30, 12], [10, 20, 10]], np.int32)
    groups = seed_groups(image, seeds)
    assert groups[0] == groups[1] != groups[2] == groups[3] > 0 == groups[4]
    # Of dark bodies in bright surroundings the same.
    assert (seed_groups(BRIGHT - image, seeds) == groups).all()
    prepare_ledger(tmp_path / "ledger", image.shape, seeds, groups)
    ledger = SeedLedger(tmp_path / "ledger", distance=(1, 1, 1), min_size=20)
    assert [ledger.claim() for _ in range(3)] == [0, 2, None]
    assert ledger.figures().busy == 2
    # The first object reaches into the other body: no seed of that one is filled any more.
    ledger.mark(0, (slice(5, 15), slice(5, 34), slice(5, 15)), np.ones((10, 29, 10), bool))
    ledger.give_up(2, None, 0)
    assert ledger.claim() is None
    assert ledger.figures().under_way == 1


def test_where_much_was_in_vain_nothing_is_begun_ahead_until_it_is_earned(tmp_path):
    seeds = np.array([[8, 8, 8 + 4 * number] for number in range(6)], np.int32)
    prepare_ledger(tmp_path / "ledger", (20, 20, 40), seeds, np.arange(1, 7, dtype=np.int32))
    ledger = SeedLedger(tmp_path / "ledger", distance=(1, 1, 1), min_size=20)

    def weak(index, fields):
        where = tuple(int(part) for part in seeds[index])
        ledger.submit(index, FilledObject(np.array([where] * fields), where, (1, 1, 1), None))

    assert [ledger.claim(), ledger.claim()] == [0, 1]
    ledger.give_up(1, None, 49)
    assert ledger.claim() == 1  # one field is left
    ledger.give_up(1, None, 2)
    assert ledger.claim() is None
    weak(0, 40)  # its turn it was: one field for 40, and not more than that
    assert ledger.claim() == 1
    assert ledger.claim() is None
    weak(1, 20)  # half a field
    assert [ledger.claim(), ledger.claim()] == [2, 3]
    weak(3, 40)  # kept: a fourth of 40 fields
    weak(2, 1)
    assert [ledger.claim(), ledger.claim()] == [4, 5]
    ledger.give_up(5, None, 10)
    assert ledger.claim() == 5
    ledger.give_up(5, None, 1)
    assert ledger.claim() is None
    assert ledger.figures().in_vain == 49 + 2 + 10 + 1


def test_an_object_that_is_filled_ahead_pauses_beyond_the_budget_until_its_turn(tmp_path):
    seeds = np.array([[8, 8, 8], [8, 8, 20]], np.int32)
    prepare_ledger(tmp_path / "ledger", (20, 20, 40), seeds, np.array([1, 2], np.int32))
    ledger = SeedLedger(tmp_path / "ledger", distance=(1, 1, 1), min_size=20)
    assert [ledger.claim(), ledger.claim()] == [0, 1]
    box = (slice(8, 9), slice(8, 9), slice(20, 21))

    def fill(fields):
        for _ in range(fields):
            ledger.mark(1, box, np.ones((1, 1, 1), bool))
            assert ledger.is_worthwhile(1)

    fill(50)
    assert not ledger.pause(1)
    assert ledger.figures().busy == 2
    fill(1)
    assert ledger.pause(1)
    # Its process lends its threads.
    assert ledger.figures().busy == 1
    assert ledger.claim() is None
    ledger.submit(0, FilledObject(np.array([[8, 8, 8]]), (8, 8, 8), (1, 1, 1), None))
    assert not ledger.pause(1)
    assert ledger.figures().busy == 1
    # A process that dies in a pause leaves its seed to others.
    ledger._status[1] = seed_ledger._PAUSED
    release_claims(tmp_path / "ledger")
    assert ledger.claim() == 1


def test_threads_are_lent_to_the_seed_whose_turn_it_is_if_it_gets_cores(monkeypatch):
    ledger = SimpleNamespace(busy=1, settled=7)
    clock = {"wall": 0.0, "cpu": 0.0}
    given = [2]
    monkeypatch.setattr(
        segmentation_worker,
        "time",
        SimpleNamespace(monotonic=lambda: clock["wall"], process_time=lambda: clock["cpu"]),
    )
    monkeypatch.setattr(torch, "get_num_threads", lambda: given[-1])
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    lend = LentThreads(ledger, processes=lambda: 3, own=2)

    def fields(number, cores, index=7):
        for _ in range(number):
            lend(index)
            clock["wall"] += 1.0
            clock["cpu"] += cores
        return given[-1]

    assert fields(3, 6.0) == 6
    ledger.busy = 2
    assert fields(1, 4.0) == 4
    ledger.busy = 1
    assert fields(1, 6.0, index=8) == 2
    assert fields(3, 3.0) == 6  # with 6 threads it gets 3 cores: once may be chance
    assert fields(1, 3.0) == 2
    assert fields(40, 2.0) == 2
    assert fields(20, 6.0) == 6  # tried anew
    # The last object of a sub-volume had them; in the next one nobody is idle.
    ledger.busy = 3
    lend = LentThreads(ledger, processes=lambda: 3, own=2)
    assert fields(1, 2.0) == 2
    assert fields(2, 1.0) == 2  # nor does it get its own
    assert fields(2, 1.0) == 1
    assert fields(40, 1.0) == 1
    assert fields(20, 2.0) == 2


# -- sub-volumes ----------------------------------------------------------------------------------


def test_each_process_begins_a_sub_volume_and_joins_others_at_the_end(tmp_path):
    prepare_crews(tmp_path, [False, True, False])
    crews = [Crews(tmp_path) for _ in range(3)]
    assert [one.join() for one in crews] == [(0, True), (2, True), (0, False)]
    assert (crews[0].size(0), crews[0].size(1), crews[0].size(2)) == (2, 0, 1)
    assert crews[1].complete == 1
    assert crews[1].leave(2, complete=True)
    assert crews[1].join() == (0, False)
    # Two are still inside: they may hold its files.
    assert not crews[1].leave(0, complete=True)
    assert not crews[0].leave(0, complete=True)
    assert crews[2].join() is None
    assert crews[2].leave(0, complete=True)
    assert crews[2].complete == 3


def test_one_that_is_stopped_leaves_its_sub_volume_open(tmp_path):
    prepare_crews(tmp_path, [False])
    crews = Crews(tmp_path)
    assert crews.join() == (0, True)
    assert not crews.leave(0, complete=False)
    assert crews.join() == (0, True)


def test_a_process_may_die_while_it_deletes_the_work_on_a_complete_sub_volume(tmp_path):
    job = SegmentationJob(volume="v.npy", weights=tmp_path / "w.npz", out=str(tmp_path / "o.npy"))
    prepare_folder(job)
    seeds = np.array([[8, 8, 8]], np.int32)
    for number in range(2):
        prepare_ledger(job.ledger_path(number), (20, 20, 20), seeds, np.ones(1, np.int32))
        ledger = SeedLedger(job.ledger_path(number), distance=(1, 1, 1), min_size=20)
        assert ledger.claim() == 0
    job.figures_path(0).write_text(json.dumps(asdict(ledger.figures())))
    (job.ledger_path(0) / "status.npy").unlink()
    segmentation_worker._release_all(job, 2)
    assert not job.ledger_path(0).exists()
    assert ledger.claim() == 0
    assert Crews(job.folder).join() == (1, True)


def test_a_command_may_die_while_it_notes_the_job(tmp_path, monkeypatch):
    job = SegmentationJob(volume="v.npy", weights=tmp_path / "w.npz", out=str(tmp_path / "o.npy"))

    def died(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", lambda path, text: path.touch() or died())
        patch.setattr(Path, "replace", died)
        with pytest.raises(KeyboardInterrupt):
            prepare_folder(job)
    prepare_folder(job)
    prepare_folder(job)  # noted, and the same


@pytest.mark.parametrize("size", [(24, 20, 22), (30, 20, 38), (18, 18, 18)])
def test_sub_volumes_tile_the_volume_and_objects_are_put_together(size):
    truth, count = ndimage.label(bubbles(SHAPE, 25))
    parts = cut_volume(SHAPE, size, (10, 10, 10), FOV)
    assert len(parts) > 1
    owned = np.zeros(SHAPE, dtype=int)
    locals_, counts = [], []
    for part in parts:
        owned[part.owned] += 1
        assert all(n <= limit for n, limit in zip(part.shape, size, strict=True))
        values, numbers = np.unique(truth[part.box], return_inverse=True)
        # Numbers of its own, in another order.
        shuffled = np.concatenate([[0], 1 + np.random.default_rng(0).permutation(len(values) - 1)])
        locals_.append(shuffled[numbers].reshape(part.shape))
        counts.append(len(values) - 1)
    assert (owned == 1).all()

    def ids(number, box):
        starts = [part.start for part in parts[number].box]
        return locals_[number][
            tuple(slice(b.start - s, b.stop - s) for b, s in zip(box, starts, strict=True))
        ]

    tables = reconcile(parts, ids, counts, 0.6)
    found = np.zeros(SHAPE, dtype=int)
    for number, (part, table) in enumerate(zip(parts, tables, strict=True)):
        found[part.owned] = table[ids(number, part.owned)]
    pairs = np.unique(np.stack([found.ravel(), truth.ravel()]), axis=1)
    assert pairs.shape[1] == count + 1 == len(np.unique(found))


def test_overlaps_that_are_too_small_are_refused():
    with pytest.raises(UsageError, match="field of view is 9"):
        cut_volume((40, 40, 40), (20, 20, 20), (8, 8, 8), FOV)


# -- the network ----------------------------------------------------------------------------------


def test_the_predictor_is_the_network(tmp_path):
    torch.manual_seed(0)
    write_brightness_weights(tmp_path / "w.safetensors", features=4, depth=3)
    network = read_network(tmp_path / "w.safetensors", fov=FOV, deltas=DELTAS)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    image, mask = np.random.default_rng(0).standard_normal((2, *FOV)).astype(np.float32)
    with torch.no_grad():
        expected = network(*(torch.from_numpy(a)[None, None] for a in (image, mask)))[0, 0]
    assert np.abs(FovPredictor(network)(image, mask) - expected.numpy()).max() < 1e-5
    rough = FovPredictor(network, "bfloat16")(image, mask)
    assert 1e-6 < np.abs(rough - expected.numpy()).max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_fused_convolutions_are_those_of_the_network(precision, monkeypatch):
    """torch.ops.mkldnn is not public: this says if it changes."""
    network = FloodFillingNetwork(3, fov=FOV, deltas=DELTAS, features=16)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(0))
    given = np.random.default_rng(0).standard_normal((2, *FOV)).astype(np.float32)
    fused = FovPredictor(network, precision)
    assert fused._fused
    monkeypatch.setattr("headway.floodfill.prediction._can_fuse", lambda dtype: False)
    plain = FovPredictor(network, precision)
    update = plain(*given) - given[1]
    away = np.abs(fused(*given) - given[1] - update).max() / np.abs(update).max()
    assert away < {"float32": 1e-5, "bfloat16": 0.03}[precision]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_bits_do_not_depend_on_the_number_of_threads(precision):
    network = FloodFillingNetwork(2)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(0))
    predict = FovPredictor(network, precision)
    given = np.random.default_rng(0).standard_normal((2, 33, 33, 33)).astype(np.float32)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(predict(*given))
    finally:
        torch.set_num_threads(before)
    assert (found[0] == found[1]).all()
    assert (found[0] == found[2]).all()


@pytest.mark.parametrize(
    ("image", "said"),
    [
        (np.zeros((30, 30), np.uint8), "2 dimensions"),
        (np.zeros((30, 30, 30), np.int32), "int32"),
        (np.zeros((30, 8, 30), np.uint8), "30 x 8 x 30 voxels, and the field of view 9 x 9 x 9"),
    ],
)
def test_images_that_cannot_be_segmented(image, said):
    with pytest.raises(DataError, match=said):
        check_image(image, "volume.npy", FOV)


@pytest.mark.parametrize(
    ("largest", "said"),
    [(1.0, "floats from 0 to 1"), (np.nan, "no number"), (60000.0, "largest one is 60000")],
)
def test_floats_that_are_no_grey_values(largest, said):
    image = np.zeros((9, 9, 9), np.float32)
    check_grey_values(image, "black.npy")
    check_grey_values(image.astype(np.uint8) + 1, "dark.npy")
    image[4, 4, 4] = 255.5  # of an interpolation
    check_grey_values(image, "volume.npy")
    image[4, 4, 4] = largest
    with pytest.raises(DataError, match=said):
        check_grey_values(image, "volume.npy")


# -- the published weights ------------------------------------------------------------------------


@needs_fib25
@pytest.mark.parametrize(
    ("number", "seed"), [(2, (16, 19, 228)), (3, (16, 24, 204)), (30, (22, 139, 161))]
)
def test_in_the_whole_volume_an_object_is_the_published_one(number, seed):
    with np.load(VOLUME) as volume, np.load(SEGMENTATION) as published:
        image, ids = volume["img"], published["segmentation"]
    predict = FovPredictor(read_network(WEIGHTS))
    canvas = Canvas(
        scale_image(image), predict, FillingOptions(), fov=(33, 33, 33), deltas=(8, 8, 8)
    )
    filled = canvas.fill(seed, lambda voxel: 0 < ids[voxel] < number)
    box = tuple(slice(a, a + n) for a, n in zip(filled.start, filled.shape, strict=True))
    ours = filled.mask & ((ids[box] == 0) | (ids[box] >= number))
    # All voxels are the same here; on other processors one at the threshold may not be.
    assert np.count_nonzero(ours ^ (ids[box] == number)) <= 1e-3 * np.count_nonzero(ids == number)
    assert np.count_nonzero(ids[box] == number) == np.count_nonzero(ids == number)


@needs_fib25
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_published_weights_find_the_published_objects(tmp_path):
    crop = (slice(90, 156),) * 3
    with np.load(VOLUME) as volume, np.load(SEGMENTATION) as published:
        image, theirs = volume["img"][crop], published["segmentation"][crop]
    seeds = peak_seeds(image)
    seeds = seeds[((seeds >= 16) & (seeds < 50)).all(axis=1)]
    prepare_ledger(tmp_path / "ledger", image.shape, seeds, seed_groups(image, seeds))
    ledger = SeedLedger(tmp_path / "ledger", distance=(1, 1, 1), min_size=1000)
    predict = FovPredictor(read_network(WEIGHTS))
    canvas = Canvas(
        scale_image(image), predict, FillingOptions(), fov=(33, 33, 33), deltas=(8, 8, 8)
    )
    while (index := ledger.claim()) is not None:
        ledger.submit(index, canvas.fill(ledger.seed(index), ledger.is_taken))
    # Where the field of view can be centred; around it the published objects come from outside.
    middle = (slice(16, 50),) * 3
    ours, theirs = np.array(ledger.segments)[middle], theirs[middle]
    both = (ours > 0) & (theirs > 0)
    figures = agreement(contingency([(np.where(both, ours, 0), np.where(both, theirs, 0))]), dust=0)
    assert figures.split + figures.merge <= 0.005
    assert ledger.figures().objects == 3
    assert both.sum() >= 0.99 * (theirs > 0).sum()


def test_no_lock_is_left_open(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    seeds = np.array([[10, 10, 10]], dtype=np.int32)
    prepare_ledger(tmp_path / "ledger", SHAPE, seeds, np.ones(1, dtype=np.int32))
    ledger = SeedLedger(tmp_path / "ledger", distance=(1, 1, 1), min_size=20)
    for _ in range(20):
        ledger.claim()
    assert len(os.listdir("/proc/self/fd")) < before + 10
