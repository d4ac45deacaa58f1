"""Runs a plan: recipe, step program, strategies, training loop, world, failures.

Read `executor` first: it carries out one optimiser step. The rooms import in this direction only:
recipe and distributed, step, pipeline, strategy, executor and exchange, training, measure.
Importing a package of this folder imports no module: parts of it (launch_env, failure_record,
schema, job) must stay free of torch, because the launcher and the command line use them.
"""
