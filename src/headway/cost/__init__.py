"""What a plan costs, predicted: seconds and bytes of its parts."""

from headway.cost.exchange import ExchangePrice, price_exchange

__all__ = ["ExchangePrice", "price_exchange"]
