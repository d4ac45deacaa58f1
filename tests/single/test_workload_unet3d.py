"""single: 3-D U-Nets: the published sizes, Dice, volumes of heads, the recipe."""

import gzip
import struct
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from headway.data import SlabCut
from headway.errors import DataError, RecipeError
from headway.run.recipe.factory import load_recipe
from headway.workloads.unet3d import (
    SMALL_WIDTHS,
    CicekUNet,
    MLPerfUNet,
    Patches,
    Phantoms,
    classes_of,
    cross_entropy_and_dice,
    dice,
    dice_of_classes,
    read_nifti,
    recipe,
    scores,
    source,
)
from support.workload_files import write_heads


def without_numbers(build, *arguments, **options):
    with torch.device("meta"):
        return build(*arguments, **options)


def count(model):
    return sum(p.numel() for p in model.parameters())


# ---- models --------------------------------------------------------------------------------------


def test_published_sizes():
    assert count(without_numbers(CicekUNet)) == 19_070_560
    assert count(without_numbers(MLPerfUNet, 2, 4, widths=SMALL_WIDTHS)) == 85_420


def test_the_size_of_mlperfs_network_by_a_formula():
    widths = (32, 64, 128, 256, 320, 320)
    convolutions = [(1, 32), (32, 32)]
    for a, b in pairwise(widths):
        convolutions += [(a, b), (b, b), (2 * a, a), (a, a)]
    expected = sum(27 * a * b + 2 * b for a, b in convolutions)  # no bias; a norm's two
    expected += sum(8 * a * b + a for a, b in pairwise(widths))  # deconvolutions
    expected += 3 * 32 + 3
    assert expected == 31_190_243
    assert count(without_numbers(MLPerfUNet)) == expected


@pytest.mark.parametrize("build", [CicekUNet, MLPerfUNet])
def test_scores_have_the_size_of_the_volume(build):
    model = without_numbers(build)
    assert model(torch.empty(2, 1, 32, 64, 96, device="meta")).shape == (2, 3, 32, 64, 96)
    factor = {CicekUNet: 8, MLPerfUNet: 32}[build]
    with pytest.raises(ValueError, match=f"each must be a multiple of {factor}"):
        model(torch.empty(1, 1, 32, 32, 36, device="meta"))


def test_layers_of_cicek():
    """Channels of each convolution, in order of execution."""
    model = without_numbers(CicekUNet)
    seen = []
    for module in model.modules():
        if isinstance(module, nn.Conv3d | nn.ConvTranspose3d):
            module.register_forward_hook(
                lambda m, _, y: seen.append((m.in_channels, m.out_channels, y.shape[-1]))
            )
    model(torch.empty(1, 1, 16, 16, 16, device="meta"))
    assert seen == [
        (1, 32, 16), (32, 64, 16), (64, 64, 8), (64, 128, 8), (128, 128, 4), (128, 256, 4),
        (256, 256, 2), (256, 512, 2), (512, 512, 4), (768, 256, 4), (256, 256, 4),
        (256, 256, 8), (384, 128, 8), (128, 128, 8), (128, 128, 16), (192, 64, 16), (64, 64, 16),
        (64, 3, 16),
    ]  # fmt: skip
    assert not any(name.endswith("0.bias") for name, _ in model.named_parameters())


# ---- Dice ----------------------------------------------------------------------------------------


def shares(labels, classes):
    return nn.functional.one_hot(labels, classes).permute(0, 4, 1, 2, 3).double()


def test_dice_by_hand():
    """Class 1: 2 common of 3 and 2 voxels, 4/5; class 2: none of 1 and 2; class 3 in neither."""
    truth = torch.tensor([0, 1, 1, 1, 2, 0, 0, 0]).view(1, 2, 2, 2)
    said = torch.tensor([2, 1, 1, 2, 0, 0, 0, 0]).view(1, 2, 2, 2)
    found = dice(shares(said, 4), truth)[0].tolist()
    assert found == pytest.approx([2 * 3 / (4 + 4), 0.8, 0, 1], abs=1e-5)
    scores = shares(said, 4) * 3
    assert dice_of_classes(scores, truth).tolist() == pytest.approx(found, abs=1e-12)


