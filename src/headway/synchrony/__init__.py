"""Who may start, what a push or a merge does, in which order: the rules of every synchrony."""
