"""The recipes and plans that reach the planted bugs: tiny models, mostly on two processes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

import headway
from headway import Recipe
from headway.optim import LAMB, LARS, WarmUp
from headway.optim.warmup import warmup_then_cosine
from headway.plans import ExchangePart, ExchangePlan, LayerSplit, PipelinePlan, Synchrony
from support.recipes import adamw, deep, late, mlp, normalised, sparse, tied, unused
from support.split_recipes import (
    Dropping,
    Lines,
    Segmenter,
    Volumes,
    estimating,
    estimator,
    labelling,
    speaking,
)
from support.tiny_models import (
    CLASSES,
    FEATURES,
    HalfFrozen,
    Mlp,
    Points,
    Sentences,
    Tied,
    WithDropout,
    cross_entropy,
    ignoring_a_word,
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A recipe, for so many processes.

    Attributes:
        whole: Saving, resuming and validation are verified as well.
    """

    name: str
    module: str
    processes: int
    steps: int = 4
    whole: bool = False
    microbatches: bool = False

    @property
    def cost(self) -> float:
        """About how many seconds of one core a verification takes."""
        return (0.6 + 0.4 * self.processes) * (3 if self.whole else 1)

    def verify(self) -> Any:
        """The verdict of `headway.verify`."""
        options: dict[str, Any] = {"processes": self.processes, "steps": self.steps}
        if self.microbatches:
            options["microbatches"] = True
        if self.whole:
            options["whole"] = True
        return headway.verify(f"{self.module}:{self.name}", **options)


CASES: dict[str, Case] = {}


MakeRecipe = Callable[[], Recipe]


def case(processes: int = 2, **options: Any) -> Callable[[MakeRecipe], MakeRecipe]:
    """Decorator: the recipe is verified on so many processes."""

    def enter(function: MakeRecipe) -> MakeRecipe:
        name = function.__name__
        home = function.__module__
        CASES[name] = Case(name=name, module=home, processes=processes, **options)
        return function

    return enter


def tiny(
    name: str, model: Callable[[], nn.Module] = Mlp, data: Any = Points, **more: Any
) -> Recipe:
    """40 samples in batches of 12 and micro-batches of 4, so that an epoch ends with 4 samples."""
    facts: dict[str, Any] = {
        "loss": cross_entropy, "optimizer": adamw, "batch": 12, "microbatch": 4, "stop": 8,
        "seed": 5,
    }  # fmt: skip
    return Recipe(name=name, model=model, data=data, **(facts | more))


def cosine(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)


# ---- data parallelism, exact ------------------------------------------------------------------


@case()
def plain() -> Recipe:
    """Micro-batches, a scheduler and a clip."""
    return replace(mlp(), exchange=ExchangePlan(bucket="150"))


@case(3)
def three() -> Recipe:
    return mlp()


@case()
def uneven_shares() -> Recipe:
    return replace(mlp(), shares=(2.0, 1.0))


@case()
def dropping() -> Recipe:
    return tiny("dropping", WithDropout)


@case()
def some_unused() -> Recipe:
    return unused()