def test_the_loss_by_hand():
    random = np.random.default_rng(0)
    numbers, labels = random.normal(size=(2, 3, 2, 2, 2)), random.integers(0, 3, (2, 2, 2, 2))
    p = np.exp(numbers) / np.exp(numbers).sum(axis=1, keepdims=True)
    entropy, missing = 0.0, []
    for n in range(2):
        for c in range(3):
            inside = labels[n] == c
            entropy -= np.log(p[n, c][inside]).sum() / labels.size
            if c:
                agreed = 2 * p[n, c][inside].sum() + 1e-6
                missing.append(1 - agreed / (p[n, c].sum() + inside.sum() + 1e-6))
    found = cross_entropy_and_dice(torch.from_numpy(numbers), torch.from_numpy(labels))
    assert float(found) == pytest.approx((entropy + np.mean(missing)) / 2, rel=1e-12)


def test_the_loss_of_a_batch_is_the_mean_over_its_samples():
    numbers = torch.randn(3, 4, 2, 4, 4, dtype=torch.float64)
    labels = torch.randint(0, 4, (3, 2, 4, 4))
    each = [cross_entropy_and_dice(numbers[i : i + 1], labels[i : i + 1]) for i in range(3)]
    assert float(cross_entropy_and_dice(numbers, labels)) == pytest.approx(
        float(sum(each) / 3), rel=1e-12
    )


# ---- data ----------------------------------------------------------------------------------------


def test_phantoms_follow_from_seed_and_number():
    heads = Phantoms(4, 16)
    images, labels = heads.read([3, 1])
    assert images.shape == (2, 2, 16, 16, 16)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    again = Phantoms(4, 16).read([1])
    assert torch.equal(again[0][0], images[1])
    assert torch.equal(again[1][0], labels[1])
    assert not torch.equal(Phantoms(4, 16, seed=1).read([1])[0], again[0])
    assert not torch.equal(Phantoms(4, 16, first=1).read([1])[0], again[0])


def test_files_hold_what_was_made(tmp_path):
    pytest.importorskip("h5py")
    heads = Phantoms(3, 16)
    write_heads(tmp_path / "train", heads)
    files = source("train", width=16, count=0, directory=tmp_path)
    for a, b in zip(files.read([2, 0]), heads.read([2, 0]), strict=True):
        assert torch.equal(a, b)
    images, labels = files.parted(SlabCut((1, 2, 1), 1)).read([1]).data
    whole = heads.read([1])
    assert torch.equal(images, whole[0][:, :, :, 8:])
    assert torch.equal(labels, whole[1][:, :, 8:])


def test_phantoms_have_all_classes_and_need_more_than_brightness():
    images, labels = Phantoms(6, 32).read(range(6))
    for head in labels:
        assert head.unique().tolist() == [0, 1, 2, 3]
    means = [float(images[:, 0][labels == c].mean()) for c in (1, 2, 3)]
    assert max(means) - min(means) < 0.05
    outside = images[:, 1] == -1  # the brain alone
    assert not labels[outside].any()


def nifti(path, voxels, *, order="<", slope=0.0, start=0.0, right=1.0):
    """A file as other programs write it."""
    codes = {"u1": 2, "i2": 4, "f4": 16}
    header = bytearray(352)
    struct.pack_into(f"{order}i", header, 0, 348)
    dims = (voxels.ndim, *voxels.shape, *(1,) * (7 - voxels.ndim))
    struct.pack_into(f"{order}8h", header, 40, *dims)
    code = codes[voxels.dtype.str[1:]]
    struct.pack_into(f"{order}2h", header, 70, code, 8 * voxels.itemsize)
    struct.pack_into(f"{order}3f", header, 108, 352.0, slope, start)
    struct.pack_into(f"{order}h", header, 254, 4)
    rows = (right, 0, 0, -9, 0, 1, 0, -8, 0, 0, 1, -7)
    struct.pack_into(f"{order}12f", header, 280, *map(float, rows))
    header[344:348] = b"n+1\0"
    content = bytes(header) + voxels.astype(voxels.dtype.newbyteorder(order)).tobytes(order="F")
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("kind", ["u1", "i2", "f4"])
@pytest.mark.parametrize("name", ["a.nii", "a.nii.gz"])
def test_volumes_are_read(tmp_path, order, kind, name):
    voxels = np.arange(24).reshape(2, 3, 4).astype(kind)
    nifti(tmp_path / name, voxels, order=order)
    found = read_nifti(tmp_path / name)
    assert np.array_equal(found.voxels, voxels)
    assert found.affine.tolist() == [[1, 0, 0, -9], [0, 1, 0, -8], [0, 0, 1, -7]]


