"""Strategies of annotated modules, shortly."""

from __future__ import annotations

from headway.graph.annotations import ForcedStrategy


def replicate_module(module: str, devices: int) -> ForcedStrategy:
    return ForcedStrategy(module, "replicate", devices)


def split_module(module: str, devices: int) -> ForcedStrategy:
    return ForcedStrategy(module, "split", devices)


def stage_module(module: str, devices: int = 1) -> ForcedStrategy:
    return ForcedStrategy(module, "stage", devices)
