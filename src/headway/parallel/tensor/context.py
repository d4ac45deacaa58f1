"""What all split tensors of a model share: the grid, the settings, and who answers for a function.

Invariant: a rule either computes what the whole tensors would give, or raises `Refused`; what
becomes of a refusal is the context's business: an error while training, an entry of the survey
before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headway.errors import PlanError
from headway.parallel.standin import user_line
from headway.parallel.tensor.ahead import Ahead
from headway.parallel.tensor.grid import Grid
from headway.plan.tensor_layout import Need

Rule = Callable[..., Any]


class Refused(Exception):
    """A rule cannot do what it is asked for.

    Attributes:
        why: One sentence.
        blocks: The number of blocks of its layer with which it could, if any; 0: none.
        needs: What the axes would have to divide.
        of: The operand that is cut as it must not be, if it is one of several.
    """

    def __init__(
        self, why: str, *, blocks: int = 0, needs: tuple[Need, ...] = (), of: Any = None
    ) -> None:
        super().__init__(why)
        self.why, self.blocks, self.needs, self.of = why, blocks, needs, of


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How split layers are carried out.

    Attributes:
        keep: A cuboid's gathered operands are kept for backward; if not, gathered again.
        chunks: Pieces in which a cuboid scatters the sums of a product, each while the next one
            is computed.
        ahead: A cuboid's next weight is gathered while this layer computes.
    """

    keep: bool = True
    chunks: int = 1
    ahead: bool = True


class Context:
    """The law for all split tensors of one model.

    It is no dataclass, so that messages of a pipeline take it for a constant.

    Args:
        grid: The ranks.
        settings: As given.
        rules: Function's name -> rule.
        companions: Names of weights whose input other weights take as well.

    Attributes:
        surveys: It decides what is split, and nothing is computed.
        ahead: Gathers the next layer's weight.
    """

    surveys = False
    ahead: Ahead | None = None

    def __init__(
        self,
        grid: Grid,
        settings: Settings,
        rules: Mapping[str, Rule],
        companions: frozenset[str] = frozenset(),
    ) -> None:
        self.grid, self.settings, self.rules = grid, settings, rules
        self.companions = companions

    @property
    def classic(self) -> bool:
        return self.grid.plan.form == "classic"

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carry out a function of torch on split tensors.

        Raises:
            PlanError: It has no rule, or none for tensors that are cut so.
        """
        name = name_of(func)
        rule = self.rules.get(name)
        try:
            if rule is None:
                raise Refused("there is no rule for it")
            return rule(self, func, *args, **kwargs)
        except Refused as refusal:
            raise _error(name, refusal) from None

    def leave(self, x: Any) -> Any:
        """A split tensor, whole, where it enters what is split otherwise."""
        return x.full_tensor()

    # Parameters are undecided in surveys only (`survey.Survey`).

    def resolve(self, parameter: Any) -> Any:
        """An undecided parameter that is to be used as it is."""
        raise NotImplementedError

    def decide_linear(
        self, x: Any, weight: Any, bias: Any, *, flipped: bool = False, blocks: int = 1
    ) -> tuple[Any, Any]:
        """How the weight and the bias of a linear layer are cut.

        Args:
            x: Its input.
            weight: Undecided; [outputs, inputs].
            bias: Undecided or None.
            flipped: The weight is [inputs, outputs].
            blocks: Of its outputs, where they are known.
        """
        raise NotImplementedError

    def decide_table(self, index: Any, weight: Any) -> Any:
        """How the weight of an embedding is cut."""
        raise NotImplementedError

    def decide_vector(self, weight: Any, cut: Any) -> Any:
        """A vector of parameters, cut as the activations that it scales."""
        raise NotImplementedError


def name_of(func: Callable[..., Any]) -> str:
    """Of a function of torch; `Tensor.__add__` is "add"."""
    name = getattr(func, "__name__", repr(func))
    return name[2:-2] if name.startswith("__") and name.endswith("__") else name


def _error(name: str, refusal: Refused) -> PlanError:
    return PlanError(
        f"{name} cannot be carried out on a split tensor",
        problems=[refusal.why],
        where=user_line(),
        fix="Call .full_tensor() on it before, or name this part of the model in whole=[...].",
    )
