"""Frameworks side by side: adapters, timed trials, environments, and what came of them."""
