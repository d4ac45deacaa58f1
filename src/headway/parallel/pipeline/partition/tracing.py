"""The model's forward as a graph of calls, traced with torch.fx and example values.

Modules chosen as leaves are one call each, whatever happens inside them. Around them the tracer
knows an example of every value: a branch (`if x.shape[1] > self.window`) is taken as for the
example and stays in the graph as a check, so that another micro-batch can have other sizes but
never silently another path. What a graph would lose or freeze is refused.

Examples are computed only where somebody asks, while tracing (which way does this `if` go, of
which type is this?) and while cutting (is this a tensor?); the model's buffers, plain attributes
and torch's random state are restored afterwards. Plain attributes (numbers, flags, strings) are
constants of the graph, so they are recorded here and compared before every step.
"""

from __future__ import annotations

import operator
import re
import sys
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass, replace
from dis import opname
from functools import lru_cache
from itertools import islice
from linecache import getline
from types import CodeType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch.fx.node import map_arg
from torch.fx.proxy import Attribute
from torch.nn.utils import rnn
from torch.overrides import TorchFunctionMode, is_tensor_method_or_property

from headway.errors import PlanError, RunError
from headway.parallel.stages import ModelCall, flatten, is_payload, user_line
from headway.user_frames import innermost_user_frame, is_torch_file

PlainAttribute = tuple[str, str]
"""(module, name)"""
_OWN = frozenset(vars(nn.Module()))
"""Attributes of every module, its mode among them: there is a graph for each mode."""
_STATE = (bool, int, float, str, type(None))


def plain_attributes(model: nn.Module, names: Iterable[str]) -> dict[PlainAttribute, Any]:
    """Numbers, flags and texts that modules hold as attributes."""
    return {
        (name, key): value
        for name in names
        for key, value in vars(model.get_submodule(name)).items()
        if isinstance(value, _STATE) and key not in _OWN
    }


def check_plain_attributes(
    model: nn.Module, opened: Iterable[str], state: Mapping[PlainAttribute, Any]
) -> None:
    """Refuse to go on where plain attributes of these modules are no longer what they were.

    Raises:
        RunError: One has changed.
    """
    now = plain_attributes(model, opened)
    if now != state:
        key = next(k for k in {**now, **state} if now.get(k) != state.get(k))
        raise RunError(
            f"{'.'.join(filter(None, key))} of the model has changed since it was cut",
            why=f"It was {state.get(key)!r} and is {now.get(key)!r}; the stages do not see that.",
            fix="Keep what changes in a buffer, or inside a module that is not cut.",
        )


def restore_plain_attributes(
    model: nn.Module, before: Mapping[PlainAttribute, Any]
) -> list[PlainAttribute]:
    """Give plain attributes their old values; returns those that had others."""
    now = plain_attributes(model, [name for name, _ in model.named_modules()])
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    for module, name in changed:
        if (module, name) in before:
            setattr(model.get_submodule(module), name, before[module, name])
        else:
            delattr(model.get_submodule(module), name)
    return changed


