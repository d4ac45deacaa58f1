"""Gradient communication: how the gradients of all ranks become one sum; see the README."""