class UsedBySome(nn.Module):
    """Every third sample or so uses `extra`."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.extra = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wanted = x[:, 0] > 0.5
        y: torch.Tensor = self.main(x)
        return y + self.extra(x) * wanted[:, None] if wanted.any() else y


@case(steps=8)
def used_by_some() -> Recipe:
    """Often by a sample of one rank and by none of the other."""
    return tiny("used-by-some", UsedBySome, batch=4, microbatch=1)


@case()
def words() -> Recipe:
    """Tied parameters, and a loss that counts words."""
    exchange = ExchangePlan(bucket="300")
    return tiny("words", Tied, Sentences, loss=ignoring_a_word, clip=0.5, exchange=exchange)


@case()
def sparse_rows() -> Recipe:
    return sparse()


@case()
def priority() -> Recipe:
    return replace(tied(), exchange=ExchangePlan(priority=True, bucket="150", chunk="100"))


def _two_rates(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [{"params": model.first.parameters()}, {"params": model.second.parameters(), "lr": 0.05}],
        lr=0.01,
    )


@case()
def priority_groups() -> Recipe:
    return tiny("two-rates", exchange=ExchangePlan(priority=True), optimizer=_two_rates)


@case()
def priority_unused() -> Recipe:
    return replace(unused(), exchange=ExchangePlan(priority=True))


@case()
def priority_words() -> Recipe:
    return replace(words(), clip=None, exchange=ExchangePlan(priority=True))


@case()
def updates() -> Recipe:
    return tiny("updates", exchange=ExchangePlan(reduce="adasum", values="updates"))


# ---- workers that meet in rounds ---------------------------------------------------------------


def meeting(name: str, **words: Any) -> Recipe:
    return tiny(name, synchrony=Synchrony(**{"merge": "mean", "local_steps": 2, **words}))


@case(3, steps=5)
def local_sgd() -> Recipe:
    return meeting("local-sgd")


@case(3, steps=5)
def local_sgd_reset() -> Recipe:
    return meeting("local-sgd-reset", state="reset")


@case(3, steps=5)
def post_local_sgd() -> Recipe:
    return meeting("post-local-sgd", warm_up=2)


@case(3, steps=5)
def slow_momentum() -> Recipe:
    return meeting("slow-momentum", outer="momentum", outer_momentum=0.6, outer_rate=0.9)


@case(3, steps=5)
def diloco() -> Recipe:
    return meeting("diloco", outer="nesterov", outer_momentum=0.9, outer_rate=0.7)


@case(4, steps=5)
def local_copies() -> Recipe:
    return meeting("local-copies", copies=2)


@case(4, steps=5)
def worker_shards() -> Recipe:
    return replace(meeting("worker-shards", copies=2), zero=3)


@case(4, steps=5)
def worker_stages() -> Recipe:
    return replace(meeting("worker-stages"), stages=2, clip=0.1)


@case(3, steps=5)
def sparse_diloco() -> Recipe:
    recipe = meeting(
        "sparse-diloco", warm_up=1, state="keep", compress="topk:0.2", outer="nesterov",
        outer_momentum=0.9, outer_rate=0.7,
    )  # fmt: skip
    return replace(recipe, model=TwoWide)


@case(4, steps=5)
def rounded_copies() -> Recipe:
    return meeting("rounded-copies", state="keep", compress="int8", copies=2)


@case(3, steps=5)
def elastic_rounds() -> Recipe:
    return meeting("elastic-rounds", merge="elastic", alpha=0.3, beta=0.2)


@case(4, steps=5)
def neighbours() -> Recipe:
    return meeting("neighbours", merge="neighbour")


# ---- workers that do not meet in rounds --------------------------------------------------------


def _falling(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)


def _momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def free(recipe: Recipe, **words: Any) -> Recipe:
    rules = Synchrony(**{"kind": "asynchronous", **words})
    return replace(recipe, synchrony=rules, scheduler=_falling)


@case(3)
def free_servers() -> Recipe:
    plain = replace(mlp(), optimizer=_momentum)
    return free(plain, topology="sharded", servers=2)


@case(3)
def free_backup() -> Recipe:
    rules = Synchrony(topology="sharded", servers=2, backup_workers=1)
    return replace(mlp(), synchrony=rules, scheduler=_falling)


@case(3)
def free_unused() -> Recipe:
    return free(unused())


@case(3)
def free_downpour() -> Recipe:
    return free(mlp(), fetch_every=3, push_every=2)


@case(3)
def free_bound() -> Recipe:
    return free(mlp(), kind="bounded", delay_bound=1)


@case(3)
def free_ahead() -> Recipe:
    return free(mlp(), kind="bounded", delay_bound=2, read="ahead")


@case(3)
def free_reject() -> Recipe:
    return free(mlp(), kind="bounded", delay_bound=1, on_violation="reject")


@case(3)
def free_eager() -> Recipe:
    return free(mlp(), kind="bounded", delay_bound=1, remedy="eager_push")


@case(3)
def free_snapshot() -> Recipe:
    return free(mlp(), kind="bounded", delay_bound=1, read="snapshot")


@case(3)
def free_value() -> Recipe:
    return free(mlp(), kind="bounded", value_bound=0.015)


@case(3)
def free_rate() -> Recipe:
    return free(mlp(), remedy="staleness_rate")


@case(3)
def free_compensation() -> Recipe:
    return free(mlp(), remedy="delay_compensation", compensation=0.5)


@case(3)
def free_elastic() -> Recipe:
    return free(mlp(), merge="elastic", local_steps=2, alpha=0.3, beta=0.2)


@case(3)
def free_tree() -> Recipe:
    return free(mlp(), merge="elastic", topology="tree", period_up=2, period_down=3)


@case(3)
def free_pairs() -> Recipe:
    return free(mlp(), merge="pairwise")


@case(3)
def free_gossip() -> Recipe:
    return free(mlp(), merge="push_sum", probability=0.5)


@case(4)
def group_copies() -> Recipe:
    return free(mlp(), topology="single", copies=2)


@case(4)
def group_backup() -> Recipe:
    rules = Synchrony(topology="single", backup_workers=1, copies=2)
    return replace(mlp(), synchrony=rules, scheduler=_falling)


@case(4)
def group_shards() -> Recipe:
    return replace(free(mlp(), merge="elastic", local_steps=2, copies=2), zero=3)


@case(4)
def group_stages() -> Recipe:
    return replace(free(mlp(), topology="colocated"), stages=2)


@case(4)
def group_gossip() -> Recipe:
    return replace(free(mlp(), merge="push_sum", probability=0.5, copies=2), zero=2)


# ---- collective programs -----------------------------------------------------------------------


@case(4)
def ring() -> Recipe:
    return replace(mlp(), exchange=ExchangePlan(collective="ring"))


@case(4)
def halving_doubling() -> Recipe:
    return replace(mlp(), exchange=ExchangePlan(collective="halving-doubling"))


@case(4)
def servers() -> Recipe:
    return replace(mlp(), exchange=ExchangePlan(collective="servers"))


@case(4)
def direct() -> Recipe:
    return replace(mlp(), exchange=ExchangePlan(collective="direct"))


@case(4)
def hierarchical() -> Recipe:
    return replace(mlp(), exchange=ExchangePlan(collective="hierarchical"))


@case()
def auto_buckets() -> Recipe:
    return replace(mlp(), exchange=ExchangePlan(bucket="auto"))


# ---- data parallelism, inexact ----------------------------------------------------------------


class Wider(nn.Sequential):
    """Large enough that compressors have something to compress."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 4)
        )


