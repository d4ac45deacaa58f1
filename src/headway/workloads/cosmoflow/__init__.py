"""Cosmological parameters from the distribution of matter: a 3-D convolutional regression."""
