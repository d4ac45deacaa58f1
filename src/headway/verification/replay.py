"""A run with an inexact exchange made again in one process, step by step, with the same compressor.

One replica of model, optimiser and scheduler stands for each rank. In every step it computes the
gradients of its own share of the batch, which must be what the rank has put into its buckets. From
these `reference.exchanges` computes what must come out and what each rank must keep back. With what
did come out, all replicas make the update. So every link of a step is compared to rounding, and no
rounding grows from step to step: an element that is sent in one run and kept in the other because
two magnitudes differ in the last bit would otherwise make all further steps differ.

Where ranks exchange numbers in their forward passes (batch normalisation over the global batch, a
loss that gathers features, tables that are split or grow), no rank's share can be made alone. One
replica then computes the whole batch at once: its gradients must be the sum of what the ranks have
put into their buckets.

The run in the recipe's own precision is made again likewise (`VerifyJob.narrow`). Each link then
has the bound of its own rounding (`reference.rounding`): in units in the last place of its type, as
many as numbers were added, and without direction where the exchange adds them. After each step the
replicas go on from what the run has recorded, so that here, too, nothing grows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from headway.data import Cursor, RankBatch
from headway.errors import NotEqual, UsageError
from headway.plans import BatchSplit, Plan
from headway.plans.layer_split import SPACE
from headway.plans.tables import split_of
from headway.run.distributed.launch_env import LaunchEnv
from headway.run.recipe.recipe import Recipe
from headway.run.recipe.training_data import training_data
from headway.run.step.forward_pass import to_float64
from headway.run.step.randomness import RandomDraws
from headway.run.step.setup import stepped_each_step
from headway.run.strategy.growing_tables import GrowingTables
from headway.run.strategy.split_tables import table_modules
from headway.run.strategy.training_state import TrainingState
from headway.verification.exchange_recording import (
    RecordedBucket,
    RecordedExchange,
    exchange_file,
)
from headway.verification.recording import (
    Recording,
    VerifyJob,
    build_training_state,
    initial_values,
    recipe_and_plan,
)
from headway.verification.reference import rounding
from headway.verification.reference.batches import reference_batches
from headway.verification.reference.draws import initial_model
from headway.verification.reference.epochs import reference_epochs
from headway.verification.reference.exchanges import (
    SIGMAS,
    BucketInputs,
    ExpectedExchange,
    Row,
    expected_exchange,
    is_rounded,
    kept_of,
    node_residuals,
    parse_kept,
    sum_of_rows,
)
from headway.verification.serial_run import find_draws, gradients_of

SUMMED = ("/residual", "/server")
"""Endings of what has not been sent yet; all else that a compressor keeps is alike on all ranks."""
FACTOR_TOLERANCE = 1e-9
"""Of PowerSGD's results: directions of small singular values magnify rounding."""


def replay_files(target: Path) -> tuple[Path, Path]:
    """Where a replay writes what it expects, and what the run has given for it."""
    return target.with_suffix(".expected.safetensors"), target.with_suffix(".given.safetensors")


def record_replay(_: LaunchEnv, job: VerifyJob, target: Path, *, ranks: int) -> None:
    """Make the run again that was recorded as `target`, with the exchanges of all its ranks."""
    recipe, plan = recipe_and_plan(job, ranks)
    exchanges = [RecordedExchange.load(exchange_file(target, rank)) for rank in range(ranks)]
    replay = Replay(recipe, plan, job, Recording.load(target), exchanges)
    replay.run()
    save_replay(replay, target)


def save_replay(replay: Replay, target: Path) -> None:
    """Write what a replay expects beside the recording that it was made of, and what was given."""
    expected, given = replay_files(target)
    replay.expected.recording().save(expected)
    replace(replay.given.recording(), apart=replay.apart).save(given)