def has_hooks(module: nn.Module) -> bool:
    """Whether something happens around a module's forward that a graph would not know of."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name) for name in hooks)


# Example values of a graph's nodes, computed only where somebody asks.


class ExampleValues:
    """Values are computed inside of `opened` only.

    Args:
        model: The whole model, in the mode that the graph is for.

    Attributes:
        is_open: Values can be asked for.
        busy: A value is being computed: what happens now is no part of a trace.
        constants: What the graph uses and the model does not hold, by name.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._values: dict[fx.Node, Any] = {}
        self._draws: set[fx.Node] = set()
        self.is_open = False
        self._made: dict[int, weakref.ref[Tensor]] = {}
        self.busy = False
        self.constants: dict[str, Any] = {}

    @contextmanager
    def opened(self) -> Iterator[None]:
        """The model's state is put back at the end."""
        with preserve_model_state(self._model):
            self.is_open = True
            try:
                yield
            finally:
                self.is_open = False

    def note(self, tensor: Tensor) -> None:
        """A tensor that was made while a value was computed."""
        self._made[id(tensor)] = weakref.ref(tensor)

    def check_not_collected(self, values: Any) -> None:
        """Refuse tensors that were made while a value was computed, and are no part of the trace.

        Raises:
            TraceError: There is one.
        """
        for leaf in flatten(values, lambda _: False)[0]:
            found = None if isinstance(leaf, fx.Proxy) else self._made.get(id(leaf))
            if found is not None and found() is leaf:
                raise fx.proxy.TraceError(
                    "it uses a tensor that a hook has collected inside of a module (hidden states, "
                    "attentions or router logits, say), which a graph would not"
                )

    def forget(self) -> None:
        # Placeholders stay: nothing could compute them again.
        self._values = {n: v for n, v in self._values.items() if n.op == "placeholder"}

    def know(self, node: fx.Node, value: Any) -> None:
        """Give the value of a placeholder."""
        leaves, structure = flatten([value], is_payload)
        # A model may change its inputs in place, and neither the user's data nor the example may
        # suffer.
        own = [x.detach().clone() if isinstance(x, Tensor) else x for x in leaves]
        self._values[node] = structure.rebuild(own)[0]

    def value(self, node: fx.Node) -> Any:
        """Of a node, and so of all that it needs."""
        # An explicit stack: recursion over a deep model's nodes would exceed Python's limit.
        waiting = [node]
        with torch.no_grad(), self._computing():
            while waiting:
                missing = [n for n in waiting[-1].all_input_nodes if n not in self._values]
                if missing:
                    waiting += missing
                elif waiting[-1] in self._values:
                    waiting.pop()
                else:
                    last = waiting.pop()
                    self._values[last] = self._compute(last)
        return self._values[node]

    def draws(self, node: fx.Node) -> bool:
        """Whether a node takes random numbers."""
        self.value(node)
        return node in self._draws

    @contextmanager
    def _computing(self) -> Iterator[None]:
        assert self.is_open
        before, self.busy = self.busy, True
        try:
            yield
        finally:
            self.busy = before

    def _compute(self, node: fx.Node) -> Any:
        args = map_arg(node.args, self._values.__getitem__)
        kwargs = map_arg(node.kwargs, self._values.__getitem__)
        before = _random_states()
        # Only the state of the generators shows a draw inside of a module that is one call.
        value = self._call(node, args, kwargs)
        if any(not torch.equal(a, b) for a, b in zip(before, _random_states(), strict=True)):
            self._draws.add(node)
        return value

    def _call(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        match node.op:
            case "get_attr":
                return self._find(str(node.target))
            case "call_module":
                return self._find(str(node.target))(*args, **kwargs)
            case "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            case _:
                assert callable(node.target)
                return node.target(*args, **kwargs)

    def _find(self, name: str) -> Any:
        return self.constants[name] if name in self.constants else attribute_at(self._model, name)


@contextmanager
def preserve_model_state(model: nn.Module) -> Iterator[None]:
    """Put buffers, plain attributes and torch's generators back at the end."""
    plain = plain_attributes(model, [name for name, _ in model.named_modules()])
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    states = _random_states()
    try:
        yield
    finally:
        restore_plain_attributes(model, plain)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)  # in place: optimisers and stages refer to these tensors
        torch.set_rng_state(states[0])
        if len(states) > 1:
            torch.cuda.set_rng_state(states[1])


def attribute_at(model: nn.Module, name: str) -> Any:
    """A module, parameter, buffer or other attribute by its dotted name."""
    found: Any = model
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _random_states() -> list[Tensor]:
    states = [torch.get_rng_state()]
    # Asking CUDA for its state would initialise it.
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states


@contextmanager
def without_caches(model: nn.Module) -> Iterator[None]:
    """Models of `transformers` do not collect keys and values for generation in here.

    Nobody reads them in training, and one object that all blocks fill would tie them together.
    """
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    used = [config for config in configs.values() if getattr(config, "use_cache", False) is True]
    for config in used:
        config.use_cache = False
    try:
        yield
    finally:
        for config in used:
            config.use_cache = True


# The model's forward as a graph of calls, recorded with torch.fx; the model is not changed.


