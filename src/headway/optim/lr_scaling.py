"""Learning-rate scaling for large batches: the linear and square-root rules, Adasum.

With k times the batch of a reference run: the linear rule k lr (Goyal et al. 2017, section 2.1), or
the square-root rule sqrt(k) lr, which keeps the variance of a step (Krizhevsky 2014, section 5;
Hoffer et al. 2017, section 4). Adasum adapts the length of the sum itself: its rate does not grow
with the ranks (Maleki et al. 2020). A scaled rate says so in its param group, so that a rule that
does not fit the exchange is refused. Arithmetic; imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from headway.errors import RecipeError
from headway.units import Amount

if TYPE_CHECKING:
    from torch.optim import Optimizer


Rule = Literal["linear", "square_root"]
UNITS = ("samples", "tokens")
NOTE = "scaling"
"""Key of a param group: how its rate was scaled, as text."""


def linear(lr: float, *, batch: float, reference: float) -> float:
    """lr k, with k = batch / reference, both in one unit; `lr` is good for `reference`."""
    return lr * _growth(batch, reference)


def square_root(lr: float, *, batch: float, reference: float) -> float:
    """lr sqrt(k), with k = batch / reference; arguments as for `linear`."""
    return lr * math.sqrt(_growth(batch, reference))


def adasum_rate(lr: float, *, local_size: int = 1, factor: float = 1.0) -> float:
    """The rate for gradients combined by Adasum: lr x local_size x factor.

    Args:
        lr: The best rate of one worker with its own batch.
        local_size: Ranks of a node where `collective = "hierarchical"` takes the mean inside nodes
            and Adasum across: they are one worker with local_size times the batch. Else 1.
        factor: 1 is safe; 2 to 2.5 is what Horovod's guide tries next, never the number of workers.

    Raises:
        ValueError: A number is not positive.
    """
    if local_size < 1 or not factor > 0:
        raise ValueError(
            f"local_size is {local_size} and factor {factor}; both must be greater than 0"
        )
    return lr * local_size * factor


@dataclass(frozen=True, slots=True)
class Scaling:
    """A rule and the batch for which the stated rate is good; "linear from 256 samples".

    Attributes:
        times: A factor beside the rule's, "linear from 256 samples times 0.5": half of what the
            rule says.
    """

    rule: Rule
    reference: Amount
    times: float = 1.0

    @staticmethod
    def parse(text: str) -> Scaling:
        """Parse "linear from 256 samples", "square_root from 8192 tokens times 0.5".

        Raises:
            ValueError: It has another form.
        """
        stated, times, factor = text.partition(" times ")
        rule, word, amount = (*stated.split(maxsplit=2), "", "", "")[:3]
        for known in get_args(Rule):
            if rule == known and word == "from":
                return Scaling(known, Amount.parse(amount, UNITS), _times(factor) if times else 1.0)
        raise ValueError(
            f'{text!r} is not of the form "linear from 256 samples" or '
            '"square_root from 8192 tokens"'
        )

    def factor(self, samples: int, tokens_per_sample: int | None = None) -> float:
        """What a rate is multiplied by for a global batch of `samples`.

        Raises:
            RecipeError: The reference is in tokens, and `tokens_per_sample` is not known.
        """
        batch: float = samples
        if self.reference.unit == "tokens":
            if tokens_per_sample is None:
                raise RecipeError(
                    f"the rate is scaled {self}, and tokens_per_sample is not given",
                    fix="Set tokens_per_sample to the number of tokens of one sample of the data.",
                )
            batch = samples * tokens_per_sample
        rule = linear if self.rule == "linear" else square_root
        return rule(self.times, batch=batch, reference=self.reference.value)

    def __str__(self) -> str:
        # repr: a factor that is read again is the same one.
        times = "" if self.times == 1 else f" times {self.times!r}"
        return f"{self.rule} from {self.reference}{times}"


def scale_rates(
    optimizer: Optimizer,
    scaling: Scaling | str,
    *,
    batch: int,
    tokens_per_sample: int | None = None,
) -> float:
    """Scale the rate of every param group, before a scheduler is made; returns the factor.

    Args:
        tokens_per_sample: Needed where the reference is in tokens.

    Raises:
        RecipeError: A scheduler or another scaling was there first, the optimiser has no rate, or
            as `Scaling.factor`.
        ValueError: As `Scaling.parse`.
    """
    chosen = Scaling.parse(scaling) if isinstance(scaling, str) else scaling
    factor = chosen.factor(batch, tokens_per_sample)
    for number, group in enumerate(optimizer.param_groups):
        if "lr" not in group:
            raise RecipeError(
                f"group {number} of the optimiser has no learning rate to scale",
                why=f"{type(optimizer).__name__} has no option lr.",
                fix="Leave scale_rate out, or use an optimiser whose groups have lr.",
            )
        first = "initial_lr" if "initial_lr" in group else NOTE
        if first in group:
            raise RecipeError(
                f"group {number} of the optimiser cannot be scaled {chosen}",
                why="A scheduler has taken up its rate already."
                if first == "initial_lr"
                else f"Its rate was scaled already: {group[NOTE]}.",
                fix="Scale the rates once, before a scheduler is made.",
            )
    # After all groups were checked: a refused optimiser stays as it was.
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor
        group[NOTE] = f"{chosen} to {batch} samples: x{factor:g}"
    return factor


def check_scaling(optimizer: Optimizer, reduce: str) -> None:
    """Refuse a linearly scaled rate where gradients are combined by Adasum.

    Raises:
        RecipeError: Adasum, and a group was scaled by the linear rule.
    """
    if reduce != "adasum":
        return
    for number, group in enumerate(optimizer.param_groups):
        note = str(group.get(NOTE, ""))
        if note.startswith("linear"):
            raise RecipeError(
                "Adasum does not go with a linearly scaled learning rate",
                where=f"group {number} of the optimiser, lr {float(group['lr']):g}",
                why=f"The rate was scaled {note}. Adasum already adds up what the ranks do not "
                "have in common; multiplied by the ranks besides, its step is too long.",
                fix="Leave scale_rate out and state the best rate of one worker, times the ranks "
                'of a node where collective = "hierarchical"; then try 2 to 2.5 times that.',
            )


def _times(text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not 0 < factor < math.inf:
        raise ValueError(f"times {text!r} is not a number greater than 0")
    return factor


def _growth(batch: float, reference: float) -> float:
    if not (batch > 0 and reference > 0):
        raise ValueError(f"batch {batch} and reference {reference} must be greater than 0")
    return batch / reference