class TwoWide(nn.Sequential):
    """Two layers that share a budget."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh(),
            nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4),
        )  # fmt: skip


def compressed(text: str, **more: Any) -> Recipe:
    exchange = ExchangePlan(compress=text, bucket="20 KiB", **more)
    return tiny(f"compressed-{text.partition(':')[0]}", Wider, exchange=exchange, clip=0.5)


@case()
def fp16() -> Recipe:
    return compressed("fp16")


@case()
def bf16() -> Recipe:
    return compressed("bf16")


@case()
def int8() -> Recipe:
    return compressed("int8")


@case()
def sign() -> Recipe:
    return compressed("sign")


@case()
def int8_large() -> Recipe:
    """A bucket of more values than are decoded at a time."""
    exchange = ExchangePlan(compress="int8")
    return tiny("int8-large", lambda: Mlp(20_000), exchange=exchange)


@case()
def int8_scheduled() -> Recipe:
    return replace(int8(), scheduler=cosine)


@case()
def sign_of_layers() -> Recipe:
    return replace(sign(), model=TwoWide, exchange=ExchangePlan(compress="sign"))


@case(4)
def sign_of_four() -> Recipe:
    return compressed("sign")


@case()
def topk_auto() -> Recipe:
    return replace(topk(), exchange=ExchangePlan(compress="topk:0.1", bucket="auto"))


@case()
def topk() -> Recipe:
    return compressed("topk:0.1")


@case()
def mstopk() -> Recipe:
    return compressed("mstopk:0.1")


def _alike() -> Points:
    """All features are the same, so that many gradients are equally large."""
    points = Points()
    points.x = points.x[:, :1].expand(-1, FEATURES).contiguous()
    return points


class _Alike(Mlp):
    """All hidden units are the same: which of the equal gradients are sent, the draw decides."""

    def __init__(self) -> None:
        super().__init__(400)
        with torch.no_grad():
            self.first.weight.fill_(0.01)
            self.first.bias.fill_(0.01)
            self.second.weight.copy_(self.second.weight[:, :1].expand_as(self.second.weight))


@case()
def mstopk_of_equals() -> Recipe:
    return replace(mstopk(), model=_Alike, data=_alike)


@case()
def adaptive() -> Recipe:
    # One bucket: a budget is shared within it.
    return replace(
        compressed("adaptive:0.1"), model=TwoWide, exchange=ExchangePlan(compress="adaptive:0.1")
    )


@case()
def randomk() -> Recipe:
    return compressed("randomk:0.2")


@case()
def randomk_dropping() -> Recipe:
    return replace(randomk(), model=lambda: WithDropout(64))


@case()
def powersgd() -> Recipe:
    return compressed("powersgd:2")


@case()
def fp16_priority() -> Recipe:
    return replace(compressed("fp16", priority=True, chunk="500"), clip=None)


@case(4)
def hitopk() -> Recipe:
    return compressed("topk:0.1", collective="hierarchical")


@case()
def adasum() -> Recipe:
    return tiny("adasum", exchange=ExchangePlan(reduce="adasum"))


@case(3)
def adasum_of_three() -> Recipe:
    return adasum()


@case(4)
def adasum_of_four() -> Recipe:
    return adasum()


@case()
def summed() -> Recipe:
    return tiny("summed", exchange=ExchangePlan(reduce="sum"))


@case()
def parts_apart() -> Recipe:
    part = ExchangePart(parameters="second.*", compress="fp16")
    return tiny("parts", exchange=ExchangePlan(parts=(part,)))


# ---- sharded state ----------------------------------------------------------------------------


@case()
def zero1() -> Recipe:
    return replace(mlp(), zero=1)


@case()
def zero2() -> Recipe:
    return replace(mlp(), zero=2)


@case()
def zero3() -> Recipe:
    return replace(mlp(), zero=3)


@case(4)
def hybrid() -> Recipe:
    return replace(mlp(), zero=3, shards=2)


class Scaled(nn.Module):
    """A parameter of no dimension, and blocks in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.enter = nn.Linear(FEATURES, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.leave = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x) * self.scale
        for block in self.blocks:
            x = x + block(x)
        return self.leave(x)


