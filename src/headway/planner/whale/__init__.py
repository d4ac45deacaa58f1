"""Unequal devices: shares of a batch, virtual devices, and stages by memory.

Source: Jia et al. 2022 (Whale).
"""
