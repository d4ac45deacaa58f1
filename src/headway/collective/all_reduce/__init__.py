"""Which algorithm performs a gradient all-reduce, and how it changes when links change."""
