"""What happens when models meet: means, elastic pulls, pairs, gossip, and outer optimisers.

Sources: local SGD (Zinkevich et al. 2010; McDonald et al. 2010; SparkNet, Moritz et al. 2016);
EASGD and its tree (Zhang, Choromanska, LeCun 2015, equations 2.3, 2.4; Langer et al. 2020, figures
10, 16); D-PSGD (Lian et al. 2017, algorithm 1); AD-PSGD (Lian et al. 2018, algorithm 1); GoSGD
(Blot et al. 2016, algorithm 3); slow momentum (Wang et al. 2020, algorithm 1); DiLoCo (Douillard et
al. 2023, algorithm 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.plans.synchrony import Synchrony
from headway.synchrony.actors import Gradient, Holder, Outgoing, Replica, Sender, Value
from headway.synchrony.snapshots import Look, shown

# -- rules -------------------------------------------------------------------------------------


def mean(values: Sequence[Value]) -> Value:
    """Added in their order, then divided."""
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total * (1 / len(values))


def mixed(weights: Mapping[int, float], models: Mapping[int, Value]) -> Value:
    """One row of W times the models, added in the order of the workers."""
    found: Value = None
    for worker in sorted(weights):
        if weights[worker]:
            part = models[worker] * weights[worker]
            found = part if found is None else found + part
    return found


def elastic_pull(model: Value, centre: Value, rate: float) -> Value:
    """A model, or a centre, moved towards the other: x + rate * (c - x)."""
    return model + (centre - model) * rate


def push_sum(model: Value, weight: float, other: Value, other_weight: float) -> tuple[Value, float]:
    """The weighted mean of two models, and the sum of their weights (GoSGD)."""
    total = weight + other_weight
    return model * (weight / total) + other * (other_weight / total), total


@dataclass
class CommonModel:
    """What workers that meet in rounds have agreed on, kept by each of them alike.

    The outer optimiser takes the change of the mean model for a gradient, Delta = x_old -
    mean(x_i). "momentum" (slow momentum): u = m u + Delta; x = x_old - rate u. "nesterov" (DiLoCo):
    the same u; x = x_old - rate (Delta + m u). "none": x = mean(x_i), bit by bit.

    Attributes:
        at: The model after the last meeting, x_old; of an elastic run the centre. None: before the
            first step.
        momentum: u; None before the first meeting.
    """

    synchrony: Synchrony
    at: Value = None
    momentum: Value = None

    def step(self, average: Value) -> None:
        """Take the mean of a meeting; `at` is what all workers go on with."""
        if self.synchrony.outer == "none":
            self.at = average
        else:
            self.move(self.at - average)

    def move(self, delta: Value) -> None:
        """The same, from the mean of all differences x_old - x_i, or what came of it."""
        rules = self.synchrony
        if rules.outer == "none":
            self.at = self.at - delta
            return
        self.momentum = (
            delta if self.momentum is None else self.momentum * rules.outer_momentum + delta
        )
        direction = self.momentum
        if rules.outer == "nesterov":
            direction = delta + self.momentum * rules.outer_momentum
        self.at = self.at - direction * rules.outer_rate


# -- messages and holders ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Read:
    """A worker reads its own model."""


@dataclass(frozen=True, slots=True)
class Update:
    """A worker's gradient for its own model."""

    gradient: Gradient


@dataclass(frozen=True, slots=True)
class Meet:
    """A worker's model after some step, for all, or for its neighbours.

    Attributes:
        what: "model", the "difference" to the common model, or the optimiser's "state".
    """

    step: int
    model: Value
    what: str = "model"


@dataclass(frozen=True, slots=True)
class Pull:
    """A model that pulls at what it meets, by `rate`; a centre answers with its old self."""

    model: Value
    rate: float


@dataclass(frozen=True, slots=True)
class Pair:
    """A model for a pairwise mean; the answer is the mean."""

    model: Value


@dataclass(frozen=True, slots=True)
class Replace:
    """The mean that a worker has got back from its partner becomes its model."""

    model: Value


@dataclass(frozen=True, slots=True)
class Halve:
    """A worker takes half of its weight to give it away; the answer is (model, half)."""


@dataclass(frozen=True, slots=True)
class Gossip:
    """A model and its weight, on their way to somebody."""

    model: Value
    weight: float


@dataclass
class Meeting(Holder):
    """Where workers meet in rounds: answers all with the mean once all models of a step are there.

    In a run it is an all-reduce, and lives nowhere.
    """

    workers: int
    _here: dict[tuple[int, str], dict[int, Value]] = field(default_factory=dict)

    def handle(self, sender: Sender, message: Any) -> Sequence[Outgoing]:
        assert isinstance(sender, int)
        key = message.step, message.what
        models = self._here.setdefault(key, {})
        models[sender] = message.model
        if len(models) < self.workers:
            return ()
        del self._here[key]
        average = mean([models[worker] for worker in range(self.workers)])
        return [Outgoing(worker, average) for worker in range(self.workers)]


@dataclass
class Inbox(Holder):
    """Of one worker: its neighbours' models of each step; its own `Meet` is answered by them.

    Attributes:
        owner: The worker.
        near: Its neighbours.
    """

    owner: int
    near: tuple[int, ...]
    _here: dict[int, dict[int, Value]] = field(default_factory=dict)
    _asked: int | None = None

    def handle(self, sender: Sender, message: Any) -> Sequence[Outgoing]:
        assert isinstance(sender, int)
        self._here.setdefault(message.step, {})[sender] = message.model
        if sender == self.owner:
            self._asked = message.step
        step = self._asked
        if step is None or len(self._here[step]) <= len(self.near):
            return ()
        models, self._asked = self._here.pop(step), None
        return [Outgoing(self.owner, dict(sorted(models.items())))]


@dataclass
class Centre(Holder):
    """The master of an elastic run: what pulls at it gets its old self, and moves it."""

    replica: Replica

    def handle(self, sender: Sender, message: Any) -> Sequence[Outgoing]:
        assert isinstance(sender, int)
        if isinstance(message, Look):
            return shown(sender, self.replica)
        before = self.replica.read()
        self.replica.write(elastic_pull(before, message.model, message.rate))
        return [Outgoing(sender, before)]


@dataclass
class Model(Holder):
    """A worker's own model where others change it, too.

    Attributes:
        weight: Of this model in the mean of all (push-sum).
    """

    replica: Replica
    weight: float = 1.0

    def handle(self, sender: Sender, message: Any) -> Sequence[Outgoing]:
        assert isinstance(sender, int)
        replica = self.replica
        match message:
            case Look():
                return shown(sender, replica)
            case Read():
                return [Outgoing(sender, replica.read())]
            case Update(gradient=gradient):
                if gradient.count:
                    replica.step(gradient.value)
                return [Outgoing(sender, None)]
            case Replace(model=model):
                replica.write(model)
                return [Outgoing(sender, None)]
            case Pull(model=model, rate=rate):
                replica.write(elastic_pull(replica.read(), model, rate))
                return ()
            case Pair(model=model):
                both = mean([replica.read(), model])
                replica.write(both)
                return [Outgoing(sender, both)]
            case Halve():
                self.weight /= 2
                return [Outgoing(sender, (replica.read(), self.weight))]
            case Gossip(model=model, weight=weight):
                merged, self.weight = push_sum(replica.read(), self.weight, model, weight)
                replica.write(merged)
                return ()
        raise TypeError(f"a model got {message!r}")
