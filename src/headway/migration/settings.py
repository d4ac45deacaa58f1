"""What carries over: the fields of a recipe and of the command that a configuration decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from headway.plans import ExchangePlan, LayerSplit, PipelinePlan, Plan, pipelined
from headway.plans.plan import Zero


@dataclass(frozen=True, kw_only=True)
class ImportedCall:
    """A class or function with keyword arguments, as a table of recipe.toml names it."""

    call: str
    arguments: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True)
class ImportedSettings:
    """Fields of `headway.Recipe` of the same names, and of the command that trains it.

    None: the configuration says nothing.

    Attributes:
        batch: Samples of the global batch.
        processes: Of all machines.
        nodes: Machines.
        timeout: The command's longest wait for another process.
    """

    processes: int | None = None
    nodes: int = 1
    device: Literal["cpu", "cuda"] | None = None
    timeout: str | None = None
    batch: int | None = None
    microbatch: int | None = None
    stop: str | None = None
    optimizer: ImportedCall | None = None
    scheduler: ImportedCall | None = None
    clip: float | None = None
    precision: Literal["float32", "float64", "bfloat16"] | None = None
    seed: int | None = None
    workers: int | None = None
    drop_last: bool | None = None
    tokens_per_sample: int | None = None
    validate_every: int | None = None
    validation_samples: int | None = None
    checkpoint_every: int | None = None
    checkpoint_keep: int | None = None
    loggers: tuple[str, ...] = ()
    stages: int = 1
    pipeline: PipelinePlan = field(default_factory=PipelinePlan)
    zero: Zero = 0
    shards: int | None = None
    split: LayerSplit = field(default_factory=LayerSplit)
    exchange: ExchangePlan = field(default_factory=ExchangePlan)

    def plan(self) -> Plan | None:
        """The plan of these settings; None where batch or processes are not known.

        Raises:
            PlanError: There can be no such plan.
        """
        if self.batch is None or self.processes is None:
            return None
        # As `headway train` makes it of the recipe: the same plan, with the same hash.
        return pipelined(
            self.batch,
            processes=self.processes,
            stages=self.stages,
            pipeline=self.pipeline,
            microbatch=self.microbatch,
            precision=self.precision or "float32",
            exchange=self.exchange,
            zero=self.zero,
            shards=self.shards,
            split=self.split,
        )


_PARTS: Mapping[str, Any] = {
    "pipeline": PipelinePlan(),
    "split": LayerSplit(),
    "exchange": ExchangePlan(),
}
"""Fields that are tables of their own."""


def settings_of(fields: Mapping[str, Any]) -> ImportedSettings:
    """Settings of dotted fields: "zero", "exchange.compress"."""
    plain = {name: value for name, value in fields.items() if "." not in name}
    for table, default in _PARTS.items():
        inner = {
            name.partition(".")[2]: value
            for name, value in fields.items()
            if name.startswith(f"{table}.")
        }
        if inner:
            plain[table] = replace(default, **inner)
    return ImportedSettings(**plain)
