"""The FIB-25 volume with the published weights and segmentation, where a checkout has them.

They lie beside the project, in ../shared/data/fib25, and are no part of it.
"""

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "shared" / "data" / "fib25"
WEIGHTS = FOLDER / "ffn_weights.npz"
SEGMENTATION = FOLDER / "ffn_segmentation.npz"
VOLUME = FOLDER / "training_sample2.npz"

needs_fib25 = pytest.mark.skipif(
    not WEIGHTS.exists(), reason="../shared/data/fib25 is not beside this checkout"
)
