"""What the tests share: worlds of ranks, golden files, small models, checks against leaks."""
