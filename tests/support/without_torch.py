"""Makes `import torch` fail, as on a machine that does not have it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Block(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "torch" or name.startswith("torch."):
            raise ImportError("torch is blocked: this belongs to the pure plane")
        return None


@contextmanager
def without_torch() -> Iterator[None]:
    """Within this context torch cannot be imported; modules that hold it already keep it."""
    loaded = {n: m for n, m in sys.modules.items() if n == "torch" or n.startswith("torch.")}
    for name in loaded:
        del sys.modules[name]
    block = _Block()
    sys.meta_path.insert(0, block)
    try:
        yield
    finally:
        sys.meta_path.remove(block)
        sys.modules.update(loaded)
