"""How long it takes to make a graph of a GPT, and to fold it.

    OMP_NUM_THREADS=1 python benchmarks/capture_models.py [layers ...]

The model is built on the meta device; nothing is allocated. The first capture of a process also
loads the tracer.
"""

from __future__ import annotations

import resource
import sys
import time

import torch

from headway.capture import capture
from headway.graph.operator_fusion import fuse_light_operators
from headway.graph.repeated_blocks import find_repeated_blocks
from headway.workloads.transformer import TransformerConfig, TransformerLM

SIZES = {12: (768, 12, 1024), 48: (1536, 24, 1024), 96: (12288, 96, 2048)}
"""Width, heads and window; 96 layers are GPT-3 175B."""


def main() -> None:
    for layers in map(int, sys.argv[1:] or ("12", "48", "96")):
        width, heads, window = SIZES[layers]
        config = TransformerConfig(
            vocabulary=51200, window=window, width=width, layers=layers, heads=heads
        )
        begin = time.perf_counter()
        with torch.device("meta"):
            model = TransformerLM(config)
            example = torch.empty(1, window, dtype=torch.int64)
        built = time.perf_counter()
        graph = capture(model, example)
        captured = time.perf_counter()
        light = fuse_light_operators(graph)
        repeated = find_repeated_blocks(light).repeated
        folded = time.perf_counter()
        elements = sum(spec.elements for spec in graph.parameters.values())
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(
            f"{layers:3} layers, {elements / 1e9:5.1f}e9 parameters: "
            f"build {built - begin:.2f} s, capture {captured - built:.2f} s "
            f"({len(graph.operators)} operators), fold {folded - captured:.2f} s "
            f"({len(light.operators)} operators, {len(repeated)} distinct block, "
            f"{sum(repeated.values())} uses); memory of the process {memory:.2f} GiB"
        )


if __name__ == "__main__":
    main()