@case()
def zero3_scaled() -> Recipe:
    return tiny("scaled", Scaled, zero=3)


@case(4)
def hybrid_scaled() -> Recipe:
    return tiny("scaled", Scaled, zero=2, shards=2)


@case(3)
def zero3_ragged() -> Recipe:
    """The last batch of an epoch has 2, 1 and 1 samples."""
    return replace(mlp(), zero=3, microbatch=1)


@case()
def zero3_words() -> Recipe:
    return replace(words(), zero=3, exchange=None)


# ---- pipelines --------------------------------------------------------------------------------


def piped(schedule: str, count: int = 4, **options: Any) -> Recipe:
    plan = PipelinePlan(schedule=schedule, microbatches=count, **options)
    return replace(deep(), stages=2, pipeline=plan)


@case()
def one_f_one_b() -> Recipe:
    return piped("1f1b")


@case()
def gpipe() -> Recipe:
    return piped("gpipe")


@case()
def interleaved() -> Recipe:
    return piped("interleaved")


@case()
def skipping() -> Recipe:
    """What leaves the first stage goes to the second and to the last."""
    return piped("interleaved", cut=("blocks.0", "blocks.2", "blocks.4"))


@case(4)
def piped_unused() -> Recipe:
    plan = PipelinePlan(microbatches=2)
    return replace(unused(), stages=2, pipeline=plan, microbatch=None)


@case()
def chimera() -> Recipe:
    return piped("chimera", 2)


@case()
def chimera_eager() -> Recipe:
    return piped("chimera", 4, sync="eager")


@case()
def zero_bubble() -> Recipe:
    return piped("zb-h1")


@case()
def recomputed() -> Recipe:
    return piped("1f1b", recompute="stages")


@case()
def recomputed_blocks() -> Recipe:
    return piped("1f1b", recompute="blocks")


@case()
def messages() -> Recipe:
    """Between the stages go messages of the group, not shared memory."""
    return piped("1f1b", shared_memory=False)


@case(4)
def piped_copies() -> Recipe:
    return piped("1f1b", 4)


@case(4)
def piped_zero() -> Recipe:
    return replace(piped("1f1b", 2), zero=3)


@case()
def zero_bubble_tied() -> Recipe:
    """A stage that uses a layer twice."""
    return piped("zb-h1", cut=("blocks.5",))


@case()
def flushless() -> Recipe:
    return replace(late(), stages=2, pipeline=PipelinePlan(schedule="pipedream", microbatches=4))


@case()
def flushless_2bw() -> Recipe:
    plan = PipelinePlan(schedule="pipedream-2bw", microbatches=4)
    return replace(late(), stages=2, pipeline=plan)


@case()
def piped_words() -> Recipe:
    plan = PipelinePlan(schedule="1f1b", microbatches=2)
    return replace(words(), stages=2, pipeline=plan, microbatch=None)


@case(microbatches=True)
def piped_statistics() -> Recipe:
    return replace(normalised(), stages=2)


# ---- split layers -----------------------------------------------------------------------------


def layers(**split: Any) -> Recipe:
    return tiny(
        "layers", Dropping, Lines, loss=speaking, batch=8, optimizer=_calm,
        split=LayerSplit(**split),
    )  # fmt: skip


def _calm(model: nn.Module) -> torch.optim.Optimizer:
    # The gradient of the keys' bias is 0 but for rounding, and AdamW divides that by eps.
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, eps=1e-5)


@case()
def tensor_1d() -> Recipe:
    return layers(tensor=(2,))


@case()
def tensor_clipped() -> Recipe:
    return replace(layers(tensor=(2,)), clip=0.5)


@case(4)
def tensor_wide() -> Recipe:
    """A cuboid whose weights are gathered."""
    return layers(tensor=(2, 2, 1))


