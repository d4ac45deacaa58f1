"""Forward hooks that make each module wait for its own parameters.

A parameter is awaited by every module that owns it directly, just before that module's forward. One
that is used without a call of its owner (`F.linear(x, self.head.weight)`, a ParameterList) is found
in the first steps, in which every update is awaited anyway, and from then on it is awaited before
the whole model. No forward pass reads a parameter that is still to be updated: if a gradient shows
that one did, the run stops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from time import perf_counter
from typing import Any

from torch import Tensor, nn

from headway.errors import RunError


class ForwardHooks:
    """Hooks on the modules of a model.

    Args:
        parameters: Logical name -> parameter, of all that are exchanged.
        wait: Called with names of parameters that must be up to date when it returns.

    Attributes:
        began: When the forward pass of this step began; 0.0: not yet.
        needed: Seconds after that at which each parameter was first used, by logical name.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        wait: Callable[[Iterable[str]], None],
    ) -> None:
        self._wait = wait
        # By name, not by tensor: these are looked up for every layer, and tensors hash slowly.
        self._awaited = dict.fromkeys(parameters, 0)
        self._strays: dict[str, None] = {}
        self._step = 1
        self._forgiving = True
        self.began = 0.0
        self.needed: dict[str, float] = {}
        names: dict[Tensor, str] = {p: name for name, p in parameters.items()}
        self._hooks = [model.register_forward_pre_hook(self._at_start, prepend=True)]
        for module in model.modules():
            own = tuple(names[p] for p in module.parameters(recurse=False) if p in names)
            if own:
                self._hooks.append(module.register_forward_pre_hook(partial(self._before, own)))

    def next_step(self) -> None:
        """A step is over; its updates may still be under way in the next forward pass."""
        self._step += 1
        self._forgiving = False
        self.began = 0.0

    def settled(self) -> None:
        """All updates have been made: uses that no hook has seen are right, and are learnt."""
        self._forgiving = True

    def _at_start(self, model: nn.Module, inputs: Any) -> None:
        self._before(tuple(self._strays), model, inputs)

    def _before(self, own: tuple[str, ...], module: nn.Module, inputs: Any) -> None:
        if not self.began:
            self.began = perf_counter()
        for name in own:
            if self._awaited[name] != self._step:
                self._awaited[name] = self._step
                if self._forgiving:
                    self.needed.setdefault(name, perf_counter() - self.began)
        self._wait(own)

    def check(self, name: str) -> None:
        """A gradient has come: its forward pass must have awaited the parameter.

        Raises:
            RunError: It did not, and the update may still have been under way.
        """
        if self._awaited[name] == self._step:
            return
        if name not in self._strays:
            self._strays[name] = None
            self.needed.setdefault(name, 0.0)
        self._awaited[name] = self._step
        if not self._forgiving:
            raise RunError(
                f"{name} was read while its update may have been under way",
                why="It is used without a call of the module that owns it, and was not used so in "
                "the first steps.",
                fix="Call the module (self.head(x), not F.linear(x, self.head.weight)), or set "
                "exchange.priority = false.",
            )

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()
