"""The formats by name, which one a file has, and its translation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from headway.errors import UsageError
from headway.migration import accelerate, deepspeed, torchtitan
from headway.migration.configuration_file import ConfigurationFile, read_configuration
from headway.migration.key_table import KeyTable
from headway.migration.translation import TranslatedConfiguration, Translation


class ConfigurationFormat(NamedTuple):
    """A format: its keys, and what translates them."""

    table: KeyTable
    translate: Callable[[Translation, int | None, int | None], None]


FORMATS: Mapping[str, ConfigurationFormat] = MappingProxyType(
    {
        "deepspeed": ConfigurationFormat(deepspeed.TABLE, deepspeed.translate),
        "accelerate": ConfigurationFormat(accelerate.TABLE, accelerate.translate),
        "torchtitan": ConfigurationFormat(torchtitan.TABLE, torchtitan.translate),
    }
)


@dataclass(frozen=True, kw_only=True)
class ImportRequest:
    """What the user says beside the file.

    Attributes:
        format: Of `FORMATS`; None: as the file's keys say.
        processes: Of the whole job.
        batch: Samples of the global batch.
    """

    format: str | None = None
    processes: int | None = None
    batch: int | None = None


def translate_file(path: Path, request: ImportRequest) -> TranslatedConfiguration:
    """Translate a configuration.

    Raises:
        DocumentError: The file cannot be read, or has problems; all are listed.
        UsageError: No format is recognised, or a number is not positive.
        MissingExtra: It is YAML, and PyYAML is not installed.
    """
    for option, number in (("--processes", request.processes), ("--batch", request.batch)):
        if number is not None and number < 1:
            raise UsageError(f"{option} {number}: give at least 1")
    file = read_configuration(path)
    table, translate = FORMATS[request.format or format_of(file)]
    work = Translation(file, table)
    if request.processes is not None:
        work.fields["processes"] = request.processes
    translate(work, request.processes, request.batch)
    return work.finish()


def format_of(file: ConfigurationFile) -> str:
    """The format that most of a file's keys at the top belong to.

    Raises:
        UsageError: They belong to none.
    """
    shares = {name: found.table.share(file.data) for name, found in FORMATS.items()}
    best = max(shares, key=lambda name: shares[name])
    if not shares[best]:
        titles = ", ".join(found.table.title for found in FORMATS.values())
        raise UsageError(
            f"no key at the top is one of {titles}",
            where=str(file.path),
            why=f"It has {', '.join(list(file.data)[:5]) or 'no keys'}.",
            fix=f"Say which it is: --from {'|'.join(FORMATS)}",
        )
    return best