@case(4)
def tensor_1d_copies() -> Recipe:
    return layers(tensor=(2,))


@case()
def tensor_parts() -> Recipe:
    """One dimension, activations in parts."""
    return layers(tensor=(1, 2, 1))


@case(4)
def tensor_2d() -> Recipe:
    return layers(tensor=(2, 2))


@case(4)
def tensor_3d() -> Recipe:
    return layers(tensor=(1, 2, 2))


@case(8)
def tensor_deep() -> Recipe:
    """Two squares, one behind the other."""
    return layers(tensor=(2, 2, 2), form="summa")


@case(8)
def tensor_cube() -> Recipe:
    return layers(tensor=(2, 2, 2))


def volumes(**split: Any) -> Recipe:
    return tiny(
        "volumes", Segmenter, Volumes, loss=labelling, batch=4, microbatch=2,
        optimizer=_calm, split=LayerSplit(**split),
    )  # fmt: skip


@case()
def spatial() -> Recipe:
    return volumes(spatial=(2, 1, 1))


@case(4)
def spatial_2d() -> Recipe:
    return volumes(spatial=(2, 2, 1))


class Normed(nn.Module):
    """Batch normalisation, and a mean over space."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm = nn.Conv3d(2, 4, 3, padding=1), nn.BatchNorm3d(4)
        self.leave = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.leave(self.norm(self.enter(x)).relu().mean((2, 3, 4)))
        return y


@case(microbatches=True)
def spatial_statistics() -> Recipe:
    return replace(volumes(spatial=(2, 1, 1)), model=Normed, loss=estimating)


@case(microbatches=True)
def spatial_mean() -> Recipe:
    return spatial_statistics()


@case()
def spatial_head() -> Recipe:
    return replace(estimator(), split=LayerSplit(spatial=(2, 1, 1)))


# ---- optimisers, and the rest of a training ---------------------------------------------------


def _lars(model: nn.Module) -> torch.optim.Optimizer:
    return LARS(model.parameters(), lr=0.5, momentum=0.9, weight_decay=0.01)


def _lamb(model: nn.Module) -> torch.optim.Optimizer:
    return LAMB(model.parameters(), lr=0.01, weight_decay=0.1)


@case()
def lars() -> Recipe:
    return tiny("lars", TwoWide, optimizer=_lars, scheduler=cosine)


@case(steps=2)
def lars_large() -> Recipe:
    """A layer whose norm is computed in rows."""
    return tiny("lars-large", lambda: Mlp(20_000), optimizer=_lars)


@case()
def lamb() -> Recipe:
    return tiny("lamb", TwoWide, optimizer=_lamb, scheduler=cosine)


@case()
def lars_zero() -> Recipe:
    return replace(lars(), zero=2)


@case()
def lamb_zero() -> Recipe:
    return replace(lamb(), zero=3)


@case(whole=True)
def trained() -> Recipe:
    """Checkpoints, resumption and validation."""
    return mlp()


@case(whole=True)
def trained_sharded() -> Recipe:
    return replace(mlp(), zero=3)


@case(whole=True)
def trained_compressed() -> Recipe:
    return replace(compressed("topk:0.1"), checkpoint_every=3)


@case(4, whole=True, steps=2)
def trained_sign() -> Recipe:
    """Four ranks that serve parts are resumed by two, which do not."""
    return sign()


@case(whole=True, steps=2)
def trained_powersgd() -> Recipe:
    return powersgd()


@case(whole=True, steps=2)
def trained_randomk() -> Recipe:
    return randomk()


@case(4, whole=True, steps=2)
def trained_hitopk() -> Recipe:
    return hitopk()


@case(whole=True, steps=2)
def trained_adaptive() -> Recipe:
    return adaptive()


@case(whole=True, steps=2)
def trained_int8() -> Recipe:
    return int8()


@case(whole=True, steps=2)
def trained_adasum() -> Recipe:
    return adasum()


@case(whole=True)
def trained_dropping() -> Recipe:
    return replace(mlp(), model=WithDropout)


@case(whole=True)
def trained_words() -> Recipe:
    return replace(words(), validation=Sentences, validate_every=4, checkpoint_every=3)


@case(whole=True)
def trained_lamb() -> Recipe:
    return replace(mlp(), optimizer=_lamb)


@case(whole=True, steps=2)
def trained_large() -> Recipe:
    """Tensors of which each rank saves some rows."""
    return replace(mlp(), model=lambda: Mlp(30_000))


@case(whole=True)
def trained_priority() -> Recipe:
    return replace(mlp(), clip=None, exchange=ExchangePlan(priority=True))


@case(whole=True)
def trained_spatial() -> Recipe:
    return replace(
        volumes(spatial=(2, 1, 1)), validation=Volumes, validate_every=2, checkpoint_every=3
    )


class Augmented:
    """Points with noise of their own in each epoch."""

    def __init__(self) -> None:
        self._points = Points()

    def __len__(self) -> int:
        return len(self._points)

    def read(self, indices: Any) -> Any:
        return self._points.x[indices], self._points.y[indices]

    def read_seeded(self, indices: Any, seeds: Any) -> Any:
        noise = torch.stack([_noise(seed) for seed in seeds])
        return self._points.x[indices] + noise, self._points.y[indices]


def _noise(seed: int) -> torch.Tensor:
    return torch.randn(FEATURES, generator=torch.Generator().manual_seed(seed >> 1))


@case()
def augmented() -> Recipe:
    return tiny("augmented", data=Augmented)


@case()
def scaled_rate() -> Recipe:
    return replace(mlp(), scale_rate="linear from 4 samples")


@case()
def scaled_rate_root() -> Recipe:
    return replace(mlp(), scale_rate="square_root from 4 samples")


def _warming(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return WarmUp(optimizer, 8, then=cosine)


@case()
def warming() -> Recipe:
    return replace(mlp(), scheduler=_warming)


# What is wanted of here is defined by now.
for _room in ("data", "split", "table"):
    importlib.import_module(f"mutations.{_room}_cases")


# ---- less usual plans, recipes and parameters -------------------------------------------------


class Switched(nn.Module):
    """A third of the samples use `extra`, `gain` (no dimension) and one element of `lone`."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.extra = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)
        self.gain, self.lone = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wanted = x[:, 0] > 0.5
        y: torch.Tensor = self.main(x)
        if not wanted.any():
            return y
        return y + self.gain * self.lone * self.extra(x) * wanted[:, None]


