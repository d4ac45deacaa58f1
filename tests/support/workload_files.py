"""Files of the bundled workloads' samples, as their recipes read them from a directory."""

from pathlib import Path

from headway.data.slabs.slab_source import write_sample
from headway.workloads.cosmoflow import FULL, UNIT_PARAMETERS
from headway.workloads.unet3d import IMAGES, LABELS


def write_universes(folder, universes):
    """One .hdf5 file for each universe, float32; files that are there are left alone."""
    for sample in range(len(universes)):
        cube, parameters = universes.universe(sample)
        path = Path(folder) / f"universe-{universes.first + sample:010d}.hdf5"
        write_sample(path, {FULL: cube, UNIT_PARAMETERS: parameters})


def write_heads(folder, heads):
    """One .hdf5 file for each sample; files that are there are left alone."""
    for number in range(len(heads)):
        images, labels = heads.sample(number)
        write_sample(Path(folder) / f"head-{number:08d}.hdf5", {IMAGES: images, LABELS: labels})
