"""Building an exchange from a plan, and tuning it from what training measures."""
