"""Obeys a plan: recipe, step program, executor, training loop, world, failures.

Nothing is imported here: parts of this folder (place, schema, policies) must stay free of torch.
"""
