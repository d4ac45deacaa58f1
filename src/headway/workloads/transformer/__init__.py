"""A decoder-only language model on the bytes of the Python standard library."""
