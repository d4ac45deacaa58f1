"""Lanes: buckets of gradients, the process groups they travel on, the threads that send them."""
