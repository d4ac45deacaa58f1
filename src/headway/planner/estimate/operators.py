r"""The choices of every operator on one axis of a mesh, and what each of them costs.

A choice is a legal rule of `graph.rules`. Its cost is a vector (`PARTS`) that adds up over
operators and re-layouts, for one micro-batch of `samples` samples. Data parallelism, ZeRO, the
schedule and the number of micro-batches come later, so one table of choices serves all of those.

A re-layout brings a tensor from one placement to another on the axis; equal placements cost
nothing:

| from \ to | R | S | pending |
|---|---|---|---|
| R | - | slice, free | all but one part put zeros, free |
| S | all-gather | all-to-all | free |
| pending | all-reduce | reduce-scatter | - |

On a device that was measured kernel by kernel an operator costs the sum of the kernels that were
folded into it: measured kinds have their own pace, products that of linear layers, all others
stream. Operators without parameters are never subject to the user's forced choices.

Sources: Cai et al. 2022 (TensorOpt), cost of a strategy; Narayanan et al. 2021 (what a split
    sends).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.cluster.device import KernelPace
from headway.cost.device import Array, DeviceModel
from headway.cost.machines import Machine
from headway.cost.memory import OPTIMISER_MEMORY, OptimiserMemory
from headway.cost.network import HierarchicalNetwork
from headway.errors import PlanError
from headway.graph.aten.flops import parameter_traffic
from headway.graph.model_graph import ModelGraph, Operator, TensorSpec, Work, parse_index
from headway.graph.sharding_rules import Rule, enumerate_rules
from headway.graph.stage_boundaries import input_independent_tensors

PRODUCTS = frozenset(["addmm", "baddbmm", "bmm", "dot", "einsum", "linear", "matmul", "mm", "mv"])
SIMILAR_KINDS = {
    **dict.fromkeys(PRODUCTS, "linear"),
    **dict.fromkeys(("conv1d", "conv3d", "convolution", "conv2d grouped"), "conv2d"),
    **dict.fromkeys(("conv1d grouped", "conv3d grouped"), "conv2d grouped"),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose3d"), "conv_transpose2d"),
    "rnn_relu": "rnn_tanh",
    "rnn_relu_cell": "rnn_tanh_cell",
}
"""Kinds that have the pace of another one, unless they were measured themselves."""


def measured_seconds(
    device: DeviceModel,
    operator: Operator,
    own: float,
    *,
    dtype: str,
    scale: float,
    moved_weights: float = 1.0,
    parts: int = 1,
) -> tuple[float, float]:
    """Forward and backward of an operator on one device, without launches.

    Args:
        scale: Samples of a micro-batch over those of the capture.
        moved_weights: Share of what its parameters move and its calls cost that counts; 0: nothing
            that few samples make slower counts, so that times are proportional to samples, a bound
            from below.
    """
    forward = backward = 0.0
    for kernel in operator.kernels:
        held = own if kernel.traffic.weight_gradient or len(operator.kernels) == 1 else 0.0
        fixed = parameter_traffic(kernel.kind, held, kernel.traffic)
        pace = _pace(device, kernel.kind)
        slow = scale * (_slower(device, dtype) if kernel.kind in PRODUCTS else 1.0)
        passes = []
        for flops, moved, weights, backward_ in (
            (kernel.flops.forward, kernel.traffic.forward, fixed.forward, False),
            (_gradients(kernel.flops), _gradients(kernel.traffic), _gradients(fixed), True),
        ):
            streams, weights = (moved - weights) * scale, weights * moved_weights
            if pace is None:
                # Without a pace, a kernel takes the longer of its products and its memory traffic
                # (roofline).
                rate = device.rate(dtype) if kernel.flops.total else 1.0
                seconds = max(flops * scale / rate, (streams + weights) / device.memory_rate)
                passes.append(seconds / parts)
            else:
                seconds = pace.seconds(flops * slow, streams, weights, backward=backward_)
                call = pace.call(backward=backward_) * kernel.calls
                call += pace.far((streams + weights) / parts, backward=backward_)
                call *= moved_weights if moved else 0.0
                passes.append(seconds / parts + call)
        forward, backward = forward + passes[0], backward + passes[1]
    return forward, backward


def _pace(device: DeviceModel, kind: str) -> KernelPace | None:
    # Similar kinds form chains: conv3d grouped, conv2d grouped, conv2d.
    while kind not in device.kinds and kind in SIMILAR_KINDS:
        kind = SIMILAR_KINDS[kind]
    return device.kinds.get(kind)


def _gradients(work: Work) -> float:
    return work.input_gradient + work.weight_gradient


def _slower(device: DeviceModel, dtype: str) -> float:
    # Paces are measured in fp32.
    return device.rate("fp32") / device.rate(dtype) if "fp32" in device.peak else 1.0


Sides = tuple[tuple[str, str], ...]
"""A placement of a tensor and one of its gradient for each choice."""


class RelayoutCollective(NamedTuple):
    """One operation on the whole axis: its kind, and the bytes of the buffer it works on."""

    kind: str
    bytes: float


class Relayout:
    """Prices for an axis of neighbouring ranks; each (kind, bytes) is computed once."""

    def __init__(self, network: HierarchicalNetwork, size: int) -> None:
        self.network = network
        self.size = size
        self._known: dict[RelayoutCollective, float] = {}
        self._pairs: dict[tuple[Sides, Sides], tuple[tuple[str, ...], np.ndarray]] = {}

    def needed(self, source: str, target: str, num_bytes: float) -> RelayoutCollective | None:
        """The collective between two placements of a tensor of so many bytes; None: it is free."""
        # From a whole tensor, a rank slices its part or puts zeros without any message.
        if source == target or source == "R" or self.size == 1:
            return None
        if source.startswith("P"):
            if target.startswith("P") and target != source:
                return RelayoutCollective("all_reduce", num_bytes)
            kind = "reduce_scatter" if target.startswith("S") else "all_reduce"
            return RelayoutCollective(kind, num_bytes)
        if target == "R":
            return RelayoutCollective("all_gather", num_bytes)
        return RelayoutCollective("all_to_all", num_bytes / self.size) if target[0] == "S" else None

    def table(self, sources: Sides, targets: Sides, size: float) -> NDArray[np.float64]:
        """(sources, targets, 2): seconds of both passes.

        Args:
            sources: How each choice of the maker lays the tensor, and wants its gradient.
            targets: How each choice of the user needs the tensor, and gives its gradient.
        """
        key = sources, targets
        if key not in self._pairs:
            self._pairs[key] = self._kinds(sources, targets)
        kinds, numbers = self._pairs[key]
        prices = np.array([0.0, *(self._price(kind, size) for kind in kinds)])
        return prices.take(numbers)

    def _kinds(self, sources: Sides, targets: Sides) -> tuple[tuple[str, ...], np.ndarray]:
        """Collectives of pairs, and for each pair the number of its own, from 1; 0: it is free."""
        kinds: dict[str, int] = {}
        numbers = np.zeros((len(sources), len(targets), 2), dtype=np.int64)
        for one, (lies, wants) in enumerate(sources):
            for two, (needs, gives) in enumerate(targets):
                for part, pair in enumerate(((lies, needs), (gives, wants))):
                    # The kind does not depend on the bytes, so one table of kinds serves tensors of
                    # all sizes.
                    found = self.needed(*pair, 1.0)
                    if found is not None:
                        numbers[one, two, part] = kinds.setdefault(found.kind, len(kinds) + 1)
        return tuple(kinds), numbers

    def _price(self, kind: str, size: float) -> float:
        found = RelayoutCollective(kind, size / self.size if kind == "all_to_all" else size)
        if found not in self._known:
            price = getattr(self.network, kind)
            self._known[found] = float(price(found.bytes, self.size))
        return self._known[found]

    def seconds(self, source: str, target: str, num_bytes: float) -> float:
        found = self.needed(source, target, num_bytes)
        return 0.0 if found is None else self._price(found.kind, num_bytes)


def gradient_placement(placement: str) -> str:
    """How the maker of a tensor wants its gradient: as the tensor lies, whole for a pending one."""
    return "R" if placement.startswith("P") else placement


def forcible_names(operator: Operator) -> tuple[str, ...]:
    """What a pattern may call an operator with parameters: its module; in the model itself, which
    has no name, its parameters."""
    return (operator.module,) if operator.module else tuple(operator.parameters)


def pattern_matches(pattern: str, operator: Operator) -> bool:
    """Whether a pattern of `OperatorSetting.force` is about an operator."""
    names = forcible_names(operator) if operator.parameters else ()
    return any(fnmatchcase(name, pattern) for name in names)


PARTS = ("forward", "backward", "step", "params", "saved")
"""Seconds of a micro-batch in both passes, seconds of a step on this axis (gradients of whole
parameters), bytes of parameters and bytes kept for backward of a micro-batch, on one device."""

_VIEW_KINDS = """
_unsafe_view alias chunk detach expand flatten permute reshape select slice split split_with_sizes
squeeze t transpose unbind unflatten unsqueeze view
"""
_VIEWS = frozenset(_VIEW_KINDS.split())
_DTYPES = {"float32": "fp32", "float64": "fp64", "bfloat16": "bf16", "float16": "fp16"}


class OperatorCounts(NamedTuple):
    """Of an operator: elements that it makes, takes beside its weights, and of its weights (or
    what it takes); bytes of its weights; the specs of what it makes."""

    made: int
    taken: int
    held: int
    own: float
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True, kw_only=True)
class PlanningWorkload:
    """A model for the search.

    Attributes:
        samples: In the micro-batch with which it was captured.
        reads: Ranks read their samples between steps, not processes of their own beside them.
    """

    graph: ModelGraph
    samples: int
    optimiser: OptimiserMemory = OPTIMISER_MEMORY["adamw"]
    reads: bool = True

    @cached_property
    def fixed(self) -> frozenset[str]:
        """Tensors that every rank makes itself."""
        return input_independent_tensors(self.graph)

    @cached_property
    def batch_dims(self) -> Mapping[str, int]:
        """The dimension of a tensor that counts samples, the slowest."""
        return self._batch[0]

    @cached_property
    def batch_loops(self) -> Mapping[str, str]:
        """The loop of an operator, by its name, that runs over samples."""
        return self._batch[1]

    @cached_property
    def relayouts(self) -> dict[tuple[int, int], Relayout]:
        """By network, which each of them holds, and size of the axis."""
        return {}

    @cached_property
    def _rules(self) -> dict[tuple[str, int], tuple[Rule, ...]]:
        return {}

    def rules(self, operator: Operator, parts: int) -> tuple[Rule, ...]:
        """As `graph.rules`, each looked for once."""
        key = (operator.name, parts)
        if key not in self._rules:
            self._rules[key] = enumerate_rules(operator, *self.graph.specs(operator), parts)
        return self._rules[key]

    @cached_property
    def _counts(self) -> dict[str, OperatorCounts]:
        return {}

    def counts(self, operator: Operator) -> OperatorCounts:
        """What an operator uses and makes, each looked for once."""
        if operator.name not in self._counts:
            inputs, outputs = self.graph.specs(operator)
            weights = [
                s for t, s in zip(operator.inputs, inputs, strict=True) if t in operator.parameters
            ]
            held = sum(spec.elements for spec in weights)
            taken = sum(spec.elements for spec in inputs) - held or 1
            self._counts[operator.name] = OperatorCounts(
                made=sum(spec.elements for spec in outputs) or 1,
                taken=taken,
                held=held or taken,
                own=float(sum(spec.bytes for spec in weights)),
                outputs=outputs,
            )
        return self._counts[operator.name]

    @cached_property
    def _batch(self) -> tuple[dict[str, int], dict[str, str]]:
        dims = {
            name: 0
            for name, spec in self.graph.inputs.items()
            if spec.shape and spec.shape[0] == self.samples
        }
        loops: dict[str, str] = {}
        for operator in self.graph.operators:
            entered = [n for n, tensor in enumerate(operator.inputs) if tensor in dims]
            if not entered:
                continue
            # An operator that the table does not know is taken to keep samples in front.
            if not operator.axes.known:
                loops[operator.name] = ""
                dims |= dict.fromkeys(operator.outputs, 0)
                continue
            number = entered[0]
            index = parse_index(operator.axes.inputs[number])[dims[operator.inputs[number]]]
            loop = index[0] if index else ""
            loops[operator.name] = loop
            for tensor, text in zip(operator.outputs, operator.axes.outputs, strict=True):
                places = [d for d, axes in enumerate(parse_index(text)) if axes[:1] == (loop,)]
                dims |= dict.fromkeys([tensor] if places else [], places[0] if places else 0)
        return dims, loops


@dataclass(frozen=True, kw_only=True)
class OperatorSetting:
    """What a table of choices is for.

    Attributes:
        tensor: Ranks of the axis, which lie next to each other.
        samples: Of a micro-batch.
        force: Patterns of modules, and what their operators must do: "replicate", "split", or
            "split:AXIS" with the name of a loop.
    """

    work: PlanningWorkload
    machine: Machine
    tensor: int
    samples: int
    force: tuple[tuple[str, str], ...] = ()

    @cached_property
    def relayout(self) -> Relayout:
        """The same for all sizes of micro-batches."""
        network = self.machine.network
        # By identity: levels carry a dict of sources, so a network has no hash; the relayout keeps
        # it alive.
        key = (id(network), self.tensor)
        return self.work.relayouts.setdefault(key, Relayout(network, self.tensor))

    @cached_property
    def passes(self) -> dict[tuple[str, int, int], tuple[float, float]]:
        """What `_compute` has found, by operator, parts, and parts of the sum."""
        return {}

    @property
    def scale(self) -> float:
        return self.samples / self.work.samples

    def bytes_of(self, tensor: str) -> float:
        """Of the whole tensor, for one micro-batch; 0 of "", at the ends of a row of units."""
        if not tensor:
            return 0.0
        spec = self.work.graph.tensors[tensor]
        return spec.bytes * (self.scale if tensor in self.work.batch_dims else 1.0)

    def placements(self, tensor: str) -> tuple[str, ...]:
        """Whole, and split along each dimension that can be."""
        spec = self.work.graph.tensors[tensor]
        found = ["R"]
        for dim, size in enumerate(spec.shape):
            whole = size
            if self.work.batch_dims.get(tensor) == dim:
                whole = round(size * self.scale)
            if self.tensor > 1 and whole % self.tensor == 0 and whole >= self.tensor:
                found.append(f"S{dim}")
        return tuple(found)


def legal_rules(setting: OperatorSetting, operator: Operator) -> tuple[Rule, ...]:
    """The choices of an operator; what is forced counts where it is legal."""
    loop = setting.work.batch_loops.get(operator.name)
    sizes = operator.axes.sizes()
    found = [
        rule
        for rule in setting.work.rules(operator, setting.tensor)
        if not rule.axis
        or rule.axis != loop
        or round(sizes[rule.axis] * setting.scale) % setting.tensor == 0
    ]
    # With one rank all rules are the same; the first is the whole operator.
    if setting.tensor == 1:
        return tuple(found[:1])
    for pattern, how in setting.force:
        if how != "stage" and pattern_matches(pattern, operator):
            found = [rule for rule in found if _obeys(operator, rule, how)] or found
    return tuple(found)


def check_force(setting: OperatorSetting) -> None:
    """Refuse a forced choice of which no matching module is capable.

    Raises:
        PlanError: Names the modules' axes.
    """
    problems = []
    for pattern, how in setting.force:
        if how == "stage":
            continue
        matching = [
            operator
            for operator in setting.work.graph.operators
            if pattern_matches(pattern, operator)
        ]
        found = [(o, legal_rules(replace(setting, force=()), o)) for o in matching]
        if not any(_obeys(operator, rule, how) for operator, rules_ in found for rule in rules_):
            ways = sorted({rule.axis for _, rules_ in found for rule in rules_ if rule.axis})
            said = ", ".join(ways) if ways else "none" if matching else "no module has this name"
            problems.append(f"{pattern}={how} over {setting.tensor} ranks; can be split: {said}")
    if problems:
        raise PlanError(
            "what is forced is not legal",
            problems=problems,
            fix="Force something else on these modules, or take another tensor degree.",
        )


def _obeys(operator: Operator, rule: Rule, how: str) -> bool:
    kind, _, axis = how.partition(":")
    held = [
        placement
        for tensor, placement in zip(operator.inputs, rule.inputs, strict=True)
        if tensor in operator.parameters
    ]
    if kind == "replicate":
        return not any(placement.startswith("S") for placement in held)
    if axis not in ("", "tensor"):
        return rule.axis == axis
    return any(placement.startswith("S") for placement in held)


def operator_cost(
    setting: OperatorSetting, operator: Operator, rule: Rule, saves: tuple[str, ...]
) -> Array:
    """The vector (`PARTS`) of one choice.

    Args:
        saves: Names of the storages that are counted here; others are counted elsewhere.
    """
    forward, backward = _compute(setting, operator, rule)
    scale = setting.scale if operator.name in setting.work.batch_loops else 1.0
    if rule.halo:
        halo = float(setting.machine.network.send(rule.halo * scale)) * (rule.parts > 1)
        # Backward sends the gradients of the halo back to the parts that own it.
        forward, backward = forward + halo, backward + halo
    if rule.exchange:
        summed = setting.relayout.seconds("P", "R", rule.exchange)
        forward, backward = forward + summed, backward + summed
    held, pending = parameter_bytes(setting, operator, rule)
    step = sum(setting.relayout.seconds("P", "R", size) for size in pending)
    kept = sum(
        saved.bytes * scale / _divisor(setting, operator, rule, saved.name, saved.bytes)
        for saved in operator.saved
        if saved.name in saves
    )
    return np.array([forward, backward, step, held, kept])


def parameter_bytes(
    setting: OperatorSetting, operator: Operator, rule: Rule
) -> tuple[float, tuple[float, ...]]:
    """(of parameters on one device, of each whose gradient is summed over the axis)."""
    held, pending = 0.0, []
    rows = zip(operator.inputs, rule.inputs, rule.gradients, strict=True)
    for tensor, placement, gradient in rows:
        if tensor not in operator.parameters:
            continue
        size = setting.work.graph.tensors[tensor].bytes
        held += size / (setting.tensor if placement.startswith("S") else 1)
        # Parts that each computed a share of the gradient of a whole parameter sum it once a step.
        if gradient.startswith("P") and not placement.startswith("P"):
            pending.append(float(size))
    return held, tuple(pending)


def _compute(setting: OperatorSetting, operator: Operator, rule: Rule) -> tuple[float, float]:
    """Seconds of both passes without collectives; host and device joined operator by operator."""
    key = (operator.name, rule.parts, _parts_of_sum(rule))
    if key in setting.passes:
        return setting.passes[key]
    device = setting.machine.device
    passes = _passes(setting, operator, rule)
    number = kernel_count(operator)
    # Backward launches one more kernel where weights have a gradient of their own.
    launched = (number, number + bool(operator.flops.weight_gradient))
    one, two = (
        float(device.join(device.seconds_of_host(n), s + device.seconds_of_kernels(n))) if s else s
        for s, n in zip(passes, launched, strict=True)
    )
    setting.passes[key] = one, two
    return one, two


def _parts_of_sum(rule: Rule) -> int:
    return rule.parts if any(placement == "P" for placement in rule.outputs) else 1


def roofline_seconds(setting: OperatorSetting, operator: Operator) -> tuple[float, float]:
    """Seconds of both passes of a micro-batch on one device, without launches and without what
    parameters move: together, the parts of no split take less."""
    return _passes(setting, operator, Rule(inputs=(), outputs=(), gradients=()), 0.0)


def _passes(
    setting: OperatorSetting, operator: Operator, rule: Rule, moved_weights: float = 1.0
) -> tuple[float, float]:
    """Seconds on the device of forward and backward."""
    device = setting.machine.device
    batched = operator.name in setting.work.batch_loops
    scale = setting.scale if batched else 1.0
    flops, traffic = operator.flops, operator.traffic
    made, taken, held, own, outputs = setting.work.counts(operator)
    dtype = dtype_of(setting, outputs)
    # A rule with a pending sum divides the summed dimension, which makes products less efficient.
    cut = _parts_of_sum(rule)
    if device.kinds:
        return measured_seconds(
            device,
            operator,
            own,
            dtype=dtype,
            scale=scale,
            moved_weights=moved_weights,
            parts=rule.parts,
        )
    rate = device.rate(dtype)

    def seconds(work: float, moved: float, results: float, cut: float) -> float:
        if not work and not moved:
            return 0.0
        # The summed dimension of the product, from its FLOPs: 2 m n k over the m n results.
        depth = max(work / (2.0 * results) / cut, 1.0)
        product = work * scale / rate * (1.0 + device.depth / depth)
        fixed = min(own, moved)  # weights are read once, however many samples there are
        streamed = ((moved - fixed) * scale + fixed * moved_weights) / device.memory_rate
        return max(product, streamed) / rule.parts

    forward = seconds(flops.forward, traffic.forward, made, cut)
    backward = seconds(flops.input_gradient, traffic.input_gradient, taken, 1)
    return forward, backward + seconds(flops.weight_gradient, traffic.weight_gradient, held, 1)


def kernel_count(operator: Operator) -> int:
    """Kernels of its forward pass: what was folded into it counts unless it is a view."""
    return _launched(operator.parts)


@lru_cache(maxsize=4096)
def _launched(parts: tuple[str, ...]) -> int:
    return max(1, sum(part.rstrip("0123456789").rstrip("_") not in _VIEWS for part in parts))


def dtype_of(setting: OperatorSetting, outputs: tuple[TensorSpec, ...]) -> str:
    """The format of the products: that of the tensors, where the device has a peak of it."""
    peak = setting.machine.device.peak
    own = next((_DTYPES[s.dtype] for s in outputs if s.dtype in _DTYPES), setting.machine.dtype)
    same = {"bf16": "fp16", "fp16": "bf16", "fp64": "fp32"}
    return own if own in peak else same.get(own, "") if same.get(own) in peak else own


def _divisor(
    setting: OperatorSetting, operator: Operator, rule: Rule, name: str, size: int
) -> float:
    """Into how many parts a kept storage falls: as the input that it belongs to lies."""
    tensors = setting.work.graph.tensors
    for tensor, placement in zip(operator.inputs, rule.inputs, strict=True):
        if tensor == name or (tensor not in operator.parameters and tensors[tensor].bytes == size):
            return float(setting.tensor) if placement.startswith("S") else 1.0
    return float(rule.parts)
