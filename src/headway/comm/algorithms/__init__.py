"""Exchange methods: how one bucket becomes the same on all ranks of a route."""
