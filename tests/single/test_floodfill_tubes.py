"""single: the made volume of neuron-like tubes."""

import numpy as np
from scipy import ndimage

from headway.floodfill.tubes import make_tubes

SHAPE = (40, 48, 56)


def test_a_volume_follows_from_its_seed():
    one, same, other = (make_tubes(SHAPE, seed=seed) for seed in (3, 3, 4))
    assert (one.image == same.image).all()
    assert (one.labels == same.labels).all()
    assert (one.labels != other.labels).mean() > 0.5


def test_bodies_are_connected_and_apart():
    volume = make_tubes(SHAPE, seed=3)
    bodies = np.unique(volume.labels)[1:]
    assert len(bodies) > 5
    assert all(ndimage.label(volume.labels == body)[1] == 1 for body in bodies)
    for dim in range(3):
        below, above = (np.moveaxis(volume.labels, dim, 0)[s] for s in (np.s_[:-1], np.s_[1:]))
        assert not ((below != above) & (below > 0) & (above > 0)).any()


def test_membranes_are_dark():
    volume = make_tubes(SHAPE, seed=3)
    inside, membrane = (volume.image[mask] for mask in (volume.labels > 0, volume.labels == 0))
    assert np.percentile(membrane, 75) < np.percentile(inside, 10)
    assert 0.1 < (volume.labels == 0).mean() < 0.4
