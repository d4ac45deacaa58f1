"""Losses of models as `transformers` builds them: the model's own mean, as a sum and a count.

Such a model computes its loss itself, `model(**batch).loss`, as a mean over the labels that are not
ignored (-100). Their number differs between samples, so that the means of the parts of a batch do
not make that of the whole. A mean times what it is over is a sum, and sums add up:

    Recipe(..., loss="tokens")                          # finds out how the model counts
    Recipe(..., loss=headway.huggingface.causal_lm)     # says it

A causal model predicts the next token and leaves out the first label of each row; all others count
every label. `transformers` itself is not imported.

The router's loss of a mixture of experts is a product of means over all tokens of a micro-batch and
no sum: what a split makes of it is not the serial run. headway says so before training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from headway.errors import RecipeError

IGNORED = -100
"""The label that no loss counts: `ignore_index` of torch's cross-entropy."""
NEXT, SAME = 1, 0
"""How far the labels of a row are ahead of the logits."""


@dataclass(frozen=True)
class LabelledLoss:
    """`model(**batch).loss`, a mean over labels, as (sum, count).

    Attributes:
        shift: How many labels at the beginning of each row no logits are compared with.
    """

    name: str
    shift: int

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        labels = _labels(batch, self.name)
        return _sum(_output(model(**batch), "loss"), _count(labels, self.shift), self.name)

    def __str__(self) -> str:
        return self.name


@dataclass
class TokenLoss:
    """As `LabelledLoss`, for any model: which labels count is found by its first loss.

    The mean over the labels is computed from the logits, with and without the shift by one; the
    model's own loss is one of the two.
    """

    _shift: int | None = field(default=None, init=False)

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        labels = _labels(batch, str(self))
        out = model(**batch)
        loss, shift = _output(out, "loss"), self._shift
        counted = labels.dim() > 1 and not labels.is_floating_point()
        if shift is None and counted and not torch.compiler.is_compiling():
            shift = self._shift = _find_shift(model, out, loss, labels)
        if shift is None:
            shift = NEXT if _is_causal(model) and labels.dim() > 1 else SAME
        return _sum(loss, _count(labels, shift), str(self))

    def __str__(self) -> str:
        return "tokens"


causal_lm = LabelledLoss("causal_lm", NEXT)
"""Of `AutoModelForCausalLM`: the logits of a token are compared with the next label."""
masked_lm = LabelledLoss("masked_lm", SAME)
"""Of `AutoModelForMaskedLM`."""
seq2seq_lm = LabelledLoss("seq2seq_lm", SAME)
"""Of `AutoModelForSeq2SeqLM`: the decoder's inputs are shifted, not the labels."""
token_classification = LabelledLoss("token_classification", SAME)
"""Of `AutoModelForTokenClassification`."""
sequence_classification = LabelledLoss("sequence_classification", SAME)
"""Of `AutoModelForSequenceClassification`, regression and several classes of a sample included."""
image_classification = LabelledLoss("image_classification", SAME)
"""Of `AutoModelForImageClassification`."""


def _labels(batch: Any, name: str) -> Tensor:
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if isinstance(labels, Tensor):
        return labels
    found = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
    raise RecipeError(
        f"the loss {name} finds no labels in the batch ({found})",
        why="It calls model(**batch) and counts the labels that are not ignored (-100).",
        fix='Let each sample be a dict with a tensor "labels", or return (sum, count) from a loss '
        "of your own.",
    )


def _output(out: Any, name: str) -> Any:
    """A field of what a model returns: `ModelOutput`, a dict, or any object with such a field."""
    return out.get(name) if isinstance(out, Mapping) else getattr(out, name, None)


def _count(labels: Tensor, shift: int) -> Tensor:
    """Over how many labels a mean was taken."""
    if labels.is_floating_point():  # regression, several classes: every sample weighs the same
        return torch.full((), len(labels), device=labels.device)
    return (labels[..., shift:] != IGNORED).sum()


def _is_causal(model: Any) -> bool:
    """What the names of `transformers` say, where numbers do not tell."""
    name = f"{getattr(model, 'loss_type', None)} {type(model).__name__}"
    return "CausalLM" in name or "LMHead" in name


def _sum(loss: Any, count: Tensor, name: str) -> tuple[Tensor, Tensor]:
    if not isinstance(loss, Tensor):
        raise RecipeError(
            f"the loss {name} needs a model that returns its loss",
            why="model(**batch) has returned none.",
            fix="Return (sum, count) from a loss of your own, computed from the model's output.",
        )
    # A micro-batch without labels has the mean 0 / 0, and adds nothing.
    return torch.where(count > 0, loss * count, torch.zeros_like(loss)), count


def _find_shift(model: Any, out: Any, loss: Any, labels: Tensor) -> int | None:
    """How the model counts; None: these numbers do not tell.

    Raises:
        RecipeError: Its loss is neither mean.
    """
    logits = _output(out, "logits")
    if not isinstance(loss, Tensor) or not isinstance(logits, Tensor):
        raise _not_known(model)
    if logits.shape[:-1] != labels.shape:
        raise _not_known(model)
    own = loss.detach()
    # As models add it: its weight is in their configuration.
    router = _output(out, "aux_loss")
    if isinstance(router, Tensor):
        coefficient = getattr(getattr(model, "config", None), "router_aux_loss_coef", 0.0)
        own = own - coefficient * router.detach()
    try:
        if bool((labels[..., 0] == IGNORED).all()):
            return None
        apart = {shift: _apart(own, logits.detach(), labels, shift) for shift in (SAME, NEXT)}
    except RuntimeError:  # numbers that do not exist, while a model is captured
        return None
    near, far = sorted(apart, key=lambda shift: apart[shift])
    eps = max(torch.finfo(tensor.dtype).eps for tensor in (own, logits))
    if not apart[near] <= eps**0.5:  # a mean is rounded to some eps
        # Without any label the mean is not a number.
        if bool(torch.isfinite(own)):
            raise _not_known(model)
        return None
    # Untrained, a model may give all words the same logits: both means are then the same.
    return near if apart[near] * 10 < apart[far] else None


def _apart(own: Tensor, logits: Tensor, labels: Tensor, shift: int) -> float:
    """The relative difference between a loss and the mean over labels with a shift."""
    wide = logits[..., : logits.shape[-2] - shift, :].flatten(0, -2)
    wide = wide if wide.dtype == torch.float64 else wide.float()
    mean = functional.cross_entropy(wide, labels[..., shift:].flatten(), ignore_index=IGNORED)
    return float((own - mean).abs() / mean.abs().clamp(min=1e-30))


def _not_known(model: Any) -> RecipeError:
    kind = getattr(getattr(model, "config", None), "model_type", None) or type(model).__name__
    return RecipeError(
        f'loss="tokens" cannot tell over which labels the loss of {kind} is a mean',
        why="It is neither the cross-entropy of its logits with the labels nor with the next ones.",
        fix="Name it, as in loss=headway.huggingface.causal_lm (masked_lm, seq2seq_lm, ...), or "
        "return (sum, count) from a loss of your own.",
    )
