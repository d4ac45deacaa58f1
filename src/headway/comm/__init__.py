"""How gradients become the same on all ranks."""

from headway.comm.adapt import AdaptiveExchange
from headway.comm.exchange import GradientExchange
from headway.comm.flight import Flight
from headway.comm.routes import Routes
from headway.comm.updates import Updates

__all__ = ["AdaptiveExchange", "Flight", "GradientExchange", "Routes", "Updates"]
