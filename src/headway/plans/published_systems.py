"""Published systems as plans: the rows of the taxonomy's table, and later papers in its words.

Sources: Langer et al. 2020, table 1, for the first 17; each system's own paper otherwise. Sizes
(ranks, batch, bounds, periods) are examples; what a row says of its system is what `taxonomy_words`
derives from the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from headway.collective.all_reduce.algorithm import AllReduceOptions, PlanTree
from headway.documents import nearest
from headway.errors import UsageError
from headway.plans.exchange import ExchangePlan
from headway.plans.layer_split import LayerSplit
from headway.plans.pipeline import PipelinePlan
from headway.plans.plan import Plan, data_parallel, pipelined
from headway.plans.synchrony import Synchrony
from headway.plans.taxonomy import TaxonomyWords, taxonomy_words

_BATCH = 64


@dataclass(frozen=True, kw_only=True)
class PublishedSystem:
    """A row.

    Attributes:
        source: Authors and year.
        remark: What the axes do not say.
        plan: A legal plan that agrees as the system does.
        surveyed: Whether it is in the survey's own table.
        differs: Why the plan's words are not those of the literature; "": they are.
    """

    name: str
    source: str
    remark: str
    plan: Plan
    surveyed: bool = True
    differs: str = ""

    @property
    def words(self) -> TaxonomyWords:
        return taxonomy_words(self.plan)


def _workers(number: int = 4, **words: Any) -> Plan:
    return data_parallel(_BATCH, processes=number, synchrony=Synchrony(**words))


def _halves(workers: int = 4, **words: Any) -> Plan:
    """Workers of two ranks that split layers."""
    split = LayerSplit(tensor=(2,))
    return data_parallel(_BATCH, processes=2 * workers, split=split, synchrony=Synchrony(**words))


def _stages(workers: int = 4, **words: Any) -> Plan:
    """Workers of two ranks that are a pipeline."""
    return pipelined(_BATCH, processes=2 * workers, stages=2, synchrony=Synchrony(**words))


@cache
def published_systems() -> tuple[PublishedSystem, ...]:
    """All rows: those of the survey in its order, then those of other papers."""
    return (*_surveyed(), *_others())


def published_system(name: str) -> PublishedSystem:
    """The row of a name, whatever its case.

    Raises:
        UsageError: There is none; the nearest names are told.
    """
    names = {system.name.lower(): system for system in published_systems()}
    if name.lower() not in names:
        raise UsageError(
            f"no system {name!r}{nearest(name, [s.name for s in published_systems()])}",
            fix="`headway taxonomy` lists them.",
        )
    return names[name.lower()]


def _surveyed() -> tuple[PublishedSystem, ...]:
    system = _row(surveyed=True)
    return (
        system(
            "BigDL", "Dai et al. 2019", "over Spark's block manager",
            _workers(topology="colocated", transfer="scatter_reduce"),
        ),
        system(
            "CaffeOnSpark", "Yahoo 2016", "RDMA through MPI",
            _workers(topology="colocated", transfer="scatter_reduce"),
        ),
        system(
            "COTS HPC", "Coates et al. 2013", "layers are split along the dimensions of tensors",
            data_parallel(_BATCH, processes=4, split=LayerSplit(tensor=(2, 2))),
        ),
        system(
            "D-PSGD", "Lian et al. 2017", "workers meet their neighbours only",
            _workers(merge="neighbour"),
        ),
        system(
            "DistBelief", "Dean et al. 2012", "Downpour SGD; the pushes are summed",
            _halves(kind="asynchronous", topology="sharded", servers=2, reduce="sum"),
        ),
        system(
            "EASGD", "Zhang et al. 2015", "alpha = 0.9 / workers, as published",
            _workers(
                kind="asynchronous", merge="elastic", local_steps=10, alpha=0.225, beta=0.225
            ),
        ),
        system(
            "FireCaffe", "Iandola et al. 2016", "",
            _workers(topology="single", transfer="binomial_tree"),
        ),
        system(
            "GoSGD", "Blot et al. 2016", "models are weighted (push-sum)",
            _workers(kind="soft_bounded", merge="push_sum", transfer="ad_hoc"),
        ),
        system(
            "MPCA-SGD", "Langer et al. 2018", "a penalty in the loss; staleness is extrapolated",
            _workers(kind="soft_bounded", merge="penalty", transfer="binomial_tree"),
        ),
        system(
            "MXNet", "Chen et al. 2015", "proxy servers; scatter-reduce or ad hoc",
            _stages(kind="bounded", delay_bound=4, topology="colocated"),
        ),
        system(
            "Parameter Server", "Li et al. 2014",
            "redundant shards, vector clocks for ranges of keys, user-defined filters",
            _halves(kind="bounded", delay_bound=4, topology="sharded", servers=2),
        ),
        system(
            "Petuum", "Xing et al. 2015", "stale synchronous parallel",
            _halves(
                kind="bounded", delay_bound=4, topology="sharded", servers=2, remedy="eager_push"
            ),
        ),
        system(
            "Project Adam", "Chilimbi et al. 2014",
            "servers agree by Paxos and compute some gradients; epochs end at 75 % of their data",
            _halves(kind="asynchronous", topology="sharded", servers=2),
        ),
        system("PyTorch", "Paszke et al. 2019", "DistributedDataParallel", _stages()),
        system(
            "SparkNet", "Moritz et al. 2016", "",
            _workers(merge="mean", local_steps=50, topology="master", transfer="reduce"),
        ),
        system(
            "TensorFlow", "Abadi et al. 2016",
            "scatter-reduce, all-reduce or ad hoc; synchronous with backup workers, too",
            _stages(kind="bounded", delay_bound=4, topology="colocated"),
        ),
        system(
            "TreeEASGD", "Zhang et al. 2015", "periods up and down for every level",
            _workers(7, kind="bounded", merge="elastic", topology="tree"),
        ),
    )  # fmt: skip


def _others() -> tuple[PublishedSystem, ...]:
    system = _row(surveyed=False)
    tables = LayerSplit(tensor=(2,))
    return (
        system(
            "Zou", "Zou et al. 2017", "asynchronous, too; the number of servers by a lemma",
            _workers(topology="sharded", servers=2),
        ),
        system(
            "Chimera", "Li and Hoefler 2021", "two pipelines in opposite directions",
            pipelined(
                _BATCH, processes=8, stages=4, pipeline=PipelinePlan(schedule="chimera")
            ),
        ),
        system("MLSL", "Sridharan et al. 2018", "urgent gradients first", _halves()),
        system("Das", "Das et al. 2016", "hybrid groups by a rule per layer", _halves()),
        system(
            "DES", "Rong et al. 2020", "tables are split; partial results are all-reduced",
            data_parallel(_BATCH, processes=8, split=tables),
        ),
        system(
            "Zion", "Naumov et al. 2020", "tables are split; looked-up vectors go all-to-all",
            data_parallel(_BATCH, processes=8, split=tables),
            "all-to-all belongs to the split of the tables, inside the forward pass; what the plan "
            "exchanges is the gradients of the dense layers",
        ),
        system(
            "FFN on Theta", "Dong et al. 2019", "Horovod on 2048 nodes", _workers(),
        ),
        system(
            "FFN", "Januszewski et al. 2018", "as first published",
            _workers(kind="asynchronous", topology="sharded", servers=2),
        ),
        system(
            "CommLib", "Shi et al. 2021", "dense inside a node, sparse between nodes",
            data_parallel(
                _BATCH,
                processes=4,
                exchange=ExchangePlan(collective="hierarchical", compress="mstopk:0.01"),
            ),
        ),
        system(
            "RPC-RDMA", "Xue et al. 2019", "one-sided writes into registered memory",
            _workers(topology="sharded", servers=2),
        ),
        system(
            "SVM", "Narasimhan et al. 2014",
            "extrema are all-reduced, two samples broadcast", _workers(),
        ),
        system(
            "Blink", "Wang et al. 2020", "spanning trees, packed for the links at hand",
            data_parallel(_BATCH, processes=4, exchange=_two_trees()),
        ),
        system(
            "Oyama", "Oyama et al. 2020", "samples are cut in space",
            data_parallel(_BATCH, processes=4, split=LayerSplit(spatial=(2, 1, 1))),
        ),
        system(
            "Bian", "Bian et al. 2021", "products on a cube of ranks",
            data_parallel(_BATCH, processes=8, split=LayerSplit(tensor=(2, 2, 2))),
        ),
        system(
            "Whale", "Jia et al. 2022", "everything of axis A, on unequal devices",
            pipelined(_BATCH, processes=8, stages=2, split=LayerSplit(tensor=(2,))),
        ),
        system(
            "Adasum", "Maleki et al. 2021", "gradients are combined by their angles",
            data_parallel(_BATCH, processes=4, exchange=ExchangePlan(reduce="adasum")),
        ),
        system(
            "Persia", "Lian et al. 2021", "the plan is that of the tables",
            _workers(kind="bounded", delay_bound=4, topology="sharded", servers=2),
            "a plan has one way to agree; the dense layers of Persia agree at every step",
        ),
    )  # fmt: skip


def _row(surveyed: bool) -> Callable[..., PublishedSystem]:
    def system(
        name: str, source: str, remark: str, plan: Plan, differs: str = ""
    ) -> PublishedSystem:
        return PublishedSystem(
            name=name, source=source, remark=remark, plan=plan, surveyed=surveyed, differs=differs
        )

    return system


def _two_trees() -> ExchangePlan:
    """Two chains of four ranks, in opposite directions."""
    trees = (
        PlanTree.of((None, 0, 1, 2), 1.0),
        PlanTree.of((1, 2, 3, None), 1.0),
    )
    return ExchangePlan(collective="trees", carrier=AllReduceOptions(trees=trees))


@dataclass(frozen=True, kw_only=True)
class Unsupported:
    """What of the literature no plan can say, with the nearest that exists."""

    name: str
    why: str
    nearest: str


OUTSIDE = (
    Unsupported(
        name="Hogwild across hosts",
        why="its writes without locks need one memory (Niu et al. 2011); there is no field for it",
        nearest='kind = "asynchronous", whose servers make one update at a time',
    ),
    Unsupported(
        name="an epoch that ends at a share of its data",
        why="epochs of Project Adam end at 75 %; there is no field for it",
        nearest="backup_workers, which ends a step without the slowest",
    ),
)
"""What has no field, so that no plan can be refused for it."""
