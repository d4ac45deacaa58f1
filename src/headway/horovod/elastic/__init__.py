"""Elastic training: `run`, states that are committed and restored, `ElasticSampler`."""

from headway.horovod.elastic.sampler import ElasticSampler
from headway.horovod.elastic.state import ObjectState, State, TorchState, run

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
