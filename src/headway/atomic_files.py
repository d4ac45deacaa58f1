"""Small files that other processes read: whole or absent, also where the writer is killed."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write a file aside and rename it; text as UTF-8.

    Raises:
        OSError: There is no such folder, or no space.
    """
    # Hidden, because readers look for names by patterns; by process, because two may write one.
    aside = path.with_name(f".{path.name}-{os.getpid()}")
    aside.write_bytes(content.encode() if isinstance(content, str) else content)
    aside.replace(path)
