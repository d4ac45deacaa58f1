"""single: CosmoFlow: the published sizes, the universes it learns from, their files, its recipe."""

import sys
from math import pi, prod

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from headway.data import SeededSource, SlabCut
from headway.errors import DataError, MissingExtra, RecipeError
from headway.run.recipe.check import check_recipe
from headway.run.recipe.factory import load_recipe
from headway.workloads import cosmoflow
from headway.workloads.cosmoflow import (
    CosmoFlow,
    Cosmology,
    PeriodicBox,
    errors,
    lbann,
    mlperf,
    recipe,
    small,
)
from support.workload_files import write_universes

UNIVERSE = Cosmology(omega_m=0.3, sigma_8=0.8, n_s=0.96, h=0.7)


def without_numbers(config):
    with torch.device("meta"):
        return CosmoFlow(config)


def run_without_numbers(built):
    """FLOPs of the convolutions, and the results of convolutions, activations, poolings, norms."""
    sizes = {}

    def note(module, _, result):
        kind = type(module).__name__
        sizes[kind] = sizes.get(kind, 0) + result.numel()

    for block in built.blocks:
        for layer in block:
            layer.register_forward_hook(note)
    with FlopCounterMode(display=False) as counter:
        built(torch.empty(1, 4, *(built.config.width,) * 3, device="meta"))
    return counter.get_flop_counts()["Global"][torch.ops.aten.convolution], sizes


# ---- model: the table of LBANN's and MLPerf's variants -------------------------------------------


@pytest.mark.parametrize(
    ("config", "parameters", "gigaflop", "gibibytes"),
    [
        (lbann(128), 35_259_316, 20.8, 0.35),
        (lbann(256), 37_029_044, 168.5, 2.83),
        (lbann(512), 38_798_772, 1_349.9, 22.65),
        (mlperf(128), 8_907_556, 68.9, 0.71),
        (mlperf(256), 15_985_956, 558.1, 5.66),
        (mlperf(512), 23_064_356, 4_471.9, 45.31),
    ],
    ids=["lbann 128", "lbann 256", "lbann 512", "mlperf 128", "mlperf 256", "mlperf 512"],
)
def test_published_sizes(config, parameters, gigaflop, gibibytes):
    built = without_numbers(config)
    assert sum(p.numel() for p in built.parameters()) == parameters
    flop, sizes = run_without_numbers(built)
    assert round(flop / 1e9, 1) == gigaflop
    assert round(4 * sum(sizes.values()) / 2**30, 2) == gibibytes


@pytest.mark.parametrize(("width", "gibibytes"), [(128, 0.52), (256, 4.16), (512, 33.31)])
def test_batch_norm_takes_the_place_of_biases(width, gibibytes):
    plain, normed = (without_numbers(lbann(width, batch_norm=on)) for on in (False, True))
    names = {name for name, _ in normed.named_parameters()}
    assert not any(f"blocks.{i}.0.bias" in names for i in range(7))
    counts = [sum(p.numel() for p in built.parameters()) for built in (plain, normed)]
    assert counts[1] - counts[0] == sum(lbann(width).features)
    assert {m.momentum for m in normed.modules() if isinstance(m, nn.BatchNorm3d)} == {0.01}
    assert round(4 * sum(run_without_numbers(normed)[1].values()) / 2**30, 2) == gibibytes


def test_the_small_model_is_the_same_code_with_other_sizes():
    assert small().features == (16, 32, 64)
    assert sum(p.numel() for p in without_numbers(small()).parameters()) == 603_892


def test_layers_of_each_variant():
    ours, theirs = without_numbers(lbann(128)), without_numbers(mlperf(128))
    pool = ours.blocks[0][-1]
    assert (pool.kernel_size, pool.stride, pool.padding) == (3, 2, 1)
    assert isinstance(theirs.blocks[0][-1], nn.MaxPool3d)
    for built in (ours, theirs):
        slopes = {m.negative_slope for m in built.modules() if isinstance(m, nn.LeakyReLU)}
        assert slopes == {0.3}
        assert [m.p for m in built.head if isinstance(m, nn.Dropout)] == [0.5, 0.5]


def test_initial_weights_and_the_range_of_the_output():
    torch.manual_seed(0)
    built = CosmoFlow(small(16))
    weight = built.head[0].weight
    assert float(weight.detach().std()) == pytest.approx((2 / weight.shape[1]) ** 0.5, rel=0.01)
    assert not built.head[0].bias.any()
    y = built(1e4 * torch.randn(2, 4, 16, 16, 16))
    assert y.shape == (2, 4)
    assert float(y.detach().abs().max()) == pytest.approx(1.2, rel=1e-6)