IsLeaf = Callable[[str, nn.Module], bool]
_DATA_DEPENDENT_READS = {"item", "tolist", "numpy", "nonzero", "equal", "allclose", "is_nonzero"}
_FACTORY_FUNCTIONS = (
    torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.ones, torch.rand,
    torch.randint, torch.randn, torch.randperm, torch.tensor, torch.zeros, torch.finfo, torch.iinfo,
)  # fmt: skip
"""They make something of sizes and types, and do not ask whether these are values of a graph."""
_PACKING_FUNCTIONS = (
    rnn.pack_padded_sequence, rnn.pad_packed_sequence, rnn.pack_sequence, rnn.pad_sequence,
)  # fmt: skip
"""Called whole: torch ends the process where what they call inside gets values of a graph."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A model's forward, as it was traced.

    Attributes:
        graph: Calls in the order of execution; one placeholder for each leaf of the call.
        constants: Tensors of the code that no module holds (and modules that a cut by hand adds),
            by the name in the graph.
        examples: Values of the graph's nodes for the example, computed when asked for.
        opened: Names of the modules that are not leaves, the model itself ("") among them.
        state: What their code may have read: plain attributes, by (module, attribute).
        closed: Modules that became leaves because they cannot be followed, with the reason.
    """

    model: nn.Module
    graph: fx.Graph
    call: ModelCall
    constants: Mapping[str, Any]
    examples: ExampleValues
    opened: tuple[str, ...]
    state: Mapping[PlainAttribute, Any]
    closed: Mapping[str, str]

    def find(self, name: str) -> Any:
        """What a target of the graph is."""
        return self.constants[name] if name in self.constants else attribute_at(self.model, name)

    def check(self) -> Callable[[], None]:
        """A function that refuses to go on where the graph's code would read something else now.

        Raises (the function):
            RunError: A plain attribute of an opened module has changed.
        """
        model, opened, state = self.model, self.opened, self.state
        return lambda: check_plain_attributes(model, opened, state)


class Untraceable(Exception):
    """A module's forward cannot be followed.

    Attributes:
        module: Its name; "" for the model itself.
    """

    def __init__(self, module: str, why: str, line: str) -> None:
        super().__init__(why)
        self.module, self.why, self.line = module, why, line


def trace_model(model: nn.Module, call: ModelCall, is_leaf: IsLeaf) -> Trace:
    """Follow the model's forward; modules that cannot be followed become leaves.

    Args:
        model: In the mode (training or not) that the graph is for.
        is_leaf: Whether a module is one call.

    Raises:
        PlanError: The model's own forward cannot be followed.
    """
    if has_hooks(model):
        raise _refusal(model, Untraceable("", "it has hooks, which stages would not run", ""))
    closed: dict[str, str] = {}
    # Every failure closes one module more, so that this ends.
    while True:
        try:
            found = _trace(model, call, lambda name, m: name in closed or is_leaf(name, m))
            return replace(found, closed=closed)
        except Untraceable as error:
            if not error.module:
                raise _refusal(model, error) from error.__cause__
            closed[error.module] = f"{error.why} ({error.line})" if error.line else error.why


def _trace(model: nn.Module, call: ModelCall, is_leaf: IsLeaf) -> Trace:
    examples = ExampleValues(model)
    with examples.opened():
        tracer = _Tracer(model, call, is_leaf, examples)
        before = plain_attributes(model, [name for name, _ in model.named_modules()])
        buffers = list(model.named_buffers(remove_duplicate=False))
        try:
            with _Creations(tracer):
                graph = tracer.trace(model)
        except Exception as error:
            raise Untraceable(tracer.failed, _reason(error), _line_of(error)) from error
        finally:
            changed = [*restore_plain_attributes(model, before), *_restore_buffers(model, buffers)]
    opened = ("", *dict.fromkeys(tracer.opened))
    for module, name in changed:
        if module in opened:
            raise Untraceable(module, f"it changes self.{name}, which a graph would not", "")
    state = {key: value for key, value in before.items() if key[0] in opened}
    return Trace(model, graph, call, tracer.constants, examples, opened, state, {})


def _restore_buffers(
    model: nn.Module, before: Iterable[tuple[str, Tensor]]
) -> list[PlainAttribute]:
    """Put buffers back in whose place a forward has set a value of the graph; returns those."""
    found = []
    for path, buffer in before:
        name, _, key = path.rpartition(".")
        module = model.get_submodule(name)
        if isinstance(getattr(module, key), fx.Proxy):
            setattr(module, key, buffer)
            found.append((name, key))
    return found


