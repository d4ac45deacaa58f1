"""How gradients become the same on all ranks."""

from headway.comm.exchange import GradientExchange

__all__ = ["GradientExchange"]