def test_fitted_weights_tell_samples_apart():
    """Each layer's results have mean 0 and deviation 1, where He's are nearly alike."""
    x = cosmoflow.Universes(24, 8).read(range(24))[0]
    torch.manual_seed(0)
    built = CosmoFlow(small(8, dropout=0.5))
    cosmoflow.fit(built, x)
    assert built.training
    seen = []
    for layer in built.modules():
        if isinstance(layer, (nn.Conv3d, nn.Linear)):
            layer.register_forward_hook(lambda _, __, y: seen.append(y.transpose(0, 1).flatten(1)))
    with torch.no_grad():
        built.eval()(x)
    for y, deviation in zip(seen, (1, 1, 1, 0.3), strict=True):
        assert y.mean(dim=1).abs().max() < 1e-4
        alive = y.std(dim=1) > 0
        assert alive.float().mean() > 0.9
        assert y.std(dim=1)[alive].numpy() == pytest.approx(deviation, rel=1e-3)


def test_which_initial_weights_a_recipe_takes(tmp_path):
    pytest.importorskip("h5py")
    torch.manual_seed(0)
    made = recipe(width=8).model()
    torch.manual_seed(0)
    he = recipe(width=8, fitted=0).model()
    assert not torch.equal(made.head[0].weight, he.head[0].weight)
    assert not he.head[0].bias.any()
    write_universes(tmp_path / "train", cosmoflow.Universes(1, 8))
    for other in (recipe(width=8, directory=tmp_path), recipe(width=8, variant="lbann")):
        assert not other.model().head[0].bias.any()
    with torch.device("meta"):
        assert recipe(width=8).model().head[0].weight.is_meta
    with pytest.raises(RecipeError, match="fitted initial weights"):
        recipe(width=8, batch_norm=True, fitted=4)


@pytest.mark.parametrize(
    "change", [{"width": 24}, {"width": 4}, {"channels": 0}, {"pooling": "sum"}, {"dropout": 1.0}]
)
def test_sizes_that_make_no_model(change):
    given = {"width": 32, "channels": 16, "most_channels": 64, "pooling": "max", "hidden": (8, 8)}
    with pytest.raises(ValueError, match=next(iter(change))):
        cosmoflow.CosmoFlowConfig(**(given | change))


def test_a_cube_of_another_width_is_an_error():
    with pytest.raises(ValueError, match=r"\(4, 8, 8, 8\) do not fit a cube of 16\^3"):
        CosmoFlow(small(16))(torch.zeros(1, 4, 8, 8, 8))


# ---- universes -----------------------------------------------------------------------------------


def test_the_linear_spectrum_is_that_of_colossus():
    """colossus 1.4.0, model eisenstein98, relspecies off."""
    k = np.array([0.01, 0.1, 1.0])
    expected = [21685.855164, 5442.075181, 63.441174]
    assert cosmoflow.power(k, UNIVERSE) == pytest.approx(expected, rel=1e-4)
    other = Cosmology(omega_m=0.25, sigma_8=0.95, n_s=0.9, h=0.65)
    expected = [65343.764703, 7890.323575, 66.335900]
    assert cosmoflow.power(k, other) == pytest.approx(expected, rel=1e-4)


def test_growth_is_that_of_colossus():
    found = [cosmoflow.growth(z, UNIVERSE) for z in (0, 0.5, 1.5, 3)]
    assert found == pytest.approx([1, 0.77318775, 0.50044805, 0.3188407], rel=2e-5)


def test_against_colossus_itself():
    from colossus.cosmology import cosmology

    theirs = cosmology.setCosmology(
        "ours", {"flat": True, "H0": 70, "Om0": 0.3, "Ob0": 0.049, "sigma8": 0.8, "ns": 0.96,
                 "Tcmb0": 2.7255, "relspecies": False}, persistence="",
    )  # fmt: skip
    k = np.geomspace(1e-3, 10, 50)
    expected = theirs.matterPowerSpectrum(k, model="eisenstein98")
    assert cosmoflow.power(k, UNIVERSE) == pytest.approx(expected, rel=1e-3)


def test_sigma_8_is_what_was_asked_for():
    def each(log_k):
        k = np.exp(log_k)
        x = 8 * k
        window = 3 * (np.sin(x) - x * np.cos(x)) / x**3
        return k**3 * cosmoflow.power(np.array([k]), UNIVERSE)[0] * window**2 / (2 * pi**2)

    variance, _ = quad(each, np.log(1e-4), np.log(20), limit=500)
    assert variance**0.5 == pytest.approx(0.8, rel=1e-3)


def test_no_mass_is_lost():
    random = np.random.default_rng(0)
    places = random.uniform(-20, 40, (3, 9**3))  # far outside of the box, too
    mass = cosmoflow.deposit(places, 9)
    assert mass.sum() == 9**3
    assert mass.min() >= 0


