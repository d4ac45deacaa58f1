"""Where files lie that headway has made or fetched once for all runs of a user."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path


def cache_folders() -> tuple[Path, ...]:
    """Where such files may lie, the preferred place first."""
    user = f"-{os.getuid()}" if hasattr(os, "getuid") else ""
    temporary = Path(tempfile.gettempdir()) / f"headway{user}"
    try:
        home = Path.home()
    except RuntimeError:  # no home is known for this user
        return (temporary,)
    caches = {"darwin": "Library/Caches", "win32": "AppData/Local"}
    return home / caches.get(sys.platform, ".cache") / "headway", temporary
