"""The rules of `check`, by what they look at: cells, waiting, messages, updates, memory."""