def _refusal(model: nn.Module, error: Untraceable) -> PlanError:
    return PlanError(
        f"the forward of {type(model).__name__} cannot be cut into stages",
        problems=[error.why],
        where=error.line,
        fix="Move this into a module of its own (what happens inside of modules does not matter), "
        "or give the stages by hand: a list of the model's modules.",
    )


def check_branch(value: Any, expected: Any, where: str) -> None:
    """A decision that was taken while tracing must be the same for every micro-batch.

    Raises:
        RunError: It is not.
    """
    if value != expected:
        raise RunError(
            f"this micro-batch takes another path through the model: {value!r} in place of "
            f"{expected!r}",
            where=where,
            why="The stages were cut for the path of the first micro-batch.",
            fix="Move this decision into a module of its own, or give the stages by hand.",
        )


class TracedValue(fx.Proxy):
    """A value of the graph, which can also be asked what it is for the example."""

    tracer: _Tracer

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The example's, so that `isinstance(x, Tensor)` in a model's code holds here, too.

        Not for torch's own code: what it takes for a tensor it gives to C, which trusts it.
        """
        asking = sys._getframe(1)
        if is_torch_file(asking.f_code.co_filename) or not _asks_for_class(
            asking.f_code, asking.f_lasti
        ):
            return type(self)
        return self.tracer.type_of(self)

    def __getattr__(self, name: str) -> TracedAttribute:
        self.tracer.check_attribute(self, name)
        return TracedAttribute(self, name)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.mutate(self, "call_function", set_item_, (key, value), {})

    def __len__(self) -> int:
        return int(self.tracer.decide(self.tracer.create_proxy("call_function", len, (self,), {})))

    def __index__(self) -> int:
        return operator.index(self.tracer.decide(self))

    def __int__(self) -> int:
        return int(self.tracer.decide(self))

    def __float__(self) -> float:
        return float(self.tracer.decide(self))

    def __contains__(self, key: object) -> bool:
        found = self.tracer.create_proxy("call_function", operator.contains, (self, key), {})
        return bool(self.tracer.decide(found))


@lru_cache(maxsize=4096)
def _asks_for_class(code: CodeType, instruction: int) -> bool:
    """Whether Python code asks for a class, by `isinstance`, `__class__` or a pattern.

    A C function that is called from the same line has no frame of its own: torch.pow(x, 2) asks
    whether x is a tensor in place of a number, and reads the memory of what says that it is.

    Args:
        instruction: Byte offset in the code of what is being carried out.
    """
    name = opname[code.co_code[instruction]]
    if not name.startswith(("CALL", "PRECALL")):
        return name.startswith(("LOAD_ATTR", "LOAD_METHOD", "MATCH_CLASS"))
    line, _, start, _ = next(islice(code.co_positions(), instruction // 2, None))
    if line is None or start is None:
        return False
    text = getline(code.co_filename, line).encode()[start:]  # columns are counted in bytes
    return re.match(rb"\(*isinstance\s*\(", text) is not None


class TracedAttribute(TracedValue, Attribute):
    """An attribute of a value, or a method that is about to be called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.attr.endswith("_") and not self.attr.endswith("__"):
            return self.tracer.mutate(self.root, "call_method", self.attr, args, kwargs)
        return super().__call__(*args, **kwargs)


def set_item_(target: Any, key: Any, value: Any) -> Any:
    """`target[key] = value` as a call that returns what it has changed."""
    target[key] = value
    return target


