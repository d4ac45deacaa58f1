"""The user's model and optimiser as a replica of `headway.synchrony.actors`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from headway.errors import RunError
from headway.run.synchrony.bundle import Bundle


class ModelReplica:
    """Parameters where they lie in the model, stepped by the user's optimiser.

    Args:
        named: The parameters by logical name.

    Attributes:
        check_state: Called with the names of the optimiser's tensors before they are read.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], optimizer: Optimizer) -> None:
        self.check_state: Callable[[Sequence[str]], None] | None = None
        self._named = named
        self._optimizer = optimizer

    @property
    def _tensors(self) -> list[Tensor]:
        return [parameter.data for parameter in self._named.values()]

    def read(self) -> Bundle:
        return Bundle.of(self._tensors)

    def write(self, value: Bundle) -> None:
        value.copy_to(self._tensors)

    def step(self, gradient: object, rate: float = 1.0) -> None:
        """The optimiser's step, with the gradients that backward has left in the parameters."""
        assert rate == 1.0  # only servers divide the rate by a staleness
        self._optimizer.step()

    def clone(self) -> ModelReplica:
        raise RunError("a copy of a worker's own model: no rule of synchrony asks for one")

    def state_tensors(self) -> dict[str, Tensor]:
        """What of the optimiser's state has a number for each element of a parameter."""
        return {
            f"{name}.{key}": value
            for name, parameter in self._named.items()
            for key, value in sorted(self._optimizer.state.get(parameter, {}).items())
            if isinstance(value, Tensor)
            and value.is_floating_point()
            and value.shape == parameter.shape
        }

    def read_state(self) -> Bundle | None:
        found = self.state_tensors()
        if self.check_state is not None:
            self.check_state(list(found))
        return Bundle.of(list(found.values())) if found else None

    def write_state(self, state: Bundle | None) -> None:
        if state is None:
            self._optimizer.state.clear()
        else:
            state.copy_to(list(self.state_tensors().values()))

    def by_name(self, value: Bundle) -> dict[str, Tensor]:
        """A value of all parameters, by logical name."""
        return dict(zip(self._named, value.parts(self._tensors), strict=True))

    def from_names(self, tensors: Mapping[str, Tensor]) -> Bundle:
        """A value of all parameters from one by logical name, of any shape."""
        return Bundle.of([tensors[name] for name in self._named])
