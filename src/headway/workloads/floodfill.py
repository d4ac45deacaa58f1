r"""Training of a flood-filling network, in a size for CPUs.

    headway train floodfill -n 2
    headway train floodfill -n 4 --set arguments.volume=em.h5:raw \
        --set arguments.labels=em.h5:bodies

Without a volume it is trained on made tubes, and its name says so. `fov=[33, 33, 33]`,
`deltas=[8, 8, 8]`, `depth=12` and `features=32` are the network that was published for 10 nm
isotropic FIB-SEM (Januszewski et al. 2018). Examples are fields of view that move by the masks that
the network makes (`headway.floodfill.patches`): one for each slot and step, so that the batch is
the number of slots, however many ranks there are.

The loss is the mean cross-entropy over the voxels of the field of view, with labels 0.05 and 0.95;
each entry of the gradient is limited to +-0.7, as in the reference implementation. Validation has
its own part of the volume, and counts voxels and moves of whole patches, once they are left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam, Optimizer

from headway.errors import DataError, RecipeError
from headway.floodfill.array_files import check_ids, open_array
from headway.floodfill.network import FloodFillingNetwork, Triple
from headway.floodfill.patches import TRACKED, PatchGeometry, PatchSource
from headway.floodfill.published_weights import load_published_weights
from headway.floodfill.tubes import make_tubes
from headway.optim.warmup import WarmUp
from headway.run.recipe.recipe import Recipe

LARGEST_ENTRY = 0.7
"""Of a gradient."""
TUBES = "tubes"
TUBES_SHAPE: Triple = (96, 64, 64)

OptimizerName = Literal["sgd", "adam"]


def recipe(
    *,
    volume: str = TUBES,
    labels: str | None = None,
    weights: str | Path | None = None,
    fov: Sequence[int] = (17, 17, 17),
    deltas: Sequence[int] = (4, 4, 4),
    depth: int = 4,
    features: int = 16,
    slots: int = 4,
    steps: int = 200,
    epoch_visits: int = 1000,
    optimizer: OptimizerName = "adam",
    learning_rate: float = 1e-3,
    momentum: float = 0.0,
    warm_up: int = 0,
    axes: Sequence[int] = (0, 1, 2),
    min_size: int = 10_000,
    validation_from: int | None = None,
    validation_visits: int = 64,
    seed: int = 0,
) -> Recipe:
    """Moves in patches of a labelled volume.

    Args:
        volume: [z, y, x] grey values from 0 to 255: "FILE.npy", "FILE.npz:NAME", "FILE.h5:NAME";
            "tubes": made ones, with their labels.
        labels: Ids of the bodies of these voxels, likewise; 0 is none.
        weights: What training begins with: published ones (.npz), or as `Recipe.weights`.
        slots: Patches that are under way at a time: the batch.
        epoch_visits: Examples of each slot that count as an epoch.
        warm_up: Steps in which the rate grows from 1/slots of it; Horovod's
            (1/n) (e (n - 1) / E + 1) with n slots and E epochs of warm-up.
        axes: Dimensions that are permuted at random; of an anisotropic volume [1, 2].
        min_size: Bodies of fewer voxels begin no patch.
        validation_from: Planes from this z on are kept for validation; None: of tubes the last
            third, else none.
        validation_visits: Examples of each slot in a validation; a patch takes up to 27, and is
            counted with the next one.
        seed: Decides initial parameters, patches and moves, and the tubes.

    Raises:
        RecipeError: Volume and labels are not given together, or an argument cannot be.
    """
    geometry = PatchGeometry(_triple("fov", fov), _triple("deltas", deltas))
    if (volume == TUBES) != (labels is None):
        raise RecipeError(
            "a volume is given without its labels" if labels is None else "labels of made tubes",
            fix='Give both arguments.volume="em.h5:raw" and arguments.labels="em.h5:bodies".',
        )
    if optimizer not in ("sgd", "adam"):
        raise RecipeError(f"no optimizer {optimizer!r}", fix="choose sgd or adam")
    if volume == TUBES and validation_from is None:
        validation_from = TUBES_SHAPE[0] * 2 // 3
    longest = 1 + len(geometry.offsets)
    if validation_from is not None and validation_visits <= longest:
        raise RecipeError(
            f"validation_visits is {validation_visits}",
            why=f"A patch takes up to {longest}, and is counted once it is left.",
            fix=f"Give more than {longest}.",
        )
    data = partial(
        source,
        volume,
        labels,
        geometry,
        slots=slots,
        axes=tuple(axes),
        min_size=min_size,
        seed=seed,
    )
    published = weights is not None and str(weights).endswith(".npz")
    training = (0, validation_from)
    return Recipe(
        name=f"floodfill {'x'.join(map(str, geometry.fov))} on "
        + (f"tubes made from seed {seed}" if volume == TUBES else volume),
        model=partial(network, depth, geometry, features, published=weights if published else None),
        weights=None if published else weights,
        data=partial(data, training, visits=epoch_visits),
        validation=None
        if validation_from is None
        else partial(data, (validation_from, None), visits=validation_visits),
        loss=cross_entropy,
        metrics=None if validation_from is None else tracked,
        optimizer=partial(
            clipped_optimizer, name=optimizer, learning_rate=learning_rate, momentum=momentum
        ),
        scheduler=partial(WarmUp, steps=warm_up, start=1 / slots) if warm_up else None,
        batch=slots,
        stop=f"{steps} steps",
        seed=seed,
        validate_every=0 if validation_from is None else max(1, steps // 4),
        checkpoint_every=max(1, steps // 4),
    )


def _triple(name: str, sizes: Sequence[int]) -> Triple:
    if len(sizes) != 3 or any(type(size) is not int or size < 1 for size in sizes):
        raise RecipeError(
            f"{name} is {list(sizes)}", fix="Give three numbers of voxels, for z, y and x."
        )
    z, y, x = sizes
    return z, y, x


def network(
    depth: int, geometry: PatchGeometry, features: int, *, published: str | Path | None
) -> FloodFillingNetwork:
    """The network, with published weights where they are given.

    Raises:
        DataError: They are of another network.
    """
    made = FloodFillingNetwork(depth, fov=geometry.fov, deltas=geometry.deltas, features=features)
    if published is not None:
        load_published_weights(made, published)
    return made


def source(
    volume: str,
    labels: str | None,
    geometry: PatchGeometry,
    planes: tuple[int, int | None],
    *,
    seed: int,
    **options: Any,
) -> PatchSource:
    """Patches of some planes of a volume.

    Args:
        planes: The first z, and the one behind the last; None: to the end.

    Raises:
        DataError: See `PatchSource`; or a file cannot be read.
    """
    if labels is None:
        tubes = make_tubes(TUBES_SHAPE, seed=seed)
        image, bodies = tubes.image, tubes.labels
        options["min_size"] = min(options["min_size"], 500)
    else:
        image, bodies = open_array(volume), open_array(labels)
        check_ids(bodies, labels)
    if image.shape != bodies.shape:
        raise DataError(
            f"the image has shape {list(image.shape)}, and its labels {list(bodies.shape)}",
            where=f"{volume} and {labels}",
            fix="Give two volumes [z, y, x] of the same part of the tissue.",
        )
    part = slice(*planes)
    return PatchSource(
        np.asarray(image[part]), np.asarray(bodies[part]), geometry, seed=seed, **options
    )


def cross_entropy(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int, Tensor]:
    """Sum and count over the voxels of the fields of view, and the new masks."""
    mask = model(batch["image"], batch["mask"])
    total = functional.binary_cross_entropy_with_logits(mask, batch["labels"], reduction="sum")
    return total, mask.numel(), mask


def tracked(_: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Of the patches that have been left: voxels at probability 0.9, and moves."""
    counts = dict(zip(TRACKED, batch["tracked"].sum(dim=0), strict=True))
    tp, fp, fn, tn = (counts[name] for name in ("tp", "fp", "fn", "tn"))
    moves = counts["correct"] + counts["missed"] + counts["spurious"]
    return {
        "precision": (tp, tp + fp),
        "recall": (tp, tp + fn),
        "accuracy": (tp + tn, tp + fp + fn + tn),
        "f1": (2 * tp, 2 * tp + fp + fn),
        **{f"{name} moves": (counts[name], moves) for name in TRACKED[:3]},
    }


class ClippedSGD(SGD):
    """SGD that limits each entry of the gradient before a step."""

    def step(self, closure: Any = None) -> Any:
        """The step; see `SGD.step`."""
        _clip_entries(self)
        return super().step(closure)


class ClippedAdam(Adam):
    """Adam that limits each entry of the gradient before a step."""

    def step(self, closure: Any = None) -> Any:
        """The step; see `Adam.step`."""
        _clip_entries(self)
        return super().step(closure)


def _clip_entries(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.clamp_(-LARGEST_ENTRY, LARGEST_ENTRY)


def clipped_optimizer(
    model: nn.Module, *, name: OptimizerName, learning_rate: float, momentum: float
) -> Optimizer:
    """SGD with momentum, or Adam, with limited entries of the gradient."""
    if name == "sgd":
        return ClippedSGD(model.parameters(), lr=learning_rate, momentum=momentum)
    return ClippedAdam(model.parameters(), lr=learning_rate)