class _Tracer(fx.Tracer):
    """Attributes:
    opened: Names of the modules that were walked into.
    constants: As of `Trace`.
    failed: The innermost opened module when an exception was raised.
    """

    # By default fx would compute with the buffers' present values and keep the result as a
    # constant.
    proxy_buffer_attributes = True

    def __init__(
        self, model: nn.Module, call: ModelCall, is_leaf: IsLeaf, examples: ExampleValues
    ) -> None:
        super().__init__(
            autowrap_functions=(
                torch.utils.checkpoint.checkpoint,
                *_PACKING_FUNCTIONS,
                *_FACTORY_FUNCTIONS,
            )
        )
        # Not only where they were imported by name: fx has no public way to say so.
        self._autowrap_search += [torch.utils.checkpoint, rnn, torch]
        self._call = call
        self._is_leaf = is_leaf
        self._examples = examples
        self.constants = examples.constants
        self._modes = _modes()
        self.opened: list[str] = []
        self.failed = ""

    # -- what fx asks ------------------------------------------------------------------------

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return TracedValue(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return self._is_leaf(module_qualified_name, m)

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        leaves = []
        for number, leaf in enumerate(self._call.leaves):
            leaves.append(self.create_proxy("placeholder", f"input_{number}", (), {}))
            self._examples.know(leaves[-1].node, leaf)
        args, kwargs = self._call.arguments(tuple(leaves))
        # Already bound: a placeholder stands for a leaf of the call, not for an argument of
        # forward.
        return (lambda: root_fn(self.root, *args, **kwargs)), []

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        # fx has patched the call of every module; those for an example are no part of the graph.
        if self._examples.busy or not self._is_of_the_model(m):
            return forward(*args, **kwargs)
        name = self.path_of_module(m)
        if self.is_leaf_module(m, name):
            return super().call_module(m, forward, args, kwargs)
        self.opened.append(name)
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed = self.failed or name  # the innermost one, as it is seen first
            raise

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if self._examples.busy:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, fx.Proxy):  # before all questions for a type, as it answers for another
            return a.node
        if isinstance(a, nn.Module):  # of torch.utils.checkpoint: the module that is run again
            node = self.create_node("get_attr", self.path_of_module(a), (), {})
            node.meta["module"] = True
            return node
        if isinstance(a, Tensor) and not isinstance(a, nn.Parameter):
            return self.create_node("get_attr", self._name_of(a), (), {})
        if (isinstance(a, dict) and type(a) is not dict) or (
            is_dataclass(a) and not isinstance(a, type)
        ):
            return self._container(a)
        return super().create_arg(a)

    def _container(self, value: Any) -> fx.Node:
        """Of a class of its own, such as the outputs of `transformers`: fx would make something
        else of it, or call a constructor that does more than keep what it is given."""
        leaves, structure = flatten(value, lambda leaf: isinstance(leaf, fx.Proxy))
        try:
            structure.rebuild([None] * len(leaves))
        except Exception:
            raise fx.proxy.TraceError(
                f"it makes a {type(value).__name__}, which cannot be built from its parts"
            ) from None

        def build_container(*parts: Any) -> Any:
            return structure.rebuild(parts)

        return self.create_node(
            "call_function", build_container, tuple(self.create_arg(leaf) for leaf in leaves), {}
        )

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        if _modes() != self._modes and kind != "output":
            raise fx.proxy.TraceError(
                "it computes something inside of torch.no_grad() or torch.autocast(), of which a "
                "graph would know nothing"
            )
        node = super().create_node(kind, *args, **kwargs)
        node.meta["where"] = user_line()
        return node

    # -- changes in place --------------------------------------------------------------------

    def mutate(
        self, victim: fx.Proxy, kind: str, target: Any, args: tuple[Any, ...], kwargs: Any
    ) -> fx.Proxy:
        """Record a call that changes a value in place; from here on the value is its result.

        So whoever uses the value later depends on the change. What is made of the inputs alone (the
        labels moved by one) is copied first: each stage can then make it for itself.
        """
        if _depends_on_inputs_alone(victim.node):
            copy = self.create_proxy("call_method", "clone", (victim,), {})
            copy.node.meta["copied"] = True
            result = self.create_proxy(kind, target, (copy, *args), kwargs)
        else:
            result = self.create_proxy(kind, target, (victim, *args), kwargs)
        victim.node = result.node
        return result

    # -- decisions ---------------------------------------------------------------------------

    def to_bool(self, obj: fx.Proxy) -> bool:
        return bool(self.decide(self.create_proxy("call_function", _truth, (obj,), {})))

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        value = self._examples.value(obj.node)
        if isinstance(value, Mapping):
            return iter(self.keys(obj))
        if isinstance(value, tuple | list):
            # `len` records a check that every micro-batch has as many elements.
            return iter([obj[number] for number in range(len(obj))])  # type: ignore[index]
        raise fx.proxy.TraceError(f"it goes through a {type(value).__name__} in a loop")

    def keys(self, obj: fx.Proxy) -> Any:
        return self.decide(self.create_proxy("call_function", tuple, (obj,), {}))

    def decide(self, obj: fx.Proxy) -> Any:
        """The example's value, which from here on every micro-batch must have.

        Raises:
            TraceError: It depends on the numbers in a tensor.
        """
        value = self._examples.value(obj.node)
        if isinstance(value, Tensor) or _reads_numbers(obj.node):
            raise fx.proxy.TraceError("it decides by the numbers in a tensor which way to go")
        self.create_node("call_function", check_branch, (obj.node, value, user_line()), {})
        return value

    def type_of(self, obj: fx.Proxy) -> type:
        """Of the example; the proxy's own where there is no example to ask."""
        if self._examples.busy or not self._examples.is_open:
            return type(obj)
        return type(self._examples.value(obj.node))

    def check_attribute(self, obj: fx.Proxy, name: str) -> None:
        """Let `hasattr` answer as for the example.

        Raises:
            AttributeError: The example has no such attribute.
        """
        # Nearly all attributes are a tensor's: only for the others an example is computed.
        if not hasattr(Tensor, name) and self._examples.is_open:
            getattr(self._examples.value(obj.node), name)

    def _is_of_the_model(self, module: nn.Module) -> bool:
        """A module that a forward has just made (a criterion) is followed as code is."""
        return any(module is own for own in self.root.modules())

    def _name_of(self, tensor: Tensor) -> str:
        """Of a tensor that is no parameter: of the module that holds it, or a new one."""
        self._examples.check_not_collected(tensor)
        if tensor.requires_grad:
            raise fx.proxy.TraceError("it uses a parameter that belongs to no module")
        known = [name for name, held in self.constants.items() if held is tensor]
        held = [name for name, buffer in self.root.named_buffers() if buffer is tensor]
        if known or held:
            return (known or held)[0]
        name = self.tensor_attrs.get(tensor) or f"constant_{len(self.constants)}"
        self.constants[str(name)] = tensor
        return str(name)


