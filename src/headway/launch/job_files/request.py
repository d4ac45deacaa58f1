"""What a job on several machines is to run, and on how many of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

NAME_CHARACTERS = 40
"""Of a Kubernetes name 63 are legal; the numbers of pods are added to it."""


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """A recipe as a job of a cluster.

    Attributes:
        recipe: As for `headway train`.
        nodes: Machines.
        processes: On each machine.
        gpus: Whether each process has a GPU.
        directory: The run directory, absolute, on a file system that all machines share.
        plan: A plan.json as the machines see it.
        overrides: "key=value" changes to the recipe.
    """

    recipe: str
    nodes: int
    processes: int
    gpus: bool
    directory: PurePosixPath
    plan: str | None = None
    overrides: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Of the job: the run directory's, as all clusters accept it (RFC 1123)."""
        plain = re.sub(r"[^a-z0-9]+", "-", self.directory.name.lower())[:NAME_CHARACTERS]
        plain = plain.strip("-")
        return plain if plain[:1].isalpha() else f"run-{plain}".rstrip("-")

    @property
    def train_words(self) -> tuple[str, ...]:
        """The arguments of `headway`; resumes whatever the directory holds."""
        plan = () if self.plan is None else ("--plan", self.plan)
        changes = tuple(word for change in self.overrides for word in ("--set", change))
        place = ("--directory", str(self.directory), "--resume")
        return ("train", self.recipe, *place, *plan, *changes)
