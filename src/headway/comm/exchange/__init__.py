"""Gradient exchanges: from the hooks of the backward pass to summed gradients."""
