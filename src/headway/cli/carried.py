"""`headway train --collective NAME`: which program carries the sums of gradients.

What needs a network is found here, from a description of it, and goes into the plan; a resumed run
keeps what its plan says. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from headway.cli.console import note
from headway.collective.carrier import CARRIED, Carrier
from headway.errors import UsageError
from headway.plan import Exchange, Plan, carried_by
from headway.plan.exchange import Collective
from headway.run.directory import RunDirectory
from headway.units import format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    from headway.planner.carried import Carrying

Name = Literal["auto"] | Collective
BUCKET, CHUNK = "8 MiB", "1 MiB"
"""Of an exchange that fits them to the link, before anything is measured."""


@dataclass(frozen=True, kw_only=True)
class Carried:
    """What the command line asks for.

    Attributes:
        name: Of a collective, or "auto"; None: nothing.
        cluster: A cluster.toml, or a preset; None: not given.
        emulate: The cluster.toml of an emulated job.
    """

    name: Name | None
    cluster: str | None
    emulate: Path | None

    def find(
        self, run: RunDirectory, known: Plan | None, ranks: int, *, resume: bool, told: bool
    ) -> tuple[Collective | None, Carrier | None]:
        """What the exchange of the plan becomes; None: it stays what it is.

        Args:
            run: Holds the measured cluster, and the plan of a run that goes on.
            known: The plan, if it can be known here.
            ranks: Of the job.
            resume: The run goes on.
            told: Say what was found.

        Raises:
            UsageError: Nothing says what the network is, or it has another number of ranks.
            PlanError: No such program there; or it does not go with the plan.
        """
        if self.name is None:
            return _kept(run, known, ranks, told=told) if resume else (None, None)
        if ranks == 1 or (self.name == "auto" and known and known.exchange_degree == 1):
            if told:
                note(f"collective {self.name}: this plan has no exchange that it could carry")
            return None, None
        collective, carrier = self._found(self.name, run, known, ranks, told=told)
        if known is not None:
            carried_by(known, collective, carrier)
        return collective, carrier

    def _found(
        self, name: Name, run: RunDirectory, known: Plan | None, ranks: int, *, told: bool
    ) -> tuple[Collective, Carrier | None]:
        network = self._network(run)
        own = name in ("all_reduce", "hierarchical")
        if name != "auto" and (own or (network is None and name != "trees")):
            return name, None
        if network is None:
            raise UsageError(
                f"--collective {name} needs to know the links between the ranks",
                fix="Add --cluster FILE|PRESET (`headway cluster measure` writes such a file), or "
                "--emulate FILE; or name one that needs none: ring, direct, halving-doubling, "
                "servers.",
            )
        from headway.planner.carried import find_carrier
        from headway.planner.programs import wires_of

        wires = wires_of(network)
        if wires.ranks != ranks:
            raise UsageError(
                f"--collective {name}: {network} has {wires.ranks} ranks, the job {ranks}",
                fix="Start as many processes, or describe the nodes on which the job runs.",
            )
        size = _message(known.exchange if known else Exchange())
        carrying = find_carrier(name, wires, size)
        if told:
            for sentence in sentences(name, carrying, size):
                note(sentence)
        return carrying.collective, carrying.carrier

    def _network(self, run: RunDirectory) -> str | None:
        """What describes it; the measured cluster is that of --plan auto."""
        if self.cluster is not None or self.emulate is not None:
            return self.cluster or str(self.emulate)
        measured = run.path / "cluster.toml"
        return str(measured) if measured.is_file() else None


def _kept(
    run: RunDirectory, known: Plan | None, ranks: int, *, told: bool
) -> tuple[Collective | None, Carrier | None]:
    """The program of a run that goes on, where it goes on with as many ranks."""
    if not run.plan_file.exists() or (known and known.exchange.carried):
        return None, None
    before = Plan.load(run.plan_file)
    exchange = before.exchange
    if not exchange.carried:
        return None, None
    if before.ranks != ranks:
        if told:
            note(
                f"collective: the program {exchange.collective} of the run was for {before.ranks} "
                f"ranks, and there are {ranks}: without it; --collective finds another"
            )
        return None, None
    if told:
        note(f"collective: {exchange.collective}, as before")
    return exchange.collective, exchange.carrier


def _message(exchange: Exchange) -> int:
    """Bytes of the sums that programs carry one by one."""
    if exchange.priority:
        return exchange.chunk_bytes or parse_bytes(CHUNK)
    return exchange.bucket_bytes or parse_bytes(BUCKET)


def sentences(name: str, carrying: Carrying, size: int) -> Iterator[str]:
    """What was chosen, how near to the bound, and what the next best takes."""
    chosen = carrying.chosen
    what = f"{chosen.name} ({text})" if (text := str(carrying.carrier or "")) else chosen.name
    if carrying.collective not in CARRIED:
        what = f"{what}, which is the exchange's own {carrying.collective}"
    yield (
        f"collective {name}: {what}: {format_bytes(size)} in {format_seconds(chosen.seconds)} "
        f"predicted, {chosen.share:.0%} of the bound"
    )
    for other in carrying.others[:1]:
        yield (
            f"collective {name}: next best: {other.name}, {format_seconds(other.seconds)} "
            f"({other.seconds / chosen.seconds - 1:+.0%})"
        )
