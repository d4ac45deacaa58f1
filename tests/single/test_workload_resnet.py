"""single: ResNets: the published sizes, images, the recipe."""

import os
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from headway.errors import DataError, RecipeError
from headway.run.recipe.factory import load_recipe
from headway.workloads.resnet import (
    RESNET18,
    RESNET50,
    SMALL,
    Gratings,
    ResNet,
    ResNetConfig,
    accuracy,
    digits,
    recipe,
)


def without_numbers(config):
    with torch.device("meta"):
        return ResNet(config)


def count(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize(
    ("config", "parameters", "gigaflop"),
    [(RESNET18, 11_689_512, 3.63), (RESNET50, 25_557_032, 8.18)],
    ids=["18", "50"],
)
def test_published_sizes(config, parameters, gigaflop, norm):
    """Two operations for each of the 1.81 and 4.09 G multiplications of torchvision's table."""
    model = without_numbers(replace(config, norm=norm))
    assert count(model) == parameters
    with FlopCounterMode(display=False) as counter:
        assert model(torch.empty(1, 3, 224, 224, device="meta")).shape == (1, 1000)
    assert round(counter.get_total_flops() / 1e9, 2) == gigaflop


def test_the_small_stem_keeps_the_width():
    """7 x 7 x 3 x 64 becomes 3 x 3 x 3 x 64."""
    large, small = (without_numbers(replace(RESNET18, stem=s)) for s in ("imagenet", "small"))
    assert count(large) - count(small) == 40 * 3 * 64
    x = torch.empty(1, 3, 32, 32, device="meta")
    assert small.stem(x).shape == (1, 64, 32, 32)
    assert large.stem(x).shape == (1, 64, 8, 8)
    assert small.blocks(small.stem(x)).shape == (1, 512, 4, 4)


def test_the_stride_of_a_bottleneck_lies_in_its_middle():
    block = without_numbers(RESNET50).blocks[3]
    strides = [m.stride[0] for m in block.body if isinstance(m, nn.Conv2d)]
    assert strides == [1, 2, 1]
    assert block.past[0].stride == (2, 2)


def test_group_norm_does_not_depend_on_the_batch_and_batch_norm_does():
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    for norm, equal in (("group", True), ("batch", False)):
        torch.manual_seed(0)
        model = ResNet(replace(SMALL, norm=norm)).double()
        whole = model(x)
        halves = torch.cat([model(x[:2]), model(x[2:])])
        assert bool(torch.allclose(whole, halves, rtol=1e-12, atol=1e-12)) is equal


@pytest.mark.parametrize(
    "change", [{"layers": ()}, {"width": 0}, {"stem": "big"}, {"norm": "layer"}]
)
def test_sizes_that_make_no_model(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        ResNetConfig(**({"layers": (1,), "bottleneck": False} | change))


def test_gratings_follow_from_seed_and_number():
    source = Gratings(50, 8)
    images, classes = source.read([7, 3])
    assert images.shape == (2, 3, 8, 8)
    assert images.dtype == torch.float32
    again = Gratings(50, 8).read([3])
    assert torch.equal(again[0][0], images[1])
    assert torch.equal(again[1], classes[1:])
    assert not torch.equal(Gratings(50, 8, seed=1).read([3])[0], again[0])
    assert Gratings(200, 8).read(range(200))[1].unique().tolist() == list(range(10))


def test_a_grating_points_where_its_class_says():
    """The strongest wave of the mean over colours, of clear images."""
    images, classes = Gratings(60, 32).read(range(60))
    spectrum = torch.fft.fftshift(torch.fft.fft2(images.mean(dim=1)), dim=(1, 2)).abs()
    right = 0
    for power, chosen in zip(spectrum, classes.tolist(), strict=True):
        power[16, 16] = 0
        y, x = divmod(int(power.argmax()), 32)
        angle = float(torch.atan2(torch.tensor(y - 16.0), torch.tensor(x - 16.0)))
        right += round(angle / torch.pi * 10) % 10 == chosen
    assert right >= 45


def test_digits(monkeypatch):
    for name in ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"):
        monkeypatch.setenv(name, os.environ.get(name, "True"))  # scikit-learn's import sets them
    train, validation = (digits(split) for split in ("train", "validation"))
    assert (len(train), len(validation)) == (1500, 297)
    images, classes = train.read([0, 1])
    assert images.shape == (2, 1, 8, 8)
    assert classes.tolist() == [0, 1]


def test_without_scikit_learn_it_is_named(monkeypatch):
    for name in ("sklearn", "sklearn.datasets"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(DataError) as caught:
        digits("train")
    assert "pip install scikit-learn" in caught.value.fix


def test_the_short_name_finds_the_recipe():
    found = load_recipe("resnet", ["arguments.width=8", "arguments.samples=30"])
    assert found.name == "resnet small on gratings made from seed 0"
    loss = found.loss(found.model(), found.data().read(range(8)))
    assert 1 < float(loss.detach()) < 5
    assert not torch.equal(found.data().read([0])[0], found.validation().read([0])[0])
    assert recipe(images="digits").model().config.channels == 1
    assert recipe(variant="resnet50", width=64).model().config.stem == "imagenet"


@pytest.mark.parametrize("change", [{"variant": "x"}, {"images": "x"}, {"norm": "x"}])
def test_what_makes_no_recipe(change):
    with pytest.raises(RecipeError, match="'x'"):
        recipe(**change)


def test_accuracy_is_that_of_the_model():
    torch.manual_seed(0)
    model = ResNet(SMALL).eval()
    source = Gratings(70, 8)
    images, classes = source.read(range(70))
    right = int((model(images).argmax(dim=1) == classes).sum())
    assert accuracy(lambda: source, model).startswith(f"{right} of 70 ")