@dataclass
class _Notes:
    """Tensors under the keys of a recording, in the order of execution."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    bounds: dict[str, Tensor] = field(default_factory=dict)
    initial: dict[str, Tensor] = field(default_factory=dict)

    def put(self, key: str, value: Tensor | Row, bound: Row | None = None) -> None:
        tensor = value if isinstance(value, Tensor) else torch.from_numpy(value)
        self.tensors[key] = tensor.detach().clone().contiguous()
        if bound is not None:
            self.bounds[key] = torch.from_numpy(bound.copy())

    def recording(self) -> Recording:
        return Recording(self.tensors, tuple(self.tensors), self.bounds, initial=self.initial)


class Replay:
    """One replica per rank; `expected` is what it finds, `given` what the run has recorded."""

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        job: VerifyJob,
        recorded: Recording,
        exchanges: Sequence[RecordedExchange],
    ) -> None:
        self._recipe, self._plan, self._job = recipe, plan, job
        self._recorded, self._exchanges = recorded, exchanges
        self.expected, self.given = _Notes(), _Notes()
        self._updates = plan.exchange.values == "updates"
        # Ranks that hold a part of the model, or of a sample, have no gradients of a whole one.
        self._replicated = not plan.split.tensor and plan.mesh.degree(SPACE) == 1
        first = self._initial_model()
        growing = GrowingTables(first).weights
        looks_up = bool(plan.split.tables or growing)
        self._coupled = self._replicated and (recorded.coupled or looks_up)
        if self._coupled and (plan.exchange.reduce == "adasum" or self._updates):
            raise UsageError(
                "the gradients of each rank depend on the samples of the others, and Adasum "
                "combines them unequally: one process cannot tell what must come out",
                where=f"the exchange of {recipe.name}",
                fix='Verify with reduce = "mean" and values = "gradients".',
            )
        count = plan.ranks if self._replicated and not self._coupled else 1
        models = [first, *(self._initial_model() for _ in range(count - 1))]
        self._replicas = [build_training_state(recipe, m, reference=True) for m in models]
        self.expected.initial = initial_values(self._replicas[0].model)
        self._tables = {
            name for name in table_modules(first) if split_of(name, plan.split.tables) is not None
        } | growing.keys()
        self._states: list[dict[str, Tensor]] = [{} for _ in exchanges]
        # Counted here: a compressor that does not count would draw the same numbers for ever.
        self._compressed: Counter[str] = Counter()
        self._loss_size = 0.0

    def _initial_model(self) -> nn.Module:
        model = initial_model(self._recipe)
        return model if self._job.narrow else to_float64(model)

    def run(self) -> None:
        """All steps that were recorded to their end."""
        recipe, job = self._recipe, self._job
        count, made = job.count(recipe), self._recorded.complete_steps
        start = job.start(recipe, reference_epochs(recipe, training_data(recipe)).sizes_to_the_end)
        self.make_steps(start, 1, min(count, made))
        self._compare_checkpoint(min(count, made))
        if made < count and not self._recorded.ended:
            # That the run has no such step is a difference.
            self.expected.put(f"{made + 1}/loss/loss", torch.zeros((), dtype=torch.float64))

    @property
    def apart(self) -> Mapping[str, str]:
        """Of which tensors the ranks hold different numbers."""
        return self._recorded.apart

    def make_steps(self, start: Cursor, first: int, last: int) -> Cursor:
        """The steps of these numbers, from a place on; returns where they have ended."""
        recipe, split = self._recipe, self._plan.batch
        source = training_data(recipe)
        copies = self._plan.data_degree
        if self._coupled:
            split, copies = BatchSplit(samples=split.samples), 1
        batches = reference_batches(
            source,
            split,
            copies,
            start,
            steps=last - first + 1,
            drop_last=recipe.drop_last,
        )
        draws: RandomDraws | None = None
        end = start
        for step, shares in enumerate(batches, first):
            draws = draws or find_draws(recipe, self._replicas[0].model, shares)
            self._step(step, shares, draws)
            end = shares[0].after
        return end

    # -- across a checkpoint ---------------------------------------------------------------------

    def resume(self, before: Replay) -> None:
        """Begin where another replay has ended; of what its ranks have kept back each rank has an
        equal share."""
        saved = before.kept_by_all()
        last = before._replicas[0]
        for replica in self._replicas:
            replica.model.load_state_dict(last.model.state_dict())
            replica.optimizer.load_state_dict(deepcopy(last.optimizer.state_dict()))
            if replica.scheduler is not None and last.scheduler is not None:
                replica.scheduler.load_state_dict(last.scheduler.state_dict())
        self.expected.initial = initial_values(last.model)
        ranks = len(self._exchanges)
        share = {
            key: value / ranks if key.endswith(SUMMED) else value for key, value in saved.items()
        }
        self._states = [dict(share) for _ in self._exchanges]
        self._compressed = Counter(before._compressed)

    def kept_by_all(self) -> dict[str, Tensor]:
        """What compressors keep, as a checkpoint has it: residuals summed over the ranks."""
        sizes = {name: p.numel() for name, p in self._replicas[0].model.named_parameters()}
        found: dict[str, Tensor] = {}
        for state in self._states:
            for key, value in state.items():
                if not key.endswith(SUMMED):
                    found.setdefault(key, value)
                    continue
                name, _, what = key.rpartition("/")
                offset = 0
                if name not in sizes:  # a shard of the parameter, from an element on
                    name, _, number = name.rpartition("/")
                    offset = int(number)
                whole = torch.zeros(sizes[name], dtype=torch.float64)
                total = found.setdefault(f"{name}/{what}", whole)
                total[offset : offset + value.numel()] += value.double().flatten()
        return found

    def compare_saved(self, step: int, saved: Mapping[str, Tensor]) -> None:
        """Residuals in the checkpoint of a step."""
        for name, value in self.kept_by_all().items():
            key = f"{step}/residual/{name} in the checkpoint"
            self.expected.put(key, value.double().flatten())
            if name in saved:
                self.given.put(key, saved[name].double().flatten())

    def _step(self, step: int, shares: Sequence[RankBatch], draws: RandomDraws) -> None:
        samples = shares[0].samples
        micros = [[(micro, share.start) for micro in share.micros] for share in shares]
        if self._replicated:
            found = [
                gradients_of(self._recipe, replica.model, draws, own, samples)
                for replica, own in zip(self._replicas, micros, strict=True)
            ]
        else:
            together = [pair for own in micros for pair in own]
            found = [gradients_of(self._recipe, self._replicas[0].model, draws, together, samples)]
        counts = sum(count for _, count in found)
        self._loss_size = sum(abs(one) for one, _ in found) / abs(counts)
        loss = torch.tensor(sum(one for one, _ in found) / counts, dtype=torch.float64)
        self._compare(step, "loss", "loss", loss)
        scale = samples / counts
        own_samples = [sum(len(m.positions) for m, _ in own) for own in micros]
        starts = self._proposals(scale, samples, own_samples) if self._updates else []
        self._exchange(step, samples, own_samples)
        if self._updates:
            self._adopt(starts)
        else:
            # What a split model has recorded is whole, and scaled already.
            self._update(step, scale if self._replicated else 1.0)
        for replica in self._replicas:
            if (scheduler := stepped_each_step(replica.scheduler)) is not None:
                scheduler.step()
        for kind, tensors in self._replicas[0].tensors_by_kind().items():
            if kind == "gradient" and self._updates:
                continue  # those that ranks have computed: compared as what went into the exchange
            self._compare_kind(step, kind, tensors)
        if self._job.narrow:
            for replica in self._replicas:
                self._go_on_from(step, replica)

    def _go_on_from(self, step: int, replica: TrainingState) -> None:
        """Parameters and the optimiser's state as the run has recorded them."""
        kinds = replica.tensors_by_kind()
        with torch.no_grad():
            for kind in ("parameter", "optimizer"):
                for name, tensor in kinds[kind].items():
                    recorded = self._recorded.tensors.get(f"{step}/{kind}/{name}")
                    if recorded is not None and recorded.shape == tensor.shape:
                        tensor.copy_(recorded)

    # -- what a step consists of -----------------------------------------------------------------

    def _factor(self, rank: int, samples: int, own: Sequence[int]) -> float:
        """Turns the gradients of a rank's share of the mean into what it exchanges."""
        if self._plan.exchange.reduce == "sum":
            return float(self._plan.ranks)
        if self._plan.exchange.reduce == "adasum" and own[rank]:
            return samples / own[rank]
        return 1.0

    def _proposals(self, scale: float, samples: int, own: Sequence[int]) -> list[dict[str, Tensor]]:
        """Each replica steps by its own gradients; returns the common weights, and leaves the
        differences in place of gradients."""
        starts = []
        for rank, replica in enumerate(self._replicas):
            named = dict(replica.model.named_parameters())
            before = {name: p.detach().clone() for name, p in named.items() if p.grad is not None}
            for name in before:
                gradient = named[name].grad
                assert gradient is not None
                gradient.mul_(scale * self._factor(rank, samples, own))
            replica.optimizer.step()
            with torch.no_grad():
                for name, start in before.items():
                    named[name].grad = named[name].detach() - start
            starts.append(before)
        return starts

    def _adopt(self, starts: Sequence[Mapping[str, Tensor]]) -> None:
        """Every replica: the common weights plus the combined difference."""
        with torch.no_grad():
            for replica, before in zip(self._replicas, starts, strict=True):
                for name, parameter in replica.model.named_parameters():
                    if name in before:
                        parameter.copy_(before[name])
                    if parameter.grad is not None:
                        parameter.add_(parameter.grad)

    def _update(self, step: int, scale: float) -> None:
        for number, replica in enumerate(self._replicas):
            for parameter in replica.model.parameters():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.to_dense() * scale
            if self._recipe.clip is not None:
                if not number:
                    self._compare_kind(step, "unclipped", replica.tensors_by_kind()["gradient"])
                norm = nn.utils.clip_grad_norm_(replica.model.parameters(), self._recipe.clip)
                if not number:
                    self._compare(step, "norm", "norm", norm)
            replica.optimizer.step()

    def _exchange(self, step: int, samples: int, own: Sequence[int]) -> None:
        """Compare all buckets of a step, and give the replicas what came out of them."""
        seen: list[set[str]] = [set() for _ in self._exchanges]
        sums: list[dict[str, Tensor]] = [{} for _ in self._replicas]
        made = self._made()
        compressed: set[str] = set()
        for bucket in self._buckets(step):
            for rank in bucket.ranks:
                self._check_once(step, bucket, rank, seen[rank])
            outs = self._bucket(bucket, samples, own)
            if not is_rounded(bucket.compress):
                compressed |= set(bucket.names)
            if self._replicated:
                used = set().union(*(made[self._number(rank)] for rank in bucket.ranks))
                for rank, out in zip(bucket.ranks, outs, strict=True):
                    rows = {n: r for n, r in rows_by_name(bucket, out) if n in used}
                    sums[self._number(rank)] |= rows
        self._compressed.update(compressed)
        self._states = [
            state_after(before, exchange, step)
            for before, exchange in zip(self._states, self._exchanges, strict=True)
        ]
        if self._replicated:
            for replica, found in zip(self._replicas, sums, strict=True):
                for name, parameter in replica.model.named_parameters():
                    if name in self._tables:
                        continue  # in no bucket: its gradients are summed exactly, where it lies
                    row = found.get(name)
                    parameter.grad = None if row is None else as_parameter(row, parameter)
        else:
            for name, parameter in self._replicas[0].model.named_parameters():
                kind = "gradient" if self._recipe.clip is None else "unclipped"
                given = self._recorded.tensors.get(f"{step}/{kind}/{name}")
                parameter.grad = None if given is None else given.clone()

    def _number(self, rank: int) -> int:
        """Of the replica that stands for a rank."""
        return 0 if self._coupled else rank

    def _made(self) -> list[set[str]]:
        """Of each replica the parameters that have a gradient."""
        return [
            {name for name, p in replica.model.named_parameters() if p.grad is not None}
            for replica in self._replicas
        ]

    def _buckets(self, step: int) -> Iterator[RecordedBucket]:
        """Each bucket of a step once for the ranks that exchange it."""
        seen: set[tuple[tuple[int, ...], tuple[str, ...]]] = set()
        for exchange in self._exchanges:
            for bucket in exchange.buckets:
                key = bucket.ranks, bucket.names
                if bucket.step == step and key not in seen:
                    seen.add(key)
                    yield bucket

    def _check_once(self, step: int, bucket: RecordedBucket, rank: int, seen: set[str]) -> None:
        twice = seen & set(bucket.names)
        if twice:
            raise NotEqual(
                f"the gradient of {min(twice)} is exchanged twice",
                where=f"step {step}, rank {rank}",
            )
        seen |= set(bucket.names)

    def _bucket(self, bucket: RecordedBucket, samples: int, own: Sequence[int]) -> list[Tensor]:
        """Compare one bucket; returns what came out of it on each of its ranks."""
        recorded = [self._exchanges[rank].tensors for rank in bucket.ranks]
        for rank, tensors in zip(bucket.ranks, recorded, strict=True):
            if f"{bucket.key}/in" not in tensors or f"{bucket.key}/out" not in tensors:
                raise NotEqual(
                    f"rank {rank} did not exchange bucket {bucket.number} ({bucket.names[0]} ...)",
                    where=f"step {bucket.step}",
                )
        outs = [tensors[f"{bucket.key}/out"] for tensors in recorded]
        if self._replicated:
            self._check_members(bucket)
            if self._coupled:
                self._compare_sum_of_shares(bucket, samples, own)
            else:
                self._compare_shares(bucket, samples, own)
        if not all(bool(tensors[f"{bucket.key}/in"].isfinite().all()) for tensors in recorded):
            return outs  # no compressor has a law for these; the shares are wrong already
        inputs = BucketInputs(
            bucket=bucket,
            rows=[tensors[f"{bucket.key}/in"].double().numpy() for tensors in recorded],
            before=[self._states[rank] for rank in bucket.ranks],
            after=[state_of(self._exchanges[rank], bucket.step) for rank in bucket.ranks],
            seed=self._recipe.seed,
            steps=max(self._compressed[name] for name in bucket.names),
            reduce=self._plan.exchange.reduce,
            hierarchical=self._plan.exchange.collective == "hierarchical",
        )
        if self._job.narrow:
            self._compare_narrow(inputs, outs)
        else:
            self._compare_sums(inputs, expected_exchange(inputs), outs)
        return outs

    def _compare_narrow(self, inputs: BucketInputs, outs: Sequence[Tensor]) -> None:
        bucket, dtype = inputs.bucket, outs[0].dtype
        expected = rounding.expected_sums(inputs, dtype)
        if expected is not None:
            self._compare_sums(inputs, expected, outs)
            return
        total, limit = rounding.sent_and_kept(inputs, outs[0].double().numpy(), dtype)
        for rank, out in zip(bucket.ranks, outs, strict=True):
            key = f"{bucket.step}/exchange/{_named(bucket)} on rank {rank}, sent and kept"
            self.expected.put(key, total, limit)
            self.given.put(key, out)

    def _check_members(self, bucket: RecordedBucket) -> None:
        """Who exchanges a bucket, with what weight, and by which compressor, is the plan's choice.

        Raises:
            NotEqual: It is another one.
        """
        plan, exchange = self._plan, self._plan.exchange
        for name in bucket.names:
            part = exchange.part(name)
            groups = part.ranks if part and part.ranks else (tuple(range(plan.ranks)),)
            ranks = next(tuple(sorted(g)) for g in groups if bucket.ranks[0] in g)
            weight = plan.ranks / len(ranks) if exchange.reduce == "mean" else 1.0
            compress = part.compress if part and part.compress else exchange.compress
            for what, wanted, found in (
                ("ranks", ranks, bucket.ranks),
                ("weight", weight, bucket.weight),
                ("compressor", bucket.compress if compress == "auto" else compress,
                 bucket.compress),
            ):  # fmt: skip
                if wanted != found:
                    raise NotEqual(
                        f"the gradient of {name} is exchanged with {what} {found}, not {wanted}",
                        where=f"step {bucket.step}, share {name} of rank {bucket.ranks[0]}",
                    )

    # -- comparisons -----------------------------------------------------------------------------

    def _compare_kind(self, step: int, kind: str, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self._compare(step, kind, name, tensor.to_dense())

    def _compare(self, step: int, kind: str, name: str, expected: Tensor) -> None:
        """One tensor of rank 0's recording."""
        key = f"{step}/{kind}/{name}"
        value = torch.view_as_real(expected) if expected.is_complex() else expected
        self.expected.put(key, value, self._limit(step, kind, name, value))
        if key in self._recorded.tensors:
            self.given.put(key, self._recorded.tensors[key])

    def _limit(self, step: int, kind: str, name: str, value: Tensor) -> Row | None:
        """By how much a tensor may be off in the recipe's own precision."""
        if not self._job.narrow:
            return None
        before = None
        if kind == "parameter":
            earlier = self._recorded.tensors.get(f"{step - 1}/{kind}/{name}")
            before = self.expected.initial[name] if earlier is None else earlier
        model = self._replicas[0].model
        half = self._recipe.precision == "bfloat16"
        return rounding.step_bound(kind, value, before, model, half=half, loss_size=self._loss_size)

    def _compare_shares(self, bucket: RecordedBucket, samples: int, own: Sequence[int]) -> None:
        """What each rank has put in: the gradients of its own share."""
        for rank in bucket.ranks:
            named = dict(self._replicas[rank].model.named_parameters())
            factor = bucket.weight
            if not self._updates:
                factor *= self._factor(rank, samples, own)
            given = dict(rows_by_name(bucket, self._exchanges[rank].tensors[f"{bucket.key}/in"]))
            for name in bucket.names:
                parameter = named[name]
                row = _row_of(parameter, factor)
                key = f"{bucket.step}/share/{name} of rank {rank}"
                limit = None
                if self._job.narrow:
                    micros = (
                        len(self._plan.batch.microbatches(range(own[rank]))) if own[rank] else 0
                    )
                    limit = rounding.share_bound(row, named[name].dtype, micros)
                self.expected.put(key, row, limit)
                self.given.put(key, given[name])

    def _compare_sum_of_shares(
        self, bucket: RecordedBucket, samples: int, own: Sequence[int]
    ) -> None:
        """What the ranks have put in together: the gradients of the whole batch."""
        named = dict(self._replicas[0].model.named_parameters())
        given = torch.zeros(())
        for rank in bucket.ranks:
            given = given + self._exchanges[rank].tensors[f"{bucket.key}/in"]
        factor = bucket.weight * self._factor(0, samples, own)
        for name, row in rows_by_name(bucket, given):
            key = f"{bucket.step}/share/{name} of all ranks"
            self.expected.put(key, _row_of(named[name], factor))
            self.given.put(key, row)

    def _compare_sums(
        self, inputs: BucketInputs, expected: ExpectedExchange, outs: Sequence[Tensor]
    ) -> None:
        bucket = inputs.bucket
        start = f"{bucket.step}/exchange/{_named(bucket)}"
        bound = expected.bound
        kept_bound = None
        if "powersgd" in bucket.compress and not self._job.narrow:
            size = np.full_like(expected.out, np.inf if expected.free else 1.0)
            bound = kept_bound = size * FACTOR_TOLERANCE * (np.abs(expected.out).max() or 1.0)
            self._compare_feedback(inputs, outs[0], start)
        for rank, out in zip(bucket.ranks, outs, strict=True):
            self.expected.put(f"{start} on rank {rank}", expected.out, bound)
            self.given.put(f"{start} on rank {rank}", out)
        if expected.bound is not None and expected.bound.any() and not expected.directed:
            self._compare_mean(expected, outs[0], f"{start}, mean error")
        if any("node" in kept for kept in expected.kept):
            for number, row in node_residuals(inputs).items():
                key = f"{bucket.step}/residual/bucket {bucket.number} of the node of rank {number}"
                self.expected.put(key, expected.kept[number]["node"])
                self.given.put(key, row)
            return
        for rank, kept, after in zip(bucket.ranks, expected.kept, inputs.after, strict=False):
            for name, row in kept.items():
                key = f"{bucket.step}/residual/{name} of rank {rank}"
                limit = None if kept_bound is None else np.full(row.size, kept_bound.max())
                self.expected.put(key, row, limit)
                if name in after:
                    self.given.put(key, after[name].double().flatten())

    def _compare_checkpoint(self, step: int) -> None:
        """A checkpoint holds the sum of what the ranks keep back; taken up, it is that again."""
        for key in self._exchanges[0].saved:
            name, offset, what = parse_kept(key)
            if what not in ("residual", "server") or offset:
                continue
            label = f"{step}/residual/{name}/{what}"
            before = [kept_of(state, name, what) for state in self._states]
            restored = [kept_of(other.restored, name, what) for other in self._exchanges]
            expected = torch.from_numpy(sum_of_rows(before))
            self.expected.put(f"{label} in a checkpoint", expected)
            self.given.put(
                f"{label} in a checkpoint", self._exchanges[0].saved[key].double().flatten()
            )
            self.expected.put(f"{label} taken up from a checkpoint", expected)
            self.given.put(f"{label} taken up from a checkpoint", sum_of_rows(restored))

    def _compare_feedback(self, inputs: BucketInputs, out: Tensor, start: str) -> None:
        """What was sent and what is kept back are all gradients, whatever the directions."""
        total = np.sum(inputs.rows, 0)
        for states, sign in ((inputs.before, 1.0), (inputs.after, -1.0)):
            for state in states:
                for name, span, _ in inputs.spans:
                    kept = state.get(f"{name}/residual")
                    if kept is not None:
                        total[span] += sign * kept.double().flatten().numpy()
        limit = np.full_like(total, FACTOR_TOLERANCE * (np.abs(total).max() or 1.0))
        self.expected.put(f"{start}, sent and kept", total, limit)
        self.given.put(f"{start}, sent and kept", out)

    def _compare_mean(self, expected: ExpectedExchange, out: Tensor, key: str) -> None:
        """Errors of rounding have no direction: their mean stays within a few deviations."""
        assert expected.bound is not None
        apart = (out.double().numpy() - expected.out) * np.sign(expected.out)
        # An error that is uniform within its bound has a variance of a third of its square.
        spread = float(np.sqrt((expected.bound**2 / 3).sum())) or 1.0
        self.expected.put(key, torch.zeros((), dtype=torch.float64), np.array(SIGMAS))
        self.given.put(key, torch.tensor(float(apart.sum()) / spread, dtype=torch.float64))


def state_of(exchange: RecordedExchange, step: int) -> dict[str, Tensor]:
    """What a rank's compressors keep after a step, of all its buckets."""
    found: dict[str, Tensor] = {}
    for bucket in exchange.buckets:
        if bucket.step == step:
            found |= exchange.state(bucket)
    return found


def state_after(
    before: Mapping[str, Tensor], exchange: RecordedExchange, step: int
) -> dict[str, Tensor]:
    """The same with that of earlier steps, where a parameter had no part in this one."""
    names = {name for b in exchange.buckets if b.step == step for name in b.names}
    left = {key: value for key, value in before.items() if parse_kept(key)[0] not in names}
    return left | state_of(exchange, step)


def rows_by_name(bucket: RecordedBucket, row: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Each parameter of a bucket with its part of a row."""
    start = 0
    for name, shape in zip(bucket.names, bucket.shapes, strict=True):
        size = int(np.prod(shape))
        yield name, row[start : start + size]
        start += size


def _named(bucket: RecordedBucket) -> str:
    return f"bucket {bucket.number} ({bucket.names[0]} ...)"


def _memory_order(parameter: Tensor) -> list[int]:
    return sorted(range(parameter.ndim), key=parameter.stride, reverse=True)


def _row_of(parameter: nn.Parameter, factor: float) -> Tensor:
    """A parameter's gradient times a factor, in the order of the parameter's memory."""
    if parameter.grad is None:
        return torch.zeros(parameter.numel(), dtype=torch.float64)
    dense = parameter.grad.to_dense() * factor
    return dense.permute(_memory_order(parameter)).reshape(-1)


def memory_row(tensor: Tensor) -> Tensor:
    """A tensor in the order of its memory."""
    return tensor.permute(_memory_order(tensor)).reshape(-1)


def as_parameter(row: Tensor, parameter: Tensor) -> Tensor:
    """A row in the shape and memory order of a parameter."""
    order = _memory_order(parameter)
    shaped = row.view([parameter.shape[dim] for dim in order])
    return shaped.permute([order.index(dim) for dim in range(parameter.ndim)]).clone(
        memory_format=torch.preserve_format
    )
