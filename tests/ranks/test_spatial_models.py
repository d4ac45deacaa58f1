"""ranks: whole models on spatial meshes times data groups equal to the serial run."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from headway.parallel.spatial import halo_exchange
from support.ranks import ranks
from support.spatial import context, largest_difference


def block(entering, leaving):
    return nn.Sequential(
        nn.Conv3d(entering, leaving, 3, padding=1, bias=False),
        nn.BatchNorm3d(leaving),
        nn.LeakyReLU(0.3),
    )


class Cosmo(nn.Module):
    """Convolutions with overlapping average pooling, then a classifier on the whole."""

    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            block(2, 4), nn.AvgPool3d(3, 2, 1), block(4, 6), nn.AvgPool3d(3, 2, 1), block(6, 8)
        )
        self.head = nn.Sequential(
            nn.Linear(8 * (width // 4) ** 3, 12), nn.LeakyReLU(0.3), nn.Dropout(0.5),
            nn.Linear(12, 3),
        )  # fmt: skip

    def forward(self, x):
        y = self.body(x)
        return 1.2 * torch.tanh(self.head(y.view(y.size(0), -1)))


class UNet(nn.Module):
    """Two levels, skip connections by concatenation, a score for each voxel."""

    def __init__(self):
        super().__init__()
        self.down1, self.down2 = block(1, 4), block(4, 6)
        self.bottom = nn.Sequential(block(6, 8), nn.Dropout(0.3), nn.Dropout3d(0.3))
        self.up2, self.up1 = nn.ConvTranspose3d(8, 6, 2, 2), nn.ConvTranspose3d(6, 4, 2, 2)
        self.mix2, self.mix1 = block(12, 6), block(8, 4)
        self.last = nn.Conv3d(4, 3, 1)

    def forward(self, x):
        one = self.down1(x)
        two = self.down2(F.max_pool3d(one, 2))
        y = self.up2(self.bottom(F.max_pool3d(two, 2)))
        y = self.up1(self.mix2(torch.cat([y, two], dim=1)))
        return self.last(self.mix1(torch.cat([y, one], dim=1)))


def cosmo_loss(model, x, targets):
    return F.mse_loss(model(x), targets)


def unet_loss(model, x, labels):
    scores = model(x)
    assert tuple(scores.shape[2:]) == tuple(labels.shape[1:])
    loss = F.cross_entropy(scores, labels, label_smoothing=0.1)
    shares = F.softmax(scores, dim=1)
    truth = F.one_hot(labels, 3).permute(0, 4, 1, 2, 3)
    common = (shares * truth).sum(dim=(2, 3, 4))
    return loss + 1 - (2 * common / (shares + truth).sum(dim=(2, 3, 4))).mean()


def models(width):
    torch.manual_seed(3)
    x = torch.randn(4, 2, *[width] * 3, dtype=torch.float64)
    labels = torch.randint(0, 3, (4, *[width] * 3))
    targets = torch.randn(4, 3, dtype=torch.float64)
    return {
        "cosmo": (Cosmo(width).double(), cosmo_loss, x, targets),
        "unet": (UNet().double(), unet_loss, x[:, :1], labels),
    }


def outcome(model, loss):
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {"loss": loss.detach(), **grads, **{n: b.double() for n, b in model.named_buffers()}}


def serial(model, loss_of, x, target):
    torch.manual_seed(4)
    loss = loss_of(model, x, target)
    loss.backward()
    return outcome(model, loss)


def train(spatial, groups, width):
    """Data groups times a spatial mesh: every rank of a data group sees the same samples."""
    size = dist.get_world_size() // groups
    me, across = dist.get_rank(), []
    for place in range(size):
        group = dist.new_group([place + size * number for number in range(groups)])
        if me % size == place:
            across.append(group)
    contexts = [
        context(spatial, list(range(size * n, size * n + size)), statistics=tuple(across))
        for n in range(groups)
    ]
    mine = contexts[me // size]
    worst = {}
    for name, (model, loss_of, x, target) in models(width).items():
        if groups > 1:  # each group draws for its own samples: headway's randomness, not torch's
            for module in model.modules():
                if isinstance(module, (nn.Dropout, nn.Dropout3d)):
                    module.p = 0.0
        expected = serial(deepcopy(model), loss_of, x, target)
        share = slice(me // size * 4 // groups, (me // size + 1) * 4 // groups)
        torch.manual_seed(4)
        loss = loss_of(model, mine.split(x[share]), target[share]) / (mine.copies * groups)
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        dist.all_reduce(loss.detach())
        worst[name] = largest_difference(expected, outcome(model, loss))
    return {name: apart for name, apart in worst.items() if not apart[0] <= 1e-12}


def nothing_differs(results):
    assert results == [{}] * len(results)


@pytest.mark.parametrize(("spatial", "groups"), [((4, 1, 1), 1), ((2, 2, 1), 1), ((1, 2, 1), 2)])
def test_models_on_four_ranks(spatial, groups):
    on_four(spatial=spatial, groups=groups)


@ranks(4, timeout=60, check=nothing_differs)
def on_four(world, spatial, groups):
    return train(spatial, groups, 16)


@ranks(8, timeout=60, check=nothing_differs)
def test_models_on_four_ways_times_two_data_groups(world):
    return train((2, 2, 1), 2, 8)


def kept(model, x):
    """Bytes that backward keeps of a loss, without parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(x).square().mean()
    del loss
    return sum(found.values())


@ranks(4, timeout=60)
def test_a_rank_keeps_its_share_of_the_activations_and_halos(world):
    model, x = Cosmo(32).body.double(), torch.randn(1, 2, 32, 32, 32, dtype=torch.float64)
    whole = kept(model, x)
    received = []
    receive = halo_exchange.AxisMessages.receive

    def counted(flight, into, peer):
        received.append(into.nbytes)
        receive(flight, into, peer)

    halo_exchange.AxisMessages.receive = counted
    for mesh in ((4, 1, 1), (2, 2, 1)):
        received.clear()
        split = kept(model, context(mesh).split(x))
        assert whole / 4 < split <= 1.1 * (whole / 4 + sum(received)), (mesh, split, whole)
