"""The commonest errors of a loss, told by the recipe's field that must change.

torch says which two shapes do not fit, and not whether model, criterion or data are meant. The
frames of the traceback know what was computed before it failed: nothing is wrapped and nothing is
called again.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any

from torch import Tensor

from headway.errors import HeadwayError, RecipeError
from headway.run.recipe.accepted_forms import MODELS, CriterionLoss, with_article
from headway.run.recipe.user_code import describe_value, user_frame
from headway.user_frames import is_project_file

_MISMATCH = re.compile(
    r"shape|size|dtype|scalar type|data type|dimension|multi-target|out of bounds|channels|"
    r"must be Tensor|has no attribute|operand|argument",
    re.IGNORECASE,
)
_KINDS = (RuntimeError, TypeError, ValueError, IndexError, AttributeError)


@contextmanager
def loss_errors_explained(loss: Any) -> Iterator[None]:
    """Around what computes a loss.

    Raises:
        RecipeError: In place of an error that says that model, criterion and data do not fit.
    """
    try:
        yield
    except HeadwayError:
        raise
    except _KINDS as error:
        # Subclasses are other things: a lost connection, a lack of memory.
        told = _explained(error, loss) if type(error) in _KINDS else ""
        if not told:
            raise
        theirs = any(is_project_file(f.f_code.co_filename) for f, _ in walk_tb(error.__traceback__))
        raise RecipeError(
            told,
            where=user_frame(error)[0] if theirs else "",
            why=f"{type(error).__name__}: {error}".split("\n")[0],
        ) from error


def _explained(error: Exception, loss: Any) -> str:
    for frame, _ in walk_tb(error.__traceback__):
        if frame.f_code is CriterionLoss.__call__.__code__:
            return _of_criterion(error, frame.f_locals)
        if frame.f_code is getattr(loss, "__code__", None):
            return _of_loss(error, loss, frame.f_locals)
    return ""


def _of_criterion(error: Exception, known: Mapping[str, Any]) -> str:
    batch = known["batch"]
    if not (isinstance(batch, tuple | list) and len(batch) == 2):
        return (
            f"data: a criterion takes batches of (input, target), and this one is "
            f"{_described(batch)}: write loss=lambda model, batch: criterion(model(...), ...)"
        )
    if not _MISMATCH.search(str(error)):
        return ""
    criterion = describe_value(known["self"].function)
    if "output" in known:
        return (
            f"loss: {criterion} cannot compare the model's output, {_described(known['output'])}, "
            f"with the target of data, {_described(known['target'])}"
        )
    model = type(getattr(known["model"], "_model", known["model"])).__name__
    return f"model: {model} cannot be called with the input of data, {_described(known['inputs'])}"


def _of_loss(error: Exception, loss: Callable[..., Any], known: Mapping[str, Any]) -> str:
    """A criterion of (output, target) whose names do not say that it is one."""
    names = list(inspect.signature(loss).parameters)
    if len(names) != 2 or names[0] in MODELS or not isinstance(error, TypeError | AttributeError):
        return ""
    given = [type(known.get(name)).__name__ for name in names]
    if not any(re.search(rf"\b{kind}\b", str(error)) for kind in given):
        return ""
    name = loss.__name__
    shown = f"lambda {', '.join(names)}: ..." if name == "<lambda>" else name
    return (
        f"loss: {names[0]} is the model here and {names[1]} the batch, as of every loss: write "
        f"loss=headway.criterion({shown}) if it compares output and target"
    )


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return f"a tensor of shape {list(value.shape)} ({kind})"
    if isinstance(value, Mapping):
        return f"{with_article(value)} of {', '.join(map(str, value))}"
    if isinstance(value, tuple | list):
        return f"{with_article(value)} of {len(value)}"
    return with_article(value)
