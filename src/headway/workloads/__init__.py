"""Whole training jobs to start from, one module each: `headway train resnet`.

Nothing in the library imports one. Its model is single-device PyTorch and its data knows nothing
about ranks: what splits them is the plan.
"""
