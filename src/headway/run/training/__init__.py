"""`headway train` on one rank: the training loop, its job, journal and run directory.

Begin at `loop`. `worker` is the entry point that the launcher calls on every rank."""
