"""What a plan will do, played: timelines of steps that were never run."""

from headway.simulator.exchange import simulate_exchange

__all__ = ["simulate_exchange"]