def switched(**options: Any) -> Recipe:
    return tiny("switched", Switched, batch=4, microbatch=1, exchange=ExchangePlan(**options))


@case(steps=8)
def switched_parameters() -> Recipe:
    """A bucket for each parameter, some of one element."""
    return switched(bucket="8")


@case(4, steps=8)
def groups_switched() -> Recipe:
    """Some parameters are combined within pairs of ranks."""
    part = ExchangePart(parameters="extra.*", ranks=((0, 1), (2, 3)))
    return replace(switched(parts=(part,)), batch=8, microbatch=1)


@case(4)
def node_groups() -> Recipe:
    part = ExchangePart(parameters="second.*", ranks=((0, 1), (2, 3)))
    return tiny("node-groups", exchange=ExchangePlan(parts=(part,)))


@case(steps=8)
def updates_switched() -> Recipe:
    return switched(reduce="adasum", values="updates")


@case(steps=8)
def priority_switched() -> Recipe:
    return switched(priority=True, chunk="64")


def _tensor_rate(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01))


@case()
def priority_tensor_rate() -> Recipe:
    """A rate that is a tensor, which the scheduler changes in place."""
    return tiny(
        "tensor-rate", exchange=ExchangePlan(priority=True), optimizer=_tensor_rate,
        scheduler=cosine,
    )  # fmt: skip


@case()
def randomk_auto() -> Recipe:
    return replace(randomk(), exchange=ExchangePlan(compress="randomk:0.2", bucket="auto"))


@case()
def powersgd_auto() -> Recipe:
    return replace(powersgd(), exchange=ExchangePlan(compress="powersgd:2", bucket="auto"))


@case(4)
def sign_auto() -> Recipe:
    return replace(sign(), exchange=ExchangePlan(compress="sign", bucket="auto"))


@case()
def adaptive_auto() -> Recipe:
    return replace(adaptive(), exchange=ExchangePlan(compress="adaptive:0.1", bucket="auto"))


@case(3)
def fp16_of_three() -> Recipe:
    return fp16()


@case(3)
def int8_of_three() -> Recipe:
    return int8()


@case(3)
def sign_of_three() -> Recipe:
    return sign()


@case(3)
def powersgd_of_three() -> Recipe:
    return powersgd()


def _loud(model: nn.Module, batch: Any) -> torch.Tensor:
    return 2e5 * cross_entropy(model, batch)


@case()
def fp16_loud() -> Recipe:
    """Gradients near the largest number of 16 bits."""
    return replace(fp16(), loss=_loud)


@case()
def topk_large() -> Recipe:
    """A layer of more values than are searched at a time."""
    return tiny("topk-large", lambda: Mlp(8_000), exchange=ExchangePlan(compress="topk:0.01"))


@case()
def mstopk_large() -> Recipe:
    return tiny("mstopk-large", lambda: Mlp(8_000), exchange=ExchangePlan(compress="mstopk:0.01"))


