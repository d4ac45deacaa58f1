"""Elastic training: `run`, states that are committed and restored, `ElasticSampler`."""

from headway.horovod.basics import init, shutdown
from headway.horovod.elastic.sampler import ElasticSampler
from headway.horovod.elastic.state import ObjectState, State, TorchState, run, run_fn

__all__ = [
    "ElasticSampler",
    "ObjectState",
    "State",
    "TorchState",
    "init",
    "run",
    "run_fn",
    "shutdown",
]
