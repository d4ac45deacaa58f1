"""Checkpoints by logical name: written by any number of ranks, restored by any other.

`store` is the entry (it imports torch); `format`, `save_plan`, `directory` and `convert` never
import torch, so that a checkpoint can be listed and converted in milliseconds.
"""
