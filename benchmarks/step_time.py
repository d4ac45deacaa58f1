"""Step time of `headway train` against a minimal DDP loop: same model, batch and processes.

python benchmarks/step_time.py [pairs]
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from pairs import torchrun

COUNT = int(sys.argv[1]) if len(sys.argv) > 1 else 60
TARGET = 1.03

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torchrun("step_pairs.py", folder, str(COUNT))
        pairs = json.loads((Path(folder) / "pairs.json").read_text())
    ratios = sorted(ours / peer for ours, peer in pairs)
    ours, peer = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"step time, 10 M parameters, 2 processes, {COUNT} pairs, {time.strftime('%Y-%m-%d')}")
    print(f"  headway train {ours:.4f} s, DDP loop {peer:.4f} s   load {os.getloadavg()[0]:.1f}")
    quarter = len(ratios) // 4
    print(
        f"  median ratio {statistics.median(ratios):.3f} (target at most {TARGET}), "
        f"middle half {ratios[quarter]:.3f} to {ratios[-quarter - 1]:.3f}"
    )
