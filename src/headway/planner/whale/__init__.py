"""Unequal devices: virtual devices, uneven splits, stages by memory, and the user's annotations."""