def test_a_particle_is_shared_by_the_cells_around_it():
    mass = cosmoflow.deposit(np.array([[3.25], [0.0], [3.5]]), 4)
    found = {tuple(map(int, place)): mass[tuple(place)] for place in np.argwhere(mass)}
    assert found == {(3, 0, 3): 0.375, (3, 0, 0): 0.375, (0, 0, 3): 0.125, (0, 0, 0): 0.125}


def test_the_field_has_its_spectrum():
    """Measured over given power in seven bins of 8 universes: chi^2 of complex numbers."""
    box = PeriodicBox(32)
    size = np.sqrt(box.square())
    edges = np.linspace(0.1, 1.4, 8)
    ratios, counts = np.zeros(7), np.zeros(7)
    for sample in range(8):
        delta = box.linear(cosmoflow.white_noise(1, sample, 32), UNIVERSE)
        ratio = np.abs(delta) ** 2 * 64**3 / 32**6 / cosmoflow.power(size, UNIVERSE)
        for b in range(7):
            inside = (size >= edges[b]) & (size < edges[b + 1])
            ratios[b] += ratio[inside].sum()
            counts[b] += inside.sum()
    # Half of the numbers at most are independent of the other half.
    assert (np.abs(ratios / counts - 1) < 5 / np.sqrt(counts / 2)).all()


def test_minus_the_divergence_of_the_displacement_is_the_density():
    box = PeriodicBox(16)
    noise = cosmoflow.white_noise(0, 0, 16)
    delta = box.linear(noise, UNIVERSE)
    for k in box.waves():  # without the highest waves, which have no direction
        delta = np.where(np.abs(k) > 0.99 * pi / box.cell, 0, delta)
    psi = box.displacement(delta)
    parts = zip(box.waves(), psi, strict=True)
    divergence = sum(1j * k * np.fft.rfftn(part) for k, part in parts)
    assert -divergence == pytest.approx(delta, abs=1e-9 * np.abs(delta).max())


def test_a_plane_wave_has_no_second_order():
    box = PeriodicBox(16)
    x = np.indices((16, 16, 16))[1]
    source = box.second_order(np.fft.rfftn(np.cos(2 * pi * 3 * x / 16)))
    assert np.abs(source).max() < 1e-9


def test_a_sphere_collapses_faster_in_second_order():
    """There phi,ii is delta / 3 each: the source is delta^2 / 3."""
    box = PeriodicBox(32)
    y = (np.indices((32, 32, 32)) - 16) * box.cell
    delta = np.exp(-(y**2).sum(axis=0) / (2 * 8.0**2))
    source = np.fft.irfftn(box.second_order(np.fft.rfftn(delta - delta.mean())))
    middle = (16, 16, 16)
    assert source[middle] - source[0, 0, 0] == pytest.approx(1 / 3, rel=0.1)


def test_later_universes_are_lumpier_and_hold_the_same_mass():
    for order in (1, 2):
        cubes, parameters = cosmoflow.matter(0, 3, PeriodicBox(16), order=order)
        assert cubes.shape == (4, 16, 16, 16)
        assert cubes.sum(axis=(1, 2, 3), dtype=np.float64) == pytest.approx([16**3] * 4, rel=1e-6)
        deviations = cubes.std(axis=(1, 2, 3))
        assert (np.diff(deviations) < 0).all()
        assert (np.abs(parameters) <= 1).all()


def test_a_universe_follows_from_seed_and_number():
    one = cosmoflow.matter(5, 7, PeriodicBox(8))
    again = cosmoflow.matter(5, 7, PeriodicBox(8))
    assert all(np.array_equal(a, b) for a, b in zip(one, again, strict=True))
    for seed, sample in ((5, 8), (6, 7)):
        other = cosmoflow.matter(seed, sample, PeriodicBox(8))
        assert not np.array_equal(one[0], other[0])
        assert not np.array_equal(one[1], other[1])


def test_parameters_fill_their_ranges():
    drawn = np.stack([cosmoflow.unit_parameters(cosmoflow.draw(0, i)) for i in range(400)])
    assert np.abs(drawn.mean(axis=0)).max() < 0.12
    assert drawn.std(axis=0) == pytest.approx([3**-0.5] * 4, rel=0.1)
    middle = Cosmology(omega_m=0.3, sigma_8=0.865, n_s=0.95, h=0.7)
    assert cosmoflow.unit_parameters(middle) == pytest.approx([0] * 4, abs=1e-6)


# ---- data ----------------------------------------------------------------------------------------