@case(6)
def hierarchical_of_six() -> Recipe:
    """Two nodes of three ranks."""
    return replace(mlp(), microbatch=None, exchange=ExchangePlan(collective="hierarchical"))


@case(6)
def hitopk_of_six() -> Recipe:
    return hitopk()


@case(4)
def hitopk_auto() -> Recipe:
    return replace(
        hitopk(),
        exchange=ExchangePlan(compress="topk:0.1", collective="hierarchical", bucket="auto"),
    )


@case(4)
def mstopk_hierarchical() -> Recipe:
    return compressed("mstopk:0.1", collective="hierarchical")


@case(4)
def fp16_hierarchical() -> Recipe:
    return compressed("fp16", collective="hierarchical")


@case(4)
def adasum_hierarchical() -> Recipe:
    return tiny("adasum", exchange=ExchangePlan(reduce="adasum", collective="hierarchical"))


@case()
def adasum_large() -> Recipe:
    """A layer whose halves travel in several parts."""
    return tiny("adasum-large", lambda: Mlp(30_000), exchange=ExchangePlan(reduce="adasum"))


@case()
def adasum_uneven() -> Recipe:
    return replace(adasum(), shares=(3.0, 1.0))


def _half_model() -> nn.Module:
    return Mlp().bfloat16()


@case()
def adasum_of_halves() -> Recipe:
    """Parameters of 16 bits."""
    return replace(adasum(), model=_half_model, data=lambda: Points(dtype=torch.bfloat16))


@case()
def autocasting() -> Recipe:
    return replace(mlp(), precision="bfloat16")


@case()
def single_precision() -> Recipe:
    return replace(mlp(), precision="float32")


@case(whole=True)
def trained_epochs() -> Recipe:
    return replace(mlp(), stop="2 epochs")


@case()
def batch_in_tokens() -> Recipe:
    return replace(words(), batch="60 tokens", tokens_per_sample=5)


@case(whole=True)
def trained_topk() -> Recipe:
    return replace(compressed("topk:0.1"), checkpoint_every=2)


def _lars_as_printed(model: nn.Module) -> torch.optim.Optimizer:
    return LARS(model.parameters(), lr=0.5, momentum_correction=False, weight_decay=0.01)


@case()
def lars_as_printed() -> Recipe:
    return tiny("lars", TwoWide, optimizer=_lars_as_printed, scheduler=cosine)


def _lamb_clamped(model: nn.Module) -> torch.optim.Optimizer:
    return LAMB(model.parameters(), lr=0.01, clamp=(0.1, 0.5), exclude_1d=False)


@case()
def lamb_clamped() -> Recipe:
    return tiny("lamb", TwoWide, optimizer=_lamb_clamped, scheduler=cosine)


def _lars_groups(model: nn.Module) -> torch.optim.Optimizer:
    first, second = model.first.parameters(), model.second.parameters()
    groups = [{"params": first}, {"params": second, "lr": 0.05, "trust": 0.01}]
    return LARS(groups, lr=0.5, momentum=0.9, weight_decay=0.01)


@case()
def lars_groups() -> Recipe:
    return tiny("lars-groups", optimizer=_lars_groups)


