"""stub until merged"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Environment:
    python: Path
    variables: Mapping[str, str] = field(default_factory=dict)


def find_environment(name: str, folder: Path | None) -> Environment | str:
    if not name:
        return Environment(python=Path(sys.executable))
    return f"not installed: headway compare --install {name}"
