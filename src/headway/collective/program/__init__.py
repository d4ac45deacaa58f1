"""Collectives as data: the task, the program that performs it, and the proof that it does."""
