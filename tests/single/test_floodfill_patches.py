"""single: where training patches begin, their labels, and the moves inside them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from headway.data.stateful_source import begin_slots
from headway.errors import DataError, RecipeError
from headway.floodfill.network import scale_image
from headway.floodfill.partitions import THRESHOLDS, BalancedPlaces, partition_map
from headway.floodfill.patches import MOVE, TRACKED, PatchGeometry, PatchSource, logit
from headway.optim.warmup import WarmUp
from headway.run.recipe.training_data import training_data, validation_data
from headway.workloads import floodfill
from support.floodfill_recipes import GEOMETRY, moving, patches


def bodies(shape=(11, 13, 12)):
    draw = np.random.default_rng(2)
    blocks = draw.integers(0, 4, [-(-size // 4) for size in shape])
    whole = np.kron(blocks, np.ones((4, 4, 4), dtype=int))[tuple(map(slice, shape))]
    return whole * 7


def test_the_partition_map_is_brute_force():
    ids, radius = bodies(), (2, 3, 1)
    found = partition_map(ids, radius, min_size=200)
    sizes = Counter(ids.ravel().tolist())
    for place in np.ndindex(ids.shape):
        inside = all(r <= p < n - r for p, r, n in zip(place, radius, ids.shape, strict=True))
        body, expected = ids[place], 0
        if inside and body and sizes[body] >= 200:
            box = tuple(slice(p - r, p + r + 1) for p, r in zip(place, radius, strict=True))
            share = (ids[box] == body).mean()
            expected = 1 + sum(share >= threshold for threshold in THRESHOLDS)
        assert found[place] == expected, place
    assert len(set(found.ravel().tolist())) > 4


def test_every_class_is_drawn_equally_often():
    classes = partition_map(bodies((40, 40, 40)), (4, 4, 4), min_size=1000)
    places = BalancedPlaces.of(classes)
    count = len(places.voxels)
    drawn = Counter(
        int(classes[places.draw(3, slot, patch)]) for slot in range(3) for patch in range(4 * count)
    )
    assert set(drawn) == set(classes.ravel().tolist()) - {0}
    assert set(drawn.values()) == {12}
    assert len({places.draw(3, 0, patch) for patch in range(4 * count)}) > 3 * count


def test_an_example_is_a_view_of_the_volume():
    source = patches(slots=30, axes=(1, 2))
    for slot in range(30):
        source.restore(slot, {})
    shares = [float((source.read([slot])["labels"] > 0.5).float().mean()) for slot in range(30)]
    slot = min(range(30), key=lambda slot: abs(shares[slot] - 0.5))
    one = source.read([slot])
    z, y, x = source.places.draw(0, slot, 0)
    assert one["image"].shape == one["mask"].shape == one["labels"].shape == (1, 1, 9, 9, 9)
    middle = scale_image(source.image[z, y, x][None])[0]
    assert float(one["image"][0, 0, 4, 4, 4]) == pytest.approx(float(middle))
    box = (slice(z - 4, z + 5), slice(y - 4, y + 5), slice(x - 4, x + 5))
    inside = source.bodies[box] == source.bodies[z, y, x]
    assert sorted(one["image"].flatten().tolist()) == sorted(
        scale_image(source.image[box]).ravel().tolist()
    )
    assert torch.unique(one["labels"]).tolist() == pytest.approx([0.05, 0.95])
    assert int((one["labels"] > 0.5).sum()) == int(inside.sum())
    assert (one["labels"] > 0.5)[one["image"] == middle].any()
    mask = one["mask"][0, 0]
    assert float(mask[4, 4, 4]) == pytest.approx(logit(0.95))
    assert int((mask > logit(0.06)).sum()) == 1
    # Planes stay planes where z is not permuted.
    means = one["image"][0, 0].mean(dim=(1, 2)).tolist()
    kept = scale_image(source.image[box]).mean(axis=(1, 2)).tolist()
    assert means in (pytest.approx(kept), pytest.approx(kept[::-1]))


def test_augmentation_turns_and_reflects():
    source = patches(slots=1)
    seen = set()
    for number in range(60):
        source.restore(0, {"patch": torch.tensor(number), "visit": torch.tensor(0),
                           "mask": torch.zeros(1), "counts": torch.zeros(7),
                           "finished": torch.zeros(7)})  # fmt: skip
        z, y, x = source.places.draw(0, 0, number)
        box = scale_image(source.image[z - 7 : z + 8, y - 7 : y + 8, x - 7 : x + 8])
        image = source._slots[0].patch.image
        seen |= {
            (order, flips)
            for order in [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
            for flips in np.ndindex(2, 2, 2)
            if np.array_equal(
                box.transpose(order)[tuple(slice(None, None, 1 - 2 * f) for f in flips)], image
            )
        }
    assert len(seen) > 30  # of 48


def test_moves_follow_the_mask_in_the_order_of_the_patch():
    source = patches(slots=1)
    source.restore(0, {})
    patch = source._slots[0].patch
    assert sorted(patch.visits) == sorted([(0, 0, 0), *GEOMETRY.offsets])
    # Only below the middle the mask is filled: only there it moves, in the order of the visits.
    output = torch.full((1, 1, 9, 9, 9), -4.0)
    output[:, :, :4] = logit(MOVE) + 1e-3
    source.absorb([0], output)
    wanted = [visit for visit in patch.visits[1:] if visit[0] < 0]
    made = []
    while source._slots[0].number == 0:
        made.append(source._slots[0].patch.visits[source._slots[0].visit])
        view = source.read([0])
        source.absorb([0], view["mask"])  # the network changes nothing any more
        assert len(made) < 30
    assert made == wanted
    counts = dict(zip(TRACKED, source.read([0])["tracked"][0].tolist(), strict=True))
    right = {v for v in GEOMETRY.offsets if patch.inside[7 + v[0], 7 + v[1], 7 + v[2]]}
    assert counts["correct"] == len(right & set(wanted))
    assert counts["missed"] == len(right - set(wanted))
    assert counts["spurious"] == len(set(wanted) - right)
    found = torch.zeros(15, 15, 15, dtype=torch.bool)
    found[3:7, 3:12, 3:12] = True
    assert counts["tp"] == int((found & torch.from_numpy(patch.inside)).sum())
    assert counts["fp"] == int((found & ~torch.from_numpy(patch.inside)).sum())
    assert counts["tp"] + counts["fn"] == int(patch.inside.sum())
    assert sum(counts[name] for name in TRACKED[3:]) == 15**3
    source.absorb([0], torch.full((1, 1, 9, 9, 9), -4.0))
    assert source.read([0])["tracked"].sum() > 0  # of the patch that has just been left, no other


def test_a_mask_just_below_the_threshold_does_not_move():
    source = patches(slots=1)
    source.restore(0, {})
    source.absorb([0], torch.full((1, 1, 9, 9, 9), logit(MOVE) - 1e-3))
    assert source._slots[0].number == 1


def test_a_mask_is_kept_in_the_type_of_the_network():
    """Rounded, two ranks would differ by more than the order of their sums."""
    source = patches(slots=1)
    source.restore(0, {})
    output = torch.full((1, 1, 9, 9, 9), logit(MOVE) + 1e-12, dtype=torch.float64)
    source.absorb([0], output)
    assert source._slots[0].number == 0
    assert torch.equal(source.state(0)["mask"][3:12, 3:12, 3:12], output[0, 0])


def test_a_state_goes_on_where_it_was_asked_for():
    def outputs(source):
        return source.read(range(2))["mask"] + 8 * source.read(range(2))["image"] - 2

    one, other = patches(slots=2), patches(slots=2)
    for source in (one, other):
        for slot in range(2):
            source.restore(slot, {})
    for _ in range(5):
        one.absorb(range(2), outputs(one))
    assert max(int(one.state(slot)["visit"]) for slot in range(2)) > 0
    for slot in range(2):
        other.restore(slot, {name: t.clone() for name, t in one.state(slot).items()})
    for _ in range(9):
        a, b = one.read(range(2)), other.read(range(2))
        assert all(torch.equal(a[name], b[name]) for name in a)
        one.absorb(range(2), outputs(one))
        other.absorb(range(2), outputs(other))


def test_metrics_are_of_whole_patches():
    batch = {"tracked": torch.tensor([[3.0, 1, 0, 6, 2, 2, 90], [0, 0, 0, 0, 0, 0, 0]])}
    found = {name: float(a / b) for name, (a, b) in floodfill.tracked(None, batch).items()}
    assert found == pytest.approx(
        {"precision": 0.75, "recall": 0.75, "accuracy": 0.96, "f1": 0.75, "correct moves": 0.75,
         "missed moves": 0.25, "spurious moves": 0.0}
    )  # fmt: skip


def test_gradients_are_clipped_entry_by_entry():
    weight = torch.nn.Parameter(torch.zeros(3))
    made = floodfill.clipped_optimizer(
        torch.nn.ParameterList([weight]), name="sgd", learning_rate=1.0, momentum=0.0
    )
    weight.grad = torch.tensor([0.5, -3.0, 0.8])
    made.step()
    assert weight.tolist() == pytest.approx([-0.5, 0.7, -0.7])


@pytest.mark.parametrize("workers", [2, 8])
def test_the_warm_up_is_horovods_table(workers):
    """(1/n) (e (n - 1) / E_w + 1), n workers, over E_w = 5 epochs of 4 steps."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = WarmUp(optimizer, 5 * 4, start=1 / workers)
    for step in range(24):
        epoch = min(step / 4, 5)
        expected = (epoch * (workers - 1) / 5 + 1) / workers
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * expected)
        optimizer.step()
        scheduler.step()


