"""A plan in the words of the taxonomy of parallel training, and what the taxonomy says of it.

Source: Langer et al. 2020 (A Taxonomy of Parallel Training, TPDS 31(12)), sections 3 to 5 and
tables 1 and 2. Every word is derived from the plan. All-reduce is *central* there: every rank has a
copy of the one optimiser that writes the parameters, a replicated parameter server.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.plans.exchange import ExchangePlan
from headway.plans.plan import Plan
from headway.plans.synchrony import Synchrony

_KINDS = {
    "synchronous": "sync",
    "bounded": "bounded async",
    "soft_bounded": "soft-bounded async",
    "asynchronous": "async",
}
_TRANSFERS = {
    "all_reduce": "all-reduce",
    "scatter_reduce": "scatter-reduce",
    "reduce": "reduce",
    "binomial_tree": "binomial tree",
    "sequential": "sequential",
    "ad_hoc": "ad hoc",
    "neighbour": "2:1 reduce",
    "gossip": "gossip",
}
_PLACES = {
    "replicated": "replicated server",
    "single": "single server",
    "sharded": "sharded servers",
    "colocated": "colocated servers",
    "master": "master",
    "tree": "tree",
    "ring": "closed ring",
    "torus": "torus",
    "exponential": "exponential graph",
    "hypercube": "hypercube",
    "mesh": "p2p mesh",
    "proxy_tree": "tree of proxies",
    "array": "distributed array",
}
_REMEDIES = {
    "staleness_rate": "rate divided by staleness",
    "delay_compensation": "delay compensation",
    "eager_push": "eager push",
    "prioritize": "queue by staleness",
    "negative_momentum": "negative momentum",
}


@dataclass(frozen=True, kw_only=True)
class TaxonomyWords:
    """Where a plan stands on the axes of the taxonomy.

    Attributes:
        parallelism: Axis A: "data", "model.vertical" (cut between layers: a pipeline),
            "model.horizontal" (cut inside layers, or through samples); none on one rank.
        pipelining: "none", "fragment" (a batch is cut, and applied once: exact) or "minibatch"
            (several batches in flight: stale parameters).
        optimisation: Axis B: "central" or "decentral".
        scheduling: Axis C: "sync", "async", "bounded async" or "soft-bounded async".
        shortcuts: Against stragglers: "backup workers 1".
        remedies: Bounds of staleness, and what is done against it: "delay 4", "eager push".
        exchange: Axis D: how parameters or gradients travel; "-": they do not.
        details: Of the exchange: its program, its combination, its compression.
        topology: Axis E: who holds or meets whom; "-": there is one rank.
    """

    parallelism: tuple[str, ...]
    pipelining: str
    optimisation: str
    scheduling: str
    shortcuts: tuple[str, ...]
    remedies: tuple[str, ...]
    exchange: str
    details: tuple[str, ...]
    topology: str

    @property
    def cells(self) -> tuple[str, str, str, str, str]:
        """The row of a table: axes A to E."""
        pipelined = {"model.vertical": f"model.vertical ({self.pipelining})"}
        kinds = " + ".join(pipelined.get(word, word) for word in self.parallelism)
        more = (*self.shortcuts, *self.remedies)
        return (
            kinds or "none",
            self.optimisation,
            ", ".join((self.scheduling, *more)),
            ", ".join((self.exchange, *self.details)),
            self.topology,
        )


AXES = (
    ("A", "parallelism", "what is divided: the data, or the model, between or inside its layers"),
    ("B", "optimisation", "who writes parameters: one optimiser (central), or one per worker"),
    ("C", "scheduling", "when: together, within a bound, or whenever a worker has something"),
    ("D", "exchange", "how what is agreed on travels"),
    ("E", "topology", "who holds the parameters, or meets whom"),
)
"""Letter, name, and the question that the axis answers; in the order of `TaxonomyWords.cells`."""


def taxonomy_words(plan: Plan) -> TaxonomyWords:
    """Where a legal plan stands."""
    synchrony = plan.synchrony
    parallel = (
        ("data", plan.data_degree > 1),
        ("model.vertical", plan.pipe_degree > 1),
        ("model.horizontal", plan.group_degree > 1),
    )
    exchange, topology = _travels(plan)
    backups = synchrony.backup_workers
    return TaxonomyWords(
        parallelism=tuple(word for word, is_so in parallel if is_so),
        pipelining="none" if plan.pipe_degree == 1 else "fragment" if plan.flushes else "minibatch",
        optimisation="central" if synchrony.central else "decentral",
        scheduling=_KINDS[synchrony.kind],
        shortcuts=(f"backup workers {backups}",) if backups else (),
        remedies=_remedies(synchrony),
        exchange=exchange,
        details=_details(plan) if plan.data_degree > 1 else (),
        topology=topology,
    )


def _travels(plan: Plan) -> tuple[str, str]:
    """Exchange and topology."""
    synchrony = plan.synchrony
    if plan.data_degree == 1:  # nobody has parameters that another rank has
        return "-", _PLACES["array"] if plan.ranks > 1 else "-"
    if synchrony.by_all_reduce and plan.memory.zero:  # every rank updates its share, for all
        return _TRANSFERS["scatter_reduce"], f"{_PLACES['colocated']}, one per rank"
    place, carriage = _PLACES[synchrony.place], _TRANSFERS[synchrony.carriage]
    if synchrony.place == "sharded":
        place = f"{synchrony.servers} {place}"
    if synchrony.place == "colocated":
        place += ", one per worker"
    return carriage, place


def _remedies(synchrony: Synchrony) -> tuple[str, ...]:
    found = []
    if synchrony.delay_bound is not None:
        does = "reject beyond" if synchrony.on_violation == "reject" else "delay"
        found.append(f"{does} {synchrony.delay_bound}")
    if synchrony.value_bound is not None:
        found.append(f"value {synchrony.value_bound:g}")
    if synchrony.read == "snapshot":
        found.append("snapshot reads")
    if synchrony.read == "ahead":
        found.append("reads ahead")
    if synchrony.remedy != "none":
        found.append(_REMEDIES[synchrony.remedy])
    return tuple(found)


def _details(plan: Plan) -> tuple[str, ...]:
    """What the taxonomy has no axis for, where it is not the default."""
    synchrony, exchange, plain = plan.synchrony, plan.exchange, ExchangePlan()
    said = {
        exchange.collective: exchange.collective != plain.collective,
        exchange.reduce: exchange.reduce != plain.reduce,
        exchange.compress: exchange.compress != plain.compress,
        f"every {synchrony.local_steps} steps": synchrony.local_steps > 1,
        f"outer {synchrony.outer}": synchrony.outer != "none",
        synchrony.compress: synchrony.compress != "none",
    }
    return tuple(word for word, is_so in said.items() if is_so)


@dataclass(frozen=True, kw_only=True)
class SelectionRule:
    """What the taxonomy says of a technique (its table 2).

    Attributes:
        balanced_data: It needs much data, evenly spread over the workers.
        balanced_model: It needs a model that is cut evenly.
        rate: The best learning rate as the cluster grows.
        overlap: Complexity that overlapping adds; "" to "++++".
        parameters: Extra hyper-parameters.
        resilience: To disturbances.
        reproducible: How hard it is to get the same run again.
    """

    technique: str
    balanced_data: bool = False
    balanced_model: bool = False
    rate: str
    overlap: str
    parameters: str
    resilience: str
    reproducible: str

    def __str__(self) -> str:
        return (
            f"{self.technique}: best learning rate as the cluster grows: {self.rate}; "
            f"reproducible behaviour: {self.reproducible}; "
            f"resilience to disturbance: {self.resilience} (of +++)"
        )


MODEL, MODEL_MINIBATCH = "model parallel", "model parallel, mini-batch pipelining"
SELECTION_RULES = {
    rule.technique: rule
    for rule in (
        SelectionRule(
            technique=MODEL, balanced_model=True, rate="higher", overlap="+", parameters="+++",
            resilience="+", reproducible="trivial",
        ),
        SelectionRule(
            technique=MODEL_MINIBATCH, balanced_model=True, rate="lower", overlap="++",
            parameters="++++", resilience="++", reproducible="medium",
        ),
        SelectionRule(
            technique="data parallel, central, sync", rate="higher", overlap="+", parameters="+",
            resilience="+", reproducible="easy",
        ),
        SelectionRule(
            technique="data parallel, central, async", balanced_data=True, rate="lower",
            overlap="+++", parameters="++", resilience="+++", reproducible="hard",
        ),
        SelectionRule(
            technique="data parallel, decentral, sync", balanced_data=True, rate="likely lower",
            overlap="+", parameters="++", resilience="++", reproducible="easy",
        ),
        SelectionRule(
            technique="data parallel, decentral, async", balanced_data=True, rate="likely lower",
            overlap="++", parameters="+++", resilience="+++", reproducible="hard",
        ),
    )
}  # fmt: skip
"""By technique."""


def selection_rules(plan: Plan) -> tuple[SelectionRule, ...]:
    """The rules that apply to a plan: of data parallelism, model parallelism, both or none."""
    words = taxonomy_words(plan)
    found = []
    if "data" in words.parallelism:
        kind = "sync" if words.scheduling == "sync" else "async"
        found.append(f"data parallel, {words.optimisation}, {kind}")
    if set(words.parallelism) - {"data"}:
        found.append(MODEL_MINIBATCH if words.pipelining == "minibatch" else MODEL)
    return tuple(SELECTION_RULES[technique] for technique in found)


def explain_taxonomy(plan: Plan) -> str:
    """The plan's place and the rules that apply, a line each."""
    words = taxonomy_words(plan)
    named = zip((name for _, name, _ in AXES), words.cells, strict=True)
    place = "; ".join(f"{name} {cell}" for name, cell in named)
    return "\n".join([f"taxonomy: {place}", *(f"  {rule}" for rule in selection_rules(plan))])
