"""What the reference works out by code of its own.

Samples, orders, draws, amounts, rates, optimisers and exchanges are written a second time, because
what reference and run share proves nothing.
"""