class _Creations(TorchFunctionMode):
    """Records what makes a tensor of no tensor (torch.zeros): else it would be made only once."""

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords, examples = kwargs or {}, self._tracer._examples
        if not examples.busy:
            examples.check_not_collected((args, keywords))
        result = func(*args, **keywords)
        if examples.busy and isinstance(result, Tensor):
            examples.note(result)
        # A function of a traced value returns a traced value (for `isinstance` a tensor, too); this
        # tensor was made of none.
        if (
            examples.busy
            or isinstance(result, fx.Proxy)
            or not isinstance(result, Tensor)
            or is_tensor_method_or_property(func)
        ):
            return result
        return self._tracer.create_proxy("call_function", func, args, keywords)


def _truth(value: Any) -> Any:
    """Whether a value counts as true; a tensor stays one, so that it can be refused."""
    return value if isinstance(value, Tensor) else bool(value)


def _reads_numbers(node: fx.Node) -> bool:
    for found in _with_ancestors(node):
        name = found.target if isinstance(found.target, str) else found.target.__name__
        if found.op in ("call_method", "call_function") and name in _DATA_DEPENDENT_READS:
            return True
    return False


def _depends_on_inputs_alone(node: fx.Node) -> bool:
    """On nothing that the model holds."""
    return all(found.op not in ("call_module", "get_attr") for found in _with_ancestors(node))


def _with_ancestors(node: fx.Node) -> Iterator[fx.Node]:
    """A node and all that it is computed from."""
    seen = {node}
    waiting = [node]
    while waiting:
        found = waiting.pop()
        yield found
        waiting += [n for n in found.all_input_nodes if n not in seen]
        seen.update(found.all_input_nodes)


def _modes() -> tuple[bool, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
    )


def _reason(error: Exception) -> str:
    text = str(error).partition("\n")[0]
    # The tracer's own messages begin with "it".
    if isinstance(error, fx.proxy.TraceError) and text.startswith("it "):
        return text
    return f"it does what torch.fx cannot follow: {type(error).__name__}: {text}"


def _line_of(error: Exception) -> str:
    """The innermost line of the user's own code in the traceback."""
    frame = innermost_user_frame(traceback.extract_tb(error.__traceback__))
    return f"{frame.filename}:{frame.lineno}, in {frame.name}" if frame else ""
