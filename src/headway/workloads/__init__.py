"""Whole training jobs to start from: each has `model.py`, `data.py` and `recipe.py`.

A workload is named by the user (`headway.workloads.transformer.recipe:demo`); nothing in the
library imports one. Its model is single-device PyTorch and its data knows nothing about ranks: what
splits them is the plan.
"""