def _warming_cosine(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return warmup_then_cosine(optimizer, steps=20, end=0.1)


@case()
def warming_cosine() -> Recipe:
    return replace(mlp(), scheduler=_warming_cosine)


class BatchStatistics(nn.Module):
    """Draws, and counts what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = WithDropout(), nn.BatchNorm1d(FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(self.norm(x))
        return y


@case(1, microbatches=True)
def batch_statistics() -> Recipe:
    return tiny("batch-statistics", BatchStatistics)


def _warming_late(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return WarmUp(optimizer, 2, then=cosine, delay=True)


@case()
def warming_late() -> Recipe:
    return replace(mlp(), scheduler=_warming_late)


class Absorbing(torch.optim.Optimizer):
    """A velocity that contains the rate."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    velocity = state.setdefault("velocity", torch.zeros_like(parameter))
                    velocity.mul_(0.9).add_(parameter.grad, alpha=group["lr"])
                    parameter.sub_(velocity)


def _warming_velocity(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return WarmUp(optimizer, 4, velocity="velocity")


@case()
def warming_velocity() -> Recipe:
    return replace(
        mlp(), optimizer=lambda model: Absorbing(model.parameters(), 0.1),
        scheduler=_warming_velocity,
    )  # fmt: skip


def _decaying(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)


def _cycle(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=40)


@case()
def priority_cycle() -> Recipe:
    """Both groups in one bucket; the scheduler moves rate and momentum."""
    return tiny(
        "cycle", exchange=ExchangePlan(priority=True, chunk="1 KiB"), optimizer=_decaying,
        scheduler=_cycle,
    )  # fmt: skip


@case()
def zero_scaled_clipped() -> Recipe:
    return tiny("scaled", Scaled, zero=2, clip=0.2)


@case(4)
def hybrid_words() -> Recipe:
    return replace(zero3_words(), shards=2)


@case()
def dropping_attention() -> Recipe:
    return tiny("attention", Dropping, Lines, loss=speaking, batch=8, optimizer=_calm)


@case(2, steps=2)
def dropping_long() -> Recipe:
    """An epoch of some hundred samples."""
    return tiny("dropping-long", WithDropout, lambda: Points(600), batch=300, microbatch=None)


@case()
def root_rate() -> Recipe:
    return replace(mlp(), scale_rate="square_root from 3 samples")


@case(4)
def three_quarters() -> Recipe:
    """The last batch of an epoch leaves one of the ranks without work."""
    return replace(mlp(), data=lambda: Points(27), microbatch=2)


@case()
def updates_scheduled() -> Recipe:
    return replace(updates(), scheduler=cosine)


class ChannelsLast(nn.Module):
    """Weights whose memory order is not that of their dimensions: images_BCHW -> logits."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 64, 3, padding=1).to(memory_format=torch.channels_last)
        self.leave = nn.Linear(64, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.leave(self.enter(x).relu().mean((2, 3)))
        return y


class ColourImages(Points):
    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(8)
        self.x = torch.randn(len(self.y), 3, 5, 5, generator=draw)


@case()
def powersgd_channels_last() -> Recipe:
    exchange = ExchangePlan(compress="powersgd:2")
    return tiny("channels-last", ChannelsLast, ColourImages, exchange=exchange)


@case(whole=True)
def trained_own_mode() -> Recipe:
    return replace(mlp(), model=HalfFrozen, checkpoint_every=0)


def _sgd_groups(model: nn.Module) -> torch.optim.Optimizer:
    first, second = model.first.parameters(), model.second.parameters()
    return torch.optim.SGD([{"params": first}, {"params": second, "lr": 0.05}], lr=0.1)


@case(whole=True)
def trained_groups() -> Recipe:
    return replace(mlp(), optimizer=_sgd_groups)


@case()
def scaled_groups() -> Recipe:
    return replace(mlp(), optimizer=_sgd_groups, scale_rate="linear from 4 samples")


@case(3, steps=8)
def adasum_switched() -> Recipe:
    return replace(switched(reduce="adasum"), batch=6)


@case(4, steps=1)
def hierarchical_large() -> Recipe:
    """A bucket of two segments."""
    exchange = ExchangePlan(collective="hierarchical")
    return tiny("large", lambda: Mlp(70_000), exchange=exchange, optimizer=_plain_sgd)


def _plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _lars_pairs(model: nn.Module) -> torch.optim.Optimizer:
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    groups = [
        {"params": [p for layer in pair for p in layer.parameters()], "trust": trust}
        for pair, trust in ((layers[:2], 0.01), (layers[2:], 0.02))
    ]
    return LARS(groups, lr=0.5, momentum=0.9)


@case()
def lars_groups_shared() -> Recipe:
    """Each rank computes norms of layers of both groups."""
    return tiny("lars-pairs", TwoWide, optimizer=_lars_pairs)


@case()
def topk_of_halves() -> Recipe:
    return tiny(
        "halves", lambda: Mlp(256).bfloat16(), lambda: Points(dtype=torch.bfloat16),
        exchange=ExchangePlan(compress="topk:0.1"),
    )  # fmt: skip


@case()
def randomk_of_halves() -> Recipe:
    return replace(topk_of_halves(), exchange=ExchangePlan(compress="randomk:0.1"))


class Transposed(WithDropout):
    """Samples lie along the second dimension where dropout draws."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop_first(torch.tanh(self.first(x)).t()).t()
        y: torch.Tensor = self.second(x)
        return y


@case()
def dropping_transposed() -> Recipe:
    return tiny("transposed", Transposed)


class Checkpointed(WithDropout):
    """Backward makes the first part again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.utils.checkpoint.checkpoint(
            lambda z: self.drop_first(torch.tanh(self.first(z))), x, use_reentrant=False
        )
        return self.second(y)


@case()
def checkpointed() -> Recipe:
    return tiny("checkpointed", Checkpointed)


@case()
def stop_in_samples() -> Recipe:
    return replace(mlp(), stop="65 samples")


@case()
def summed_late() -> Recipe:
    return tiny("summed", exchange=ExchangePlan(reduce="sum", overlap=False))
