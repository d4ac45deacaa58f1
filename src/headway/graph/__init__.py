"""The model as data: operators, what may be split, what it costs, repeated blocks, cuts."""
