"""Measurements and dry runs for the planner: cluster, model, and communication.

Everything here runs the code of the executor (`dry run`: on fake tensors) to obtain data that the
planner, which is free of torch, takes as input."""