# -- what cannot be trained on ---------------------------------------------------------------------


def test_labels_of_another_shape_are_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((30, 30, 30), np.uint8))
    np.save(tmp_path / "b.npy", np.zeros((30, 30, 29), np.int32))
    recipe = floodfill.recipe(volume=str(tmp_path / "a.npy"), labels=str(tmp_path / "b.npy"))
    with pytest.raises(DataError, match=r"shape \[30, 30, 30\], and its labels \[30, 30, 29\]"):
        recipe.data()


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((30, 30, 30), {"min_size": 10**6}, "no body has 1000000 voxels"),
        ((30, 14, 30), {}, "30 x 14 x 30 voxels is too small"),
        ((30, 30, 30), {"fov": (8, 9, 9)}, "has no middle"),
        ((30, 30, 30), {"fov": (7, 9, 9), "axes": (0, 1)}, r"axes \[0, 1\] cannot be permuted"),
    ],
)
def test_volumes_that_do_not_fit_are_refused(shape, options, message):
    image, ids = np.zeros(shape, np.uint8), np.ones(shape, np.int32)
    geometry = PatchGeometry(options.pop("fov", (9, 9, 9)), (3, 3, 3))
    with pytest.raises(DataError, match=message):
        PatchSource(image, ids, geometry, slots=2, visits=5, **options)


def test_there_are_as_many_slots_as_samples_of_the_batch():
    recipe = replace(moving(slots=4), batch=6)
    for made in (training_data(recipe), validation_data(recipe)):
        assert made.slots == 6
        assert len(made) % 6 == 0
    begin_slots(source := training_data(recipe))
    begin_slots(before := patches(4))
    found, expected = source.read(range(6)), before.read(range(4))
    assert all((found[name][:4] == expected[name]).all() for name in expected)


def test_arguments_that_cannot_be_are_refused():
    with pytest.raises(RecipeError, match="without its labels"):
        floodfill.recipe(volume="em.h5:raw")
    with pytest.raises(RecipeError, match=r"fov is \[9, 9\]"):
        floodfill.recipe(fov=[9, 9])
    with pytest.raises(RecipeError, match="no optimizer 'adagrad'"):
        floodfill.recipe(optimizer="adagrad")
    with pytest.raises(RecipeError, match="validation_visits is 27"):
        floodfill.recipe(validation_visits=27)