def test_volumes_are_scaled(tmp_path):
    voxels = np.arange(8, dtype="u1").reshape(2, 2, 2)
    nifti(tmp_path / "a.nii", voxels, slope=2.0, start=-1.0)
    assert np.array_equal(read_nifti(tmp_path / "a.nii").voxels, voxels * 2.0 - 1)


def test_volumes_that_cannot_be_read(tmp_path):
    path = tmp_path / "a.nii.gz"
    with pytest.raises(DataError, match="cannot be read"):
        read_nifti(path)
    path.write_bytes(b"x" * 400)
    with pytest.raises(DataError, match="not a NIfTI-1 file"):
        read_nifti(path)
    nifti(path, np.zeros((4, 4, 4), "i2"))
    whole = gzip.decompress(path.read_bytes())
    path.write_bytes(whole[:-1])
    with pytest.raises(DataError, match="cut short"):
        read_nifti(path)
    path.write_bytes(gzip.compress(whole)[:-20])
    with pytest.raises(DataError, match="cannot be read"):
        read_nifti(path)


@pytest.fixture
def head(tmp_path):
    """A head of 20 x 18 x 16 voxels, whose brightness is the index along the first dimension."""
    across = np.broadcast_to(np.arange(20, dtype="u1")[:, None, None], (20, 18, 16)).copy()
    atlas = np.zeros((20, 18, 16), "u1")
    atlas[2:18, 2:9] = 1
    atlas[2:18, 10:14] = 91
    atlas[4:16, 15:17, 3] = 71
    for name, voxels in (("ch2", across), ("ch2bet", across), ("aal", atlas)):
        nifti(tmp_path / f"{name}.nii.gz", voxels)
    return tmp_path


def test_patches_of_training_and_validation_lie_in_different_halves(head):
    halves = {}
    for split in ("train", "validation"):
        images, labels = Patches(head, split, 40, 8).read(range(40))
        assert images.shape == (40, 2, 8, 8, 8)
        halves[split] = set(((images + 1) * 64).round().int().flatten().tolist())
        seen = [(labels == c).flatten(1).any(dim=1).sum() for c in range(4)]
        assert min(seen) >= 5  # the few voxels of the nucleus, too
    assert halves["train"] <= set(range(10))
    assert halves["validation"] <= set(range(10, 20))


def test_the_left_half_is_found_by_the_affine(head):
    atlas = read_nifti(head / "aal.nii.gz").voxels
    nifti(head / "aal.nii.gz", np.ascontiguousarray(atlas), right=-1.0)
    images, _ = Patches(head, "train", 5, 8).read(range(5))
    assert float((images + 1).min()) * 64 >= 10


def test_heads_that_cannot_be_cut(head):
    with pytest.raises(DataError, match="cubes of 12 voxels do not fit"):
        Patches(head, "train", 5, 12)
    nifti(head / "ch2.nii.gz", np.zeros((4, 4, 4), "u1"))
    with pytest.raises(DataError, match="the grids differ"):
        Patches(head, "train", 5, 8)


def test_classes_of_the_atlas():
    labels = np.array([0, 1, 70, 71, 78, 79, 90, 91, 116])
    assert classes_of(labels).tolist() == [0, 1, 1, 2, 2, 1, 1, 3, 3]


# ---- recipe --------------------------------------------------------------------------------------


def test_the_short_name_finds_the_recipe():
    found = load_recipe("unet3d", ["arguments.width=8", "arguments.samples=3"])
    assert found.name == "unet3d small 8^3 on phantoms made from seed 0"
    loss = found.loss(found.model(), found.data().read(range(2)))
    assert 0.5 < float(loss.detach()) < 2
    assert not torch.equal(found.data().read([0])[0], found.validation().read([0])[0])
    assert recipe(variant="cicek").loss is not found.loss
    with pytest.raises(RecipeError, match="no variant 'large'"):
        recipe(variant="large")


def test_a_real_head_is_named_in_the_recipe(head):
    found = recipe(volumes=head, width=8)
    assert str(head) in found.name
    assert isinstance(found.data(), Patches)


def test_a_perfect_model_has_a_dice_of_one():
    heads = Phantoms(2, 16)
    answers = iter([shares(heads.read([i])[1], 4).float() for i in range(2)])

    class Knows(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, _):
            return next(answers)

    assert "mean of the last three 1.000" in scores(lambda: heads, Knows())
