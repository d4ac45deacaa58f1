"""Building an exchange from a plan, and tuning it from what training measures.

Begin with `autotuning`. Every decision uses numbers that all ranks share (the slowest rank's), so
that all ranks rebuild the same exchange after the same step."""
