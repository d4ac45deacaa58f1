"""Runs of `headway train svm`: samples from files, a run directory, workers and their restarts.

A room of `headway.svm`, above its other modules: none of them imports it.
"""
