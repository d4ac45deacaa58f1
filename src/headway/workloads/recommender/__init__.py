"""What the recommender workloads share: data sets, and the recipe around a model.

Everything is single-device PyTorch; nothing here knows about ranks.
"""
