"""Workers that do not agree at every step: programs of `headway.synchrony`, as processes."""