def test_samples_are_logarithms():
    universes = cosmoflow.Universes(3, 8)
    cubes, targets = universes.read([2, 0])
    cube, parameters = cosmoflow.matter(0, 2, PeriodicBox(8))
    assert torch.equal(cubes[0], torch.log1p(torch.from_numpy(cube)))
    assert torch.equal(targets[0], torch.from_numpy(parameters))


def test_turned_universes_are_the_same_ones_from_elsewhere():
    """Sorted numbers, the power at each |k|, and targets stay; the seed alone says how."""
    universes = cosmoflow.Universes(3, 8)
    turned = cosmoflow.source("train", width=8, count=3)
    assert isinstance(turned, SeededSource)
    whole, targets = universes.read([2, 0])
    cubes, same = turned.read_seeded([2, 0], [2**64 - 1, 7])
    assert torch.equal(same, targets)
    assert torch.equal(turned.read([2, 0])[0], whole)
    assert not torch.equal(cubes, whole)
    again, _ = turned.read_seeded([0], [7])
    assert torch.equal(again[0], cubes[1])
    steps = np.fft.fftfreq(8) ** 2
    size = steps[:, None, None] + steps[:, None] + steps
    for a, b in zip(cubes, whole, strict=True):
        for z in range(4):
            assert torch.equal(a[z].flatten().sort().values, b[z].flatten().sort().values)
            powers = [np.abs(np.fft.fftn(x[z].double().numpy())) ** 2 for x in (a, b)]
            for k in np.unique(size.round(9))[:9]:
                ring = np.abs(size - k) < 1e-6
                assert powers[0][ring].sum() == pytest.approx(powers[1][ring].sum(), rel=1e-6)


def test_files_hold_what_was_made(tmp_path):
    pytest.importorskip("h5py")
    universes = cosmoflow.Universes(3, 8, first=10)
    write_universes(tmp_path / "train", universes)
    files = cosmoflow.source("train", width=8, count=0, directory=tmp_path)
    assert len(files) == 3
    for a, b in zip(files.read([2, 0]), universes.read([2, 0]), strict=True):
        assert torch.equal(a, b)
    part = files.parted(SlabCut((2, 1, 1), 1)).read([1])
    assert torch.equal(part.data[0], universes.read([1])[0][:, :, 4:])
    assert part.extents == (8, 8, 8)


def test_files_that_are_missing_or_damaged(tmp_path):
    h5py = pytest.importorskip("h5py")
    folder = tmp_path / "train"
    with pytest.raises(
        DataError, match=r"neither \*\.hdf5 nor \.npy or \.zarr of the names full, unitPar"
    ):
        cosmoflow.source("train", width=8, count=0, directory=tmp_path)
    write_universes(folder, cosmoflow.Universes(1, 8))
    (folder / "v.hdf5").write_bytes(b"nothing")
    with h5py.File(folder / "w.hdf5", "w") as file:
        file["other"] = [1]
    files = cosmoflow.source("train", width=8, count=0, directory=tmp_path)
    for sample, what in ((1, "not a sound HDF5 file"), (2, "no data set 'full'")):
        with pytest.raises(DataError, match=what):
            files.read([sample])


def test_without_h5py_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(MissingExtra) as caught:
        write_universes(tmp_path, cosmoflow.Universes(1, 8))
    assert "headway[hdf5]" in caught.value.fix


# ---- recipe --------------------------------------------------------------------------------------


def test_the_short_name_finds_the_recipe():
    assert check_recipe("cosmoflow").name == "cosmoflow"
    found = load_recipe("cosmoflow", ["arguments.width=8", "arguments.samples=5"])
    assert found.name == "cosmoflow small 8^3 on universes of order 1, made from seed 0"
    built = found.model()
    batch = found.data().read(range(4))
    with torch.no_grad():
        expected = float((built(batch[0]) - batch[1]).square().mean())
        assert float(found.loss(built, batch)) == pytest.approx(expected)
    train, other = found.data().read([0])[1], found.validation().read([0])[1]
    assert not torch.equal(train, other)


def test_what_makes_no_recipe():
    with pytest.raises(RecipeError, match="no variant 'large'"):
        recipe(variant="large")
    with pytest.raises(RecipeError, match="width is 33"):
        recipe(width=33)


def test_errors_are_those_of_the_model():
    built = CosmoFlow(small(8)).eval()
    universes = cosmoflow.Universes(3, 8)
    text = errors(lambda: universes, built)
    cubes, targets = universes.read(range(3))
    expected = (built(cubes) - targets).abs().mean(dim=0).tolist()
    blind = (targets.mean(dim=0) - targets).abs().mean(dim=0).tolist()
    lines = text.splitlines()[1:]
    assert len(lines) == prod(targets.shape[1:])
    for line, mine, mean in zip(lines, expected, blind, strict=True):
        assert f"{mine:.3f}" in line
        assert f"{mean:.3f} of saying the mean" in line
